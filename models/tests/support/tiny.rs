//! A Qwen3-Next of a few thousand random weights, with any configuration.

use candle_core::{DType, Device, Result, Tensor};
use candle_gdn_models::{CausalLm, DraftHeadChoice, ModelConfig};
use candle_nn::VarBuilder;
use serde_json::{json, Value};
use std::collections::HashMap;

pub const VOCAB: usize = 32;
const HIDDEN: usize = 16;

#[derive(Clone)]
pub struct Tiny {
    pub config: Value,
    pub weights: HashMap<String, Tensor>,
}

impl Tiny {
    pub fn qwen3_next() -> Self {
        let linear = "linear_attention";
        let config = json!({
            "model_type": "qwen3_next",
            "architectures": ["Qwen3NextForCausalLM"],
            "vocab_size": VOCAB,
            "hidden_size": HIDDEN,
            "intermediate_size": 24,
            "num_hidden_layers": 4,
            "layer_types": [linear, linear, linear, "full_attention"],
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "hidden_act": "silu",
            "attention_bias": false,
            "max_position_embeddings": 64,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.25,
            "tie_word_embeddings": false,
            "linear_conv_kernel_dim": 4,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "mlp_only_layers": [],
            "decoder_sparse_step": 1,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 12,
            "shared_expert_intermediate_size": 20,
            "norm_topk_prob": true,
            "eos_token_id": [0, 7],
        });
        Self { config, weights: HashMap::new() }.fill()
    }

    /// Sets a field of the configuration; the weights stay as they are.
    pub fn set(mut self, field: &str, value: impl Into<Value>) -> Self {
        self.config[field] = value.into();
        self
    }

    pub fn unset(mut self, field: &str) -> Self {
        self.config.as_object_mut().expect("an object").remove(field);
        self
    }

    /// Makes exactly the weights that the configuration asks for.
    pub fn fill(mut self) -> Self {
        self.weights.clear();
        let n = |field: &str| self.config[field].as_u64().unwrap_or(0) as usize;
        let (h, vocab) = (n("hidden_size"), n("vocab_size"));
        let mut shapes: Vec<(String, Vec<usize>)> = vec![
            ("model.embed_tokens.weight".into(), vec![vocab, h]),
            ("model.norm.weight".into(), vec![h]),
            ("lm_head.weight".into(), vec![vocab, h]),
        ];
        for i in 0..n("num_hidden_layers") {
            let mut add = |name: &str, dims: &[usize]| shapes.push((format!("model.layers.{i}.{name}"), dims.to_vec()));
            add("input_layernorm.weight", &[h]);
            add("post_attention_layernorm.weight", &[h]);
            if self.is_full_attention(i) {
                let (q, kv, d) = (n("num_attention_heads"), n("num_key_value_heads"), n("head_dim"));
                add("self_attn.q_proj.weight", &[2 * q * d, h]);
                add("self_attn.k_proj.weight", &[kv * d, h]);
                add("self_attn.v_proj.weight", &[kv * d, h]);
                add("self_attn.o_proj.weight", &[h, q * d]);
                add("self_attn.q_norm.weight", &[d]);
                add("self_attn.k_norm.weight", &[d]);
            } else {
                let (hk, hv) = (n("linear_num_key_heads"), n("linear_num_value_heads"));
                let (k, v) = (n("linear_key_head_dim"), n("linear_value_head_dim"));
                add("linear_attn.in_proj_qkvz.weight", &[2 * hk * k + 2 * hv * v, h]);
                add("linear_attn.in_proj_ba.weight", &[2 * hv, h]);
                add("linear_attn.conv1d.weight", &[2 * hk * k + hv * v, 1, n("linear_conv_kernel_dim")]);
                add("linear_attn.A_log", &[hv]);
                add("linear_attn.dt_bias", &[hv]);
                add("linear_attn.norm.weight", &[v]);
                add("linear_attn.out_proj.weight", &[h, hv * v]);
            }
            let mut mlp = |at: &str, inner: usize| {
                add(&format!("{at}.gate_proj.weight"), &[inner, h]);
                add(&format!("{at}.up_proj.weight"), &[inner, h]);
                add(&format!("{at}.down_proj.weight"), &[h, inner]);
            };
            if self.is_sparse(i) {
                for j in 0..n("num_experts") {
                    mlp(&format!("mlp.experts.{j}"), n("moe_intermediate_size"));
                }
                if n("shared_expert_intermediate_size") > 0 {
                    mlp("mlp.shared_expert", n("shared_expert_intermediate_size"));
                    add("mlp.shared_expert_gate.weight", &[1, h]);
                }
                add("mlp.gate.weight", &[n("num_experts"), h]);
            } else {
                mlp("mlp", n("intermediate_size"));
            }
        }
        self.weights = shapes.into_iter().map(|(name, dims)| (name.clone(), random(&name, &dims))).collect();
        self
    }

    pub fn has_draft_head(&self) -> bool {
        self.weights.contains_key("mtp.fc.weight")
    }

    fn is_full_attention(&self, i: usize) -> bool {
        match self.config["layer_types"].as_array() {
            Some(list) => list[i] == "full_attention",
            None => (i as u64 + 1).is_multiple_of(self.config["full_attention_interval"].as_u64().unwrap_or(4)),
        }
    }

    fn is_sparse(&self, i: usize) -> bool {
        let only = self.config["mlp_only_layers"].as_array().is_some_and(|l| l.contains(&json!(i)));
        let step = self.config["decoder_sparse_step"].as_u64().unwrap_or(1) as usize;
        self.config["num_experts"].is_u64() && !only && (i + 1).is_multiple_of(step)
    }

    pub fn remove(&mut self, name: &str) {
        assert!(self.weights.remove(name).is_some(), "no weight {name}");
    }

    /// Replaces the experts' single tensors by the two that hold all of a layer.
    pub fn fuse_experts(&mut self) -> Result<()> {
        let experts = self.config["num_experts"].as_u64().unwrap_or(0);
        for i in 0..4 {
            let at = format!("model.layers.{i}.mlp.experts");
            let (mut gate_up, mut down) = (Vec::new(), Vec::new());
            for j in 0..experts {
                let mut take = |name: &str| self.weights.remove(&format!("{at}.{j}.{name}.weight")).expect("a weight");
                gate_up.push(Tensor::cat(&[take("gate_proj"), take("up_proj")], 0)?);
                down.push(take("down_proj"));
            }
            self.weights.insert(format!("{at}.gate_up_proj"), Tensor::stack(&gate_up, 0)?);
            self.weights.insert(format!("{at}.down_proj"), Tensor::stack(&down, 0)?);
        }
        Ok(())
    }

    pub fn model(&self) -> Result<CausalLm> {
        self.load(DType::F32)
    }

    pub fn load(&self, dtype: DType) -> Result<CausalLm> {
        self.load_with(dtype, DraftHeadChoice::Off)
    }

    pub fn load_with(&self, dtype: DType, head: DraftHeadChoice) -> Result<CausalLm> {
        CausalLm::loader(&self.model_config()?).draft_head(head).load(self.var_builder(dtype, &Device::Cpu))
    }

    pub fn model_config(&self) -> Result<ModelConfig> {
        ModelConfig::from_json(&self.config.to_string())
    }

    pub fn var_builder(&self, dtype: DType, device: &Device) -> VarBuilder<'static> {
        VarBuilder::from_tensors(self.weights.clone(), dtype, device)
    }

    /// With a draft head: its layer has the shapes of the model's last one, which is of softmax attention.
    pub fn with_draft_head(mut self) -> Self {
        let last = format!("model.layers.{}.", self.config["num_hidden_layers"].as_u64().unwrap_or(0) - 1);
        let h = self.config["hidden_size"].as_u64().unwrap_or(0) as usize;
        let layer = self.weights.iter().filter_map(|(name, weight)| {
            Some((format!("mtp.layers.0.{}", name.strip_prefix(&last)?), weight.dims().to_vec()))
        });
        let mut shapes: Vec<(String, Vec<usize>)> = layer.collect();
        shapes.push(("mtp.fc.weight".into(), vec![h, 2 * h]));
        for norm in ["pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"] {
            shapes.push((format!("mtp.{norm}.weight"), vec![h]));
        }
        self.weights.extend(shapes.into_iter().map(|(name, dims)| (name.clone(), random(&name, &dims))));
        self
    }

    /// Logits of every position, one after the other.
    pub fn logits(&self, ids: &[u32]) -> Result<Vec<f32>> {
        let model = self.model()?;
        let ids = Tensor::from_slice(ids, (1, ids.len()), &Device::Cpu)?;
        model.forward(&ids, &mut model.new_state(1)?)?.flatten_all()?.to_vec1()
    }
}

/// In (-0.5, 0.5), from the name alone: two models of one shape have the same weights.
fn random(name: &str, dims: &[usize]) -> Tensor {
    let mut x = name.bytes().fold(0xcbf2_9ce4_8422_2325u64, |h, b| (h ^ b as u64).wrapping_mul(0x100_0000_01b3));
    let n = dims.iter().product();
    let mut data = Vec::with_capacity(n);
    for _ in 0..n {
        x = x.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        data.push((x >> 40) as f32 / (1 << 24) as f32 - 0.5);
    }
    Tensor::from_vec(data, dims, &Device::Cpu).expect("a tensor")
}
