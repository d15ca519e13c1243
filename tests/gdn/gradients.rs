//! Gradients of the rule and its gates: golden files, the reference on random shapes, and what must hold to the bit.

use crate::grad_case::{bits, reproducible, Call, Look, Outcome, NAMES, USUAL};
use crate::support::{devices, golden, poison, refused, rel_rms, values};
use candle_core::{DType, Device, Tensor, Var};
use candle_gdn::ops::{gdn_gates, gdn_rule_diff, RuleOptions};
use candle_gdn::reference::Dims;
use candle_gdn::{Algo, CuSeqlens};
use proptest::prelude::*;
use safetensors::SafeTensors;
use serde::Deserialize;

/// What gradients may be off: of exact inputs in f32, and in bf16 and f16.
pub fn bound(dtype: DType) -> f64 {
    if dtype == DType::F32 {
        1e-5
    } else {
        6e-3
    }
}

/// What decayed below it has lost digits, or is zero. Gradients in f16 lose theirs in what is added up on the way.
fn smallest(dtype: DType, gradient: bool) -> f64 {
    match dtype {
        DType::F16 if gradient => 1e-3,
        DType::F16 => 1e-5,
        _ => 1e-30,
    }
}

#[derive(Deserialize)]
#[serde(rename_all = "UPPERCASE")]
struct GoldenCase {
    h: usize,
    hv: usize,
    k: usize,
    v: usize,
    #[serde(rename = "seqs")]
    lengths: Vec<usize>,
    #[serde(rename = "beta_scale", default = "one")]
    beta_scale: f64,
}

/// Those rows of `got` that a thinned file holds: every so many of the first dimension in which the shapes differ.
pub fn every_row_kept(got: &Tensor, want: &Tensor) -> Tensor {
    let Some(dim) = (0..want.rank()).find(|dim| got.dims()[*dim] != want.dims()[*dim]) else { return got.clone() };
    let (all, kept) = (got.dims()[dim], want.dims()[dim]);
    let rows: Vec<u32> = (0..kept).map(|i| (i * (all / kept)) as u32).collect();
    got.index_select(&Tensor::new(rows, got.device()).unwrap(), dim).unwrap()
}

fn one() -> f64 {
    1.0
}

#[test]
fn golden_gradients() {
    let bytes = std::fs::read(golden("op_grads.safetensors")).unwrap();
    let (_, metadata) = SafeTensors::read_metadata(&bytes).unwrap();
    let cases: Vec<GoldenCase> = serde_json::from_str(&metadata.metadata().clone().unwrap()["cases"]).unwrap();
    assert!(matches!(cases.len(), 1 | 8)); // thinned, or whole
    for device in devices() {
        let tensors = candle_core::safetensors::load_buffer(&bytes, &device).unwrap();
        for (i, case) in cases.iter().enumerate() {
            let get = |name: &str| tensors[&format!("{i}.{name}")].clone();
            for dtype in [DType::F32, DType::BF16] {
                let io = |name: &str| get(name).to_dtype(dtype).unwrap();
                let call = Call {
                    dims: Dims { key_heads: case.h, value_heads: case.hv, key_dim: case.k, value_dim: case.v },
                    args: NAMES.map(|name| match name {
                        "A_log" | "dt_bias" | "state" => get(name),
                        name => io(name),
                    }),
                    d_o: Some(io("do")),
                    d_last: Some(get("dstate")),
                    lengths: case.lengths.clone(),
                    packed: true,
                    from_zeros: false,
                    options: RuleOptions::with(|options| options.beta_scale = case.beta_scale),
                };
                let out = call.run();
                let at = format!("case {i} in {dtype:?} on {:?}", device.location());
                for (name, got) in [("out", &out.o), ("new_state", &out.last)] {
                    let (want, got) = (get(name), every_row_kept(got, &get(name)));
                    let error = rel_rms(&values(&got), &values(&want));
                    assert!(error <= bound(dtype), "{at}: {name} is off by {error:e}");
                }
                for (name, got) in NAMES.iter().zip(&out.gradients) {
                    let want = get(&format!("grad.{name}"));
                    let got = every_row_kept(got.as_ref().expect(name), &want);
                    let error = rel_rms(&values(&got), &values(&want));
                    assert!(error <= bound(dtype), "{at}: the gradient of {name} is off by {error:e}");
                }
            }
        }
    }
}

const LENGTHS: [usize; 12] = [0, 1, 2, 3, 15, 16, 17, 31, 33, 64, 65, 100];

fn any_call() -> impl Strategy<Value = (Dims, Vec<usize>, bool, Look, [bool; 7], u64)> {
    let sizes = vec![(128, 128), (64, 64), (96, 192), (32, 256), (256, 32), (40, 72), (1, 17), (19, 1), (129, 19)];
    let dims = (1usize..=2, 1usize..=3, prop::sample::select(sizes)).prop_map(|(hk, r, (key_dim, value_dim))| Dims {
        key_heads: hk,
        value_heads: hk * r,
        key_dim,
        value_dim,
    });
    let lengths = prop_oneof![
        prop::collection::vec(prop::sample::select(LENGTHS.to_vec()), 1..5).prop_map(|lengths| (lengths, true)),
        (prop::sample::select(LENGTHS.to_vec()), 1usize..4).prop_map(|(t, n)| (vec![t; n], false)),
    ];
    let look = (
        prop::sample::select(vec![DType::F32, DType::F32, DType::BF16, DType::F16]),
        prop::sample::select(vec![1e-2, 1.0, 1e2]),
        prop::sample::select(vec![-8.0, -2.0, 0.0, 6.0, 30.0]),
        prop::sample::select(vec![0.0, 4.0]),
        any::<[bool; 2]>(),
    );
    let look = look.prop_map(|(dtype, norm, a_mean, b_mean, [zero_rows, repeat_keys])| Look {
        dtype,
        norm,
        a_mean,
        b_mean,
        zero_rows,
        // A beta near one erases what the same key wrote: what is left of a decay's gradient is rounding. Golden cases have it.
        repeat_keys: repeat_keys && a_mean >= 0.0 && b_mean == 0.0,
    });
    (dims, lengths, look, any::<[bool; 7]>(), any::<u64>())
        .prop_map(|(dims, (lengths, packed), look, flags, seed)| (dims, lengths, packed, look, flags, seed))
}

proptest! {
    #![proptest_config(reproducible(48))]

    /// Against the backward pass token by token in f64, which central differences check. Where gradients cancel, those of
    /// inputs with errors of a quarter of the bound say what arithmetic loses.
    #[test]
    fn gradients_on_random_shapes((dims, lengths, packed, look, flags, seed) in any_call()) {
        let [l2norm, twice, from_zeros, with_o, with_last, scaled, large_eps] = flags;
        // The norm of one number leaves its sign: nothing but rounding would be left of its gradient.
        let l2norm = l2norm && dims.key_dim > 1;
        // Unnormalised keys are those of a layer whose norm is elsewhere: short ones, so that nothing explodes.
        let look = Look { norm: if l2norm { look.norm } else { 0.5 / (dims.key_dim as f64).sqrt() }, ..look };
        for device in devices() {
            if lengths.iter().sum::<usize>() == 0 && device.is_cuda() {
                continue; // candle's own operations refuse empty tensors there
            }
            let mut call = Call::random(dims, &lengths, look, seed, &device);
            (call.packed, call.from_zeros) = (packed, from_zeros);
            call.options = RuleOptions::with(|o| {
                (o.l2norm, o.beta_scale) = (l2norm, if twice { 2.0 } else { 1.0 });
                (o.l2_eps, o.scale) = (if large_eps { 0.02 } else { 1e-6 }, scaled.then_some(0.3));
            });
            if !with_o && with_last {
                call.d_o = None;
            }
            if !with_last {
                call.d_last = None;
            }
            let (o, last, all) = call.reference();
            let (noisy_o, noisy_last, noisy_all) = call.noisy(bound(look.dtype) / 4.0, seed).reference();
            poison(call.args[0].elem_count(), look.dtype, &device).unwrap();
            let out = call.run();
            let outputs = [("o", Some(&out.o), &o, &noisy_o), ("final state", Some(&out.last), &last, &noisy_last)];
            let gradients = NAMES.iter().zip(&out.gradients).zip(all.iter().zip(&noisy_all));
            let gradients = gradients.map(|((name, got), (want, noisy))| (*name, got.as_ref(), want, noisy));
            // The gates of CUDA kernels use the processor's exponential, good to two units in the last place.
            let share = if device.is_cuda() && look.dtype == DType::F32 { 2.0 } else { 1.0 };
            for (i, (name, got, want, noisy)) in outputs.into_iter().chain(gradients).enumerate() {
                let Some(got) = got else {
                    prop_assert!(from_zeros && name == "state", "{name} has no gradient");
                    continue;
                };
                let (smallest, got) = (smallest(got.dtype(), i >= outputs.len()), values(got));
                if want.iter().all(|x| x.abs() < smallest) {
                    let large = got.iter().any(|x| x.abs() > 2.0 * smallest);
                    prop_assert!(!large, "{name} is not as small as it should be");
                    continue;
                }
                let minus = |x: &[f64], y: &[f64]| x.iter().zip(y).map(|(x, y)| x - y).collect::<Vec<f64>>();
                // Sums over tokens may cancel: measured against the sum of what they add.
                let (size, lost) = match name {
                    "A_log" | "dt_bias" => {
                        (call.terms(name, &all[3]), call.terms(name, &minus(&noisy_all[3], &all[3])))
                    }
                    _ => (norm(want), norm(&minus(noisy, want))),
                };
                // The chunk kernels round a state's gradient to the inputs' type: to the nearest multiple of 2^-24 where f16 is subnormal.
                let in_f16 = name == "state" && device.is_cuda() && look.dtype == DType::F16;
                let subnormal = if in_f16 { (got.len() as f64).sqrt() * 2f64.powi(-25) } else { 0.0 };
                let (error, mut allowed) =
                    (norm(&minus(&got, want)), share * bound(look.dtype) * size + lost + subnormal);
                if error > allowed && !["A_log", "dt_bias"].contains(&name) {
                    // The bound has no term for a sum that cancels but what one draw of errors lost. Where all of a gradient is one
                    // sum (q's of one token, with PROPTEST_RNG_SEED=4), that draw may cancel as well: then eight say what is lost.
                    let squares = (1..=8).map(|draw| {
                        let (o, last, all) = call.noisy(bound(look.dtype) / 4.0, seed.wrapping_add(draw)).reference();
                        let noisy = [vec![o, last], all.into()].concat().swap_remove(i);
                        norm(&minus(&noisy, want)).powi(2)
                    });
                    allowed += (squares.sum::<f64>() / 8.0).sqrt() - lost;
                }
                prop_assert!(error <= allowed, "{name} is off by {error:e} of {size:e} on {:?}", device.location());
            }
        }
    }
}

fn norm(x: &[f64]) -> f64 {
    x.iter().map(|x| x * x).sum::<f64>().sqrt()
}

fn small() -> Dims {
    Dims { key_heads: 2, value_heads: 4, key_dim: 24, value_dim: 40 }
}

fn assert_same(what: &str, got: &[Option<Tensor>; 8], want: &[Option<Tensor>; 8], names: &[&str]) {
    for ((name, got), want) in NAMES.iter().zip(got).zip(want).filter(|((name, _), _)| names.contains(*name)) {
        assert_eq!(bits(got.as_ref().unwrap()), bits(want.as_ref().unwrap()), "{what}: {name}");
    }
}

/// A packed sequence has the gradients it has alone, and another sequence changes none of their bits.
#[test]
fn sequences_do_not_meet() {
    for device in devices() {
        for dtype in [DType::F32, DType::BF16] {
            let lengths = [5, 0, 37, 1, 64];
            let call = Call::random(small(), &lengths, Look { dtype, ..USUAL }, 7, &device);
            let all = call.run();
            let mut first = 0;
            for (n, len) in lengths.into_iter().enumerate() {
                if len == 0 && device.is_cuda() {
                    continue; // candle's own operations refuse empty tensors there
                }
                let alone = call.sequence(n).run();
                for (i, name) in NAMES.iter().enumerate().filter(|(i, _)| *i < 5 || *i == 7) {
                    let got = all.gradients[i].as_ref().unwrap();
                    let got = if i == 7 { got.narrow(0, n, 1) } else { got.narrow(0, first, len) }.unwrap();
                    let want = alone.gradients[i].as_ref().unwrap();
                    assert_eq!(bits(&got), bits(want), "sequence {n}: {name}");
                }
                first += len;
            }
            // Another second half, and the first is as it was.
            let other = Call::random(small(), &lengths, Look { dtype, ..USUAL }, 8, &device);
            let mut changed = call.clone();
            for (x, y) in changed.args.iter_mut().zip(&other.args) {
                if x.dims()[0] == first {
                    *x =
                        Tensor::cat(&[&x.narrow(0, 0, 43).unwrap(), &y.narrow(0, 43, first - 43).unwrap()], 0).unwrap();
                }
            }
            let changed = changed.run();
            for (i, name) in NAMES.iter().enumerate().take(5) {
                let part = |out: &Outcome| bits(&out.gradients[i].as_ref().unwrap().narrow(0, 0, 42).unwrap());
                assert_eq!(part(&changed), part(&all), "{name}");
            }
        }
    }
}

#[test]
fn runs_are_equal_to_the_bit() {
    for device in devices() {
        let call = Call::random(small(), &[90, 3, 200], USUAL, 3, &device);
        let want = call.run().gradients;
        for _ in 0..20 {
            assert_same("again", &call.run().gradients, &want, &NAMES);
        }
    }
}

/// A loss of the first tokens has no gradient in later ones.
#[test]
fn gradients_are_causal() {
    for device in devices() {
        let mut call = Call::random(small(), &[70], USUAL, 5, &device);
        let d_o = call.d_o.take().unwrap();
        let zeros = d_o.narrow(0, 33, 37).unwrap().zeros_like().unwrap();
        call.d_o = Some(Tensor::cat(&[&d_o.narrow(0, 0, 33).unwrap(), &zeros], 0).unwrap());
        call.d_last = None;
        for (name, gradient) in NAMES.iter().zip(call.run().gradients).take(5) {
            let gradient = gradient.unwrap();
            let max = |first, len| {
                values(&gradient.narrow(0, first, len).unwrap()).iter().fold(0.0, |m: f64, x| m.max(x.abs()))
            };
            assert!(max(0, 33) > 0.0 && max(33, 37) == 0.0, "{name}: {} and {}", max(0, 33), max(33, 37));
        }
    }
}

/// A loss of o, of the final state, and of both; and each backward pass gives the same once more.
#[test]
fn both_outputs_have_gradients() {
    for device in devices() {
        let both = Call::random(small(), &[20, 7], USUAL, 11, &device);
        let only_o = Call { d_last: None, ..both.clone() };
        let only_last = Call { d_o: None, ..both.clone() };
        let [sum, o, last] = [&both, &only_o, &only_last].map(|call| call.run().gradients);
        for (i, name) in NAMES.iter().enumerate() {
            let [sum, o, last] = [&sum, &o, &last].map(|x| values(x[i].as_ref().unwrap()));
            let parts: Vec<f64> = o.iter().zip(&last).map(|(o, last)| o + last).collect();
            assert!(rel_rms(&sum, &parts) < 1e-5, "{name}");
            assert!(*name == "q" || last.iter().any(|x| *x != 0.0), "{name} has nothing of the state");
        }
        let vars = both.args.clone().map(|x| Var::from_tensor(&x).unwrap());
        let (o, last, loss) = both.loss(&vars).unwrap();
        let of = |loss: &Tensor| {
            let store = loss.backward().unwrap();
            vars.each_ref().map(|x| store.get(x).cloned())
        };
        let first = of(&loss);
        assert_same("twice", &of(&loss), &first, &NAMES);
        // The final state's gradient of one pass is not left for the next.
        let d_o = both.d_o.as_ref().unwrap();
        assert_same("o after both", &of(&(&o * d_o).unwrap().sum_all().unwrap()), &only_o.run().gradients, &NAMES);
        let d_last = both.d_last.as_ref().unwrap();
        let last = of(&(&last * d_last).unwrap().sum_all().unwrap());
        assert_same("the state after o", &last, &only_last.run().gradients, &NAMES);
    }
}

/// A pass that fails after the final state's gradient and before the rule's own leaves nothing behind.
#[test]
fn a_failed_pass_changes_no_later_one() {
    for device in devices() {
        let both = Call::random(small(), &[20, 7], USUAL, 13, &device);
        let vars = both.args.clone().map(|x| Var::from_tensor(&x).unwrap());
        let (o, last, _) = both.loss(&vars).unwrap();
        let (d_o, d_last) = (both.d_o.as_ref().unwrap(), both.d_last.as_ref().unwrap());
        let of_o = (&o * d_o).unwrap().sum_all().unwrap();
        let of_last = (&last * d_last).unwrap().sum_all().unwrap();
        // It has no backward pass. Of two terms candle walks the second one first: so the final state's, or not at all.
        let kernel = Tensor::ones((small().value_heads, 1, 1), DType::F32, &device).unwrap();
        let fails = o.conv_transpose1d(&kernel, 0, 0, 1, 1, 1).unwrap().sum_all().unwrap();
        let only_o = Call { d_last: None, ..both.clone() }.run().gradients;
        for loss in [&fails + &of_last, &of_last + &fails] {
            let error = loss.unwrap().backward().map(drop).unwrap_err().to_string();
            assert!(error.contains("conv-transpose1d"), "{error}");
            let store = of_o.backward().unwrap();
            assert_same("after a failure", &vars.each_ref().map(|x| store.get(x).cloned()), &only_o, &NAMES);
        }
    }
}

/// Longer than the states that a task of the CPU keeps at a time: 256 chunks of 16 tokens at K = V = 128.
#[test]
fn long_sequences_are_cut_in_segments() {
    let dims = Dims { key_heads: 1, value_heads: 1, key_dim: 256, value_dim: 256 };
    let call = Call::random(dims, &[1100], Look { a_mean: -4.0, ..USUAL }, 2, &Device::Cpu);
    let (_, _, want) = call.reference();
    for ((name, got), want) in NAMES.iter().zip(call.run().gradients).zip(want) {
        let error = rel_rms(&values(&got.unwrap()), &want);
        assert!(error <= 1e-5, "{name} is off by {error:e}");
    }
}

#[test]
fn bad_arguments_are_named() {
    for device in &devices() {
        let zeros = |shape: &[usize]| Tensor::zeros(shape, DType::F32, device).unwrap();
        let (sizes, cu) = (small(), CuSeqlens::from_lengths(&[5], device).unwrap());
        let (qkv, gates, state) = (zeros(&[1, 5, 256]), zeros(&[1, 5, 8]), zeros(&[1, 4, 40, 24]));
        let run = |qkv: &Tensor, gates: &Tensor, state: &Tensor, cu: Option<&CuSeqlens>, options| {
            gdn_rule_diff(qkv, gates, Some(state), sizes, cu, options)
        };
        let usual = RuleOptions::default();
        run(&qkv, &gates, &state, None, usual).unwrap();
        let (wide, short) = (zeros(&[1, 5, 257]), zeros(&[1, 5, 7]));
        refused(run(&wide, &gates, &state, None, usual), &["gdn_rule_diff: qkv: expected shape [1, 5, 1, 256]", "257"]);
        refused(run(&qkv, &short, &state, None, usual), &["gdn_rule_diff: gates: expected shape"]);
        refused(run(&qkv, &gates, &zeros(&[2, 4, 40, 24]), None, usual), &["state: expected shape [1, 4, 40, 24]"]);
        refused(run(&qkv, &gates, &state, Some(&cu), usual), &["qkv: expected shape [tokens, 256]"]);
        let packed = qkv.flatten(0, 1).unwrap();
        refused(run(&packed, &gates, &state, None, usual), &["packed tokens need cu_seqlens"]);
        let half = gates.to_dtype(DType::BF16).unwrap();
        refused(run(&qkv, &half, &state, None, usual), &["gates: expected dtype F32, got BF16"]);
        let of = |algo| RuleOptions::with(|options| options.algo = algo);
        refused(run(&qkv, &gates, &state, None, of(Algo::Decode)), &["algo: expected Auto, Recurrent"]);
        let mut segments = usual;
        segments.segments = 65;
        refused(run(&qkv, &gates, &state, None, segments), &["segments: expected at most 64 in training, got 65"]);
        refused(
            run(&qkv, &gates, &state, None, of(Algo::ChunkedSm80)),
            &["algo: ChunkedSm80 supports q, k and v in bf16"],
        );
        let heads = zeros(&[4]);
        refused(gdn_gates(&short, &heads, &heads, 1.0), &["gdn_gates: ba: expected shape [.., 8]", "got [1, 5, 7]"]);
        refused(gdn_gates(&gates, &heads, &zeros(&[3]), 1.0), &["gdn_gates: dt_bias: expected shape [4], got [3]"]);
        refused(
            gdn_gates(&gates, &heads, &heads, 3.0),
            &["gdn_gates: beta_scale: expected a value above 0 and up to 2"],
        );
    }
}
