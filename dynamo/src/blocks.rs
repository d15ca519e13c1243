//! The engine's prefixes as the blocks that Dynamo's router knows.

use dynamo_backend_common::KvEventPublisher;
use dynamo_llm::kv_router::protocols::{
    compute_block_hash_for_seq, compute_seq_hash_for_block, BlockHashOptions, ExternalSequenceBlockHash, KvCacheEvent,
    KvCacheEventData, KvCacheRemoveData, KvCacheStoreData, KvCacheStoredBlockData,
};
use std::collections::HashMap;
use std::sync::{Arc, OnceLock};

/// Which blocks are of a beginning that the engine keeps.
///
/// The router counts blocks from a prompt's start. The engine has states at the ends of prefixes only, so the blocks
/// before such an end are told too: a prompt that leaves a beginning inside is sent where that is, and finds a state there
/// from the next prompt on.
#[derive(Debug)]
pub struct Blocks {
    block: usize,
    /// Beginnings that have the block.
    held: HashMap<u64, usize>,
}

impl Blocks {
    /// Of so many tokens each.
    pub fn new(block: usize) -> Self {
        Self { block, held: HashMap::new() }
    }

    /// A beginning is kept from now on: what is new of it, if anything.
    pub fn kept(&mut self, tokens: &[u32]) -> Option<KvCacheEventData> {
        let of_tokens = compute_block_hash_for_seq(tokens, self.block as u32, BlockHashOptions::default());
        let of_sequences = compute_seq_hash_for_block(&of_tokens);
        for hash in &of_sequences {
            *self.held.entry(*hash).or_default() += 1;
        }
        // Who has a block has those before it: the new ones are the last.
        let new = of_sequences.iter().position(|hash| self.held[hash] == 1)?;
        let block = |i: usize| KvCacheStoredBlockData {
            block_hash: ExternalSequenceBlockHash(of_sequences[i]),
            tokens_hash: of_tokens[i],
            mm_extra_info: None,
        };
        Some(KvCacheEventData::Stored(KvCacheStoreData {
            parent_hash: new.checked_sub(1).map(|i| ExternalSequenceBlockHash(of_sequences[i])),
            start_position: None,
            blocks: (new..of_sequences.len()).map(block).collect(),
        }))
    }

    /// It is no longer: what is gone with it, if anything.
    pub fn dropped(&mut self, tokens: &[u32]) -> Option<KvCacheEventData> {
        let of_tokens = compute_block_hash_for_seq(tokens, self.block as u32, BlockHashOptions::default());
        let mut gone = Vec::new();
        for hash in compute_seq_hash_for_block(&of_tokens).into_iter().rev() {
            let Some(count) = self.held.get_mut(&hash) else { continue };
            *count -= 1;
            if *count == 0 {
                self.held.remove(&hash);
                gone.push(ExternalSequenceBlockHash(hash));
            }
        }
        let event = KvCacheEventData::Removed(KvCacheRemoveData { block_hashes: gone });
        matches!(&event, KvCacheEventData::Removed(removed) if !removed.block_hashes.is_empty()).then_some(event)
    }
}

/// Where the router listens, once it is known.
pub type Router = Arc<OnceLock<Arc<KvEventPublisher>>>;

/// Tells the router. Where nobody listens that is no loss: a router that comes later asks for all.
pub fn tell(router: &Router, data: Option<KvCacheEventData>) {
    let (Some(publisher), Some(data)) = (router.get(), data) else { return };
    let event = KvCacheEvent { event_id: publisher.next_event_id(), data, dp_rank: 0 };
    if let Err(e) = publisher.publish(event) {
        tracing::warn!("the router cannot be told of a beginning: {e}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stored(event: Option<KvCacheEventData>) -> Option<(Option<u64>, Vec<u64>)> {
        match event? {
            KvCacheEventData::Stored(data) => Some((
                data.parent_hash.map(|hash| hash.0),
                data.blocks.iter().map(|block| block.block_hash.0).collect(),
            )),
            _ => None,
        }
    }

    fn removed(event: Option<KvCacheEventData>) -> Option<Vec<u64>> {
        match event? {
            KvCacheEventData::Removed(data) => Some(data.block_hashes.iter().map(|hash| hash.0).collect()),
            _ => None,
        }
    }

    #[test]
    fn blocks_live_as_long_as_a_beginning_has_them() {
        let mut blocks = Blocks::new(2);
        let (_, long) = stored(blocks.kept(&[1, 2, 3, 4, 5, 6])).unwrap();
        assert_eq!(long.len(), 3);
        assert_eq!(stored(blocks.kept(&[1, 2, 3, 4])), None, "nothing new");
        let (parent, branch) = stored(blocks.kept(&[1, 2, 7, 8])).unwrap();
        assert_eq!((parent, branch.len()), (Some(long[0]), 1));
        assert_eq!(removed(blocks.dropped(&[1, 2, 3, 4, 5, 6])), Some(vec![long[2]]), "a shorter one has the others");
        assert_eq!(removed(blocks.dropped(&[1, 2, 3, 4])), Some(vec![long[1]]));
        assert_eq!(removed(blocks.dropped(&[1, 2, 7, 8])), Some(vec![branch[0], long[0]]));
        assert!(blocks.held.is_empty());
    }

    #[test]
    fn the_hashes_are_the_router_s() {
        let tokens: Vec<u32> = (0..128).collect();
        let Some(KvCacheEventData::Stored(data)) = Blocks::new(64).kept(&tokens) else { panic!() };
        let want = compute_block_hash_for_seq(&tokens, 64, BlockHashOptions::default());
        assert_eq!(data.blocks.iter().map(|block| block.tokens_hash).collect::<Vec<_>>(), want);
        assert_eq!(data.parent_hash, None);
    }
}
