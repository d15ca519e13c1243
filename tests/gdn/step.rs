//! The step: convolution, rule and gated norm as one op, against the definition in f64 and against the three ops.

use crate::random_layer::{layer, packed, rows};
use crate::step_args::StepArgs;
use crate::step_case::{has_clusters, Case, Drawn, Way};
use crate::support::{devices, has, refused, rel_rms, values, Rng};
use candle_core::{DType, Device, Tensor};
use candle_gdn::ops::causal_conv1d;
use candle_gdn::reference::Dims;
use candle_gdn::{Algo, CuSeqlens, GateActivation, GdnConfig, Slots};
use std::convert::identity;

/// Heads, batches and lengths, each in every dtype; what else there is to choose changes from case to case.
#[test]
fn equals_its_definition_and_the_three_ops() {
    for device in devices() {
        let mut seed = 0;
        for (ratio, dims) in [1, 2, 3, 4, 8]
            .map(|ratio| (ratio, (128, 128)))
            .into_iter()
            .chain([1, 2, 3].map(|ratio| (ratio, (96, 192))))
        {
            for (batch, tokens) in [1, 2, 5, 33].into_iter().flat_map(|n| [1, 2, 5, 16].map(|t| (n, t))) {
                // The reference takes its time.
                if batch * tokens > 80 && (ratio, dims) != (3, (128, 128)) {
                    continue;
                }
                for dtype in [DType::F32, DType::BF16, DType::F16] {
                    seed += 1;
                    let bit = |n: u64| ((seed * 0x9e37_79b9) >> (8 + n)) % 2 == 1;
                    let case = Case {
                        tokens: if tokens == 1 && bit(0) { None } else { Some(tokens) },
                        dtype,
                        gate_dtype: if bit(1) { dtype } else { DType::F32 },
                        f32_weights: bit(2),
                        state_dtype: if bit(3) { DType::BF16 } else { DType::F32 },
                        slots: bit(5),
                        gate: if bit(6) { GateActivation::Sigmoid } else { GateActivation::Silu },
                        beta_scale: if bit(7) { 2.0 } else { 1.0 },
                        scale: if bit(8) { Some(0.3) } else { None },
                        ..Case::new(ratio, batch, tokens, seed).with_dims(dims)
                    };
                    let algo = case.check(&device);
                    // With 99 KB of shared memory and no clusters the tokens of heads of 128 have no room beside their states.
                    let capped = option_env!("CANDLE_GDN_CUDA_SHARED_LIMIT").is_some()
                        && (ratio > 2, dims, tokens) == (true, (128, 128), 16);
                    assert_eq!(algo == Algo::Unfused, device.is_cpu() || capped, "{case:?}");
                }
            }
        }
    }
}

/// Each variant where it is asked for, with everything there is to choose.
#[test]
fn every_variant_and_option() {
    for device in devices() {
        let clusters = has_clusters(&device);
        for (algo, ratio, dims, tokens) in [
            (Algo::StepWhole, 2, (128, 128), 1),
            (Algo::StepWhole, 3, (128, 128), 6),
            (Algo::StepWhole, 1, (96, 192), 1),
            (Algo::StepWhole, 2, (96, 192), 6),
            (Algo::StepSplit, 1, (128, 128), 1),
            (Algo::StepSplit, 4, (128, 128), 1),
            (Algo::StepSplit, 1, (96, 192), 1),
            (Algo::StepSplit, 2, (96, 192), 1),
            (Algo::StepHeads, 2, (128, 128), 1),
            (Algo::StepHeads, 8, (128, 128), 1),
            (Algo::StepHeads, 3, (128, 128), 6),
            (Algo::StepHeads, 2, (96, 192), 1),
            (Algo::StepHeads, 3, (96, 192), 6),
            (Algo::Unfused, 2, (128, 128), 1),
            (Algo::Unfused, 2, (128, 128), 6),
        ] {
            if matches!(algo, Algo::StepSplit | Algo::StepHeads) && device.is_cuda() && !clusters {
                continue;
            }
            let plain = Case { algo, ..Case::new(ratio, 4, tokens, 77).with_dims(dims) };
            let half = Case { dtype: DType::BF16, gate_dtype: DType::BF16, ..plain.clone() };
            let cases = [
                half.clone(),
                Case { dtype: DType::F16, ..plain.clone() },
                Case { gate: GateActivation::Sigmoid, ..plain.clone() },
                Case { beta_scale: 2.0, ..plain.clone() },
                Case { l2norm: false, ..plain.clone() },
                Case { scale: Some(0.3), ..plain.clone() },
                Case { slots: true, ..half.clone() },
                Case { state_dtype: DType::BF16, slots: true, ..half.clone() },
                Case { f32_weights: true, ..half },
                plain,
            ];
            for case in cases {
                let got = case.check(&device);
                assert_eq!(got, if device.is_cpu() { Algo::Unfused } else { algo }, "{case:?}");
            }
        }
    }
}

/// Other head sizes, widths and offsets are taken as well.
#[test]
fn what_no_fused_kernel_takes_is_composed() {
    for device in devices() {
        let of = |key_dim, value_dim| Dims { key_heads: 2, value_heads: 4, key_dim, value_dim };
        for (tokens, dtype) in [(None, DType::F32), (Some(1), DType::BF16), (Some(5), DType::F16)] {
            let case = Case { tokens, dtype, ..Case::new(2, 3, 1, 5) };
            for case in [
                Case { dims: of(64, 64), ..case.clone() },
                Case { dims: of(96, 96), slots: true, ..case.clone() },
                Case { dims: of(64, 128), ..case.clone() },
                Case { width: 3, ..case.clone() },
                Case { width: 2, gate: GateActivation::Sigmoid, ..case.clone() },
                Case { before: 3, state_dtype: DType::BF16, ..case.clone() },
            ] {
                assert_eq!(case.check(&device), Algo::Unfused, "{case:?}");
            }
        }
    }
}

#[test]
fn runs_repeat_bit_for_bit() {
    for device in devices() {
        for algo in Algo::STEP {
            for (batch, tokens) in [(1, 1), (33, 1), (2, 16)] {
                let clustered = matches!(algo, Algo::StepSplit | Algo::StepHeads);
                if clustered && !device.is_cpu() && !has_clusters(&device) || algo == Algo::StepSplit && tokens > 1 {
                    continue;
                }
                let case = Case { algo, dtype: DType::BF16, ..Case::new(2, batch, tokens, 8) };
                let drawn = Drawn::new(&case);
                let run = || drawn.run(&case, &device, Way::Step).unwrap().1;
                let first = run();
                for _ in 0..3 {
                    assert!(run() == first, "{case:?}");
                }
            }
        }
    }
}

/// With the constants of the cases, heads of 128.
fn random(lead: &[usize], slots: usize, device: &Device) -> StepArgs {
    let step = StepArgs::new(lead, slots, [128, 128], |shape| Tensor::randn(0f32, 1., shape, device).unwrap());
    step.with(|x| x.options = Case::new(2, 1, 1, 0).options())
}

/// Sixteen tokens whole, in pieces and one by one.
#[test]
fn any_split_gives_the_same() {
    const TOKENS: usize = 16;
    for device in devices() {
        for (dtype, out_bound) in [(DType::F32, 1e-5), (DType::BF16, 4e-3), (DType::F16, 5e-4)] {
            let x = random(&[3, TOKENS], 3, &device).in_dtype(dtype);
            let run = |cuts: &[usize]| {
                let x = x.copied();
                let step = |cut: &[usize]| x.map(|t| t.narrow(1, cut[0], cut[1] - cut[0]).unwrap()).forward(identity);
                let outs: Vec<Tensor> = cuts.windows(2).map(|cut| step(cut).unwrap()).collect();
                let [conv, state] = x.states();
                (values(&Tensor::cat(&outs, 1).unwrap()), conv, state)
            };
            let whole = run(&[0, 16]);
            for cuts in
                [vec![0, 4, 8, 12, 16], vec![0, 1, 16], vec![0, 2, 2, 9, 16], vec![0, 15, 16], (0..=16).collect()]
            {
                let got = run(&cuts);
                let (out, state) = (rel_rms(&got.0, &whole.0), rel_rms(&got.2, &whole.2));
                assert!(out < out_bound && state < 1e-5, "{dtype:?} {cuts:?}: out {out:e}, state {state:e}");
                assert!(got.1 == whole.1, "{dtype:?} {cuts:?}: the convolution's state");
            }
        }
    }
}

/// A z split into heads, one whose batch and token strides do not count through, and gates with any strides.
#[test]
fn odd_strides() {
    for device in devices() {
        let a = Tensor::randn(0f32, 1., (2, 4, 9), &device).unwrap().transpose(1, 2).unwrap();
        let x = random(&[2, 9], 2, &device).with(|x| x.gates.a = a);
        let part = |t: &Tensor| t.narrow(1, 3, 5).unwrap();
        let run = |x: &StepArgs| {
            let x = x.copied();
            (values(&x.forward(identity).unwrap()), x.states())
        };
        let (want, views) = (run(&x.map(|t| part(t).contiguous().unwrap())), x.map(part));
        assert!(run(&views) == want);
        assert!(run(&views.with(|x| x.z = x.z.reshape((2, 5, 4, 128)).unwrap())) == want);
    }
}

/// Nothing comes of no tokens.
#[test]
fn nothing_to_do() {
    for device in devices() {
        let x = random(&[2, 3], 2, &device).map(|t| t.narrow(1, 0, 0).unwrap());
        let before = x.states();
        assert_eq!(x.forward(identity).unwrap().dims(), [2, 0, 512]);
        assert!(x.states() == before);
    }
}

/// The state that a call was refused with is as it was.
#[test]
fn a_refused_call_writes_nothing() {
    let x = random(&[2], 2, &Device::Cpu);
    let (before, other) = (x.states(), x.copied().conv);
    let slots = Tensor::new(&[1u32, 1], &Device::Cpu).unwrap();
    x.forward(|op| op.with_slots(&slots)).unwrap_err();
    x.with(|x| x.z = x.z.narrow(1, 0, 511).unwrap()).forward(identity).unwrap_err();
    assert!(x.states() == before);
    // As a bare op, which copies no z: rows that do not count through.
    let wide = random(&[2, 9], 2, &Device::Cpu);
    let (before_wide, part) = (wide.states(), wide.map(|t| t.narrow(1, 0, 5).unwrap()));
    let [qkv, weight] = [&part.qkv, &part.conv_weight];
    refused(
        qkv.apply_op3_no_bwd(&part.z, weight, &part.op().unwrap()),
        &["gdn_step: z: expected leading dimensions with one common stride, got"],
    );
    assert!(wide.states() == before_wide);
    x.forward(identity).unwrap();
    let after = x.states();
    assert!(after[0] != before[0] && after[1] != before[1]);
    // The functions of the three ops see the same convolution's state.
    causal_conv1d(&x.qkv.unsqueeze(1).unwrap(), &x.conv_weight, &other, None, true).unwrap();
    assert!(values(&other) == after[0]);
}

/// Nor does a kernel that was chosen and does not support the call: the rule's comes after the convolution.
#[test]
fn a_refused_kernel_writes_nothing() {
    for device in devices() {
        // Boundaries count as several tokens, for which there are no such heads.
        let config = GdnConfig::new(64, (2, 64), (4, 32));
        let of = |algo| layer(&config, DType::BF16, &device, 3).with_algo(algo);
        let x = packed(&rows(&mut Rng::new(4), 40, 64), DType::BF16, &device);
        let slots = Slots::new(&[0, 1], &device).unwrap();
        let mut pool = of(Algo::Auto).new_pool(2).unwrap();
        let mut feed = |algo, lengths: [usize; 2]| {
            let cu = CuSeqlens::from_lengths(&lengths, &device).unwrap();
            let x = x.narrow(0, 0, lengths.iter().sum()).unwrap();
            let fed = of(algo).forward_slots(&x, Some(&cu), &slots, &mut pool);
            (fed, [values(pool.conv()), values(pool.recurrent())])
        };
        let (fed, before) = feed(Algo::Auto, [30, 10]);
        fed.unwrap();
        let (fed, after) = feed(Algo::Decode, [1, 0]);
        refused(fed, &["algo: Decode supports several or packed tokens for heads of 128"]);
        assert!(after == before);
        if !has(&device, Algo::ChunkedSm90) {
            let (fed, after) = feed(Algo::ChunkedSm90, [30, 10]);
            refused(fed, &["status 7"]);
            assert!(after == before);
        }
        // On CUDA that kernel reads gates in qkv's dtype or in f32.
        let mut x = random(&[2], 2, &device).in_dtype(DType::BF16).with(|x| x.options.rule.algo = Algo::Decode);
        [x.gates.a, x.gates.b] = [&x.gates.a, &x.gates.b].map(|gate| gate.to_dtype(DType::F16).unwrap());
        let before = x.states();
        if device.is_cuda() {
            refused(x.forward(identity), &["gdn_step", "status 7"]);
            assert!(x.states() == before);
        } else {
            x.forward(identity).unwrap();
        }
    }
}
