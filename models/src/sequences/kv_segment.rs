//! Keys and values of a snapshot.

use candle_core::Tensor;
use candle_gdn_core::LastThread;

/// Keys and values of some tokens in all softmax layers.
#[derive(Debug)]
pub(crate) struct KvSegment {
    /// The position after the last token.
    pub end: usize,
    /// `[1, kv_heads, tokens, head_dim]` each; of a layer with a window its last tokens.
    pub layers: Vec<[Tensor; 2]>,
    /// Those of the draft head: where its tokens end, and their keys and values from the end of the segment before; `None`
    /// without new ones.
    pub head_end: usize,
    pub head: Option<[Tensor; 2]>,
    pub thread: LastThread,
}

impl Drop for KvSegment {
    fn drop(&mut self) {
        if let Some([k, _]) = self.layers.iter().chain(&self.head).next() {
            // A device that fails here fails the next call too.
            let _ = self.thread.wait(k.device());
        }
    }
}

impl KvSegment {
    pub fn size_in_bytes(&self) -> usize {
        let bytes = |x: &Tensor| x.elem_count() * x.dtype().size_in_bytes();
        self.layers.iter().chain(&self.head).flatten().map(bytes).sum()
    }
}
