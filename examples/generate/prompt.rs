//! The tokens of the prompts.

use anyhow::{anyhow, bail, Context, Result};
use candle_gdn_cli::args::{PromptArgs, RunArgs};
use candle_gdn_cli::chat::{Message, Template};
use candle_gdn_cli::status;
use candle_gdn_models::{ModelConfig, SplitMix64};
use std::path::Path;
use tokenizers::Tokenizer;

/// What is completed when nothing is asked for; the demo checkpoint knows how it goes on.
const DEFAULT_PROMPT: &str = "And it came to pass in those days, that there went out a decree";

/// The prompts as tokens: at least one, none empty, each within `room` tokens if there is such a bound and the positions of the model.
pub fn tokens(
    args: &PromptArgs,
    texts: Vec<String>,
    tokenizer: Option<&Tokenizer>,
    template: Option<&Template>,
    config: &ModelConfig,
    run: &RunArgs,
) -> Result<Vec<Vec<u32>>> {
    let room = run.max_seq_len;
    if let Some(count) = args.prompt_tokens {
        let batch = run.batch.unwrap_or(1);
        check_count(count, config, room).context("--prompt-tokens")?;
        return Ok((0..batch).map(|n| made_up(n, count, config.vocab_size)).collect());
    }
    let tokenizer = tokenizer.context("a tokenizer")?;
    let several = texts.len() > 1;
    let mut prompts = Vec::with_capacity(texts.len());
    for (i, text) in texts.into_iter().enumerate() {
        let text = match template {
            Some(template) => template.render(&[Message::user(text)], true)?,
            None => text,
        };
        // A template writes the special tokens itself.
        let ids = tokenizer.encode(text, !args.chat).map_err(|e| anyhow!("cannot tokenise: {e}"));
        let ids = ids.and_then(|encoding| checked(encoding.get_ids().to_vec(), config, room));
        let number = if several { format!(" {}", i + 1) } else { String::new() };
        prompts.push(ids.with_context(|| format!("prompt{number}"))?);
    }
    Ok(prompts)
}

/// Prompt number `n` of made-up ones, which differ from their first tokens on.
fn made_up(n: usize, count: usize, vocab: usize) -> Vec<u32> {
    let mut rng = SplitMix64::new(n as u64);
    (0..count).map(|_| (rng.next() % vocab as u64) as u32).collect()
}

fn checked(ids: Vec<u32>, config: &ModelConfig, room: Option<usize>) -> Result<Vec<u32>> {
    check(&ids, config, room)?;
    Ok(ids)
}

/// Whether the model can be fed so many.
fn check_count(count: usize, config: &ModelConfig, room: Option<usize>) -> Result<()> {
    let limit = config.max_position_embeddings;
    if count > limit {
        bail!("expected at most max_position_embeddings ({limit}) tokens, got {count}")
    }
    if let Some(room) = room.filter(|room| count > *room) {
        bail!("expected at most --max-seq-len ({room}) tokens, got {count}")
    }
    Ok(())
}

/// Whether the model can be fed these.
pub fn check(ids: &[u32], config: &ModelConfig, room: Option<usize>) -> Result<()> {
    if ids.is_empty() {
        bail!("expected at least 1 token, got none")
    }
    check_count(ids.len(), config, room)?;
    if let Some(id) = ids.iter().find(|&&id| id as usize >= config.vocab_size) {
        bail!("the tokenizer gives id {id}, the model has {} tokens", config.vocab_size)
    }
    Ok(())
}

/// The prompts; none where they are typed or made up.
pub fn texts(args: &PromptArgs) -> Result<Vec<String>> {
    if args.interactive || args.prompt_tokens.is_some() {
        return Ok(Vec::new());
    }
    if let Some(path) = &args.prompt_file {
        return Ok(vec![read("--prompt-file", path)?]);
    }
    if let Some(path) = &args.prompts_file {
        let text = read("--prompts-file", path)?;
        let lines: Vec<_> = text.lines().filter(|line| !line.trim().is_empty()).map(str::to_string).collect();
        if lines.is_empty() {
            bail!("--prompts-file: expected a prompt on a line, {} has none", path.display())
        }
        return Ok(lines);
    }
    if !args.prompt.is_empty() {
        return Ok(args.prompt.clone());
    }
    if args.chat {
        bail!("--chat: expected a message in --prompt or --prompt-file")
    }
    status!("prompt: {DEFAULT_PROMPT}");
    Ok(vec![DEFAULT_PROMPT.to_string()])
}

fn read(option: &str, path: &Path) -> Result<String> {
    let text = std::fs::read_to_string(path).with_context(|| format!("{option}: cannot read {}", path.display()))?;
    // Editors of Windows begin a file with a byte order mark.
    Ok(text.strip_prefix('\u{FEFF}').unwrap_or(&text).to_string())
}
