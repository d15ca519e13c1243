//! GGUF files out of a [`Tiny`], as llama.cpp's converter makes them of these models.

use crate::demo::DEMO;
use crate::tiny::Tiny;
use candle_core::quantized::gguf_file::{self, Value};
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{DType, Device, Result, Tensor};
use candle_gdn_models::{CausalLm, DraftHeadChoice, GgufFile, ModelConfig};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

/// A file to be.
#[derive(Clone)]
pub struct GgufOfTiny {
    pub metadata: BTreeMap<String, Value>,
    /// In f32, with the type they are written in.
    pub tensors: BTreeMap<String, (Tensor, GgmlDType)>,
}

/// What the converter does with the Gated DeltaNet layers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Layout {
    /// `qwen3next`: value heads as they are, b and a interleaved.
    Qwen3Next,
    /// The same, q, k, v and z interleaved as well: files made before that was changed.
    OldQwen3Next,
    /// `qwen35moe` (`qwen35` without experts): value heads tiled, all projections apart.
    Qwen3_5,
}

impl GgufOfTiny {
    /// All in f32.
    pub fn new(tiny: &Tiny, layout: Layout) -> Result<Self> {
        let n = |field: &str| tiny.config[field].as_u64().unwrap_or(0) as usize;
        let architecture = match (layout, n("num_experts")) {
            (Layout::Qwen3_5, 0) => "qwen35",
            (Layout::Qwen3_5, _) => "qwen35moe",
            _ => "qwen3next",
        };
        let mut file = Self { metadata: BTreeMap::new(), tensors: BTreeMap::new() };
        file.metadata.insert("general.architecture".into(), Value::String(architecture.into()));
        let mut set = |name: &str, value: Value| file.metadata.insert(format!("{architecture}.{name}"), value);
        for (name, value) in [
            ("block_count", n("num_hidden_layers") + usize::from(tiny.has_draft_head())),
            ("context_length", n("max_position_embeddings")),
            ("embedding_length", n("hidden_size")),
            ("feed_forward_length", n("intermediate_size")),
            ("attention.head_count", n("num_attention_heads")),
            ("attention.head_count_kv", n("num_key_value_heads")),
            ("attention.key_length", n("head_dim")),
            ("attention.value_length", n("head_dim")),
            ("expert_count", n("num_experts")),
            ("expert_used_count", n("num_experts_per_tok")),
            ("expert_feed_forward_length", n("moe_intermediate_size")),
            ("expert_shared_feed_forward_length", n("shared_expert_intermediate_size")),
            ("rope.dimension_count", n("head_dim") / 4),
            ("ssm.conv_kernel", n("linear_conv_kernel_dim")),
            ("ssm.state_size", n("linear_key_head_dim")),
            ("ssm.group_count", n("linear_num_key_heads")),
            ("ssm.time_step_rank", n("linear_num_value_heads")),
            ("ssm.inner_size", n("linear_num_value_heads") * n("linear_value_head_dim")),
            ("full_attention_interval", 4),
        ] {
            set(name, Value::U32(value as u32));
        }
        if tiny.has_draft_head() {
            set("nextn_predict_layers", Value::U32(1));
        }
        set("attention.layer_norm_rms_epsilon", Value::F32(1e-6));
        set("rope.freq_base", Value::F32(tiny.config["rope_theta"].as_f64().unwrap_or(0.) as f32));
        for (name, weight) in &tiny.weights {
            file.convert(tiny, layout, name, weight)?;
        }
        if n("num_experts") > 0 {
            file.stack_experts(tiny)?;
        }
        Ok(file)
    }

    /// Writes the tensors that `of` gives a type for in that.
    pub fn typed(mut self, of: impl Fn(&str) -> Option<GgmlDType>) -> Self {
        for (name, (_, dtype)) in &mut self.tensors {
            *dtype = of(name).unwrap_or(*dtype);
        }
        self
    }

    /// Writes all matrices that are quantised in practice in `dtype`.
    pub fn quantized(self, dtype: GgmlDType) -> Self {
        let kept = ["norm", "_inp", "ssm_a", "ssm_dt", "conv1d"];
        self.typed(|name| (!kept.iter().any(|part| name.contains(part)) || name.contains("alpha")).then_some(dtype))
    }

    /// What the converter writes of a `tokenizer.json`.
    pub fn add_tokenizer(&mut self, json: &serde_json::Value, pre: &str) {
        let string = |text: &str| Value::String(text.to_string());
        let word = |json: &serde_json::Value| json.as_str().expect("a string").to_string();
        let number = |json: &serde_json::Value| json.as_u64().expect("a number") as usize;
        let vocab = json["model"]["vocab"].as_object().expect("a vocabulary");
        let added = json["added_tokens"].as_array().expect("added tokens");
        let last = vocab.values().chain(added.iter().map(|added| &added["id"])).map(number).max().expect("tokens");
        let count = self.tensors["token_embd.weight"].0.dims()[0].max(last + 1);
        let mut tokens = vec![(string("?"), Value::I32(1)); count];
        for (token, id) in vocab {
            tokens[number(id)] = (string(token), Value::I32(1));
        }
        for added in added {
            let control = Value::I32(if added["special"] == true { 3 } else { 4 });
            tokens[number(&added["id"])] = (Value::String(word(&added["content"])), control);
        }
        let (tokens, types) = tokens.into_iter().unzip();
        let merge = |merge: &serde_json::Value| match merge.as_array() {
            Some(pair) => Value::String(format!("{} {}", word(&pair[0]), word(&pair[1]))),
            None => Value::String(word(merge)),
        };
        let merges = json["model"]["merges"].as_array().expect("merges").iter().map(merge).collect();
        for (key, value) in [
            ("model", string("gpt2")),
            ("pre", string(pre)),
            ("tokens", Value::Array(tokens)),
            ("token_type", Value::Array(types)),
            ("merges", Value::Array(merges)),
        ] {
            self.metadata.insert(format!("tokenizer.ggml.{key}"), value);
        }
    }

    pub fn write(&self, path: &Path) -> Result<()> {
        self.write_some(path, |_| true)
    }

    pub fn write_some(&self, path: &Path, which: impl Fn(&str) -> bool) -> Result<()> {
        let mut tensors = Vec::new();
        for (name, (tensor, dtype)) in self.tensors.iter().filter(|(name, _)| which(name)) {
            tensors.push((name.as_str(), QTensor::quantize(tensor, *dtype)?));
        }
        let metadata: Vec<_> = self.metadata.iter().map(|(key, value)| (key.as_str(), value)).collect();
        let tensors: Vec<_> = tensors.iter().map(|(name, tensor)| (*name, tensor)).collect();
        gguf_file::write(&mut std::fs::File::create(path)?, &metadata, &tensors)
    }

    /// The two files that the converter makes of a model where it is told to: without the draft head, and the head with what it
    /// shares with the model.
    #[allow(dead_code)]
    pub fn apart(&self) -> [Self; 2] {
        let in_metadata = |name: &str| self.metadata.iter().find(|(key, _)| key.ends_with(name)).expect("an entry");
        let (key, blocks) = in_metadata(".block_count");
        let layers = blocks.to_u32().expect("a number") - 1;
        let in_head = |name: &str| name.starts_with(&format!("blk.{layers}."));
        let [mut model, mut head] = [self.clone(), self.clone()];
        model.tensors.retain(|name, _| !in_head(name));
        head.tensors.retain(|name, _| in_head(name) || !name.starts_with("blk."));
        model.metadata.insert(key.clone(), Value::U32(layers));
        model.metadata.remove(in_metadata(".nextn_predict_layers").0);
        [model, head]
    }

    /// The model of the file, on the CPU in f32.
    pub fn load(&self) -> Result<CausalLm> {
        let (_dir, path) = in_a_folder("tiny.gguf");
        self.write(&path)?;
        load(&path)
    }

    /// The file, and the same with every tensor in f32.
    pub fn files(&self) -> Result<Files> {
        let (dir, path) = in_a_folder("tiny.gguf");
        self.write(&path)?;
        let wide = dir.path().join("f32.gguf");
        dequantized(&path, &wide)?;
        Ok(Files { path, wide, _dir: dir })
    }

    fn add(&mut self, name: String, tensor: Tensor) -> Result<()> {
        self.tensors.insert(name, (tensor.to_dtype(DType::F32)?.contiguous()?, GgmlDType::F32));
        Ok(())
    }

    fn convert(&mut self, tiny: &Tiny, layout: Layout, name: &str, weight: &Tensor) -> Result<()> {
        let whole = match name {
            "model.embed_tokens.weight" => Some("token_embd.weight"),
            "model.norm.weight" => Some("output_norm.weight"),
            "lm_head.weight" => Some("output.weight"),
            _ => None,
        };
        // The draft head is one more block.
        let head = format!("model.layers.{}", tiny.config["num_hidden_layers"]);
        let name = match name {
            "mtp.fc.weight" => format!("{head}.nextn.eh_proj.weight"),
            "mtp.pre_fc_norm_embedding.weight" => format!("{head}.nextn.enorm.weight"),
            "mtp.pre_fc_norm_hidden.weight" => format!("{head}.nextn.hnorm.weight"),
            "mtp.norm.weight" => format!("{head}.nextn.shared_head_norm.weight"),
            name => name.replace("mtp.layers.0", &head),
        };
        let name = name.as_str();
        let weight = match name.ends_with("norm.weight") && !name.ends_with("linear_attn.norm.weight") {
            true => (weight + 1.)?,
            false => weight.clone(),
        };
        if let Some(whole) = whole {
            return self.add(whole.into(), weight);
        }
        let Some((layer, name)) = name.strip_prefix("model.layers.").and_then(|name| name.split_once('.')) else {
            panic!("no name for {name}")
        };
        if let Some(name) = name.strip_prefix("linear_attn.") {
            return self.convert_gdn(tiny, layout, layer, name, weight);
        }
        if name.starts_with("mlp.experts.") {
            return Ok(()); // together, later
        }
        let to = match name {
            name if name.starts_with("nextn.") => name,
            "input_layernorm.weight" => "attn_norm.weight",
            "post_attention_layernorm.weight" => "post_attention_norm.weight",
            "self_attn.q_proj.weight" => "attn_q.weight",
            "self_attn.k_proj.weight" => "attn_k.weight",
            "self_attn.v_proj.weight" => "attn_v.weight",
            "self_attn.o_proj.weight" => "attn_output.weight",
            "self_attn.q_norm.weight" => "attn_q_norm.weight",
            "self_attn.k_norm.weight" => "attn_k_norm.weight",
            "mlp.gate_proj.weight" => "ffn_gate.weight",
            "mlp.up_proj.weight" => "ffn_up.weight",
            "mlp.down_proj.weight" => "ffn_down.weight",
            "mlp.gate.weight" => "ffn_gate_inp.weight",
            "mlp.shared_expert_gate.weight" => "ffn_gate_inp_shexp.weight",
            "mlp.shared_expert.gate_proj.weight" => "ffn_gate_shexp.weight",
            "mlp.shared_expert.up_proj.weight" => "ffn_up_shexp.weight",
            "mlp.shared_expert.down_proj.weight" => "ffn_down_shexp.weight",
            other => panic!("no name for {other}"),
        };
        // A row as a vector, as the real files have it.
        let weight = if to == "ffn_gate_inp_shexp.weight" { weight.flatten_all()? } else { weight };
        self.add(format!("blk.{layer}.{to}"), weight)
    }

    fn convert_gdn(&mut self, tiny: &Tiny, layout: Layout, layer: &str, name: &str, weight: Tensor) -> Result<()> {
        let n = |field: &str| tiny.config[field].as_u64().unwrap_or(0) as usize;
        let (heads, key, value) = (n("linear_num_key_heads"), n("linear_key_head_dim"), n("linear_value_head_dim"));
        let r = n("linear_num_value_heads") / heads;
        let tiled = layout == Layout::Qwen3_5;
        let at = |to: &str| format!("blk.{layer}.{to}");
        // Rows of value heads, of `size` each.
        let moved = |x: &Tensor, size: usize| match tiled {
            true => {
                let rest = x.elem_count() / (heads * r * size);
                x.reshape((heads, r, size, rest))?.transpose(0, 1)?.contiguous()?.reshape(x.shape())
            }
            false => Ok(x.clone()),
        };
        match name {
            "in_proj_qkvz.weight" if layout == Layout::OldQwen3Next => self.add(at("ssm_in.weight"), weight),
            "in_proj_qkvz.weight" => {
                let hidden = weight.dim(1)?;
                let by_head = weight.reshape((heads, 2 * (key + r * value), hidden))?;
                let part = |from: usize, n: usize| by_head.narrow(1, from, n)?.reshape((heads * n, hidden));
                let (q, k) = (part(0, key)?, part(key, key)?);
                let (v, z) = (part(2 * key, r * value)?, part(2 * key + r * value, r * value)?);
                self.add(at("attn_qkv.weight"), Tensor::cat(&[q, k, moved(&v, value)?], 0)?)?;
                self.add(at("attn_gate.weight"), moved(&z, value)?)
            }
            "in_proj_ba.weight" if !tiled => self.add(at("ssm_ba.weight"), weight),
            "in_proj_ba.weight" => {
                let hidden = weight.dim(1)?;
                let by_head = weight.reshape((heads, 2 * r, hidden))?;
                let part = |from: usize| by_head.narrow(1, from, r)?.reshape((heads * r, hidden));
                self.add(at("ssm_beta.weight"), moved(&part(0)?, 1)?)?;
                self.add(at("ssm_alpha.weight"), moved(&part(r)?, 1)?)
            }
            "conv1d.weight" => {
                let weight = weight.squeeze(1)?;
                let v = weight.narrow(0, 2 * heads * key, heads * r * value)?.contiguous()?;
                let qk = weight.narrow(0, 0, 2 * heads * key)?;
                self.add(at("ssm_conv1d.weight"), Tensor::cat(&[qk, moved(&v, value)?], 0)?)
            }
            "A_log" => self.add(at("ssm_a"), moved(&weight.exp()?.neg()?, 1)?),
            "dt_bias" => self.add(at("ssm_dt.bias"), moved(&weight, 1)?),
            "norm.weight" => self.add(at("ssm_norm.weight"), weight),
            "out_proj.weight" => {
                let columns = moved(&weight.t()?.contiguous()?, value)?;
                self.add(at("ssm_out.weight"), columns.t()?)
            }
            other => panic!("no name for {other}"),
        }
    }

    fn stack_experts(&mut self, tiny: &Tiny) -> Result<()> {
        let n = |field: &str| tiny.config[field].as_u64().unwrap_or(0) as usize;
        for layer in 0..n("num_hidden_layers") + usize::from(tiny.has_draft_head()) {
            let at = match layer == n("num_hidden_layers") {
                true => "mtp.layers.0".to_string(),
                false => format!("model.layers.{layer}"),
            };
            for part in ["gate", "up", "down"] {
                let of = |j: usize| &tiny.weights[&format!("{at}.mlp.experts.{j}.{part}_proj.weight")];
                let experts: Vec<_> = (0..n("num_experts")).map(of).collect();
                self.add(format!("blk.{layer}.ffn_{part}_exps.weight"), Tensor::stack(&experts, 0)?)?;
            }
        }
        Ok(())
    }
}

pub struct Files {
    pub path: PathBuf,
    pub wide: PathBuf,
    _dir: TempDir,
}

/// A file of `name` in a folder of its own.
pub fn in_a_folder(name: &str) -> (TempDir, PathBuf) {
    let dir = tempfile::tempdir().expect("a folder");
    let path = dir.path().join(name);
    (dir, path)
}

/// The same file with every tensor in f32.
pub fn dequantized(path: &Path, to: &Path) -> Result<()> {
    let mut reader = std::fs::File::open(path)?;
    let content = gguf_file::Content::read(&mut reader)?;
    let mut tensors = Vec::new();
    for name in content.tensor_infos.keys() {
        let wide = content.tensor(&mut reader, name, &Device::Cpu)?.dequantize(&Device::Cpu)?;
        tensors.push((name.as_str(), QTensor::quantize(&wide, GgmlDType::F32)?));
    }
    let metadata: Vec<_> = content.metadata.iter().map(|(key, value)| (key.as_str(), value)).collect();
    let tensors: Vec<_> = tensors.iter().map(|(name, tensor)| (*name, tensor)).collect();
    gguf_file::write(&mut std::fs::File::create(to)?, &metadata, &tensors)
}

/// On the CPU, in f32.
pub fn load(path: &Path) -> Result<CausalLm> {
    let file = GgufFile::open(path)?;
    let config = ModelConfig::from_gguf(&file)?;
    CausalLm::loader(&config).draft_head(DraftHeadChoice::Auto).load_gguf(&file, DType::F32, &Device::Cpu)
}

/// The demo as llama.cpp's converter makes it, with its tokenizer and template.
#[allow(dead_code)]
pub fn demo() -> GgufOfTiny {
    let mut file = GgufOfTiny::new(&demo_checkpoint(), Layout::Qwen3Next).unwrap();
    file.add_tokenizer(&of_demo("tokenizer.json"), "gpt-2");
    let template = of_demo("tokenizer_config.json")["chat_template"].as_str().unwrap().to_string();
    file.metadata.insert("tokenizer.chat_template".into(), Value::String(template));
    file
}

/// The demo and its draft head, in f32.
#[allow(dead_code)]
pub fn demo_checkpoint() -> Tiny {
    let weights = candle_core::safetensors::load(format!("{DEMO}/model.safetensors"), &Device::Cpu).unwrap();
    let weights = weights.into_iter().map(|(name, w)| (name, w.to_dtype(DType::F32).unwrap())).collect();
    let mut config = of_demo("config.json");
    config["rope_theta"] = config["rope_parameters"]["rope_theta"].clone();
    Tiny { config, weights }
}

fn of_demo(name: &str) -> serde_json::Value {
    serde_json::from_str(&std::fs::read_to_string(format!("{DEMO}/{name}")).unwrap()).unwrap()
}
