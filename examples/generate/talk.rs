//! What is said in a talk, and how it becomes tokens.

use anyhow::{anyhow, Result};
use candle_gdn_cli::chat::{Message, Template};
use tokenizers::Tokenizer;

pub struct Talk<'a> {
    tokenizer: &'a Tokenizer,
    kind: Kind<'a>,
}

enum Kind<'a> {
    /// Messages in turn, written as the model knows them.
    Chat { template: &'a Template, messages: Vec<Message> },
    /// One text: lines, and what the model continued them with.
    Text { tokens: Vec<u32> },
}

/// What the model is to continue.
pub struct Prompt {
    /// All that was said, up to where the answer begins.
    pub tokens: Vec<u32>,
    /// Those that later prompts begin with too, whatever becomes of the answer: a template may write it otherwise once
    /// it is no longer the last.
    pub lasting: usize,
}

impl<'a> Talk<'a> {
    pub fn new(tokenizer: &'a Tokenizer, template: Option<&'a Template>) -> Self {
        let kind = match template {
            Some(template) => Kind::Chat { template, messages: Vec::new() },
            None => Kind::Text { tokens: Vec::new() },
        };
        Self { tokenizer, kind }
    }

    /// Whether there is a template.
    pub fn is_chat(&self) -> bool {
        matches!(self.kind, Kind::Chat { .. })
    }

    /// What was said and now `message`, which counts only once there is an answer.
    pub fn ask(&self, message: &str) -> Result<Prompt> {
        match &self.kind {
            Kind::Chat { template, messages } => {
                let messages = [&messages[..], &[Message::user(message)]].concat();
                // A template writes the special tokens itself.
                let tokens = self.encode(&template.render(&messages, true)?, false)?;
                let before = self.encode(&template.render(&messages, false)?, false)?;
                Ok(Prompt { lasting: common(&tokens, &before), tokens })
            }
            Kind::Text { tokens } => {
                let newline = if tokens.is_empty() { "" } else { "\n" };
                let more = self.encode(&format!("{newline}{message}"), tokens.is_empty())?;
                // Nothing is ever written otherwise.
                Ok(Prompt { tokens: [&tokens[..], &more].concat(), lasting: 0 })
            }
        }
    }

    /// The model has said `answer` to `message`; `all` are the tokens of the prompt and of that.
    pub fn answered(&mut self, message: &str, answer: String, all: Vec<u32>) {
        match &mut self.kind {
            Kind::Chat { messages, .. } => messages.extend([Message::user(message), Message::assistant(answer)]),
            Kind::Text { tokens } => *tokens = all,
        }
    }

    /// As if nothing had been said.
    pub fn clear(&mut self) {
        match &mut self.kind {
            Kind::Chat { messages, .. } => messages.clear(),
            Kind::Text { tokens } => tokens.clear(),
        }
    }

    pub fn encode(&self, text: &str, special: bool) -> Result<Vec<u32>> {
        let encoding = self.tokenizer.encode(text, special).map_err(|e| anyhow!("cannot tokenise: {e}"))?;
        Ok(encoding.get_ids().to_vec())
    }
}

/// Tokens that both begin with.
pub fn common(a: &[u32], b: &[u32]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}
