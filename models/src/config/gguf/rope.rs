//! Rotary positions of a GGUF file, with llama.cpp's meaning of its entries.

use super::super::rope::{inv_freq, mscale, Yarn};
use super::Entries;
use candle_core::quantized::gguf_file::Value;
use candle_core::Result;

/// Entries that change nothing where all positions are of text, or that are read elsewhere.
const WITHOUT_EFFECT: &[&str] =
    &["dimension_count", "dimension_sections", "mrope_section", "mrope_interleaved", "scaling.finetuned"];
const SCALING: &[&str] =
    &["freq_base", "type", "scaling.type", "scale_linear", "scaling.factor", "scaling.attn_factor", ORIGINAL];
const ORIGINAL: &str = "scaling.original_context_length";
const OF_YARN: &[&str] = &[
    "scaling.yarn_log_multiplier",
    "scaling.yarn_ext_factor",
    "scaling.yarn_attn_factor",
    "scaling.yarn_beta_fast",
    "scaling.yarn_beta_slow",
];

impl Entries<'_> {
    /// Radians per position of each pair, what the rotated values are multiplied by, and the positions that there are.
    pub(super) fn rope(&self, rotary_dim: usize, max_positions: usize) -> Result<(Vec<f64>, f64, usize)> {
        let theta = self.float("rope.freq_base")?;
        if theta <= 1. {
            return self.wrong("rope.freq_base", "a number above 1");
        }
        let positive = |name: &str| match self.opt_float(name)? {
            Some(x) if x < 0. => self.wrong(name, "a positive number"),
            // 0: not set.
            x => Ok(x.filter(|x| *x != 0.)),
        };
        let factor = positive("rope.scaling.factor")?.or(positive("rope.scale_linear")?).unwrap_or(1.);
        let mut name = "rope.scaling.type";
        if self.get(name).is_none() && self.get("rope.type").is_some() {
            name = "rope.type"; // Ollama's
        }
        let (factor, is_yarn) = match self.get(name) {
            None => (factor, false),
            Some(Value::String(kind)) => match kind.as_str() {
                "none" | "default" | "mrope" => (1., false),
                "linear" => (factor, false),
                "yarn" if factor >= 1. => (factor, true),
                "yarn" => return self.wrong("rope.scaling.factor", "a number of at least 1 for YaRN"),
                _ => return self.wrong(name, "\"none\", \"linear\" or \"yarn\""),
            },
            Some(_) => return self.wrong(name, "a string"),
        };
        let is_known = |name: &str| {
            WITHOUT_EFFECT.contains(&name) || SCALING.contains(&name) || is_yarn && OF_YARN.contains(&name)
        };
        let prefix = self.key("rope.");
        let names = self.file.keys().filter_map(|key| key.strip_prefix(&prefix));
        if let Some(name) = names.filter(|name| !is_known(name)).min() {
            return self.wrong(&format!("rope.{name}"), "no such setting of this scaling");
        }
        let attn_factor = positive("rope.scaling.attn_factor")?.unwrap_or(1.);
        if !is_yarn {
            let frequencies = inv_freq(theta, rotary_dim, None).into_iter().map(|f| f / factor).collect();
            return Ok((frequencies, attn_factor, max_positions));
        }
        let original = match self.get(&format!("rope.{ORIGINAL}")) {
            None => max_positions,
            Some(_) => self.count(&format!("rope.{ORIGINAL}"))?,
        };
        let mut yarn = Yarn::new(factor, original);
        yarn.beta_fast = positive("rope.scaling.yarn_beta_fast")?.unwrap_or(yarn.beta_fast);
        yarn.beta_slow = positive("rope.scaling.yarn_beta_slow")?.unwrap_or(yarn.beta_slow);
        if yarn.beta_fast < yarn.beta_slow {
            return self.wrong("rope.scaling.yarn_beta_fast", &format!("at least {}, the slow one", yarn.beta_slow));
        }
        // Less than 0: not set.
        if self.opt_float("rope.scaling.yarn_ext_factor")?.is_some_and(|x| x >= 0. && x != 1.) {
            return self.wrong("rope.scaling.yarn_ext_factor", "1");
        }
        if let Some(log_multiplier) = positive("rope.scaling.yarn_log_multiplier")? {
            yarn.attention_factor /= mscale(factor, log_multiplier);
        }
        // The converter writes attention_factor of a config.json so.
        yarn.attention_factor = positive("rope.scaling.yarn_attn_factor")?.unwrap_or(yarn.attention_factor);
        let positions = yarn.positions().max(max_positions);
        Ok((inv_freq(theta, rotary_dim, Some(&yarn)), yarn.attention_factor * attn_factor, positions))
    }
}
