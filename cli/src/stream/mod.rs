//! Tokens to text as they come, up to where the text is to end.

use anyhow::{anyhow, Result};
use tokenizers::Tokenizer;

/// Gives out the text of the tokens so far as far as no later token changes it: all together it is the text of all tokens,
/// but for a beginning of a character at the end.
pub struct TextStream<'a> {
    /// Without one there is no text.
    tokenizer: Option<&'a Tokenizer>,
    /// The ids whose text went out last, which the text of the next can depend on (a leading space), then those since.
    ids: Vec<u32>,
    out: usize,
    /// Bytes that went out of the text since.
    sent: usize,
}

impl<'a> TextStream<'a> {
    pub fn new(tokenizer: Option<&'a Tokenizer>) -> Self {
        Self { tokenizer, ids: Vec::new(), out: 0, sent: 0 }
    }

    /// The text that `id` completes; often one word, sometimes nothing yet.
    pub fn push(&mut self, id: u32) -> Result<String> {
        self.ids.push(id);
        if self.ends_in_bytes()? {
            return Ok(String::new());
        }
        let text = self.pending()?;
        // What follows can complete the character at the end, and nothing before.
        let whole = text.trim_end_matches('\u{FFFD}').len();
        let new = text.get(self.sent..whole).unwrap_or_default().to_string();
        self.sent = self.sent.max(whole);
        if !text.is_empty() && whole == text.len() {
            self.ids.drain(..self.out);
            (self.out, self.sent) = (self.ids.len(), 0);
        }
        Ok(new)
    }

    /// What is left at the end, without the beginning of a character that never came whole.
    pub fn finish(&self) -> Result<String> {
        let text = self.pending()?;
        Ok(text.trim_end_matches('\u{FFFD}').get(self.sent..).unwrap_or_default().to_string())
    }

    /// Whether the last token with text is a byte, such as `<0xE2>`. Decoders read all bytes in a row as one text.
    fn ends_in_bytes(&self) -> Result<bool> {
        let Some(tokenizer) = self.tokenizer else { return Ok(false) };
        for &id in self.ids[self.out..].iter().rev() {
            let name = tokenizer.id_to_token(id).unwrap_or_default();
            if name.len() == 6 && name.starts_with("<0x") && name.ends_with('>') {
                return Ok(true);
            }
            if !self.decode(&[id])?.is_empty() {
                break;
            }
        }
        Ok(false)
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

/// Ends a text before the first of some texts, wherever their parts came from.
pub struct StopTexts<'a> {
    stops: &'a [String],
    /// What may be the beginning of one.
    held: String,
    found: bool,
}

impl<'a> StopTexts<'a> {
    /// None of `stops` is empty.
    pub fn new(stops: &'a [String]) -> Self {
        Self { stops, held: String::new(), found: false }
    }

    /// Whether one came.
    pub fn found(&self) -> bool {
        self.found
    }

    /// As much of the text so far, and not yet given out, as is certainly before the end.
    pub fn push(&mut self, text: &str) -> String {
        if self.found {
            return String::new();
        }
        self.held.push_str(text);
        let first = self.stops.iter().filter_map(|stop| self.held.find(stop.as_str())).min();
        self.found = first.is_some();
        let end = first.unwrap_or_else(|| {
            let begins = |rest: &str| self.stops.iter().any(|stop| stop.starts_with(rest));
            let starts = self.held.char_indices().map(|(start, _)| start);
            { starts }.find(|start| begins(&self.held[*start..])).unwrap_or(self.held.len())
        });
        let rest = self.held.split_off(end);
        std::mem::replace(&mut self.held, rest)
    }

    /// What is left at the end of the text.
    pub fn finish(&mut self) -> String {
        if self.found {
            String::new()
        } else {
            std::mem::take(&mut self.held)
        }
    }
}

#[cfg(test)]
mod tests;
