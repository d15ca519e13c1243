//! Checkpoints in fp8: `quantization_config`, or the file that modelopt writes beside config.json.

use super::fields::Fields;
use super::ModelConfig;
use candle_core::{bail, Result};
use regex::Regex;
use serde_json::Value;

/// Lists of modules that stay as they were, as the writers call them.
const LISTS: [&str; 4] = ["modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules"];
/// Modelopt's names of fp8 with a scale for each tensor, row or block.
const OF_MODELOPT: [&str; 3] = ["FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO"];
/// Where a text model stands, in lists whose patterns begin there.
const PLACES: [&str; 4] = ["", "model.", "model.language_model.", "language_model.model."];

/// How the matrices of a checkpoint in fp8 (e4m3) are stored.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Fp8Config {
    /// Rows and columns of the blocks that have one scale each. Where it is `None` the shape of each scale says what it is of: a
    /// matrix, a row, or a block.
    pub weight_block_size: Option<[usize; 2]>,
    /// Modules whose weights are not in fp8: names, names with `*`, or regular expressions after `re:`.
    pub modules_to_not_convert: Vec<String>,
    patterns: Vec<Regex>,
    /// Regular expressions of Python that are none here, as with look-around. Which modules they match is not known.
    unknown: Vec<String>,
    /// Whether each row has a scale, as far as the configuration says it.
    scale_per_row: bool,
}

impl PartialEq for Fp8Config {
    fn eq(&self, other: &Self) -> bool {
        self.weight_block_size == other.weight_block_size && self.modules_to_not_convert == other.modules_to_not_convert
    }
}

impl Fp8Config {
    pub(crate) fn new(weight_block_size: Option<[usize; 2]>, modules_to_not_convert: Vec<String>) -> Self {
        let pattern = |listed: &String| match listed.strip_prefix("re:") {
            Some(pattern) => Some(format!("^(?:{pattern})")),
            None if listed.contains('*') => Some(format!("^{}$", regex::escape(listed).replace(r"\*", ".*"))),
            None => None,
        };
        let (mut patterns, mut unknown) = (Vec::new(), Vec::new());
        for listed in &modules_to_not_convert {
            match pattern(listed).map(|pattern| Regex::new(&pattern)) {
                Some(Ok(pattern)) => patterns.push(pattern),
                Some(Err(_)) => unknown.push(listed.clone()),
                None => {}
            }
        }
        Self { weight_block_size, modules_to_not_convert, patterns, unknown, scale_per_row: false }
    }

    /// The same with a scale for each row, or for blocks or whole matrices.
    fn with_scale_per_row(self, scale_per_row: bool) -> Self {
        Self { scale_per_row, ..self }
    }

    /// Rows of the blocks that share their scales on CUDA: a power of two up to 128.
    pub(crate) fn block_rows(&self) -> usize {
        match self.weight_block_size {
            Some([rows, _]) => 1 << rows.trailing_zeros().min(7),
            None if self.scale_per_row => 1,
            None => 128,
        }
    }

    /// Patterns of which it is not known what they match.
    pub(crate) fn unknown_patterns(&self) -> &[String] {
        &self.unknown
    }

    /// Whether the weight of a projection is in fp8; false for gates and embeddings, which are never listed.
    pub fn converts(&self, module: &str) -> bool {
        let projection = ["_proj", "in_proj_qkv", "in_proj_z", "in_proj_qkvz"].iter().any(|end| module.ends_with(end));
        // The name from the layer on: a list may or may not have the wrapper's prefix.
        let inner = |name: &str| name.find("layers.").map_or(name.to_string(), |start| name[start..].to_string());
        let (full, module, listed) = (module, inner(module), &self.modules_to_not_convert);
        let within = |listed: String| {
            module == listed || module.starts_with(&(listed.clone() + ".")) || {
                // A bare name stands for that module of every layer.
                !listed.contains("layers.") && format!(".{module}.").contains(&format!(".{listed}."))
            }
        };
        let matches = |pattern: &Regex| {
            pattern.is_match(full) || PLACES.iter().any(|place| pattern.is_match(&format!("{place}{module}")))
        };
        projection && !listed.iter().any(|listed| within(inner(listed))) && !self.patterns.iter().any(matches)
    }
}

impl ModelConfig {
    /// With what modelopt's `hf_quant_config.json` says of the weights, if config.json has no `quantization_config`.
    ///
    /// # Errors
    /// Another number format than fp8.
    pub fn with_hf_quant_config(mut self, text: &str) -> Result<Self> {
        let value = super::json_as_python(text)?;
        if let (None, Some(q)) = (&self.fp8, Fields::root(&value)?.object("quantization")?) {
            if q.get("quant_algo").is_some() {
                self.fp8 = Some(modelopt(&q)?);
            }
        }
        Ok(self)
    }
}

/// `quantization_config`: of its methods, fp8.
pub(super) fn fp8(f: &Fields) -> Result<Option<Fp8Config>> {
    for key in ["quantization_config", "quantization"] {
        let Ok(Some(q)) = f.object(key) else { continue };
        // MLX names no method.
        if let (None, Some(bits), Some(_)) = (q.get("quant_method"), q.get("bits"), q.get("group_size")) {
            let key = f.name(key);
            bail!(
                "config: `{key}`: expected weights in f32, bf16, f16 or fp8, got MLX's format of {bits} bits: of such models the \
                 original checkpoint with --quantize, or a GGUF file, is as small"
            )
        }
    }
    let Some(q) = f.object("quantization_config")? else { return Ok(None) };
    let method = q.str("quant_method")?;
    match method {
        "fp8" | "fbgemm_fp8" => {}
        "modelopt" => return modelopt(&q).map(Some),
        "compressed-tensors" => return compressed(&q).map(Some),
        other => {
            let known = "\"fp8\", or \"modelopt\" or \"compressed-tensors\" in fp8, or no quantization_config";
            return q.wrong("quant_method", known, &Value::from(other));
        }
    }
    match q.opt_str("fmt")? {
        None | Some("e4m3" | "float8_e4m3fn") => {}
        Some(other) => return q.wrong("fmt", "\"e4m3\"", &Value::from(other)),
    }
    let size = |v: &Value| v.as_u64().filter(|n| (1..1 << 31).contains(n)).map(|n| n as usize);
    let sizes = q.list_of("weight_block_size", "two positive integers", size)?;
    let block = match (q.get("weight_block_size"), sizes.as_slice()) {
        (None, _) => None,
        (_, &[rows, columns]) => Some([rows, columns]),
        (Some(got), _) => return q.wrong("weight_block_size", "two positive integers", got),
    };
    Ok(Some(Fp8Config::new(block, listed(&q)?).with_scale_per_row(method == "fbgemm_fp8")))
}

fn modelopt(q: &Fields) -> Result<Fp8Config> {
    let algo = q.str("quant_algo")?;
    if !OF_MODELOPT.contains(&algo) {
        return q.wrong("quant_algo", &format!("one of {}", OF_MODELOPT.join(", ")), &algo.into());
    }
    Ok(Fp8Config::new(None, listed(q)?).with_scale_per_row(algo == "FP8_PER_CHANNEL_PER_TOKEN"))
}

/// Weights in fp8 in all groups; how activations would be rounded does not matter.
fn compressed(q: &Fields) -> Result<Fp8Config> {
    match q.opt_str("format")? {
        None | Some("float-quantized" | "naive-quantized") => {}
        Some(other) => return q.wrong("format", "\"float-quantized\"", &other.into()),
    }
    let groups = q.required("config_groups", "an object", q.object("config_groups")?)?;
    let mut scale_per_row = false;
    for (name, _) in groups.entries() {
        let Some(weights) = groups.object(name)?.map(|group| group.object("weights")).transpose()?.flatten() else {
            continue;
        };
        scale_per_row |= weights.opt_str("strategy")? == Some("channel");
        match (weights.str("type")?, weights.count("num_bits")?) {
            ("float", 8) => {}
            ("float", bits) => return weights.wrong("num_bits", "8", &bits.into()),
            (other, _) => return weights.wrong("type", "\"float\"", &other.into()),
        }
    }
    Ok(Fp8Config::new(None, listed(q)?).with_scale_per_row(scale_per_row))
}

fn listed(q: &Fields) -> Result<Vec<String>> {
    let of = |key: &&str| q.list_of(key, "a list of strings", |v: &Value| v.as_str().map(str::to_string));
    Ok(LISTS.iter().map(of).collect::<Result<Vec<_>>>()?.concat())
}

#[cfg(test)]
mod tests;
