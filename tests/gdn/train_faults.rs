//! The layer in training where something is wrong: gradients that would vanish, variables that a loss does not reach, weights that are missing, states
//! that do not fit.

use crate::grad_case::bits;
use crate::layer::{config, published_layouts, weights_for};
use crate::projections::{fused, parts};
use crate::support::{devices, refused, rel_rms, values};
use crate::train_layer::{load, names, var, variables};
use candle_core::quantized::{GgmlDType, QMatMul, QTensor};
use candle_core::{DType, Device, Module, Tensor, Var};
use candle_gdn::{
    CuSeqlens, GatedDeltaNet, GdnConfig, InProjection, Projection, TrainableGatedDeltaNet, TrainingState,
};
use candle_nn::{Linear, VarBuilder, VarMap};
use std::collections::HashMap;

fn state_of(c: &GdnConfig, sequences: usize, device: &Device) -> [Var; 2] {
    let conv = (sequences, c.conv_kernel - 1, c.conv_channels());
    let recurrent = (sequences, c.num_value_heads, c.value_head_dim, c.key_head_dim);
    [Var::randn(0f32, 1., conv, device).unwrap(), Var::randn(0f32, 0.1, recurrent, device).unwrap()]
}

fn training_state([conv, recurrent]: &[Var; 2]) -> TrainingState {
    TrainingState { conv: conv.as_tensor().clone(), recurrent: recurrent.as_tensor().clone() }
}

/// candle multiplies by a quantised matrix without a backward pass, and without a word.
#[test]
fn gradients_do_not_vanish_in_a_quantised_projection() {
    // Rows of 256, which candle's products of few rows read at a time.
    let c = GdnConfig::new(256, (2, 16), (4, 64));
    for device in &devices() {
        let (w, _) = weights_for(&c, device);
        let (all, out) = (fused(&w), &w["out_proj.weight"]);
        let dense = |w: &Tensor| Projection::new(Linear::new(w.clone(), None));
        let quantised = |w: &Tensor| {
            let w = QTensor::quantize_onto(&w.to_device(&Device::Cpu).unwrap(), GgmlDType::Q8_0, device).unwrap();
            Projection::module(QMatMul::from_qtensor(w).unwrap())
        };
        let x = Var::randn(0f32, 1., (1, 5, 256), device).unwrap();
        for (name, in_proj, out_proj) in
            [("in_proj", quantised(&all), dense(out)), ("out_proj", dense(&all), quantised(out))]
        {
            let layer = TrainableGatedDeltaNet::new(&c, parts(&w, InProjection::Fused(in_proj), out_proj)).unwrap();
            for recompute in [false, true] {
                let layer = layer.clone().with_recompute(recompute);
                let why = format!("TrainableGatedDeltaNet: {name}: expected a projection with gradients");
                let why = [&why[..], "QMatMul", "use a candle_nn::Linear"];
                refused(layer.forward(&x, None), &why);
                refused(layer.forward_with_state(&x, None, None), &why);
                // Nothing vanishes where nothing is tracked before it.
                assert!(!layer.forward(&x.detach(), None).unwrap().track_op());
                let state = training_state(&state_of(&c, 1, device));
                let y = layer.forward_with_state(&x.detach(), None, Some(&state));
                match name {
                    "in_proj" => assert!(y.unwrap().0.track_op()),
                    _ => refused(y, &why),
                }
            }
        }
    }
}

/// An optimiser shrinks a variable whose gradient is zeros, and leaves one that has none.
#[test]
fn what_a_loss_does_not_reach_has_no_gradient() {
    for device in &devices() {
        let (weights, _) = weights_for(&config(), device);
        let map = variables(&weights, DType::F32);
        let x = Var::randn(0f32, 1., (2, 7, 24), device).unwrap();
        let state = state_of(&config(), 2, device);
        for of in 0..3 {
            let run = |recompute: bool| {
                let layer = load(&config(), &map, DType::F32, device).with_recompute(recompute);
                let (y, next) = layer.forward_with_state(&x, None, Some(&training_state(&state))).unwrap();
                let loss = [y, next.conv, next.recurrent][of].sqr().unwrap().sum_all().unwrap();
                let store = loss.backward().unwrap();
                let mut all: Vec<_> = names(&map)
                    .into_iter()
                    .map(|name| (name.clone(), store.get(&var(&map, &name)).map(bits)))
                    .collect();
                let inputs = [("x", &x), ("conv", &state[0]), ("recurrent", &state[1])];
                all.extend(inputs.map(|(name, var)| (name.to_owned(), store.get(var).map(bits))));
                all
            };
            let want = run(false);
            let none = |name: &str| want.iter().any(|(other, gradient)| other == name && gradient.is_none());
            assert_eq!(none("out_proj.weight"), of != 0);
            assert_eq!(none("A_log"), of == 1);
            assert!(run(true) == want, "output {of}");
        }
    }
}

/// A variable that is a state and that a module reads as well has the gradients of both.
#[test]
fn a_state_that_a_module_reads_has_both_gradients() {
    for device in &devices() {
        let c = config();
        let (w, _) = weights_for(&c, device);
        let (x, state) = (Var::randn(0f32, 1., (1, 5, 24), device).unwrap(), state_of(&c, 1, device));
        let (linear, read) = (Linear::new(w["out_proj.weight"].clone(), None), state[1].as_tensor().clone());
        let module = candle_nn::func(move |x: &Tensor| linear.forward(x)?.broadcast_add(&read.sum_all()?));
        let in_proj = InProjection::Fused(Projection::new(Linear::new(fused(&w), None)));
        let layer = TrainableGatedDeltaNet::new(&c, parts(&w, in_proj, Projection::module(module))).unwrap();
        let run = |recompute: bool| {
            let layer = layer.clone().with_recompute(recompute);
            let (y, _) = layer.forward_with_state(&x, None, Some(&training_state(&state))).unwrap();
            let store = y.sum_all().unwrap().backward().unwrap();
            [&x, &state[0], &state[1]].map(|of| values(store.get(of).unwrap()))
        };
        for (got, want) in run(true).iter().zip(&run(false)) {
            assert!(rel_rms(got, want) < 1e-6);
        }
    }
}

/// A map would make what is missing, of zeros.
#[test]
fn a_map_that_lacks_a_weight_is_refused() {
    let (c, device) = (config(), &Device::Cpu);
    let (split, interleaved) = weights_for(&c, device);
    let [one, separate, _] = published_layouts(&c, &split);
    for weights in [split, interleaved, one, separate] {
        for name in weights.keys() {
            let mut rest = weights.clone();
            rest.remove(name);
            let map = variables(&rest, DType::F32);
            let vb = || VarBuilder::from_varmap(&map, DType::F32, device);
            let before = names(&map);
            let first = ["in_proj_qkvz.weight", "in_proj_qkv.weight", "in_proj.weight", "q_proj.weight"];
            let why = match first.contains(&&name[..]) {
                true => "no Gated DeltaNet".to_owned(),
                false => format!("expected the weight `{name}`, found none"),
            };
            refused(TrainableGatedDeltaNet::load(&c, vb()), &[&why]);
            refused(GatedDeltaNet::load(&c, vb()), &[&why]);
            assert_eq!(names(&map), before);
        }
    }
}

#[test]
fn states_and_inputs_that_do_not_fit_are_named() {
    for device in &devices() {
        let (weights, _) = weights_for(&config(), device);
        let map = variables(&weights, DType::F32);
        let layer = load(&config(), &map, DType::F32, device);
        let zeros = |shape: &[usize], dtype| Tensor::zeros(shape, dtype, device).unwrap();
        let (conv, recurrent) = ([2, 3, 256], [2, 6, 32, 16]);
        let fits = TrainingState { conv: zeros(&conv, DType::F32), recurrent: zeros(&recurrent, DType::F32) };
        let x = zeros(&[2, 4, 24], DType::F32);
        // Also where there is nothing to do.
        let none = x.narrow(1, 0, 0).unwrap();
        for (x, recompute) in [(&x, false), (&x, true), (&none, false)] {
            let layer = layer.clone().with_recompute(recompute);
            layer.forward_with_state(x, None, Some(&fits)).unwrap();
            let with = |conv: &[usize], conv_dtype, recurrent: &[usize], dtype, parts: &[&str]| {
                let state = TrainingState { conv: zeros(conv, conv_dtype), recurrent: zeros(recurrent, dtype) };
                refused(layer.forward_with_state(x, None, Some(&state)), parts);
            };
            let (f32, bf16) = (DType::F32, DType::BF16);
            with(
                &[1, 3, 256],
                f32,
                &recurrent,
                f32,
                &["TrainableGatedDeltaNet: state.conv: expected shape [2, 3, 256]"],
            );
            with(&[2, 2, 256], f32, &recurrent, f32, &["state.conv: expected shape [2, 3, 256], got [2, 2, 256]"]);
            with(&conv, bf16, &recurrent, f32, &["state.conv: expected dtype F32, got BF16"]);
            with(
                &conv,
                f32,
                &[2, 6, 16, 32],
                f32,
                &["state.recurrent: expected shape [2, 6, 32, 16], got [2, 6, 16, 32]"],
            );
            with(&conv, f32, &recurrent, bf16, &["state.recurrent: expected dtype F32, got BF16"]);
            let half = x.to_dtype(bf16);
            let Ok(half) = half.map(|half| half.reshape(x.shape()).unwrap()) else { continue };
            refused(
                layer.forward(&half, None),
                &["TrainableGatedDeltaNet: x: expected dtype F32 (that of in_proj_qkv), got BF16"],
            );
        }
        let cu = CuSeqlens::from_lengths(&[3, 1, 4], device).unwrap();
        let packed = x.flatten(0, 1).unwrap();
        refused(layer.forward_with_state(&packed, Some(&cu), Some(&fits)), &["state.conv: expected shape [3, 3, 256]"]);
    }
}

/// The convolution may be in f32 beside projections in bf16, of which one is no dense matrix.
#[test]
fn a_frozen_layer_has_the_dtype_of_its_projections() {
    for device in &devices() {
        let (mut split, _) = weights_for(&config(), device);
        let bf16 = |split: &HashMap<String, Tensor>, name: &str| split[name].to_dtype(DType::BF16).unwrap();
        // Of values that freezing does not round.
        let conv = bf16(&split, "conv1d.weight").to_dtype(DType::F32).unwrap();
        split.insert("conv1d.weight".into(), conv);
        let bf16 = |name: &str| Linear::new(bf16(&split, name), None);
        let dense = |name: &str| Projection::new(bf16(name));
        let in_proj = InProjection::Split {
            qkv: Projection::module(bf16("in_proj_qkv.weight")),
            z: dense("in_proj_z.weight"),
            b: dense("in_proj_b.weight"),
            a: dense("in_proj_a.weight"),
        };
        let layer = TrainableGatedDeltaNet::new(&config(), parts(&split, in_proj, dense("out_proj.weight"))).unwrap();
        let x = Tensor::randn(0f32, 1., (2, 30, 24), device).unwrap().to_dtype(DType::BF16).unwrap();
        let (want, frozen) = (layer.forward(&x, None).unwrap(), layer.freeze().unwrap());
        let y = frozen.forward(&x, &mut frozen.new_state(2).unwrap()).unwrap();
        let error = rel_rms(&values(&y), &values(&want));
        assert!(error < 1e-2, "{error:e}");
    }
}

/// Two threads that walk one graph backward have a pass each.
#[test]
fn two_threads_walk_one_graph() {
    let (c, device) = (config(), Device::Cpu);
    for recompute in [false, true] {
        let map = VarMap::new();
        let made = TrainableGatedDeltaNet::init(&c, VarBuilder::from_varmap(&map, DType::F32, &device)).unwrap();
        let layer = made.with_recompute(recompute);
        let x = Tensor::randn(0f32, 1., (2, 50, c.hidden_size), &device).unwrap();
        let (y, state) = layer.forward_with_state(&x, None, None).unwrap();
        let loss = (y.sqr().unwrap().mean_all().unwrap() + state.recurrent.sqr().unwrap().mean_all().unwrap()).unwrap();
        let vars = map.all_vars();
        let gradients = || -> Vec<_> {
            let found = loss.backward().unwrap();
            vars.iter().map(|var| found.get(var).map(bits)).collect()
        };
        let want = gradients();
        std::thread::scope(|s| {
            let threads: Vec<_> = (0..2).map(|_| s.spawn(|| (0..30).all(|_| gradients() == want))).collect();
            threads.into_iter().for_each(|thread| assert!(thread.join().unwrap(), "recompute {recompute}"));
        });
    }
}

/// `Linear` by `into()` or by `Projection::new()`: copied by `freeze()`, and of a shape that is checked.
#[test]
fn a_linear_layer_is_known() {
    let (c, device) = (config(), Device::Cpu);
    let map = VarMap::new();
    let vb = VarBuilder::from_varmap(&map, DType::F32, &device);
    drop(TrainableGatedDeltaNet::init(&c, vb.clone()).unwrap());
    let layer = TrainableGatedDeltaNet::load_with(&c, vb, |_, linear| Ok(linear.into())).unwrap();
    let frozen = layer.freeze().unwrap();
    let x = Tensor::randn(0f32, 1., (1, 3, c.hidden_size), &device).unwrap();
    let run = || values(&frozen.forward(&x, &mut frozen.new_state(1).unwrap()).unwrap());
    let before = run();
    map.all_vars().iter().for_each(|var| var.set(&var.zeros_like().unwrap()).unwrap());
    assert_eq!(run(), before);
    let mut parts = layer.parts().clone();
    let wrong = Var::zeros((7, 9), DType::F32, &device).unwrap();
    parts.out_proj = Linear::new(wrong.as_tensor().clone(), None).into();
    refused(GatedDeltaNet::new(&c, parts.clone()), &["out_proj: expected a weight of shape"]);
    let bf16 = Tensor::zeros((c.hidden_size, c.value_size()), DType::BF16, &device).unwrap();
    parts.out_proj = Linear::new(bf16, None).into();
    refused(GatedDeltaNet::new(&c, parts), &["out_proj: expected dtype F32"]);
}
