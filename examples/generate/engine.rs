//! The model with room for sequences, and the ways to feed it.

use super::args::CudaGraph;
use super::graphs::Graphs;
use anyhow::{Context, Result};
use candle_gdn::models::{CausalLm, Drafts, Sequence, SequencePool, SequenceSnapshot};

/// Tokens that follow what a sequence has seen.
pub type Feed<'t> = (Sequence, &'t [u32]);

pub struct Engine<'a> {
    model: &'a CausalLm,
    pool: SequencePool,
    graphs: Graphs,
}

impl<'a> Engine<'a> {
    /// Room for `sequences` of up to `max_len` tokens each.
    pub fn new(model: &'a CausalLm, sequences: usize, max_len: usize, graph: CudaGraph) -> Result<Self> {
        let mut pool = model.new_sequences(sequences, max_len).with_context(|| {
            format!("no room for {sequences} sequences of {max_len} tokens at once (--batch, --max-seq-len)")
        })?;
        let graphs = Graphs::new(graph, model, &mut pool)?;
        Ok(Self { model, pool, graphs })
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

    /// Pieces of prompts in one pass. The logits after the last token of each of the pieces `wanted`, which are given
    /// by their places in `batch`.
    pub fn prefill(&mut self, batch: &[Feed], wanted: &[usize]) -> Result<Vec<Vec<f32>>> {
        if wanted.is_empty() {
            self.model.feed_only(&mut self.pool, batch)?;
            return Ok(Vec::new());
        }
        let logits = self.model.feed(&mut self.pool, batch)?;
        wanted.iter().map(|&i| Ok(logits.get(i)?.to_vec1()?)).collect()
    }

    /// The logits after one more token of each sequence.
    pub fn step(&mut self, batch: &[(Sequence, u32)]) -> Result<Vec<Vec<f32>>> {
        let logits = match self.graphs.of(batch.len(), self.model, &mut self.pool)? {
            Some(graph) => graph.step(self.model, &mut self.pool, batch)?,
            None => {
                let batch: Vec<Feed> = batch.iter().map(|(s, token)| (*s, std::slice::from_ref(token))).collect();
                self.model.feed(&mut self.pool, &batch)?
            }
        };
        Ok(logits.to_vec2()?)
    }

    /// The logits after every token, until [`Self::accept`] as if none had been fed.
    pub fn verify(&mut self, batch: &[Feed]) -> Result<(Vec<Vec<f32>>, Drafts)> {
        let (logits, drafts) = self.model.verify(&mut self.pool, batch)?;
        Ok((logits.to_vec2()?, drafts))
    }

    /// The first `accepted[n]` tokens of each sequence stay.
    pub fn accept(&mut self, drafts: Drafts, accepted: &[usize]) -> Result<()> {
        Ok(self.model.accept(&mut self.pool, drafts, accepted)?)
    }
}
