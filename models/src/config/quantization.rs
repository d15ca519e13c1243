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
}

impl PartialEq for Fp8Config {
    fn eq(&self, other: &Self) -> bool {
        self.weight_block_size == other.weight_block_size && self.modules_to_not_convert == other.modules_to_not_convert
    }
}

impl Fp8Config {
    pub(crate) fn new(weight_block_size: Option<[usize; 2]>, modules_to_not_convert: Vec<String>) -> Result<Self> {
        let pattern = |listed: &String| match listed.strip_prefix("re:") {
            Some(pattern) => Some(format!("^(?:{pattern})")),
            None if listed.contains('*') => Some(format!("^{}$", regex::escape(listed).replace(r"\*", ".*"))),
            None => None,
        };
        let compile = |listed: String| match Regex::new(&listed) {
            Ok(pattern) => Ok(pattern),
            Err(e) => bail!("config: `quantization_config`: expected a regular expression, got {listed:?}: {e}"),
        };
        let patterns = modules_to_not_convert.iter().filter_map(pattern).map(compile).collect::<Result<_>>()?;
        Ok(Self { weight_block_size, modules_to_not_convert, patterns })
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
    let Some(q) = f.object("quantization_config")? else { return Ok(None) };
    match q.str("quant_method")? {
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
    Fp8Config::new(block, listed(&q)?).map(Some)
}

fn modelopt(q: &Fields) -> Result<Fp8Config> {
    let algo = q.str("quant_algo")?;
    if !OF_MODELOPT.contains(&algo) {
        return q.wrong("quant_algo", &format!("one of {}", OF_MODELOPT.join(", ")), &algo.into());
    }
    Fp8Config::new(None, listed(q)?)
}

/// Weights in fp8 in all groups; how activations would be rounded does not matter.
fn compressed(q: &Fields) -> Result<Fp8Config> {
    match q.opt_str("format")? {
        None | Some("float-quantized" | "naive-quantized") => {}
        Some(other) => return q.wrong("format", "\"float-quantized\"", &other.into()),
    }
    let groups = q.required("config_groups", "an object", q.object("config_groups")?)?;
    for (name, _) in groups.entries() {
        let Some(weights) = groups.object(name)?.map(|group| group.object("weights")).transpose()?.flatten() else {
            continue;
        };
        match (weights.str("type")?, weights.count("num_bits")?) {
            ("float", 8) => {}
            ("float", bits) => return weights.wrong("num_bits", "8", &bits.into()),
            (other, _) => return weights.wrong("type", "\"float\"", &other.into()),
        }
    }
    Fp8Config::new(None, listed(q)?)
}

fn listed(q: &Fields) -> Result<Vec<String>> {
    let of = |key: &&str| q.list_of(key, "a list of strings", |v: &Value| v.as_str().map(str::to_string));
    Ok(LISTS.iter().map(of).collect::<Result<Vec<_>>>()?.concat())
}

#[cfg(test)]
mod tests;
