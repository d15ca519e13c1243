//! Sizes that the shapes of weights say: those that config.json lacks, and a check of the others.

use super::families::Published;
use super::QkNorm;
use crate::formats::{LayerNames, Prefixes};
use candle_core::{bail, Result};
use serde_json::{Map, Value};

/// The shape of a weight, by its name.
pub(super) type Shapes<'a> = dyn Fn(&str) -> Option<Vec<usize>> + 'a;

/// A tensor and its shape.
type Found = Option<(String, Vec<usize>)>;

struct Sizes<'a> {
    published: &'a Published,
    names: &'static LayerNames,
    text: &'a mut Map<String, Value>,
    shape: &'a Shapes<'a>,
    prefix: String,
    layers: usize,
}

/// Completes the configuration of a text model from the `shape` of each weight.
///
/// # Errors
/// A size that is another than the weights'.
pub(super) fn complete(config: &mut Value, published: &Published, shape: &Shapes<'_>) -> Result<()> {
    let Some(text) = text_model(config) else { return Ok(()) };
    let prefix = match Prefixes::find(|name| shape(name).is_some()).text {
        text if text.is_empty() => text,
        text => text + ".",
    };
    let mut sizes = Sizes { published, names: LayerNames::of(published.family), text, shape, prefix, layers: 0 };
    let is_layer = |i: &usize| {
        let has = |weight: &str| sizes.find(&format!("layers.{i}.{weight}.weight")).is_some();
        // Other families' draft heads count on from the last layer.
        sizes.names.all_norms().any(has) && !["eh_proj", "enorm", "hnorm"].into_iter().any(has)
    };
    sizes.layers = (0..super::parse::MAX_LAYERS).take_while(is_layer).count();
    sizes.complete()
}

/// The object that describes the text model.
pub(super) fn text_model(config: &mut Value) -> Option<&mut Map<String, Value>> {
    let is_nested = config.get("text_config").is_some_and(Value::is_object);
    let text = if is_nested { config.get_mut("text_config") } else { Some(config) };
    text.and_then(Value::as_object_mut)
}

impl Sizes<'_> {
    fn find(&self, name: &str) -> Found {
        let name = format!("{}{name}", self.prefix);
        (self.shape)(&name).map(|shape| (name, shape))
    }

    /// In the first layer that has it.
    fn in_layer(&self, name: &str) -> Found {
        (0..self.layers).find_map(|i| self.find(&format!("layers.{i}.{name}")))
    }

    fn given(&self, key: &str) -> Option<usize> {
        // Larger ones are told when they are read; their products would overflow here.
        self.text.get(key)?.as_u64().filter(|n| *n < 1 << 31).map(|n| n as usize)
    }

    /// The size `key` is what `size` makes of a tensor's shape.
    fn is(&mut self, key: &str, found: Found, size: impl Fn(&[usize]) -> Option<usize>) -> Result<()> {
        let Some((tensor, shape)) = found else { return Ok(()) };
        let Some(size) = size(&shape) else { return Ok(()) };
        match self.text.get(key).filter(|given| !given.is_null()) {
            None => drop(self.text.insert(key.into(), size.into())),
            // What is no number is told when it is read.
            Some(given) if given.as_u64().is_some_and(|given| given != size as u64) => {
                bail!("config: `{key}`: expected {size} as tensor {tensor} {shape:?} has it, got {given}")
            }
            _ => {}
        }
        Ok(())
    }

    fn complete(&mut self) -> Result<()> {
        let first = |shape: &[usize]| shape.first().copied();
        let last = |shape: &[usize]| shape.last().copied();
        let per = |unit: Option<usize>| {
            move |shape: &[usize]| {
                let (rows, unit) = (shape.first()?, unit.filter(|unit| *unit > 0)?);
                rows.is_multiple_of(unit).then(|| rows / unit)
            }
        };
        match self.given("num_hidden_layers") {
            None if self.layers > 0 => drop(self.text.insert("num_hidden_layers".into(), self.layers.into())),
            // Fewer are told by the weights that are missing.
            Some(given) if given < self.layers => {
                bail!(
                    "config: `num_hidden_layers`: expected {}, as many layers as the files have, got {given}",
                    self.layers
                )
            }
            _ => {}
        }
        self.is("vocab_size", self.find("embed_tokens.weight"), first)?;
        self.is("hidden_size", self.find("embed_tokens.weight"), last)?;
        self.is("intermediate_size", self.in_layer("mlp.gate_proj.weight"), first)?;
        self.is("num_experts", self.in_layer("mlp.gate.weight"), first)?;
        self.is("moe_intermediate_size", self.in_layer("mlp.experts.0.gate_proj.weight"), first)?;
        let half = |shape: &[usize]| shape.get(1).map(|rows| rows / 2);
        self.is("moe_intermediate_size", self.in_layer("mlp.experts.gate_up_proj"), half)?;
        self.is("shared_expert_intermediate_size", self.in_layer("mlp.shared_expert.gate_proj.weight"), first)?;
        if self.published.qk_norm == QkNorm::Head {
            self.is("head_dim", self.in_layer("self_attn.q_norm.weight"), first)?;
        }
        let head_dim = self.given("head_dim");
        let query_rows = head_dim.map(|d| if self.published.output_gate { 2 * d } else { d });
        self.is("num_attention_heads", self.in_layer("self_attn.q_proj.weight"), per(query_rows))?;
        self.is("num_key_value_heads", self.in_layer("self_attn.k_proj.weight"), per(head_dim))?;
        self.is("linear_num_value_heads", self.in_layer("linear_attn.A_log"), first)?;
        self.is("linear_value_head_dim", self.in_layer(self.names.gated_norm), first)?;
        let conv = self.in_layer("linear_attn.conv1d.weight").filter(|(_, shape)| matches!(**shape, [_, 1, _]));
        self.is("linear_conv_kernel_dim", conv.clone(), last)?;
        // Of the convolution's channels, two keys and a value.
        let [heads, dim] = ["linear_num_value_heads", "linear_value_head_dim"].map(|key| self.given(key));
        let value = heads.zip(dim).map(|(heads, dim)| heads * dim);
        let keys =
            conv.and_then(|(tensor, shape)| Some((tensor + ", of its keys", vec![shape[0].checked_sub(value?)? / 2])));
        self.is("linear_num_key_heads", keys.clone(), per(self.given("linear_key_head_dim")))?;
        self.is("linear_key_head_dim", keys, per(self.given("linear_num_key_heads")))
    }
}
