//! The mixture of experts with experts of a GGUF file, or quantised as they were read, by kernels of our own.

use super::weights::gate_weight;
use crate::config::MoeConfig;
use crate::cuda::moe::{self, packed_tokens, parts_of, Moe, Weight};
use crate::cuda::quantized::Packed;
use crate::formats::{Blocks, ExpertBlocks, Matrix, Source};
use candle_core::{Result, Tensor};
use candle_gdn::plumbing::Launch;

#[derive(Debug)]
pub(crate) struct PackedMoe {
    /// `[parts, experts, hidden]` ([`parts_of`]); where there is a shared expert a row more, its gate.
    router: Tensor,
    routed: Pair,
    shared: Option<Pair>,
    cfg: MoeConfig,
    hidden: usize,
}

/// Of the experts, or of the shared one.
#[derive(Debug)]
struct Pair {
    /// Per expert the gate's rows and up's, of which 8 alternate.
    gate_up: Packed,
    down: Packed,
}

/// Tokens up to which the packed experts are multiplied with a few tokens at a time; more are worth making 16-bit numbers of all
/// experts. Of 256 experts, 8 a token, 16 tokens choose 102, so that 256 tokens read 6.4 times all of them, in half a byte a number
/// each; those numbers are written and read once, in two bytes.
const PACKED: usize = 256;

/// Tokens at a time for those: the kernels keep a row of each token and expert.
const AT_ONCE: usize = 8192;

impl PackedMoe {
    /// `source` is at `..mlp`; `None` where the kernels do not take experts of these sizes or types.
    pub(crate) fn load(
        cfg: &MoeConfig,
        hidden: usize,
        source: &Source,
        experts: &ExpertBlocks,
    ) -> Result<Option<Self>> {
        let (device, inner, shared_inner) = (source.device(), cfg.intermediate_size, cfg.shared_intermediate_size);
        let takes = moe::takes(source.dtype(), hidden, cfg.num_experts, cfg.experts_per_token, [inner, shared_inner]);
        let [gate_up] = experts.gate_up.as_slice() else { return Ok(None) };
        if !device.is_cuda() || !takes || packed_tokens(hidden) == 0 {
            return Ok(None);
        }
        let pair = |gate_up: &Blocks, down: &Blocks, inner: usize| -> Result<Option<Pair>> {
            let Some(gate_up) = gate_up.packed_pairs(inner, device)? else { return Ok(None) };
            Ok(down.packed(device)?.map(|down| Pair { gate_up, down }))
        };
        let mut router = gate_weight(cfg.num_experts, hidden, source.pp("gate").dense())?;
        let mut shared = None;
        if shared_inner > 0 {
            let source_of = source.pp("shared_expert");
            let get = |name: &str, rows: usize, columns: usize| source_of.pp(name).matrix(rows, columns, "weight");
            let blocks = |matrix: Matrix| match matrix {
                Matrix::Blocks(blocks) => Some(blocks),
                _ => None,
            };
            let gate_up = [get("gate_proj", shared_inner, hidden)?, get("up_proj", shared_inner, hidden)?].map(blocks);
            let [Some(gate), Some(up)] = gate_up else { return Ok(None) };
            let (both, down) = (Blocks::stack(vec![gate, up]), blocks(get("down_proj", hidden, shared_inner)?));
            let ([both], Some(down)) = (both.as_slice(), down) else { return Ok(None) };
            shared = pair(both, &down, shared_inner)?;
            if shared.is_none() {
                return Ok(None);
            }
            let gate = gate_weight(1, hidden, source.pp("shared_expert_gate").dense())?;
            router = Tensor::cat(&[router, gate], 0)?;
        }
        let Some(routed) = pair(gate_up, &experts.down, inner)? else { return Ok(None) };
        Ok(Some(Self { router: parts_of(&router)?, routed, shared, cfg: cfg.clone(), hidden }))
    }

    /// `x [.., hidden]` to the same; nothing is asked of the host.
    pub(crate) fn forward(&self, x: &Tensor, launch: &Launch) -> Result<Tensor> {
        let flat = x.reshape(((), self.hidden))?;
        let tokens = flat.dim(0)?;
        let y = if tokens <= PACKED {
            let (routed, shared) = (self.routed.weights(), self.shared.as_ref().map(Pair::weights));
            self.pieces(&flat, packed_tokens(self.hidden), routed, shared, launch)?
        } else {
            let dense =
                |pair: &Pair| Result::<[Tensor; 2]>::Ok([pair.gate_up.dense(x.dtype())?, pair.down.dense(x.dtype())?]);
            let (routed, shared) = (dense(&self.routed)?, self.shared.as_ref().map(dense).transpose()?);
            self.pieces(&flat, AT_ONCE, dense_weights(&routed), shared.as_ref().map(dense_weights), launch)?
        };
        y.reshape(x.dims())
    }

    /// So many tokens at a time.
    fn pieces(
        &self,
        x: &Tensor,
        at_once: usize,
        [gate_up, down]: [Weight<'_>; 2],
        shared: Option<[Weight<'_>; 2]>,
        launch: &Launch,
    ) -> Result<Tensor> {
        let MoeConfig { num_experts: experts, experts_per_token: top_k, norm_topk_prob: normalise, .. } = self.cfg;
        let layer = Moe { router: &self.router, gate_up, down, shared, experts, top_k, normalise };
        let tokens = x.dim(0)?;
        if tokens <= at_once {
            return moe::forward(x, &layer, launch);
        }
        let parts = (0..tokens).step_by(at_once);
        let parts = parts.map(|first| moe::forward(&x.narrow(0, first, at_once.min(tokens - first))?, &layer, launch));
        Tensor::cat(&parts.collect::<Result<Vec<_>>>()?, 0)
    }
}

impl Pair {
    fn weights(&self) -> [Weight<'_>; 2] {
        [Weight::Packed(&self.gate_up), Weight::Packed(&self.down)]
    }
}

fn dense_weights([gate_up, down]: &[Tensor; 2]) -> [Weight<'_>; 2] {
    [Weight::Dense(gate_up), Weight::Dense(down)]
}
