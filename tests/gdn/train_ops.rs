//! Convolution and gated norm in training, against central differences of their definitions in f64.

use crate::grad_case::{bits, reproducible};
use crate::gradients::bound;
use crate::support::{devices, gated_norm, noisy, poison, refused, rel_rms, rounded, to_device, values, Rng};
use candle_core::{DType, Device, Tensor, Var};
use candle_gdn::ops::{causal_conv1d_diff, gated_rms_norm};
use candle_gdn::{CuSeqlens, GateActivation};
use proptest::prelude::*;

/// Random numbers as a variable and as they are after rounding.
fn variable(rng: &mut Rng, shape: &[usize], dtype: DType, device: &Device) -> (Var, Vec<f64>) {
    let (x, exact) = rounded(&rng.normals(shape.iter().product()), shape, dtype).unwrap();
    (Var::from_tensor(&to_device(&x, device).unwrap()).unwrap(), exact)
}

/// The gradient of `<d, f(x)>` by central differences.
fn differences<const N: usize>(x: [&[f64]; N], d: &[f64], f: impl Fn([&[f64]; N]) -> Vec<f64>) -> [Vec<f64>; N] {
    const STEP: f64 = 1e-5;
    let loss = |x: [&[f64]; N]| f(x).iter().zip(d).map(|(y, d)| y * d).sum::<f64>();
    std::array::from_fn(|argument| {
        let mut moved = x[argument].to_vec();
        let at = |moved: &[f64]| {
            let mut all = x;
            all[argument] = moved;
            loss(all)
        };
        (0..moved.len())
            .map(|i| {
                let middle = moved[i];
                moved[i] = middle + STEP;
                let above = at(&moved);
                moved[i] = middle - STEP;
                let below = at(&moved);
                moved[i] = middle;
                (above - below) / (2.0 * STEP)
            })
            .collect()
    })
}

/// The gradients of `<d, y>`.
fn gradients<const N: usize>(y: &Tensor, d: &Tensor, of: [&Var; N]) -> [Option<Tensor>; N] {
    let store = (y * d).unwrap().to_dtype(DType::F32).unwrap().sum_all().unwrap().backward().unwrap();
    of.map(|x| store.get(x).cloned())
}

/// Against the gradients by `f`; where these cancel, those of inputs with errors of a quarter of the bound say what is lost.
fn compare<const N: usize>(
    names: [&str; N],
    got: [Option<Tensor>; N],
    (args, d): ([&[f64]; N], &[f64]),
    bound: f64,
    f: impl Fn([&[f64]; N]) -> Vec<f64>,
) {
    let mut rng = Rng::new(1);
    let mut noise = |x: &[f64]| noisy(x, bound / 4.0, &mut rng);
    let (near, near_d) = (args.map(&mut noise), noise(d));
    let moved = differences(near.each_ref().map(|x| &x[..]), &near_d, &f);
    for (((name, got), want), moved) in names.iter().zip(&got).zip(&differences(args, d, &f)).zip(&moved) {
        let Some(got) = got else { continue };
        let (error, lost) = (rel_rms(&values(got), want), rel_rms(moved, want));
        assert!(error <= bound + lost, "the gradient of {name} is off by {error:e}");
    }
}

/// The convolution's definition: y of packed sequences.
fn convolution(lengths: &[usize], channels: usize, silu: bool, [x, weight, window]: [&[f64]; 3]) -> Vec<f64> {
    let width = weight.len() / channels;
    let (mut y, mut first) = (vec![], 0);
    for (n, len) in lengths.iter().enumerate() {
        let input = |i: usize, c: usize| match i.checked_sub(width - 1) {
            Some(t) => x[(first + t) * channels + c],
            None => window[(n * (width - 1) + i) * channels + c],
        };
        for (t, c) in (0..*len).flat_map(|t| (0..channels).map(move |c| (t, c))) {
            let p: f64 = (0..width).map(|j| weight[c * width + j] * input(t + j, c)).sum();
            y.push(if silu { p / (1.0 + (-p).exp()) } else { p });
        }
        first += len;
    }
    y
}

proptest! {
    #![proptest_config(reproducible(40))]

    #[test]
    fn convolution_on_random_shapes(
        lengths in prop::collection::vec(0usize..12, 1..4),
        (channels, width) in (prop::sample::select(vec![1usize, 3, 17, 70]), 2usize..=8),
        (dtype, weight_in_f32) in (prop::sample::select(vec![DType::F32, DType::BF16, DType::F16]), any::<bool>()),
        [silu, with_window, packed, strided] in any::<[bool; 4]>(),
        seed in any::<u64>(),
    ) {
        let lengths = if packed { lengths } else { vec![lengths[0]; lengths.len()] };
        let tokens: usize = lengths.iter().sum();
        for device in &devices() {
            if tokens == 0 && device.is_cuda() {
                continue; // candle's own operations refuse empty tensors there
            }
            let mut rng = Rng::new(seed);
            let weight_dtype = if weight_in_f32 { DType::F32 } else { dtype };
            let (x, x_exact) = variable(&mut rng, &[tokens, channels], dtype, device);
            let (weight, weight_exact) = variable(&mut rng, &[channels, width], weight_dtype, device);
            let (window, window_exact) = variable(&mut rng, &[lengths.len(), width - 1, channels], dtype, device);
            let (d, d_exact) = variable(&mut rng, &[tokens, channels], dtype, device);
            let cu = CuSeqlens::from_lengths(&lengths, device).unwrap();
            // A view of a wider projection, as a layer has it.
            let view = match strided {
                true => Tensor::cat(&[x.as_tensor(), x.as_tensor()], 1).unwrap().narrow(1, channels, channels).unwrap(),
                false => x.as_tensor().clone(),
            };
            let view = if packed { view } else { view.reshape((lengths.len(), lengths[0], channels)).unwrap() };
            poison(tokens * channels, dtype, device).unwrap();
            let y = causal_conv1d_diff(
                &view, &weight, with_window.then_some(window.as_tensor()), packed.then_some(&cu), silu).unwrap();
            let y = y.reshape((tokens, channels)).unwrap();
            let zeros = vec![0.0; window_exact.len()];
            let args = [&x_exact[..], &weight_exact, if with_window { &window_exact } else { &zeros }];
            let want_y = convolution(&lengths, channels, silu, args);
            prop_assert!(rel_rms(&values(&y), &want_y) <= bound(dtype));
            let got = gradients(&y, &d, [&x, &weight, &window]);
            prop_assert_eq!(got.each_ref().map(|x| x.is_some()), [true, true, with_window]);
            let f = |args: [&[f64]; 3]| convolution(&lengths, channels, silu, args);
            compare(["x", "weight", "window"], got, (args, &d_exact), bound(dtype), f);
        }
    }

    #[test]
    fn gated_norm_on_random_shapes(
        (tokens, heads, dim) in (0usize..5, 1usize..4, prop::sample::select(vec![2usize, 7, 16, 40, 128, 200])),
        (dtype, weight_in_f32) in (prop::sample::select(vec![DType::F32, DType::BF16, DType::F16]), any::<bool>()),
        [sigmoid, merged, zero_row] in any::<[bool; 3]>(),
        seed in any::<u64>(),
    ) {
        let gate = if sigmoid { GateActivation::Sigmoid } else { GateActivation::Silu };
        for device in &devices() {
            if tokens == 0 && device.is_cuda() {
                continue; // candle's own operations refuse empty tensors there
            }
            let mut rng = Rng::new(seed);
            let shape = [tokens, heads, dim];
            let (mut x, mut x_exact) = variable(&mut rng, &shape, dtype, device);
            if zero_row && tokens > 0 {
                x_exact[..dim].fill(0.0);
                x = Var::from_tensor(&to_device(&rounded(&x_exact, &shape, dtype).unwrap().0, device).unwrap()).unwrap();
            }
            let z_shape = if merged { vec![tokens, heads * dim] } else { shape.to_vec() };
            let (z, z_exact) = variable(&mut rng, &z_shape, dtype, device);
            let weight_dtype = if weight_in_f32 { DType::F32 } else { dtype };
            let (weight, weight_exact) = variable(&mut rng, &[dim], weight_dtype, device);
            let (d, d_exact) = variable(&mut rng, &shape, dtype, device);
            poison(tokens * heads * dim, dtype, device).unwrap();
            let y = gated_rms_norm(&x, &z, &weight, 1e-2, gate).unwrap();
            let f = |[x, z, w]: [&[f64]; 3]| gated_norm(x, z, w, 1e-2, gate);
            let got = gradients(&y, &d, [&x, &z, &weight]);
            prop_assert!(got.iter().all(|x| x.is_some()));
            compare(["x", "z", "weight"], got, ([&x_exact, &z_exact, &weight_exact], &d_exact), bound(dtype), f);
        }
    }
}

/// Sums over many tokens have a fixed order, and only the tracked arguments have gradients.
#[test]
fn sums_over_tokens_are_equal_to_the_bit() {
    for device in &devices() {
        let mut rng = Rng::new(1);
        let (x, _) = variable(&mut rng, &[3, 700, 96], DType::F32, device);
        let (weight, _) = variable(&mut rng, &[96, 4], DType::F32, device);
        let (z, _) = variable(&mut rng, &[3, 700, 2, 48], DType::F32, device);
        let (norm, _) = variable(&mut rng, &[48], DType::F32, device);
        let run = || {
            let y = causal_conv1d_diff(&x, &weight, None, None, true).unwrap();
            let y =
                gated_rms_norm(&y.reshape((3, 700, 2, 48)).unwrap(), &z, &norm, 1e-6, GateActivation::Silu).unwrap();
            let store = y.sqr().unwrap().sum_all().unwrap().backward().unwrap();
            [&x, &weight, &z, &norm].map(|x| bits(store.get(x).unwrap()))
        };
        let want = run();
        for _ in 0..20 {
            assert_eq!(run(), want);
        }
        let y = causal_conv1d_diff(&x.as_detached_tensor(), &weight, None, None, true).unwrap();
        let store = y.sum_all().unwrap().backward().unwrap();
        assert!(store.get(&weight).is_some() && store.get_ids().count() == 1);
    }
}

#[test]
fn bad_arguments_are_named() {
    for device in &devices() {
        let zeros = |shape: &[usize]| Tensor::zeros(shape, DType::F32, device).unwrap();
        let (x, weight) = (zeros(&[2, 5, 6]), zeros(&[6, 4]));
        let cu = CuSeqlens::from_lengths(&[5], device).unwrap();
        refused(
            causal_conv1d_diff(&x, &zeros(&[6, 9]), None, None, true),
            &["weight: expected [channels, width] with a width"],
        );
        refused(causal_conv1d_diff(&x, &zeros(&[7, 4]), None, None, true), &["causal_conv1d_diff: x: expected shape"]);
        refused(
            causal_conv1d_diff(&x, &weight, Some(&zeros(&[2, 4, 6])), None, true),
            &["window: expected shape [2, 3, 6]"],
        );
        refused(
            causal_conv1d_diff(&x, &weight, None, Some(&cu), true),
            &["x: expected shape [tokens, 6], got [2, 5, 6]"],
        );
        let packed = x.flatten(0, 1).unwrap();
        refused(causal_conv1d_diff(&packed, &weight, None, None, true), &["packed tokens need cu_seqlens"]);
        refused(
            causal_conv1d_diff(&packed, &weight, None, Some(&cu), true),
            &["cu_seqlens: expected 10 tokens in all"],
        );
        let half = weight.to_dtype(DType::BF16).unwrap();
        refused(causal_conv1d_diff(&x, &half, None, None, true), &["weight: expected dtype F32, got BF16"]);
    }
}
