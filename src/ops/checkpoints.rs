//! Where the states along a call go, for prefix caching.

use candle_core::Tensor;
use std::ops::Range;

/// States are kept at multiples of this many tokens of a sequence; see [`crate::GdnPrefill::with_checkpoints`]. It is
/// the chunk of the chunk forms, between whose ends they have no state.
pub const CHECKPOINT_MULTIPLE: usize = 64;

/// The rows of the checkpoints that belong to one sequence of a call, in the order of its tokens: row `start + j` holds
/// its state after `(j + 1) * every` tokens.
///
/// The sequence has `tokens` tokens, the first of which is number `first_token` of the call: `n * tokens` for sequence
/// `n` of a batch, `cu_seqlens[n]` where they are packed.
///
/// # Panics
/// When `every` is zero.
pub fn checkpoint_rows(first_token: usize, tokens: usize, every: usize) -> Range<usize> {
    let start = first_token / every;
    start..start + tokens / every
}

/// Where the states at multiples of `every` tokens go.
#[derive(Debug, Clone)]
pub struct Checkpoints {
    pub tensor: Tensor,
    pub every: usize,
}

#[cfg(test)]
mod tests {
    use super::checkpoint_rows;

    /// Packed sequences of any lengths have rows of their own, below the total.
    #[test]
    fn rows_of_sequences_do_not_overlap() {
        let lengths = [0, 64, 63, 1, 200, 0, 127, 65, 128, 500];
        let (mut first, mut end) = (0, 0);
        for tokens in lengths {
            let rows = checkpoint_rows(first, tokens, 64);
            assert_eq!(rows.len(), tokens / 64);
            assert!(rows.start >= end, "{rows:?} after {end}");
            (first, end) = (first + tokens, rows.end);
        }
        assert!(end <= first / 64);
        assert_eq!(checkpoint_rows(256, 256, 128), 2..4);
    }
}
