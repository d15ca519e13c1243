//! Sparse mixture of experts with a shared expert.

mod chosen;

pub use chosen::experts_chosen;

use super::mlp::Mlp;
use super::routing::Routing;
use crate::config::MoeConfig;
use crate::formats::{dense_experts, place, Blocks, ExpertBlocks, ExpertShape, Source, StoredExperts};
use crate::weights::cpu::experts::{softmax, Shares};
use crate::weights::cpu::swiglu::{swiglu, MlpRows, Mlps};
#[cfg(feature = "cuda")]
use crate::weights::cuda::experts::{self as kernels, bf16_terms, Moe};
use crate::weights::grouped::{self, chosen_experts};
use crate::weights::{plan, Weight};
use candle_core::{bail, DType, Result, Tensor};
use candle_gdn_core::cpu::matmul::products;
use candle_gdn_core::cpu::matmul::Weights;
use candle_gdn_core::{host, Launch};
use std::sync::Arc;

/// Router, routed experts, and the shared expert where there is one.
#[derive(Debug)]
pub(crate) struct SparseMoe {
    router: Router,
    experts: Experts,
    /// An MLP for every token, scaled by a sigmoid.
    shared: Option<Mlp>,
    /// The same where nothing scales it.
    ungated: Option<Mlp>,
    /// Without the ungated expert.
    cfg: MoeConfig,
    hidden: usize,
}

/// The router's rows and, where there is a shared expert, one more for its gate, for the kernels that multiply the experts.
#[derive(Debug)]
enum Router {
    /// On the CPU: all experts of all tokens in two parallel products.
    Cpu(Arc<Weights>),
    /// On CUDA: our kernels, routing and all. Terms in bf16 ([`bf16_terms`]).
    #[cfg(feature = "cuda")]
    Cuda(Tensor),
    /// In f32, on any device: candle's kernels.
    General(Weight),
}

#[derive(Debug)]
enum Experts {
    /// The rows of all experts one below the other, per expert the gate's, then up's.
    Stacked(Mlp),
    /// Each on its own: ggml's types on the CPU, and on CUDA those that no kernel indexes.
    Each(Vec<Mlp>),
}

impl SparseMoe {
    /// `source` is at `..mlp`. The experts stay as they are stored if all of them and the shared expert can.
    pub(crate) fn load(cfg: &MoeConfig, hidden: usize, source: &Source) -> Result<Self> {
        let shape = ExpertShape { experts: cfg.num_experts, intermediate: cfg.intermediate_size, hidden };
        // Which experts a token is routed to should not depend on the dtype of the model.
        let gate = |name: &str, rows: usize| {
            let vb = source.pp(name).dense;
            vb.get_with_hints_dtype((rows, hidden), "weight", Default::default(), DType::F32)
        };
        let mut router = gate("gate", cfg.num_experts)?;
        let (ungated_size, cfg) = match cfg.shared_gate {
            true => (0, cfg.clone()),
            false => (cfg.shared_intermediate_size, MoeConfig { shared_intermediate_size: 0, ..cfg.clone() }),
        };
        let (shared_size, cfg) = (cfg.shared_intermediate_size, &cfg);
        // In a GGUF file the tensors themselves are refused, which nobody reads.
        if shared_size + ungated_size == 0
            && !source.is_one_file
            && source.pp("shared_expert.gate_proj").contains("weight")
        {
            let name = source.name("shared_expert.gate_proj.weight");
            bail!("config: `shared_expert_intermediate_size`: expected the rows of tensor {name}, got none or 0")
        }
        if shared_size > 0 {
            router = Tensor::cat(&[router, gate("shared_expert_gate", 1)?], 0)?;
        }
        let load_sized = |source: &Source, size: usize| match size {
            0 => Ok(None),
            size => Mlp::load(hidden, size, &source.pp("shared_expert")).map(Some),
        };
        let load_shared = |source: &Source| load_sized(source, shared_size);
        let supported = source.device().is_cuda() && plan::experts_supported(cfg, hidden, source.dense.dtype());
        let dense = || -> Result<(bool, Experts, Option<Mlp>)> {
            let source = source.all_dense();
            let [gate_up, down] = dense_experts(shape, &source.pp("experts").dense)?.map(stacked);
            let experts = Experts::Stacked(Mlp { gate_up: gate_up?, down: down? });
            Ok((!source.device().is_cpu() && !supported, experts, load_shared(&source)?))
        };
        let (general, experts, shared) = match source.pp("experts").experts(shape)? {
            Some(StoredExperts::Blocks(blocks)) => {
                #[cfg(feature = "cuda")]
                let packed = if supported { packed_experts(cfg, hidden, source, &blocks)? } else { None };
                #[cfg(not(feature = "cuda"))]
                let packed: Option<(Mlp, Option<Mlp>)> = None;
                match packed {
                    Some((experts, shared)) => (false, Experts::Stacked(experts), shared),
                    None => (true, Experts::of_blocks(&blocks, shape, source)?, load_shared(source)?),
                }
            }
            Some(StoredExperts::E4m3([gate_up, down])) if supported => {
                let shared = load_shared(source)?;
                let is_e4m3 = |mlp: &Mlp| mlp.weights().iter().all(|weight| matches!(weight, Weight::E4m3(_)));
                match shared.as_ref().is_none_or(is_e4m3) {
                    true => {
                        let experts = Mlp { gate_up: Weight::E4m3(gate_up), down: Weight::E4m3(down) };
                        (false, Experts::Stacked(experts), shared)
                    }
                    false => dense()?,
                }
            }
            _ => dense()?,
        };
        let router = match general {
            true => Router::General(Weight::dense(router)?),
            #[cfg(feature = "cuda")]
            false if source.device().is_cuda() => Router::Cuda(bf16_terms(&router)?),
            false => Router::Cpu(Arc::new(host::pack(&router)?)),
        };
        Ok(Self { router, experts, shared, ungated: load_sized(source, ungated_size)?, cfg: cfg.clone(), hidden })
    }

    /// Whether candle's kernels on CUDA multiply some of it.
    pub(crate) fn uses_candle(&self) -> bool {
        let experts = match &self.experts {
            Experts::Stacked(experts) => experts.uses_candle(),
            Experts::Each(_) => true,
        };
        experts || self.shared.iter().chain(&self.ungated).any(Mlp::uses_candle)
    }

    /// `x [.., hidden]` to the same.
    pub(crate) fn forward(&self, x: &Tensor, launch: &Launch) -> Result<Tensor> {
        let flat = x.reshape(((), self.hidden))?;
        self.count_chosen(&flat)?;
        let y = match (&self.router, &self.experts) {
            (Router::Cpu(router), Experts::Stacked(experts)) => {
                let (experts, shared) = (experts.panels(), self.shared.as_ref().and_then(Mlp::panels));
                let Some(experts) = experts else { bail!("experts: expected them packed for the CPU") };
                host::tensor(host::with_f32(&flat, |x| self.on_cpu(x, router, experts, shared))?, x.dims(), x.dtype())?
            }
            #[cfg(feature = "cuda")]
            (Router::Cuda(router), Experts::Stacked(experts)) => self.on_cuda(&flat, router, experts, launch)?,
            (Router::General(router), _) => self.general(&flat, router, launch)?.to_dtype(x.dtype())?,
            (router, experts) => bail!("experts: no kernels for {router:?} and {experts:?}"),
        };
        let y = match &self.ungated {
            Some(mlp) => (y + mlp.forward(&flat, launch)?)?,
            None => y,
        };
        y.reshape(x.dims())
    }

    /// `x [tokens, hidden]` to the same.
    fn on_cpu(&self, x: &[f32], router: &Weights, experts: Mlps<'_>, shared: Option<Mlps<'_>>) -> Vec<f32> {
        let (n, hidden) = (self.cfg.num_experts, self.hidden);
        let [scores] = products(x, [router]);
        let stride = router.outputs();
        let routing = Routing::top_k(&softmax(&scores, stride, n), &self.cfg);

        let mut expert_outs = vec![0f32; routing.token_of_row.len() * hidden];
        let mut shared_out = vec![0f32; if shared.is_some() { x.len() } else { 0 }];
        // Rows sorted by expert: each expert writes one contiguous range.
        let mut calls = Vec::with_capacity(n.min(routing.token_of_row.len()) + 1);
        let mut rest = expert_outs.as_mut_slice();
        for (index, range) in routing.ranges.iter().cloned() {
            let (out, tail) = rest.split_at_mut(range.len() * hidden);
            rest = tail;
            calls.push(MlpRows { mlps: experts, index, rows: Some(&routing.token_of_row[range]), out });
        }
        if let Some(mlps) = shared {
            calls.push(MlpRows { mlps, index: 0, rows: None, out: &mut shared_out });
        }
        swiglu(x, &mut calls);

        let mut out = vec![0f32; x.len()];
        let shared = shared.map(|_| Shares { out: &shared_out, gates: &scores[n..], stride });
        routing.combine(&expert_outs, shared, hidden).run(&mut out);
        out
    }

    /// The same on a device, any number of tokens, and nothing is asked of the host.
    #[cfg(feature = "cuda")]
    fn on_cuda(&self, x: &Tensor, router: &Tensor, experts: &Mlp, launch: &Launch) -> Result<Tensor> {
        let tokens = x.dim(0)?;
        let mut at_once = plan::EXPERT_TOKENS;
        let mut dense = None;
        if matches!(experts.down, Weight::Packed(_)) {
            match plan::packed_experts(tokens, self.hidden) {
                Some(few) => at_once = few,
                None => dense = Some((unpacked(experts, x.dtype())?, self.shared.as_ref())),
            }
        }
        let (experts, shared) = match dense {
            Some((experts, shared)) => (experts, shared.map(|mlp| unpacked(mlp, x.dtype())).transpose()?),
            None => (experts.clone(), self.shared.clone()),
        };
        let layer = Moe {
            router,
            gate_up: &experts.gate_up,
            down: &experts.down,
            shared: shared.as_ref().map(Mlp::weights),
            experts: self.cfg.num_experts,
            top_k: self.cfg.experts_per_token,
            normalise: self.cfg.norm_topk_prob,
        };
        if tokens <= at_once {
            return kernels::forward(x, &layer, launch);
        }
        let pass = |first| kernels::forward(&x.narrow(0, first, at_once.min(tokens - first))?, &layer, launch);
        Tensor::cat(&(0..tokens).step_by(at_once).map(pass).collect::<Result<Vec<_>>>()?, 0)
    }

    /// The same by candle's kernels, in f32. Where an expert's rows can be indexed on the device, nothing is asked of the
    /// host; for more tokens of dense experts than [`plan::GATHERED_TOKENS`] the host routes, so that each expert runs once.
    fn general(&self, x: &Tensor, router: &Weight, launch: &Launch) -> Result<Tensor> {
        let (n, k) = (self.cfg.num_experts, self.cfg.experts_per_token);
        let x32 = x.to_dtype(DType::F32)?.contiguous()?;
        let scores = router.multiply(&x32, &Launch::default())?;
        let p = candle_nn::ops::softmax_last_dim(&scores.narrow(1, 0, n)?.contiguous()?)?;
        let y = match &self.experts {
            Experts::Stacked(experts) if self.is_chosen_on_device(x.dim(0)?) => {
                let chosen = p.arg_sort_last_dim(false)?.narrow(1, 0, k)?.contiguous()?;
                let mut weights = p.gather(&chosen, 1)?;
                if self.cfg.norm_topk_prob {
                    weights = weights.broadcast_div(&weights.sum_keepdim(1)?)?;
                }
                let x = if matches!(experts.down, Weight::Dense(_)) { x } else { &x32 };
                chosen_experts(experts.weights(), n, x, &chosen, &weights)?
            }
            Experts::Stacked(_) => self.routed(x, &p)?,
            Experts::Each(_) => self.routed(&x32, &p)?,
        };
        let Some(shared) = &self.shared else { return Ok(y) };
        let gate = candle_nn::ops::sigmoid(&scores.narrow(1, n, 1)?.contiguous()?)?;
        y + shared.forward(x, launch)?.to_dtype(DType::F32)?.broadcast_mul(&gate)?
    }

    fn is_chosen_on_device(&self, tokens: usize) -> bool {
        match &self.experts {
            Experts::Stacked(experts) => !matches!(experts.down, Weight::Dense(_)) || tokens <= plan::GATHERED_TOKENS,
            Experts::Each(_) => false,
        }
    }

    /// `x [tokens, hidden]` to the weighted sum of each token's experts in f32, from the router's probabilities `p [tokens,
    /// experts]`, which the host reads.
    fn routed(&self, x: &Tensor, p: &Tensor) -> Result<Tensor> {
        let routing = Routing::top_k(&p.flatten_all()?.to_vec1::<f32>()?, &self.cfg);
        let (device, (tokens, hidden), k) = (x.device(), x.dims2()?, routing.experts_per_token);
        let index = |rows: &[u32]| Tensor::new(rows, device);
        // Rows sorted by expert: each expert reads and writes one contiguous range.
        let rows = x.index_select(&index(&routing.token_of_row)?, 0)?;
        let mut outs = Vec::new();
        for (expert, range) in routing.ranges.iter().cloned() {
            let x = rows.narrow(0, range.start, range.len())?;
            outs.push(self.expert(expert)?.forward(&x, &Launch::default())?);
        }
        let outs = Tensor::cat(&outs, 0)?.to_dtype(DType::F32)?;
        if device.is_cpu() {
            // candle's sum over a middle dimension runs on one thread.
            let mut out = vec![0f32; tokens * hidden];
            routing.combine(&outs.flatten_all()?.to_vec1()?, None, hidden).run(&mut out);
            return Tensor::from_vec(out, (tokens, hidden), device);
        }
        let weights = Tensor::new(routing.weight_of_row.as_slice(), device)?.reshape((tokens * k, 1))?;
        outs.broadcast_mul(&weights)?
            .index_select(&index(&routing.row_of_choice)?, 0)?
            .reshape((tokens, k, hidden))?
            .sum(1)
    }

    fn expert(&self, index: usize) -> Result<Mlp> {
        match &self.experts {
            Experts::Each(experts) => Ok(experts[index].clone()),
            Experts::Stacked(experts) => {
                let rows = |weight: &Weight| {
                    let count = weight.outputs() / self.cfg.num_experts;
                    let rows = weight.rows(index * count, count)?;
                    rows.ok_or_else(|| candle_core::Error::msg("experts: expected views of their rows"))
                };
                Ok(Mlp { gate_up: rows(&experts.gate_up)?, down: rows(&experts.down)? })
            }
        }
    }
}

impl Experts {
    /// In ggml's types, for candle's kernels.
    fn of_blocks(blocks: &ExpertBlocks, shape: ExpertShape, source: &Source) -> Result<Self> {
        let (device, n) = (source.device(), shape.experts);
        let indexed = |rows: &Blocks| grouped::is_indexed(rows.dtype, rows.rows / n * rows.columns);
        if device.is_cuda() && indexed(&blocks.down) && blocks.gate_up.iter().all(indexed) {
            grouped::q8_0_step(device)?;
            let ggml = |rows: &Blocks| Weight::ggml(Arc::new(rows.qtensor((n, rows.rows / n, rows.columns), device)?));
            let gate_up = blocks.gate_up.iter().map(ggml).collect::<Result<Vec<_>>>()?;
            return Ok(Self::Stacked(Mlp { gate_up: Weight::stack(gate_up), down: ggml(&blocks.down)? }));
        }
        let weight = |rows: &Blocks, expert: usize| {
            let count = rows.rows / n;
            let range = expert * count..(expert + 1) * count;
            place::blocks(&rows.select_rows(std::slice::from_ref(&range)), device)
        };
        let each = (0..n).map(|expert| {
            let gate_up = blocks.gate_up.iter().map(|rows| weight(rows, expert)).collect::<Result<Vec<_>>>()?;
            Ok(Mlp { gate_up: Weight::stack(gate_up), down: weight(&blocks.down, expert)? })
        });
        Ok(Self::Each(each.collect::<Result<_>>()?))
    }
}

/// `[experts, rows, columns]` as one weight.
fn stacked(experts: Tensor) -> Result<Weight> {
    match experts.device().is_cpu() {
        true => Ok(Weight::Panels(Arc::new(host::pack(&experts)?))),
        false => Ok(Weight::Dense(experts.flatten(0, 1)?)),
    }
}

/// Experts and the shared one packed for our kernels; `None` where these do not support their types or widths.
#[cfg(feature = "cuda")]
fn packed_experts(
    cfg: &MoeConfig,
    hidden: usize,
    source: &Source,
    experts: &ExpertBlocks,
) -> Result<Option<(Mlp, Option<Mlp>)>> {
    let [gate_up] = experts.gate_up.as_slice() else { return Ok(None) };
    if plan::packed_expert_tokens(hidden) == 0 {
        return Ok(None);
    }
    let pair = |gate_up: &Blocks, down: &Blocks, inner: usize| -> Result<Option<Mlp>> {
        let Some(gate_up) = place::packed(gate_up, inner, source.device())? else { return Ok(None) };
        Ok(place::packed(down, 0, source.device())?.map(|down| Mlp { gate_up, down }))
    };
    let mut shared = None;
    let size = cfg.shared_intermediate_size;
    if size > 0 {
        let source = source.pp("shared_expert");
        let get = |name: &str, rows: usize, columns: usize| {
            Ok::<_, candle_core::Error>(source.pp(name).matrix(rows, columns, "weight")?.blocks())
        };
        let (gate, up) = (get("gate_proj", size, hidden)?, get("up_proj", size, hidden)?);
        let both = gate.zip(up).and_then(|(gate, up)| Blocks::one(vec![gate, up]));
        let Some((both, down)) = both.zip(get("down_proj", hidden, size)?) else { return Ok(None) };
        shared = pair(&both, &down, size)?;
        if shared.is_none() {
            return Ok(None);
        }
    }
    Ok(pair(gate_up, &experts.down, cfg.intermediate_size)?.map(|experts| (experts, shared)))
}

/// Packed experts in a float dtype.
#[cfg(feature = "cuda")]
fn unpacked(mlp: &Mlp, dtype: DType) -> Result<Mlp> {
    let dense = |weight: &Weight| match weight {
        Weight::Packed(packed) => packed.dense(dtype).map(Weight::Dense),
        weight => Ok(weight.clone()),
    };
    Ok(Mlp { gate_up: dense(&mlp.gate_up)?, down: dense(&mlp.down)? })
}

#[cfg(test)]
mod tests;
