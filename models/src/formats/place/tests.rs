use super::*;
use crate::weights::Tiles;
use candle_core::quantized::GgmlDType;
use candle_core::{DType, Module};
#[cfg(feature = "cuda")]
use candle_gdn_core::Launch;

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

fn check(linear: &Weight, x: &Tensor, weight: &Tensor) -> Result<()> {
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
    let Some(cuda) = candle_gdn_core::device::cuda::testing::device() else { return Ok(()) };
    use GgmlDType::{Q2K, Q3K, Q4K, Q4_0, Q4_1, Q5K, Q5_0, Q5_1, Q6K, Q8_0};
    for columns in [256, 1024, 1280] {
        for dtype in [Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2K, Q3K, Q4K, Q5K, Q6K] {
            let stored = [blocks(37, columns, dtype), blocks(100, columns, dtype)];
            let weight = Tensor::cat(&[stored[0].tensor()?, stored[1].tensor()?], 0)?;
            let linear = stack(stored.map(Stored::Blocks).into(), &cuda)?;
            for rows in [1, 2, 5, 8, 9, 70] {
                let x = whole_numbers(rows, columns);
                let got = linear.forward(&x.to_device(&cuda)?)?.to_device(&Device::Cpu)?;
                let difference = norm(&(got - x.matmul(&weight.t()?)?)?)?;
                let all = norm(&x.abs()?.matmul(&weight.abs()?.t()?)?)?;
                assert!(difference <= all / 2048., "{dtype:?} {rows} x {columns}: {difference:e} of {all:e}");
                // A view: not at its storage's begin.
                let y = linear.forward(&whole_numbers(rows + 1, columns).to_device(&cuda)?.narrow(0, 1, rows)?)?;
                let copy = whole_numbers(rows + 1, columns).narrow(0, 1, rows)?.force_contiguous()?.to_device(&cuda)?;
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
    let Some(cuda) = candle_gdn_core::device::cuda::testing::device() else { return Ok(()) };
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
            let linear = stack(vec![Stored::Tiled(stored, tiles)], &cuda)?;
            for rows in [1, 3, 40, 300] {
                let x = (whole_numbers(rows, 768) * 0.0625)?;
                // For many rows the numbers are rounded to x's dtype first. Worked out in f64, the product is 2.1e-4 off in
                // f16 then, and of the numbers as they are it would be 1.1e-3 to 1.6e-3.
                let many = rows > crate::weights::plan::FEW;
                let weight = if many { weight.to_dtype(dtype)?.to_dtype(DType::F32)? } else { weight.clone() };
                let want = x.matmul(&weight.t()?)?;
                let got = linear.forward(&on_cuda(&x)?)?.to_dtype(DType::F32)?.to_device(&Device::Cpu)?;
                let (difference, norm) = (norm(&(got - &want)?)?, norm(&want)?);
                assert!(difference <= bound * norm, "{kind:?} {dtype:?} {rows}: {difference:e} of {norm:e}");
            }
        }
        let each = [(Q4K, 256), (Q8_0, 40), (Q6K, 33)].map(|(kind, rows)| (blocks(rows, 512, kind), rows));
        let each = each.map(|(blocks, _)| stack(vec![Stored::Blocks(blocks)], &cuda).unwrap());
        assert!(Weight::are_one_launch(&each));
        let all = Weight::stack(each.to_vec());
        for rows in [1, 4, 20] {
            let x = on_cuda(&(whole_numbers(rows, 512) * 0.0078125)?)?;
            let apart = each.iter().map(|linear| linear.forward(&x)).collect::<Result<Vec<_>>>()?;
            let (joined, apart_all) =
                (all.forward(&x)?.to_dtype(DType::F32)?, Tensor::cat(&apart, 1)?.to_dtype(DType::F32)?);
            let error = norm(&(joined - &apart_all)?)? / norm(&apart_all)?;
            assert!(error <= bound, "{dtype:?} {rows}: {error:e}");
            let Weight::Packed(gate_up) = &each[0] else { panic!("expected it packed") };
            let fused = crate::weights::cuda::packed::swiglu(&x, gate_up, &launch)?;
            assert_eq!(fused.is_none(), rows > 16 && dtype == DType::F32);
            let Some(fused) = fused else { continue };
            let y = apart[0].to_dtype(DType::F32)?;
            let want = (y.narrow(1, 0, 128)?.silu()? * y.narrow(1, 128, 128)?)?;
            let error = norm(&(fused.to_dtype(DType::F32)? - &want)?)? / norm(&want)?;
            assert!(error <= 2. * bound, "{dtype:?} {rows}: {error:e}");
        }
        let table = blocks(50, 512, Q6K);
        let Some(packed) = packed(&table, 0, &cuda)? else { panic!("expected it packed") };
        let rows = packed.lookup(&Tensor::new(&[49u32, 0, 50, 7], &cuda)?, dtype)?.to_device(&Device::Cpu)?;
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
        let parts = parts.into_iter().map(Stored::Blocks).chain([Stored::Dense(dense)]);
        let linear = stack(parts.collect(), &Device::Cpu)?;
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
    let linear = stack(vec![Stored::Tiled(stored, tiles)], &Device::Cpu)?;
    check(&linear, &whole_numbers(4, 768), &weight)
}
