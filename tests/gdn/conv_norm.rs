//! The causal convolution and the gated norm against their definitions in f64.

use crate::errors::zeros;
use crate::grad_case::reproducible;
use crate::slot_pool::SlotPool;
use crate::support::{devices, gated_norm, poison, refused, rel_rms, rounded, to_device, values, Rng};
use candle_core::{DType, Device, Tensor};
use candle_gdn::ops::{causal_conv1d, gated_rms_norm, CausalConv1d};
use candle_gdn::{CuSeqlens, GateActivation};
use proptest::prelude::*;

fn bound(dtype: DType) -> f64 {
    match dtype {
        DType::BF16 => 4e-3,
        DType::F16 => 5e-4,
        _ => 1e-6,
    }
}

fn silu(x: f64) -> f64 {
    x / (1.0 + (-x).exp())
}

#[derive(Debug, Clone)]
struct ConvCase {
    lengths: Vec<usize>,
    channels: usize,
    width: usize,
    dtype: DType,
    f32_weight: bool,
    silu: bool,
    packed: bool,
    slots: bool,
    strided: bool,
    seed: u64,
}

impl ConvCase {
    fn check(&self, device: &Device) {
        let Self { channels, width, dtype, .. } = *self;
        let (tokens, sequences, history) = (self.lengths.iter().sum::<usize>(), self.lengths.len(), width - 1);
        let rng = &mut Rng::new(self.seed);
        let (_, x) = rounded(&rng.normals(tokens * channels), &[tokens * channels], dtype).unwrap();
        let weight_dtype = if self.f32_weight { DType::F32 } else { dtype };
        let (weight, w) = rounded(&rng.normals(channels * width), &[channels, width], weight_dtype).unwrap();
        let (_, old) =
            rounded(&rng.normals(sequences * history * channels), &[sequences * history * channels], dtype).unwrap();

        // The definition, over old inputs and new ones joined.
        let (mut want_y, mut size_y, mut want_state, mut start) = (vec![], vec![], vec![], 0);
        for (n, &len) in self.lengths.iter().enumerate() {
            let mut inputs = old[n * history * channels..][..history * channels].to_vec();
            inputs.extend_from_slice(&x[start * channels..][..len * channels]);
            for t in 0..len {
                for c in 0..channels {
                    let terms = (0..width).map(|j| w[c * width + j] * inputs[(t + j) * channels + c]);
                    let y: f64 = terms.clone().sum();
                    want_y.push(if self.silu { silu(y) } else { y });
                    size_y.push(terms.map(f64::abs).sum::<f64>());
                }
            }
            want_state.extend_from_slice(&inputs[len * channels..]);
            start += len;
        }

        let lead = if self.packed { vec![tokens] } else { vec![sequences, self.lengths[0]] };
        let (x, _) = rounded(&x, &[&lead[..], &[channels]].concat(), dtype).unwrap();
        let mut x = to_device(&x, device).unwrap();
        if self.strided && x.elem_count() > 0 {
            let pad = Tensor::full(f32::NAN, [&lead[..], &[5]].concat(), device).unwrap().to_dtype(dtype).unwrap();
            x = Tensor::cat(&[&pad, &x, &pad], lead.len()).unwrap().narrow(lead.len(), 5, channels).unwrap();
        }
        let slot = |n: usize| if self.slots { sequences - n } else { n + 1 };
        let map: Vec<_> = (0..sequences).map(|n| Some(slot(n))).collect();
        let pool = SlotPool::new(&old, &map, sequences + 2, &[history, channels], dtype, device).unwrap();
        let state = if self.slots { pool.all.clone() } else { pool.all.narrow(0, 1, sequences).unwrap() };
        let cu = self.packed.then(|| CuSeqlens::from_lengths(&self.lengths, device).unwrap());
        let mut op = CausalConv1d::new(&state, cu.as_ref(), self.silu).unwrap();
        if self.slots {
            op = op.with_slots(&pool.slots().unwrap());
        }
        if device.is_cuda() {
            poison(tokens * channels, dtype, device).unwrap();
        }
        let y = op.forward(&x, &weight.to_device(device).unwrap()).unwrap();
        assert_eq!((y.dims(), y.dtype()), (x.dims(), dtype));
        // Element by element: the output's rounding, and f32 sums relative to their terms, which may cancel.
        for (i, ((y, want), size)) in values(&y).iter().zip(&want_y).zip(&size_y).enumerate() {
            let error = (y - want).abs();
            let rounding = if dtype == DType::F32 { 0.0 } else { bound(dtype) };
            // Below its smallest normal number f16 rounds by a fixed step.
            let bound = rounding * want.abs() + 1e-6 * size + if dtype == DType::F16 { 3e-8 } else { 0.0 };
            assert!(error <= bound, "y[{i}] is {y}, expected {want}, on {:?}: {self:?}", device.location());
        }
        assert_eq!(pool.states(), want_state, "states on {:?}: {self:?}", device.location());
    }
}

fn any_conv() -> impl Strategy<Value = ConvCase> {
    let len = prop::sample::select(vec![0usize, 1, 2, 3, 4, 5, 31, 32, 33, 64, 200]);
    let lengths = prop_oneof![
        prop::collection::vec(len.clone(), 1..5).prop_map(|l| (l, true)),
        (len, 1usize..4).prop_map(|(t, n)| (vec![t; n], false)),
    ];
    let channels = prop::sample::select(vec![1usize, 3, 64, 96, 257, 512, 1024, 1030]);
    let dtype = prop::sample::select(vec![DType::F32, DType::BF16, DType::F16]);
    (lengths, channels, 2usize..=8, dtype, any::<(bool, bool, bool, bool)>(), any::<u64>()).prop_map(
        |((lengths, packed), channels, width, dtype, (f32_weight, silu, slots, strided), seed)| ConvCase {
            lengths,
            channels,
            width,
            dtype,
            f32_weight,
            silu,
            packed,
            slots,
            strided,
            seed,
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { max_shrink_iters: 40, ..reproducible(120) })]

    #[test]
    fn conv_matches_its_definition(case in any_conv()) {
        for device in devices() {
            case.check(&device);
        }
    }
}

/// As many inputs as several fillings of a large card take, which the CUDA kernel cuts up in another way.
#[test]
fn conv_of_long_inputs() {
    let case = |lengths: &[usize], dtype, width, packed| ConvCase {
        lengths: lengths.to_vec(),
        channels: 2048,
        width,
        dtype,
        f32_weight: false,
        silu: true,
        packed,
        slots: packed,
        strided: false, // by an odd number of elements, which takes another way
        seed: 7,
    };
    for case in [case(&[2500, 5, 0, 203], DType::BF16, 4, true), case(&[2301, 2301], DType::F16, 8, false)] {
        for device in devices() {
            case.check(&device);
        }
    }
}

/// Feeding a sequence in two parts gives bit for bit what it gives whole.
#[test]
fn conv_split_anywhere() {
    for device in devices() {
        let (batch, tokens, channels, width) = (2, 40, 70, 4);
        let x = Tensor::randn(0f32, 1., (batch, tokens, channels), &device).unwrap();
        let weight = Tensor::randn(0f32, 1., (channels, width), &device).unwrap();
        let zeros = || Tensor::zeros((batch, width - 1, channels), DType::F32, &device).unwrap();
        let whole_state = zeros();
        let whole = values(&causal_conv1d(&x, &weight, &whole_state, None, true).unwrap());
        for split in 0..=tokens {
            let state = zeros();
            let part =
                |start, len| causal_conv1d(&x.narrow(1, start, len).unwrap(), &weight, &state, None, true).unwrap();
            let (a, b) = (part(0, split), part(split, tokens - split));
            assert_eq!(values(&Tensor::cat(&[a, b], 1).unwrap()), whole, "split at {split}");
            assert_eq!(values(&state), values(&whole_state), "split at {split}");
        }
    }
}

#[test]
fn gated_norm_matches_its_definition() {
    let rng = &mut Rng::new(3);
    for device in devices() {
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            for weight_dtype in [dtype, DType::F32] {
                for (tokens, heads, dim) in [(1, 1, 1), (3, 4, 128), (70, 2, 64), (5, 3, 192), (2, 8, 256), (9, 1, 72)]
                {
                    for gate in [GateActivation::Silu, GateActivation::Sigmoid] {
                        let (eps, n) = (1e-6, tokens * heads * dim);
                        // Rows from tiny (eps matters) to large.
                        let drawn: Vec<f64> = (0..n).map(|i| rng.normal() * [1e-3, 1.0, 50.0][i / dim % 3]).collect();
                        let (x, xs) = rounded(&drawn, &[1, tokens, heads, dim], dtype).unwrap();
                        let (z, zs) = rounded(&rng.normals(n), &[1, tokens, heads * dim], dtype).unwrap();
                        let (w, ws) = rounded(&rng.normals(dim), &[dim], weight_dtype).unwrap();
                        let want = gated_norm(&xs, &zs, &ws, eps, gate);
                        let [x, z, w] = [x, z, w].map(|x| x.to_device(&device).unwrap());
                        // z as it lies in a projection.
                        let z = Tensor::cat(&[&z, &z, &z], 2).unwrap().narrow(2, heads * dim, heads * dim).unwrap();
                        if device.is_cuda() {
                            poison(n, dtype, &device).unwrap();
                        }
                        let got = gated_rms_norm(&x, &z, &w, eps, gate).unwrap();
                        assert_eq!(got.dims(), x.dims());
                        let error = rel_rms(&values(&got), &want);
                        assert!(error <= bound(dtype), "{dtype:?} {tokens}x{heads}x{dim} {gate:?}: {error:e}");
                    }
                }
            }
        }
    }
}

/// A batch of a strided z whose batch and token strides do not count through is copied, not misread.
#[test]
fn gated_norm_of_a_narrowed_batch() {
    for device in devices() {
        let x = Tensor::randn(0f32, 1., (2, 5, 3, 16), &device).unwrap();
        let z = Tensor::randn(0f32, 1., (2, 9, 48), &device).unwrap().narrow(1, 2, 5).unwrap();
        let w = Tensor::randn(0f32, 1., 16, &device).unwrap();
        let got = gated_rms_norm(&x, &z, &w, 1e-6, GateActivation::Silu).unwrap();
        let want = gated_rms_norm(&x, &z.contiguous().unwrap(), &w, 1e-6, GateActivation::Silu).unwrap();
        assert_eq!(values(&got), values(&want));
    }
}

#[test]
fn conv_arguments() {
    for device in &devices() {
        let z = |shape: &[usize]| zeros(shape, device);
        let (x, w, state) = (z(&[2, 5, 6]), z(&[6, 4]), z(&[2, 3, 6]));
        causal_conv1d(&x, &w, &state, None, true).unwrap();
        refused(causal_conv1d(&z(&[2, 5, 7]), &w, &state, None, true), &["causal_conv1d: x:", "[2, 5, 7]"]);
        let packed = ["x: expected shape [batch, tokens, 6], got [5, 6]; packed tokens need cu_seqlens"];
        refused(causal_conv1d(&z(&[5, 6]), &w, &state, None, true), &packed);
        let turned = z(&[4, 6]).t().unwrap();
        let op = CausalConv1d::new(&state, None, true).unwrap();
        refused(x.apply_op2_no_bwd(&turned, &op), &["weight: expected a contiguous tensor, got strides [1, 6]"]);
        refused(causal_conv1d(&x, &z(&[6, 3]), &state, None, true), &["weight:", "[6, 4]", "[6, 3]"]);
        refused(causal_conv1d(&x, &w, &z(&[1, 3, 6]), None, true), &["state:", "expected 2 slots", "got 1"]);
        refused(causal_conv1d(&x, &w, &z(&[2, 9, 6]), None, true), &["state:", "width of 2 to 8"]);
        refused(causal_conv1d(&x, &w, &z(&[2, 6]), None, true), &["state:", "[2, 6]"]);
        let half = x.to_dtype(DType::F16).unwrap();
        refused(causal_conv1d(&half, &w, &state, None, true), &["x:", "expected dtype F32, got F16"]);
        refused(causal_conv1d(&x, &w.to_dtype(DType::F16).unwrap(), &state, None, true), &["weight:", "F16"]);
        let alias = z(&[16, 6]);
        let (x, state) = (alias.narrow(0, 0, 10).unwrap(), alias.narrow(0, 10, 6).unwrap());
        let (x, state) = (x.reshape((2, 5, 6)).unwrap(), state.reshape((2, 3, 6)).unwrap());
        refused(causal_conv1d(&x, &w, &state, None, true), &["x:", "shares its storage"]);
        let op = CausalConv1d::new(&state, None, true).unwrap();
        refused(x.apply_op2_no_bwd(&w, &op), &["x:", "shares its storage"]);
    }
}

#[test]
fn norm_arguments() {
    for device in &devices() {
        let z = |shape: &[usize]| zeros(shape, device);
        let (x, w) = (z(&[2, 5, 3, 8]), z(&[8]));
        let norm = |x: &Tensor, g: &Tensor, w: &Tensor, eps| gated_rms_norm(x, g, w, eps, GateActivation::Silu);
        norm(&x, &x, &w, 1e-6).unwrap();
        refused(norm(&x, &z(&[2, 5, 25]), &w, 1e-6), &["gated_rms_norm: z:", "[2, 5, 3, 8]", "[2, 5, 25]"]);
        refused(norm(&x, &x, &z(&[3]), 1e-6), &["weight:", "[8]", "[3]"]);
        refused(norm(&x, &x, &w, -1.0), &["eps", "-1"]);
        refused(norm(&z(&[8]), &z(&[8]), &w, 1e-6), &["x:", "[8]"]);
        refused(norm(&z(&[2, 300]), &z(&[2, 300]), &z(&[300]), 1e-6), &["x:", "1 to 256"]);
        refused(norm(&x, &x.to_dtype(DType::BF16).unwrap(), &w, 1e-6), &["z:", "BF16"]);
    }
}
