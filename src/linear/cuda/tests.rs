//! Products of few rows on a GPU.

use super::*;
use candle_core::Device;
use candle_gdn_core::device::cuda::testing::device;

/// Smooth enough to be anything, and no two alike.
fn numbers(rows: usize, columns: usize, seed: f64) -> Tensor {
    let values: Vec<f64> = (0..rows * columns).map(|i| (seed + i as f64 * 0.61).sin()).collect();
    Tensor::from_vec(values, (rows, columns), &Device::Cpu).unwrap()
}

fn norm(x: &Tensor) -> f64 {
    x.sqr().unwrap().sum_all().unwrap().to_scalar::<f64>().unwrap().sqrt()
}

#[test]
fn equals_the_product_in_f64() {
    let Some(device) = device() else { return };
    // An output's rounding is at most half a unit in its last place.
    for (dtype, bound) in [(DType::BF16, 4e-3), (DType::F16, 5e-4)] {
        for (inputs, outputs) in [(64, 1), (192, 33), (1024, 100), (2560, 257)] {
            for rows in [1, 2, 7, 8, 9, 16, 17, 32] {
                // Both lie among other values, which must play no part.
                let part = |seed: f64, first: usize, n: usize| {
                    let whole = numbers(n + 3, inputs, seed).to_dtype(dtype).unwrap();
                    let here = whole.narrow(0, first, n).unwrap().to_dtype(DType::F64).unwrap();
                    (here, whole.to_device(&device).unwrap().narrow(0, first, n).unwrap())
                };
                let ((x_here, x), (w_here, w)) = (part(0.3, 1, rows), part(0.7, 2, outputs));
                let want = x_here.matmul(&w_here.t().unwrap()).unwrap();
                device.synchronize().unwrap();
                for overlap in [false, true] {
                    let y = multiply(&x, &w, &Launch { overlap, arena: None })
                        .unwrap()
                        .expect("a shape that the kernel supports");
                    let y = y.to_device(&Device::Cpu).unwrap().to_dtype(DType::F64).unwrap();
                    let error = norm(&(&y - &want).unwrap()) / norm(&want);
                    assert!(error < bound, "{dtype:?} {rows}x{inputs} -> {outputs}: {error}");
                }
            }
        }
    }
}

#[test]
fn leaves_other_shapes_to_matmul() {
    let Some(device) = device() else { return };
    let of = |rows: usize, inputs: usize, dtype| Tensor::zeros((rows, inputs), dtype, &device).unwrap();
    let supports = |x: &Tensor, w: &Tensor| multiply(x, w, &Launch::default()).unwrap().is_some();
    let (x, w) = (of(4, 128, DType::BF16), of(16, 128, DType::BF16));
    assert!(supports(&x, &w));
    assert!(!supports(&of(33, 128, DType::BF16), &w));
    assert!(!supports(&of(0, 128, DType::BF16), &w));
    assert!(!supports(&of(4, 128, DType::F32), &of(16, 128, DType::F32)));
    assert!(!supports(&of(4, 96, DType::BF16), &of(16, 96, DType::BF16)));
    let off = of(4, 192, DType::BF16).narrow(1, 4, 128).unwrap();
    assert!(!supports(&off, &w));
}
