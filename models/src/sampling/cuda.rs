//! Launches of `cuda/gdn_sampling.h`: the next tokens.

use crate::abi::sampling::{gdn_sampling, gdn_sampling_workspace, SamplingParams, ROW_WORDS};
use candle_core::{bail, CudaStorage, DType, Device, Error, Layout, Result, Tensor};
use candle_gdn::plumbing::cuda::{check, dtype_code, int, stream_of, write};
use candle_gdn::plumbing::in_place_cuda;
use std::ffi::c_void;

const NAME: &str = "sampling";

/// For launches of any number of rows, one after the other.
pub(crate) fn workspace(device: &Device) -> Result<Tensor> {
    let Device::Cuda(cuda) = device else { bail!("{NAME}: expected a CUDA device, got {:?}", device.location()) };
    cuda.cuda_stream().context().bind_to_thread().map_err(Error::wrap)?;
    let mut bytes = 0;
    // SAFETY: one number is written.
    check(NAME, unsafe { gdn_sampling_workspace(i32::MAX, &mut bytes) })?;
    Tensor::zeros(bytes as usize / 4, DType::U32, device)
}

/// The next token of each row of `logits [rows, vocabulary]`; `words` are those of [`Rows`](crate::engine), `history` the
/// recent tokens that they have room for.
pub(crate) fn sample(logits: &Tensor, words: &Tensor, workspace: &Tensor, rows: usize, history: usize) -> Result<()> {
    let (count, vocab) = logits.dims2()?;
    let dtype = logits.dtype();
    if !matches!(dtype, DType::F32 | DType::BF16 | DType::F16) || count != rows || logits.stride()[1] != 1 {
        let layout = logits.layout();
        bail!("{NAME}: logits: expected f32, bf16 or f16 in {rows} rows without gaps, got {dtype:?} in {layout:?}")
    }
    let sizes = [rows, vocab, history];
    in_place_cuda(NAME, logits, |logits| {
        in_place_cuda(NAME, words, |words| {
            in_place_cuda(NAME, workspace, |workspace| launch(logits, dtype, words, workspace, sizes))
        })
    })
}

fn launch(
    (logits, layout): (&mut CudaStorage, &Layout),
    dtype: DType,
    (words, words_layout): (&mut CudaStorage, &Layout),
    (workspace, workspace_layout): (&mut CudaStorage, &Layout),
    [rows, vocab, history]: [usize; 3],
) -> Result<()> {
    let stream = &*stream_of(logits)?;
    let (logits, words, workspace) = (write(logits, stream)?, write(words, stream)?, write(workspace, stream)?);
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
        rows: int(NAME, "rows", rows)?,
        vocab: int(NAME, "vocabulary", vocab)?,
        history: int(NAME, "history", history)?,
        dtype: dtype_code(dtype),
    };
    // SAFETY: every pointer reaches what was checked, or lies in buffers made for so many rows, and the guards outlive the
    // launch.
    check(NAME, unsafe { gdn_sampling(&params, stream.cu_stream().cast::<c_void>()) })
}
