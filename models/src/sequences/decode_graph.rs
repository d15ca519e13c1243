//! A decode step of the whole model as one CUDA graph.

#[cfg(feature = "cuda")]
use super::capture::capture;
#[cfg(feature = "cuda")]
use super::landing::Landing;
use super::pool::{Sequence, SequencePool};
#[cfg(feature = "cuda")]
use super::sampling::tokens;
use super::sampling::{Choice, Sampler, Token};
#[cfg(feature = "cuda")]
use super::step::StepBuffers;
#[cfg(feature = "cuda")]
use crate::blocks::moe::asks_the_host;
use crate::causal_lm::CausalLm;
#[cfg(feature = "cuda")]
use crate::causal_lm::Kernels;
use candle_core::{bail, Result, Tensor};
#[cfg(feature = "cuda")]
use std::cell::RefCell;
use std::marker::PhantomData;
#[cfg(feature = "cuda")]
use std::rc::Rc;

const OP: &str = "DecodeGraph";

/// An error where a graph of this model may not have so many rows.
///
/// candle's buffer for quantised products of more than 8 rows moves when it grows, and a graph holds its address. Our kernels read packed
/// weights for up to 128 rows, in f32 for 8; for more rows a dequantised copy of each matrix would be part of the graph's memory.
#[cfg(feature = "cuda")]
pub(super) fn check_rows(op: &str, model: &CausalLm, rows: usize) -> Result<()> {
    let most = match model.quantized {
        None => return Ok(()),
        Some(Kernels::Ours) if model.dtype != candle_core::DType::F32 => crate::cuda::quantized::MANY,
        Some(_) => crate::cuda::quantized::FEW,
    };
    if rows > most {
        bail!("{op}: batch: expected at most {most} rows of this quantised model, got {rows}")
    }
    Ok(())
}

/// One decode step of the whole model, of up to a number of sequences, captured once as a CUDA graph and replayed: one
/// launch instead of some hundreds. It serves all sequences of a pool as they come, go and grow; ids, slots and
/// positions lie in buffers of its own, and for the same sequences step after step only the ids are uploaded.
///
/// It belongs to the host thread that made it, as streams do. Where the pool's memory has moved, or with another pool
/// of the model, the next step captures anew by itself.
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
pub struct DecodeGraph {
    batch: usize,
    #[cfg(feature = "cuda")]
    buffers: StepBuffers,
    #[cfg(feature = "cuda")]
    graph: candle_core::cuda_backend::cudarc::driver::CudaGraph,
    /// Behind the graph, which holds work of the ranks: NCCL waits for ever when they part before that is destroyed.
    #[cfg(feature = "cuda")]
    _group: Option<std::sync::Arc<dyn crate::Collective>>,
    /// Whose addresses it holds: the model and the pool's memory.
    #[cfg(feature = "cuda")]
    captured_for: (usize, u64),
    /// Where the tokens of the next step go and, first, those of the step before: empty where a step leaves logits.
    #[cfg(feature = "cuda")]
    landings: Vec<Rc<RefCell<Landing>>>,
    #[cfg(feature = "cuda")]
    tells: bool,
    #[cfg(not(feature = "cuda"))]
    never: std::convert::Infallible,
    /// Not `Send`, with or without the feature.
    thread: PhantomData<*mut ()>,
}

impl std::fmt::Debug for DecodeGraph {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct(OP).field("batch", &self.batch).finish_non_exhaustive()
    }
}

impl DecodeGraph {
    /// Captures a step of up to `batch` sequences of the pool. The step runs twice before, on padding only: no sequence
    /// changes. cudarc's event tracking is off meanwhile, for all threads that use the device.
    ///
    /// Calls of other host threads that give this device work through this crate or `candle-gdn` wait meanwhile. Work that
    /// others give it by candle itself, reading or dropping a tensor too, would become part of the graph instead of running: CUDA
    /// refuses it, or the capture notices, and fails. [`Working`](candle_gdn::plumbing::Working) keeps captures away from it.
    /// Nor may another thread wait for the whole GPU (`cuCtxSynchronize`, which making a candle device does too): CUDA
    /// fails both that and the capture.
    ///
    /// # Errors
    /// On the CPU; on a device with a stream for each host thread, as `Device::new_cuda` makes them (see
    /// [`single_stream_device`](candle_gdn::single_stream_device)), or one that cannot allocate in stream order; for more than
    /// 32 sequences where experts are in f32, or of widths that are no multiples of 64, and so ask the host; for more than
    /// 128 of a quantised model, or 8 in f32 or where candle's kernels multiply with some of its matrices (types other than q8_0, q4_K and
    /// q6_K); when the pool is another model's, the device is out of memory, or other threads gave it work meanwhile. Callers go on
    /// with [`CausalLm::feed`].
    pub fn capture(model: &CausalLm, pool: &mut SequencePool, batch: usize) -> Result<Self> {
        Self::capture_any(model, pool, batch, None)
    }

    /// A step that draws the next tokens, for [`Self::draw`]; it `tells` log-probabilities to those who ask, or there are none.
    pub(super) fn capture_drawing(
        model: &CausalLm,
        pool: &mut SequencePool,
        batch: usize,
        sampler: &Sampler,
        tells: bool,
    ) -> Result<Self> {
        Self::capture_any(model, pool, batch, Some((sampler, tells)))
    }

    fn capture_any(
        model: &CausalLm,
        pool: &mut SequencePool,
        batch: usize,
        sampler: Option<(&Sampler, bool)>,
    ) -> Result<Self> {
        if batch == 0 {
            bail!("{OP}: batch: expected at least 1 sequence, got 0")
        }
        if model.id != pool.model {
            bail!("{OP}: pool: expected one that this model made, got one of another model")
        }
        if !pool.device.is_cuda() {
            bail!("{OP}: model: expected one on CUDA, got one on {:?}", pool.device.location())
        }
        Self::captured(model, pool, batch, sampler)
    }

    /// The most sequences of a step.
    pub fn batch(&self) -> usize {
        self.batch
    }

    /// Whether its steps tell log-probabilities.
    pub(super) fn tells(&self) -> bool {
        #[cfg(feature = "cuda")]
        return self.tells;
        #[cfg(not(feature = "cuda"))]
        match self.never {}
    }

    #[cfg(not(feature = "cuda"))]
    fn captured(_: &CausalLm, _: &mut SequencePool, _: usize, _: Option<(&Sampler, bool)>) -> Result<Self> {
        bail!("{OP}: expected a build with the feature `cuda`")
    }

    /// [`CausalLm::feed`] of one token of each sequence: `[sequences, vocab_size]` in f32. Fewer sequences than the
    /// graph was captured for are padded; they cost what the full number does.
    ///
    /// # Errors
    /// As [`CausalLm::feed`], or when there are more sequences than the graph was captured for.
    #[cfg(not(feature = "cuda"))]
    pub fn step(&mut self, _: &CausalLm, _: &mut SequencePool, _: &[(Sequence, u32)]) -> Result<Tensor> {
        match self.never {}
    }

    /// See the same with the feature.
    #[cfg(not(feature = "cuda"))]
    pub(super) fn draw(&mut self, _: &CausalLm, _: &mut SequencePool, _: Next<'_>) -> Result<Coming> {
        match self.never {}
    }

    /// See the same with the feature.
    #[cfg(not(feature = "cuda"))]
    pub(super) fn hear(&self, _: &CausalLm, _: &mut SequencePool, _: &[(usize, Sequence, u32)]) -> Result<()> {
        match self.never {}
    }
}

/// What a step that draws is of.
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
pub(super) enum Next<'a> {
    /// These sequences, and how each chooses.
    Of(&'a [(Sequence, Choice)]),
    /// The same as the step before, behind the tokens that it drew, which need not have come.
    Same(&'a [Sequence]),
}

/// Tokens that a step draws.
#[derive(Debug)]
pub(super) struct Coming {
    #[cfg(feature = "cuda")]
    landing: Rc<RefCell<Landing>>,
    #[cfg(feature = "cuda")]
    sequences: usize,
    #[cfg(not(feature = "cuda"))]
    never: std::convert::Infallible,
}

impl Coming {
    /// Waits for them. They are gone once the step after the next begins.
    pub fn read(&self) -> Result<Vec<Token>> {
        #[cfg(feature = "cuda")]
        return {
            let words = self.landing.borrow().words()?;
            Ok(tokens(&words[0][..self.sequences], words.get(1).map_or(&[], Vec::as_slice)))
        };
        #[cfg(not(feature = "cuda"))]
        match self.never {}
    }
}

#[cfg(feature = "cuda")]
impl DecodeGraph {
    fn captured(
        model: &CausalLm,
        pool: &mut SequencePool,
        batch: usize,
        sampler: Option<(&Sampler, bool)>,
    ) -> Result<Self> {
        let asks = |moe| asks_the_host(moe, model.config.hidden_size, model.dtype, batch);
        if model.config.moe.as_ref().is_some_and(asks) {
            bail!("{OP}: batch: expected at most 32 sequences of a model with experts in f32, got {batch}")
        }
        check_rows(OP, model, batch)?;
        let (buffers, landings) = {
            let _working = pool.take()?;
            match sampler {
                None => (StepBuffers::new(model, pool, batch)?, Vec::new()),
                Some((sampler, tells)) => {
                    let buffers = StepBuffers::drawing(model, pool, batch, sampler.clone(), tells)?;
                    let drawn = buffers.drawn()?;
                    let landing = || Landing::new(&drawn).map(|landing| Rc::new(RefCell::new(landing)));
                    (buffers, vec![landing()?, landing()?])
                }
            }
        };
        let device = pool.device.clone();
        let graph = capture(OP, &device, || buffers.run(model, pool))?;
        let group = model.vocabulary.as_ref().map(|vocabulary| vocabulary.group().clone());
        let captured_for = (model.id, pool.memory);
        let tells = sampler.is_some_and(|(_, tells)| tells);
        Ok(Self { batch, buffers, graph, _group: group, captured_for, landings, tells, thread: PhantomData })
    }

    /// [`CausalLm::feed`] of one token of each sequence: `[sequences, vocab_size]` in f32. Fewer sequences than the
    /// graph was captured for are padded; they cost what the full number does.
    ///
    /// # Errors
    /// As [`CausalLm::feed`], or when there are more sequences than the graph was captured for.
    pub fn step(&mut self, model: &CausalLm, pool: &mut SequencePool, batch: &[(Sequence, u32)]) -> Result<Tensor> {
        let ids: Vec<u32> = batch.iter().map(|(_, id)| *id).collect();
        model.check_ids(OP, [&ids[..]].into_iter())?;
        let sequences: Vec<Sequence> = batch.iter().map(|(sequence, _)| *sequence).collect();
        if self.captured_for != (model.id, pool.memory) {
            *self = Self::capture(model, pool, self.batch)?;
        }
        let slots = self.launch(model, pool, &sequences, |buffers| buffers.load_ids(&ids))?;
        if let Some(hidden) = self.buffers.hidden(slots.len())? {
            pool.heard(model, &slots, ids.chunks(1), &hidden, &hidden)?;
        }
        self.buffers.logits(sequences.len())
    }

    /// A step that draws the next token of each sequence, of one that [`capture_drawing`](Self::capture_drawing) made.
    /// Returns before it has run.
    ///
    /// # Errors
    /// As [`step`](Self::step), or when the same sequences are asked for and there was no step of them.
    pub(super) fn draw(&mut self, model: &CausalLm, pool: &mut SequencePool, next: Next<'_>) -> Result<Coming> {
        let moved = self.captured_for != (model.id, pool.memory);
        match next {
            Next::Of(batch) => {
                let (sequences, choices): (Vec<_>, Vec<_>) = batch.iter().cloned().unzip();
                let ids: Vec<u32> = choices.iter().map(|choice| choice.last).collect();
                model.check_ids(OP, [&ids[..]].into_iter())?;
                if moved {
                    let sampler = self.buffers.sampler()?;
                    *self = Self::capture_drawing(model, pool, self.batch, &sampler, self.tells)?;
                }
                self.launch(model, pool, &sequences, |buffers| buffers.load_choices(&choices))?;
                self.send(sequences.len())
            }
            Next::Same(_) if moved => bail!("{OP}: expected the pool of the step before, as it was"),
            Next::Same(sequences) => {
                let slots = self.launch(model, pool, sequences, |_| Ok(()))?;
                // The step before has been written over.
                pool.unheard(&slots);
                self.send(sequences.len())
            }
        }
    }

    /// The draft head takes note of the last step that drew, which was of these sequences and fed them `ids`.
    pub(super) fn hear(&self, model: &CausalLm, pool: &mut SequencePool, fed: &[(usize, Sequence, u32)]) -> Result<()> {
        let Some(rows) = fed.iter().map(|(row, ..)| row + 1).max() else { return Ok(()) };
        let Some(hidden) = self.buffers.hidden(rows)? else { return Ok(()) };
        let slots = fed.iter().map(|(_, s, _)| pool.slot(OP, *s)).collect::<Result<Vec<_>>>()?;
        let tokens = fed.iter().map(|(row, _, id)| (std::slice::from_ref(id), *row));
        pool.heard_later(&slots, tokens, &hidden);
        pool.bound_waiting(model, &slots)
    }

    fn send(&mut self, sequences: usize) -> Result<Coming> {
        let landing = self.landings[0].clone();
        landing.borrow_mut().send(&self.buffers.drawn()?)?;
        self.landings.rotate_left(1);
        Ok(Coming { landing, sequences })
    }

    /// A step of the sequences, whose ids `load` uploads. Their slots.
    fn launch(
        &mut self,
        model: &CausalLm,
        pool: &mut SequencePool,
        sequences: &[Sequence],
        load: impl FnOnce(&StepBuffers) -> Result<()>,
    ) -> Result<Vec<usize>> {
        let slots = pool.batch_slots(OP, model.id, sequences.iter().map(|sequence| (*sequence, 1)))?;
        if slots.len() > self.batch {
            bail!("{OP}: batch: expected at most {} sequences, got {}", self.batch, slots.len())
        }
        let _working = pool.take()?;
        load(&self.buffers)?;
        self.buffers.load(pool, &slots)?;
        pool.about_to_write(&slots);
        let held = self.buffers.running();
        self.graph.launch().map_err(candle_core::Error::wrap)?;
        self.buffers.ran(held, slots.len());
        model.settle()?;
        pool.written(&slots, &vec![1; slots.len()]);
        Ok(slots)
    }
}
