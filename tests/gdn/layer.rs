//! The layer: loading, batches, splits, state, and what it refuses.

use crate::goldens::layer_golden;
use crate::random_layer::{self, of_128, small};
use crate::support::{devices, dtype_for, has, on_tensor_cores, refused, rel_rms, values, Rng, APART};
use candle_core::{DType, Device, Result, Tensor};
use candle_gdn::{Algo, GateActivation, GatedDeltaNet, GdnConfig, TrainableGatedDeltaNet};
use candle_nn::VarBuilder;
use std::collections::HashMap;

type Weights = HashMap<String, Tensor>;

pub fn config() -> GdnConfig {
    small().with(|c| (c.hidden_size, c.num_value_heads, c.value_head_dim) = (24, 6, 32))
}

/// Random weights, always the same, in the split layout, and the same ones interleaved by key head.
pub fn weights_for(c: &GdnConfig, device: &Device) -> (HashMap<String, Tensor>, HashMap<String, Tensor>) {
    let (heads, r, h) = (c.num_key_heads, c.num_value_heads / c.num_key_heads, c.hidden_size);
    let (key, value) = (c.key_head_dim, r * c.value_head_dim);
    let mut rng = Rng::new(1);
    let mut randn = |shape: &[usize]| {
        let numbers: Vec<f32> = (0..shape.iter().product()).map(|_| 0.3 * rng.normal() as f32).collect();
        Tensor::from_vec(numbers, shape, device).unwrap()
    };
    let (q, k, v, z) =
        (randn(&[heads, key, h]), randn(&[heads, key, h]), randn(&[heads, value, h]), randn(&[heads, value, h]));
    let (b, a) = (randn(&[heads, r, h]), randn(&[heads, r, h]));
    let channels = heads * (2 * key + value);
    let common = HashMap::from([
        ("conv1d.weight".to_owned(), randn(&[channels, 1, 4])),
        ("A_log".to_owned(), randn(&[c.num_value_heads])),
        ("dt_bias".to_owned(), randn(&[c.num_value_heads])),
        ("norm.weight".to_owned(), randn(&[c.value_head_dim])),
        ("out_proj.weight".to_owned(), randn(&[h, heads * value])),
    ]);
    let flat = |parts: &[&Tensor]| {
        let parts: Vec<_> = parts.iter().map(|p| p.flatten_to(1).unwrap()).collect();
        Tensor::cat(&parts, 0).unwrap()
    };
    let mut split = common.clone();
    split.insert("in_proj_qkv.weight".into(), flat(&[&q, &k, &v]));
    split.insert("in_proj_z.weight".into(), flat(&[&z]));
    split.insert("in_proj_b.weight".into(), flat(&[&b]));
    split.insert("in_proj_a.weight".into(), flat(&[&a]));
    let mut interleaved = common;
    let by_head = |parts: &[&Tensor]| Tensor::cat(parts, 1).unwrap().flatten_to(1).unwrap();
    interleaved.insert("in_proj_qkvz.weight".into(), by_head(&[&q, &k, &v, &z]));
    interleaved.insert("in_proj_ba.weight".into(), by_head(&[&b, &a]));
    (split, interleaved)
}

/// The layer of `split` in Lara-4-Mini's layout and in OLMo-Hybrid's, this also as transformers saves it: the convolution in thirds.
pub fn published_layouts(c: &GdnConfig, split: &Weights) -> [Weights; 3] {
    let renamed = |names: &[(&str, &str)]| -> Weights {
        let rename =
            |name: &String| names.iter().find(|(old, _)| old == name).map_or(name.clone(), |(_, new)| (*new).into());
        split.iter().map(|(name, weight)| (rename(name), weight.clone())).collect()
    };
    let inputs = ["in_proj_qkv.weight", "in_proj_z.weight", "in_proj_b.weight", "in_proj_a.weight"];
    let all = Tensor::cat(&inputs.map(|name| split[name].clone()), 0).unwrap();
    let mut one = renamed(&[("norm.weight", "out_norm.weight")]);
    let mut separate = renamed(&[("norm.weight", "o_norm.weight"), ("out_proj.weight", "o_proj.weight")]);
    for name in inputs {
        one.remove(name);
        separate.remove(name);
    }
    let (key, value, heads) = (c.key_size(), c.value_size(), c.num_value_heads);
    let mut first = 0;
    for (name, rows) in [("q", key), ("k", key), ("v", value), ("g", value), ("b", heads), ("a", heads)] {
        separate.insert(format!("{name}_proj.weight"), all.narrow(0, first, rows).unwrap());
        first += rows;
    }
    one.insert("in_proj.weight".into(), all);
    let conv = separate.remove("conv1d.weight").unwrap();
    let cut = |[q, k, v]: [usize; 3]| {
        let mut cut = separate.clone();
        for (name, first, rows) in [("q", 0, q), ("k", q, k), ("v", q + k, v)] {
            cut.insert(format!("{name}_conv1d.weight"), conv.narrow(0, first, rows).unwrap());
        }
        cut
    };
    let third = c.conv_channels().div_ceil(3);
    [one, cut([key, key, value]), cut([third, third, c.conv_channels() - 2 * third])]
}

fn load(weights: &HashMap<String, Tensor>, dtype: DType, device: &Device) -> Result<GatedDeltaNet> {
    load_with(&config(), weights, dtype, device)
}

fn load_with(
    config: &GdnConfig,
    weights: &HashMap<String, Tensor>,
    dtype: DType,
    device: &Device,
) -> Result<GatedDeltaNet> {
    let named = weights.iter().map(|(name, t)| (format!("layer.{name}"), t.clone())).collect();
    GatedDeltaNet::load(config, VarBuilder::from_tensors(named, dtype, device).pp("layer"))
}

/// y, the recurrent state and the convolution's, of `x` fed in parts that end at `cuts`.
fn in_parts(layer: &GatedDeltaNet, x: &Tensor, cuts: &[usize]) -> [Vec<f64>; 3] {
    let mut state = layer.new_state(x.dims()[0]).unwrap();
    let part = |cut: &[usize]| layer.forward(&x.narrow(1, cut[0], cut[1] - cut[0]).unwrap(), &mut state).unwrap();
    let y: Vec<_> = cuts.windows(2).map(part).collect();
    [values(&Tensor::cat(&y, 1).unwrap()), values(state.recurrent()), values(state.conv())]
}

#[test]
fn all_checkpoint_layouts_are_the_same_layer() {
    for device in devices() {
        let (split, interleaved) = weights_for(&config(), &device);
        let x = Tensor::randn(0f32, 1., (2, 9, 24), &device).unwrap();
        let run = |weights: &Weights| {
            let layer = load(weights, DType::F32, &device).unwrap();
            values(&layer.forward(&x, &mut layer.new_state(2).unwrap()).unwrap())
        };
        let (want, others) = (run(&split), published_layouts(&config(), &split));
        assert_eq!(run(&interleaved), want);
        others.iter().for_each(|weights| assert_eq!(run(weights), want));
        let train = |weights: &Weights| {
            let weights = VarBuilder::from_tensors(weights.clone(), DType::F32, &device);
            TrainableGatedDeltaNet::load(&config(), weights)
        };
        for weights in &others {
            let trained = train(weights).unwrap().forward(&x, None).unwrap();
            let error = rel_rms(&values(&trained), &want);
            assert!(error < 1e-5, "in training: {error:e}");
        }
    }
}

#[test]
fn rows_of_a_batch_do_not_mix() {
    for device in devices() {
        let layer = load(&weights_for(&config(), &device).0, DType::F32, &device).unwrap();
        let x = Tensor::randn(0f32, 1., (3, 20, 24), &device).unwrap();
        let together = layer.forward(&x, &mut layer.new_state(3).unwrap()).unwrap();
        for n in 0..3 {
            let alone = layer.forward(&x.narrow(0, n, 1).unwrap(), &mut layer.new_state(1).unwrap()).unwrap();
            let error = rel_rms(&values(&alone), &values(&together.narrow(0, n, 1).unwrap()));
            assert!(error < 1e-5, "{error:e}");
        }
    }
}

#[test]
fn reset_snapshot_and_restore() {
    for device in devices() {
        let layer = load(&weights_for(&config(), &device).0, DType::F32, &device).unwrap();
        let x = Tensor::randn(0f32, 1., (1, 10, 24), &device).unwrap();
        let mut state = layer.new_state(1).unwrap();
        let first = values(&layer.forward(&x, &mut state).unwrap());
        let snapshot = state.snapshot().unwrap();
        let second = values(&layer.forward(&x, &mut state).unwrap());
        assert_ne!(first, second);
        state.restore(&snapshot).unwrap();
        assert_eq!(values(&layer.forward(&x, &mut state).unwrap()), second);
        state.restore(&snapshot).unwrap();
        assert_eq!(values(&layer.forward(&x, &mut state).unwrap()), second, "the snapshot was written");
        state.reset().unwrap();
        assert_eq!(values(&layer.forward(&x, &mut state).unwrap()), first);
        refused(state.restore(&layer.new_state(2).unwrap()), &["restore: conv"]);
        assert_eq!(state.size_in_bytes(), 4 * (3 * (2 * 2 * 16 + 6 * 32) + 6 * 32 * 16));
    }
}

/// A bf16 recurrent state: half the bytes, kept by snapshots, and a sequence in a few pieces close to what f32 gives.
#[test]
fn bf16_state() {
    for device in devices() {
        let layer = load(&weights_for(&config(), &device).0, DType::F32, &device).unwrap();
        let x = Tensor::randn(0f32, 1., (2, 12, 24), &device).unwrap();
        let run = |dtype| {
            let mut state = layer.new_state_as(2, dtype).unwrap();
            assert_eq!((state.recurrent().dtype(), state.conv().dtype()), (dtype, DType::F32));
            let parts: Vec<_> = [(0, 6), (6, 1), (7, 5)]
                .map(|(start, n)| layer.forward(&x.narrow(1, start, n).unwrap(), &mut state).unwrap())
                .into();
            (Tensor::cat(&parts, 1).unwrap(), state)
        };
        let (y, mut state) = run(DType::BF16);
        let (want, full) = run(DType::F32);
        // The first piece begins at a state that both hold, and its y is from before the rounding.
        let part = |t: &Tensor, start, n| values(&t.narrow(1, start, n).unwrap());
        assert!(rel_rms(&part(&y, 0, 6), &part(&want, 0, 6)) < 1e-6);
        // Two roundings of at most 2^-8 lie before the last piece; the norm and the projection mix their errors.
        let error = rel_rms(&part(&y, 6, 6), &part(&want, 6, 6));
        assert!(error > 1e-5 && error < 4.0 * 2f64.powi(-8), "{error:e}");
        let bytes = 2 * 6 * 32 * 16;
        assert_eq!(full.size_in_bytes() - state.size_in_bytes(), 2 * bytes);

        let snapshot = state.snapshot().unwrap();
        let next = values(&layer.forward(&x, &mut state).unwrap());
        state.restore(&snapshot).unwrap();
        assert_eq!(values(&layer.forward(&x, &mut state).unwrap()), next);
        refused(state.restore(&full), &["restore: recurrent: expected BF16"]);
        refused(layer.new_state_as(2, DType::F16), &["GatedDeltaNet: state: expected dtype f32 or bf16, got F16"]);
    }
}

/// Whole, in parts and token by token. Of heads of 128, as in the checkpoints, up to 8 tokens (on the CPU 16) go through the
/// step, more through the three ops, and it does not show which.
#[test]
fn any_split_gives_the_same_in_every_dtype() {
    // No constant is a default of the ops.
    let of_128 = of_128().with(|c| (c.rms_norm_eps, c.beta_scale) = (0.05, 2.0));
    let sigmoid = of_128.clone().with(|c| c.output_gate = GateActivation::Sigmoid);
    let small = vec![vec![0, 1, 70], vec![0, 3, 3, 64, 70], vec![0, 65, 70], (0..=70).collect()];
    let large =
        vec![vec![0, 20, 21, 40], vec![0, 16, 32, 40], vec![0, 17, 19, 24, 40], vec![0, 8, 17, 40], (0..=40).collect()];
    for device in devices() {
        for (c, tokens, all_cuts) in
            [(config(), 70, &small), (of_128.clone(), 40, &large), (sigmoid.clone(), 40, &large)]
        {
            let (weights, _) = weights_for(&c, &device);
            // In bf16 and f16 the ops round q, k, v and o on their way; the step on CUDA does not.
            for (dtype, bound) in [(DType::F32, 1e-5), (DType::BF16, 1e-2), (DType::F16, 2e-3)] {
                let layer = load_with(&c, &weights, dtype, &device).unwrap();
                let x = Tensor::randn(0f32, 1., (3, tokens, c.hidden_size), &device).unwrap().to_dtype(dtype).unwrap();
                let whole = in_parts(&layer, &x, &[0, tokens]);
                if c.beta_scale != 1.0 {
                    let beta_1 = c.clone().with(|c| c.beta_scale = 1.0);
                    let [beta_1, ..] =
                        in_parts(&load_with(&beta_1, &weights, dtype, &device).unwrap(), &x, &[0, tokens]);
                    assert!(rel_rms(&beta_1, &whole[0]) > 10.0 * bound, "beta_scale does not show");
                }
                for cuts in all_cuts {
                    let got = in_parts(&layer, &x, cuts);
                    assert!(got == in_parts(&layer, &x, cuts), "{dtype:?} {cuts:?} does not repeat");
                    // The projection, and so the convolution's state, may round differently for one row than for many.
                    let errors = [0, 1, 2].map(|i| rel_rms(&got[i], &whole[i]));
                    assert!(errors.iter().all(|e| *e < bound), "{dtype:?} {cuts:?}: y, state, conv: {errors:?}");
                }
            }
        }
    }
}

#[test]
fn bf16_layer_stays_close_to_f32() {
    for device in devices() {
        for name in ["layer_qwen3_next", "layer_qwen3_5"] {
            let golden = layer_golden(name, DType::BF16, &device);
            let x = golden.tensors["0.0.x"].to_dtype(DType::BF16).unwrap();
            let mut state = golden.layer.new_state(2).unwrap();
            let y = golden.layer.forward(&x, &mut state).unwrap();
            assert_eq!((y.dtype(), state.recurrent().dtype()), (DType::BF16, DType::F32));
            let error = rel_rms(&values(&y), &values(&golden.tensors["0.0.y"]));
            // Weights, inputs and every intermediate rounded to eight bits.
            assert!(error < 3e-2, "{name}: {error:e}");
        }
    }
}

/// Prompts, a few tokens and single ones, each by the kernel asked for.
#[test]
fn a_forced_kernel_gives_the_same() {
    for device in devices() {
        for algo in Algo::RULE.into_iter().filter(|algo| has(&device, *algo)) {
            let dtype = dtype_for(algo);
            let layer = random_layer::layer(&of_128(), dtype, &device, 5);
            let tokens = if algo == Algo::Decode { 16 } else { 70 };
            let x = Tensor::randn(0f32, 1., (2, tokens + 6, 64), &device).unwrap().to_dtype(dtype).unwrap();
            let cuts = [0, tokens, tokens + 5, tokens + 6];
            let want = in_parts(&layer, &x, &cuts);
            let got = in_parts(&layer.clone().with_algo(algo), &x, &cuts);
            // The one kernel of a step rounds nothing between its parts; in turn they round to the dtype of the weights.
            let bound = if on_tensor_cores(algo) { 2.0 * APART } else { 1e-5 };
            for (got, want) in got.iter().zip(&want) {
                let error = rel_rms(got, want);
                assert!(error <= bound, "{algo}: {error:e}");
            }
            let free = layer.with_algo(algo).with_algo(Algo::Auto);
            assert_eq!(in_parts(&free, &x, &cuts), want, "{algo}, and auto again");
        }
    }
}

/// The op's own sentence, and a state as it was.
#[test]
fn a_forced_kernel_that_does_not_take_a_call_is_an_error() {
    for device in devices() {
        for (algo, tokens, sentence) in [
            (Algo::Decode, 17, "gdn_prefill: algo: Decode supports up to 16 tokens a sequence, got 17"),
            (Algo::ChunkedSm80, 17, "gdn_prefill: algo: ChunkedSm80 supports q, k and v in bf16 or f16, got F32"),
            (Algo::ChunkedSm90, 3, "gdn_step: algo: ChunkedSm90 supports q, k and v in bf16 or f16, got F32"),
        ] {
            let layer = random_layer::layer(&of_128(), DType::F32, &device, 5).with_algo(algo);
            let mut state = layer.new_state(1).unwrap();
            let x = Tensor::ones((1, tokens, 64), DType::F32, &device).unwrap();
            refused(layer.forward(&x, &mut state), &[sentence]);
            assert!(values(state.recurrent()).iter().chain(&values(state.conv())).all(|x| *x == 0.0), "{algo}");
        }
    }
}

#[test]
fn bad_weights_are_named() {
    let device = Device::Cpu;
    let (split, interleaved) = weights_for(&config(), &device);
    for (good, names) in [
        (&split, ["in_proj_z.weight", "in_proj_b.weight", "in_proj_a.weight"].as_slice()),
        (&interleaved, ["in_proj_ba.weight"].as_slice()),
        (&split, ["conv1d.weight", "A_log", "dt_bias", "norm.weight", "out_proj.weight"].as_slice()),
    ] {
        for name in names {
            let mut missing = good.clone();
            missing.remove(*name);
            refused(load(&missing, DType::F32, &device), &[&format!("layer.{name}")]);
            let mut misshapen = good.clone();
            misshapen.insert((*name).to_owned(), Tensor::zeros((3, 5), DType::F32, &device).unwrap());
            refused(load(&misshapen, DType::F32, &device), &[&format!("layer.{name}"), "[3, 5]"]);
        }
    }
    let nothing = load(&HashMap::new(), DType::F32, &device);
    refused(
        nothing,
        &["layer.in_proj_qkvz.weight", "layer.in_proj_qkv.weight", "layer.in_proj.weight", "layer.q_proj.weight"],
    );
    for good in published_layouts(&config(), &split) {
        for name in good.keys() {
            let mut missing = good.clone();
            missing.remove(name);
            refused(load(&missing, DType::F32, &device), &["layer."]);
        }
    }
}

#[test]
fn bad_configs_and_inputs_are_refused() {
    let device = Device::Cpu;
    let weights = weights_for(&config(), &device).0;
    let bad = |change: fn(&mut GdnConfig), part: &str| {
        let mut c = config();
        change(&mut c);
        refused(load_with(&c, &weights, DType::F32, &device), &[part]);
    };
    bad(|c| c.num_value_heads = 5, "num_value_heads: expected a multiple of num_key_heads (2), got 5");
    bad(|c| c.num_key_heads = 0, "num_key_heads");
    bad(|c| c.key_head_dim = 512, "key_head_dim: expected 1 to 256, got 512");
    bad(|c| c.value_head_dim = 0, "value_head_dim");
    bad(|c| c.conv_kernel = 1, "conv_kernel: expected 2 to 8, got 1");
    bad(|c| c.rms_norm_eps = f64::NAN, "rms_norm_eps");
    bad(|c| c.beta_scale = 0.0, "beta_scale");
    bad(|c| c.hidden_size = 0, "hidden_size");
    bad(|c| c.hidden_size = usize::MAX, "hidden_size, num_key_heads, num_value_heads: expected sizes of weights");
    bad(
        |c| (c.num_key_heads, c.num_value_heads) = (1 << 60, 1 << 60),
        "expected sizes of weights that memory can hold",
    );
    bad(|c| c.num_value_heads = 1 << 62, "expected sizes of weights that memory can hold");
    assert_eq!(config().with(|c| c.num_key_heads = 0).qkvz_sizes(), [16, 16, 0, 0]);

    let layer = load(&weights, DType::F32, &device).unwrap();
    let zeros = |shape: &[usize]| Tensor::zeros(shape, DType::F32, &device).unwrap();
    let bad = |x: &Tensor, batch, part| refused(layer.forward(x, &mut layer.new_state(batch).unwrap()), &[part]);
    bad(&zeros(&[2, 3, 25]), 2, "x: expected shape [batch, tokens, 24], got [2, 3, 25]");
    bad(&zeros(&[3, 24]), 1, "x: expected shape [batch, tokens, 24], got [3, 24]; packed tokens need forward_slots");
    bad(&zeros(&[2, 3, 24]), 1, "state: expected");
    let half = zeros(&[1, 3, 24]).to_dtype(DType::F16).unwrap();
    bad(&half, 1, "x: expected dtype F32 (the weights'), got F16");
    let y = layer.forward(&zeros(&[2, 0, 24]), &mut layer.new_state(2).unwrap()).unwrap();
    assert_eq!(y.dims(), [2, 0, 24]);
}
