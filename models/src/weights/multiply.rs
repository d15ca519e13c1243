//! Projections whose weight is quantised: q8_0, q4_K and q6_K on CUDA by our kernels, q8_0 on the CPU too where it has
//! instructions for bytes; all else by candle's.

use super::{Blocks, Matrix, Tiles};
use crate::cpu::bytes::Bytes;
#[cfg(feature = "cuda")]
use crate::cuda::quantized::{product, swiglu, Packed, PARTS};
#[cfg(feature = "cuda")]
use candle_core::cuda_backend::DeviceId;
#[cfg(feature = "cuda")]
use candle_core::quantized::GgmlDType;
use candle_core::quantized::QTensor;
use candle_core::{bail, DType, Device, Result, Tensor};
use candle_gdn::plumbing::{host, Launch, Launched};
use std::sync::Arc;
#[cfg(feature = "cuda")]
use std::sync::{Mutex, PoisonError};

/// The rows of several parts, each of its own type.
#[derive(Debug, Clone)]
pub(crate) struct Quantized {
    parts: Vec<Part>,
    outputs: usize,
}

#[derive(Debug, Clone)]
enum Part {
    /// `[rows, in]`, with the order that its columns are in.
    Blocks(Arc<QTensor>, Option<Tiles>),
    /// The same in q8_0.
    Bytes(Arc<Bytes>, Option<Tiles>),
    #[cfg(feature = "cuda")]
    Packed(Arc<Packed>, Option<Tiles>),
    Dense(candle_gdn::Linear),
}

impl Quantized {
    /// Rows that follow each other in one type become one tensor.
    pub(crate) fn new(parts: Vec<Matrix>, device: &Device) -> Result<Self> {
        let mut made = Self { parts: Vec::new(), outputs: 0 };
        let mut run: Vec<Blocks> = Vec::new();
        for part in parts {
            match part {
                Matrix::Blocks(blocks) => run.push(blocks),
                Matrix::Tiled(blocks, tiles) => {
                    made.push_run(&mut run, device)?;
                    made.push_blocks(&blocks, Some(tiles), device)?;
                }
                Matrix::E4m3(_) => bail!("quantised matrix: expected no part of it in e4m3"),
                Matrix::Dense(weight) => {
                    made.push_run(&mut run, device)?;
                    made.outputs += weight.dim(0)?;
                    made.parts.push(Part::Dense(candle_gdn::Linear::new(weight)?));
                }
            }
        }
        made.push_run(&mut run, device)?;
        made.grow_workspace()?;
        Ok(made)
    }

    /// Before any graph is captured that points to candle's buffer.
    fn grow_workspace(&self) -> Result<()> {
        for part in &self.parts {
            let Part::Blocks(blocks, _) = part else { continue };
            let inputs = blocks.shape().dims2()?.1;
            if inputs > WIDEST {
                bail!("quantised matrix: expected at most {WIDEST} inputs, got {inputs}")
            }
            #[cfg(feature = "cuda")]
            grow_workspace_of(&blocks.device())?;
        }
        Ok(())
    }

    fn push_run(&mut self, run: &mut Vec<Blocks>, device: &Device) -> Result<()> {
        Blocks::stack(std::mem::take(run)).iter().try_for_each(|blocks| self.push_blocks(blocks, None, device))
    }

    fn push_blocks(&mut self, blocks: &Blocks, tiles: Option<Tiles>, device: &Device) -> Result<()> {
        if let Some(bytes) = device.is_cpu().then(|| blocks.bytes()).flatten() {
            self.outputs += bytes.rows();
            self.parts.push(Part::Bytes(Arc::new(bytes), tiles));
            return Ok(());
        }
        #[cfg(feature = "cuda")]
        if let Some(packed) = blocks.packed(device)? {
            self.outputs += packed.outputs();
            self.parts.push(Part::Packed(Arc::new(packed), tiles));
            return Ok(());
        }
        let blocks = Arc::new(blocks.qtensor((blocks.rows(), blocks.columns()), device)?);
        self.outputs += blocks.shape().dims()[0];
        self.parts.push(Part::Blocks(blocks, tiles));
        Ok(())
    }

    /// Of one tensor that is here already.
    pub(crate) fn shared(weight: Arc<QTensor>) -> Result<Self> {
        let whole = Self { outputs: weight.shape().dims()[0], parts: vec![Part::Blocks(weight, None)] };
        whole.grow_workspace()?;
        Ok(whole)
    }

    /// The same of bytes.
    pub(crate) fn of_bytes(bytes: Arc<Bytes>) -> Self {
        Self { outputs: bytes.rows(), parts: vec![Part::Bytes(bytes, None)] }
    }

    /// Of a matrix that is packed already, and in use elsewhere, too.
    #[cfg(feature = "cuda")]
    pub(crate) fn packed(weight: Arc<Packed>) -> Self {
        Self { outputs: weight.outputs(), parts: vec![Part::Packed(weight, None)] }
    }

    /// One projection of the rows of all, where a launch of our kernels takes them. They share the matrices.
    #[cfg(feature = "cuda")]
    pub(crate) fn joined(all: &[&Self]) -> Option<Self> {
        let parts: Vec<_> = all.iter().flat_map(|each| each.parts.iter().cloned()).collect();
        let whole = Self { parts, outputs: all.iter().map(|each| each.outputs).sum() };
        whole.launch_of().is_some().then_some(whole)
    }

    /// The parts, where one launch takes them all.
    #[cfg(feature = "cuda")]
    fn launch_of(&self) -> Option<(Vec<&Packed>, Option<Tiles>)> {
        let packed = self.parts.iter().map(|part| match part {
            Part::Packed(packed, tiles) => Some((&**packed, *tiles)),
            _ => None,
        });
        let (parts, tiles): (Vec<_>, Vec<_>) = packed.collect::<Option<Vec<_>>>()?.into_iter().unzip();
        let one_order = tiles.iter().all(|each| *each == tiles[0]);
        (one_order && (1..=PARTS).contains(&parts.len())).then(|| (parts, tiles[0]))
    }

    /// `silu(gate) * up` of `x [rows, in]` in one kernel, the weight's rows being the gate's, then up's; `None` where none
    /// takes them.
    #[cfg(feature = "cuda")]
    pub(crate) fn swiglu(&self, x: &Tensor, launch: &Launch) -> Result<Option<Tensor>> {
        match self.parts.as_slice() {
            [Part::Packed(weight, None)] => swiglu(x, weight, launch),
            _ => Ok(None),
        }
    }

    /// `x [rows, in]` to `[rows, out]`.
    fn rows(&self, x: &Tensor, launch: &Launch) -> Result<Tensor> {
        let rows = x.dim(0)?;
        if rows == 0 {
            return Tensor::zeros((0, self.outputs), x.dtype(), x.device());
        }
        #[cfg(feature = "cuda")]
        if let Some((parts, tiles)) = self.launch_of() {
            return product(x, &parts, tiles, launch);
        }
        let wide = x.to_dtype(DType::F32)?.contiguous()?;
        let mut outs = Vec::with_capacity(self.parts.len());
        for part in &self.parts {
            outs.push(match part {
                #[cfg(feature = "cuda")]
                Part::Packed(packed, tiles) => product(x, &[packed], *tiles, launch)?.to_dtype(DType::F32)?,
                Part::Blocks(blocks, None) => wide.apply_op1_no_bwd(&**blocks)?,
                Part::Blocks(blocks, Some(tiles)) => tiles.apply(&wide)?.apply_op1_no_bwd(&**blocks)?,
                Part::Bytes(bytes, tiles) => {
                    let x = tiles.map_or_else(|| Ok(wide.clone()), |tiles| tiles.apply(&wide))?;
                    let y = host::with_f32(&x, |x| bytes.product(x, rows))?;
                    Tensor::from_vec(y, (rows, bytes.rows()), x.device())?
                }
                Part::Dense(linear) => linear.forward_launched(x, launch)?.to_dtype(DType::F32)?,
            });
        }
        let y = match outs.as_slice() {
            [y] => y.clone(),
            outs => Tensor::cat(outs, 1)?,
        };
        y.to_dtype(x.dtype())
    }
}

/// Inputs, more than any matrix of a model has.
const WIDEST: usize = 1 << 18;

/// candle's products of up to 8 rows share a buffer of the device, which grows with them and moves when it does. Captured
/// graphs point to it: it gets the size of the widest product, 2.4 MB, once.
#[cfg(feature = "cuda")]
fn grow_workspace_of(device: &Device) -> Result<()> {
    static GROWN: Mutex<Vec<DeviceId>> = Mutex::new(Vec::new());
    let Device::Cuda(cuda) = device else { return Ok(()) };
    let mut grown = GROWN.lock().unwrap_or_else(PoisonError::into_inner);
    if !grown.contains(&cuda.id()) {
        // Of eight rows: the kernels for that many columns of x take two rows at a time, and there must be both.
        let rows = QTensor::quantize(&Tensor::zeros((8, WIDEST), DType::F32, device)?, GgmlDType::Q8_0)?;
        Tensor::zeros((8, WIDEST), DType::F32, device)?.apply_op1_no_bwd(&rows)?;
        grown.push(cuda.id());
    }
    Ok(())
}

impl Launched for Quantized {
    /// `x [.., in]` to `[.., out]` in x's dtype. candle rounds x to 8 bits on the way in, our kernels on CUDA to 16.
    fn forward_launched(&self, x: &Tensor, launch: &Launch) -> Result<Tensor> {
        let mut dims = x.dims().to_vec();
        let inputs = dims.pop().unwrap_or(0);
        dims.push(self.outputs);
        self.rows(&x.reshape((x.elem_count() / inputs.max(1), inputs))?, launch)?.reshape(dims)
    }
}

impl Tiles {
    /// `x [rows, columns]` with its columns in this order.
    pub(crate) fn apply(self, x: &Tensor) -> Result<Tensor> {
        let (rows, columns) = x.dims2()?;
        let pieces = x.reshape((rows, self.groups, self.per_group, self.size))?.transpose(1, 2)?;
        pieces.contiguous()?.reshape((rows, columns))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::blocks::linear::Linear;
    use candle_core::quantized::GgmlDType;
    use candle_core::Module;

    /// Whole numbers that candle's rounding to 8 bits leaves as they are, the largest of 32 being 127; and so is their sum,
    /// which CUDA keeps in f16, being small: all but the last two of 32 are pairs with a sum of zero.
    fn whole_numbers(rows: usize, columns: usize) -> Tensor {
        let any = |i: usize| ((i * 7919 + i / 13) % 201) as f32 - 100.;
        let number = |i: usize| match (i % 32, i % 2) {
            (6, _) => 127.,
            (7, _) => -127.,
            (0..30, 1) => -any(i - 1),
            _ => any(i),
        };
        let x: Vec<f32> = (0..rows * columns).map(number).collect();
        Tensor::from_vec(x, (rows, columns), &Device::Cpu).unwrap()
    }

    fn blocks(rows: usize, columns: usize, dtype: GgmlDType) -> Blocks {
        let w: Vec<f32> = (0..rows * columns).map(|i| (i as f32 * 0.37).sin()).collect();
        Blocks::quantize(&Tensor::from_vec(w, (rows, columns), &Device::Cpu).unwrap(), dtype).unwrap()
    }

    fn norm(x: &Tensor) -> Result<f32> {
        x.sqr()?.sum_all()?.sqrt()?.to_scalar()
    }

    fn check(linear: &Linear, x: &Tensor, weight: &Tensor) -> Result<()> {
        let want = x.matmul(&weight.t()?)?;
        let (difference, norm) = (norm(&(linear.forward(x)? - &want)?)?, norm(&want)?);
        assert!(difference <= 1e-5 * norm, "{difference:e} of {norm:e}");
        Ok(())
    }

    /// Few rows and many take different kernels, and so does each type. Some multiply the scales of a block in f16: half a
    /// unit of its last place, 2^-11 of what the block's products are in all.
    #[cfg(feature = "cuda")]
    #[test]
    fn products_on_cuda() -> Result<()> {
        let Some(cuda) = candle_gdn::plumbing::cuda::testing::device() else { return Ok(()) };
        use GgmlDType::{Q2K, Q3K, Q4K, Q4_0, Q4_1, Q5K, Q5_0, Q5_1, Q6K, Q8_0};
        for columns in [256, 1024, 1280] {
            for dtype in [Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2K, Q3K, Q4K, Q5K, Q6K] {
                let stored = [blocks(37, columns, dtype), blocks(100, columns, dtype)];
                let weight = Tensor::cat(&[stored[0].tensor()?, stored[1].tensor()?], 0)?;
                let linear = Linear::stack(stored.map(Matrix::Blocks).into(), &cuda)?;
                for rows in [1, 2, 5, 8, 9, 70] {
                    let x = whole_numbers(rows, columns);
                    let got = linear.forward(&x.to_device(&cuda)?)?.to_device(&Device::Cpu)?;
                    let difference = norm(&(got - x.matmul(&weight.t()?)?)?)?;
                    let all = norm(&x.abs()?.matmul(&weight.abs()?.t()?)?)?;
                    assert!(difference <= all / 2048., "{dtype:?} {rows} x {columns}: {difference:e} of {all:e}");
                    // A view: not at its storage's begin.
                    let y = linear.forward(&whole_numbers(rows + 1, columns).to_device(&cuda)?.narrow(0, 1, rows)?)?;
                    let copy =
                        whole_numbers(rows + 1, columns).narrow(0, 1, rows)?.force_contiguous()?.to_device(&cuda)?;
                    assert_eq!(y.to_vec2::<f32>()?, linear.forward(&copy)?.to_vec2::<f32>()?);
                }
            }
        }
        Ok(())
    }

    /// In all that our kernels do of them: columns in another order, several matrices in a launch, SwiGLU, rows of a table.
    #[cfg(feature = "cuda")]
    #[test]
    fn packed_matrices_on_cuda() -> Result<()> {
        let Some(cuda) = candle_gdn::plumbing::cuda::testing::device() else { return Ok(()) };
        use GgmlDType::{Q4K, Q6K, Q8_0};
        let launch = Launch::default();
        let values = |x: &Tensor| x.to_dtype(DType::F32)?.to_vec2::<f32>();
        // Of x in 16 bits of fixed point the product of one row is 2.2e-5 off, worked out in f64.
        for (dtype, bound) in [(DType::F32, 3e-5), (DType::F16, 6e-4), (DType::BF16, 5e-3)] {
            let on_cuda = |x: &Tensor| x.to_device(&cuda)?.to_dtype(dtype);
            for kind in [Q4K, Q6K, Q8_0] {
                let tiles = Tiles { groups: 2, per_group: 3, size: 128 };
                let stored = blocks(160, 768, kind);
                let pieces = [0, 2, 4, 1, 3, 5].map(|piece| stored.tensor()?.narrow(1, piece * 128, 128));
                let weight = Tensor::cat(&pieces.into_iter().collect::<Result<Vec<_>>>()?, 1)?;
                let linear = Linear::stack(vec![Matrix::Tiled(stored, tiles)], &cuda)?;
                for rows in [1, 3, 40, 300] {
                    let x = (whole_numbers(rows, 768) * 0.0625)?;
                    // For many rows the numbers are rounded to x's dtype first. Worked out in f64, the product is 2.1e-4 off in
                    // f16 then, and of the numbers as they are it would be 1.1e-3 to 1.6e-3.
                    let many = rows > crate::cuda::quantized::FEW;
                    let weight = if many { weight.to_dtype(dtype)?.to_dtype(DType::F32)? } else { weight.clone() };
                    let want = x.matmul(&weight.t()?)?;
                    let got = linear.forward(&on_cuda(&x)?)?.to_dtype(DType::F32)?.to_device(&Device::Cpu)?;
                    let (difference, norm) = (norm(&(got - &want)?)?, norm(&want)?);
                    assert!(difference <= bound * norm, "{kind:?} {dtype:?} {rows}: {difference:e} of {norm:e}");
                }
            }
            let each = [(Q4K, 256), (Q8_0, 40), (Q6K, 33)].map(|(kind, rows)| (blocks(rows, 512, kind), rows));
            let each = each.map(|(blocks, _)| Linear::stack(vec![Matrix::Blocks(blocks)], &cuda).unwrap());
            let Some(all) = Linear::joined(&each.each_ref()) else { panic!("expected one launch") };
            for rows in [1, 4, 20] {
                let x = on_cuda(&(whole_numbers(rows, 512) * 0.0078125)?)?;
                let apart = each.iter().map(|linear| linear.forward(&x)).collect::<Result<Vec<_>>>()?;
                let (joined, apart_all) =
                    (all.forward(&x)?.to_dtype(DType::F32)?, Tensor::cat(&apart, 1)?.to_dtype(DType::F32)?);
                let error = norm(&(joined - &apart_all)?)? / norm(&apart_all)?;
                assert!(error <= bound, "{dtype:?} {rows}: {error:e}");
                let Linear::Quantized(gate_up) = &each[0] else { panic!("expected it quantised") };
                let fused = gate_up.swiglu(&x, &launch)?;
                assert_eq!(fused.is_none(), rows > 16 && dtype == DType::F32);
                let Some(fused) = fused else { continue };
                let y = apart[0].to_dtype(DType::F32)?;
                let want = (y.narrow(1, 0, 128)?.silu()? * y.narrow(1, 128, 128)?)?;
                let error = norm(&(fused.to_dtype(DType::F32)? - &want)?)? / norm(&want)?;
                assert!(error <= 2. * bound, "{dtype:?} {rows}: {error:e}");
            }
            let table = blocks(50, 512, Q6K);
            let Some(packed) = table.packed(&cuda)? else { panic!("expected it packed") };
            let rows = packed.rows(&Tensor::new(&[49u32, 0, 50, 7], &cuda)?, dtype)?.to_device(&Device::Cpu)?;
            let zeros = Tensor::zeros((1, 512), DType::F32, &Device::Cpu)?;
            let table = Tensor::cat(&[table.tensor()?, zeros], 0)?.to_dtype(dtype)?;
            let ids = Tensor::new(&[49u32, 0, 50, 7], &Device::Cpu)?;
            assert_eq!(values(&rows)?, values(&table.index_select(&ids, 0)?)?, "{dtype:?}");
        }
        Ok(())
    }

    #[test]
    fn parts_of_any_types_are_one_product() -> Result<()> {
        use GgmlDType::{Q4K, Q4_0, Q5_1, Q6K, Q8_0};
        // 192 is no multiple of 256: there candle rounds in blocks of 32.
        for (columns, dtypes) in [(192, [Q8_0, Q8_0, Q4_0, Q5_1]), (512, [Q4K, Q6K, Q6K, Q8_0])] {
            let parts: Vec<_> = dtypes.iter().enumerate().map(|(i, t)| blocks(5 + 16 * i, columns, *t)).collect();
            let dense = (blocks(3, columns, GgmlDType::F32).tensor()? * 0.5)?;
            let wide: Vec<_> = parts.iter().map(Blocks::tensor).chain([Ok(dense.clone())]).collect::<Result<_>>()?;
            let weight = Tensor::cat(&wide, 0)?;
            let parts = parts.into_iter().map(Matrix::Blocks).chain([Matrix::Dense(dense)]);
            let linear = Linear::stack(parts.collect(), &Device::Cpu)?;
            for rows in [1, 2, 9] {
                check(&linear, &whole_numbers(rows, columns), &weight)?;
            }
            let none = Tensor::zeros((0, columns), candle_core::DType::F32, &Device::Cpu)?;
            assert_eq!(linear.forward(&none)?.dims(), [0, weight.dim(0)?]);
            // Halves hold these numbers; of the products the first digits.
            for dtype in [DType::BF16, DType::F16] {
                let x = (whole_numbers(3, columns) * 0.0625)?;
                let y = linear.forward(&x.to_dtype(dtype)?)?;
                assert_eq!(y.dtype(), dtype);
                let error = (y.to_dtype(DType::F32)? - linear.forward(&x)?)?.abs()?.max_all()?.to_scalar::<f32>()?;
                assert!(error <= 0.5, "{dtype:?}: {error}");
            }
        }
        Ok(())
    }

    #[test]
    fn columns_may_be_in_another_order() -> Result<()> {
        // Two groups of three pieces of 128: half a block each.
        let tiles = Tiles { groups: 2, per_group: 3, size: 128 };
        let stored = blocks(20, 768, GgmlDType::Q6K);
        let pieces: Vec<_> = [0, 2, 4, 1, 3, 5].map(|piece| stored.tensor()?.narrow(1, piece * 128, 128)).into();
        let weight = Tensor::cat(&pieces.into_iter().collect::<Result<Vec<_>>>()?, 1)?;
        let linear = Linear::stack(vec![Matrix::Tiled(stored, tiles)], &Device::Cpu)?;
        check(&linear, &whole_numbers(4, 768), &weight)
    }
}
