//! Beginnings that prompts share, to be fed once.

use anyhow::Result;
use candle_gdn::PrefixCache;

const MIB: f64 = (1 << 20) as f64;

/// The states after beginnings of prompts, and how much they were of use.
///
/// All prompts are known from the start, so only the states that another prompt will ask for are kept: those at the
/// ends of common beginnings. A prompt that shares more with one being fed now than is in the cache waits for it.
pub struct Prefixes<V> {
    /// None where `--prefix-cache` is 0.
    cache: Option<PrefixCache<V>>,
    /// Tokens that came from the cache, and those of the prompts that began.
    reused: usize,
    asked: usize,
    /// A state that the cache has no room for is told once.
    told: bool,
}

impl<V> Prefixes<V> {
    /// At most `budget` bytes; 0 keeps nothing.
    pub fn new(block: usize, budget: usize) -> Result<Self> {
        let cache = if budget > 0 { Some(PrefixCache::new(block, budget)?) } else { None };
        Ok(Self { cache, reused: 0, asked: 0, told: false })
    }

    /// Tokens that two prompts begin with, in whole blocks, and without the last token of each: it must be fed, as
    /// logits come from nowhere else.
    fn common(&self, a: &[u32], b: &[u32]) -> usize {
        let Some(cache) = &self.cache else { return 0 };
        let blocks = |prompt| usable(prompt).chunks_exact(cache.block());
        blocks(a).zip(blocks(b)).take_while(|(a, b)| a == b).count() * cache.block()
    }

    /// Where the state of `prompt`, fed from `from` on, is to be kept for one of `waiting`.
    pub fn cuts<'p>(&self, prompt: &[u32], from: usize, waiting: impl Iterator<Item = &'p [u32]>) -> Vec<usize> {
        let mut cuts: Vec<usize> = waiting.map(|other| self.common(prompt, other)).filter(|at| *at > from).collect();
        cuts.sort_unstable();
        cuts.dedup();
        cuts
    }

    /// Whether one of the prompts `fed`, so far up to the tokens given, will leave a longer beginning of `prompt` in
    /// the cache than it has now.
    pub fn coming<'p>(&self, prompt: &[u32], mut fed: impl Iterator<Item = (&'p [u32], usize)>) -> bool {
        let Some(cache) = &self.cache else { return false };
        let cached = cache.peek(usable(prompt));
        fed.any(|(other, done)| {
            let common = self.common(prompt, other);
            common > cached && common > done
        })
    }

    /// The longest beginning of `prompt` that is there; counted as used.
    pub fn find(&mut self, prompt: &[u32]) -> Option<(usize, &V)> {
        self.asked += prompt.len();
        let found = self.cache.as_mut()?.longest(usable(prompt))?;
        self.reused += found.0;
        Some(found)
    }

    /// Keeps the state after `prefix`; a sentence for the user if there is no room for one.
    pub fn keep(&mut self, prefix: &[u32], state: V, bytes: usize) -> Result<Option<String>> {
        let Some(cache) = &mut self.cache else { return Ok(None) };
        if cache.insert(prefix, state, bytes)? || std::mem::replace(&mut self.told, true) {
            return Ok(None);
        }
        let (need, room) = (bytes as f64 / MIB, cache.budget() as f64 / MIB);
        Ok(Some(format!(
            "cache: the state after {} tokens takes {need:.1} MiB, more than --prefix-cache {room:.0}",
            prefix.len()
        )))
    }
}

/// All but the last token.
fn usable(prompt: &[u32]) -> &[u32] {
    &prompt[..prompt.len().saturating_sub(1)]
}

impl<V> std::fmt::Display for Prefixes<V> {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        let Self { reused, asked, .. } = self;
        write!(f, "cache: {reused} of {asked} prompt tokens reused")?;
        let Some(cache) = &self.cache else { return write!(f, ", --prefix-cache is 0") };
        let (hits, held) = (cache.hits(), cache.size_in_bytes() as f64 / MIB);
        write!(f, ", {hits} of {} prompts hit, {held:.1} MiB held", hits + cache.misses())
    }
}
