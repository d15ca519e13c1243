//! The mixture of experts on a device: by kernels of our own where they take it, else out of tensor ops.

use super::weights::{gate_weight, stacked_experts, stored_experts};
use crate::blocks::linear::matmul_t;
use crate::blocks::mlp::Mlp;
use crate::blocks::routing::Routing;
use crate::config::MoeConfig;
#[cfg(feature = "cuda")]
use crate::cuda::moe;
use crate::formats::Source;
use candle_core::{bail, DType, Result, Tensor};
use candle_gdn::plumbing::{BlockScaled, Launch};
use candle_nn::VarBuilder;

#[derive(Debug, Clone)]
pub(crate) struct DeviceMoe {
    /// `[experts, hidden]` in f32; where there is a shared expert a row more, its gate. For the kernels in parts
    /// (`moe::parts_of`), `[parts, experts, hidden]`.
    router: Tensor,
    experts: Experts,
    /// An MLP for every token, scaled by a sigmoid.
    shared: Option<Mlp>,
    cfg: MoeConfig,
}

/// All experts of a layer, stacked.
#[derive(Debug, Clone)]
struct Experts {
    /// `[experts * 2 * intermediate, hidden]`, per expert the gate's rows, then up's; and `[experts * hidden, intermediate]`
    weights: ExpertWeights,
    hidden: usize,
    intermediate: usize,
}

#[derive(Debug, Clone)]
enum ExpertWeights {
    Dense {
        gate_up: Tensor,
        down: Tensor,
    },
    /// In e4m3, as the kernels alone take it.
    #[cfg_attr(not(feature = "cuda"), allow(dead_code))]
    E4m3 {
        gate_up: BlockScaled,
        down: BlockScaled,
    },
}

impl DeviceMoe {
    /// `vb` is at `..mlp`.
    pub(crate) fn load(cfg: &MoeConfig, hidden: usize, vb: VarBuilder) -> Result<Self> {
        Self::load_from(cfg, hidden, &Source::new(vb))
    }

    /// The same of a source whose experts may be in e4m3; they stay so if the shared expert's matrices are too.
    pub(crate) fn load_from(cfg: &MoeConfig, hidden: usize, source: &Source) -> Result<Self> {
        let mut router = gate_weight(cfg.num_experts, hidden, source.pp("gate").dense())?;
        let (size, mut shared) = (cfg.shared_intermediate_size, None);
        let load_shared = |source: &Source| Mlp::load_from(hidden, size, &source.pp("shared_expert"));
        if size > 0 {
            let gate = gate_weight(1, hidden, source.pp("shared_expert_gate").dense())?;
            router = Tensor::cat(&[router, gate], 0)?;
            shared = Some(load_shared(source)?);
        }
        let mut stored = None;
        if kernels_take(cfg, hidden, source.dtype()) && shared.as_ref().is_none_or(|mlp| mlp.e4m3().is_some()) {
            stored = stored_experts(cfg, hidden, &source.pp("experts"))?;
        }
        #[cfg(feature = "cuda")]
        if source.device().is_cuda() && kernels_take(cfg, hidden, source.dtype()) {
            router = moe::parts_of(&router)?;
        }
        let weights = match stored {
            Some((gate_up, down)) => ExpertWeights::E4m3 { gate_up, down },
            None => {
                let source = Source::new(source.dense());
                shared = shared.map(|_| load_shared(&source)).transpose()?;
                let (gate_up, down) = stacked_experts(cfg, hidden, source.pp("experts").dense())?;
                ExpertWeights::Dense { gate_up, down }
            }
        };
        let experts = Experts { weights, hidden, intermediate: cfg.intermediate_size };
        Ok(Self { router, experts, shared, cfg: cfg.clone() })
    }

    /// `x [.., hidden]` to the same.
    pub(crate) fn forward(&self, x: &Tensor, launch: &Launch) -> Result<Tensor> {
        let flat = x.reshape(((), self.experts.hidden))?;
        #[cfg(feature = "cuda")]
        if let Some(y) = self.by_kernels(&flat, launch)? {
            return y.reshape(x.dims());
        }
        self.by_tensor_ops(&flat, launch)?.to_dtype(x.dtype())?.reshape(x.dims())
    }

    /// `x [tokens, hidden]` to the same, f32. Up to [`FEW`] tokens stay on the device, as a captured graph must: each
    /// has its experts gathered. For more the router's choice is read back to the host, so that each expert runs once
    /// over its tokens.
    fn by_tensor_ops(&self, x: &Tensor, launch: &Launch) -> Result<Tensor> {
        let n = self.cfg.num_experts;
        let router = if self.router.rank() == 3 { &self.router.to_dtype(DType::F32)?.sum(0)? } else { &self.router };
        let scores = matmul_t(&x.to_dtype(DType::F32)?, router)?;
        let p = candle_nn::ops::softmax_last_dim(&scores.narrow(1, 0, n)?.contiguous()?)?;
        let y = if x.dim(0)? <= FEW {
            self.experts.gathered(x, &p, &self.cfg)?
        } else {
            let p = p.flatten_all()?.to_vec1::<f32>()?;
            self.experts.forward(x, &Routing::top_k(&p, &self.cfg))?
        };
        let Some(shared) = &self.shared else { return Ok(y) };
        let gate = candle_nn::ops::sigmoid(&scores.narrow(1, n, 1)?.contiguous()?)?;
        y + shared.forward(x, launch)?.to_dtype(DType::F32)?.broadcast_mul(&gate)?
    }

    /// The same in the dtype of x, any number of tokens, and nothing is asked of the host; `None` where the kernels do
    /// not take it.
    #[cfg(feature = "cuda")]
    fn by_kernels<'a>(&'a self, x: &Tensor, launch: &Launch) -> Result<Option<Tensor>> {
        let hidden = self.experts.hidden;
        let dense = |mlp: &'a Mlp| match mlp {
            Mlp::Device { gate_up, down } => Some([gate_up.tensor()?, down.tensor()?].map(moe::Weight::Dense)),
            Mlp::Cpu(_) => None,
        };
        let (weights, shared) = match &self.experts.weights {
            ExpertWeights::Dense { gate_up, down } => {
                ([gate_up, down].map(moe::Weight::Dense), self.shared.as_ref().map(dense))
            }
            ExpertWeights::E4m3 { gate_up, down } => {
                let stored = |mlp: &'a Mlp| mlp.e4m3().map(|both| both.map(moe::Weight::E4m3));
                ([gate_up, down].map(moe::Weight::E4m3), self.shared.as_ref().map(stored))
            }
        };
        // A shared expert that is otherwise held.
        if matches!(shared, Some(None)) {
            return Ok(None);
        }
        let shared = shared.flatten();
        let same_dtype = weights.iter().chain(shared.iter().flatten()).all(|w| w.multiplies(x.dtype()));
        if !x.device().is_cuda() || !same_dtype || !kernels_take(&self.cfg, hidden, x.dtype()) {
            return Ok(None);
        }
        let [gate_up, down] = weights;
        let MoeConfig { num_experts: experts, experts_per_token: top_k, norm_topk_prob: normalise, .. } = self.cfg;
        let layer = moe::Moe { router: &self.router, gate_up, down, shared, experts, top_k, normalise };
        let one = |x: &Tensor| moe::forward(x, &layer, launch);
        let tokens = x.dim(0)?;
        if tokens <= AT_ONCE {
            return one(x).map(Some);
        }
        let parts = (0..tokens).step_by(AT_ONCE).map(|first| one(&x.narrow(0, first, AT_ONCE.min(tokens - first))?));
        Tensor::cat(&parts.collect::<Result<Vec<_>>>()?, 0).map(Some)
    }
}

/// Tokens at a time: the kernels keep a row of each token and expert.
#[cfg(feature = "cuda")]
const AT_ONCE: usize = 8192;

/// Whether so many tokens of a layer on CUDA read the router's choice back to the host, which no captured graph may.
#[cfg(feature = "cuda")]
pub(crate) fn asks_the_host(cfg: &MoeConfig, hidden: usize, dtype: DType, tokens: usize) -> bool {
    let widths = [cfg.intermediate_size, cfg.shared_intermediate_size];
    tokens > FEW && !moe::takes(dtype, hidden, cfg.num_experts, cfg.experts_per_token, widths)
}

/// Whether the kernels take experts of these sizes.
fn kernels_take(cfg: &MoeConfig, hidden: usize, dtype: DType) -> bool {
    #[cfg(feature = "cuda")]
    return !asks_the_host(cfg, hidden, dtype, usize::MAX);
    #[cfg(not(feature = "cuda"))]
    {
        let _ = (cfg, hidden, dtype);
        false
    }
}

/// Tokens whose experts are chosen and gathered on the device. A gathered weight is read twice and written once, where
/// the host's way costs one wait and several launches an expert.
const FEW: usize = 32;

/// Bytes of gathered weights at a time; few in tests, so that there are several times.
const GATHER_BYTES: usize = if cfg!(test) { 16 << 10 } else { 256 << 20 };

impl Experts {
    /// Both, dense.
    fn dense(&self) -> Result<[&Tensor; 2]> {
        match &self.weights {
            ExpertWeights::Dense { gate_up, down } => Ok([gate_up, down]),
            ExpertWeights::E4m3 { .. } => bail!("experts in e4m3: expected x in the model's dtype, on CUDA"),
        }
    }

    /// `x [tokens, hidden]` to the weighted sum of each token's experts, same shape, f32.
    fn forward(&self, x: &Tensor, routing: &Routing) -> Result<Tensor> {
        let device = x.device();
        let (tokens, k) = (x.dim(0)?, routing.experts_per_token());
        let index = |v: &[u32]| Tensor::new(v, device);
        // Rows sorted by expert: each expert reads and writes one contiguous range.
        let rows = x.index_select(&index(routing.token_of_row())?, 0)?;
        let mut outs = Vec::new();
        for (expert, range) in routing.ranges() {
            outs.push(self.one(expert, &rows.narrow(0, range.start, range.len())?)?);
        }
        let out = Tensor::cat(&outs, 0)?.to_dtype(DType::F32)?;
        let weights = Tensor::new(routing.weight_of_row(), device)?.reshape((tokens * k, 1))?;
        out.broadcast_mul(&weights)?
            .index_select(&index(routing.row_of_choice())?, 0)?
            .reshape((tokens, k, self.hidden))?
            .sum(1)
    }

    /// The same with the choice made on the device, from the router's probabilities `p [tokens, experts]`: nothing is
    /// asked of the host. Which of two experts with equal probability is taken is left open.
    fn gathered(&self, x: &Tensor, p: &Tensor, cfg: &MoeConfig) -> Result<Tensor> {
        let (n, k, h, i) = (cfg.num_experts, cfg.experts_per_token, self.hidden, self.intermediate);
        let tokens = x.dim(0)?;
        let chosen = p.arg_sort_last_dim(false)?.narrow(1, 0, k)?.contiguous()?;
        let mut weights = p.gather(&chosen, 1)?;
        if cfg.norm_topk_prob {
            weights = weights.broadcast_div(&weights.sum_keepdim(1)?)?;
        }
        let [gate_up, down] = self.dense()?;
        let (gate_up, down) = (gate_up.reshape((n, 2 * i, h))?, down.reshape((n, h, i))?);
        let at_once = (GATHER_BYTES / (3 * k * i * h * x.dtype().size_in_bytes())).clamp(1, tokens);
        let mut outs = Vec::with_capacity(tokens.div_ceil(at_once));
        for first in (0..tokens).step_by(at_once) {
            let count = at_once.min(tokens - first);
            let experts = chosen.narrow(0, first, count)?.flatten_all()?;
            let rows = x.narrow(0, first, count)?.unsqueeze(1)?.expand((count, k, h))?.reshape((count * k, 1, h))?;
            let gate_up = rows.matmul(&gate_up.index_select(&experts, 0)?.transpose(1, 2)?)?;
            let gate = gate_up.narrow(2, 0, i)?.contiguous()?.silu()?;
            let inner = (gate * gate_up.narrow(2, i, i)?)?;
            let out = inner.matmul(&down.index_select(&experts, 0)?.transpose(1, 2)?)?;
            let out = out.to_dtype(DType::F32)?.reshape((count, k, h))?;
            outs.push(out.broadcast_mul(&weights.narrow(0, first, count)?.unsqueeze(2)?)?.sum(1)?);
        }
        match outs.as_slice() {
            [one] => Ok(one.clone()),
            many => Tensor::cat(many, 0),
        }
    }

    fn one(&self, expert: usize, x: &Tensor) -> Result<Tensor> {
        let (h, i) = (self.hidden, self.intermediate);
        let [gate_up, down] = self.dense()?;
        let gate_up = matmul_t(x, &gate_up.narrow(0, expert * 2 * i, 2 * i)?)?;
        let gate = gate_up.narrow(1, 0, i)?.contiguous()?.silu()?;
        let inner = (gate * gate_up.narrow(1, i, i)?)?;
        matmul_t(&inner, &down.narrow(0, expert * h, h)?)
    }
}
