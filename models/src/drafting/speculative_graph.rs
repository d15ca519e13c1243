//! A speculative step (draft, verify, accept) as one CUDA graph.

use super::speculative_buffers::{SpeculativeBuffers, Start, OP};
use crate::causal_lm::CausalLm;
use crate::sampling::{Choice, Sampler};
use crate::sequences::captured_step::ModelGraph;
use crate::sequences::pool::{Sequence, SequencePool};
use crate::sequences::readback::{Layout, PendingTokens, Readbacks};
use crate::sequences::step_graph::{Pending, Step, StepGraph};
use candle_core::{bail, Result};

/// A speculative step of up to a number of sequences. Its results lie on the device: the next step of the same sequences needs nothing of
/// the host.
#[derive(Debug)]
pub(crate) struct SpeculativeGraph {
    batch: usize,
    logprobs: bool,
    /// Dropped before the buffers that it reads.
    graph: ModelGraph,
    buffers: SpeculativeBuffers,
    /// The sequences whose inputs are in the buffers: slots and versions.
    held: Vec<(usize, u64)>,
    readbacks: Readbacks,
}

impl SpeculativeGraph {
    /// Captures steps of up to `batch` sequences with `depth` drafts each, with log-probabilities or without, as
    /// [`DecodeGraph::capture`](crate::DecodeGraph::capture) does. `forced_acceptance` is the chance that a draft is accepted,
    /// whatever was drawn.
    ///
    /// # Errors
    /// As that, for as many rows as there are tokens; or when the pool has no rings or no draft head.
    pub fn new(
        model: &CausalLm,
        pool: &mut SequencePool,
        (batch, depth): (usize, usize),
        sampler: &Sampler,
        forced_acceptance: Option<f32>,
        logprobs: bool,
    ) -> Result<Self> {
        let mut made = || -> Result<_> {
            let _working = pool.working()?;
            SpeculativeBuffers::new(model, pool, batch, depth, sampler, forced_acceptance, logprobs)
        };
        // Before the ranks run together.
        let buffers = model.agree(made())?;
        let graph = ModelGraph::new(OP, model, pool, batch * (depth + 1), |pool| buffers.run(model, pool))?;
        let readbacks = Readbacks::new(&buffers.out()?)?;
        Ok(Self { batch, logprobs, graph, buffers, held: Vec::new(), readbacks })
    }

    /// Uploads all that a step of the sequences reads. Returns their slots.
    fn load(
        &mut self,
        model: &CausalLm,
        pool: &mut SequencePool,
        sequences: &[Sequence],
        choices: &[Choice],
    ) -> Result<Vec<usize>> {
        self.held.clear();
        let tokens = self.buffers.tokens;
        let slots = pool.batch_slots(OP, model.id, sequences.iter().map(|s| (*s, tokens)))?;
        if slots.len() > self.batch {
            bail!("{OP}: expected at most {} sequences, got {}", self.batch, slots.len())
        }
        let _working = pool.working()?;
        pool.fill_head_from(model, &slots, tokens)?;
        let starts = slots.iter().zip(choices).map(|(&slot, choice)| Start { slot, choice: choice.clone() });
        self.buffers.load(pool, &starts.collect::<Vec<_>>())?;
        Ok(slots)
    }
}

impl StepGraph for SpeculativeGraph {
    fn is_valid(&self, model: &CausalLm, pool: &SequencePool) -> bool {
        self.graph.is_valid(model, pool)
    }

    fn is_ready(&self, model: &CausalLm, pool: &SequencePool, sequences: &[Sequence]) -> bool {
        let same = |(s, (slot, version)): (&Sequence, &(usize, u64))| {
            s.slot as usize == *slot && pool.slot(OP, *s).is_ok() && pool.entries[*slot].version == *version
        };
        self.graph.is_valid(model, pool)
            && sequences.len() == self.held.len()
            && sequences.iter().zip(&self.held).all(same)
    }

    fn launch(
        &mut self,
        model: &CausalLm,
        pool: &mut SequencePool,
        sequences: &[Sequence],
        choices: Option<&[Choice]>,
    ) -> Result<Box<dyn Pending>> {
        if !self.graph.is_valid(model, pool) {
            let (size, sampler) = ((self.batch, self.buffers.tokens - 1), self.buffers.sampler.clone());
            let forced_acceptance = self.buffers.forced_acceptance;
            *self = Self::new(model, pool, size, &sampler, forced_acceptance, self.logprobs)?;
        }
        let slots: Vec<usize> = match (self.is_ready(model, pool, sequences), choices) {
            (true, _) => self.held.iter().map(|(slot, _)| *slot).collect(),
            (false, Some(choices)) => self.load(model, pool, sequences, choices)?,
            (false, None) => bail!("{OP}: expected the sequences of the step before, as they were"),
        };
        let _working = pool.working()?;
        pool.begin_write(&slots);
        let held = slots.iter().map(|&slot| (slot, pool.entries[slot].version)).collect();
        self.held.clear();
        self.graph.launch()?;
        let readback = self.readbacks.send(&self.buffers.out()?)?;
        model.settle()?;
        self.held = held;
        let layout = Layout::Counted(self.buffers.tokens);
        Ok(Box::new(PendingTokens { readback, sequences: slots.len(), layout }))
    }

    fn end(&self, _: &CausalLm, pool: &mut SequencePool, step: &Step<'_>) -> Result<()> {
        // A step ahead that failed after its launch, which holds nothing, has advanced the states all the same.
        let is_last = step.is_last && !self.held.is_empty();
        let hidden = if is_last { Some(self.buffers.hidden(step.sequences.len())?) } else { None };
        for (n, (s, drawn)) in step.sequences.iter().zip(step.drawn).enumerate() {
            let Ok(slot) = pool.slot(OP, *s) else { continue };
            let first = n * self.buffers.tokens;
            pool.record_tokens(slot, step.fed[n].as_slice());
            pool.end_speculative(slot, drawn, hidden.as_ref().map(|hidden| (hidden, first)));
        }
        Ok(())
    }
}
