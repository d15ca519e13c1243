//! The chunk forms on tensor cores over the shapes and inputs that they could get wrong: no luck of the draw. On the CPU
//! the same calls run in f32 and keep its bounds.

use crate::rule_case::{Case, Decay, Form};
use crate::semantics::{args, options, tensor_cores, Args};
use crate::support::{devices, refused, rel_rms, values, APART, HALVES, TENSOR_CORES};
use candle_core::{DType, Tensor};
use candle_gdn::ops::{Gates, GdnPrefill};
use candle_gdn::reference::Dims;
use candle_gdn::Algo;

const LENGTHS: [usize; 7] = [0, 1, 63, 64, 65, 130, 200];
const HEAD_SIZES: [(usize, usize); 8] =
    [(64, 64), (96, 192), (128, 64), (128, 128), (64, 128), (8, 8), (40, 72), (120, 256)];

fn dims(key_heads: usize, ratio: usize, (key_dim, value_dim): (usize, usize)) -> Dims {
    Dims { key_heads, value_heads: key_heads * ratio, key_dim, value_dim }
}

fn case(algo: Algo, dims: Dims, lengths: &[usize]) -> Case {
    Case { algo, dtype: DType::BF16, gate_dtype: DType::BF16, ..Case::new(dims, lengths) }
}

#[test]
fn head_sizes_and_lengths() {
    for device in devices() {
        for algo in tensor_cores(&device) {
            for sizes in HEAD_SIZES {
                for dtype in HALVES {
                    let one = |lengths: &[usize]| Case { dtype, ..case(algo, dims(1, 2, sizes), lengths) };
                    one(&LENGTHS).check(&device);
                    for length in LENGTHS {
                        Case { packed: false, ..one(&[length; 2]) }.check(&device);
                        one(&[length]).check(&device);
                    }
                }
            }
        }
    }
}

#[test]
fn head_ratios_and_layouts() {
    for device in devices() {
        for algo in tensor_cores(&device) {
            for ratio in [1, 2, 3, 4, 8] {
                for (packed, lengths) in [(true, vec![65, 0, 130, 1, 200]), (false, vec![130; 3])] {
                    for (form, state_dtype) in [(Form::Dense, DType::BF16), (Form::Projection, DType::F32)] {
                        for gate_dtype in [DType::F32, DType::BF16] {
                            // Views of one projection have one dtype.
                            let gate_dtype = if form == Form::Dense { gate_dtype } else { DType::BF16 };
                            let case = case(algo, dims(2, ratio, (128, 128)), &lengths);
                            let case = Case { packed, form, state_dtype, gate_dtype, ..case };
                            case.check(&device);
                            Case { slots: true, ..case }.check(&device);
                        }
                    }
                }
            }
        }
    }
}

/// Inputs on which a careless chunk kernel overflows, divides by what underflowed, or adds up the rounding of one key.
#[test]
fn hard_inputs() {
    for device in devices() {
        for algo in tensor_cores(&device) {
            for decay in [Decay::None, Decay::Usual, Decay::Strong, Decay::Bursts, Decay::Huge] {
                for repeat_keys in [false, true] {
                    for (beta_scale, l2norm) in [(1.0, true), (2.0, true), (1.0, false), (2.0, false)] {
                        for dtype in HALVES {
                            for norm in [1.0, 1e2] {
                                // At beta 2 errors grow with every token: few enough that 16 bits cost less than a tenth.
                                let lengths = if beta_scale == 2.0 { [70, 40] } else { [200, 64] };
                                let case = case(algo, dims(1, 2, (128, 128)), &lengths);
                                let case = Case { b_mean: 8.0, beta_scale, l2norm, ..case };
                                Case { dtype, decay, repeat_keys, norm, ..case }.check(&device);
                            }
                        }
                    }
                }
            }
        }
    }
}

/// However a sequence is cut into parts that run side by side.
#[test]
fn segments() {
    for device in devices() {
        for algo in tensor_cores(&device) {
            for segments in [0, 1, 2, 3, 7, 1000] {
                for decay in [Decay::None, Decay::Usual, Decay::Bursts] {
                    for (packed, lengths) in [(true, vec![700, 0, 65, 1, 320]), (false, vec![450; 2])] {
                        let case = Case { packed, segments, decay, ..case(algo, dims(1, 2, (128, 128)), &lengths) };
                        case.check(&device);
                        let slots = Case { slots: true, padding: true, form: Form::Projection, ..case };
                        Case { state_dtype: DType::BF16, ..slots }.check(&device);
                    }
                }
                for sizes in [(64, 64), (96, 192)] {
                    Case { segments, ..case(algo, dims(2, 1, sizes), &[1000]) }.check(&device);
                }
            }
            // Segments so long that the device chooses their borders, by what the heads forget.
            for decay in [Decay::None, Decay::Usual, Decay::Bursts] {
                for l2norm in [true, false] {
                    Case { segments: 3, decay, l2norm, ..case(algo, dims(1, 2, (128, 128)), &[4200, 70]) }
                        .check(&device);
                }
            }
        }
    }
}

/// They begin first and are cut alone.
#[test]
fn long_sequences_among_short_ones() {
    let mut lengths: Vec<usize> = (0..70).map(|i| i % 5).collect();
    (lengths[33], lengths[60]) = (900, 300);
    for device in devices() {
        for algo in tensor_cores(&device) {
            for segments in [0, 1, 3] {
                let case = Case { segments, ..case(algo, dims(1, 2, (128, 128)), &lengths) };
                case.check(&device);
                Case { slots: true, padding: true, ..case }.check(&device);
            }
        }
    }
}

/// Padding among packed sequences and in a batch, and rows of no sequence around all of them, are NaN: what is read of them
/// shows, though it be multiplied by zero.
#[test]
fn what_lies_around_plays_no_part() {
    for device in devices() {
        for algo in tensor_cores(&device) {
            for sizes in [(128, 128), (64, 64), (96, 192)] {
                for (packed, lengths) in [(true, vec![1, 63, 65, 0, 200, 130, 7]), (false, vec![70; 5])] {
                    for form in [Form::Dense, Form::Projection] {
                        for segments in [0, 2] {
                            let case = case(algo, dims(2, 2, sizes), &lengths);
                            let case = Case { packed, form, segments, slots: true, padding: true, ..case };
                            case.check(&device);
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn one_token_through_the_decode_op() {
    for device in devices() {
        for algo in tensor_cores(&device) {
            let x = args(2, 5, &device).in_dtype(DType::BF16).token(2);
            let ((o, state), (o_want, want)) = (x.decoded(options(algo)), x.decoded(options(Algo::Recurrent)));
            let errors = [rel_rms(&values(&o), &values(&o_want)), rel_rms(&values(&state), &values(&want))];
            assert!(errors.iter().all(|e| *e <= APART), "{algo:?}: {errors:?}");
        }
    }
}

/// What is finite in exact arithmetic stays so: a key of zeros beside a large value writes nothing, and a gate of -inf keeps the state.
#[test]
fn zero_keys_and_infinite_gates() {
    for device in devices() {
        for algo in tensor_cores(&device) {
            let x = args(1, 130, &device).in_dtype(DType::F16);
            let rest = |t: &Tensor| t.narrow(1, 40, 90).unwrap();
            let k = Tensor::cat(&[&x.k.narrow(1, 0, 40).unwrap().zeros_like().unwrap(), &rest(&x.k)], 1).unwrap();
            let v = (&x.v * 1e3).unwrap();
            let a = Tensor::cat(
                &[&rest(&x.gates.a), &x.gates.a.narrow(1, 0, 40).unwrap().affine(0., f64::NEG_INFINITY).unwrap()],
                1,
            );
            let gates = Gates { a: a.unwrap(), ..x.gates.clone() };
            let run = |algo| {
                let state = x.state.copy().unwrap();
                let op = GdnPrefill::new(gates.clone(), &state, None, options(algo)).unwrap();
                let o = op.forward(&x.q, &k, &v).unwrap();
                [values(&o), values(&state)]
            };
            for (got, want) in run(algo).iter().zip(&run(Algo::Recurrent)) {
                assert!(got.iter().chain(want).all(|x| x.is_finite()), "{algo:?}");
                assert!(rel_rms(got, want) <= APART, "{algo:?}: {}", rel_rms(got, want));
            }
        }
    }
}

/// `Auto` has no kernel for f32 there, and none for rows that begin anywhere.
#[test]
fn auto_knows_what_they_do_not_take() {
    for device in devices() {
        for tokens in [1, 16, 64, 512] {
            let x = args(1, tokens, &device);
            let auto = |x: &Args| GdnPrefill::new(x.gates.clone(), &x.state, None, options(Algo::Auto)).unwrap();
            let algo = auto(&x).algo(&x.q, &x.k, &x.v).unwrap();
            assert!(!TENSOR_CORES.contains(&algo), "f32, {tokens} tokens: {algo:?}");
            let half = args(1, tokens, &device).in_dtype(DType::BF16);
            // Rows that begin anywhere.
            let odd = |t: &Tensor| {
                let wide =
                    Tensor::cat(&[&t.flatten_from(2).unwrap(), &t.narrow(2, 0, 1).unwrap().squeeze(2).unwrap()], 2);
                wide.unwrap().narrow(2, 1, t.dims()[2] * 128).unwrap()
            };
            let (q, k, v) = (odd(&half.q), odd(&half.k), odd(&half.v));
            let algo = auto(&half).algo(&q, &k, &v).unwrap();
            assert!(!TENSOR_CORES.contains(&algo), "odd rows, {tokens} tokens: {algo:?}");
            auto(&half).forward(&q, &k, &v).unwrap();
            for algo in tensor_cores(&device) {
                let op = GdnPrefill::new(half.gates.clone(), &half.state, None, options(algo)).unwrap();
                match op.forward(&q, &k, &v) {
                    Ok(_) => assert!(device.is_cpu(), "{algo:?} takes rows that begin anywhere"),
                    e => refused(e, &["gdn_prefill: CUDA kernel refused with status 7"]),
                }
            }
        }
    }
}

#[test]
fn what_they_do_not_take_is_refused_with_a_sentence() {
    for device in &devices() {
        let run = |algo, dtype, (key_dim, value_dim): (usize, usize)| {
            let z = |shape: &[usize], dtype| Tensor::zeros(shape, dtype, device).unwrap();
            let (k, v) = (z(&[1, 70, 1, key_dim], dtype), z(&[1, 70, 2, value_dim], dtype));
            let (ab, heads) = (z(&[1, 70, 2], DType::F32), z(&[2], DType::F32));
            let gates = Gates { a: ab.clone(), b: ab, a_log: heads.clone(), dt_bias: heads };
            let state = z(&[1, 2, value_dim, key_dim], DType::F32);
            let op = GdnPrefill::new(gates, &state, None, options(algo))?;
            op.algo(&k, &k, &v).and_then(|_| op.forward(&k, &k, &v))
        };
        for algo in TENSOR_CORES {
            let dtypes = format!("gdn_prefill: algo: {algo:?} supports q, k and v in bf16 or f16, got F32");
            refused(run(algo, DType::F32, (128, 128)), &[&dtypes]);
            let sizes =
                format!("gdn_prefill: algo: {algo:?} supports head sizes that are multiples of 8 and K up to 128");
            for (key_dim, value_dim) in [(136, 128), (124, 128), (128, 124), (256, 256), (1, 17)] {
                let got = format!("got {key_dim} (K) and {value_dim} (V)");
                refused(run(algo, DType::BF16, (key_dim, value_dim)), &[&sizes, &got]);
            }
        }
    }
}

/// The kernel made for compute capability 9.0 is refused on every other, and on none of that if it was compiled.
#[cfg(feature = "cuda")]
#[test]
fn the_device_decides() {
    use crate::support::has;
    use candle_core::cuda_backend::cudarc::driver::sys::CUdevice_attribute as Attribute;
    for device in devices() {
        let candle_core::Device::Cuda(cuda) = &device else { continue };
        let stream = cuda.cuda_stream();
        let ask = |attribute| stream.context().attribute(attribute).unwrap();
        let major = ask(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
        let minor = ask(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
        let compiled = option_env!("CANDLE_GDN_CUDA_ARCHS").is_none_or(|archs| archs.contains("90a"));
        assert_eq!(has(&device, Algo::ChunkedSm90), compiled && (major, minor) == (9, 0), "{major}.{minor}");
        assert!(has(&device, Algo::ChunkedSm80));
    }
}
