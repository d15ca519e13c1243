//! A captured decode step: its buffers, its graph, and the tokens on their way to the host.

use super::capture::{capture, RUNS};
use super::decode_buffers::StepBuffers;
use super::pool::{Sequence, SequencePool};
use super::readback::{Layout, PendingTokens, Readbacks};
use super::step_graph::{Pending, Step, StepGraph};
use crate::causal_lm::{CausalLm, Kernels};
use crate::sampling::{Choice, Sampler};
use crate::weights::plan::{routed_on_host, FEW, MANY};
use candle_core::cuda_backend::cudarc::driver::CudaGraph;
use candle_core::{bail, DType, Error, Result, Tensor};
use std::sync::Arc;

const OP: &str = "DecodeGraph";

/// A CUDA graph of a model.
pub(crate) struct ModelGraph {
    graph: CudaGraph,
    /// Dropped after the graph, which holds work of the ranks: NCCL waits forever when they part before that is destroyed.
    _group: Option<Arc<dyn crate::Collective>>,
    /// The model and the pool's memory, whose addresses the graph holds.
    captured_for: (usize, u64),
}

impl std::fmt::Debug for ModelGraph {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ModelGraph").finish_non_exhaustive()
    }
}

impl ModelGraph {
    /// Captures `work`, a pass of up to `rows` tokens.
    ///
    /// candle's buffer for quantised products of more than 8 rows moves when it grows, and a graph holds its address. Our kernels
    /// read packed weights for up to 128 rows, in f32 for 8; for more rows a dequantised copy of each matrix would be part
    /// of the graph's memory.
    pub fn new(
        op: &str,
        model: &CausalLm,
        pool: &mut SequencePool,
        rows: usize,
        work: impl Fn(&mut SequencePool) -> Result<()>,
    ) -> Result<Self> {
        let asks = |moe| routed_on_host(moe, model.config.hidden_size, model.dtype, rows);
        if model.config.moe.as_ref().is_some_and(asks) {
            bail!("{op}: batch: expected at most 32 tokens of a model whose experts our kernels do not support, got {rows}")
        }
        let most = match model.quantized {
            None => usize::MAX,
            Some(Kernels::Ours) if model.dtype != DType::F32 => MANY,
            Some(_) => FEW,
        };
        if rows > most {
            bail!("{op}: batch: expected at most {most} rows of this quantised model, got {rows}")
        }
        let device = pool.device.clone();
        let mut runs = 0;
        let graph = capture(op, &device, || {
            runs += 1;
            work(pool)
        });
        // The other ranks wait in a run of theirs. Of a capture itself the callers of all ranks learn.
        if graph.is_err() && (1..=RUNS).contains(&runs) {
            model.leave();
        }
        let graph = graph?;
        model.settle()?; // the runs before the capture
        let group = model.vocabulary.as_ref().map(|vocabulary| vocabulary.group.clone());
        Ok(Self { graph, _group: group, captured_for: (model.id, pool.memory) })
    }

    /// Whether the memory that it was captured for is still in use.
    pub fn is_valid(&self, model: &CausalLm, pool: &SequencePool) -> bool {
        self.captured_for == (model.id, pool.memory)
    }

    pub fn launch(&self) -> Result<()> {
        self.graph.launch().map_err(Error::wrap)
    }
}

#[derive(Debug)]
pub(crate) struct CapturedStep {
    batch: usize,
    /// Dropped before the buffers that it reads.
    graph: ModelGraph,
    buffers: StepBuffers,
    /// How tokens reach the host; None for a step that leaves logits.
    drawing: Option<Drawing>,
}

#[derive(Debug)]
struct Drawing {
    sampler: Sampler,
    logprobs: bool,
    readbacks: Readbacks,
}

impl CapturedStep {
    /// A step that draws the next tokens with this sampler, and with log-probabilities for the rows that request them or without;
    /// `None`: one that leaves logits, for [`logits`](Self::logits).
    pub fn new(
        model: &CausalLm,
        pool: &mut SequencePool,
        batch: usize,
        draws: Option<(&Sampler, bool)>,
    ) -> Result<Self> {
        let mut made = || -> Result<_> {
            let _working = pool.working()?;
            let buffers = StepBuffers::new(model, pool, batch, draws)?;
            let drawing = |(sampler, logprobs): (&Sampler, bool)| -> Result<Drawing> {
                let readbacks = Readbacks::new(&buffers.drawn()?)?;
                Ok(Drawing { sampler: sampler.clone(), logprobs, readbacks })
            };
            let drawing = draws.map(drawing).transpose()?;
            Ok((buffers, drawing))
        };
        // Before the ranks run together.
        let (buffers, drawing) = model.agree(made())?;
        let graph = ModelGraph::new(OP, model, pool, batch, |pool| buffers.run(model, pool))?;
        Ok(Self { batch, graph, buffers, drawing })
    }

    pub fn batch(&self) -> usize {
        self.batch
    }

    /// See [`DecodeGraph::step`](super::DecodeGraph::step).
    pub fn logits(&mut self, model: &CausalLm, pool: &mut SequencePool, batch: &[(Sequence, u32)]) -> Result<Tensor> {
        let ids: Vec<u32> = batch.iter().map(|(_, id)| *id).collect();
        model.check_ids(OP, [&ids[..]].into_iter())?;
        let sequences: Vec<Sequence> = batch.iter().map(|(sequence, _)| *sequence).collect();
        if !self.graph.is_valid(model, pool) {
            *self = Self::new(model, pool, self.batch, None)?;
        }
        let slots = self.run(model, pool, &sequences, |buffers| buffers.load_ids(&ids))?;
        if let Some(hidden) = self.buffers.hidden(slots.len())? {
            pool.feed_head(model, &slots, ids.chunks(1), &hidden, &hidden)?;
        }
        let logits = self.buffers.logits(slots.len())?;
        end_step(model, pool, &slots)?;
        slots.iter().zip(ids.chunks(1)).for_each(|(slot, id)| pool.record_tokens(*slot, id));
        Ok(logits)
    }

    /// A step of the sequences, whose ids `load` uploads. Returns their slots; [`end_step`] follows when nothing can fail any more.
    fn run(
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
        let _working = pool.working()?;
        load(&self.buffers)?;
        self.buffers.load(pool, &slots)?;
        pool.begin_write(&slots);
        let held = self.buffers.begin();
        self.graph.launch()?;
        self.buffers.end(held, slots.len());
        Ok(slots)
    }
}

/// The sequences in the slots have a token more.
fn end_step(model: &CausalLm, pool: &mut SequencePool, slots: &[usize]) -> Result<()> {
    model.settle()?;
    pool.end_write(slots, &vec![1; slots.len()]);
    Ok(())
}

impl StepGraph for CapturedStep {
    fn is_valid(&self, model: &CausalLm, pool: &SequencePool) -> bool {
        self.graph.is_valid(model, pool)
    }

    fn is_ready(&self, model: &CausalLm, pool: &SequencePool, _: &[Sequence]) -> bool {
        self.graph.is_valid(model, pool)
    }

    fn launch(
        &mut self,
        model: &CausalLm,
        pool: &mut SequencePool,
        sequences: &[Sequence],
        choices: Option<&[Choice]>,
    ) -> Result<Box<dyn Pending>> {
        let (is_valid, Some(drawing)) = (self.graph.is_valid(model, pool), &self.drawing) else {
            bail!("{OP}: expected a step that draws")
        };
        let slots = match choices {
            Some(choices) => {
                let ids: Vec<u32> = choices.iter().map(|choice| choice.last).collect();
                model.check_ids(OP, [&ids[..]].into_iter())?;
                if !is_valid {
                    let (sampler, logprobs) = (drawing.sampler.clone(), drawing.logprobs);
                    *self = Self::new(model, pool, self.batch, Some((&sampler, logprobs)))?;
                }
                self.run(model, pool, sequences, |buffers| buffers.load_choices(choices))?
            }
            None if !is_valid => bail!("{OP}: expected the pool of the step before, as it was"),
            None => {
                let slots = self.run(model, pool, sequences, |_| Ok(()))?;
                // The hidden states of the step before are overwritten.
                pool.skip_head(&slots);
                slots
            }
        };
        let Some(drawing) = &mut self.drawing else { bail!("{OP}: expected a step that draws") };
        let readback = drawing.readbacks.send(&self.buffers.drawn()?)?;
        end_step(model, pool, &slots)?;
        Ok(Box::new(PendingTokens { readback, sequences: sequences.len(), layout: Layout::Single }))
    }

    fn end(&self, model: &CausalLm, pool: &mut SequencePool, step: &Step<'_>) -> Result<()> {
        let rows = step.sequences.iter().zip(step.fed).enumerate();
        let fed: Vec<_> = rows.filter_map(|(row, (s, id))| Some((row, *s, (*id)?))).collect();
        let slots = fed.iter().map(|(_, s, _)| pool.slot(OP, *s)).collect::<Result<Vec<_>>>()?;
        slots.iter().zip(&fed).for_each(|(slot, (.., id))| pool.record_tokens(*slot, &[*id]));
        if !step.is_last || !pool.has_head() {
            return Ok(());
        }
        let Some(count) = fed.iter().map(|(row, ..)| row + 1).max() else { return Ok(()) };
        let Some(hidden) = self.buffers.hidden(count)? else { return Ok(()) };
        let tokens = fed.iter().map(|(row, _, id)| (std::slice::from_ref(id), *row));
        pool.feed_head_later(&slots, tokens, &hidden);
        pool.bound_waiting(model, &slots)
    }
}
