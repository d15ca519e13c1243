//! `adapter_config.json`, as PEFT writes it: ranks and scales, and a refusal of all that is not computed.

use crate::config::json_as_python;
use crate::formats::prefixes::inside;
use candle_core::{bail, Error, Result};
use regex::Regex;
use serde_json::{Map, Value};

/// What an adapter's configuration says of its numbers.
#[derive(Debug)]
pub(super) struct AdapterConfig {
    rank: usize,
    alpha: f64,
    /// Whether the scale is alpha over the root of the rank.
    by_root: bool,
    ranks: Vec<(Regex, usize)>,
    alphas: Vec<(Regex, f64)>,
    parameters: Vec<String>,
    /// Whether PEFT read a parameter `[experts, a, b]` as `[experts, in, out]`.
    pub experts_in_out: bool,
}

/// The first version of PEFT that reads the experts' parameters of these models as `[experts, out, in]`.
const EXPERTS_OUT_IN: [u64; 3] = [0, 19, 1];
/// How an adapter was trained, where it came from, and which modules it has, which its tensors say too.
const WITHOUT_EFFECT: [&str; 18] = [
    "auto_mapping",
    "base_model_name_or_path",
    // Of a first value that `init_lora_weights` names.
    "corda_config",
    "eva_config",
    "exclude_modules",
    "inference_mode",
    "layers_pattern",
    "layers_to_transform",
    "loftq_config",
    "lora_dropout",
    "lora_ga_config",
    "megatron_core",
    // Of `use_qalora`.
    "qalora_group_size",
    "revision",
    "runtime_config",
    "target_modules",
    "task_type",
    "init_lora_weights",
];
/// What is read here.
const READ: [&str; 8] = [
    "alpha_pattern",
    "lora_alpha",
    "peft_type",
    "peft_version",
    "r",
    "rank_pattern",
    "target_parameters",
    "use_rslora",
];
/// First values of A and B; others (PiSSA, OLoRA, CorDA, LoftQ, LoRA-GA) are taken from the model's weights, which then are not the
/// checkpoint's any more.
const FIRST_VALUES: [&str; 3] = ["gaussian", "eva", "orthogonal"];

impl AdapterConfig {
    /// # Errors
    /// A key whose value is not computed here or not understood, by its name.
    pub fn parse(text: &str) -> Result<Self> {
        let Value::Object(file) = json_as_python(text)? else { bail!("expected a JSON object") };
        let get = |key: &str| file.get(key).unwrap_or(&Value::Null);
        if get("peft_type") != "LORA" {
            bail!("`peft_type`: expected \"LORA\", got {}", get("peft_type"))
        }
        check_first_values(get("init_lora_weights"))?;
        check_modules(get("target_modules"))?;
        let known = |key: &str| WITHOUT_EFFECT.contains(&key) || READ.contains(&key);
        if let Some((key, value)) = file.iter().find(|(key, value)| !known(key) && !is_unset(key, value)) {
            bail!("`{key}`: expected it unset, since such adapters are not computed, got {value}")
        }
        let by_root = match get("use_rslora") {
            Value::Null => false,
            Value::Bool(by_root) => *by_root,
            other => bail!("`use_rslora`: expected true or false, got {other}"),
        };
        Ok(Self {
            rank: rank("r", get("r"))?,
            alpha: alpha("lora_alpha", get("lora_alpha"))?,
            by_root,
            ranks: patterns(&file, "rank_pattern", rank)?,
            alphas: patterns(&file, "alpha_pattern", alpha)?,
            parameters: strings("target_parameters", get("target_parameters"))?,
            experts_in_out: version(get("peft_version"))? < EXPERTS_OUT_IN,
        })
    }

    /// Rank and scale of a module, or of a parameter, by the name that it had for PEFT.
    pub fn rank_and_scale(&self, name: &str) -> (usize, f64) {
        let rank = first(&self.ranks, name).unwrap_or(self.rank);
        let alpha = first(&self.alphas, name).unwrap_or(self.alpha);
        (rank, if self.by_root { alpha / (rank as f64).sqrt() } else { alpha / rank as f64 })
    }

    /// Whether `target_parameters` has a parameter.
    pub fn has_parameter(&self, name: &str) -> bool {
        let name = inside(name);
        self.parameters.iter().map(|parameter| inside(parameter)).any(|end| {
            name.strip_suffix(end).is_some_and(|start| start.is_empty() || start.ends_with('.')) && !end.is_empty()
        })
    }
}

/// The value of the first pattern that the name matches.
fn first<T: Copy>(patterns: &[(Regex, T)], name: &str) -> Option<T> {
    patterns.iter().find(|(pattern, _)| pattern.is_match(name)).map(|(_, value)| *value)
}

/// In the order of the keys, in which PEFT writes them.
fn patterns<T>(
    file: &Map<String, Value>,
    key: &str,
    value: impl Fn(&str, &Value) -> Result<T>,
) -> Result<Vec<(Regex, T)>> {
    let map = match file.get(key) {
        None | Some(Value::Null) => return Ok(Vec::new()),
        Some(Value::Object(map)) => map,
        Some(other) => bail!("`{key}`: expected an object, got {other}"),
    };
    let mut keys: Vec<&String> = map.keys().collect();
    keys.sort_unstable();
    let pattern = |name: &String| {
        let whole = format!(r"^(?:.*\.)?(?:{name})$");
        let regex = Regex::new(&whole).map_err(|e| Error::msg(format!("`{key}`: {name:?}: {e}")))?;
        Ok((regex, value(&format!("{key}.{name}"), &map[name])?))
    };
    keys.into_iter().map(pattern).collect()
}

/// Zeros where there is none, as before 0.18.
fn version(value: &Value) -> Result<[u64; 3]> {
    let text = match value {
        Value::Null => "0.0.0",
        value => value.as_str().unwrap_or_default(),
    };
    let numbers: Vec<u64> = text.split('.').map_while(|number| number.parse().ok()).collect();
    match *numbers {
        [major, minor, patch, ..] => Ok([major, minor, patch]),
        _ => bail!("`peft_version`: expected a version like \"0.19.1\", got {value}"),
    }
}

fn rank(key: &str, value: &Value) -> Result<usize> {
    match value.as_u64() {
        Some(rank) if rank > 0 => Ok(rank as usize),
        _ => bail!("`{key}`: expected a whole number of at least 1, got {value}"),
    }
}

fn alpha(key: &str, value: &Value) -> Result<f64> {
    match value.as_f64() {
        Some(alpha) if alpha.is_finite() => Ok(alpha),
        _ => bail!("`{key}`: expected a number, got {value}"),
    }
}

fn strings(key: &str, value: &Value) -> Result<Vec<String>> {
    let list = match value {
        Value::Null => &[],
        Value::Array(list) => list.as_slice(),
        other => bail!("`{key}`: expected a list of names, got {other}"),
    };
    let string = |item: &Value| match item.as_str() {
        Some(string) => Ok(string.to_string()),
        None => bail!("`{key}`: expected a list of names, got {value}"),
    };
    list.iter().map(string).collect()
}

/// A list of names, a regular expression, or `all-linear`: the tensors say which modules these are.
fn check_modules(value: &Value) -> Result<()> {
    match value {
        Value::String(_) => Ok(()),
        other => strings("target_modules", other).map(drop),
    }
}

fn check_first_values(value: &Value) -> Result<()> {
    match value {
        Value::Null | Value::Bool(_) => Ok(()),
        Value::String(name) if FIRST_VALUES.contains(&name.as_str()) => Ok(()),
        other => bail!(
            "`init_lora_weights`: expected true, false or one of {}, got {other}, which belongs to changed weights of the \
             model: convert the adapter to LoRA",
            FIRST_VALUES.join(", ")
        ),
    }
}

/// Whether a key with this value changes nothing in PEFT.
fn is_unset(key: &str, value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::Bool(true) | Value::Number(_) => false,
        Value::String(text) => text.is_empty() || key == "bias" && text == "none",
        Value::Array(list) => list.is_empty(),
        Value::Object(map) => map.is_empty(),
    }
}
