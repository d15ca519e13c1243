use super::*;
use candle_core::Device;
use candle_gdn_core::device::cuda::testing::device;

/// Rows that are multiplied with the bytes at most.
const MAX_ROWS: usize = abi::GDN_SCALED_ROWS;

/// Smooth enough to be anything, and no two alike.
fn numbers(rows: usize, columns: usize, seed: f64) -> Tensor {
    let values: Vec<f64> = (0..rows * columns).map(|i| (seed + i as f64 * 0.61).sin()).collect();
    Tensor::from_vec(values, (rows, columns), &Device::Cpu).unwrap()
}

fn norm(x: &Tensor) -> f64 {
    x.sqr().unwrap().sum_all().unwrap().to_scalar::<f64>().unwrap().sqrt()
}

fn error(y: &Tensor, want: &Tensor) -> f64 {
    let y = y.to_device(&Device::Cpu).unwrap().to_dtype(DType::F64).unwrap();
    norm(&(y - want).unwrap()) / norm(want)
}

/// The number that 8 bits are.
fn number(bits: u8) -> f64 {
    let (exponent, mantissa) = (i32::from(bits >> 3 & 15), f64::from(bits & 7));
    let magnitude = if exponent == 0 { mantissa / 512. } else { (8. + mantissa) * 2f64.powi(exponent - 10) };
    if bits < 128 {
        magnitude
    } else {
        -magnitude
    }
}

/// Every byte but NaN, subnormal ones too, and the same as numbers, some `below` in `dtype`.
fn weight(
    outputs: usize,
    inputs: usize,
    block_rows: usize,
    below: usize,
    dtype: DType,
    on: &Device,
) -> (E4m3, Option<Tensor>, Tensor) {
    let bytes: Vec<u8> =
        (0..outputs * inputs).map(|i| (i * 7919 + i / 251) as u8).map(|b| if b & 127 == 127 { 3 } else { b }).collect();
    let blocks = inputs.div_ceil(128);
    let scales: Vec<f32> =
        (0..outputs.div_ceil(block_rows) * blocks).map(|i| 1e-3 * (1.5 + (i as f32).sin())).collect();
    let value = |i: usize| {
        let (row, column) = (i / inputs, i % inputs);
        number(bytes[i]) * f64::from(scales[row / block_rows * blocks + column / 128])
    };
    let wide =
        Tensor::from_vec((0..bytes.len()).map(value).collect::<Vec<_>>(), (outputs, inputs), &Device::Cpu).unwrap();
    let to = |x: Tensor| x.to_device(on).unwrap();
    let scales = Tensor::from_vec(scales, (outputs.div_ceil(block_rows), blocks), &Device::Cpu).unwrap();
    let bytes = Tensor::from_vec(bytes, (outputs, inputs), &Device::Cpu).unwrap();
    let made = E4m3::new(to(bytes), to(scales), block_rows).unwrap();
    if below == 0 {
        return (made, None, wide);
    }
    let rows = (numbers(below, inputs, 0.2) * 0.1).unwrap().to_dtype(dtype).unwrap();
    let wide = Tensor::cat(&[wide, rows.to_dtype(DType::F64).unwrap()], 0).unwrap();
    (made, Some(to(rows)), wide)
}

/// Up to how many are multiplied with the bytes where x fits.
fn most_rows(device: &Device) -> usize {
    use candle_core::cuda_backend::cudarc::driver::sys::CUdevice_attribute as Attribute;
    let context = device.as_cuda_device().unwrap().cuda_stream().context().clone();
    let ask = |attribute| context.attribute(attribute).unwrap();
    match ask(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR) * 10
        + ask(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)
    {
        90 if option_env!("CANDLE_GDN_CUDA_ARCHS").is_none_or(|archs| archs.contains("90a")) => MAX_ROWS,
        _ => 2 * abi::GDN_SCALED_FEW_ROWS,
    }
}

#[test]
fn equals_the_product_in_f64() {
    let Some(device) = device() else { return };
    // An output's rounding is at most half a unit in its last place; the weights are exact.
    for (dtype, bound) in [(DType::BF16, 4e-3), (DType::F16, 5e-4)] {
        for (inputs, outputs, block_rows, rows_below) in
            [(64, 1, 1, 0), (192, 33, 32, 7), (1024, 100, 128, 0), (2560, 300, 128, 64), (2048, 257, 16, 1)]
        {
            let (weight, below, wide) = weight(outputs, inputs, block_rows, rows_below, dtype, &device);
            for rows in (1..=17).chain([32, 33, 48, 64]).filter(|rows| *rows <= most_rows(&device)) {
                // Among other values, which must play no part.
                let x = numbers(rows + 3, inputs + 8, 0.3).to_dtype(dtype).unwrap();
                let part = |x: &Tensor| x.narrow(0, 1, rows).unwrap().narrow(1, 8, inputs).unwrap();
                let want =
                    part(&x).to_dtype(DType::F64).unwrap().contiguous().unwrap().matmul(&wide.t().unwrap()).unwrap();
                let x = part(&x.to_device(&device).unwrap());
                device.synchronize().unwrap();
                for overlap in [false, true] {
                    let launch = Launch { overlap, arena: None };
                    let y = e4m3_as_stored(&x, &weight, below.as_ref(), &launch)
                        .unwrap()
                        .expect("a shape that the kernel takes");
                    let error = error(&y, &want);
                    assert!(error < bound, "{dtype:?} {rows}x{inputs} -> {outputs}+{rows_below}: {error}");
                }
            }
        }
    }
}

#[test]
fn many_rows_are_those_of_the_dequantised_weight() {
    let Some(device) = device() else { return };
    for dtype in [DType::BF16, DType::F16] {
        for (inputs, outputs, block_rows, rows_below) in [(64, 1, 1, 0), (192, 33, 32, 7), (1024, 300, 128, 64)] {
            let (weight, below, wide) = weight(outputs, inputs, block_rows, rows_below, dtype, &device);
            let want = wide.to_dtype(DType::F32).unwrap().to_dtype(dtype).unwrap();
            let got = dequantized(&weight, below.as_ref(), dtype).unwrap().to_device(&Device::Cpu).unwrap();
            let bits = |x: &Tensor| x.to_dtype(DType::F32).unwrap().to_vec2::<f32>().unwrap();
            assert_eq!(bits(&got), bits(&want), "{dtype:?} {outputs}x{inputs}");
            let x = numbers(MAX_ROWS + 1, inputs, 0.4).to_dtype(dtype).unwrap().to_device(&device).unwrap();
            assert!(e4m3_as_stored(&x, &weight, below.as_ref(), &Launch::default()).unwrap().is_none());
            let y = e4m3(&x, &weight, below.as_ref(), &Launch::default()).unwrap();
            let same = x.matmul(&want.to_device(&device).unwrap().t().unwrap()).unwrap();
            assert_eq!(bits(&y), bits(&same), "{dtype:?} {outputs}x{inputs}");
        }
    }
}

/// Inputs whose 33 rows do not fit beside the weights' stream.
#[test]
fn what_does_not_fit_is_dequantised() {
    let Some(device) = device() else { return };
    let (weight, below, wide) = weight(40, 17408, 128, 0, DType::BF16, &device);
    let dense = wide.to_dtype(DType::F32).unwrap().to_dtype(DType::BF16).unwrap().to_dtype(DType::F64).unwrap();
    for rows in [16, 33, 64] {
        let x = numbers(rows, 17408, 0.3).to_dtype(DType::BF16).unwrap();
        let fits = rows == 16;
        let want = x.to_dtype(DType::F64).unwrap().matmul(&if fits { &wide } else { &dense }.t().unwrap()).unwrap();
        let x = x.to_device(&device).unwrap();
        assert_eq!(
            e4m3_as_stored(&x, &weight, below.as_ref(), &Launch::default()).unwrap().is_some(),
            fits,
            "{rows} rows"
        );
        let y = e4m3(&x, &weight, below.as_ref(), &Launch::default().overlapping()).unwrap();
        let error = error(&y, &want);
        assert!(error < 4e-3, "{rows} rows: {error}");
    }
}

#[test]
fn rows_of_a_weight() {
    let Some(device) = device() else { return };
    let (weight, _, wide) = weight(160, 320, 32, 0, DType::BF16, &device);
    let x = numbers(5, 320, 0.3).to_dtype(DType::BF16).unwrap();
    let want = x.to_dtype(DType::F64).unwrap().matmul(&wide.narrow(0, 64, 70).unwrap().t().unwrap()).unwrap();
    let y = e4m3_as_stored(&x.to_device(&device).unwrap(), &weight.rows(64, 70).unwrap(), None, &Launch::default())
        .unwrap()
        .unwrap();
    assert!(error(&y, &want) < 4e-3);
    assert!(weight.rows(40, 70).is_err());
}

#[test]
fn swiglu_equals_its_definition_in_f64() {
    let Some(device) = device() else { return };
    for (dtype, bound) in [(DType::BF16, 4e-3), (DType::F16, 5e-4)] {
        for (inputs, outputs, block_rows) in [(64, 2, 1), (192, 66, 32), (2560, 512, 128), (2560, 514, 2)] {
            let (weight, _, wide) = weight(outputs, inputs, block_rows, 0, dtype, &device);
            for rows in [1, 2, 7, 8] {
                let x = (numbers(rows, inputs, 0.3) * 0.3).unwrap().to_dtype(dtype).unwrap();
                let both = x.to_dtype(DType::F64).unwrap().matmul(&wide.t().unwrap()).unwrap();
                let half = |first: usize| both.narrow(1, first, outputs / 2).unwrap();
                let want = (half(0).silu().unwrap() * half(outputs / 2)).unwrap();
                let x = x.to_device(&device).unwrap();
                let y = e4m3_swiglu(&x, &weight, &Launch::default().overlapping()).unwrap();
                let error = error(&y.expect("a shape that the kernel takes"), &want);
                assert!(error < bound, "{dtype:?} {rows}x{inputs} -> {outputs}: {error}");
            }
        }
    }
}

#[test]
fn dense_swiglu_equals_its_definition_in_f64() {
    let Some(device) = device() else { return };
    for (dtype, bound) in [(DType::BF16, 4e-3), (DType::F16, 5e-4)] {
        for (inputs, outputs) in [(64, 1), (192, 33), (1024, 100), (2560, 257)] {
            for rows in [1, 2, 7, 8] {
                let on = |x: Tensor| {
                    let x = x.to_dtype(dtype).unwrap();
                    (x.to_dtype(DType::F64).unwrap(), x.to_device(&device).unwrap())
                };
                let scale = (inputs as f64).powf(-0.5);
                let (x_here, x) = on(numbers(rows, inputs, 0.3));
                let (w_here, w) = on((numbers(2 * outputs, inputs, 0.7) * scale).unwrap());
                let both = x_here.matmul(&w_here.t().unwrap()).unwrap();
                let (gate, up) = (both.narrow(1, 0, outputs).unwrap(), both.narrow(1, outputs, outputs).unwrap());
                let want = (gate.silu().unwrap() * up).unwrap();
                let y = dense_swiglu(&x, &w, &Launch::default().overlapping())
                    .unwrap()
                    .expect("a shape that the kernel takes");
                assert_eq!(y.dims(), [rows, outputs]);
                let y = y.to_device(&Device::Cpu).unwrap().to_dtype(DType::F64).unwrap();
                let error = norm(&(&y - &want).unwrap()) / norm(&want);
                assert!(error < bound, "{dtype:?} {rows}x{inputs} -> {outputs}: {error}");
            }
        }
    }
}
