//! The chat template of a tokenizer.

use crate::{gguf_tokenizer, Checkpoint};
use anyhow::{bail, Context, Result};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Value as JinjaValue};
use minijinja::{context, Environment, Error, ErrorKind};
use serde::Serialize;
use serde_json::ser::{Formatter, PrettyFormatter};
use serde_json::{Serializer, Value};

const NAME: &str = "chat";

/// Steps that a template may run: it needs some hundreds a message.
const FUEL: u64 = 1_000_000;
/// Bytes that it may write, more than any model reads.
const MAX_BYTES: usize = 64 << 20;

/// A message of a chat.
#[derive(Clone, Debug)]
pub struct Message {
    pub role: &'static str,
    pub content: String,
}

impl Message {
    pub fn user(content: impl Into<String>) -> Self {
        Self { role: "user", content: content.into() }
    }

    pub fn assistant(content: impl Into<String>) -> Self {
        Self { role: "assistant", content: content.into() }
    }
}

pub struct Template {
    env: Environment<'static>,
    /// Special tokens that templates use.
    bos: String,
    eos: String,
}

impl Template {
    /// The template of the checkpoint; None where it has none.
    pub fn find(checkpoint: &Checkpoint) -> Result<Option<Self>> {
        let (text, [bos, eos]) = match checkpoint.gguf() {
            Some(file) => {
                let special = |name| gguf_tokenizer::special_token(file, name).unwrap_or_default().to_string();
                (gguf_tokenizer::chat_template(file).map(str::to_string), ["bos", "eos"].map(special))
            }
            None => {
                let config: Value = match checkpoint.text("tokenizer_config.json")? {
                    Some((text, path)) => serde_json::from_str(&text).with_context(|| path.display().to_string())?,
                    None => Value::Null,
                };
                let file = checkpoint.text("chat_template.jinja")?.map(|(text, _)| text);
                let special = |name| token(&config[name]).to_string();
                (file.or_else(|| template(&config["chat_template"])), ["bos_token", "eos_token"].map(special))
            }
        };
        let Some(text) = text else { return Ok(None) };
        let mut env = environment()?;
        env.add_template_owned(NAME, text).context("the chat template")?;
        Ok(Some(Self { env, bos, eos }))
    }

    /// As [`Template::find`]; a missing template is an error.
    pub fn load(checkpoint: &Checkpoint) -> Result<Self> {
        let Some(template) = Self::find(checkpoint).context("--chat")? else {
            bail!(
                "--chat: {} has no chat template, neither `chat_template` in tokenizer_config.json nor \
                 chat_template.jinja, nor in a GGUF file",
                checkpoint.name()
            )
        };
        Ok(template)
    }

    /// The text of `messages`, and with `answer` the opening of the next answer.
    pub fn render(&self, messages: &[Message], answer: bool) -> Result<String> {
        let message = |m: &Message| context! { role => m.role, content => m.content.as_str() };
        let messages: Vec<JinjaValue> = messages.iter().map(message).collect();
        let context = context! {
            messages => messages,
            add_generation_prompt => answer,
            bos_token => self.bos.as_str(),
            eos_token => self.eos.as_str(),
        };
        let mut text = Limited(Vec::new());
        self.env.get_template(NAME)?.render_captured_to(context, &mut text).context("--chat: the chat template")?;
        String::from_utf8(text.0).context("--chat: the chat template")
    }
}

/// What a template wrote, up to [`MAX_BYTES`].
struct Limited(Vec<u8>);

impl std::io::Write for Limited {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        if self.0.len() + bytes.len() > MAX_BYTES {
            return Err(std::io::Error::other(format!("expected at most {MAX_BYTES} bytes of text")));
        }
        self.0.write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
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

/// Jinja with the settings of transformers, which templates are written for.
fn environment() -> Result<Environment<'static>, Error> {
    let mut env = Environment::new();
    env.set_syntax(SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?);
    env.set_fuel(Some(FUEL));
    env.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    env.add_function("raise_exception", |message: String| -> Result<String, Error> {
        Err(Error::new(ErrorKind::InvalidOperation, message))
    });
    env.add_filter("tojson", tojson);
    Ok(env)
}

/// Python's `json.dumps`: spaces after `,` and `:`, and nothing escaped for HTML.
fn tojson(value: JinjaValue, kwargs: Kwargs) -> Result<String, Error> {
    const MOST_SPACES: usize = 64;
    let indent: Option<usize> = kwargs.get("indent")?;
    // Accepted and of no effect: we never escape, and our maps keep their order.
    let _: (Option<bool>, Option<bool>) = (kwargs.get("ensure_ascii")?, kwargs.get("sort_keys")?);
    kwargs.assert_all_used()?;
    if indent.is_some_and(|spaces| spaces > MOST_SPACES) {
        return Err(Error::new(ErrorKind::InvalidOperation, format!("tojson: indent: expected at most {MOST_SPACES}")));
    }
    let failed = |e: serde_json::Error| Error::new(ErrorKind::BadSerialization, e.to_string());
    let mut out = Vec::new();
    let spaces = vec![b' '; indent.unwrap_or(0)];
    let result = match indent {
        Some(_) => value.serialize(&mut Serializer::with_formatter(&mut out, PrettyFormatter::with_indent(&spaces))),
        None => value.serialize(&mut Serializer::with_formatter(&mut out, PythonFormatter)),
    };
    result.map_err(failed)?;
    String::from_utf8(out).map_err(|e| Error::new(ErrorKind::BadSerialization, e.to_string()))
}

struct PythonFormatter;

impl Formatter for PythonFormatter {
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
