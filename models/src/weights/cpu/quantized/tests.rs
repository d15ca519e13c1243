use super::*;
use crate::formats::Blocks;
use candle_core::{DType, Device, Result, Tensor};
use GgmlDType::{Q2K, Q3K, Q4K, Q4_0, Q4_1, Q5K, Q5_0, Q5_1, Q6K, Q8_0};

/// Blocks of such bytes but for their factors, which are 1/64 and -1/32 in f16.
fn blocks_of(dtype: GgmlDType, rows: usize, columns: usize, bytes: impl FnMut() -> u8) -> Blocks {
    let factors: &[usize] = match dtype {
        Q8_0 | Q4_0 | Q5_0 => &[0],
        Q4_1 | Q5_1 | Q4K | Q5K => &[0, 2],
        Q2K => &[80, 82],
        Q3K => &[108],
        _ => &[208],
    };
    let count = rows * columns / dtype.block_size() * dtype.type_size();
    let mut data: Vec<u8> = std::iter::repeat_with(bytes).take(count).collect();
    for block in data.chunks_exact_mut(dtype.type_size()) {
        for (at, factor) in factors.iter().zip([0x2400u16, 0xa800]) {
            block[*at..at + 2].copy_from_slice(&factor.to_le_bytes());
        }
    }
    Blocks { dtype, rows, columns, data }
}

fn random_bytes() -> impl FnMut() -> u8 {
    let mut random = 1u64;
    move || {
        random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (random >> 56) as u8
    }
}

fn any_blocks(dtype: GgmlDType, rows: usize, columns: usize) -> Blocks {
    blocks_of(dtype, rows, columns, random_bytes())
}

fn any_x(rows: usize, columns: usize) -> Result<Tensor> {
    let any = |i: usize| ((i * 7919 + i / 13) % 2003) as f32 / 1000. - 1.;
    Tensor::from_vec((0..rows * columns).map(any).collect::<Vec<_>>(), (rows, columns), &Device::Cpu)
}

fn norm(x: &Tensor) -> Result<f64> {
    x.to_dtype(DType::F64)?.sqr()?.sum_all()?.sqrt()?.to_scalar()
}

/// In f64, of the numbers as candle reads them, by each of the processor's instruction sets.
#[test]
fn products_are_those_of_candles_numbers() -> Result<()> {
    for dtype in [Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2K, Q3K, Q4K, Q5K, Q6K] {
        let width = dtype.block_size();
        for (rows, columns) in [(1, width), (16, 2 * width), (37, 3 * width), (100, 1024)] {
            let blocks = any_blocks(dtype, rows, columns);
            let Some(mut weight) = Quantized::new(dtype, rows, columns, &blocks.data) else { return Ok(()) };
            let wide = blocks.tensor()?;
            for (i, want) in wide.to_vec2::<f32>()?.iter().enumerate() {
                let mut row = vec![f32::NAN; columns];
                weight.read_row(i, &mut row);
                assert_eq!(row, *want, "{dtype:?}, row {i} of {rows} x {columns}");
            }
            let wide = wide.to_dtype(DType::F64)?.t()?;
            for (n, instructions) in
                [1, 2, 3, 7, 8, 40].into_iter().flat_map(|n| Instructions::all().into_iter().map(move |i| (n, i)))
            {
                weight.instructions = instructions;
                let x = any_x(n, columns)?;
                let y = Tensor::from_vec(weight.product(&x.flatten_all()?.to_vec1()?, n), (n, rows), &Device::Cpu)?;
                let x = x.to_dtype(DType::F64)?;
                let error = norm(&(y.to_dtype(DType::F64)? - x.matmul(&wide)?)?)?;
                // x is rounded to 8 bits: 1/254 of the largest of 32 at most.
                let all = norm(&x.abs()?.matmul(&wide.abs()?)?)?;
                assert!(
                    error <= all / 300.,
                    "{dtype:?} {instructions:?}, {rows} x {columns}, {n}: {error:e} of {all:e}"
                );
            }
        }
    }
    Ok(())
}

/// candle rounds x as llama.cpp does. x is about normal: sums of 8 bytes.
#[test]
fn bytes_are_those_of_the_lines() {
    for dtype in [Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2K, Q3K, Q4K, Q5K, Q6K] {
        let Some(weight) = Quantized::new(dtype, 2 * PANEL, 512, &any_blocks(dtype, 2 * PANEL, 512).data) else {
            return;
        };
        let bytes = std::mem::size_of_val(&weight.lines[..]) as u64;
        assert_eq!(Quantized::bytes(dtype, 2 * PANEL as u64 * 512), Some(bytes), "{dtype:?}");
    }
}

#[test]
fn products_are_no_worse_than_candles() -> Result<()> {
    let (rows, columns, n) = (64, 1024, 64);
    let mut byte = random_bytes();
    let sums = (0..n * columns).map(|_| (0..8).map(|_| f32::from(byte()) - 127.5).sum::<f32>());
    let x = Tensor::from_vec(sums.collect::<Vec<_>>(), (n, columns), &Device::Cpu)?;
    for dtype in [Q4_0, Q8_0, Q2K, Q3K, Q4K, Q5K, Q6K] {
        let blocks = any_blocks(dtype, rows, columns);
        let Some(mut weight) = Quantized::new(dtype, rows, columns, &blocks.data) else { return Ok(()) };
        let want = x.to_dtype(DType::F64)?.matmul(&blocks.tensor()?.to_dtype(DType::F64)?.t()?)?;
        let error = |y: Tensor| norm(&(y.to_dtype(DType::F64)? - &want)?);
        let candles = error(x.apply_op1_no_bwd(&blocks.qtensor((rows, columns), &Device::Cpu)?)?)?;
        for instructions in Instructions::all() {
            weight.instructions = instructions;
            let y = weight.product(&x.flatten_all()?.to_vec1()?, n);
            let ours = error(Tensor::from_vec(y, (n, rows), &Device::Cpu)?)?;
            assert!(ours <= 1.05 * candles, "{dtype:?} {instructions:?}: {ours:e}, candle {candles:e}");
        }
    }
    Ok(())
}

/// Largest numbers on both sides: no sum in 16 bits overflows.
#[test]
fn largest_products_fit() {
    for dtype in [Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2K, Q3K, Q4K, Q5K, Q6K] {
        for byte in [0, 0x7f, 0x80, 0xff] {
            let columns = 256;
            let blocks = blocks_of(dtype, 1, columns, || byte);
            let Some(mut weight) = Quantized::new(dtype, 1, columns, &blocks.data) else { return };
            let mut row = vec![0.; columns];
            weight.read_row(0, &mut row);
            for (sign, instructions) in
                [1f32, -1.].into_iter().flat_map(|s| Instructions::all().into_iter().map(move |i| (s, i)))
            {
                weight.instructions = instructions;
                let want: f64 = row.iter().map(|w| f64::from(sign * w)).sum();
                let y = weight.product(&vec![sign; columns], 1)[0];
                let all: f64 = row.iter().map(|w| f64::from(w.abs())).sum();
                assert!(
                    (f64::from(y) - want).abs() <= 1e-5 * all.max(1.),
                    "{dtype:?} {byte} {instructions:?}: {y} {want}"
                );
            }
        }
    }
}

#[test]
fn what_is_not_finite_stays_so() {
    let (rows, columns) = (5, 64);
    let Some(mut weight) = Quantized::new(Q8_0, rows, columns, &any_blocks(Q8_0, rows, columns).data) else { return };
    for (bad, instructions) in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY]
        .into_iter()
        .flat_map(|bad| Instructions::all().into_iter().map(move |i| (bad, i)))
    {
        weight.instructions = instructions;
        let mut x = vec![0.5; 3 * columns];
        x[columns + 40] = bad;
        let y = weight.product(&x, 3);
        assert!(y[..rows].iter().chain(&y[2 * rows..]).all(|y| y.is_finite()), "{bad}");
        assert!(y[rows..2 * rows].iter().all(|y| y.is_nan()), "{bad}");
    }
    assert!(weight.product(&[], 0).is_empty());
}
