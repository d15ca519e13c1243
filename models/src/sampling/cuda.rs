//! Launches of `cuda/gdn_sampling.h` and `cuda/gdn_logprobs.h`: the next tokens and their log-probabilities.

use crate::abi::logprobs::{gdn_logprobs_words, LogprobsParams, LOGPROBS_WORDS};
use crate::abi::sampling::{gdn_sampling, gdn_sampling_workspace, SamplingParams, ROW_WORDS};
use candle_core::{bail, DType, Device, Error, Result, Tensor};
use candle_gdn_core::device::cuda::{check, dtype_code, int, stream_of, write};
use candle_gdn_core::{in_place_cuda, Working};
use std::ffi::c_void;

const SAMPLING: &str = "sampling";
const LOGPROBS: &str = "logprobs";

/// `gdn_logprobs_begin`, before the tokens are drawn, or `gdn_logprobs_end`, after.
pub(super) type Launcher = unsafe extern "C" fn(*const LogprobsParams, *mut c_void) -> std::ffi::c_int;

/// For launches of any number of rows, one after the other.
pub(super) fn workspace(device: &Device) -> Result<Tensor> {
    let Device::Cuda(cuda) = device else { bail!("{SAMPLING}: expected a CUDA device, got {:?}", device.location()) };
    cuda.cuda_stream().context().bind_to_thread().map_err(Error::wrap)?;
    let _working = Working::new(device);
    let mut bytes = 0;
    // SAFETY: one number is written.
    check(SAMPLING, unsafe { gdn_sampling_workspace(i32::MAX, &mut bytes) })?;
    Tensor::zeros(bytes as usize / 4, DType::U32, device)
}

/// Words that log-probabilities of so many rows of a vocabulary take.
pub(super) fn logprobs_words(rows: usize, vocab: usize, history: usize) -> Result<usize> {
    let (count, vocab, mut parts) = (int(LOGPROBS, "rows", rows)?, int(LOGPROBS, "vocabulary", vocab)?, 0);
    // SAFETY: one number is written.
    check(LOGPROBS, unsafe { gdn_logprobs_words(count, vocab, &mut parts) })?;
    Ok(rows * (LOGPROBS_WORDS + history) + parts as usize)
}

/// The next token of each row of `logits [rows, vocabulary]`; `words` are those of [`Rows`](super::rows::Rows) with room for
/// `history` recent tokens.
pub(super) fn sample(logits: &Tensor, words: &Tensor, workspace: &Tensor, rows: usize, history: usize) -> Result<()> {
    let vocab = vocabulary(SAMPLING, logits, rows)?;
    in_place_cuda(SAMPLING, logits, |(logits, layout)| {
        in_place_cuda(SAMPLING, words, |(words, words_layout)| {
            in_place_cuda(SAMPLING, workspace, |(workspace, workspace_layout)| {
                let stream = &*stream_of(logits)?;
                let dtype = candle_core::backend::BackendStorage::dtype(&*logits);
                let (logits, words) = (write(logits, stream)?, write(words, stream)?);
                let workspace = write(workspace, stream)?;
                let first = words_layout.start_offset();
                let ids = first + rows * ROW_WORDS;
                let params = SamplingParams {
                    logits: logits.at(layout.start_offset(), dtype.size_in_bytes()),
                    ids: words.at(ids, 4),
                    drawn: words.at(ids + rows, 4),
                    state: words.at(first, 4),
                    recent: words.at(ids + 2 * rows, 4),
                    kept: words.at(ids + (2 + history) * rows, 4),
                    workspace: workspace.at::<c_void>(workspace_layout.start_offset(), 4),
                    workspace_bytes: 4 * workspace_layout.shape().elem_count() as i64,
                    logits_stride: layout.stride()[0] as i64,
                    rows: int(SAMPLING, "rows", rows)?,
                    vocab: int(SAMPLING, "vocabulary", vocab)?,
                    history: int(SAMPLING, "history", history)?,
                    dtype: dtype_code(dtype),
                };
                // SAFETY: every pointer reaches what was checked, or lies in buffers made for so many rows, and the guards
                // outlive the launch.
                check(SAMPLING, unsafe { gdn_sampling(&params, stream.cu_stream().cast::<c_void>()) })
            })
        })
    })
}

/// Of `logits [rows, vocabulary]`; `words` as in [`sample`]. `out` has as many words as [`logprobs_words`] returns, the first of
/// which are a [`LogprobsRow`](crate::abi::logprobs::LogprobsRow) a row.
pub(super) fn logprobs(
    launcher: Launcher,
    logits: &Tensor,
    words: &Tensor,
    out: &Tensor,
    rows: usize,
    history: usize,
) -> Result<()> {
    let vocab = vocabulary(LOGPROBS, logits, rows)?;
    in_place_cuda(LOGPROBS, logits, |(logits, layout)| {
        in_place_cuda(LOGPROBS, words, |(words, words_layout)| {
            in_place_cuda(LOGPROBS, out, |(out, out_layout)| {
                let stream = &*stream_of(logits)?;
                let dtype = candle_core::backend::BackendStorage::dtype(&*logits);
                let (logits, words, out) = (write(logits, stream)?, write(words, stream)?, write(out, stream)?);
                let (first, first_out) = (words_layout.start_offset(), out_layout.start_offset());
                let ids = first + rows * ROW_WORDS;
                let raw = first_out + rows * LOGPROBS_WORDS;
                let params = LogprobsParams {
                    logits: logits.at(layout.start_offset(), dtype.size_in_bytes()),
                    state: words.at(first, 4),
                    ids: words.at(ids, 4),
                    drawn: words.at(ids + rows, 4),
                    recent: words.at(ids + 2 * rows, 4),
                    out: out.at(first_out, 4),
                    raw: out.at(raw, 4),
                    parts: out.at(raw + rows * history, 4),
                    logits_stride: layout.stride()[0] as i64,
                    rows: int(LOGPROBS, "rows", rows)?,
                    vocab: int(LOGPROBS, "vocabulary", vocab)?,
                    history: int(LOGPROBS, "history", history)?,
                    dtype: dtype_code(dtype),
                };
                // SAFETY: as in `sample`.
                check(LOGPROBS, unsafe { launcher(&params, stream.cu_stream().cast::<c_void>()) })
            })
        })
    })
}

/// The columns of logits that both kernels support.
fn vocabulary(name: &str, logits: &Tensor, rows: usize) -> Result<usize> {
    let ((count, vocab), dtype) = (logits.dims2()?, logits.dtype());
    if !matches!(dtype, DType::F32 | DType::BF16 | DType::F16) || count != rows || logits.stride()[1] != 1 {
        let layout = logits.layout();
        bail!("{name}: logits: expected f32, bf16 or f16 in {rows} rows without gaps, got {dtype:?} in {layout:?}")
    }
    Ok(vocab)
}
