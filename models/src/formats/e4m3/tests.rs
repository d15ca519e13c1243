use super::super::{dequantized, Format, Fp8Format, Stored};
use super::*;
use crate::config::Fp8Config;
use candle_nn::VarBuilder;
use std::collections::HashMap;

/// `w` of this shape in blocks of [rows, 128], and what is kept of it.
fn source(shape: &[usize], rows: usize, bytes: impl Fn(usize) -> u8) -> Result<Weights> {
    let &[ref lead @ .., n, k] = shape else { bail!("a matrix") };
    let count: usize = shape.iter().product();
    let numbers: Vec<f32> = (0..count).map(|i| e4m3(bytes(i))).collect();
    let weight = Tensor::from_vec(numbers, shape, &Device::Cpu)?.to_dtype(DType::F8E4M3)?;
    let blocks = [lead, &[n.div_ceil(rows), k.div_ceil(128)]].concat();
    let scales: Vec<f32> = (0..blocks.iter().product()).map(|i: usize| 0.5 + i as f32).collect();
    let scales = Tensor::from_vec(scales, blocks, &Device::Cpu)?;
    let weights = HashMap::from([("w".to_string(), weight), ("w_scale_inv".to_string(), scales)]);
    let config = Fp8Config::new(Some([rows, 128]), vec![]);
    let vb = dequantized(VarBuilder::from_tensors(weights, DType::F32, &Device::Cpu), Some(&config), None, false);
    Ok(Weights { vb, format: Fp8Format::new(&config, false).expect("blocks of 128 columns") })
}

/// A checkpoint with one matrix, and what of it stays in e4m3.
struct Weights {
    vb: VarBuilder<'static>,
    format: Fp8Format,
}

impl Weights {
    fn e4m3(&self, shape: &[usize]) -> Result<Option<E4m3Rows>> {
        Ok(self.format.matrix(&self.vb, "w", shape)?.map(|matrix| match matrix {
            Stored::E4m3(rows) => rows,
            other => panic!("expected e4m3, got {other:?}"),
        }))
    }
}

fn numbers(x: &Tensor) -> Result<Vec<f32>> {
    x.flatten_all()?.to_vec1()
}

#[test]
fn they_stand_for_the_dequantised_numbers() -> Result<()> {
    for shape in [&[7, 64][..], &[5, 320], &[3, 6, 256], &[2, 3, 7, 128]] {
        for rows in [1, 2, 3, 128] {
            let any = source(shape, rows, |i| (i * 37 % 127) as u8 | (i as u8 & 128))?;
            let got = any.e4m3(shape)?.expect("in e4m3").dense(DType::F32, &Device::Cpu)?;
            assert_eq!(numbers(&got)?, numbers(&any.vb.get(shape, "w")?)?, "{shape:?} in blocks of {rows}");
        }
    }
    Ok(())
}

#[test]
fn rows_in_another_order_keep_their_scales() -> Result<()> {
    let any = source(&[6, 192], 2, |i| (i % 120) as u8)?;
    let turned = |x: &Tensor| Tensor::cat(&[x.narrow(0, 3, 3)?, x.narrow(0, 0, 3)?], 0);
    let rows = any.e4m3(&[6, 192])?.expect("in e4m3");
    let got = E4m3Rows::stack(&[rows.select_rows(&[3..6, 0..3])?, rows.clone()])?.dense(DType::F32, &Device::Cpu)?;
    let whole = any.vb.get((6, 192), "w")?;
    assert_eq!(numbers(&got)?, numbers(&Tensor::cat(&[turned(&whole)?, whole], 0)?)?);
    Ok(())
}

#[test]
fn what_the_kernels_do_not_support_is_dense() -> Result<()> {
    assert!(source(&[4, 96], 128, |_| 1)?.e4m3(&[4, 96])?.is_none());
    for nan in [0x7f, 0xff] {
        let any = source(&[4, 128], 128, |i| if i == 200 { nan } else { 1 })?;
        assert!(any.e4m3(&[4, 128])?.is_none());
    }
    let config = Fp8Config::new(Some([128, 64]), vec![]);
    assert!(Fp8Format::new(&config, false).is_none());
    let config = Fp8Config::new(Some([128, 128]), vec![]);
    let kept = [false, true].map(|parts| Fp8Format::new(&config, parts).expect("blocks of 128 columns"));
    assert_eq!(kept.map(|kept| [64, 96, 128].map(|n| kept.keeps(n))), [[true, false, true], [false, false, true]]);
    Ok(())
}

#[test]
fn blocks_begin_where_scales_change() -> Result<()> {
    let blocks = |each: &[f32], begins: &[usize]| -> Result<(Vec<f32>, usize)> {
        let each = Tensor::new(each, &Device::Cpu)?.reshape(((), 1))?;
        let (scales, rows) = Scales::new(&each)?.blocks(begins)?;
        Ok((numbers(&scales)?, rows))
    };
    let of = |runs: &[(f32, usize)]| runs.iter().flat_map(|&(x, n)| vec![x; n]).collect::<Vec<_>>();
    assert_eq!(blocks(&of(&[(1., 128), (2., 256), (3., 5)]), &[])?, (vec![1., 2., 2., 3.], 128));
    assert_eq!(blocks(&of(&[(1., 128), (2., 64)]), &[0, 32])?, (of(&[(1., 4), (2., 2)]), 32));
    assert_eq!(blocks(&of(&[(1., 3), (2., 3)]), &[])?, (vec![1., 1., 1., 2., 2., 2.], 1));
    assert_eq!(blocks(&of(&[(1., 4), (2., 2)]), &[])?, (vec![1., 2.], 4));
    assert_eq!(blocks(&of(&[(7., 300)]), &[])?, (vec![7.; 3], 128));
    Ok(())
}
