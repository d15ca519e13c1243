//! Launches of `cuda/gdn_speculate.h`: the bookkeeping of a speculative step.

use crate::abi::sampling::ROW_WORDS;
use crate::abi::speculate::SpeculateParams;
use candle_core::{Result, Tensor};
use candle_gdn_core::device::cuda::{check, int, stream_of, write};
use candle_gdn_core::in_place_cuda;
use std::ffi::c_void;

const NAME: &str = "speculate";

/// `gdn_speculate_begin`, before the tokens are drawn, or `gdn_speculate_end`, after.
pub(super) type Launcher = unsafe extern "C" fn(*const SpeculateParams, *mut c_void) -> std::ffi::c_int;

/// Sizes of a speculative step.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sizes {
    pub sequences: usize,
    /// Tokens of each sequence.
    pub tokens: usize,
    /// The most recent tokens of a row.
    pub history: usize,
}

/// `words` are those of [`SpeculativeBuffers`](super::speculative_buffers::SpeculativeBuffers), `rows` those of
/// [`Rows`](crate::sampling::rows::Rows). `forced_acceptance` is the chance that a draft is accepted whatever was drawn.
pub(super) fn speculate(
    launcher: Launcher,
    words: &Tensor,
    rows: &Tensor,
    Sizes { sequences, tokens, history }: Sizes,
    forced_acceptance: Option<f32>,
) -> Result<()> {
    in_place_cuda(NAME, words, |(words, layout)| {
        in_place_cuda(NAME, rows, |(rows, rows_layout)| {
            let stream = &*stream_of(words)?;
            let (words, rows) = (write(words, stream)?, write(rows, stream)?);
            let (first, count) = (rows_layout.start_offset(), sequences * tokens);
            let chosen = first + count * ROW_WORDS;
            // In the order of the words.
            let column = |i: usize| words.at::<u32>(layout.start_offset() + i * sequences, 4);
            let params = SpeculateParams {
                accepted: column(0),
                last: column(1),
                positions: column(2),
                head_len: column(3),
                head_end: column(4),
                ids: column(5),
                out: column(5 + tokens),
                rows: rows.at(first, 4),
                chosen: rows.at(chosen, 4),
                drawn: rows.at(chosen + count, 4),
                recent: rows.at(chosen + 2 * count, 4),
                seqs: int(NAME, "sequences", sequences)?,
                tokens: int(NAME, "tokens", tokens)?,
                history: int(NAME, "history", history)?,
                forced_acceptance: forced_acceptance.unwrap_or(-1.),
            };
            // SAFETY: every pointer lies in buffers made for so many sequences and tokens, and the guards outlive the launch.
            check(NAME, unsafe { launcher(&params, stream.cu_stream().cast::<c_void>()) })
        })
    })
}
