//! The mixture of experts with quantised experts, by candle's kernels: on the CPU, and on CUDA what ours do not take.

use super::weights::gate_weight;
use crate::blocks::linear::Linear;
use crate::blocks::mlp::Mlp;
use crate::blocks::routing::Routing;
use crate::config::MoeConfig;
use crate::formats::{Blocks, ExpertBlocks, ExpertShape, Matrix, Source};
use crate::ops::Swiglu;
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{DType, Device, Module, Result, Tensor};
use candle_gdn::plumbing::Launch;

#[derive(Debug)]
pub(crate) struct QuantizedMoe {
    router: Linear,
    experts: Experts,
    shared: Option<SharedExpert>,
    cfg: MoeConfig,
}

/// An MLP for every token, scaled by a sigmoid.
#[derive(Debug)]
struct SharedExpert {
    mlp: Mlp,
    gate: Linear,
}

#[derive(Debug)]
enum Experts {
    /// One tensor for all, of which candle's CUDA kernels read the experts that each token has chosen.
    Indexed(Box<Indexed>),
    /// Each on its own: what the CPU has, and on CUDA the types that those kernels do not take.
    Each(Vec<Expert>),
}

#[derive(Debug)]
struct Indexed {
    /// `[experts, 2 * intermediate, hidden]`, or gates and ups apart.
    gate_up: Vec<QTensor>,
    /// `[experts, hidden, intermediate]`
    down: QTensor,
    /// What the kernels count an expert of q8_0 as.
    q8_0_step: u32,
}

#[derive(Debug)]
struct Expert {
    gate_up: Linear,
    down: Linear,
}

/// Tokens that the kernels of [`Experts::Indexed`] take at a time: bounds the memory, and their grids.
const AT_ONCE: usize = 4096;

impl QuantizedMoe {
    /// `source` is at `..mlp`.
    pub(crate) fn load(cfg: &MoeConfig, shape: ExpertShape, source: &Source, experts: &ExpertBlocks) -> Result<Self> {
        let hidden = shape.hidden;
        source.leave_to_candle();
        let gate = |name: &str, rows: usize| {
            let weight = gate_weight(rows, hidden, source.pp(name).dense())?;
            Linear::dense(weight)
        };
        let shared = match cfg.shared_intermediate_size {
            0 => None,
            size => Some(SharedExpert {
                mlp: Mlp::load_from(hidden, size, &source.pp("shared_expert"))?,
                gate: gate("shared_expert_gate", 1)?,
            }),
        };
        Ok(Self {
            router: gate("gate", cfg.num_experts)?,
            experts: Experts::new(experts, shape, source.device())?,
            shared,
            cfg: cfg.clone(),
        })
    }

    /// `x [.., hidden]` to the same. Where experts are indexed on the device, nothing is asked of the host.
    pub(crate) fn forward(&self, x: &Tensor, launch: &Launch) -> Result<Tensor> {
        let hidden = x.dims().last().copied().unwrap_or(0);
        let tokens = x.elem_count() / hidden.max(1);
        let flat = x.reshape((tokens, hidden))?;
        let x32 = flat.to_dtype(DType::F32)?.contiguous()?;
        let p = candle_nn::ops::softmax_last_dim(&self.router.forward(&x32)?)?;
        let mut y = match &self.experts {
            Experts::Indexed(experts) => experts.forward(&x32, &p, &self.cfg)?,
            Experts::Each(experts) => {
                let routing = Routing::top_k(&p.flatten_all()?.to_vec1::<f32>()?, &self.cfg);
                each(experts, &x32, &routing)?
            }
        };
        if let Some(shared) = &self.shared {
            let gate = candle_nn::ops::sigmoid(&shared.gate.forward(&x32)?)?;
            let s = shared.mlp.forward(&flat, launch)?.to_dtype(DType::F32)?;
            y = (y + s.broadcast_mul(&gate)?)?;
        }
        y.to_dtype(x.dtype())?.reshape(x.dims())
    }
}

impl Experts {
    fn new(blocks: &ExpertBlocks, shape: ExpertShape, device: &Device) -> Result<Self> {
        let ExpertShape { experts: n, intermediate, hidden } = shape;
        let indexable = |blocks: &Blocks| {
            use GgmlDType::{Q2K, Q3K, Q4K, Q5K, Q6K, Q8_0};
            let of_an_expert = blocks.rows() / n * blocks.columns();
            matches!(blocks.dtype(), Q2K | Q3K | Q4K | Q5K | Q6K)
                || blocks.dtype() == Q8_0 && of_an_expert.is_multiple_of(K_BLOCK)
        };
        if device.is_cuda() && indexable(&blocks.down) && blocks.gate_up.iter().all(indexable) {
            let gate_up = blocks.gate_up.iter().map(|part| part.qtensor((n, part.rows() / n, hidden), device));
            return Ok(Self::Indexed(Box::new(Indexed {
                gate_up: gate_up.collect::<Result<_>>()?,
                down: blocks.down.qtensor((n, hidden, intermediate), device)?,
                q8_0_step: q8_0_step(device)?,
            })));
        }
        let of = |blocks: &Blocks, expert: usize| {
            let rows = blocks.rows() / n;
            let range = expert * rows..(expert + 1) * rows;
            Matrix::Blocks(blocks.select_rows(std::slice::from_ref(&range)))
        };
        let each = (0..n).map(|expert| {
            let gate_up = blocks.gate_up.iter().map(|part| of(part, expert)).collect();
            Ok(Expert {
                gate_up: Linear::stack(gate_up, device)?,
                down: Linear::stack(vec![of(&blocks.down, expert)], device)?,
            })
        });
        Ok(Self::Each(each.collect::<Result<_>>()?))
    }
}

impl Indexed {
    /// `x [tokens, hidden]` in f32 and the router's probabilities `p [tokens, experts]` to the weighted sum of each
    /// token's experts.
    fn forward(&self, x: &Tensor, p: &Tensor, cfg: &MoeConfig) -> Result<Tensor> {
        let (tokens, hidden) = x.dims2()?;
        let chosen = p.arg_sort_last_dim(false)?.narrow(1, 0, cfg.experts_per_token)?.contiguous()?;
        let mut weights = p.gather(&chosen, 1)?;
        if cfg.norm_topk_prob {
            weights = weights.broadcast_div(&weights.sum_keepdim(1)?)?;
        }
        let mut outs = Vec::with_capacity(tokens.div_ceil(AT_ONCE));
        for first in (0..tokens).step_by(AT_ONCE) {
            let count = AT_ONCE.min(tokens - first);
            // The kernels read a storage from its begin, wherever the tensor is in it.
            let part = |x: &Tensor| {
                let part = x.narrow(0, first, count)?;
                let is_begin = part.is_contiguous() && part.layout().start_offset() == 0;
                if is_begin {
                    Ok(part)
                } else {
                    part.force_contiguous()
                }
            };
            let (x, ids) = (part(x)?.reshape((count, 1, hidden))?, part(&chosen)?);
            let gate_up = self.gate_up.iter().map(|w| self.product(w, &x, &ids)).collect::<Result<Vec<_>>>()?;
            let inner = Swiglu::new().forward(&Tensor::cat(&gate_up, 2)?)?;
            let out = self.product(&self.down, &inner, &ids)?;
            outs.push(out.broadcast_mul(&part(&weights)?.unsqueeze(2)?)?.sum(1)?);
        }
        match outs.as_slice() {
            [one] => Ok(one.clone()),
            outs => Tensor::cat(outs, 0),
        }
    }

    /// `x [tokens, 1 or chosen, in]` by each token's experts `ids [tokens, chosen]`.
    fn product(&self, weight: &QTensor, x: &Tensor, ids: &Tensor) -> Result<Tensor> {
        if weight.dtype() == GgmlDType::Q8_0 && self.q8_0_step > 1 {
            return weight.indexed_moe_forward(x, &ids.affine(self.q8_0_step.into(), 0.)?);
        }
        weight.indexed_moe_forward(x, ids)
    }
}

/// Numbers in a block of the k types.
const K_BLOCK: usize = 256;

/// candle's kernels go from expert to expert by blocks of 256, which those of q8_0 are not: there an expert lies eight
/// of such steps behind the one before it, in candle 0.11. Asked of the kernel, so that a candle in which this is
/// mended gives 1: of two experts of eight rows the second alone is not zero.
fn q8_0_step(device: &Device) -> Result<u32> {
    let block = GgmlDType::Q8_0.block_size();
    let rows = K_BLOCK / block;
    let experts = [
        Tensor::zeros((rows, block), DType::F32, &Device::Cpu)?,
        Tensor::ones((rows, block), DType::F32, &Device::Cpu)?,
    ];
    let weight = QTensor::quantize_onto(&Tensor::stack(&experts, 0)?, GgmlDType::Q8_0, device)?;
    let x = Tensor::ones((1, 1, block), DType::F32, device)?;
    let second = weight.indexed_moe_forward(&x, &Tensor::new(&[[1u32]], device)?)?.flatten_all()?.to_vec1::<f32>()?;
    Ok(if second[0] == 0. { rows as u32 } else { 1 })
}

/// `x [tokens, hidden]` in f32 to the weighted sum of each token's experts.
fn each(experts: &[Expert], x: &Tensor, routing: &Routing) -> Result<Tensor> {
    let device = x.device();
    let ((tokens, hidden), k) = (x.dims2()?, routing.experts_per_token());
    let index = |v: &[u32]| Tensor::new(v, device);
    // Rows sorted by expert.
    let rows = x.index_select(&index(routing.token_of_row())?, 0)?;
    let mut outs = Vec::new();
    for (expert, range) in routing.ranges() {
        let Expert { gate_up, down } = &experts[expert];
        let x = rows.narrow(0, range.start, range.len())?;
        outs.push(down.forward(&Swiglu::new().forward(&gate_up.forward(&x)?)?)?);
    }
    let weights = Tensor::new(routing.weight_of_row(), device)?.reshape((tokens * k, 1))?;
    Tensor::cat(&outs, 0)?
        .broadcast_mul(&weights)?
        .index_select(&index(routing.row_of_choice())?, 0)?
        .reshape((tokens, k, hidden))?
        .sum(1)
}

#[cfg(all(test, feature = "cuda"))]
mod tests {
    use super::*;

    fn numbers(rows: usize, columns: usize, seed: f32) -> Result<Tensor> {
        let values = (0..rows * columns).map(|i| (seed + i as f32 * 0.37).sin()).collect();
        Tensor::from_vec(values, (rows, columns), &Device::Cpu)
    }

    /// Whole numbers of which each 32 have the same largest one: candle's rounding to 8 bits leaves them as they are.
    fn whole_numbers(rows: usize, columns: usize) -> Result<Tensor> {
        let number = |i: usize| if i % 32 == 7 { 127. } else { ((i * 7919 + i / 13) % 201) as f32 - 100. };
        Tensor::from_vec((0..rows * columns).map(number).collect(), (rows, columns), &Device::Cpu)
    }

    #[test]
    fn each_token_has_the_experts_that_it_chose() -> Result<()> {
        use GgmlDType::{Q2K, Q3K, Q4K, Q5K, Q6K, Q8_0};
        let Some(cuda) = candle_gdn::plumbing::cuda::testing::device() else { return Ok(()) };
        let shape = ExpertShape { experts: 5, intermediate: 256, hidden: 512 };
        let ExpertShape { experts: n, intermediate, hidden } = shape;
        for dtype in [Q8_0, Q2K, Q3K, Q4K, Q5K, Q6K] {
            let gate_up = Blocks::quantize(&numbers(n * 2 * intermediate, hidden, 0.3)?, dtype)?;
            let down = Blocks::quantize(&numbers(n * hidden, intermediate, 0.9)?, dtype)?;
            let wide = gate_up.tensor()?.reshape((n, 2 * intermediate, hidden))?;
            let experts = Experts::new(&ExpertBlocks { gate_up: vec![gate_up], down }, shape, &cuda)?;
            let Experts::Indexed(indexed) = experts else { panic!("{dtype:?}: expected indexed experts") };
            let x = whole_numbers(3, hidden)?;
            let chosen = [[3u32, 0], [1, 4], [2, 2]];
            let ids = Tensor::new(&chosen, &cuda)?;
            let got = indexed.product(&indexed.gate_up[0], &x.to_device(&cuda)?.reshape((3, 1, hidden))?, &ids)?;
            let got = got.to_device(&Device::Cpu)?;
            for (token, experts) in chosen.iter().enumerate() {
                for (place, expert) in experts.iter().enumerate() {
                    let want = x.narrow(0, token, 1)?.matmul(&wide.get(*expert as usize)?.t()?)?.squeeze(0)?;
                    let error = (got.get(token)?.get(place)? - &want)?.sqr()?.sum_all()?.to_scalar::<f32>()?;
                    let norm = want.sqr()?.sum_all()?.to_scalar::<f32>()?;
                    // Sums of 32 numbers are kept in f16.
                    assert!(
                        error.sqrt() < 5e-4 * norm.sqrt(),
                        "{dtype:?} token {token} expert {expert}: {error:e} of {norm:e}"
                    );
                }
            }
            // A view gives what its copy gives.
            let cfg = MoeConfig {
                num_experts: n,
                experts_per_token: 2,
                intermediate_size: intermediate,
                shared_intermediate_size: 0,
                norm_topk_prob: true,
            };
            let x = whole_numbers(4, hidden)?.to_device(&cuda)?.narrow(0, 1, 3)?;
            let p = candle_nn::ops::softmax_last_dim(&numbers(3, n, 0.1)?.to_device(&cuda)?)?;
            let [view, copy] = [x.clone(), x.force_contiguous()?].map(|x| indexed.forward(&x, &p, &cfg));
            assert_eq!(view?.to_vec2::<f32>()?, copy?.to_vec2::<f32>()?, "{dtype:?}");
        }
        Ok(())
    }
}
