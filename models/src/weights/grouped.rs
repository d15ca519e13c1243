//! Products with the experts that each token has chosen, on a device: by candle's kernels, for what ours do not support.

use super::Weight;
use crate::ops::Swiglu;
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{bail, DType, Device, Result, Tensor};
use std::sync::OnceLock;

/// Bytes of dense experts gathered at a time; few in tests, so that there are several times.
const GATHER_BYTES: usize = if cfg!(test) { 16 << 10 } else { 256 << 20 };

/// Tokens of a call with indexed experts: bounds its memory and its grid.
const INDEXED_TOKENS: usize = 4096;

/// Numbers in a block of the K types.
const K_BLOCK: usize = 256;

/// Whether candle's kernels on CUDA index experts of this type, `count` numbers each.
pub(crate) fn is_indexed(dtype: GgmlDType, count: usize) -> bool {
    use GgmlDType::{Q2K, Q3K, Q4K, Q5K, Q6K, Q8_0};
    matches!(dtype, Q2K | Q3K | Q4K | Q5K | Q6K) || dtype == Q8_0 && count.is_multiple_of(K_BLOCK)
}

/// `x [tokens, in]` to the sum of each token's experts `ids [tokens, chosen]`, times `weights [tokens, chosen]`: `[tokens,
/// in]` in f32. `gate_up` and `down` have the rows of all `experts`.
pub(crate) fn chosen_experts(
    [gate_up, down]: [&Weight; 2],
    experts: usize,
    x: &Tensor,
    ids: &Tensor,
    weights: &Tensor,
) -> Result<Tensor> {
    let ((tokens, hidden), chosen) = (x.dims2()?, ids.dim(1)?);
    let at_once = match gate_up {
        Weight::Dense(_) => {
            let expert = gate_up.outputs() / experts * hidden + down.outputs() / experts * down.inputs();
            GATHER_BYTES / (chosen * expert * x.dtype().size_in_bytes()).max(1)
        }
        _ => INDEXED_TOKENS,
    };
    let at_once = at_once.clamp(1, tokens.max(1));
    let mut outs = Vec::with_capacity(tokens.div_ceil(at_once));
    for first in (0..tokens).step_by(at_once) {
        let count = at_once.min(tokens - first);
        let of = |x: &Tensor| at_start_of_storage(&x.narrow(0, first, count)?);
        let (x, ids) = (of(x)?.reshape((count, 1, hidden))?, of(ids)?);
        let inner = Swiglu::new().forward(&gate_up.multiply_chosen(&x, &ids, experts)?)?;
        let out = down.multiply_chosen(&inner, &ids, experts)?.to_dtype(DType::F32)?;
        outs.push(out.broadcast_mul(&of(weights)?.unsqueeze(2)?)?.sum(1)?);
    }
    match outs.as_slice() {
        [one] => Ok(one.clone()),
        outs => Tensor::cat(outs, 0),
    }
}

/// candle's kernels read a storage from its start, wherever the tensor is in it.
fn at_start_of_storage(x: &Tensor) -> Result<Tensor> {
    match x.is_contiguous() && x.layout().start_offset() == 0 {
        true => Ok(x.clone()),
        false => x.force_contiguous(),
    }
}

impl Weight {
    /// `x [tokens, 1 or chosen, in]` times the rows of each token's experts `ids [tokens, chosen]`: `[tokens, chosen, out]`.
    /// The weight has the rows of all `experts`, one below the other.
    pub fn multiply_chosen(&self, x: &Tensor, ids: &Tensor, experts: usize) -> Result<Tensor> {
        match self {
            Self::Dense(weight) => {
                let ((tokens, chosen), inputs) = (ids.dims2()?, self.inputs());
                let weight = weight.reshape((experts, weight.dim(0)? / experts, inputs))?;
                let gathered = weight.index_select(&ids.flatten_all()?, 0)?.transpose(1, 2)?;
                let x = x.expand((tokens, chosen, inputs))?.reshape((tokens * chosen, 1, inputs))?;
                x.matmul(&gathered)?.reshape((tokens, chosen, ()))
            }
            Self::Ggml(weight) if weight.dtype() == GgmlDType::Q8_0 => match q8_0_step(x.device())? {
                1 => weight.indexed_moe_forward(x, ids),
                step => weight.indexed_moe_forward(x, &ids.affine(step.into(), 0.)?),
            },
            Self::Ggml(weight) => weight.indexed_moe_forward(x, ids),
            Self::Stacked(weights) => {
                let outs = weights.iter().map(|weight| weight.multiply_chosen(x, ids, experts));
                Tensor::cat(&outs.collect::<Result<Vec<_>>>()?, 2)
            }
            weight => bail!("experts: expected them dense or in a ggml type, got {weight:?}"),
        }
    }
}

/// candle's kernels go from expert to expert by blocks of 256 numbers, which those of q8_0 are not: there an expert is eight
/// such steps after the one before it, in candle 0.11. Asked of the kernel once, so that a candle without this error gives 1:
/// of two experts of eight rows the second alone is not zero. A copy to the host: before any capture.
pub(crate) fn q8_0_step(device: &Device) -> Result<u32> {
    static STEP: OnceLock<u32> = OnceLock::new();
    if let Some(step) = STEP.get() {
        return Ok(*step);
    }
    let block = GgmlDType::Q8_0.block_size();
    let rows = K_BLOCK / block;
    let experts = [
        Tensor::zeros((rows, block), DType::F32, &Device::Cpu)?,
        Tensor::ones((rows, block), DType::F32, &Device::Cpu)?,
    ];
    let weight = QTensor::quantize_onto(&Tensor::stack(&experts, 0)?, GgmlDType::Q8_0, device)?;
    let x = Tensor::ones((1, 1, block), DType::F32, device)?;
    let second = weight.indexed_moe_forward(&x, &Tensor::new(&[[1u32]], device)?)?.flatten_all()?.to_vec1::<f32>()?;
    Ok(*STEP.get_or_init(|| if second[0] == 0. { rows as u32 } else { 1 }))
}

#[cfg(all(test, feature = "cuda"))]
mod tests;
