//! From the JSON of transformers to [`ModelConfig`]: nothing unknown is passed over in silence
//! where it would change the numbers.

use super::families::{Experts, Published, ALL};
use super::fields::Fields;
use super::json::json_as_python;
use super::quantization::fp8;
use super::rope::{inv_freq, Rope, Yarn};
use super::{sizes, AttentionConfig, FfnKind, LayerConfig, MixerKind, ModelConfig, MoeConfig};
use crate::formats::SafetensorsFiles;
use candle_core::{bail, Result};
use candle_gdn::GdnConfig;
use serde_json::Value;

const ENDINGS: &[&str] = &["ForCausalLM", "ForConditionalGeneration", "Model"];

/// Stand-in for `full_attention_interval` where neither it nor `layer_types` is given.
pub(super) const FULL_ATTENTION_INTERVAL: usize = 4;
const RMS_NORM_EPS: f64 = 1e-6;
/// A bound on what a broken file can make us allocate.
pub(super) const MAX_LAYERS: usize = 4096;
/// Neither heads nor their sizes are more: tables by head and by value of a head are made before any weight is seen.
pub(super) const MAX_HEADS: usize = 1 << 16;

impl ModelConfig {
    /// Reads the text of a `config.json` as transformers writes it.
    ///
    /// # Errors
    /// Anything that is not JSON, an unknown `model_type` or architecture, a missing or
    /// contradictory field, and features that this crate does not compute (biased attention,
    /// weights quantised by other means than fp8, rope scaling other than YaRN, activations other than SiLU). The message names the
    /// field, what was expected and what came.
    pub fn from_json(text: &str) -> Result<Self> {
        Self::complete(json_as_python(text)?, None)
    }

    /// The same of a checkpoint whose files are at hand: sizes that the text lacks are those of the weights.
    ///
    /// # Errors
    /// As [`from_json`](Self::from_json), or a size that is another than that of a weight.
    pub fn from_safetensors(text: &str, files: &SafetensorsFiles) -> Result<Self> {
        let shape = |name: &str| files.shape(name).filter(|_| files.is_number(name));
        Self::complete(json_as_python(text)?, Some(&shape))
    }

    /// Adds what the text lacks, from the shapes of weights where they are known and from what its family has, and reads it.
    fn complete(mut value: Value, shape: Option<&sizes::Shapes<'_>>) -> Result<Self> {
        let (published, _) = family(&Fields::root(&value)?)?;
        if let Some(shape) = shape {
            sizes::complete(&mut value, published, shape)?;
        }
        if let Some(text) = sizes::text_model(&mut value) {
            (published.complete)(text);
        }
        Self::read(&value)
    }

    fn read(value: &Value) -> Result<Self> {
        let root = Fields::root(value)?;
        let (published, nested) = family(&root)?;
        check_architecture(&root)?;
        let text = root.object("text_config")?;
        let is_flat = !nested || root.get("hidden_size").is_some();
        let text = match (text, is_flat) {
            (None, true) => root.clone(),
            (text, _) => root.required("text_config", "an object with the text model", text)?,
        };
        let family = published.family;
        if text.get("model_type").is_some() && self::family(&text)?.0.family != family {
            bail!("config: `{}`: expected a text model of {:?}", text.name("model_type"), root.str("model_type")?)
        }
        let levels = [&root, &text];
        levels.into_iter().try_for_each(|level| check_unsupported(level, published))?;

        let hidden_size = text.count("hidden_size")?;
        let max_position_embeddings = text.count("max_position_embeddings")?;
        let rope = Rope::read(&levels, max_position_embeddings, published)?;
        let rms_norm_eps = match text.opt_f64("rms_norm_eps")? {
            None => RMS_NORM_EPS,
            Some(eps) if eps > 0. && eps < 1. => eps,
            Some(eps) => return text.wrong("rms_norm_eps", "a number in (0, 1)", &eps.into()),
        };
        let moe = moe(&text, published)?;
        let layers = layers(&text, published, moe.is_some())?;
        let uses_moe = layers.iter().any(|l| l.ffn == FfnKind::Moe);
        // The wrapper's own value wins where both are given: transformers ties at the top.
        let tie_word_embeddings = root.bool_or("tie_word_embeddings", text.bool_or("tie_word_embeddings", false)?)?;
        let mut eos_token_ids = token_ids(&text, "eos_token_id")?;
        for id in token_ids(&root, "eos_token_id")? {
            if !eos_token_ids.contains(&id) {
                eos_token_ids.push(id);
            }
        }
        Ok(Self {
            family,
            vocab_size: text.count("vocab_size")?,
            hidden_size,
            max_position_embeddings: rope
                .as_ref()
                .and_then(|rope| rope.yarn.as_ref())
                .map_or(0, Yarn::positions)
                .max(max_position_embeddings),
            rms_norm_eps,
            zero_centred_norms: published.zero_centred_norms,
            tie_word_embeddings,
            attention: attention(&text, published, rope.as_ref())?,
            gdn: gdn(&text)?,
            moe: moe.filter(|_| uses_moe),
            layers,
            eos_token_ids,
            fp8: fp8(&root)?.or(fp8(&text)?),
        })
    }
}

fn family(f: &Fields) -> Result<(&'static Published, bool)> {
    let model_type = f.str("model_type")?;
    let known = || ALL.iter().flat_map(|published| published.model_types.iter().map(move |t| (*published, t)));
    if let Some((published, (_, nested))) = known().find(|(_, (name, _))| *name == model_type) {
        return Ok((published, *nested));
    }
    let names: Vec<_> = known().map(|(_, (name, _))| *name).collect();
    f.wrong("model_type", &format!("one of {}", names.join(", ")), &model_type.into())
}

fn check_architecture(root: &Fields) -> Result<()> {
    let Some(list) = root.opt_list("architectures")? else {
        return Ok(());
    };
    let all: Vec<&str> = ALL.iter().flat_map(|published| published.architectures).copied().collect();
    let known = |name: &str| ENDINGS.iter().any(|end| name.strip_suffix(end).is_some_and(|n| all.contains(&n)));
    if !list.is_empty() && !list.iter().any(|v| v.as_str().is_some_and(known)) {
        let expected = format!("one of {} with one of {}", all.join(", "), ENDINGS.join(", "));
        return root.wrong("architectures", &expected, &list.into());
    }
    Ok(())
}

/// Fields that would change the result if they were ignored.
fn check_unsupported(f: &Fields, published: &Published) -> Result<()> {
    if f.bool_or("attention_bias", false)? {
        return f.wrong("attention_bias", "false", &Value::from(true));
    }
    let gate = published.output_gate;
    if f.bool_or("attn_output_gate", gate)? != gate {
        return f.wrong("attn_output_gate", &format!("{gate}, as this family always has it"), &Value::from(!gate));
    }
    match f.opt_str("hidden_act")? {
        None | Some("silu" | "swish") => Ok(()),
        Some(other) => f.wrong("hidden_act", "\"silu\"", &Value::from(other)),
    }
}

fn attention(f: &Fields, published: &Published, rope: Option<&Rope>) -> Result<AttentionConfig> {
    let num_heads = f.count_up_to("num_attention_heads", MAX_HEADS)?;
    let num_kv_heads = f.count_up_to("num_key_value_heads", MAX_HEADS)?;
    if !num_heads.is_multiple_of(num_kv_heads) {
        bail!(
            "config: `num_key_value_heads`: expected a divisor of `num_attention_heads` ({num_heads}), got {num_kv_heads}"
        )
    }
    let head_dim = f.count_up_to("head_dim", MAX_HEADS)?;
    let mut attention = AttentionConfig {
        num_heads,
        num_kv_heads,
        head_dim,
        rope_inv_freq: Vec::new(),
        rope_factor: 1.,
        output_gate: published.output_gate,
        qk_norm: published.qk_norm,
    };
    let Some(rope) = rope else { return Ok(attention) };
    let factor = rope.partial_rotary_factor;
    let rotary_dim = (head_dim as f64 * factor) as usize;
    if rotary_dim == 0 || !rotary_dim.is_multiple_of(2) {
        bail!(
            "config: `partial_rotary_factor`: expected an even, positive number of rotated values in a head of {head_dim}, got {factor} which gives {rotary_dim}"
        )
    }
    attention.rope_inv_freq = inv_freq(rope.theta, rotary_dim, rope.yarn.as_ref());
    attention.rope_factor = rope.yarn.as_ref().map_or(1., |yarn| yarn.attention_factor);
    Ok(attention)
}

fn gdn(f: &Fields) -> Result<GdnConfig> {
    let num_key_heads = f.count_up_to("linear_num_key_heads", MAX_HEADS)?;
    let num_value_heads = f.count_up_to("linear_num_value_heads", MAX_HEADS)?;
    if !num_value_heads.is_multiple_of(num_key_heads) {
        bail!(
            "config: `linear_num_key_heads`: expected a divisor of `linear_num_value_heads` ({num_value_heads}), got {num_key_heads}"
        )
    }
    for key in ["linear_key_head_dim", "linear_value_head_dim", "linear_conv_kernel_dim"] {
        f.count_up_to(key, MAX_HEADS)?;
    }
    if !matches!(f.opt_str("output_gate_type")?, None | Some("silu" | "swish" | "sigmoid")) {
        return f.wrong("output_gate_type", "\"silu\" or \"sigmoid\"", f.get("output_gate_type").unwrap_or_default());
    }
    serde_json::from_value(f.value()).map_err(|error| candle_core::Error::msg(format!("config: {error}")))
}

fn moe(f: &Fields, published: &Published) -> Result<Option<MoeConfig>> {
    let num_experts = f.opt_uint("num_experts")?.unwrap_or(0);
    match (published.experts, num_experts) {
        // A dense Qwen3-Next is a configuration that transformers accepts; a "moe" one is not.
        (Experts::Always { .. }, 0) => return f.count("num_experts").map(|_| None),
        (_, 0) => return Ok(None),
        (Experts::Never, n) => return f.wrong("num_experts", "none, as this family is dense", &n.into()),
        _ => {}
    }
    let experts_per_token = f.count("num_experts_per_tok")?;
    if experts_per_token > num_experts {
        bail!("config: `num_experts_per_tok`: expected at most `num_experts` ({num_experts}), got {experts_per_token}")
    }
    if published.experts == (Experts::Always { normalised: true }) && !f.bool_or("norm_topk_prob", true)? {
        return f.wrong("norm_topk_prob", "true, as this family always has it", &false.into());
    }
    Ok(Some(MoeConfig {
        num_experts,
        experts_per_token,
        intermediate_size: f.count("moe_intermediate_size")?,
        shared_intermediate_size: f.opt_uint("shared_expert_intermediate_size")?.unwrap_or(0),
        norm_topk_prob: f.bool_or("norm_topk_prob", true)?,
        shared_gate: published.shared_expert_gate,
    }))
}

fn layers(f: &Fields, published: &Published, has_experts: bool) -> Result<Vec<LayerConfig>> {
    let n = f.count("num_hidden_layers")?;
    if n > MAX_LAYERS {
        let expected = format!("at most {MAX_LAYERS} layers");
        return f.wrong("num_hidden_layers", &expected, &n.into());
    }
    let mixers = mixers(f, n)?;
    let index = |v: &Value| v.as_u64().map(|i| i as usize);
    let mlp_only = f.list_of("mlp_only_layers", "a list of layer numbers", index)?;
    if let Some(i) = mlp_only.iter().find(|&&i| i >= n) {
        bail!("config: `mlp_only_layers`: expected layer numbers below `num_hidden_layers` ({n}), got {i}")
    }
    let step = f.count_or("decoder_sparse_step", 1)?;
    if matches!(published.experts, Experts::Always { .. }) && (step, mlp_only.len()) != (1, 0) {
        let [only, step_key] = ["mlp_only_layers", "decoder_sparse_step"].map(|key| f.name(key));
        bail!("config: `{only}` and `{step_key}`: expected none and 1, as this family has experts in all layers, got {mlp_only:?} and {step}")
    }
    let ffn = |i: usize| match has_experts && !mlp_only.contains(&i) && (i + 1).is_multiple_of(step) {
        true => Ok(FfnKind::Moe),
        false => f.count("intermediate_size").map(|intermediate_size| FfnKind::Dense { intermediate_size }),
    };
    let layer = |(i, (mixer, window))| {
        let (norms, positions) = ((published.norms)(mixer), (published.positions)(window));
        Ok(LayerConfig { norms, positions, window, ..LayerConfig::new(mixer, ffn(i)?) })
    };
    mixers.into_iter().enumerate().map(layer).collect()
}

/// The kind of each layer, and its window.
fn mixers(f: &Fields, n: usize) -> Result<Vec<(MixerKind, Option<usize>)>> {
    let Some(list) = f.opt_list("layer_types")? else {
        let kinds = MixerKind::by_interval(n, f.count_or("full_attention_interval", FULL_ATTENTION_INTERVAL)?);
        return Ok(kinds.into_iter().map(|kind| (kind, None)).collect());
    };
    if list.len() != n {
        bail!("config: `layer_types`: expected `num_hidden_layers` ({n}) entries, got {}", list.len())
    }
    let kinds = ["linear_attention", "full_attention", "sliding_attention"];
    let expected = format!("one of {}", kinds.join(", "));
    let names = f.list_of("layer_types", &expected, |v| v.as_str().filter(|kind| kinds.contains(kind)))?;
    let window = match names.contains(&kinds[2]) {
        true => Some(f.count("sliding_window")?),
        false => None,
    };
    let mixer = |kind: &str| match kind {
        "linear_attention" => (MixerKind::LinearAttention, None),
        "full_attention" => (MixerKind::FullAttention, None),
        _ => (MixerKind::FullAttention, window),
    };
    Ok(names.into_iter().map(mixer).collect())
}

/// A field that holds one id, a list of them, or nothing.
fn token_ids(f: &Fields, key: &str) -> Result<Vec<u32>> {
    let expected = "a token id or a list of them";
    let id = |v: &Value| v.as_u64().and_then(|id| u32::try_from(id).ok());
    match f.get(key) {
        Some(Value::Array(_)) => f.list_of(key, expected, id),
        _ => Ok(f.opt(key, expected, id)?.into_iter().collect()),
    }
}
