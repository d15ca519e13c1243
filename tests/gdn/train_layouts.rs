//! The layer in training out of OLMo-Hybrid's layout: a projection each of q, k, v, the gate, b and a, a convolution each of q, k and v.

use crate::grad_case::bits;
use crate::layer::{config, published_layouts, weights_for};
use crate::random_layer::of_96_192;
use crate::support::{devices, refused, rel_rms, values};
use crate::train_layer::{load, names, run, var, variables, Lora};
use candle_core::{DType, Device, Tensor, Var};
use candle_gdn::{ConvWeight, GatedDeltaNet, GdnConfig, GdnParts, InProjection, Projection, TrainableGatedDeltaNet};
use candle_nn::{AdamW, Optimizer, ParamsAdamW, VarBuilder, VarMap};
use std::collections::HashMap;

/// Sizes that tell K, V and the heads apart, and OLMo-Hybrid's; both with its beta and epsilon.
fn configs() -> [GdnConfig; 2] {
    [config(), of_96_192()].map(|c| c.with(|c| (c.beta_scale, c.rms_norm_eps) = (2.0, 1e-5)))
}

/// The weights as OLMo-Hybrid's files have them, cut by head and in thirds.
fn separate(c: &GdnConfig, split: &HashMap<String, Tensor>) -> [HashMap<String, Tensor>; 2] {
    let [_, by_head, thirds] = published_layouts(c, split);
    [by_head, thirds]
}

/// The gradients of separate weights under the names of Qwen3.5's layout.
fn joined(gradients: &HashMap<String, Tensor>) -> HashMap<String, Tensor> {
    let mut joined = gradients.clone();
    let mut join = |to: &str, names: &[&str]| {
        let parts: Vec<_> = names.iter().map(|name| joined.remove(&format!("{name}.weight")).expect(name)).collect();
        joined.insert(format!("{to}.weight"), Tensor::cat(&parts, 0).unwrap());
    };
    join("in_proj_qkv", &["q_proj", "k_proj", "v_proj"]);
    join("in_proj_z", &["g_proj"]);
    join("in_proj_b", &["b_proj"]);
    join("in_proj_a", &["a_proj"]);
    join("conv1d", &["q_conv1d", "k_conv1d", "v_conv1d"]);
    join("out_proj", &["o_proj"]);
    join("norm", &["o_norm"]);
    joined
}

/// As in Qwen3.5's layout, whose gradients the goldens prove; recomputed to the bit.
#[test]
fn separate_weights_have_the_gradients_of_joined_ones() {
    for device in &devices() {
        for c in &configs() {
            // Of few bits, so that their products are the same ones of any kernel: what is left is bf16's rounding of gradients.
            let of_steps = |x: &Tensor, steps: f64| ((x * steps).unwrap().round().unwrap() / steps).unwrap();
            let (mut split, _) = weights_for(c, device);
            split.iter_mut().filter(|(name, _)| name.starts_with("in_proj")).for_each(|(_, x)| *x = of_steps(x, 64.));
            let [x, d_y] = [(); 2].map(|()| Tensor::randn(0f32, 1., (2, 37, c.hidden_size), device).unwrap());
            let x = of_steps(&x, 8.);
            for (dtype, bound) in [(DType::F32, 1e-5), (DType::BF16, 2e-2)] {
                let [x, d_y] = [&x, &d_y].map(|x| x.to_dtype(dtype).unwrap());
                let layer_of = |weights: &HashMap<String, Tensor>| {
                    let map = variables(weights, dtype);
                    (load(c, &map, dtype, device), map)
                };
                let (layer, map) = layer_of(&split);
                let (want_y, want) = run(&layer, &map, (&x, &d_y), None);
                for weights in separate(c, &split) {
                    let (layer, map) = layer_of(&weights);
                    let (y, gradients) = run(&layer, &map, (&x, &d_y), None);
                    assert!(rel_rms(&values(&y), &values(&want_y)) < bound);
                    let got = joined(&gradients);
                    assert_eq!(got.len(), want.len());
                    for (name, want) in &want {
                        let error = rel_rms(&values(&got[name]), &values(want));
                        assert!(error < bound, "{dtype:?}, {:?}: {name} is off by {error:e}", device.location());
                    }
                    let (again, recomputed) = run(&layer.with_recompute(true), &map, (&x, &d_y), None);
                    assert_eq!(bits(&again), bits(&y));
                    for (name, gradient) in &gradients {
                        assert_eq!(bits(&recomputed[name]), bits(gradient), "{name} recomputed");
                    }
                }
            }
        }
    }
}

/// What the loss changes by when a weight moves along its gradient, of each weight alone.
#[test]
fn finite_differences() {
    for device in &devices() {
        let c = &configs()[0];
        let (split, _) = weights_for(c, device);
        let map = variables(&separate(c, &split)[0], DType::F32);
        let layer = load(c, &map, DType::F32, device);
        let [x, d_y] = [(); 2].map(|()| Tensor::randn(0f32, 1., (1, 11, c.hidden_size), device).unwrap());
        let (_, gradients) = run(&layer, &map, (&x, &d_y), None);
        let loss = || -> f64 {
            let y = layer.forward(&x, None).unwrap();
            values(&y).iter().zip(values(&d_y)).map(|(y, d)| y * d).sum()
        };
        assert_eq!(names(&map).len(), 13);
        for name in names(&map) {
            let (weight, gradient) = (var(&map, &name), &gradients[&name]);
            let norm = values(gradient).iter().map(|g| g * g).sum::<f64>().sqrt();
            // The loss is f32: what changes it little moves further.
            let step = if ["A_log", "dt_bias"].contains(&&*name) { 2e-2 } else { 2e-3 };
            let before = weight.as_tensor().copy().unwrap();
            let at = |factor: f64| {
                let moved = (&before + (gradient * (factor * step / norm)).unwrap()).unwrap();
                weight.set(&moved).unwrap();
                loss()
            };
            // Of the fourth order: a short q or k has a norm that bends fast.
            let slope = (8.0 * (at(0.5) - at(-0.5)) - (at(1.0) - at(-1.0))) / (6.0 * step);
            weight.set(&before).unwrap();
            assert!((slope / norm - 1.0).abs() < 1e-2, "{name}: {slope} for a gradient of norm {norm}");
        }
    }
}

/// The user's variables are what is trained, saved and loaded again.
#[test]
fn trained_saved_loaded_and_frozen() {
    for device in &devices() {
        for c in &configs() {
            let (split, _) = weights_for(c, device);
            for weights in separate(c, &split) {
                let map = variables(&weights, DType::F32);
                let layer = load(c, &map, DType::F32, device);
                let x = Tensor::randn(0f32, 1., (2, 30, c.hidden_size), device).unwrap();
                let forward = |layer: &TrainableGatedDeltaNet| layer.forward(&x, None).unwrap();
                let first = forward(&layer);
                let mut optimizer = AdamW::new(map.all_vars(), ParamsAdamW::default()).unwrap();
                optimizer.backward_step(&forward(&layer).sqr().unwrap().mean_all().unwrap()).unwrap();
                let want = forward(&layer);
                assert!(rel_rms(&values(&want), &values(&first)) > 1e-4, "nothing was trained");

                let decode =
                    |layer: &GatedDeltaNet| values(&layer.forward(&x, &mut layer.new_state(2).unwrap()).unwrap());
                let frozen = layer.freeze().unwrap();
                let error = rel_rms(&decode(&frozen), &values(&want));
                assert!(error < 1e-5, "frozen: {error:e}");

                let name = format!("gdn-separate-{}-{}-{:?}", std::process::id(), c.hidden_size, device.location());
                let path = std::env::temp_dir().join(name.replace(|c: char| !c.is_alphanumeric(), "-"));
                map.save(&path).unwrap();
                let file = candle_core::safetensors::load(&path, device).unwrap();
                assert_eq!(file.len(), weights.len());
                let loaded = GatedDeltaNet::load(c, VarBuilder::from_tensors(file, DType::F32, device)).unwrap();
                assert_eq!(decode(&loaded), decode(&frozen));
                let mut other = variables(&weights, DType::F32);
                other.load(&path).unwrap();
                std::fs::remove_file(&path).unwrap();
                assert_eq!(bits(&forward(&load(c, &other, DType::F32, device))), bits(&want));
            }
        }
    }
}

/// Every projection by its own name, each with an adapter.
#[test]
fn adapters_go_around_each_projection() {
    const NAMES: [&str; 7] = ["q_proj", "k_proj", "v_proj", "g_proj", "b_proj", "a_proj", "o_proj"];
    for device in &devices() {
        let c = &configs()[0];
        let (split, _) = weights_for(c, device);
        let vb = VarBuilder::from_tensors(separate(c, &split)[1].clone(), DType::F32, device);
        let (mut vars, mut wrapped) = (vec![], vec![]);
        let layer = TrainableGatedDeltaNet::load_with(c, vb, |name, linear| {
            wrapped.push(name.to_owned());
            Ok(Projection::module(Lora::around(&linear, &mut vars)?))
        })
        .unwrap();
        assert_eq!(wrapped, NAMES);
        let x = Tensor::randn(0f32, 1., (1, 30, c.hidden_size), device).unwrap();
        let y = layer.forward(&x, None).unwrap();
        let store = y.sqr().unwrap().mean_all().unwrap().backward().unwrap();
        assert!(vars.iter().all(|x| values(store.get(x).unwrap()).iter().any(|x| *x != 0.0)));

        let frozen = layer.freeze().unwrap();
        let got = frozen.forward(&x, &mut frozen.new_state(1).unwrap()).unwrap();
        assert!(rel_rms(&values(&got), &values(&y)) < 1e-5 && !got.track_op());
        // The same as the sums of matrices and products.
        let mut merged = separate(c, &split)[0].clone();
        for (name, pair) in NAMES.iter().zip(vars.chunks(2)) {
            let weight = merged.get_mut(&format!("{name}.weight")).unwrap();
            *weight = (&*weight + pair[1].matmul(&pair[0]).unwrap()).unwrap();
        }
        let merged = GatedDeltaNet::load(c, VarBuilder::from_tensors(merged, DType::F32, device)).unwrap();
        let want = merged.forward(&x, &mut merged.new_state(1).unwrap()).unwrap();
        assert!(rel_rms(&values(&got), &values(&want)) < 1e-5);
    }
}

/// Three tensors that do not make one convolution, a projection of another size, weights of another layout.
#[test]
fn what_does_not_fit_is_named() {
    let (c, device) = (&configs()[0], &Device::Cpu);
    let (split, _) = weights_for(c, device);
    let [weights, _] = separate(c, &split);
    let of = |weights: &HashMap<String, Tensor>| VarBuilder::from_tensors(weights.clone(), DType::F32, device);
    let layer = TrainableGatedDeltaNet::load(c, of(&weights)).unwrap();
    let zeros = |shape: &[usize], dtype| Tensor::zeros(shape, dtype, device).unwrap();
    let refuses = |change: &dyn Fn(&mut GdnParts), parts: &[&str]| {
        let mut changed = layer.parts().clone();
        change(&mut changed);
        refused(TrainableGatedDeltaNet::new(c, changed.clone()), parts);
        refused(GatedDeltaNet::new(c, changed), parts);
    };
    let conv = |weight: Tensor| {
        move |parts: &mut GdnParts| match &mut parts.conv_weight {
            ConvWeight::Separate([_, k, _]) => *k = weight.clone(),
            _ => panic!("expected three"),
        }
    };
    refuses(&conv(zeros(&[31, 1, 4], DType::F32)), &["conv_weight: expected shape [256, 4], got [255, 4]"]);
    refuses(&conv(zeros(&[32, 1, 3], DType::F32)), &["conv_weight: expected shape [rows, 4], got [32, 1, 3]"]);
    refuses(&conv(zeros(&[32, 4], DType::BF16)), &["conv_weight: expected dtype F32 (the first one's), got BF16"]);
    let narrow = |parts: &mut GdnParts| match &mut parts.in_proj {
        InProjection::Separate { v, .. } => {
            *v = Projection::new(candle_nn::Linear::new(zeros(&[31, 24], DType::F32), None))
        }
        _ => panic!("expected separate projections"),
    };
    refuses(&narrow, &["v_proj: expected a weight of shape [192, 24], got [31, 24]"]);

    let map = VarMap::new();
    map.data().lock().unwrap().insert("q_proj.weight".into(), Var::from_tensor(&weights["q_proj.weight"]).unwrap());
    let fresh = TrainableGatedDeltaNet::init(c, VarBuilder::from_varmap(&map, DType::F32, device));
    refused(fresh, &["init: q_proj.weight: expected no weights of a layout but Qwen3.5's; use load"]);
    for name in weights.keys() {
        let mut missing = weights.clone();
        missing.remove(name);
        let by = if name == "q_proj.weight" { "no Gated DeltaNet" } else { name };
        refused(TrainableGatedDeltaNet::load(c, of(&missing)), &[by]);
    }
}
