//! Launches of `cuda/gdn_round.h`: before and after the tokens of a round are drawn.

use crate::abi::round::{gdn_round_begin, gdn_round_end, RoundParams};
use crate::abi::sampling::ROW_WORDS;
use candle_core::{Result, Tensor};
use candle_gdn::plumbing::cuda::{check, int, stream_of, write};
use candle_gdn::plumbing::in_place_cuda;
use std::ffi::c_void;

const NAME: &str = "round";

/// Which of the two.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Half {
    Begin,
    End,
}

/// `words` are those of [`RoundWords`](crate::engine), `rows` those of [`Rows`](crate::engine) with room for `history` recent tokens.
pub(crate) fn round(
    half: Half,
    words: &Tensor,
    rows: &Tensor,
    [seqs, tokens, history]: [usize; 3],
    forced: f32,
) -> Result<()> {
    in_place_cuda(NAME, words, |(words, layout)| {
        in_place_cuda(NAME, rows, |(rows, rows_layout)| {
            let stream = &*stream_of(words)?;
            let (words, rows) = (write(words, stream)?, write(rows, stream)?);
            let (first, count) = (rows_layout.start_offset(), seqs * tokens);
            let chosen = first + count * ROW_WORDS;
            // In the order of the words.
            let each = |i: usize| words.at::<u32>(layout.start_offset() + i * seqs, 4);
            let params = RoundParams {
                stayed: each(0),
                last: each(1),
                positions: each(2),
                head: each(3),
                behind: each(4),
                ids: each(5),
                out: each(5 + tokens),
                rows: rows.at(first, 4),
                chosen: rows.at(chosen, 4),
                drawn: rows.at(chosen + count, 4),
                recent: rows.at(chosen + 2 * count, 4),
                seqs: int(NAME, "sequences", seqs)?,
                tokens: int(NAME, "tokens", tokens)?,
                history: int(NAME, "history", history)?,
                forced,
            };
            let stream = stream.cu_stream().cast::<c_void>();
            // SAFETY: every pointer lies in buffers made for so many sequences and tokens, and the guards outlive the launch.
            check(NAME, unsafe {
                match half {
                    Half::Begin => gdn_round_begin(&params, stream),
                    Half::End => gdn_round_end(&params, stream),
                }
            })
        })
    })
}
