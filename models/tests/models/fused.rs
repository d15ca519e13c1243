//! Residual and norm, and the gate of the feed-forward, against their definitions in f64.

use crate::support::{devices, poison, refused, rel_rms, rounded, to_device, values, Rng};
use candle_core::{DType, Device, Result, Tensor};
use candle_gdn_models::{AddRmsNorm, Swiglu};

const DTYPES: [(DType, f64); 3] = [(DType::F32, 1e-6), (DType::BF16, 4e-3), (DType::F16, 5e-4)];
// Large enough to be missed.
const EPS: f64 = 0.03;

fn add_rms_norm(x: &Tensor, h: &Tensor, weight: &Tensor, eps: f64) -> Result<(Tensor, Tensor)> {
    AddRmsNorm::new(eps)?.forward(x, h, weight)
}

fn rms_norm(x: &Tensor, weight: &Tensor) -> Result<Tensor> {
    AddRmsNorm::new(EPS)?.norm(x, weight)
}

fn swiglu(x: &Tensor) -> Result<Tensor> {
    Swiglu::new().forward(x)
}

fn norm(x: &[f64], weight: &[f64]) -> Vec<f64> {
    x.chunks(weight.len())
        .flat_map(|row| {
            let mean = row.iter().map(|x| x * x).sum::<f64>() / row.len() as f64;
            let scale = 1.0 / (mean + EPS).sqrt();
            row.iter().zip(weight).map(move |(x, w)| x * scale * w)
        })
        .collect()
}

fn gated(x: &[f64], columns: usize) -> Vec<f64> {
    x.chunks(2 * columns)
        .flat_map(|row| {
            let (gate, up) = row.split_at(columns);
            gate.iter().zip(up).map(|(g, u)| g / (1.0 + (-g).exp()) * u)
        })
        .collect()
}

/// Normal numbers in `[rows, columns]` of `dtype` with `gap` other ones around each row, from element `shift` on.
fn view(rng: &mut Rng, rows: usize, columns: usize, gap: usize, shift: usize, dtype: DType) -> Result<Tensor> {
    let whole = columns + gap + shift;
    let (tensor, _) = rounded(&rng.normals(rows * whole), &[rows, whole], dtype)?;
    tensor.narrow(1, shift, columns)
}

/// `x` on `device` with NaN around each row.
fn placed(x: &Tensor, gap: usize, shift: usize, device: &Device) -> Result<Tensor> {
    let (rows, columns) = x.dims2()?;
    let whole = Tensor::full(f32::NAN, (rows, columns + gap + shift), &Device::Cpu)?.to_dtype(x.dtype())?;
    whole.slice_set(&x.contiguous()?, 1, shift)?;
    to_device(&whole, device)?.narrow(1, shift, columns)
}

fn weight(rng: &mut Rng, dim: usize) -> Result<(Tensor, Vec<f64>)> {
    let near_one: Vec<f64> = rng.normals(dim).iter().map(|w| 1.0 + 0.3 * w).collect();
    rounded(&near_one, &[dim], DType::F32)
}

fn check_residual(rng: &mut Rng, device: &Device, dtype: DType, bound: f64, dims: [usize; 4]) -> Result<()> {
    let [rows, dim, gap, shift] = dims;
    let what = format!("{dtype:?} on {device:?}, rows, dim, gap, shift {dims:?}");
    let (x, h) = (view(rng, rows, dim, gap, shift, dtype)?, view(rng, rows, dim, 2 * gap, shift, dtype)?);
    let (w, w_values) = weight(rng, dim)?;
    let sum_want = values(&(&x + &h)?);
    let (x, h, w) = (placed(&x, gap, shift, device)?, placed(&h, 2 * gap, shift, device)?, to_device(&w, device)?);
    poison(2 * rows * dim, dtype, device)?;
    let (sum, y) = add_rms_norm(&x, &h, &w, EPS)?;
    assert_eq!((sum.dims(), y.dims(), y.dtype()), (x.dims(), x.dims(), dtype), "{what}");
    // As candle adds.
    assert_eq!(values(&sum), sum_want, "{what}");
    let error = rel_rms(&values(&y), &norm(&sum_want, &w_values));
    assert!(error < bound, "{what}: {error:e}");
    let y = rms_norm(&x, &w)?;
    let error = rel_rms(&values(&y), &norm(&values(&x), &w_values));
    assert!(error < bound, "{what}, norm alone: {error:e}");
    Ok(())
}

#[test]
fn residuals_and_norms() -> Result<()> {
    let mut rng = Rng::new(1);
    for device in devices() {
        for (dtype, bound) in DTYPES {
            for dim in [1, 7, 8, 77, 256, 1024, 2560, 5120, 12296] {
                for rows in [1, 3, 33] {
                    for [gap, shift] in [[0, 0], [16, 0], [3, 1]] {
                        check_residual(&mut rng, &device, dtype, bound, [rows, dim, gap, shift])?;
                    }
                }
            }
        }
    }
    Ok(())
}

#[test]
fn gates() -> Result<()> {
    let mut rng = Rng::new(2);
    for device in devices() {
        for (dtype, bound) in DTYPES {
            for columns in [1, 8, 77, 512, 9216] {
                for rows in [1, 3, 33] {
                    for [gap, shift] in [[0, 0], [16, 0], [3, 1]] {
                        let x = view(&mut rng, rows, 2 * columns, gap, shift, dtype)?;
                        let want = gated(&values(&x), columns);
                        let x = placed(&x, gap, shift, &device)?;
                        poison(rows * columns, dtype, &device)?;
                        let y = swiglu(&x)?;
                        assert_eq!((y.dims(), y.dtype()), (&[rows, columns][..], dtype));
                        let error = rel_rms(&values(&y), &want);
                        assert!(error < bound, "{dtype:?} on {device:?}, {rows}x{columns}, gap {gap}: {error:e}");
                    }
                }
            }
        }
    }
    Ok(())
}

#[test]
fn leading_dimensions_of_any_strides() -> Result<()> {
    let mut rng = Rng::new(3);
    for device in devices() {
        let (x, _) = rounded(&rng.normals(2 * 3 * 64), &[2, 3, 64], DType::F32)?;
        let (w, w_values) = weight(&mut rng, 64)?;
        let (x, w) = (to_device(&x, &device)?, to_device(&w, &device)?);
        // Batch and tokens swapped, and columns strided.
        for x in [x.transpose(0, 1)?, x.narrow(0, 1, 1)?, x.transpose(1, 2)?.contiguous()?.transpose(1, 2)?] {
            let (sum, y) = add_rms_norm(&x, &x, &w, EPS)?;
            let twice: Vec<f64> = values(&x).iter().map(|x| 2.0 * x).collect();
            assert_eq!(values(&sum), twice);
            assert!(rel_rms(&values(&y), &norm(&twice, &w_values)) < 1e-6);
            let g = swiglu(&x)?;
            assert_eq!(g.dims()[..2], x.dims()[..2]);
            assert!(rel_rms(&values(&g), &gated(&values(&x), 32)) < 1e-6);
        }
    }
    Ok(())
}

#[test]
fn no_rows() -> Result<()> {
    for device in devices() {
        let x = to_device(&Tensor::zeros((0, 64), DType::F32, &Device::Cpu)?, &device)?;
        let w = Tensor::ones(64, DType::F32, &device)?;
        let (sum, y) = add_rms_norm(&x, &x, &w, EPS)?;
        assert_eq!((sum.dims(), y.dims()), (&[0, 64][..], &[0, 64][..]));
        assert_eq!(rms_norm(&x, &w)?.dims(), [0, 64]);
        assert_eq!(swiglu(&x)?.dims(), [0, 32]);
    }
    Ok(())
}

#[test]
fn nan_is_seen() -> Result<()> {
    let mut rng = Rng::new(4);
    for device in devices() {
        for (dtype, _) in DTYPES {
            for dim in [64, 77] {
                let mut numbers = rng.normals(3 * dim);
                numbers[dim + 5] = f64::NAN;
                let x = Tensor::from_slice(&numbers, (3, dim), &Device::Cpu)?.to_dtype(dtype)?.to_device(&device)?;
                let (w, _) = weight(&mut rng, dim)?;
                let (sum, y) = add_rms_norm(&x, &x, &w.to_device(&device)?, EPS)?;
                let nans = |x: &Tensor| values(x).iter().map(|x| x.is_nan()).collect::<Vec<_>>();
                assert_eq!(nans(&sum), numbers.iter().map(|x| x.is_nan()).collect::<Vec<_>>());
                let row_of = |i: usize| i / dim == 1;
                assert_eq!(nans(&y), (0..3 * dim).map(row_of).collect::<Vec<_>>(), "{dtype:?} {dim}");
            }
            let mut numbers = rng.normals(2 * 16);
            (numbers[3], numbers[16 + 8 + 4]) = (f64::NAN, f64::NAN);
            // A gate that is shut passes nothing, one that is wide open all.
            (numbers[0], numbers[1]) = (-1e4, 1e4);
            let x = Tensor::from_slice(&numbers, (2, 16), &Device::Cpu)?.to_dtype(dtype)?;
            let up = values(&x)[9];
            let y = values(&swiglu(&x.to_device(&device)?)?);
            let nans: Vec<_> = y.iter().enumerate().filter(|(_, y)| y.is_nan()).map(|(i, _)| i).collect();
            assert_eq!(nans, [3, 8 + 4], "{dtype:?}");
            assert_eq!(y[0].abs(), 0.0);
            assert!((y[1] / (1e4 * up) - 1.0).abs() < 1e-2, "{}", y[1]);
        }
    }
    Ok(())
}

#[test]
fn what_does_not_fit_is_refused() -> Result<()> {
    let x = Tensor::zeros((2, 6), DType::F32, &Device::Cpu)?;
    let w = Tensor::ones(6, DType::F32, &Device::Cpu)?;
    let add = |x: &Tensor, h: &Tensor, w: &Tensor, eps, part| refused(add_rms_norm(x, h, w, eps), &[part]);
    add(&x, &x.narrow(0, 0, 1)?, &w, EPS, "h: expected shape [2, 6]");
    add(&x, &x.to_dtype(DType::BF16)?, &w, EPS, "h: expected dtype");
    add(&x, &x, &w.to_dtype(DType::BF16)?, EPS, "weight: expected dtype F32");
    add(&x, &x, &w.narrow(0, 0, 5)?, EPS, "weight: expected shape [6]");
    add(&x, &x, &w, -1.0, "eps");
    refused(rms_norm(&x.to_dtype(DType::U32)?, &w), &["x: expected dtype"]);
    refused(swiglu(&x.narrow(1, 0, 5)?), &["gate_up: expected shape"]);
    refused(swiglu(&x.to_dtype(DType::F64)?), &["gate_up: expected dtype"]);
    Ok(())
}

/// The ops as candle applies them: views as `forward` reads them, and nothing that the kernels would read wrongly.
#[test]
fn bare_ops() -> Result<()> {
    let mut rng = Rng::new(5);
    for device in devices() {
        for (dtype, _) in DTYPES {
            let mut view = |gap| placed(&view(&mut rng, 3, 16, 0, 0, dtype)?, gap, 1, &device);
            let (x, h) = (view(3)?, view(5)?);
            let w = Tensor::new(&[0.5f32; 16], &device)?;
            let op = AddRmsNorm::new(EPS)?;
            for x in [x.clone(), x.narrow(0, 1, 1)?.broadcast_as((3, 16))?] {
                let (both, (sum, y)) = (x.apply_op3_no_bwd(&h, &w, &op)?, op.forward(&x, &h, &w)?);
                assert_eq!(both.dims(), [2, 3, 16]);
                assert_eq!(values(&both), [values(&sum), values(&y)].concat());
                assert_eq!(values(&x.apply_op1_no_bwd(&Swiglu::new())?), values(&swiglu(&x)?));
            }
            let bf16 = w.to_dtype(DType::BF16)?;
            refused(x.apply_op3_no_bwd(&h, &bf16, &op), &["weight: expected dtype F32, got BF16"]);
            refused(x.apply_op3_no_bwd(&h.narrow(0, 0, 2)?, &w, &op), &["h: expected shape [3, 16], got [2, 16]"]);
            refused(x.to_dtype(DType::U32)?.apply_op1_no_bwd(&Swiglu::new()), &["gate_up: expected dtype"]);
        }
    }
    Ok(())
}
