//! The chat template of a tokenizer.

mod jinja;
mod json;
mod methods;
mod source;
mod watch;

use crate::args::ChatArgs;
use crate::{gguf_tokenizer, Checkpoint};
use anyhow::{bail, ensure, Context, Result};
use jinja::Jinja;
use minijinja::context;
use minijinja::value::Value as JinjaValue;
use serde_json::Value;
use std::collections::BTreeMap;
use tokenizers::Tokenizer;

/// What templates call the switch for thinking.
pub(crate) const THINKING: [&str; 2] = ["enable_thinking", "thinking"];

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
    jinja: Jinja,
    /// What it is given beside the messages: special tokens, and what the command line says.
    values: BTreeMap<String, JinjaValue>,
    system: Option<Message>,
}

impl Template {
    /// The template of the command line, else of the checkpoint; None where there is none and nothing asks for it.
    ///
    /// # Errors
    /// When it is no Jinja, has no use for what the command line gives it, or several have names and none is the default.
    pub fn find(checkpoint: &Checkpoint, args: &ChatArgs) -> Result<Option<Self>> {
        let mut values: BTreeMap<_, _> = special_tokens(checkpoint)?.into_iter().collect();
        // As transformers: none, which is not undefined.
        values.extend(["tools", "documents"].map(|name| (name.to_string(), JinjaValue::from(()))));
        if args.no_thinking {
            values.extend(THINKING.map(|name| (name.to_string(), JinjaValue::from(false))));
        }
        values.extend(args.template_arg.iter().cloned());
        let text = match &args.chat_template {
            Some(path) => {
                let text = std::fs::read_to_string(path);
                let text = text.with_context(|| format!("--chat-template: cannot read {}", path.display()))?;
                Some(text.strip_prefix('\u{FEFF}').unwrap_or(&text).to_string())
            }
            None => choose(templates(checkpoint)?, values["tools"].is_true())?,
        };
        let Some(text) = text else {
            return match args.option() {
                Some(option) => bail!("{option}: {} has no chat template", checkpoint.name()),
                None => Ok(None),
            };
        };
        let jinja = Jinja::new(&text)?;
        let mut reads_any = false;
        for name in THINKING {
            reads_any |= jinja.reads(name)?;
        }
        if args.no_thinking && !reads_any {
            bail!("--no-thinking: the chat template reads neither `{}`", THINKING.join("` nor `"))
        }
        for (name, _) in &args.template_arg {
            ensure!(jinja.reads(name)?, "--template-arg: the chat template does not read `{name}`");
        }
        let system = args.system.clone().map(|content| Message { role: "system", content });
        Ok(Some(Self { jinja, values, system }))
    }

    /// As [`Template::find`]; a missing template is an error.
    pub fn load(checkpoint: &Checkpoint, args: &ChatArgs) -> Result<Self> {
        let Some(template) = Self::find(checkpoint, args).context("--chat")? else {
            bail!(
                "--chat: {} has no chat template, neither chat_template.jinja nor `chat_template` in \
                 tokenizer_config.json or chat_template.json, nor in a GGUF file: --chat-template FILE gives one",
                checkpoint.name()
            )
        };
        Ok(template)
    }

    /// The text of `messages`, and with `answer` the opening of the next answer.
    ///
    /// # Errors
    /// What the template raises.
    pub fn render(&self, messages: &[Message], answer: bool) -> Result<String> {
        let message = |m: &Message| context! { role => m.role, content => m.content.as_str() };
        let messages: JinjaValue = self.system.iter().chain(messages).map(message).collect();
        let said = context! { messages, add_generation_prompt => answer };
        self.jinja.render(context! { ..said, ..JinjaValue::from_pairs(self.values.clone()) }).context("--chat")
    }

    /// The special token that the template writes behind an answer, if it does.
    pub fn end_of_turn(&self, tokenizer: &Tokenizer) -> Option<u32> {
        const ANSWER: &str = "An answer.";
        // A template may refuse messages like these.
        let text = self.render(&[Message::user("A question."), Message::assistant(ANSWER)], false).ok()?;
        let (_, end) = text.rsplit_once(ANSWER)?;
        let end = tokenizer.encode(end.trim_start(), false).ok()?;
        let &first = end.get_ids().first()?;
        tokenizer.get_added_tokens_decoder().get(&first).is_some_and(|token| token.special).then_some(first)
    }
}

/// The special tokens of the tokenizer by the names that templates have for them.
pub fn special_tokens(checkpoint: &Checkpoint) -> Result<BTreeMap<String, JinjaValue>> {
    if let Some(file) = checkpoint.gguf() {
        let token = |name| Some((format!("{name}_token"), gguf_tokenizer::special_token(file, name)?.into()));
        return Ok(["bos", "eos"].into_iter().filter_map(token).collect());
    }
    let mut tokens = BTreeMap::new();
    // The first file that knows one counts.
    for name in ["tokenizer_config.json", "special_tokens_map.json"] {
        for (key, value) in checkpoint.json(name)?.as_object().into_iter().flatten() {
            // A token is written as a string or as an object with its content.
            if let Some(token) = value.as_str().or(value["content"].as_str()).filter(|_| key.ends_with("_token")) {
                tokens.entry(key.clone()).or_insert(token.into());
            }
        }
    }
    Ok(tokens)
}

/// The templates of the checkpoint by name.
fn templates(checkpoint: &Checkpoint) -> Result<BTreeMap<String, String>> {
    if let Some(file) = checkpoint.gguf() {
        return Ok(gguf_tokenizer::chat_templates(file));
    }
    let mut found: BTreeMap<_, _> = checkpoint.texts("additional_chat_templates", "jinja")?.into_iter().collect();
    found.extend(checkpoint.text("chat_template.jinja")?.map(|(text, _)| ("default".to_string(), text)));
    for name in ["tokenizer_config.json", "chat_template.json"] {
        if !found.is_empty() {
            break;
        }
        let text = |value: &Value| value.as_str().map(str::to_string);
        match &checkpoint.json(name)?["chat_template"] {
            Value::String(text) => found.extend([("default".into(), text.clone())]),
            Value::Array(list) => {
                found.extend(list.iter().filter_map(|t| Some((text(&t["name"])?, text(&t["template"])?))))
            }
            Value::Object(map) => {
                found.extend(map.iter().filter_map(|(name, value)| Some((name.clone(), text(value)?))))
            }
            Value::Null => {}
            other => bail!("{name}: `chat_template`: expected a text or texts with names, got {other}"),
        }
    }
    Ok(found)
}

/// The one that transformers takes.
fn choose(mut templates: BTreeMap<String, String>, tools: bool) -> Result<Option<String>> {
    let tool_use = templates.remove("tool_use").filter(|_| tools);
    match tool_use.or(templates.remove("default")) {
        None if !templates.is_empty() => {
            let names: Vec<_> = templates.into_keys().collect();
            bail!("the chat templates: expected one with the name \"default\", got {}", names.join(", "))
        }
        found => Ok(found),
    }
}

#[cfg(test)]
mod tests;
