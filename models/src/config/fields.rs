//! Typed access to the fields of a JSON object, with errors that name the field.

use candle_core::{bail, Result};
use serde_json::{Map, Value};

/// One object of a `config.json`; `path` is where it stands, for the messages.
pub(super) struct Fields<'a> {
    map: &'a Map<String, Value>,
    path: String,
}

impl<'a> Fields<'a> {
    pub(super) fn root(value: &'a Value) -> Result<Self> {
        match value.as_object() {
            Some(map) => Ok(Self { map, path: String::new() }),
            None => bail!("config: expected a JSON object, got {value}"),
        }
    }

    /// The dotted name a message gives to `key`.
    pub(super) fn name(&self, key: &str) -> String {
        format!("{}{key}", self.path)
    }

    /// The value of `key`; `null` counts as absent, as in transformers.
    pub(super) fn get(&self, key: &str) -> Option<&'a Value> {
        self.map.get(key).filter(|v| !v.is_null())
    }

    pub(super) fn object(&self, key: &str) -> Result<Option<Fields<'a>>> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Object(map)) => Ok(Some(Fields { map, path: format!("{}{key}.", self.path) })),
            Some(other) => self.wrong(key, "an object", other),
        }
    }

    pub(super) fn wrong<T>(&self, key: &str, expected: &str, got: &Value) -> Result<T> {
        bail!("config: `{}`: expected {expected}, got {got}", self.name(key))
    }

    fn missing<T>(&self, key: &str, expected: &str) -> Result<T> {
        bail!("config: `{}` is missing: expected {expected}", self.name(key))
    }

    /// A count that must be there and be at least one.
    pub(super) fn count(&self, key: &str) -> Result<usize> {
        match self.opt_uint(key)? {
            Some(0) => self.wrong(key, "a positive integer", &Value::from(0)),
            Some(n) => Ok(n),
            None => self.missing(key, "a positive integer"),
        }
    }

    /// The same, and at most `most`.
    pub(super) fn count_up_to(&self, key: &str, most: usize) -> Result<usize> {
        match self.count(key)? {
            n if n > most => self.wrong(key, &format!("a positive integer up to {most}"), &n.into()),
            n => Ok(n),
        }
    }

    pub(super) fn opt_uint(&self, key: &str) -> Result<Option<usize>> {
        match self.get(key) {
            None => Ok(None),
            // Sizes are multiplied with each other later: far below the overflow of usize.
            Some(v) => match v.as_u64() {
                Some(n) if n < 1 << 31 => Ok(Some(n as usize)),
                _ => self.wrong(key, "an integer from 0 to 2^31 - 1", v),
            },
        }
    }

    pub(super) fn opt_f64(&self, key: &str) -> Result<Option<f64>> {
        match self.get(key) {
            None => Ok(None),
            Some(v) => match v.as_f64() {
                Some(x) => Ok(Some(x)),
                None => self.wrong(key, "a number", v),
            },
        }
    }

    pub(super) fn bool_or(&self, key: &str, default: bool) -> Result<bool> {
        match self.get(key) {
            None => Ok(default),
            Some(Value::Bool(b)) => Ok(*b),
            Some(other) => self.wrong(key, "true or false", other),
        }
    }

    pub(super) fn opt_str(&self, key: &str) -> Result<Option<&'a str>> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::String(s)) => Ok(Some(s)),
            Some(other) => self.wrong(key, "a string", other),
        }
    }

    pub(super) fn str(&self, key: &str) -> Result<&'a str> {
        match self.opt_str(key)? {
            Some(s) => Ok(s),
            None => self.missing(key, "a string"),
        }
    }

    pub(super) fn opt_list(&self, key: &str) -> Result<Option<&'a [Value]>> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Array(list)) => Ok(Some(list)),
            Some(other) => self.wrong(key, "a list", other),
        }
    }

    /// A list of layer numbers, empty when absent.
    pub(super) fn indices(&self, key: &str) -> Result<Vec<usize>> {
        let mut out = Vec::new();
        for v in self.opt_list(key)?.unwrap_or_default() {
            match v.as_u64() {
                Some(i) => out.push(i as usize),
                None => return self.wrong(key, "a list of layer numbers", v),
            }
        }
        Ok(out)
    }
}
