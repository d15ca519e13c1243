//! Launches of `cuda/gdn_logprobs.h`: log-probabilities of drawn and of likely tokens.

use crate::abi::logprobs::{gdn_logprobs_begin, gdn_logprobs_end, gdn_logprobs_words, LogprobsParams, TOLD_WORDS};
use crate::abi::sampling::ROW_WORDS;
use candle_core::{bail, Result, Tensor};
use candle_gdn::plumbing::cuda::{check, dtype_code, int, stream_of, write};
use candle_gdn::plumbing::in_place_cuda;
use std::ffi::c_void;

const NAME: &str = "logprobs";

/// Before the tokens are drawn, and after.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Half {
    Begin,
    End,
}

/// Words of what so many rows of a vocabulary are told in.
pub(crate) fn words(rows: usize, vocab: usize, history: usize) -> Result<usize> {
    let mut parts = 0;
    // SAFETY: one number is written.
    check(NAME, unsafe { gdn_logprobs_words(int(NAME, "rows", rows)?, int(NAME, "vocabulary", vocab)?, &mut parts) })?;
    Ok(rows * (TOLD_WORDS + history) + parts as usize)
}

/// Of `logits [rows, vocabulary]`; `rows_words` are those of [`Rows`](crate::engine) with room for `history` recent tokens,
/// `told` as many as [`words`] says, of which the first are a [`LogprobsRow`](crate::abi::logprobs::LogprobsRow) a row.
pub(crate) fn logprobs(
    half: Half,
    logits: &Tensor,
    rows_words: &Tensor,
    told: &Tensor,
    rows: usize,
    history: usize,
) -> Result<()> {
    let ((count, vocab), dtype) = (logits.dims2()?, logits.dtype());
    if count != rows || logits.stride()[1] != 1 {
        bail!("{NAME}: logits: expected {rows} rows without gaps, got {:?}", logits.layout())
    }
    in_place_cuda(NAME, logits, |(logits, layout)| {
        in_place_cuda(NAME, rows_words, |(words, words_layout)| {
            in_place_cuda(NAME, told, |(told, told_layout)| {
                let stream = &*stream_of(logits)?;
                let (logits, words, told) = (write(logits, stream)?, write(words, stream)?, write(told, stream)?);
                let (first, to) = (words_layout.start_offset(), told_layout.start_offset());
                let ids = first + rows * ROW_WORDS;
                let raw = to + rows * TOLD_WORDS;
                let params = LogprobsParams {
                    logits: logits.at(layout.start_offset(), dtype.size_in_bytes()),
                    state: words.at(first, 4),
                    ids: words.at(ids, 4),
                    drawn: words.at(ids + rows, 4),
                    recent: words.at(ids + 2 * rows, 4),
                    told: told.at(to, 4),
                    raw: told.at(raw, 4),
                    parts: told.at(raw + rows * history, 4),
                    logits_stride: layout.stride()[0] as i64,
                    rows: int(NAME, "rows", rows)?,
                    vocab: int(NAME, "vocabulary", vocab)?,
                    history: int(NAME, "history", history)?,
                    dtype: dtype_code(dtype),
                };
                let stream = stream.cu_stream().cast::<c_void>();
                // SAFETY: every pointer reaches what was checked, or lies in buffers made for so many rows, and the guards
                // outlive the launch.
                check(NAME, unsafe {
                    match half {
                        Half::Begin => gdn_logprobs_begin(&params, stream),
                        Half::End => gdn_logprobs_end(&params, stream),
                    }
                })
            })
        })
    })
}
