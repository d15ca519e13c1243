//! Tokens to text as they come.

use anyhow::{anyhow, Result};
use tokenizers::Tokenizer;

/// A character is up to four bytes, and each may be a token of its own: longer waits are not for
/// the rest of a character.
const LONGEST_WAIT: usize = 4;

/// Gives out whole characters only. A token's text can depend on the one before (a leading space,
/// the first bytes of a character), so each is decoded together with some before it.
pub struct TextStream<'a> {
    /// Without one there is no text.
    tokenizer: Option<&'a Tokenizer>,
    /// The ids whose text went out last, then those whose text has not.
    ids: Vec<u32>,
    out: usize,
}

impl<'a> TextStream<'a> {
    pub fn new(tokenizer: Option<&'a Tokenizer>) -> Self {
        Self { tokenizer, ids: Vec::new(), out: 0 }
    }

    /// The text that `id` completes; often one word, sometimes nothing yet.
    pub fn push(&mut self, id: u32) -> Result<String> {
        if self.tokenizer.is_none() {
            return Ok(String::new());
        }
        self.ids.push(id);
        let text = self.pending()?;
        let waiting = self.ids.len() - self.out;
        if text.is_empty() || (text.ends_with('\u{FFFD}') && waiting < LONGEST_WAIT) {
            return Ok(String::new());
        }
        self.ids.drain(..self.out);
        self.out = self.ids.len();
        Ok(text)
    }

    /// What is left at the end, without the beginning of a character that never came whole.
    pub fn finish(self) -> Result<String> {
        Ok(self.pending()?.trim_end_matches('\u{FFFD}').to_string())
    }

    fn pending(&self) -> Result<String> {
        let before = self.decode(&self.ids[..self.out])?;
        let all = self.decode(&self.ids)?;
        Ok(all.get(before.len()..).unwrap_or_default().to_string())
    }

    fn decode(&self, ids: &[u32]) -> Result<String> {
        let Some(tokenizer) = self.tokenizer else { return Ok(String::new()) };
        tokenizer.decode(ids, true).map_err(|e| anyhow!("cannot decode tokens: {e}"))
    }
}
