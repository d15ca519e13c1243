use super::*;

fn matrix(rows: usize, columns: usize) -> Tensor {
    let w: Vec<f32> = (0..rows * columns).map(|i| (i as f32 * 0.61).sin()).collect();
    Tensor::from_vec(w, (rows, columns), &Device::Cpu).unwrap()
}

fn values(x: &Tensor) -> Vec<Vec<f32>> {
    x.to_dtype(DType::F32).unwrap().to_vec2().unwrap()
}

#[test]
fn quantises_as_candle_does() -> Result<()> {
    for dtype in [GgmlDType::Q8_0, GgmlDType::Q4K, GgmlDType::Q5_1] {
        let blocks = Blocks::quantize(&matrix(70, 512), dtype)?;
        assert_eq!(blocks.data, *QTensor::quantize(&matrix(70, 512), dtype)?.data()?, "{dtype:?}");
        let bf16 = matrix(3, 512).to_dtype(DType::BF16)?;
        assert_eq!(Blocks::quantize(&bf16, dtype)?.data, *QTensor::quantize(&bf16, dtype)?.data()?);
    }
    assert!(Blocks::quantize(&matrix(2, 48), GgmlDType::Q8_0).is_err());
    Ok(())
}

/// Moving blocks about is moving numbers about.
#[test]
fn rows_and_columns_move_exactly() -> Result<()> {
    for dtype in [GgmlDType::F32, GgmlDType::F16, GgmlDType::Q8_0, GgmlDType::Q4K] {
        let blocks = Blocks::quantize(&matrix(6, 768), dtype)?;
        let wide = values(&blocks.tensor()?);
        let rows = blocks.select_rows(&[4..6, 0..1, 0..1]);
        assert_eq!(values(&rows.tensor()?), [4, 5, 0, 0].map(|row| wide[row].clone()));
        let order = [512..768, 0..256];
        let moved = blocks.select_columns(&order).unwrap();
        let want = wide.iter().map(|row| order.clone().map(|range| row[range].to_vec()).concat());
        assert_eq!(values(&moved.tensor()?), want.collect::<Vec<_>>());
        // Half a block cannot be taken.
        assert_eq!(blocks.select_columns(&[0..256, 384..512]).is_none(), dtype == GgmlDType::Q4K);
    }
    Ok(())
}

#[test]
fn only_what_is_alike_is_stacked() -> Result<()> {
    let of = |rows, columns, dtype| Blocks::quantize(&matrix(rows, columns), dtype);
    use GgmlDType::{Q4_0, Q8_0};
    let parts = vec![of(2, 64, Q8_0)?, of(3, 64, Q8_0)?, of(1, 64, Q4_0)?, of(1, 32, Q4_0)?, of(4, 32, Q4_0)?];
    let rows: Vec<_> = Blocks::stack(parts.clone()).iter().map(|rows| rows.rows).collect();
    assert_eq!(rows, [5, 1, 5]);
    let both = Blocks::one(parts[..2].to_vec()).unwrap();
    let want = Tensor::cat(&[parts[0].tensor()?, parts[1].tensor()?], 0)?;
    assert_eq!(values(&both.tensor()?), values(&want));
    assert!(Blocks::one(parts).is_none());
    Ok(())
}
