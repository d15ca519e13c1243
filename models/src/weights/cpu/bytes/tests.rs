use super::*;
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{Device, Result, Tensor};

#[test]
fn products_are_candles() -> Result<()> {
    let any = |i: usize| ((i * 7919 + i / 13) % 2003) as f32 / 1000. - 1.;
    let tensor = |rows: usize, columns: usize| {
        Tensor::from_vec((0..rows * columns).map(any).collect::<Vec<_>>(), (rows, columns), &Device::Cpu)
    };
    for (rows, columns) in [(1, 32), (16, 64), (37, 96), (100, 1024)] {
        let weight = QTensor::quantize(&tensor(rows, columns)?, GgmlDType::Q8_0)?;
        let Some(bytes) = Bytes::new(rows, columns, &weight.data()?) else { return Ok(()) };
        let wide = weight.dequantize(&Device::Cpu)?;
        for (i, want) in wide.to_vec2::<f32>()?.iter().enumerate() {
            let mut row = vec![f32::NAN; columns];
            bytes.read_row(i, &mut row);
            assert_eq!(row, *want, "row {i} of {rows} x {columns}");
        }
        for n in [1, 2, 3, 7, 8, 21] {
            let x = tensor(n, columns)?;
            let y = bytes.product(&x.flatten_all()?.to_vec1::<f32>()?, n);
            let norm = |x: &Tensor| x.sqr()?.sum_all()?.sqrt()?.to_scalar::<f32>();
            let want = x.matmul(&wide.t()?)?;
            let error = norm(&(Tensor::from_vec(y, (n, rows), &Device::Cpu)? - &want)?)?;
            // x is rounded to 8 bits: 1/254 of the largest of 32 at most.
            let all = norm(&x.abs()?.matmul(&wide.abs()?.t()?)?)?;
            assert!(error <= all / 300., "{rows} x {columns}, {n}: {error:e} of {all:e}");
        }
    }
    Ok(())
}

#[test]
fn what_is_not_finite_stays_so() {
    let (rows, columns) = (5, 64);
    let Some(bytes) = Bytes::new(rows, columns, &vec![1; rows * columns / BLOCK * STORED]) else { return };
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let mut x = vec![0.5; 3 * columns];
        x[columns + 40] = bad;
        let y = bytes.product(&x, 3);
        assert!(y[..rows].iter().chain(&y[2 * rows..]).all(|y| y.is_finite()), "{bad}");
        assert!(y[rows..2 * rows].iter().all(|y| y.is_nan()), "{bad}");
    }
    assert!(bytes.product(&[], 0).is_empty());
}
