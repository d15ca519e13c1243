//! A pool of a small model.

use super::StateLayout;
use crate::causal_lm::CausalLm;
use crate::config::ModelConfig;
use crate::loader::DraftHeadChoice;
use crate::parallel::{shard_of, Collective};
use candle_core::{DType, Device, Result, Tensor, D};
use candle_nn::VarBuilder;
use std::collections::HashMap;
use std::sync::Arc;

pub(crate) const VOCAB: usize = 24;
const HIDDEN: usize = 16;

/// Two Gated DeltaNet and two softmax layers with random matrices of this size. Where it is small, the next token depends on the
/// last one above all, and the draft head of such a model predicts it.
pub(crate) fn model(size: f64) -> Result<CausalLm> {
    let vb = VarBuilder::from_tensors(weights(size)?, DType::F32, &Device::Cpu);
    CausalLm::loader(&config()?).draft_head(DraftHeadChoice::On).load(vb)
}

/// A rank's shard of such a model.
pub(crate) fn shard(weights: HashMap<String, Tensor>, group: Arc<dyn Collective>) -> Result<CausalLm> {
    let (config, vb) = (config()?, VarBuilder::from_tensors(weights, DType::F32, &Device::Cpu));
    let vb = shard_of(vb, &config, &*group)?;
    CausalLm::loader(&config).group(group).load(vb)
}

fn config() -> Result<ModelConfig> {
    let json = serde_json::json!({
        "model_type": "qwen3_next", "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": 24,
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "hidden_act": "silu",
        "max_position_embeddings": 256, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25, "tie_word_embeddings": false, "linear_conv_kernel_dim": 4,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    });
    ModelConfig::from_json(&json.to_string())
}

pub(crate) fn weights(size: f64) -> Result<HashMap<String, Tensor>> {
    let mut weights = HashMap::new();
    let mut add = |name: String, dims: &[usize]| -> Result<()> {
        let size = if name.contains("_proj") { size as f32 } else { 0.4 };
        weights.insert(name, Tensor::randn(0f32, size, dims, &Device::Cpu)?);
        Ok(())
    };
    add("model.embed_tokens.weight".into(), &[VOCAB, HIDDEN])?;
    add("model.norm.weight".into(), &[HIDDEN])?;
    add("lm_head.weight".into(), &[VOCAB, HIDDEN])?;
    for i in 0..4 {
        let mut add = |name: &str, dims: &[usize]| add(format!("model.layers.{i}.{name}"), dims);
        add("input_layernorm.weight", &[HIDDEN])?;
        add("post_attention_layernorm.weight", &[HIDDEN])?;
        for (name, rows, columns) in [("gate", 24, HIDDEN), ("up", 24, HIDDEN), ("down", HIDDEN, 24)] {
            add(&format!("mlp.{name}_proj.weight"), &[rows, columns])?;
        }
        if i % 2 == 1 {
            for (name, rows) in [("q", 2 * 4 * 16), ("k", 2 * 16), ("v", 2 * 16)] {
                add(&format!("self_attn.{name}_proj.weight"), &[rows, HIDDEN])?;
            }
            add("self_attn.o_proj.weight", &[HIDDEN, 4 * 16])?;
            add("self_attn.q_norm.weight", &[16])?;
            add("self_attn.k_norm.weight", &[16])?;
        } else {
            add("linear_attn.in_proj_qkvz.weight", &[2 * 16 + 2 * 32, HIDDEN])?;
            add("linear_attn.in_proj_ba.weight", &[8, HIDDEN])?;
            add("linear_attn.conv1d.weight", &[2 * 16 + 32, 1, 4])?;
            add("linear_attn.A_log", &[4])?;
            add("linear_attn.dt_bias", &[4])?;
            add("linear_attn.norm.weight", &[8])?;
            add("linear_attn.out_proj.weight", &[HIDDEN, 32])?;
        }
    }
    // A draft head like the last layer.
    let last = weights
        .iter()
        .filter_map(|(name, x)| Some((format!("mtp.layers.0.{}", name.strip_prefix("model.layers.3.")?), x.clone())));
    let last: Vec<(String, Tensor)> = last.collect();
    weights.extend(last);
    // All of the embedding, and this much of the hidden state.
    let hidden_part = Tensor::randn(0f32, size as f32, (HIDDEN, HIDDEN), &Device::Cpu)?;
    let fc = Tensor::cat(&[Tensor::eye(HIDDEN, DType::F32, &Device::Cpu)?, hidden_part], 1)?;
    weights.insert("mtp.fc.weight".into(), fc);
    weights.insert("mtp.pre_fc_norm_embedding.weight".into(), Tensor::zeros(HIDDEN, DType::F32, &Device::Cpu)?);
    weights.insert("mtp.pre_fc_norm_hidden.weight".into(), Tensor::randn(0f32, 0.4, HIDDEN, &Device::Cpu)?);
    weights.insert("mtp.norm.weight".into(), weights["model.norm.weight"].clone());
    Ok(weights)
}

#[track_caller]
fn assert_near(got: &Tensor, want: &Tensor, what: &str) -> Result<()> {
    assert_eq!(got.dims(), want.dims(), "{what}");
    let error = (got - want)?.abs()?.flatten_all()?.max(D::Minus1)?.to_scalar::<f32>()?;
    assert!(error < 1e-3, "{what}: {error:e}");
    Ok(())
}

#[test]
fn a_pass_that_fails_breaks_its_sequences_only() -> Result<()> {
    let model = model(0.4)?;
    let mut pool = model.new_sequences(2, 64)?;
    let (a, b) = (pool.begin()?, pool.begin()?);
    model.feed_only(&mut pool, &[(a, &[1, 2]), (b, &[3])])?;
    let snapshot = pool.snapshot(a)?;
    pool.begin_write(&[a.slot as usize]); // and nothing after
    let broken = |result: Result<()>| assert!(result.unwrap_err().to_string().contains("failed half-way"));
    broken(model.feed_only(&mut pool, &[(b, &[1]), (a, &[1])]));
    broken(pool.fork(a).map(drop));
    broken(pool.snapshot(a).map(drop));
    broken(model.verify(&mut pool, &[(a, &[1])]).map(drop));
    model.feed_only(&mut pool, &[(b, &[1])])?;
    pool.restore(a, &snapshot)?;
    model.feed_only(&mut pool, &[(b, &[1]), (a, &[1])])?;
    pool.begin_write(&[a.slot as usize]);
    pool.end(a)?;
    let a = pool.begin()?;
    model.feed_only(&mut pool, &[(a, &[1])])
}

/// The pool of `CausalLm::forward` grows.
#[test]
fn a_pool_that_grows_forgets_nothing() -> Result<()> {
    let model = model(0.4)?;
    let tokens: Vec<u32> = (0..60).map(|i| i * 5 % VOCAB as u32).collect();
    for layout in [StateLayout::Plain, StateLayout::Ring] {
        let (mut small, mut large) =
            (model.new_sequences_with(2, 8, layout)?, model.new_sequences_with(2, 64, layout)?);
        let (s, l) = ([small.begin()?, small.begin()?], [large.begin()?, large.begin()?]);
        for (i, part) in [0..7, 7..20, 20..60].into_iter().enumerate() {
            small.grow_to([8, 32, 64][i])?;
            let more = &tokens[part];
            let got = model.feed_hidden(&mut small, &[(s[0], more), (s[1], &more[1..])])?;
            let want = model.feed_hidden(&mut large, &[(l[0], more), (l[1], &more[1..])])?;
            assert_near(&got, &want, "grown")?;
        }
        assert!(model.feed(&mut small, &[(s[0], &[1; 5])]).is_err(), "there is room for 64");
    }
    Ok(())
}
