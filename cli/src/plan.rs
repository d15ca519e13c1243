//! How much runs at once, and how long it may get.

use crate::args::Args;
use crate::Room;
use candle_gdn_models::ModelConfig;

/// MiB of the prefix cache, where several prompts may share prefixes.
const PREFIX_CACHE: usize = 256;

/// Tokens of a talk that fit, by default.
const TALK_LEN: usize = 32768;

/// Fewer are not offered for one.
const LEAST_TALK: usize = 1024;

/// Snapshots of prefixes of a talk that are kept at once, besides that of its end.
pub const SNAPSHOTS: usize = 2;

pub struct Plan {
    /// Sequences at once.
    pub batch: usize,
    /// Tokens of a sequence that fit.
    pub max_len: usize,
    /// With fewer there is no room for a prompt, or none for a talk.
    least_len: usize,
    /// Tokens that a sequence may have, and words before this number in a message.
    pub positions: usize,
    pub positions_of: &'static str,
    /// Bytes of the prefix cache.
    pub cache: usize,
    /// Prefixes that it can have.
    prefixes: usize,
    /// Tokens that `--draft` drafts at once.
    draft: usize,
    /// Whether the draft head is to be loaded.
    pub draft_head: bool,
    snapshots: usize,
}

impl Plan {
    pub fn new(args: &Args, config: &ModelConfig, draft_head: bool, prompts: &[Vec<u32>]) -> Self {
        let (run, model_len) = (&args.run, config.max_position_embeddings);
        let longest = prompts.iter().map(Vec::len).max().unwrap_or(0);
        let talk = args.prompts.interactive;
        let (positions, positions_of) = match run.max_seq_len {
            Some(len) if len < model_len => (len, "--max-seq-len gives"),
            None if talk && TALK_LEN < model_len => (TALK_LEN, "without --max-seq-len there are"),
            _ => (model_len, "the model has"),
        };
        let may_share = prompts.len() > 1 && args.prompts.prompt_tokens.is_none();
        let cache = run.prefix_cache.unwrap_or(if may_share { PREFIX_CACHE } else { 0 });
        Self {
            batch: if talk { 1 } else { run.batch.unwrap_or(prompts.len()).min(prompts.len()) },
            max_len: if talk { positions } else { longest.saturating_add(args.sample_len()).min(positions) },
            least_len: if talk { LEAST_TALK.min(positions) } else { longest.saturating_add(1) },
            positions,
            positions_of,
            cache: cache.saturating_mul(1 << 20),
            prefixes: prompts.len().saturating_sub(1),
            draft: run.draft,
            draft_head,
            // The end of the last answer, while the next one goes on from it, and that of the next one with the prefix before it.
            snapshots: if talk { SNAPSHOTS + 3 } else { 0 },
        }
    }

    pub fn room(&self, draft_head: bool) -> Room {
        let Self { batch, max_len, least_len, cache, prefixes, draft, snapshots, .. } = *self;
        Room { sequences: batch, max_len, least_len, draft, snapshots, cache, prefixes, draft_head }
    }
}
