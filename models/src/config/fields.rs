//! Typed access to the fields of a JSON object, with errors that name the field.

use candle_core::{bail, Result};
use serde_json::{Map, Value};

/// One object of a `config.json`.
#[derive(Clone)]
pub(super) struct Fields<'a> {
    map: &'a Map<String, Value>,
    /// Its name in messages, with a dot at the end; empty at the root.
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

    /// The whole object.
    pub(super) fn value(&self) -> Value {
        Value::Object(self.map.clone())
    }

    /// All keys and values but `null`.
    pub(super) fn entries(&self) -> impl Iterator<Item = (&'a str, &'a Value)> + use<'a> {
        self.map.iter().filter(|(_, value)| !value.is_null()).map(|(key, value)| (key.as_str(), value))
    }

    pub(super) fn wrong<T>(&self, key: &str, expected: &str, got: &Value) -> Result<T> {
        bail!("config: `{}`: expected {expected}, got {got}", self.name(key))
    }

    /// `key` as `read` converts it; `None` of `read` is a value of another type.
    pub(super) fn opt<T>(
        &self,
        key: &str,
        expected: &str,
        read: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        match read(value) {
            None => self.wrong(key, expected, value),
            value => Ok(value),
        }
    }

    pub(super) fn required<T>(&self, key: &str, expected: &str, value: Option<T>) -> Result<T> {
        match value {
            Some(value) => Ok(value),
            None => bail!("config: `{}` is missing: expected {expected}", self.name(key)),
        }
    }

    /// A count that must be there and be at least one.
    pub(super) fn count(&self, key: &str) -> Result<usize> {
        let expected = "a positive integer";
        match self.required(key, expected, self.opt_uint(key)?)? {
            0 => self.wrong(key, expected, &Value::from(0)),
            n => Ok(n),
        }
    }

    /// The same, or `default` where it is absent.
    pub(super) fn count_or(&self, key: &str, default: usize) -> Result<usize> {
        self.get(key).map_or(Ok(default), |_| self.count(key))
    }

    /// A count of at most `most`.
    pub(super) fn count_up_to(&self, key: &str, most: usize) -> Result<usize> {
        match self.count(key)? {
            n if n > most => self.wrong(key, &format!("a positive integer up to {most}"), &n.into()),
            n => Ok(n),
        }
    }

    /// Sizes are multiplied with each other later: the bound is far below the overflow of usize.
    pub(super) fn opt_uint(&self, key: &str) -> Result<Option<usize>> {
        let read = |v: &Value| v.as_u64().filter(|n| *n < 1 << 31).map(|n| n as usize);
        self.opt(key, "an integer from 0 to 2^31 - 1", read)
    }

    pub(super) fn opt_f64(&self, key: &str) -> Result<Option<f64>> {
        self.opt(key, "a number", Value::as_f64)
    }

    pub(super) fn bool_or(&self, key: &str, default: bool) -> Result<bool> {
        Ok(self.opt(key, "true or false", Value::as_bool)?.unwrap_or(default))
    }

    pub(super) fn opt_str(&self, key: &str) -> Result<Option<&'a str>> {
        self.opt(key, "a string", Value::as_str)
    }

    pub(super) fn str(&self, key: &str) -> Result<&'a str> {
        self.required(key, "a string", self.opt_str(key)?)
    }

    pub(super) fn opt_list(&self, key: &str) -> Result<Option<&'a [Value]>> {
        self.opt(key, "a list", |v| v.as_array().map(Vec::as_slice))
    }

    pub(super) fn object(&self, key: &str) -> Result<Option<Fields<'a>>> {
        let map = self.opt(key, "an object", Value::as_object)?;
        Ok(map.map(|map| Fields { map, path: format!("{}.", self.name(key)) }))
    }

    /// The items of a list as `read` converts them; empty where the list is absent.
    pub(super) fn list_of<T>(
        &self,
        key: &str,
        expected: &str,
        read: impl Fn(&'a Value) -> Option<T>,
    ) -> Result<Vec<T>> {
        let items = self.opt_list(key)?.unwrap_or_default();
        items.iter().map(|item| read(item).map_or_else(|| self.wrong(key, expected, item), Ok)).collect()
    }
}
