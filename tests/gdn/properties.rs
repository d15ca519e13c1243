//! The rule over random shapes, lengths, layouts and hard inputs, each kernel against the reference.

use crate::grad_case::reproducible;
use crate::rule_case::{Case, Decay, Form};
use crate::support::{devices, dtype_for, on_tensor_cores};
use candle_core::DType;
use candle_gdn::reference::Dims;
use candle_gdn::Algo;
use proptest::prelude::*;

fn dims(key_heads: usize, ratio: usize, key_dim: usize, value_dim: usize) -> Dims {
    Dims { key_heads, value_heads: key_heads * ratio, key_dim, value_dim }
}

const LENGTHS: [usize; 14] = [0, 1, 2, 3, 15, 16, 17, 31, 33, 63, 64, 65, 100, 130];

fn any_case() -> impl Strategy<Value = Case> {
    let head_dims = prop_oneof![
        4 => Just((128, 128)),
        1 => prop::sample::select(vec![(64, 64), (96, 192), (32, 256), (256, 32), (40, 72), (1, 17), (129, 19), (256, 256)]),
    ];
    let shape = (1usize..=3, prop::sample::select(vec![1usize, 2, 3, 4, 8]), head_dims)
        .prop_map(|(hk, r, (k, v))| dims(hk, r, k, v));
    let lengths = prop_oneof![
        1 => prop::collection::vec(prop::sample::select(LENGTHS.to_vec()), 1..5).prop_map(|l| (l, true)),
        1 => (prop::sample::select(LENGTHS.to_vec()), 1usize..4).prop_map(|(t, n)| (vec![t; n], false)),
        1 => (1usize..6).prop_map(|n| (vec![1; n], false)),
    ];
    let dtype = prop::sample::select(vec![DType::F32, DType::F32, DType::BF16, DType::F16]);
    let decay = prop::sample::select(vec![Decay::None, Decay::Usual, Decay::Strong, Decay::Bursts, Decay::Huge]);
    let algo = (prop::sample::select(Algo::RULE.to_vec()), 0usize..4);
    let state_dtype = prop::sample::select(vec![DType::F32, DType::BF16]);
    let input = (any::<bool>(), decay, any::<bool>(), prop::sample::select(vec![1e-2, 1.0, 1e2]));
    let gate_dtype = prop::sample::select(vec![None, Some(DType::F32), Some(DType::BF16), Some(DType::F16)]);
    let qk = (prop::sample::select(vec![1e-6, 0.02]), prop::sample::select(vec![None, Some(0.3)]));
    let gates = (prop::sample::select(vec![1.0, 2.0]), prop::sample::select(vec![0.0, 4.0]), gate_dtype);
    (shape, lengths, dtype, input, qk, gates, (algo, state_dtype), any::<(bool, bool, bool, u64)>()).prop_map(
        |(
            dims,
            (lengths, packed),
            dtype,
            input,
            (l2_eps, scale),
            gates,
            ((algo, segments), state_dtype),
            (strided, slots, padding, seed),
        )| {
            let (l2norm, decay, repeat_keys, norm) = input;
            let (beta_scale, b_mean, gate_dtype) = gates;
            let sizes = (dims.key_dim, dims.value_dim);
            let of_128 = sizes == (128, 128);
            let decodes = match sizes {
                (128, 128) | (96, 192) => lengths.iter().all(|&n| n <= 16),
                (64 | 96 | 192 | 256, _) => !packed && lengths.iter().all(|&n| n == 1) && dims.value_dim % 32 == 0,
                _ => false,
            };
            let of_8 = dims.key_dim <= 128 && dims.key_dim % 8 == 0 && dims.value_dim % 8 == 0;
            let algo = match algo {
                Algo::Recurrent128 if !of_128 => Algo::Recurrent,
                Algo::Decode if !decodes => {
                    if of_128 {
                        Algo::Recurrent128
                    } else {
                        Algo::Recurrent
                    }
                }
                // One token: gates in f32 or in the dtype of q.
                Algo::Decode
                    if lengths.iter().all(|&n| n <= 1)
                        && gate_dtype.is_some_and(|gate| gate != DType::F32 && gate != dtype) =>
                {
                    Algo::Recurrent
                }
                algo if on_tensor_cores(algo) && !of_8 => Algo::Recurrent,
                algo => algo,
            };
            let dtype = if on_tensor_cores(algo) && dtype == DType::F32 { DType::BF16 } else { dtype };
            Case {
                dims,
                lengths,
                packed,
                dtype,
                // Views of one projection have one dtype.
                gate_dtype: gate_dtype.filter(|_| !strided).unwrap_or(dtype),
                state_dtype,
                form: if strided { Form::Projection } else { Form::Dense },
                slots,
                padding,
                l2norm,
                l2_eps,
                scale,
                beta_scale,
                b_mean,
                decay,
                repeat_keys,
                norm,
                algo,
                segments,
                seed,
            }
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { max_shrink_iters: 40, ..reproducible(160) })]

    #[test]
    fn every_kernel_matches_the_reference(case in any_case()) {
        for device in devices() {
            case.check(&device);
        }
    }
}

/// Every length around the chunk sizes and every head ratio, for every kernel: no luck of the draw.
#[test]
fn lengths_and_ratios_exhaustively() {
    for device in devices() {
        for algo in Algo::RULE {
            let (short, dtype) = (algo == Algo::Decode, dtype_for(algo));
            for length in LENGTHS.into_iter().filter(|&n| !short || n <= 16) {
                for state_dtype in [DType::F32, DType::BF16] {
                    Case { algo, dtype, state_dtype, ..Case::new(dims(1, 2, 128, 128), &[length]) }.check(&device);
                }
            }
            for ratio in [1, 2, 3, 4, 8] {
                let lengths = [5, 0, if short { 16 } else { 70 }];
                Case { algo, dtype, ..Case::new(dims(2, ratio, 128, 128), &lengths) }.check(&device);
            }
        }
    }
}

/// Decode of every head size, for few sequences and for many, which have kernels of other shapes.
#[test]
fn decode_of_every_head_size() {
    for device in devices() {
        let one = [(64, 64), (64, 256), (96, 96), (96, 192), (128, 32), (128, 256), (192, 192), (256, 64), (256, 256)];
        for ((k, v), state_dtype) in
            one.into_iter().flat_map(|sizes| [DType::F32, DType::BF16].map(|state| (sizes, state)))
        {
            // Sequences of 4 heads, whose states are as large as few, some and many heads of 128.
            let calls =
                [(1, DType::F32, true), (1, DType::BF16, false), (240, DType::BF16, false), (340, DType::F32, true)];
            for (heads, dtype, slots) in calls {
                // The CPU has no such choice, and its reference takes its time.
                if heads > 1 && device.is_cpu() {
                    continue;
                }
                let lengths = vec![1; (heads * 128 * 128usize).div_ceil(4 * k * v)];
                let case =
                    Case { algo: Algo::Decode, dtype, state_dtype, slots, ..Case::new(dims(2, 2, k, v), &lengths) };
                Case { packed: false, ..case }.check(&device);
            }
            if (k, v) == (96, 192) {
                for lengths in [&[2, 5, 0, 16, 1][..], &[8, 8]] {
                    Case {
                        algo: Algo::Decode,
                        state_dtype,
                        dtype: DType::BF16,
                        ..Case::new(dims(2, 3, k, v), lengths)
                    }
                    .check(&device);
                }
            }
        }
    }
}

/// Inputs on which a careless chunk kernel overflows or loses digits.
#[test]
fn hard_inputs() {
    for device in devices() {
        for algo in Algo::RULE {
            for beta_scale in [1.0, 2.0] {
                for decay in [Decay::None, Decay::Usual, Decay::Strong, Decay::Bursts, Decay::Huge] {
                    for repeat_keys in [false, true] {
                        let lengths = if algo == Algo::Decode { [16, 9] } else { [130, 64] };
                        let case = Case::new(dims(1, 2, 128, 128), &lengths);
                        let dtype = dtype_for(algo);
                        Case { algo, dtype, beta_scale, b_mean: 8.0, decay, repeat_keys, ..case }.check(&device);
                    }
                }
            }
        }
    }
}

/// More sequences than a CUDA grid has rows in y or z.
#[test]
fn many_sequences() {
    for device in devices() {
        Case { algo: Algo::Recurrent, ..Case::new(dims(1, 1, 4, 4), &vec![2; 70_000]) }.check(&device);
    }
}

/// All of o is one product of q and k, 5,000 times smaller than they are: found by the random cases.
#[test]
fn a_product_that_nearly_cancels() {
    for device in devices() {
        for algo in [Algo::Auto, Algo::Recurrent] {
            let mut case = Case::new(dims(1, 1, 256, 32), &[1]);
            (case.packed, case.l2norm, case.decay) = (false, false, Decay::Huge);
            (case.gate_dtype, case.algo, case.seed) = (DType::F16, algo, 8634493675742236192);
            case.check(&device);
        }
    }
}
