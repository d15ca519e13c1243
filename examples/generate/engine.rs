//! The model with room for sequences, and the ways to feed it.

use super::generation::Job;
use super::graphs::Graphs;
use super::greedy::{Greedy, Logits};
use super::plan::Plan;
use anyhow::{Context, Result};
use candle_core::Tensor;
use candle_gdn_models::{CausalLm, Drafts, Sequence, SequencePool, SequenceSnapshot};

/// Tokens that follow what a sequence has seen.
pub type Feed<'t> = (Sequence, &'t [u32]);

pub struct Engine<'a> {
    model: &'a CausalLm,
    pool: SequencePool,
    graphs: Graphs,
    /// Where nothing but the most likely token is asked for.
    greedy: Option<Greedy>,
}

impl<'a> Engine<'a> {
    /// Room for as many sequences, and as long ones, as are planned.
    pub fn new(job: &Job<'a>) -> Result<Self> {
        let (model, &Plan { batch: sequences, max_len, .. }) = (job.model, job.plan);
        let mut pool = model.new_sequences(sequences, max_len).with_context(|| {
            format!("no room for {sequences} sequences of {max_len} tokens at once (--batch, --max-seq-len)")
        })?;
        let graphs = Graphs::new(job.run.cuda_graph, model, &mut pool)?;
        let greedy = match job.settings.sampling.is_greedy() && !model.device().is_cpu() {
            true => Some(Greedy::new(model.config().vocab_size, model.device())?),
            false => None,
        };
        Ok(Self { model, pool, graphs, greedy })
    }

    /// A new sequence, behind the tokens of `snapshot` if there is one.
    pub fn begin(&mut self, snapshot: Option<&SequenceSnapshot>) -> Result<Sequence> {
        let sequence = self.pool.begin()?;
        if let Some(snapshot) = snapshot {
            self.pool.restore(sequence, snapshot)?;
        }
        Ok(sequence)
    }

    pub fn end(&mut self, sequence: Sequence) -> Result<()> {
        Ok(self.pool.end(sequence)?)
    }

    pub fn snapshot(&self, sequence: Sequence) -> Result<SequenceSnapshot> {
        Ok(self.pool.snapshot(sequence)?)
    }

    /// The sequence goes on from where the snapshot was taken.
    pub fn restore(&mut self, sequence: Sequence, snapshot: &SequenceSnapshot) -> Result<()> {
        Ok(self.pool.restore(sequence, snapshot)?)
    }

    /// Tokens that the sequence has seen.
    pub fn len(&self, sequence: Sequence) -> Result<usize> {
        Ok(self.pool.len(sequence)?)
    }

    /// Any number of tokens of each sequence in one pass. The logits after the last token of each of the pieces
    /// `wanted`, which are given by their places in `batch`.
    pub fn feed(&mut self, batch: &[Feed], wanted: &[usize]) -> Result<Vec<Logits>> {
        if wanted.is_empty() {
            self.model.feed_only(&mut self.pool, batch)?;
            return Ok(Vec::new());
        }
        let logits = self.model.feed(&mut self.pool, batch)?;
        if wanted.len() == batch.len() {
            return self.read(&logits);
        }
        let rows: Vec<_> = wanted.iter().map(|&i| logits.narrow(0, i, 1)).collect::<candle_core::Result<_>>()?;
        self.read(&Tensor::cat(&rows, 0)?)
    }

    /// The logits after one more token of each sequence.
    pub fn step(&mut self, batch: &[(Sequence, u32)]) -> Result<Vec<Logits>> {
        let logits = match self.graphs.of(batch.len(), self.model, &mut self.pool)? {
            Some(graph) => graph.step(self.model, &mut self.pool, batch)?,
            None => {
                let batch: Vec<Feed> = batch.iter().map(|(s, token)| (*s, std::slice::from_ref(token))).collect();
                self.model.feed(&mut self.pool, &batch)?
            }
        };
        self.read(&logits)
    }

    /// The logits after every token, until [`Self::accept`] as if none had been fed.
    pub fn verify(&mut self, batch: &[Feed]) -> Result<(Vec<Logits>, Drafts)> {
        let (logits, drafts) = self.model.verify(&mut self.pool, batch)?;
        Ok((self.read(&logits)?, drafts))
    }

    /// From `[rows, vocabulary]`.
    fn read(&self, logits: &Tensor) -> Result<Vec<Logits>> {
        Ok(match &self.greedy {
            Some(greedy) => greedy.best(logits)?,
            None => logits.to_vec2()?.into_iter().map(Logits::All).collect(),
        })
    }

    /// The first `accepted[n]` tokens of each sequence stay.
    pub fn accept(&mut self, drafts: Drafts, accepted: &[usize]) -> Result<()> {
        Ok(self.model.accept(&mut self.pool, drafts, accepted)?)
    }
}
