//! Prefixes that prompts share, fed once.

use super::event::Event;
use super::prefix_cache::PrefixCache;
use super::stats::PrefixTally;
use candle_core::Result;
use std::collections::VecDeque;

/// The states after prefixes of prompts.
///
/// Only the states that a waiting prompt will use are kept: those at the ends of common prefixes. A prompt that shares more with
/// a prompt being fed than is in the cache waits for it. Where prompts come one after the other, the last ones stand
/// for those to come: the longest prefix that a prompt shares with one of them is kept, and its own end.
#[derive(Debug)]
pub(super) struct Prefixes<V> {
    /// None where the budget is 0.
    cache: Option<PrefixCache<V>>,
    /// The last prompts, at most `most_recent` of them.
    recent: VecDeque<Vec<u32>>,
    most_recent: usize,
    /// Tokens that came from the cache, and all tokens of the prompts that began.
    reused: usize,
    asked: usize,
    /// The state after so many tokens was larger than the budget, and those of longer prefixes are: none is copied for nothing.
    too_large: usize,
}

impl<V> Prefixes<V> {
    /// At most `budget` bytes; 0 keeps nothing.
    pub fn new(block: usize, budget: usize, most_recent: usize) -> Result<Self> {
        let cache = if budget > 0 { Some(PrefixCache::new(block, budget)?) } else { None };
        Ok(Self { cache, recent: VecDeque::new(), most_recent, reused: 0, asked: 0, too_large: usize::MAX })
    }

    /// The length of what `fed`, which is being fed, and a later prompt have in common, in whole blocks that can be kept. It excludes
    /// the last token of the later one, which must be fed to get its logits.
    pub fn common(&self, fed: &[u32], later: &[u32]) -> usize {
        let Some(cache) = &self.cache else { return 0 };
        let blocks = fed.chunks_exact(cache.block).zip(usable(later).chunks_exact(cache.block));
        self.longest(blocks.take_while(|(fed, later)| fed == later).count() * cache.block)
    }

    /// The longest that can be kept of a prefix of so many tokens.
    fn longest(&self, tokens: usize) -> usize {
        let Some(cache) = &self.cache else { return 0 };
        tokens.min(self.too_large - 1) / cache.block * cache.block
    }

    /// Whether the state after so many tokens, which takes `bytes`, may be within the budget; asked before it is copied.
    pub fn may_keep(&mut self, tokens: usize, bytes: usize, events: &mut Vec<Event>) -> bool {
        if self.cache.as_ref().is_some_and(|cache| bytes > cache.budget) {
            self.refuse(tokens, bytes, events);
        }
        tokens < self.too_large
    }

    /// Reports the first state that is too large.
    fn refuse(&mut self, tokens: usize, bytes: usize, events: &mut Vec<Event>) {
        if self.too_large == usize::MAX {
            events.push(Event::PrefixTooLarge { tokens, bytes });
        }
        self.too_large = self.too_large.min(tokens);
    }

    /// The positions where the state of `prompt`, fed from `start` on, is kept for one of `waiting` or for one to come.
    pub fn cuts<'p>(&mut self, prompt: &[u32], start: usize, waiting: impl Iterator<Item = &'p [u32]>) -> Vec<usize> {
        let common = |other: &[u32]| self.common(prompt, other);
        let mut cuts: Vec<usize> = waiting.map(common).collect();
        // The longest one only: a state for each would make many short passes of a long prompt.
        cuts.extend(self.recent.iter().map(|other| common(other)).max());
        // Its own end, for a longer prompt, and for the same once more.
        if self.most_recent > 0 {
            cuts.extend([self.longest(prompt.len()), common(prompt)]);
        }
        cuts.retain(|position| *position > start);
        cuts.sort_unstable();
        cuts.dedup();
        if self.cache.is_some() && self.most_recent > 0 {
            self.recent.truncate(self.most_recent - 1);
            self.recent.push_front(prompt.to_vec());
        }
        cuts
    }

    /// Whether one of the prompts being fed, each with the cuts before it, will put a longer prefix of `prompt` into the cache than
    /// there is now.
    pub fn will_keep<'p>(&self, prompt: &[u32], mut fed: impl Iterator<Item = (&'p [u32], &'p [usize])>) -> bool {
        let Some(cache) = &self.cache else { return false };
        let cached = cache.peek(usable(prompt));
        fed.any(|(other, cuts)| {
            let common = self.common(other, prompt);
            cuts.iter().any(|cut| (cached + 1..=common).contains(cut))
        })
    }

    /// The longest prefix of `prompt` in the cache; counts as used.
    pub fn find(&mut self, prompt: &[u32]) -> Option<(usize, &V)> {
        self.asked += prompt.len();
        let found = self.cache.as_mut()?.longest(usable(prompt))?;
        self.reused += found.0;
        Some(found)
    }

    /// Keeps the state after `prefix`, whose memory has these parts (see [`PrefixCache::insert`]), unless it is larger than the
    /// budget. Reports what is new and what was dropped, and the first that was too large.
    pub fn keep(
        &mut self,
        prefix: &[u32],
        state: V,
        parts: Vec<(usize, usize)>,
        events: &mut Vec<Event>,
    ) -> Result<()> {
        let Some(cache) = &mut self.cache else { return Ok(()) };
        let (tokens, bytes) = (prefix.len(), parts.iter().map(|(_, bytes)| bytes).sum());
        let is_new = cache.peek(prefix) < prefix.len();
        let drop = |tokens| events.push(Event::PrefixDropped { tokens });
        let kept = cache.insert(prefix, state, parts, drop)?;
        if kept && is_new {
            events.push(Event::PrefixKept { tokens: prefix.to_vec() });
        }
        if !kept {
            self.refuse(tokens, bytes, events);
        }
        Ok(())
    }

    pub fn tally(&self) -> PrefixTally {
        let (hits, misses, bytes) =
            self.cache.as_ref().map_or((0, 0, 0), |cache| (cache.hits, cache.misses, cache.bytes));
        PrefixTally { reused: self.reused, asked: self.asked, hits, misses, bytes }
    }
}

/// All but the last token.
fn usable(prompt: &[u32]) -> &[u32] {
    &prompt[..prompt.len().saturating_sub(1)]
}
