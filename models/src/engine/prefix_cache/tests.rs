//! The cache against a plain list of prefixes.

use super::*;
use proptest::prelude::*;
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Parts of a value; the number of a part is its bytes too.
type Parts = BTreeSet<usize>;

fn numbered(parts: &Parts) -> Vec<(usize, usize)> {
    parts.iter().map(|part| (*part, *part)).collect()
}

/// A value that shares nothing with others.
fn alone(bytes: usize) -> Vec<(usize, usize)> {
    static NUMBER: AtomicUsize = AtomicUsize::new(0);
    vec![(NUMBER.fetch_add(1, Ordering::Relaxed), bytes)]
}

/// Prefixes and values, the one used longest ago first.
struct Model {
    block: usize,
    budget: usize,
    entries: Vec<(Vec<u32>, u32, Parts)>,
}

impl Model {
    fn longest(&self, tokens: &[u32]) -> Option<usize> {
        let fits = |(prefix, ..): &(Vec<u32>, u32, Parts)| tokens.starts_with(prefix);
        (0..self.entries.len()).filter(|i| fits(&self.entries[*i])).max_by_key(|i| self.entries[*i].0.len())
    }

    fn bytes(&self) -> usize {
        self.entries.iter().flat_map(|(.., parts)| parts).collect::<BTreeSet<_>>().into_iter().sum()
    }

    /// Whether it was kept, and the prefixes dropped.
    fn insert(&mut self, tokens: &[u32], value: u32, parts: Parts) -> (bool, Vec<Vec<u32>>) {
        let before = self.entries.len();
        self.entries.retain(|(prefix, ..)| prefix != tokens);
        if parts.iter().sum::<usize>() > self.budget {
            return (false, if self.entries.len() < before { vec![tokens.to_vec()] } else { vec![] });
        }
        self.entries.push((tokens.to_vec(), value, parts));
        let mut dropped = vec![];
        while self.bytes() > self.budget {
            dropped.push(self.entries.remove(0).0);
        }
        (true, dropped)
    }
}

#[derive(Debug, Clone)]
enum Op {
    Insert { tokens: Vec<u32>, parts: Parts },
    Longest(Vec<u32>),
    Peek(Vec<u32>),
}

/// Few tokens and short sequences, so that prefixes are shared.
fn any_ops() -> impl Strategy<Value = (usize, usize, bool, Vec<Op>)> {
    let tokens = || prop::collection::vec(0u32..3, 0..9);
    let op = prop_oneof![
        6 => (tokens(), prop::collection::btree_set(0usize..30, 0..4)).prop_map(|(tokens, parts)| Op::Insert { tokens, parts }),
        6 => tokens().prop_map(Op::Longest),
        2 => tokens().prop_map(Op::Peek),
    ];
    (1usize..4, 0usize..200, any::<bool>(), prop::collection::vec(op, 0..120))
}

fn check_inside<V>(cache: &PrefixCache<V>) {
    let held = || cache.nodes.values().filter_map(|node| node.value.as_ref());
    let parts: BTreeSet<_> = held().flat_map(|held| &held.parts).copied().collect();
    assert_eq!((parts.iter().map(|(_, bytes)| bytes).sum(), parts.len()), (cache.bytes, cache.parts.len()));
    assert_eq!(held().count(), cache.by_use.len());
    assert!(cache.bytes <= cache.budget);
    let hashed: usize = cache.by_hash.values().map(Vec::len).sum();
    assert_eq!(hashed, cache.nodes.len());
    for (id, node) in &cache.nodes {
        let children = cache.nodes.values().filter(|other| other.parent == Some(*id)).count();
        assert_eq!(children, node.children);
        assert!(children > 0 || node.value.is_some(), "a node that nobody needs");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn it_does_what_a_list_does((block, budget, collide, ops) in any_ops()) {
        let mut cache = PrefixCache::new(block, budget).unwrap();
        if collide {
            cache.hash = |_, _| 7;
        }
        let mut model = Model { block, budget, entries: vec![] };
        let (mut hits, mut misses) = (0, 0);
        for (value, op) in (0u32..).zip(ops) {
            match op {
                Op::Insert { tokens, parts } if tokens.is_empty() || !tokens.len().is_multiple_of(model.block) => {
                    prop_assert!(cache.insert(&tokens, value, numbered(&parts), drop).is_err());
                }
                Op::Insert { tokens, parts } => {
                    let mut dropped = vec![];
                    let kept = cache.insert(&tokens, value, numbered(&parts), |prefix| dropped.push(prefix)).unwrap();
                    prop_assert_eq!((kept, dropped), model.insert(&tokens, value, parts));
                }
                Op::Longest(tokens) => {
                    let want = model.longest(&tokens);
                    let got = cache.longest(&tokens).map(|(len, value)| (len, *value));
                    prop_assert_eq!(got, want.map(|i| (model.entries[i].0.len(), model.entries[i].1)));
                    match want {
                        Some(i) => {
                            hits += 1;
                            let used = model.entries.remove(i);
                            model.entries.push(used);
                        }
                        None => misses += 1,
                    }
                }
                Op::Peek(tokens) => {
                    let want = model.longest(&tokens).map_or(0, |i| model.entries[i].0.len());
                    prop_assert_eq!(cache.peek(&tokens), want);
                }
            }
            prop_assert_eq!((cache.by_use.len(), cache.bytes), (model.entries.len(), model.bytes()));
            prop_assert_eq!((cache.hits, cache.misses), (hits, misses));
            check_inside(&cache);
        }
    }
}

/// Every prefix has one hash: the tokens alone tell them apart.
#[test]
fn a_collision_gives_no_one_elses_value() {
    let mut cache = PrefixCache::new(2, 100).unwrap();
    cache.hash = |_, _| 0;
    cache.insert(&[1, 2, 3, 4], 'a', alone(1), drop).unwrap();
    cache.insert(&[5, 6, 3, 4], 'b', alone(1), drop).unwrap();
    assert_eq!(cache.longest(&[1, 2, 3, 4]), Some((4, &'a')));
    assert_eq!(cache.longest(&[5, 6, 3, 4]), Some((4, &'b')));
    assert_eq!(cache.longest(&[3, 4, 3, 4]), None);
    assert_eq!(cache.longest(&[1, 2]), None);
    // Nor does the block alone: the blocks before it are compared as well.
    assert_eq!(cache.longest(&[3, 4, 1, 2]), None);
}

#[test]
fn a_value_may_go_before_a_longer_one() {
    let mut cache = PrefixCache::new(1, 10).unwrap();
    cache.insert(&[1], 'a', alone(6), drop).unwrap();
    cache.insert(&[1, 2], 'b', alone(6), drop).unwrap();
    assert_eq!(cache.longest(&[1]), None);
    assert_eq!(cache.longest(&[1, 2, 3]), Some((2, &'b')));
    // What keeps none of its values keeps no tokens.
    cache.insert(&[9], 'c', alone(10), drop).unwrap();
    assert_eq!((cache.nodes.len(), cache.by_hash.len()), (1, 1));
    assert!(!cache.insert(&[1, 2, 3], 'd', alone(11), drop).unwrap());
    assert_eq!((cache.nodes.len(), cache.by_use.len()), (1, 1));
}

#[test]
fn values_are_dropped() {
    use std::rc::Rc;
    let value = Rc::new(());
    let mut cache = PrefixCache::new(1, 3).unwrap();
    for token in 0..100 {
        cache.insert(&[token], value.clone(), alone(1), drop).unwrap();
    }
    assert_eq!(Rc::strong_count(&value), 1 + 3);
    cache.insert(&[99], value.clone(), alone(1), drop).unwrap();
    assert_eq!(Rc::strong_count(&value), 1 + 3);
    drop(cache);
    assert_eq!(Rc::strong_count(&value), 1);
}

#[test]
fn what_is_refused() {
    let error = PrefixCache::<()>::new(0, 1).unwrap_err().to_string();
    assert!(error.starts_with("PrefixCache: block: expected at least 1 token, got 0"), "{error}");
    let mut cache = PrefixCache::new(4, 10).unwrap();
    for len in [0, 3, 5] {
        let error = cache.insert(&vec![1; len], (), vec![], drop).unwrap_err();
        let want = format!("PrefixCache: tokens: expected a positive multiple of 4 (the block), got {len}");
        assert!(error.to_string().starts_with(&want), "{error}");
    }
    assert_eq!(cache.longest(&[1, 1, 1]), None);
}
