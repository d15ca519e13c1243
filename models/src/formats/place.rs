//! From stored matrices to weights on the model's device.

use super::{Blocks, E4m3Rows, Source, Stored};
use crate::weights::cpu::quantized::Quantized;
#[cfg(feature = "cuda")]
use crate::weights::cuda::packed::Packed;
use crate::weights::Weight;
use candle_core::{bail, Device, Result, Tensor};
use std::sync::Arc;

/// The weight of one matrix `[outputs, inputs]` at `source`.
pub(crate) fn load(source: &Source, inputs: usize, outputs: usize) -> Result<Weight> {
    stack(vec![source.matrix(outputs, inputs, "weight")?], source.device())
}

/// One weight of the rows of all matrices, one below the other.
pub(crate) fn stack(matrices: Vec<Stored>, device: &Device) -> Result<Weight> {
    if matrices.iter().any(|matrix| matches!(matrix, Stored::E4m3(_))) {
        return stack_e4m3(matrices, device);
    }
    if matrices.iter().all(|matrix| matches!(matrix, Stored::Dense(_))) {
        let rows = matrices.into_iter().map(Stored::into_dense).collect::<Result<Vec<_>>>()?;
        return Weight::dense(match rows.as_slice() {
            [rows] => rows.clone(),
            rows => Tensor::cat(rows, 0)?,
        });
    }
    // Rows that follow each other in one type become one matrix.
    let (mut weights, mut run) = (Vec::new(), Vec::new());
    for matrix in matrices {
        if let Stored::Blocks(rows) = matrix {
            run.push(rows);
            continue;
        }
        weights.append(&mut blocks_of(&mut run, device)?);
        weights.push(match matrix {
            Stored::Dense(rows) => Weight::dense(rows)?,
            Stored::Tiled(rows, tiles) => Weight::Tiled(Arc::new(blocks(&rows, device)?), tiles),
            other => bail!("quantised matrix: expected no rows of it in e4m3, got {other:?}"),
        });
    }
    weights.append(&mut blocks_of(&mut run, device)?);
    Ok(Weight::stack(weights))
}

fn blocks_of(run: &mut Vec<Blocks>, device: &Device) -> Result<Vec<Weight>> {
    Blocks::stack(std::mem::take(run)).iter().map(|rows| blocks(rows, device)).collect()
}

/// The rows of all matrices, some of them in e4m3: these stay so where the dense ones are last.
fn stack_e4m3(matrices: Vec<Stored>, device: &Device) -> Result<Weight> {
    let (mut stored, mut below, mut in_order) = (Vec::new(), Vec::new(), true);
    for matrix in &matrices {
        match matrix {
            Stored::E4m3(rows) => {
                in_order &= below.is_empty();
                stored.push(rows.clone());
            }
            Stored::Dense(rows) => below.push(rows.clone()),
            other => bail!("a projection in e4m3: expected its other rows dense, got {other:?}"),
        }
    }
    let Some(dtype) = below.first().map(Tensor::dtype) else {
        return Ok(Weight::E4m3(E4m3Rows::stack(&stored)?.place(device)?));
    };
    if in_order {
        let weight = Weight::E4m3(E4m3Rows::stack(&stored)?.place(device)?);
        return Ok(Weight::stack(vec![weight, Weight::dense(Tensor::cat(&below, 0)?)?]));
    }
    let rows = matrices.into_iter().map(|matrix| match matrix {
        Stored::E4m3(rows) => rows.dense(dtype, device),
        matrix => matrix.into_dense(),
    });
    Weight::dense(Tensor::cat(&rows.collect::<Result<Vec<_>>>()?, 0)?)
}

/// A weight for each matrix and, where one launch multiplies with them all, one of all their rows. They share their numbers.
pub(crate) fn together_and_each<const N: usize>(
    matrices: [Stored; N],
    device: &Device,
) -> Result<(Option<Weight>, [Weight; N])> {
    let rows = matrices.each_ref().map(Stored::rows);
    let alike = std::mem::discriminant(&matrices[0]);
    if !device.is_cpu()
        && matches!(matrices[0], Stored::Dense(_) | Stored::E4m3(_))
        && matrices.iter().all(|matrix| std::mem::discriminant(matrix) == alike)
    {
        let all = stack(matrices.into(), device)?;
        let mut first = 0;
        let views = rows.map(|count| {
            first += count;
            all.rows(first - count, count)
        });
        let views =
            views.into_iter().map(|view| view?.ok_or_else(|| candle_core::Error::msg("expected views of rows")));
        let views = views.collect::<Result<Vec<_>>>()?;
        let Ok(views) = views.try_into() else { bail!("expected {N} matrices") };
        return Ok((Some(all), views));
    }
    let each = matrices.into_iter().map(|matrix| stack(vec![matrix], device)).collect::<Result<Vec<_>>>()?;
    #[cfg(feature = "cuda")]
    let all = Weight::are_one_launch(&each).then(|| Weight::stack(each.clone()));
    #[cfg(not(feature = "cuda"))]
    let all = None;
    let Ok(each) = each.try_into() else { bail!("expected {N} matrices") };
    Ok((all, each))
}

/// Rows in a ggml type: for our kernels where they support the type and width, else for candle's.
pub(crate) fn blocks(rows: &Blocks, device: &Device) -> Result<Weight> {
    if device.is_cpu() {
        if let Some(weight) = Quantized::new(rows.dtype, rows.rows, rows.columns, &rows.data) {
            return Ok(Weight::Quantized(Arc::new(weight)));
        }
    }
    #[cfg(feature = "cuda")]
    if let Some(packed) = packed(rows, 0, device)? {
        return Ok(packed);
    }
    Weight::ggml(Arc::new(rows.qtensor((rows.rows, rows.columns), device)?))
}

/// Rows for our kernels on CUDA; `None` where they do not support the type or width. `paired`: 0, or the rows of a gate and of
/// an up, for a mixture of experts.
#[cfg(feature = "cuda")]
pub(crate) fn packed(rows: &Blocks, paired: usize, device: &Device) -> Result<Option<Weight>> {
    let packed = Packed::new(rows.dtype, (rows.rows, rows.columns), &rows.data, paired, device)?;
    Ok(packed.map(|packed| Weight::Packed(Arc::new(packed))))
}

/// The same weight in q8_0, half of the bytes to read; `None` where it has no more already, or no kernel of ours supports it so.
#[cfg(feature = "cuda")]
pub(crate) fn rounded(weight: &Weight) -> Result<Option<Weight>> {
    use candle_core::{quantized::GgmlDType, DType};
    const CHUNK: usize = 1 << 14;
    let Weight::Dense(weight) = weight else { return Ok(None) };
    let (rows, columns) = weight.dims2()?;
    let halves = matches!(weight.dtype(), DType::BF16 | DType::F16);
    if !halves || !columns.is_multiple_of(GgmlDType::Q8_0.block_size()) {
        return Ok(None);
    }
    let chunk = |first| Blocks::quantize(&weight.narrow(0, first, CHUNK.min(rows - first))?, GgmlDType::Q8_0);
    let chunks = (0..rows).step_by(CHUNK).map(chunk).collect::<Result<Vec<_>>>()?;
    Ok(Blocks::one(chunks).map(|rows| packed(&rows, 0, weight.device())).transpose()?.flatten())
}

#[cfg(test)]
mod tests;
