//! The layer in training: golden gradients, both layouts, packed sequences, states, recomputation, and the way to decoding.

use crate::grad_case::bits;
use crate::gradients::every_row_kept;
use crate::layer::{config, weights_for};
use crate::projections::{dense, fused, parts};
use crate::support::{devices, golden, refused, rel_rms, values};
use candle_core::{DType, Device, Module, Result, Tensor, Var};
use candle_gdn::{
    Algo, CuSeqlens, GatedDeltaNet, GdnConfig, GdnParts, InProjection, Projection, TrainableGatedDeltaNet,
    TrainingState,
};
use candle_nn::{AdamW, Linear, Optimizer, ParamsAdamW, VarBuilder, VarMap};
use safetensors::SafeTensors;
use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::Arc;

/// The weights as variables of a map.
pub fn variables(weights: &HashMap<String, Tensor>, dtype: DType) -> VarMap {
    let map = VarMap::new();
    for (name, x) in weights {
        let in_f32 = ["A_log", "dt_bias"].contains(&&**name) || name.ends_with("norm.weight");
        let dtype = if in_f32 { DType::F32 } else { dtype };
        map.data().lock().unwrap().insert(name.clone(), Var::from_tensor(&x.to_dtype(dtype).unwrap()).unwrap());
    }
    map
}

pub fn var(map: &VarMap, name: &str) -> Var {
    map.data().lock().unwrap()[name].clone()
}

pub fn names(map: &VarMap) -> Vec<String> {
    let mut names: Vec<_> = map.data().lock().unwrap().keys().cloned().collect();
    names.sort();
    names
}

pub fn load(c: &GdnConfig, map: &VarMap, dtype: DType, device: &Device) -> TrainableGatedDeltaNet {
    TrainableGatedDeltaNet::load(c, VarBuilder::from_varmap(map, dtype, device)).unwrap()
}

/// y, and the gradients of `<d_y, y>` by name, x among them.
pub fn run(
    layer: &TrainableGatedDeltaNet,
    map: &VarMap,
    (x, d_y): (&Tensor, &Tensor),
    cu: Option<&CuSeqlens>,
) -> (Tensor, HashMap<String, Tensor>) {
    let x = Var::from_tensor(x).unwrap();
    let y = layer.forward(&x, cu).unwrap();
    let store = (&y * d_y).unwrap().to_dtype(DType::F32).unwrap().sum_all().unwrap().backward().unwrap();
    let mut gradients: HashMap<_, _> =
        names(map).into_iter().map(|name| (name.clone(), store.get(&var(map, &name)).expect(&name).clone())).collect();
    gradients.insert("x".into(), store.get(&x).unwrap().clone());
    (y, gradients)
}

#[test]
fn golden_gradients() {
    let bytes = std::fs::read(golden("layer_grads.safetensors")).unwrap();
    let (_, metadata) = SafeTensors::read_metadata(&bytes).unwrap();
    let shapes: Vec<[usize; 2]> = serde_json::from_str(&metadata.metadata().clone().unwrap()["shapes"]).unwrap();
    assert!(matches!(shapes.len(), 1 | 3)); // thinned, or whole
    let c = GdnConfig::new(96, (2, 64), (4, 64));
    for device in &devices() {
        let tensors = candle_core::safetensors::load_buffer(&bytes, device).unwrap();
        let weights: HashMap<_, _> =
            tensors.iter().filter_map(|(name, x)| Some((name.strip_prefix("w.")?.to_owned(), x.clone()))).collect();
        for (dtype, bound) in [(DType::F32, 1e-5), (DType::BF16, 2e-2)] {
            let map = variables(&weights, dtype);
            for recompute in [false, true] {
                let layer = load(&c, &map, dtype, device).with_recompute(recompute);
                for case in 0..shapes.len() {
                    let get = |name: &str| tensors[&format!("{case}.{name}")].clone();
                    let [x, d_y] = ["x", "dy"].map(|name| get(name).to_dtype(dtype).unwrap());
                    let (y, gradients) = run(&layer, &map, (&x, &d_y), None);
                    let at = format!("case {case} in {dtype:?}, recompute {recompute}, on {:?}", device.location());
                    let error = rel_rms(&values(&y), &values(&get("y")));
                    assert!(error <= bound, "{at}: y is off by {error:e}");
                    for (name, got) in &gradients {
                        let want = get(&format!("grad.{name}"));
                        let error = rel_rms(&values(&every_row_kept(got, &want)), &values(&want));
                        assert!(error <= bound, "{at}: the gradient of {name} is off by {error:e}");
                    }
                }
            }
        }
    }
}

/// The gradients of `x` and `d_y` in the layer of `weights`, by name.
fn of_weights(
    weights: &HashMap<String, Tensor>,
    x: (&Tensor, &Tensor),
    recompute: bool,
) -> (Tensor, HashMap<String, Tensor>) {
    let map = variables(weights, DType::F32);
    run(&load(&config(), &map, DType::F32, x.0.device()).with_recompute(recompute), &map, x, None)
}

#[test]
fn layouts_and_recomputation_agree() {
    for device in &devices() {
        let (split, interleaved) = weights_for(&config(), device);
        let [x, d_y] = [(); 2].map(|()| Tensor::randn(0f32, 1., (2, 37, 24), device).unwrap());
        let (y, gradients) = of_weights(&split, (&x, &d_y), false);
        let (again, recomputed) = of_weights(&split, (&x, &d_y), true);
        assert_eq!(bits(&again), bits(&y));
        for (name, gradient) in &gradients {
            assert_eq!(bits(&recomputed[name]), bits(gradient), "{name}");
        }
        let (other, other_gradients) = of_weights(&interleaved, (&x, &d_y), false);
        assert!(rel_rms(&values(&other), &values(&y)) < 1e-6);
        for (name, gradient) in other_gradients.iter().filter(|(name, _)| !name.starts_with("in_proj")) {
            let error = rel_rms(&values(gradient), &values(&gradients[name]));
            assert!(error < 1e-5, "{name} is off by {error:e}");
        }
        // One fused matrix, used as it is.
        let fused = Var::from_tensor(&fused(&split)).unwrap();
        let linear = |w: &Tensor| Projection::new(Linear::new(w.clone(), None));
        let in_proj = InProjection::Fused(linear(&fused));
        let parts = parts(&split, in_proj, linear(&split["out_proj.weight"]));
        let layer = TrainableGatedDeltaNet::new(&config(), parts).unwrap();
        let store = (layer.forward(&x, None).unwrap() * &d_y).unwrap().sum_all().unwrap().backward().unwrap();
        let want = ["qkv", "z", "b", "a"].map(|name| gradients[&format!("in_proj_{name}.weight")].clone());
        let error = rel_rms(&values(store.get(&fused).unwrap()), &values(&Tensor::cat(&want, 0).unwrap()));
        assert!(error < 1e-5, "{error:e}");
    }
}

/// Packed as alone: y and the gradient of x, whatever the other sequences are; and an empty one changes nothing.
#[test]
fn packed_sequences_do_not_meet() {
    for device in &devices() {
        let (_, weights) = weights_for(&config(), device);
        let map = variables(&weights, DType::F32);
        let layer = load(&config(), &map, DType::F32, device);
        let lengths = [4, 0, 33, 1];
        let cu = CuSeqlens::from_lengths(&lengths, device).unwrap();
        let [x, d_y] = [(); 2].map(|()| Tensor::randn(0f32, 1., (38, 24), device).unwrap());
        let (y, gradients) = run(&layer, &map, (&x, &d_y), Some(&cu));
        let mut first = 0;
        for len in lengths.into_iter().filter(|len| *len > 0) {
            let part = |x: &Tensor| x.narrow(0, first, len).unwrap().unsqueeze(0).unwrap();
            let (want, want_gradients) = run(&layer, &map, (&part(&x), &part(&d_y)), None);
            // The products of the projections may differ with the number of rows.
            let error = rel_rms(&values(&part(&y)), &values(&want));
            let gradient_error = rel_rms(&values(&part(&gradients["x"])), &values(&want_gradients["x"]));
            assert!(error < 1e-5 && gradient_error < 1e-5, "{len}: {error:e} and {gradient_error:e}");
            first += len;
        }
        let empty = Tensor::zeros((0, 24), DType::F32, &Device::Cpu).unwrap();
        if device.is_cpu() {
            let none = CuSeqlens::from_lengths(&[0, 0], device).unwrap();
            assert_eq!(layer.forward(&empty, Some(&none)).unwrap().dims(), [0, 24]);
            assert_eq!(layer.forward_with_state(&empty, Some(&none), None).unwrap().1.recurrent.dims()[0], 2);
        }
        refused(
            layer.forward(&x, None),
            &["TrainableGatedDeltaNet: x: expected shape [batch, tokens, 24]", "cu_seqlens"],
        );
        let short = CuSeqlens::from_lengths(&[4], device).unwrap();
        refused(
            layer.forward(&x, Some(&short)),
            &["x: expected shape [4, 24] (cu_seqlens has the tokens), got [38, 24]"],
        );
    }
}

#[test]
fn the_kernel_is_a_choice() {
    for device in &devices() {
        let (weights, _) = weights_for(&config(), device);
        let map = variables(&weights, DType::F32);
        let [x, d_y] = [(); 2].map(|()| Tensor::randn(0f32, 1., (2, 70, 24), device).unwrap());
        let layer = |algo| load(&config(), &map, DType::F32, device).with_algo(algo);
        let (y, gradients) = run(&layer(Algo::Auto), &map, (&x, &d_y), None);
        let (again, others) = run(&layer(Algo::Recurrent), &map, (&x, &d_y), None);
        assert!(rel_rms(&values(&again), &values(&y)) < 1e-5);
        for (name, gradient) in &gradients {
            assert!(rel_rms(&values(&others[name]), &values(gradient)) < 1e-5, "{name}");
        }
        refused(layer(Algo::ChunkedSm90).forward(&x, None), &["algo: ChunkedSm90"]);
    }
}

/// A sequence cut in two, with the state between: the same y, final state and gradients.
#[test]
fn states_carry_gradients() {
    for device in &devices() {
        let (_, weights) = weights_for(&config(), device);
        let map = variables(&weights, DType::F32);
        let layer = load(&config(), &map, DType::F32, device);
        let x = Var::randn(0f32, 1., (2, 20, 24), device).unwrap();
        let gradients = |cuts: &[usize], recompute: bool| {
            let layer = layer.clone().with_recompute(recompute);
            let (mut state, mut first, mut loss) = (None, 0, Tensor::zeros((), DType::F32, device).unwrap());
            for len in cuts {
                let part = x.narrow(1, first, *len).unwrap();
                let (y, next) = layer.forward_with_state(&part, None, state.as_ref()).unwrap();
                loss = (loss + y.sqr().unwrap().sum_all().unwrap()).unwrap();
                (state, first) = (Some(next), first + len);
            }
            let state = state.unwrap();
            for part in [&state.conv, &state.recurrent] {
                loss = (loss + part.sqr().unwrap().sum_all().unwrap()).unwrap();
            }
            let store = loss.backward().unwrap();
            let mut all: Vec<_> = names(&map).iter().map(|name| values(store.get(&var(&map, name)).unwrap())).collect();
            all.push(values(store.get(&x).unwrap()));
            all.push(values(&loss.reshape(1).unwrap()));
            all
        };
        let want = gradients(&[20], false);
        assert_eq!(gradients(&[20], true), want, "recomputed");
        for cuts in [&[13, 7][..], &[1, 2, 17], &[18, 1, 1]] {
            for recompute in [false, true] {
                for (got, want) in gradients(cuts, recompute).iter().zip(&want) {
                    let error = rel_rms(got, want);
                    assert!(error < 2e-5, "{cuts:?}, recompute {recompute}: {error:e}");
                }
            }
        }
    }
}

/// With and without a state, recomputation runs the layer once more in the backward pass, and only then; and a packed call from a
/// state that is a variable has its gradients to the bit.
#[test]
fn recomputation_is_obeyed_with_a_state() {
    for device in &devices() {
        let (_, weights) = weights_for(&config(), device);
        let calls = Arc::new(AtomicUsize::new(0));
        let layer = TrainableGatedDeltaNet::load_with(
            &config(),
            VarBuilder::from_tensors(weights, DType::F32, device),
            |name, linear| {
                if name != "out_proj" {
                    return Ok(Projection::new(linear));
                }
                let calls = calls.clone();
                Ok(Projection::module(candle_nn::func(move |x| {
                    calls.fetch_add(1, Ordering::Relaxed);
                    linear.forward(x)
                })))
            },
        )
        .unwrap();
        let cu = CuSeqlens::from_lengths(&[6, 2], device).unwrap();
        let x = Var::randn(0f32, 1., (8, 24), device).unwrap();
        let c = config();
        let conv = Var::randn(0f32, 1., (2, c.conv_kernel - 1, c.conv_channels()), device).unwrap();
        let recurrent = (2, c.num_value_heads, c.value_head_dim, c.key_head_dim);
        let recurrent = Var::randn(0f32, 0.1, recurrent, device).unwrap();
        let state = TrainingState { conv: conv.as_tensor().clone(), recurrent: recurrent.as_tensor().clone() };
        let run = |recompute: bool| {
            let layer = layer.clone().with_recompute(recompute);
            let (y, next) = layer.forward_with_state(&x, Some(&cu), Some(&state)).unwrap();
            let parts = [&y, &next.conv, &next.recurrent].map(|part| part.sqr().unwrap().sum_all().unwrap());
            let loss = parts.iter().skip(1).fold(parts[0].clone(), |loss, part| (loss + part).unwrap());
            assert_eq!(calls.swap(0, Ordering::Relaxed), 1);
            let store = loss.backward().unwrap();
            assert_eq!(calls.swap(0, Ordering::Relaxed), usize::from(recompute));
            [&x, &conv, &recurrent].map(|of| bits(store.get(of).unwrap()))
        };
        assert_eq!(run(true), run(false));
    }
}

/// A LoRA around a frozen matrix.
pub struct Lora {
    base: Tensor,
    a: Tensor,
    b: Tensor,
}

impl Lora {
    /// With random variables, which are added to `vars`: A, then B.
    pub fn around(linear: &Linear, vars: &mut Vec<Var>) -> Result<Self> {
        let (base, (outputs, inputs)) = (linear.weight().clone(), linear.weight().dims2()?);
        let [a, b] = [(3, inputs), (outputs, 3)].map(|shape| Var::randn(0f32, 0.1, shape, base.device()));
        let (a, b) = (a?, b?);
        vars.extend([a.clone(), b.clone()]);
        Ok(Self { base, a: a.as_tensor().clone(), b: b.as_tensor().clone() })
    }
}

impl Module for Lora {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let flat = x.flatten_to(x.rank() - 2)?;
        let y = (flat.matmul(&self.base.t()?)? + flat.matmul(&self.a.t()?)?.matmul(&self.b.t()?)?)?;
        y.reshape([&x.dims()[..x.rank() - 1], &[self.base.dims()[0]]].concat())
    }
}

#[test]
fn adapters_are_trained_and_frozen() {
    for device in &devices() {
        let (_, weights) = weights_for(&config(), device);
        let vb = VarBuilder::from_tensors(weights, DType::F32, device);
        let mut vars = vec![];
        let layer = TrainableGatedDeltaNet::load_with(&config(), vb, |name, linear| {
            if name != "in_proj_qkvz" && name != "out_proj" {
                return Ok(Projection::new(linear));
            }
            Ok(Projection::module(Lora::around(&linear, &mut vars)?))
        })
        .unwrap();
        let x = Tensor::randn(0f32, 1., (1, 30, 24), device).unwrap();
        for recompute in [false, true] {
            let layer = layer.clone().with_recompute(recompute);
            let loss = || layer.forward(&x, None).unwrap().sqr().unwrap().mean_all().unwrap();
            let first = loss().to_scalar::<f32>().unwrap();
            let mut optimizer = AdamW::new(vars.clone(), ParamsAdamW { lr: 1e-2, ..Default::default() }).unwrap();
            for _ in 0..5 {
                let store = loss().backward().unwrap();
                assert!(vars.iter().all(|x| store.get(x).is_some()));
                optimizer.step(&store).unwrap();
            }
            assert!(loss().to_scalar::<f32>().unwrap() < 0.9 * first);
        }
        let (want, frozen) = (layer.forward(&x, None).unwrap(), layer.freeze().unwrap());
        let y = frozen.forward(&x, &mut frozen.new_state(1).unwrap()).unwrap();
        assert!(rel_rms(&values(&y), &values(&want)) < 1e-5 && !y.track_op());
    }
}

#[test]
fn a_frozen_layer_decodes_what_was_trained() {
    for device in &devices() {
        let (split, interleaved) = weights_for(&config(), device);
        for weights in [&split, &interleaved] {
            for (dtype, bound) in [(DType::F32, 1e-5), (DType::BF16, 1e-2)] {
                let map = variables(weights, dtype);
                let layer = load(&config(), &map, dtype, device);
                let x = Tensor::randn(0f32, 1., (2, 30, 24), device).unwrap().to_dtype(dtype).unwrap();
                let want = layer.forward(&x, None).unwrap();
                let frozen: GatedDeltaNet = layer.freeze().unwrap();
                let mut state = frozen.new_state(2).unwrap();
                let y = frozen.forward(&x, &mut state).unwrap();
                let error = rel_rms(&values(&y), &values(&want));
                assert!(error < bound, "{dtype:?}: {error:e}");
            }
        }
        // A fresh one.
        let (map, c) = (VarMap::new(), config());
        let vb = VarBuilder::from_varmap(&map, DType::BF16, device);
        let layer = TrainableGatedDeltaNet::init(&c, vb).unwrap();
        assert_eq!((map.all_vars().len(), var(&map, "A_log").dtype()), (9, DType::F32));
        let x = Tensor::randn(0f32, 1., (1, 9, 24), device).unwrap().to_dtype(DType::BF16).unwrap();
        let (_, gradients) = run(&layer, &map, (&x, &x), None);
        for name in names(&map) {
            assert_eq!(gradients[&name].dtype(), var(&map, &name).dtype(), "{name}");
            assert!(values(&gradients[&name]).iter().all(|x| x.is_finite()), "{name}");
        }
    }
}

#[test]
fn what_has_no_gradients_is_refused() {
    for device in &devices() {
        let (split, _) = weights_for(&config(), device);
        let parts = parts(&split, InProjection::Fused(dense(&fused(&split))), dense(&split["out_proj.weight"]));
        let layer = TrainableGatedDeltaNet::new(&config(), parts.clone()).unwrap();
        let x = Var::randn(0f32, 1., (1, 5, 24), device).unwrap();
        for recompute in [false, true] {
            let layer = layer.clone().with_recompute(recompute);
            refused(
                layer.forward(&x, None),
                &["DenseWeight: x: expected a tensor without gradients", "Projection::new"],
            );
        }
        let wrong = GdnParts { a_log: split["norm.weight"].clone(), ..parts };
        refused(TrainableGatedDeltaNet::new(&config(), wrong), &["TrainableGatedDeltaNet: a_log: expected shape [6]"]);
        let vb = VarBuilder::from_tensors(HashMap::new(), DType::F32, device);
        refused(TrainableGatedDeltaNet::load(&config(), vb.pp("x")), &["no Gated DeltaNet under `x`"]);
    }
}
