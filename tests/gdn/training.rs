//! Variables: no gradient vanishes in silence, weights are read once, a new layer begins as a published one, and what is kept
//! in f32 was never less.

use crate::errors::Rule;
use crate::layer::{config, weights_for};
use crate::projections::{dense, fused, module, parts};
use crate::semantics::{self, Args};
use crate::step_args::{self, StepArgs};
use crate::support::{devices, gdn_decode, gdn_prefill, refused, values};
use candle_core::{safetensors, DType, Device, Module, Result, Tensor, Var};
use candle_gdn::ops::{causal_conv1d, multiply, GdnDecode, Launch, RuleOptions};
use candle_gdn::{CuSeqlens, DenseWeight, GatedDeltaNet, GdnConfig, GdnState, InProjection, Projection, Slots};
use candle_nn::{VarBuilder, VarMap};
use std::collections::HashMap;
use std::path::PathBuf;

/// A variable with the values of `x`, and what was computed from one.
fn tracked(x: &Tensor) -> [Tensor; 2] {
    let variable = Var::from_tensor(x).unwrap().into_inner();
    let computed = variable.affine(1.0, 0.0).unwrap();
    [variable, computed]
}

/// An argument of an op, by name, among all of them.
type Argument<A> = (&'static str, fn(&mut A) -> &mut Tensor);

/// The op refuses each of its arguments by name where that is tracked, and supports it detached.
#[track_caller]
fn refuses_each<A: Clone>(op: &str, good: &A, arguments: &[Argument<A>], run: impl Fn(&A) -> Result<()>) {
    let instead = match op {
        "causal_conv1d" => "to train, use causal_conv1d_diff",
        "gdn_step" => "to train, use causal_conv1d_diff, gdn_gates, gdn_rule_diff and gated_rms_norm",
        "GdnState" => "to train, use TrainableGatedDeltaNet::forward_with_state with a TrainingState",
        "DenseWeight" => "to train, use Projection::new with a candle_nn::Linear",
        _ => "to train, use gdn_gates and gdn_rule_diff",
    };
    run(good).unwrap();
    for (name, argument) in arguments {
        for with_gradient in tracked(argument(&mut good.clone())) {
            let mut args = good.clone();
            *argument(&mut args) = with_gradient.clone();
            let sentence = format!("{op}: {name}: expected a tensor without gradients");
            refused(run(&args), &[&sentence, instead, &format!("pass {name}.detach()")]);
            *argument(&mut args) = with_gradient.detach();
            run(&args).unwrap();
        }
    }
}

#[test]
fn no_op_drops_a_gradient() {
    for device in &devices() {
        let state: Argument<Args> = ("state", |x| &mut x.state);
        let rule: Vec<_> = semantics::ARGUMENTS.into_iter().chain([state]).collect();
        let options = RuleOptions::default();
        // Copies of a state would be tracked too: the state itself goes in.
        refuses_each("gdn_decode", Rule::new(&[3], 3, device).args(), &rule, |x| {
            GdnDecode::new(x.gates.clone(), &x.state, options)?.forward(&x.q, &x.k, &x.v).map(drop)
        });
        refuses_each("gdn_prefill", Rule::new(&[2, 5], 2, device).args(), &rule, |x| {
            gdn_prefill(&x.q, &x.k, &x.v, &x.gates, &x.state, None, options).map(drop)
        });
        refuses_each("gdn_decode", Rule::new(&[3], 3, device).args(), &rule, |x| {
            gdn_decode(&x.q, &x.k, &x.v, &x.gates, &x.state, options).map(drop)
        });
        let ready: [Argument<Args>; 2] = [("log_decay", |x| &mut x.gates.a), ("beta", |x| &mut x.gates.b)];
        refuses_each("gdn_decode", Rule::new(&[3], 3, device).args(), &ready, |x| {
            let (a, b) = (x.gates.a.clone(), x.gates.b.clone());
            GdnDecode::with_ready_gates(a, b, &x.state, options)?.forward(&x.q, &x.k, &x.v).map(drop)
        });
        let states: [Argument<StepArgs>; 2] = [("conv_state", |x| &mut x.conv), ("state", |x| &mut x.state)];
        let step: Vec<_> = step_args::ARGUMENTS.into_iter().chain(states).collect();
        let zeros = |shape: &[usize]| Tensor::zeros(shape, DType::F32, device).unwrap();
        refuses_each("gdn_step", &StepArgs::new(&[3], 3, [16, 32], zeros), &step, |x| x.run().map(drop));

        let three: [Argument<[Tensor; 3]>; 3] =
            [("x", |x| &mut x[0]), ("weight", |x| &mut x[1]), ("state", |x| &mut x[2])];
        let conv = [zeros(&[2, 5, 6]), zeros(&[6, 4]), zeros(&[2, 3, 6])];
        refuses_each("causal_conv1d", &conv, &three, |[x, w, state]| causal_conv1d(x, w, state, None, true).map(drop));
        let dense = DenseWeight::new(zeros(&[4, 8])).unwrap();
        let parts: [Argument<[Tensor; 2]>; 2] = [("conv", |x| &mut x[0]), ("recurrent", |x| &mut x[1])];
        refuses_each("GdnState", &[zeros(&[2, 3, 6]), zeros(&[2, 2, 3, 4])], &parts, |[conv, recurrent]| {
            GdnState::from_tensors(conv, recurrent).map(drop)
        });
        let x = [zeros(&[2, 3, 8]), zeros(&[1]), zeros(&[1])];
        refuses_each("DenseWeight", &x, &three[..1], |[x, ..]| dense.forward(x).map(drop));
    }
}

/// The product has candle's backward pass.
#[test]
fn a_product_keeps_its_gradients() -> Result<()> {
    for device in &devices() {
        let [x, w] = [(2, 64), (3, 64)].map(|shape| Var::randn(0f32, 1., shape, device).unwrap());
        for dtype in [DType::F32, DType::BF16] {
            let y = multiply(&x.to_dtype(dtype)?, &w.to_dtype(dtype)?, &Launch::default())?;
            let gradients = y.to_dtype(DType::F32)?.sum_all()?.backward()?;
            let got = values(gradients.get(&x).expect("a gradient"));
            let want = values(&w.to_dtype(dtype)?.to_dtype(DType::F32)?.sum(0)?.repeat((2, 1))?);
            assert!(crate::support::rel_rms(&got, &want) < 1e-2);
            assert!(gradients.get(&w).is_some());
        }
    }
    Ok(())
}

#[test]
fn a_layer_refuses_a_tracked_input() {
    for device in &devices() {
        let (c, (w, _)) = (config(), weights_for(&config(), device));
        let new =
            |in_proj, out_proj| GatedDeltaNet::new(&c, parts(&w, InProjection::Fused(in_proj), out_proj)).unwrap();
        let out = || dense(&w["out_proj.weight"]);
        let plain = new(dense(&fused(&w)), out());
        let x = Tensor::randn(0f32, 1., (6, 24), device).unwrap();
        let cu = CuSeqlens::from_lengths(&[4, 2], device).unwrap();
        let (slots, moved) = (Slots::new(&[0, 1], device).unwrap(), Slots::from_to(&[0, 1], &[2, 3], device).unwrap());
        let all = |layer: &GatedDeltaNet, x: &Tensor, parts: &[&str]| {
            let (mut state, mut pool) = (layer.new_state(1).unwrap(), layer.new_pool(4).unwrap());
            refused(layer.forward(&x.unsqueeze(0).unwrap(), &mut state), parts);
            refused(layer.forward_slots(x, Some(&cu), &slots, &mut pool), parts);
            refused(layer.verify(x, &cu, &moved, &mut pool).map(|(y, _)| y), parts);
            for state in [state.recurrent(), state.conv(), pool.recurrent(), pool.conv()] {
                assert!(values(state).iter().all(|x| *x == 0.0), "a refused call wrote a state");
            }
        };
        for x in tracked(&x) {
            all(
                &plain,
                &x,
                &["GatedDeltaNet: x: expected a tensor without gradients", "TrainableGatedDeltaNet", "x.detach()"],
            );
        }
        // A module's gradients would vanish; detached, they are nobody's loss.
        let adapted = new(module(&tracked(&fused(&w))[0]), out());
        all(&adapted, &x, &["expected a module whose output is detached", "use TrainableGatedDeltaNet", "y.detach()"]);
        let inner = candle_nn::Linear::new(tracked(&fused(&w))[0].clone(), None);
        let detached = new(Projection::module(candle_nn::func(move |x| Ok(inner.forward(x)?.detach()))), out());
        let run =
            |layer: &GatedDeltaNet| layer.forward(&x.unsqueeze(0).unwrap(), &mut layer.new_state(1).unwrap()).unwrap();
        assert!(crate::support::rel_rms(&values(&run(&detached)), &values(&run(&plain))) < 1e-5);

        // The output projection comes last: its own gradients are right.
        let out = Var::from_tensor(&w["out_proj.weight"]).unwrap();
        let y = run(&new(dense(&fused(&w)), module(out.as_tensor())));
        let gradients = y.sum_all().unwrap().backward().unwrap();
        let identity = Tensor::eye(c.value_size(), DType::F32, device).unwrap();
        let o = |rows: usize| {
            let rows = identity.narrow(0, rows * 24, 24).unwrap();
            run(&new(dense(&fused(&w)), dense(&rows))).sum((0, 1)).unwrap()
        };
        let o: Vec<_> = (0..c.value_size() / 24).map(o).collect();
        let want = values(&Tensor::cat(&o, 0).unwrap().repeat((24, 1)).unwrap());
        assert!(crate::support::rel_rms(&values(gradients.get(&out).unwrap()), &want) < 1e-4);
    }
}

/// A layer of a map's variables gives what it gave, whatever is written to them later; one made afterwards shows it.
#[test]
fn weights_are_read_once() {
    for device in &devices() {
        for dtype in [DType::F32, DType::BF16] {
            let (map, c) = (VarMap::new(), config());
            let vb = VarBuilder::from_varmap(&map, dtype, device);
            GatedDeltaNet::init(&c, vb.clone()).unwrap();
            // Rates of decay from 0.05 to 0.3: where all heads are drawn so fast that nothing is left of a token at the next one, a
            // change of the gates would not show in bf16.
            let slow: Vec<f32> = (1..=c.num_value_heads).map(|h| (0.05 * h as f32).ln()).collect();
            map.data().lock().unwrap()["A_log"].set(&Tensor::new(slow, device).unwrap()).unwrap();
            let layer = GatedDeltaNet::init(&c, vb.clone()).unwrap();
            let x = Tensor::randn(0f32, 1., (1, 5, 24), device).unwrap().to_dtype(dtype).unwrap();
            let run = |layer: &GatedDeltaNet| layer.forward(&x, &mut layer.new_state(1).unwrap()).unwrap();
            let before = run(&layer);
            assert!(!before.track_op());
            let variables: Vec<_> = map.data().lock().unwrap().clone().into_iter().collect();
            for (name, variable) in variables {
                let old = variable.as_detached_tensor().copy().unwrap();
                variable.set(&old.affine(3.0, 1.0).unwrap()).unwrap();
                assert_eq!(values(&run(&layer)), values(&before), "{name} is not a copy");
                let fresh = run(&GatedDeltaNet::load(&c, vb.clone()).unwrap());
                assert_ne!(values(&fresh), values(&before), "{name} is not read");
                variable.set(&old).unwrap();
            }
        }
    }
}

/// A file of this test's own.
fn file(name: &str) -> PathBuf {
    std::env::temp_dir().join(format!("candle-gdn-{name}-{}.safetensors", std::process::id()))
}

/// Beside bf16 matrices, what stays f32 is read as the file has it, to the bit, in both layouts.
#[test]
fn what_is_kept_in_f32_is_read_in_f32() {
    for device in &devices() {
        let (split, interleaved) = weights_for(&config(), device);
        let bf16 = |t: &Tensor| t.to_dtype(DType::BF16).unwrap();
        let x = bf16(&Tensor::randn(0f32, 1., (1, 20, 24), device).unwrap());
        let run = |layer: &GatedDeltaNet| {
            let mut state = layer.new_state(1).unwrap();
            let y = values(&layer.forward(&x, &mut state).unwrap());
            (y, values(state.recurrent()))
        };
        let with_vectors = |vector: &dyn Fn(&Tensor) -> Tensor| {
            let mut w: HashMap<_, _> = split.iter().map(|(name, t)| (name.clone(), bf16(t))).collect();
            for name in ["A_log", "dt_bias", "norm.weight"] {
                w.insert(name.to_owned(), vector(&split[name]));
            }
            run(&GatedDeltaNet::new(
                &config(),
                parts(&w, InProjection::Fused(dense(&fused(&w))), dense(&w["out_proj.weight"])),
            )
            .unwrap())
        };
        let want = with_vectors(&Tensor::clone);
        assert_ne!(with_vectors(&bf16), want, "rounding does not show");
        for (name, weights) in [("split", &split), ("interleaved", &interleaved)] {
            let path = file(name);
            safetensors::save(weights, &path).unwrap();
            // SAFETY: nobody changes the file.
            let vb = unsafe { VarBuilder::from_mmaped_safetensors(&[&path], DType::BF16, device).unwrap() };
            assert_eq!(run(&GatedDeltaNet::load(&config(), vb).unwrap()), want, "{name}");
            std::fs::remove_file(path).unwrap();
        }
    }
}

#[test]
fn a_new_layer_begins_as_a_published_one() {
    let device = &Device::Cpu;
    let c = GdnConfig::new(64, (2, 16), (32, 16));
    let path = file("init");
    let x = Tensor::randn(0f32, 1., (1, 5, 64), device).unwrap();
    let run = |layer: &GatedDeltaNet| values(&layer.forward(&x, &mut layer.new_state(1).unwrap()).unwrap());
    let init =
        |map: &VarMap| GatedDeltaNet::init(&c, VarBuilder::from_varmap(map, DType::F32, device).pp("0")).unwrap();
    let (map, mut other) = (VarMap::new(), VarMap::new());
    let layer = init(&map);
    let weight = |name: &str| values(map.data().lock().unwrap()[&format!("0.{name}")].as_tensor());
    assert_eq!(map.all_vars().len(), 9);
    assert!(weight("dt_bias").iter().chain(&weight("norm.weight")).all(|x| *x == 1.0));
    for name in ["in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj", "conv1d"] {
        let w = weight(&format!("{name}.weight"));
        let rms = (w.iter().map(|x| x * x).sum::<f64>() / w.len() as f64).sqrt();
        assert!((rms - 0.02).abs() < 0.002, "{name}: {rms}");
    }
    // The logarithm of uniform values: half of them are above ln 8, none outside.
    let a: Vec<f64> = weight("A_log").iter().map(|x| x.exp()).collect();
    assert!(a.iter().all(|a| (0.01..16.001).contains(a)), "{a:?}");
    assert!((4..=28).contains(&a.iter().filter(|a| **a > 8.0).count()), "{a:?}");

    // Saved, it is a checkpoint; loaded into another map, it stays what it is.
    map.save(&path).unwrap();
    // SAFETY: nobody changes the file.
    let vb = unsafe { VarBuilder::from_mmaped_safetensors(&[&path], DType::F32, device).unwrap() };
    assert_eq!(run(&GatedDeltaNet::load(&c, vb.pp("0")).unwrap()), run(&layer));
    assert_ne!(run(&init(&other)), run(&layer));
    other.load(&path).unwrap();
    assert_eq!(run(&init(&other)), run(&layer));
    std::fs::remove_file(&path).unwrap();

    let half = VarMap::new();
    GatedDeltaNet::init(&c, VarBuilder::from_varmap(&half, DType::BF16, device)).unwrap();
    let dtype = |name: &str| half.data().lock().unwrap()[name].dtype();
    assert_eq!((dtype("out_proj.weight"), dtype("A_log")), (DType::BF16, DType::F32));
    let (split, interleaved) = weights_for(&config(), device);
    let mut missing = split;
    missing.remove("dt_bias");
    let init = |w| GatedDeltaNet::init(&config(), VarBuilder::from_tensors(w, DType::F32, device));
    refused(init(missing), &["dt_bias"]);
    refused(init(interleaved), &["in_proj_qkvz.weight: expected no weights of a layout but Qwen3.5's; use load"]);
}
