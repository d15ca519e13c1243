//! What a server has around a pool, as small as tests need it: who has which slot, and the states after prefixes.

use candle_gdn::{GdnState, StatePool};

/// Slots that no sequence has; the last is the next.
pub struct Allocator {
    free: Vec<u32>,
    capacity: usize,
}

impl Allocator {
    pub fn new(capacity: usize) -> Self {
        Self { free: (0..capacity as u32).rev().collect(), capacity }
    }

    /// A zero slot.
    pub fn allocate(&mut self, pool: &mut StatePool) -> u32 {
        let slot = self.allocate_unset().expect("a free slot");
        pool.zero(slot).unwrap();
        slot
    }

    /// A slot with whatever is there.
    pub fn allocate_unset(&mut self) -> Option<u32> {
        self.free.pop()
    }

    pub fn free(&mut self, slot: u32) {
        self.free.push(slot);
    }

    pub fn available(&self) -> usize {
        self.free.len()
    }

    pub fn len(&self) -> usize {
        self.capacity - self.free.len()
    }
}

/// The states after some prefixes; the oldest goes first.
pub struct Prefixes {
    states: Vec<(Vec<u32>, GdnState)>,
    capacity: usize,
    pub hits: usize,
}

impl Prefixes {
    pub fn new(capacity: usize) -> Self {
        Self { states: vec![], capacity, hits: 0 }
    }

    /// The longest prefix that is kept: its length and its state.
    pub fn longest(&mut self, tokens: &[u32]) -> Option<(usize, &GdnState)> {
        let fits = self.states.iter().filter(|(prefix, _)| tokens.starts_with(prefix));
        let (prefix, state) = fits.max_by_key(|(prefix, _)| prefix.len())?;
        self.hits += 1;
        Some((prefix.len(), state))
    }

    pub fn insert(&mut self, tokens: &[u32], state: GdnState) {
        self.states.retain(|(prefix, _)| prefix != tokens);
        self.states.push((tokens.to_vec(), state));
        if self.states.len() > self.capacity {
            self.states.remove(0);
        }
    }
}
