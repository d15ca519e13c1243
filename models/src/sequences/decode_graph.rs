//! A decode step of the whole model as one CUDA graph.

#[cfg(feature = "cuda")]
use super::captured_step::CapturedStep;
use super::pool::{Sequence, SequencePool};
use crate::causal_lm::CausalLm;
use candle_core::{bail, Result, Tensor};
use std::marker::PhantomData;

const OP: &str = "DecodeGraph";

/// One decode step of the whole model, of up to a number of sequences, captured once as a CUDA graph and replayed: one
/// launch instead of some hundreds. It serves all sequences of a pool as they come, go and grow. Ids, slots and
/// positions lie in buffers of its own; for the same sequences step after step only the ids are uploaded.
///
/// It belongs to the host thread that made it, as streams do. Where the pool's memory has moved, or with another pool
/// of the model, the next step captures again by itself.
///
/// ```no_run
/// # fn demo(model: &candle_gdn_models::CausalLm) -> candle_core::Result<()> {
/// use candle_gdn_models::DecodeGraph;
/// let mut pool = model.new_sequences(4, 1024)?;
/// let s = pool.begin()?;
/// model.feed(&mut pool, &[(s, &[11, 22])])?;
/// let mut graph = DecodeGraph::capture(model, &mut pool, 4).ok(); // `None`: not on CUDA
/// let logits = match &mut graph {
///     Some(graph) => graph.step(model, &mut pool, &[(s, 33)])?,
///     None => model.feed(&mut pool, &[(s, &[33])])?,
/// };
/// # let _ = logits;
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct DecodeGraph {
    step: CapturedStep,
    /// Not `Send`, with or without the feature.
    thread: PhantomData<*mut ()>,
}

impl DecodeGraph {
    /// Captures a step of up to `batch` sequences of the pool. The step runs twice before, on padding only: no sequence
    /// changes. cudarc's event tracking is off meanwhile, for all threads that use the device.
    ///
    /// Calls of other host threads that use this device through this crate or `candle-gdn` wait meanwhile. Work that others
    /// launch through candle itself, also reading or dropping a tensor, would become part of the graph instead of running:
    /// CUDA refuses it, or the capture notices it and fails. [`Working`](candle_gdn_core::Working) keeps captures
    /// away from such work. Nor may another thread wait for the whole GPU (`cuCtxSynchronize`, which making a candle device
    /// does too): CUDA fails both that and the capture.
    ///
    /// # Errors
    /// On the CPU; on a device with a stream for each host thread, as `Device::new_cuda` makes them (see
    /// [`single_stream_device`](candle_gdn::single_stream_device)), or one that cannot allocate in stream order; for more than
    /// 32 sequences of a model whose experts are in f32, or of widths that are no multiples of 64; for more than 128 sequences of
    /// a quantised model, or 8 in f32 or where candle's kernels multiply with some of its matrices (types other than q8_0,
    /// q4_K and q6_K); when the pool is another model's, the device is out of memory, or other threads used it
    /// meanwhile. Callers go on with [`CausalLm::feed`].
    pub fn capture(model: &CausalLm, pool: &mut SequencePool, batch: usize) -> Result<Self> {
        check(model, pool, batch)?;
        Ok(Self { step: CapturedStep::new(model, pool, batch, None)?, thread: PhantomData })
    }

    /// The most sequences of a step.
    pub fn batch(&self) -> usize {
        self.step.batch()
    }

    /// [`CausalLm::feed`] of one token of each sequence: `[sequences, vocab_size]` in f32. Fewer sequences than the
    /// graph was captured for are padded; they cost as much as the full number.
    ///
    /// # Errors
    /// As [`CausalLm::feed`], or when there are more sequences than the graph was captured for.
    pub fn step(&mut self, model: &CausalLm, pool: &mut SequencePool, batch: &[(Sequence, u32)]) -> Result<Tensor> {
        self.step.logits(model, pool, batch)
    }
}

/// What every graph requires.
pub(crate) fn check(model: &CausalLm, pool: &SequencePool, batch: usize) -> Result<()> {
    if batch == 0 {
        bail!("{OP}: batch: expected at least 1 sequence, got 0")
    }
    if model.id != pool.model {
        bail!("{OP}: pool: expected one that this model made, got one of another model")
    }
    if !pool.device.is_cuda() {
        bail!("{OP}: model: expected one on CUDA, got one on {:?}", pool.device.location())
    }
    Ok(())
}

/// A build without CUDA has none.
#[cfg(not(feature = "cuda"))]
#[derive(Debug)]
enum CapturedStep {}

#[cfg(not(feature = "cuda"))]
impl CapturedStep {
    fn new(_: &CausalLm, _: &mut SequencePool, _: usize, _: Option<()>) -> Result<Self> {
        bail!("{OP}: expected a build with the feature `cuda`")
    }

    fn batch(&self) -> usize {
        match *self {}
    }

    fn logits(&mut self, _: &CausalLm, _: &mut SequencePool, _: &[(Sequence, u32)]) -> Result<Tensor> {
        match *self {}
    }
}
