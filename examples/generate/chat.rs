//! The chat template of a tokenizer.

use anyhow::{bail, Context, Result};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Value as JinjaValue};
use minijinja::{context, Environment, Error, ErrorKind};
use serde_json::Value;
use std::path::Path;

/// Renders `message` as the first one of a user, followed by the opening of the answer.
pub fn render(dir: &Path, message: &str) -> Result<String> {
    let path = dir.join("tokenizer_config.json");
    let config: Value = match read(&path)? {
        Some(text) => serde_json::from_str(&text).with_context(|| path.display().to_string())?,
        None => Value::Null,
    };
    let template = match read(&dir.join("chat_template.jinja"))? {
        Some(text) => text,
        None => match template(&config["chat_template"]) {
            Some(text) => text,
            None => bail!(
                "--chat: {} has no chat template, neither `chat_template` in tokenizer_config.json nor chat_template.jinja",
                dir.display()
            ),
        },
    };
    let mut env = environment()?;
    env.add_template("chat", &template).context("--chat: the chat template")?;
    let messages = [context! { role => "user", content => message }];
    env.get_template("chat")?
        .render(context! {
            messages => messages,
            add_generation_prompt => true,
            bos_token => token(&config["bos_token"]),
            eos_token => token(&config["eos_token"]),
        })
        .context("--chat: the chat template")
}

fn read(path: &Path) -> Result<Option<String>> {
    match std::fs::read_to_string(path) {
        Ok(text) => Ok(Some(text)),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(e).with_context(|| format!("cannot read {}", path.display())),
    }
}

/// A string, or the one called "default" of a list of named templates.
fn template(value: &Value) -> Option<String> {
    match value {
        Value::String(text) => Some(text.clone()),
        Value::Array(list) => {
            let default = list.iter().find(|t| t["name"] == "default")?;
            default["template"].as_str().map(str::to_string)
        }
        _ => None,
    }
}

/// A special token is written as a string or as an object with its content.
fn token(value: &Value) -> &str {
    value.as_str().or(value["content"].as_str()).unwrap_or_default()
}

/// As transformers sets Jinja up: templates are written for that.
fn environment() -> Result<Environment<'static>, Error> {
    let mut env = Environment::new();
    env.set_syntax(SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?);
    env.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    env.add_function("raise_exception", |message: String| -> Result<String, Error> {
        Err(Error::new(ErrorKind::InvalidOperation, message))
    });
    env.add_filter("tojson", tojson);
    Ok(env)
}

/// Python's `json.dumps`: spaces after `,` and `:`, and nothing escaped for HTML.
fn tojson(value: JinjaValue, kwargs: Kwargs) -> Result<String, Error> {
    let indent: Option<usize> = kwargs.get("indent")?;
    // Accepted and of no effect: we never escape, and our maps keep their order.
    let _: (Option<bool>, Option<bool>) = (kwargs.get("ensure_ascii")?, kwargs.get("sort_keys")?);
    kwargs.assert_all_used()?;
    let failed = |e: serde_json::Error| Error::new(ErrorKind::BadSerialization, e.to_string());
    let mut out = Vec::new();
    let result = match indent {
        Some(n) => {
            let spaces = vec![b' '; n];
            let formatter = serde_json::ser::PrettyFormatter::with_indent(&spaces);
            serde::Serialize::serialize(&value, &mut serde_json::Serializer::with_formatter(&mut out, formatter))
        }
        None => {
            serde::Serialize::serialize(&value, &mut serde_json::Serializer::with_formatter(&mut out, PythonFormatter))
        }
    };
    result.map_err(failed)?;
    String::from_utf8(out).map_err(|e| Error::new(ErrorKind::BadSerialization, e.to_string()))
}

struct PythonFormatter;

impl serde_json::ser::Formatter for PythonFormatter {
    fn begin_array_value<W: ?Sized + std::io::Write>(&mut self, w: &mut W, first: bool) -> std::io::Result<()> {
        w.write_all(if first { b"" } else { b", " })
    }

    fn begin_object_key<W: ?Sized + std::io::Write>(&mut self, w: &mut W, first: bool) -> std::io::Result<()> {
        w.write_all(if first { b"" } else { b", " })
    }

    fn begin_object_value<W: ?Sized + std::io::Write>(&mut self, w: &mut W) -> std::io::Result<()> {
        w.write_all(b": ")
    }
}
