//! Whole models against transformers and against themselves. What loading refuses is tested on the CPU only.

use crate::golden::{argmax, log_softmax, max_diff, Goldens, DEMO, QWEN3_5, QWEN3_5_MOE};
use crate::support::{devices, refused, rel_rms};
use crate::tiny::{self, Tiny};
use candle_core::{DType, Device, Result, Tensor};
use candle_gdn_models::{CausalLm, ModelState};

const CPU: Device = Device::Cpu;
/// Bound on the logits, which are up to about 20 large. Where the two best are nearer than half of it, rounding may choose.
const LOGITS: f32 = 2e-3;

/// With the demo in f32.
fn on_every_device(test: impl Fn(&CausalLm) -> Result<()>) -> Result<()> {
    devices().iter().try_for_each(|device| test(&DEMO.model(DType::F32, device)?))
}

fn ids(ids: &[u32]) -> Result<Tensor> {
    Tensor::from_slice(ids, (1, ids.len()), &CPU)
}

fn last(model: &CausalLm, state: &mut ModelState, tokens: &[u32]) -> Result<Vec<f32>> {
    model.forward_last(&ids(tokens)?, state)?.squeeze(0)?.to_vec1()
}

fn flat(t: &Tensor) -> Result<Vec<f32>> {
    t.flatten_all()?.to_vec1()
}

fn random_ids(n: usize, vocab: u32, seed: u32) -> Vec<u32> {
    (0..n as u32).map(|i| (i.wrapping_mul(2654435761).wrapping_add(seed * 97) >> 7) % vocab).collect()
}

/// Last logits, log-probabilities and greedy tokens of every golden prompt.
pub fn check_goldens(what: &str, model: &CausalLm, goldens: &Goldens, bound: f32) -> Result<()> {
    let (mut worst_logit, mut worst_logprob, mut low_margins) = (0f32, 0f32, 0);
    for i in 0..goldens.prompts() {
        let g = goldens.prompt(i)?;
        let mut state = model.new_state(1)?;
        let logits = model.forward(&ids(&g.ids)?, &mut state)?.squeeze(0)?.to_vec2::<f32>()?;
        let mut now = logits[g.ids.len() - 1].clone();
        worst_logit = worst_logit.max(max_diff(&now, &g.logits_last));
        let logprobs: Vec<f32> = (1..g.ids.len()).map(|t| log_softmax(&logits[t - 1], g.ids[t])).collect();
        worst_logprob = worst_logprob.max(max_diff(&logprobs, &g.logprobs));
        for (step, (&token, &margin)) in g.greedy.iter().zip(&g.greedy_margin).enumerate() {
            // The golden token goes in either way, so a tie does not end the comparison.
            if margin > bound / 2. {
                assert_eq!(argmax(&now), token, "{what}: prompt {i}, step {step}, margin {margin}");
            } else {
                low_margins += 1;
                assert!(now[argmax(&now) as usize] - now[token as usize] <= margin + 2. * bound);
            }
            now = last(model, &mut state, &[token])?;
        }
    }
    println!("{what}: logits are off by {worst_logit:e}, logprobs by {worst_logprob:e}, {low_margins} steps with a low margin");
    assert!(worst_logit <= bound, "{what}: logits are off by {worst_logit}");
    assert!(worst_logprob <= bound, "{what}: logprobs are off by {worst_logprob}");
    Ok(())
}

#[test]
fn checkpoints_match_transformers() -> Result<()> {
    for device in devices() {
        for goldens in [&DEMO, &QWEN3_5, &QWEN3_5_MOE].into_iter().filter(|goldens| goldens.is_here()) {
            let what = format!("{} on {:?}", goldens.dir(), device.location());
            check_goldens(&what, &goldens.model(DType::F32, &device)?, goldens, LOGITS)?;
        }
    }
    Ok(())
}

/// Greedy continuation of `parts`, fed one after the other.
fn continuation(model: &CausalLm, parts: &[&[u32]], n: usize) -> Result<(Vec<u32>, Vec<f32>)> {
    let mut state = model.new_state(1)?;
    let mut logits = Vec::new();
    for part in parts.iter().filter(|p| !p.is_empty()) {
        logits = last(model, &mut state, part)?;
    }
    let first = logits.clone();
    let mut out = Vec::new();
    for _ in 0..n {
        out.push(argmax(&logits));
        logits = last(model, &mut state, &out[out.len() - 1..])?;
    }
    Ok((out, first))
}

/// Cut in two anywhere, across the end of a chunk of the kernels too, and in pieces.
#[test]
fn prompts_in_parts_continue_alike() -> Result<()> {
    on_every_device(|model| {
        // The first has 65 tokens.
        for (prompt, steps, pieces) in [(5, 4, &[1, 3][..]), (6, 8, &[1, 7, 64, 100, 256])] {
            let ids = DEMO.prompt(prompt)?.ids;
            let (want, logits) = continuation(model, &[&ids], steps)?;
            let halves = (1..ids.len()).filter(|_| prompt == 5).map(|at| vec![&ids[..at], &ids[at..]]);
            for parts in halves.chain(pieces.iter().map(|n| ids.chunks(*n).collect())) {
                let (got, split) = continuation(model, &parts, steps)?;
                let what = format!("prompt {prompt}, {} parts, the first of {}", parts.len(), parts[0].len());
                assert_eq!(got, want, "{what}");
                assert!(max_diff(&split, &logits) < 1e-3, "{what}: {}", max_diff(&split, &logits));
            }
        }
        Ok(())
    })
}

#[test]
fn a_batch_is_its_sequences() -> Result<()> {
    on_every_device(|model| {
        let (a, b) = (random_ids(70, 1024, 1), random_ids(70, 1024, 2));
        let pair = |r: std::ops::Range<usize>| Tensor::cat(&[ids(&a[r.clone()])?, ids(&b[r])?], 0);
        let mut both = model.new_state(2)?;
        let (mut one, mut two) = (model.new_state(1)?, model.new_state(1)?);
        for range in [0..40, 40..69, 69..70] {
            let logits = model.forward(&pair(range.clone())?, &mut both)?;
            let first = model.forward(&ids(&a[range.clone()])?, &mut one)?;
            let second = model.forward(&ids(&b[range])?, &mut two)?;
            assert!(max_diff(&flat(&logits.get(0)?)?, &flat(&first)?) < 1e-3);
            assert!(max_diff(&flat(&logits.get(1)?)?, &flat(&second)?) < 1e-3);
        }
        Ok(())
    })
}

#[test]
fn forward_last_is_the_end_of_forward() -> Result<()> {
    on_every_device(|model| {
        let prompt = random_ids(20, 1024, 3);
        let all = model.forward(&ids(&prompt)?, &mut model.new_state(1)?)?;
        assert_eq!(all.dims(), [1, 20, 1024]);
        let end = model.forward_last(&ids(&prompt)?, &mut model.new_state(1)?)?;
        assert_eq!(end.dims(), [1, 1024]);
        assert!(max_diff(&flat(&all.narrow(1, 19, 1)?)?, &flat(&end)?) < 1e-4);
        Ok(())
    })
}

#[test]
fn reset_forgets() -> Result<()> {
    on_every_device(|model| {
        let prompt = random_ids(30, 1024, 4);
        let mut state = model.new_state(1)?;
        let fresh = last(model, &mut state, &prompt)?;
        last(model, &mut state, &random_ids(50, 1024, 5))?;
        assert_eq!((state.position(), state.batch()), (80, 1));
        state.reset()?;
        assert_eq!(state.position(), 0);
        assert_eq!(last(model, &mut state, &prompt)?, fresh);
        Ok(())
    })
}

#[test]
fn no_tokens_change_nothing() -> Result<()> {
    on_every_device(|model| {
        let none = Tensor::zeros((1, 0), DType::U32, &CPU)?;
        let mut state = model.new_state(1)?;
        assert_eq!(model.forward(&none, &mut state)?.dims(), [1, 0, 1024]);
        let want = last(model, &mut model.new_state(1)?, &[5, 6])?;
        last(model, &mut state, &[5])?;
        assert_eq!(model.forward(&none, &mut state)?.dims(), [1, 0, 1024]);
        assert!(max_diff(&last(model, &mut state, &[6])?, &want) < 1e-3);
        refused(model.forward_last(&none, &mut state), &["ids", "at least 1 token"]);
        Ok(())
    })
}

/// Half precision is rounded at every layer: near, not equal.
#[test]
fn half_precision_agrees_loosely() -> Result<()> {
    for device in devices() {
        for goldens in [&DEMO, &QWEN3_5, &QWEN3_5_MOE].into_iter().filter(|g| g.is_here()) {
            for (dtype, bound) in [(DType::BF16, 0.1), (DType::F16, 0.02)] {
                let model = goldens.model(dtype, &device)?;
                assert_eq!(model.dtype(), dtype);
                let g = goldens.prompt(2)?;
                let error = rel_rms(&last(&model, &mut model.new_state(1)?, &g.ids)?, &g.logits_last);
                println!("{dtype:?}: relative error {error:e}");
                assert!(error < bound, "{dtype:?}: relative error {error}");
            }
        }
    }
    Ok(())
}

#[test]
fn ids_of_every_integer_dtype() -> Result<()> {
    let model = Tiny::qwen3_next().model()?;
    let want = flat(&model.forward(&ids(&[1, 2, 3])?, &mut model.new_state(1)?)?)?;
    for dtype in [DType::U8, DType::I64] {
        let got = model.forward(&ids(&[1, 2, 3])?.to_dtype(dtype)?, &mut model.new_state(1)?)?;
        assert_eq!(flat(&got)?, want);
    }
    Ok(())
}

#[test]
fn tied_and_untied_heads() -> Result<()> {
    let untied = Tiny::qwen3_next();
    let mut tied = untied.clone().set("tie_word_embeddings", true);
    tied.remove("lm_head.weight");
    let mut same = untied.clone();
    same.weights.insert("lm_head.weight".into(), tied.weights["model.embed_tokens.weight"].clone());
    assert_eq!(tied.logits(&[3, 1, 2])?, same.logits(&[3, 1, 2])?);
    assert_ne!(tied.logits(&[3, 1, 2])?, untied.logits(&[3, 1, 2])?);
    // Where the embeddings are read from the head's packed weights.
    for dtype in [DType::BF16, DType::F16] {
        let logits = |tiny: &Tiny| {
            let model = tiny.load(dtype)?;
            flat(&model.forward(&ids(&[3, 1, 2])?, &mut model.new_state(1)?)?)
        };
        assert_eq!(logits(&tied)?, logits(&same)?, "{dtype:?}");
    }
    Ok(())
}

#[test]
fn next_token_heads_and_vision_towers_are_skipped() -> Result<()> {
    let plain = Tiny::qwen3_next();
    let mut more = plain.clone();
    for name in ["mtp.fc.weight", "mtp.layers.0.mlp.gate.weight", "model.visual.patch_embed.proj.weight"] {
        more.weights.insert(name.into(), Tensor::zeros(3, DType::F32, &CPU)?);
    }
    assert_eq!(plain.logits(&[1, 2])?, more.logits(&[1, 2])?);
    Ok(())
}

#[test]
fn layers_without_experts() -> Result<()> {
    // Layer 1 by its number, layers 0 and 2 by the step.
    let some = Tiny::qwen3_next().set("mlp_only_layers", vec![1]).set("decoder_sparse_step", 2).fill();
    let kinds: Vec<bool> =
        (0..4).map(|i| some.weights.contains_key(&format!("model.layers.{i}.mlp.gate.weight"))).collect();
    assert_eq!(kinds, [false, false, false, true]);
    assert_eq!(some.logits(&[1, 2])?.len(), 2 * tiny::VOCAB);
    // Dense everywhere: no field of the experts is asked for.
    let fields = ["num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size"];
    let dense = fields.into_iter().fold(Tiny::qwen3_next(), Tiny::unset).fill();
    assert_eq!(dense.logits(&[1, 2])?.len(), 2 * tiny::VOCAB);
    Ok(())
}

#[test]
fn layer_types_default_to_every_fourth() -> Result<()> {
    let listed = Tiny::qwen3_next();
    let default = listed.clone().unset("layer_types");
    assert_eq!(listed.logits(&[1, 2])?, default.logits(&[1, 2])?);
    let second = listed.clone().unset("layer_types").set("full_attention_interval", 2).fill();
    assert!(second.weights.contains_key("model.layers.1.self_attn.q_proj.weight"));
    assert_eq!(second.logits(&[1, 2])?.len(), 2 * tiny::VOCAB);
    Ok(())
}

#[test]
fn fused_experts_are_the_single_ones() -> Result<()> {
    let single = Tiny::qwen3_next();
    let mut fused = single.clone();
    fused.fuse_experts()?;
    assert_eq!(single.logits(&[1, 2, 3])?, fused.logits(&[1, 2, 3])?);
    Ok(())
}

#[test]
fn no_shared_expert() -> Result<()> {
    let without = Tiny::qwen3_next().set("shared_expert_intermediate_size", 0).fill();
    assert!(!without.weights.contains_key("model.layers.0.mlp.shared_expert_gate.weight"));
    assert_eq!(without.logits(&[1])?.len(), tiny::VOCAB);
    Ok(())
}

/// Weights that bf16 or f16 holds exactly are kept so on the CPU, in a model that runs in f32.
#[test]
fn narrow_weights_are_a_matter_of_memory_only() -> Result<()> {
    for dtype in [DType::BF16, DType::F16] {
        let mut narrow = Tiny::qwen3_next();
        for weight in narrow.weights.values_mut() {
            *weight = weight.to_dtype(dtype)?.to_dtype(DType::F32)?;
        }
        // One value that neither of them holds, in each matrix: far below what the logits show.
        let mut wide = narrow.clone();
        for weight in wide.weights.values_mut().filter(|w| w.rank() > 1) {
            let mut values = flat(weight)?;
            values[0] = f32::from_bits(values[0].to_bits() | 1);
            *weight = Tensor::from_vec(values, weight.dims(), &CPU)?;
        }
        let tokens = random_ids(40, tiny::VOCAB as u32, 6);
        assert!(max_diff(&narrow.logits(&tokens)?, &wide.logits(&tokens)?) < 1e-4, "{dtype:?}");
    }
    Ok(())
}

/// An expert that no token takes may hold anything.
#[test]
fn only_chosen_experts_run() -> Result<()> {
    let mut tiny = Tiny::qwen3_next().set("num_experts_per_tok", 1);
    for layer in 0..4 {
        // Its score lies between those of experts 1 and 2, so it is never the best.
        let name = format!("model.layers.{layer}.mlp.gate.weight");
        let mut rows = tiny.weights[&name].to_vec2::<f32>()?;
        rows[0] = rows[1].iter().zip(&rows[2]).map(|(a, b)| (a + b) / 2.).collect();
        tiny.weights.insert(name, Tensor::new(rows, &CPU)?);
    }
    let want = tiny.logits(&[1, 2, 3])?;
    for layer in 0..4 {
        let name = format!("model.layers.{layer}.mlp.experts.0.down_proj.weight");
        let nan = (tiny.weights[&name].clone() * f64::NAN)?;
        tiny.weights.insert(name, nan);
    }
    assert_eq!(tiny.logits(&[1, 2, 3])?, want);
    Ok(())
}

#[test]
fn the_position_limit_is_an_error() -> Result<()> {
    let model = Tiny::qwen3_next().set("max_position_embeddings", 8).model()?;
    let mut state = model.new_state(1)?;
    refused(model.forward(&ids(&[1; 9])?, &mut state), &["max_position_embeddings (8)", "9 after 0"]);
    last(&model, &mut state, &[1; 6])?;
    refused(model.forward(&ids(&[1; 3])?, &mut state), &["max_position_embeddings (8)", "3 after 6"]);
    // The refusals left the state as it was.
    let end = last(&model, &mut state, &[1; 2])?;
    assert!(max_diff(&end, &last(&model, &mut model.new_state(1)?, &[1; 8])?) < 1e-4);
    refused(model.forward(&ids(&[1])?, &mut state), &["max_position_embeddings (8)", "1 after 8"]);
    Ok(())
}

#[test]
fn bad_ids_and_states_are_errors() -> Result<()> {
    let model = Tiny::qwen3_next().model()?;
    let mut state = model.new_state(1)?;
    let v = tiny::VOCAB as u32;
    refused(model.forward(&ids(&[0, v])?, &mut state), &["ids", "vocab_size (32)", "got 32"]);
    let negative = Tensor::new(&[[-1i64]], &CPU)?;
    refused(model.forward(&negative, &mut state), &["ids", "vocab_size (32)", "got -1"]);
    refused(model.forward(&Tensor::new(&[1u32], &CPU)?, &mut state), &["ids", "[batch, tokens]", "[1]"]);
    refused(model.forward_last(&Tensor::new(&[1u32], &CPU)?, &mut state), &["ids", "[batch, tokens]", "[1]"]);
    refused(model.forward(&Tensor::new(&[[1f32]], &CPU)?, &mut state), &["ids", "U32", "F32"]);
    refused(model.forward(&Tensor::new(&[[1u32], [1]], &CPU)?, &mut state), &["batch", "(1)", "got 2"]);
    refused(model.new_state(0), &["batch", "at least 1", "got 0"]);
    let mut other = Tiny::qwen3_next().model()?.new_state(1)?;
    refused(model.forward(&ids(&[1])?, &mut other), &["state", "another model"]);
    // None of it moved the state.
    assert_eq!(state.position(), 0);
    assert_eq!(last(&model, &mut state, &[1])?, last(&model, &mut model.new_state(1)?, &[1])?);
    Ok(())
}

#[test]
fn every_missing_or_misshapen_weight_is_named() -> Result<()> {
    let tiny = Tiny::qwen3_next();
    // The layers repeat themselves: one of each kind.
    let names = tiny.weights.keys().filter(|n| !n.contains("layers.1.") && !n.contains("layers.2."));
    for name in names {
        let mut missing = tiny.clone();
        missing.remove(name);
        refused(missing.model(), &[name]);
        let mut misshapen = tiny.clone();
        let mut dims = tiny.weights[name].dims().to_vec();
        dims[0] += 1;
        misshapen.weights.insert(name.clone(), Tensor::zeros(dims.clone(), DType::F32, &CPU)?);
        refused(misshapen.model(), &[name, &format!("{dims:?}")]);
    }
    Ok(())
}

#[test]
fn other_dtypes_are_refused() {
    let tiny = Tiny::qwen3_next();
    refused(tiny.load(DType::F64), &["dtype", "F64"]);
    refused(tiny.load(DType::U8), &["dtype", "U8"]);
}
