//! What the engine has done and has to do, for Prometheus and the router.

use candle_gdn_models::{EngineStats, FinishReason};
use dynamo_backend_common::{ComponentSnapshot, SnapshotPublisher};
use std::fmt::Write;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

/// After a step.
#[derive(Clone, Copy, Debug, Default)]
pub struct Figures {
    pub stats: EngineStats,
    /// Requests that wait for room, and those that run.
    pub waiting: usize,
    pub running: usize,
    /// Of prompts and completions of both.
    pub tokens: usize,
}

/// Requests that have ended.
#[derive(Clone, Copy, Debug, Default)]
struct Ended {
    stop: u64,
    length: u64,
    cancelled: u64,
    failed: u64,
    refused: u64,
}

/// What the engine's thread tells the others.
#[derive(Default)]
pub struct Shared {
    figures: Mutex<(Figures, Ended)>,
    publisher: OnceLock<Arc<SnapshotPublisher>>,
    /// Tokens of a block, and what there is room for in all: sequences, and tokens of each.
    pub block: usize,
    pub sequences: usize,
    pub max_len: OnceLock<usize>,
}

impl Shared {
    pub fn new(block: usize, sequences: usize) -> Self {
        Self { block, sequences, ..Self::default() }
    }

    fn lock(&self) -> MutexGuard<'_, (Figures, Ended)> {
        self.figures.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Requests that have not ended.
    pub fn in_flight(&self) -> usize {
        let (figures, _) = *self.lock();
        figures.waiting + figures.running
    }

    /// Blocks that there is room for.
    pub fn total_blocks(&self) -> u64 {
        let tokens = self.sequences.saturating_mul(self.max_len.get().copied().unwrap_or(0));
        (tokens / self.block.max(1)) as u64
    }

    pub fn count_refused(&self) {
        self.lock().1.refused += 1;
    }

    pub fn count_finished(&self, reason: &FinishReason) {
        let ended = &mut self.lock().1;
        *match reason {
            FinishReason::Stop => &mut ended.stop,
            FinishReason::MaxNewTokens | FinishReason::MaxLen => &mut ended.length,
            FinishReason::Cancelled => &mut ended.cancelled,
            FinishReason::Failed(_) => &mut ended.failed,
        } += 1;
    }

    /// Tells the router too, where the number of blocks has changed.
    pub fn tell(&self, figures: Figures) {
        let before = std::mem::replace(&mut self.lock().0, figures);
        let blocks = |figures: &Figures| (figures.tokens / self.block.max(1)) as u64;
        if let (Some(publisher), true) = (self.publisher.get(), blocks(&before) != blocks(&figures)) {
            publisher.publish(0, self.snapshot(&figures, blocks(&figures)));
        }
    }

    /// Where the router listens.
    pub fn set_publisher(&self, publisher: Arc<SnapshotPublisher>) {
        let (figures, _) = *self.lock();
        publisher.publish(0, self.snapshot(&figures, 0));
        // It is told once.
        let _ = self.publisher.set(publisher);
    }

    fn snapshot(&self, figures: &Figures, blocks: u64) -> ComponentSnapshot {
        let (prefixes, total) = (figures.stats.prefixes, self.total_blocks());
        ComponentSnapshot {
            kv_used_blocks: blocks,
            kv_total_blocks: total,
            gpu_cache_usage: if total > 0 { blocks.min(total) as f32 / total as f32 } else { 0. },
            kv_cache_hit_rate: (prefixes.asked > 0).then(|| prefixes.reused as f32 / prefixes.asked as f32),
            dp_rank: 0,
        }
    }

    /// The text that Prometheus reads.
    pub fn exposition(&self, model: &str) -> String {
        let (Figures { stats, waiting, running, tokens }, ended) = *self.lock();
        let model = model.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
        let (prefixes, drafts, head) = (stats.prefixes, stats.drafts, stats.head);
        let mut text = String::new();
        let mut family = |name: &str, kind: &str, help: &str, values: &[(&str, f64)]| {
            let _ = writeln!(text, "# HELP candle_gdn_{name} {help}\n# TYPE candle_gdn_{name} {kind}");
            for (label, value) in values {
                let _ = writeln!(text, "candle_gdn_{name}{{model=\"{model}\"{label}}} {value}");
            }
        };
        let reasons = [
            (",reason=\"stop\"", ended.stop as f64),
            (",reason=\"length\"", ended.length as f64),
            (",reason=\"cancelled\"", ended.cancelled as f64),
            (",reason=\"failed\"", ended.failed as f64),
            (",reason=\"refused\"", ended.refused as f64),
        ];
        family("requests_total", "counter", "Requests that have ended, by the reason.", &reasons);
        let one = |x: usize| [("", x as f64)];
        family("requests_running", "gauge", "Requests that have a sequence of the pool.", &one(running));
        family("requests_waiting", "gauge", "Requests that wait for one.", &one(waiting));
        family("pool_sequences", "gauge", "Sequences of the pool.", &one(self.sequences));
        family("tokens_held", "gauge", "Tokens of all requests, prompts and completions.", &one(tokens));
        family("prompt_tokens_total", "counter", "Tokens of prompts that were fed.", &one(stats.prompt.tokens));
        let seconds = [("", stats.prompt.time.as_secs_f64())];
        family("prompt_seconds_total", "counter", "Time that these took.", &seconds);
        family("decode_tokens_total", "counter", "Tokens of decode steps.", &one(stats.decode.tokens));
        let seconds = [("", stats.decode.time.as_secs_f64())];
        family("decode_seconds_total", "counter", "Time that these took.", &seconds);
        family("prefix_asked_tokens_total", "counter", "Tokens of prompts that began.", &one(prefixes.asked));
        family("prefix_reused_tokens_total", "counter", "Of these, from the prefix cache.", &one(prefixes.reused));
        family("prefix_hits_total", "counter", "Prompts that found a beginning.", &[("", prefixes.hits as f64)]);
        family("prefix_misses_total", "counter", "Prompts that found none.", &[("", prefixes.misses as f64)]);
        family("prefix_bytes", "gauge", "Bytes of the prefix cache, shared ones once.", &one(prefixes.bytes));
        let by = [(",by=\"text\"", drafts.drafted as f64), (",by=\"head\"", head.drafted.iter().sum::<usize>() as f64)];
        family("drafts_total", "counter", "Tokens that were drafted.", &by);
        let by = [(",by=\"text\"", drafts.accepted as f64), (",by=\"head\"", head.accepted.iter().sum::<usize>() as f64)];
        family("drafts_accepted_total", "counter", "Of these, that were right.", &by);
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_family_has_its_lines() {
        let shared = Shared::new(64, 4);
        shared.count_finished(&FinishReason::Stop);
        shared.count_finished(&FinishReason::MaxLen);
        shared.tell(Figures { waiting: 2, running: 3, tokens: 700, ..Figures::default() });
        assert_eq!(shared.in_flight(), 5);
        let text = shared.exposition("a\"b");
        for line in [
            "candle_gdn_requests_total{model=\"a\\\"b\",reason=\"stop\"} 1",
            "candle_gdn_requests_total{model=\"a\\\"b\",reason=\"length\"} 1",
            "candle_gdn_requests_waiting{model=\"a\\\"b\"} 2",
            "candle_gdn_pool_sequences{model=\"a\\\"b\"} 4",
            "candle_gdn_tokens_held{model=\"a\\\"b\"} 700",
        ] {
            assert!(text.lines().any(|other| other == line), "{line} in\n{text}");
        }
        let names = |start: &str| text.lines().filter(|line| line.starts_with(start)).count();
        assert_eq!(names("# HELP "), names("# TYPE "));
    }
}
