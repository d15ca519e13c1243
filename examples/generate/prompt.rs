//! The prompt's tokens.

use super::args::Args;
use super::chat;
use super::common::Checkpoint;
use anyhow::{anyhow, bail, Context, Result};
use candle_gdn::models::ModelConfig;
use tokenizers::Tokenizer;

/// What is completed when nothing is asked for; the demo checkpoint knows how it goes on.
const DEFAULT_PROMPT: &str = "And it came to pass in those days, that there went out a decree";

/// Never empty, and within the positions of the model.
pub fn tokens(args: &Args, checkpoint: &Checkpoint, tokenizer: &Tokenizer, config: &ModelConfig) -> Result<Vec<u32>> {
    let text = text(args)?;
    let text = if args.chat { chat::render(checkpoint.dir(), &text)? } else { text };
    // A template writes the special tokens itself.
    let encoding = tokenizer.encode(text, !args.chat).map_err(|e| anyhow!("prompt: cannot tokenise: {e}"))?;
    let ids = encoding.get_ids().to_vec();
    let limit = config.max_position_embeddings;
    if ids.is_empty() {
        bail!("prompt: expected at least 1 token, got none")
    }
    if ids.len() > limit {
        bail!("prompt: expected at most max_position_embeddings ({limit}) tokens, got {}", ids.len())
    }
    if let Some(id) = ids.iter().find(|&&id| id as usize >= config.vocab_size) {
        bail!("prompt: the tokenizer gives id {id}, the model has {} tokens", config.vocab_size)
    }
    Ok(ids)
}

fn text(args: &Args) -> Result<String> {
    match (&args.prompt, &args.prompt_file) {
        (Some(text), _) => Ok(text.clone()),
        (None, Some(path)) => {
            std::fs::read_to_string(path).with_context(|| format!("--prompt-file: cannot read {}", path.display()))
        }
        (None, None) if args.chat => bail!("--chat: expected a message in --prompt or --prompt-file"),
        (None, None) => {
            eprintln!("prompt: {DEFAULT_PROMPT}");
            Ok(DEFAULT_PROMPT.to_string())
        }
    }
}
