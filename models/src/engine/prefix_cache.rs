//! What was computed for prefixes of token sequences, to be used again.

use crate::sequences::fingerprint::hash_tokens;
use candle_core::{bail, Result};
use std::collections::{BTreeMap, HashMap};

#[cfg(test)]
mod tests;

/// Values for prefixes of token sequences that end at multiples of a block of tokens, up to a budget of bytes; those
/// that were used longest ago go first.
///
/// A plain structure on the host: what a value is, and what it holds on which device, is for the caller. Values may share memory,
/// of which each part counts once.
///
/// Prefixes are found by a hash of their blocks and then compared token by token, so that no collision gives the value of
/// other tokens. The tokens are kept once a block: a prefix refers to the one a block shorter, which stays as long as
/// a longer one needs it, though its value may have gone. They do not count towards the budget.
#[derive(Debug)]
pub(crate) struct PrefixCache<V> {
    /// Tokens of a block.
    pub block: usize,
    pub budget: usize,
    /// Bytes of all parts of the values.
    pub bytes: usize,
    /// By the number of a part: how many values have it.
    parts: HashMap<usize, usize>,
    nodes: HashMap<u64, Node<V>>,
    /// By the hash of the prefix: nodes that may be it.
    by_hash: HashMap<u64, Vec<u64>>,
    /// By time of last use: nodes with values.
    by_use: BTreeMap<u64, u64>,
    /// Counts nodes and uses, so that none comes twice.
    clock: u64,
    /// Calls of [`Self::longest`] that found a prefix, and that found none.
    pub hits: u64,
    pub misses: u64,
    hash: fn(u64, &[u32]) -> u64,
}

/// A prefix: the last of its blocks, and the node of the blocks before.
#[derive(Debug)]
struct Node<V> {
    parent: Option<u64>,
    hash: u64,
    tokens: Box<[u32]>,
    /// Longer prefixes that refer to this one.
    children: usize,
    value: Option<Held<V>>,
}

#[derive(Debug)]
struct Held<V> {
    value: V,
    parts: Vec<(usize, usize)>,
    used: u64,
}

impl<V> PrefixCache<V> {
    /// For values at multiples of `block` tokens, of up to `budget` bytes together.
    ///
    /// # Errors
    /// When `block` is zero.
    pub fn new(block: usize, budget: usize) -> Result<Self> {
        if block == 0 {
            bail!("PrefixCache: block: expected at least 1 token, got 0");
        }
        Ok(Self {
            block,
            budget,
            bytes: 0,
            parts: HashMap::new(),
            nodes: HashMap::new(),
            by_hash: HashMap::new(),
            by_use: BTreeMap::new(),
            clock: 0,
            hits: 0,
            misses: 0,
            hash: hash_tokens,
        })
    }

    /// The longest prefix of `tokens` that has a value: how many tokens it has, and the value, which counts as used now.
    /// Counts a hit or a miss.
    ///
    /// To leave at least one token to be fed, as a model needs to give logits, pass all tokens but the last.
    pub fn longest(&mut self, tokens: &[u32]) -> Option<(usize, &V)> {
        let Some((id, len)) = self.find(tokens) else {
            self.misses += 1;
            return None;
        };
        self.hits += 1;
        self.touch(id);
        let held = self.nodes.get(&id)?.value.as_ref()?;
        Some((len, &held.value))
    }

    /// How many tokens [`Self::longest`] would find, without counting or using anything.
    pub fn peek(&self, tokens: &[u32]) -> usize {
        self.find(tokens).map_or(0, |(_, len)| len)
    }

    /// The node of the longest prefix with a value, and its tokens.
    fn find(&self, tokens: &[u32]) -> Option<(u64, usize)> {
        let (mut node, mut hash, mut best) = (None, 0, None);
        for (i, block) in tokens.chunks_exact(self.block).enumerate() {
            hash = (self.hash)(hash, block);
            let Some(id) = self.child(node, hash, block) else { break };
            if self.nodes[&id].value.is_some() {
                best = Some((id, (i + 1) * self.block));
            }
            node = Some(id);
        }
        best
    }

    /// Keeps `value` for the prefix `tokens`, in place of one that it had, and drops those used longest ago until all are within
    /// the budget; `dropped` gets each prefix that is left without a value. `parts` is the memory of the value: the number and the
    /// bytes of each part, which values may share. Returns whether the value was kept: one larger than the whole budget is not, and
    /// nothing is dropped for it but what the prefix had.
    ///
    /// # Errors
    /// When `tokens` is empty or does not end at a block.
    pub fn insert(
        &mut self,
        tokens: &[u32],
        value: V,
        parts: Vec<(usize, usize)>,
        mut dropped: impl FnMut(Vec<u32>),
    ) -> Result<bool> {
        if tokens.is_empty() || !tokens.len().is_multiple_of(self.block) {
            bail!(
                "PrefixCache: tokens: expected a positive multiple of {} (the block), got {}",
                self.block,
                tokens.len()
            );
        }
        let (mut node, mut hash) = (None, 0);
        for block in tokens.chunks_exact(self.block) {
            hash = (self.hash)(hash, block);
            node = Some(match self.child(node, hash, block) {
                Some(id) => id,
                None => self.grow(node, hash, block),
            });
        }
        let Some(id) = node else { return Ok(false) };
        let had_one = self.take_value(id);
        let keep = parts.iter().map(|(_, bytes)| bytes).sum::<usize>() <= self.budget;
        if !keep && had_one {
            dropped(tokens.to_vec());
        }
        if keep {
            self.clock += 1;
            let used = self.clock;
            for (part, bytes) in &parts {
                let values = self.parts.entry(*part).or_insert(0);
                self.bytes += if *values == 0 { *bytes } else { 0 };
                *values += 1;
            }
            if let Some(node) = self.nodes.get_mut(&id) {
                node.value = Some(Held { value, parts, used });
            }
            self.by_use.insert(used, id);
            self.evict(dropped);
        }
        self.prune(id);
        Ok(keep)
    }

    /// The prefix that `block` makes of the one at `parent`.
    fn child(&self, parent: Option<u64>, hash: u64, block: &[u32]) -> Option<u64> {
        let same = |id: &&u64| {
            let node = &self.nodes[*id];
            node.parent == parent && *node.tokens == *block
        };
        self.by_hash.get(&hash)?.iter().find(same).copied()
    }

    fn grow(&mut self, parent: Option<u64>, hash: u64, block: &[u32]) -> u64 {
        self.clock += 1;
        let id = self.clock;
        self.nodes.insert(id, Node { parent, hash, tokens: block.into(), children: 0, value: None });
        self.by_hash.entry(hash).or_default().push(id);
        if let Some(parent) = parent.and_then(|id| self.nodes.get_mut(&id)) {
            parent.children += 1;
        }
        id
    }

    fn touch(&mut self, id: u64) {
        self.clock += 1;
        let now = self.clock;
        if let Some(held) = self.nodes.get_mut(&id).and_then(|node| node.value.as_mut()) {
            self.by_use.remove(&held.used);
            held.used = now;
            self.by_use.insert(now, id);
        }
    }

    /// The tokens of the node's prefix.
    fn prefix(&self, id: u64) -> Vec<u32> {
        let before = |node: &&Node<V>| node.parent.and_then(|id| self.nodes.get(&id));
        let nodes: Vec<_> = std::iter::successors(self.nodes.get(&id), before).collect();
        nodes.iter().rev().flat_map(|node| node.tokens.iter().copied()).collect()
    }

    /// Takes the node's value away, not the node. False where it had none.
    fn take_value(&mut self, id: u64) -> bool {
        let Some(held) = self.nodes.get_mut(&id).and_then(|node| node.value.take()) else { return false };
        self.by_use.remove(&held.used);
        for (part, bytes) in held.parts {
            let Some(values) = self.parts.get_mut(&part) else { continue };
            *values -= 1;
            if *values == 0 {
                self.parts.remove(&part);
                self.bytes -= bytes;
            }
        }
        true
    }

    fn evict(&mut self, mut dropped: impl FnMut(Vec<u32>)) {
        while self.bytes > self.budget {
            let Some((_, &id)) = self.by_use.first_key_value() else { break };
            dropped(self.prefix(id));
            self.take_value(id);
            self.prune(id);
        }
    }

    /// Removes the node, and those before it, as far as nobody needs them.
    fn prune(&mut self, id: u64) {
        let mut next = Some(id);
        while let Some(id) = next {
            match self.nodes.get(&id) {
                Some(node) if node.children == 0 && node.value.is_none() => {}
                _ => break,
            }
            let Some(node) = self.nodes.remove(&id) else { break };
            if let Some(same) = self.by_hash.get_mut(&node.hash) {
                same.retain(|other| *other != id);
                if same.is_empty() {
                    self.by_hash.remove(&node.hash);
                }
            }
            if let Some(parent) = node.parent.and_then(|id| self.nodes.get_mut(&id)) {
                parent.children -= 1;
            }
            next = node.parent;
        }
    }
}
