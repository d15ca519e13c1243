//! The layer: loading, batches, splits, state, and what it refuses.

use crate::goldens::layer_golden;
use crate::support::{devices, rel_rms, values};
use candle_core::{DType, Device, Tensor};
use candle_gdn::{GateActivation, GatedDeltaNet, GdnConfig};
use candle_nn::VarBuilder;
use std::collections::HashMap;

pub fn config() -> GdnConfig {
    GdnConfig {
        hidden_size: 24,
        num_key_heads: 2,
        num_value_heads: 6,
        key_head_dim: 16,
        value_head_dim: 32,
        conv_kernel: 4,
        rms_norm_eps: 1e-6,
        output_gate: GateActivation::Silu,
        beta_scale: 1.0,
    }
}

fn weights(device: &Device) -> (HashMap<String, Tensor>, HashMap<String, Tensor>) {
    weights_for(&config(), device)
}

/// Random weights in the split layout, and the same ones interleaved by key head.
pub fn weights_for(c: &GdnConfig, device: &Device) -> (HashMap<String, Tensor>, HashMap<String, Tensor>) {
    let (heads, r, h) = (c.num_key_heads, c.num_value_heads / c.num_key_heads, c.hidden_size);
    let (key, value) = (c.key_head_dim, r * c.value_head_dim);
    let randn = |shape: &[usize]| Tensor::randn(0f32, 0.3, shape, device).unwrap();
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

fn load(weights: &HashMap<String, Tensor>, dtype: DType, device: &Device) -> candle_core::Result<GatedDeltaNet> {
    let named = weights.iter().map(|(name, t)| (format!("layer.{name}"), t.clone())).collect();
    GatedDeltaNet::load(&config(), VarBuilder::from_tensors(named, dtype, device).pp("layer"))
}

#[test]
fn both_checkpoint_layouts_are_the_same_layer() {
    for device in devices() {
        let (split, interleaved) = weights(&device);
        let (split, interleaved) =
            (load(&split, DType::F32, &device).unwrap(), load(&interleaved, DType::F32, &device).unwrap());
        let x = Tensor::randn(0f32, 1., (2, 9, 24), &device).unwrap();
        let run = |layer: &GatedDeltaNet| values(&layer.forward(&x, &mut layer.new_state(2).unwrap()).unwrap());
        assert_eq!(run(&split), run(&interleaved));
    }
}

#[test]
fn whole_split_and_single_tokens_agree_in_every_dtype() {
    for device in devices() {
        for (dtype, bound) in [(DType::F32, 1e-5), (DType::BF16, 1e-2), (DType::F16, 2e-3)] {
            let layer = load(&weights(&device).0, dtype, &device).unwrap();
            let x = Tensor::randn(0f32, 1., (3, 70, 24), &device).unwrap().to_dtype(dtype).unwrap();
            let run = |cuts: &[usize]| {
                let mut state = layer.new_state(3).unwrap();
                let parts: Vec<_> = cuts
                    .windows(2)
                    .map(|c| layer.forward(&x.narrow(1, c[0], c[1] - c[0]).unwrap(), &mut state).unwrap())
                    .collect();
                (values(&Tensor::cat(&parts, 1).unwrap()), values(state.recurrent()), values(state.conv()))
            };
            let whole = run(&[0, 70]);
            for cuts in [vec![0, 1, 70], vec![0, 3, 3, 64, 70], vec![0, 65, 70], (0..=70).collect()] {
                let got = run(&cuts);
                let (y, s) = (rel_rms(&got.0, &whole.0), rel_rms(&got.1, &whole.1));
                assert!(y < bound && s < bound, "{dtype:?} {cuts:?}: y {y:e}, state {s:e}");
                // The projection may round differently for one row than for seventy.
                assert!(rel_rms(&got.2, &whole.2) < bound);
            }
        }
    }
}

#[test]
fn rows_of_a_batch_do_not_mix() {
    for device in devices() {
        let layer = load(&weights(&device).0, DType::F32, &device).unwrap();
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
        let layer = load(&weights(&device).0, DType::F32, &device).unwrap();
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
        let error = state.restore(&layer.new_state(2).unwrap()).unwrap_err().to_string();
        assert!(error.contains("restore: conv"), "{error}");
        assert_eq!(state.size_in_bytes(), 4 * (3 * (2 * 2 * 16 + 6 * 32) + 6 * 32 * 16));
    }
}

/// A bf16 recurrent state: half the bytes, kept by snapshots, and a sequence in a few pieces close to what f32 gives.
#[test]
fn bf16_state() {
    for device in devices() {
        let layer = load(&weights(&device).0, DType::F32, &device).unwrap();
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
        let error = state.restore(&full).unwrap_err().to_string();
        assert!(error.contains("restore: recurrent: expected BF16"), "{error}");
        let error = layer.new_state_as(2, DType::F16).unwrap_err().to_string();
        assert!(error.contains("GatedDeltaNet: state: expected dtype f32 or bf16, got F16"), "{error}");
    }
}

/// Heads of 128, as in the checkpoints: up to 16 tokens go through the step, more through the three ops, and it does
/// not show which.
#[test]
fn the_step_continues_what_the_ops_began() {
    let c = GdnConfig {
        hidden_size: 64,
        num_value_heads: 4,
        key_head_dim: 128,
        value_head_dim: 128,
        // No constant is a default of the ops.
        rms_norm_eps: 0.05,
        beta_scale: 2.0,
        ..config()
    };
    for device in devices() {
        let randn = |shape: &[usize]| Tensor::randn(0f32, 0.3, shape, &device).unwrap();
        let weights = HashMap::from([
            ("in_proj_qkv.weight", randn(&[1024, 64])),
            ("in_proj_z.weight", randn(&[512, 64])),
            ("in_proj_b.weight", randn(&[4, 64])),
            ("in_proj_a.weight", randn(&[4, 64])),
            ("conv1d.weight", randn(&[1024, 1, 4])),
            ("A_log", randn(&[4])),
            ("dt_bias", randn(&[4])),
            ("norm.weight", randn(&[128])),
            ("out_proj.weight", randn(&[64, 512])),
        ]);
        // In bf16 and f16 the ops round q, k, v and o on their way; the step on CUDA does not.
        for (dtype, bound) in [(DType::F32, 1e-5), (DType::BF16, 1e-2), (DType::F16, 2e-3)] {
            let named = weights.iter().map(|(name, t)| (format!("layer.{name}"), t.clone())).collect();
            let vb = VarBuilder::from_tensors(named, dtype, &device).pp("layer");
            for output_gate in [GateActivation::Silu, GateActivation::Sigmoid] {
                let layer = GatedDeltaNet::load(&GdnConfig { output_gate, ..c.clone() }, vb.clone()).unwrap();
                let x = Tensor::randn(0f32, 1., (3, 40, 64), &device).unwrap().to_dtype(dtype).unwrap();
                let run = |cuts: &[usize]| {
                    let mut state = layer.new_state(3).unwrap();
                    let parts: Vec<_> = cuts
                        .windows(2)
                        .map(|c| layer.forward(&x.narrow(1, c[0], c[1] - c[0]).unwrap(), &mut state).unwrap())
                        .collect();
                    (values(&Tensor::cat(&parts, 1).unwrap()), values(state.recurrent()), values(state.conv()))
                };
                let whole = run(&[0, 40]);
                let c = GdnConfig { beta_scale: 1.0, ..layer.config().clone() };
                let beta_1 = GatedDeltaNet::load(&c, vb.clone()).unwrap();
                let beta_1 = values(&beta_1.forward(&x, &mut beta_1.new_state(3).unwrap()).unwrap());
                assert!(rel_rms(&beta_1, &whole.0) > 10.0 * bound, "beta_scale does not show");
                for cuts in [vec![0, 20, 21, 40], vec![0, 16, 32, 40], vec![0, 17, 19, 24, 40], (0..=40).collect()] {
                    let got = run(&cuts);
                    assert!(got == run(&cuts), "{dtype:?} {cuts:?} does not repeat");
                    let errors = [(&got.0, &whole.0), (&got.1, &whole.1), (&got.2, &whole.2)];
                    let errors = errors.map(|(got, want)| rel_rms(got, want));
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

#[test]
fn bad_weights_are_named() {
    let device = Device::Cpu;
    let (split, interleaved) = weights(&device);
    for (good, names) in [
        (&split, ["in_proj_z.weight", "in_proj_b.weight", "in_proj_a.weight"].as_slice()),
        (&interleaved, ["in_proj_ba.weight"].as_slice()),
        (&split, ["conv1d.weight", "A_log", "dt_bias", "norm.weight", "out_proj.weight"].as_slice()),
    ] {
        for name in names {
            let mut missing = good.clone();
            missing.remove(*name);
            let error = load(&missing, DType::F32, &device).unwrap_err().to_string();
            assert!(error.contains(&format!("layer.{name}")), "{error}");
            let mut misshapen = good.clone();
            misshapen.insert((*name).to_owned(), Tensor::zeros((3, 5), DType::F32, &device).unwrap());
            let error = load(&misshapen, DType::F32, &device).unwrap_err().to_string();
            assert!(error.contains(&format!("layer.{name}")) && error.contains("[3, 5]"), "{error}");
        }
    }
    let error = load(&HashMap::new(), DType::F32, &device).unwrap_err().to_string();
    assert!(error.contains("layer.in_proj_qkvz.weight") && error.contains("layer.in_proj_qkv.weight"), "{error}");
}

#[test]
fn bad_configs_and_inputs_are_refused() {
    let device = Device::Cpu;
    let weights = weights(&device).0;
    let refused = |change: fn(&mut GdnConfig), part: &str| {
        let mut c = config();
        change(&mut c);
        let vb = VarBuilder::from_tensors(weights.clone(), DType::F32, &device);
        let error = GatedDeltaNet::load(&c, vb).unwrap_err().to_string();
        assert!(error.contains(part), "expected {part:?} in: {error}");
    };
    refused(|c| c.num_value_heads = 5, "num_value_heads: expected a multiple of num_key_heads (2), got 5");
    refused(|c| c.num_key_heads = 0, "num_key_heads");
    refused(|c| c.key_head_dim = 512, "key_head_dim: expected 1 to 256, got 512");
    refused(|c| c.value_head_dim = 0, "value_head_dim");
    refused(|c| c.conv_kernel = 1, "conv_kernel: expected 2 to 8, got 1");
    refused(|c| c.rms_norm_eps = f64::NAN, "rms_norm_eps");
    refused(|c| c.beta_scale = 0.0, "beta_scale");
    refused(|c| c.hidden_size = 0, "hidden_size");

    let layer = load(&weights, DType::F32, &device).unwrap();
    let zeros = |shape: &[usize]| Tensor::zeros(shape, DType::F32, &device).unwrap();
    let forward = |x: &Tensor, batch: usize| {
        let error = layer.forward(x, &mut layer.new_state(batch).unwrap()).unwrap_err();
        error.to_string()
    };
    assert!(forward(&zeros(&[2, 3, 25]), 2).contains("x: expected shape [batch, tokens, 24], got [2, 3, 25]"));
    assert!(forward(&zeros(&[3, 24]), 1).contains("x: expected shape"));
    assert!(forward(&zeros(&[2, 3, 24]), 1).contains("state: expected"));
    let half = zeros(&[1, 3, 24]).to_dtype(DType::F16).unwrap();
    assert!(forward(&half, 1).contains("x: expected dtype F32 (the weights'), got F16"));
    let y = layer.forward(&zeros(&[2, 0, 24]), &mut layer.new_state(2).unwrap()).unwrap();
    assert_eq!(y.dims(), [2, 0, 24]);
}
