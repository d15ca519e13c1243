//! Decode steps recorded as CUDA graphs.

use super::args::CudaGraph;
use super::common::tell;
use anyhow::{Context, Result};
use candle_core::Error;
use candle_gdn_models::{CausalLm, DecodeGraph, SequencePool};

/// A graph costs what its full number of sequences does: as rows end, narrower ones take over, each recorded when it is
/// first needed.
pub struct Graphs {
    choice: CudaGraph,
    /// For so many sequences at most.
    most: usize,
    captured: Vec<DecodeGraph>,
    /// No graph this wide can be had.
    refused: Option<usize>,
}

impl Graphs {
    /// For all sequences of a pool. Captures the widest at once, so that `--cuda-graph on` fails before anything is
    /// fed.
    pub fn new(choice: CudaGraph, model: &CausalLm, pool: &mut SequencePool) -> Result<Self> {
        // Nobody who did not ask for a graph misses one on the CPU.
        let choice = match choice {
            CudaGraph::Auto if model.device().is_cpu() => CudaGraph::Off,
            choice => choice,
        };
        let most = pool.capacity();
        let mut graphs = Self { choice, most, captured: Vec::new(), refused: None };
        graphs.of(most, model, pool)?;
        Ok(graphs)
    }

    /// The graph for a step of `rows` sequences, if there is one.
    pub fn of(&mut self, rows: usize, model: &CausalLm, pool: &mut SequencePool) -> Result<Option<&mut DecodeGraph>> {
        let width = rows.next_power_of_two().min(self.most);
        if self.choice == CudaGraph::Off || self.refused.is_some_and(|refused| width >= refused) {
            return Ok(None);
        }
        if let Some(i) = self.captured.iter().position(|graph| graph.batch() == width) {
            return Ok(Some(&mut self.captured[i]));
        }
        match DecodeGraph::capture(model, pool, width) {
            Ok(graph) => self.captured.push(graph),
            Err(e) if self.choice == CudaGraph::On => return Err(e).context("--cuda-graph on: cannot capture one"),
            Err(e) => {
                if self.refused.is_none() {
                    tell!("no CUDA graph of {width} sequences, going on without: {}", first_line(&e));
                }
                self.refused = Some(width);
            }
        }
        Ok(self.captured.iter_mut().find(|graph| graph.batch() == width))
    }
}

/// An error may bring a backtrace.
fn first_line(e: &Error) -> String {
    e.to_string().lines().next().unwrap_or_default().to_string()
}
