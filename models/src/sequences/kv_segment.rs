//! What a pool keeps besides what its layers remember.

use candle_core::Tensor;
use candle_gdn::plumbing::LastThread;
use candle_gdn::Slots;

/// What the last decode step uploaded, for the next one of the same sequences.
#[derive(Debug)]
pub(super) struct Recent {
    pub states: Slots,
    pub slots: Slots,
    pub positions: Tensor,
    /// What the three hold.
    pub held: [Vec<u32>; 3],
}

/// Keys and values of some tokens in all softmax layers.
#[derive(Debug)]
pub(super) struct Piece {
    /// The last token's position, and one.
    pub end: usize,
    /// `[1, kv_heads, tokens, head_dim]` each.
    pub layers: Vec<[Tensor; 2]>,
    /// Of the draft head, where its tokens end, and their keys and values from where the piece before ends; `None` where
    /// there are none.
    pub head_end: usize,
    pub head: Option<[Tensor; 2]>,
    pub thread: LastThread,
}

impl Drop for Piece {
    fn drop(&mut self) {
        if let Some([k, _]) = self.layers.iter().chain(&self.head).next() {
            // A device that fails here fails the next call too.
            let _ = self.thread.wait(k.device());
        }
    }
}

impl Piece {
    pub fn size_in_bytes(&self) -> usize {
        let bytes = |x: &Tensor| x.elem_count() * x.dtype().size_in_bytes();
        self.layers.iter().chain(&self.head).flatten().map(bytes).sum()
    }
}
