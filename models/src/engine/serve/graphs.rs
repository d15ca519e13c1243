//! Decode steps recorded as CUDA graphs.

use super::request::{Event, GraphChoice};
use crate::engine::sampling::Sampler;
use crate::{CausalLm, DecodeGraph, SequencePool};
use candle_core::Result;

/// A graph costs what its full number of sequences does: as sequences end, narrower ones take over.
#[derive(Debug)]
pub(super) struct Graphs {
    choice: GraphChoice,
    sampler: Sampler,
    /// For so many sequences at most.
    most: usize,
    captured: Vec<DecodeGraph>,
    /// No graph this wide can be had.
    refused: Option<usize>,
}

impl Graphs {
    /// For all sequences of a pool, captured before anything is fed: [`GraphChoice::On`] fails here if it has to, and no
    /// request waits for a capture.
    pub fn new(
        choice: GraphChoice,
        sampler: Sampler,
        model: &CausalLm,
        pool: &mut SequencePool,
        events: &mut Vec<Event>,
    ) -> Result<Self> {
        // Nobody who did not ask for a graph misses one on the CPU.
        let choice = match choice {
            GraphChoice::Auto if model.device().is_cpu() => GraphChoice::Off,
            choice => choice,
        };
        let most = pool.capacity();
        let mut graphs = Self { choice, sampler, most, captured: Vec::new(), refused: None };
        graphs.find(most, model, pool, events)?;
        for width in (0..usize::BITS).rev().map(|bit| 1 << bit).filter(|width| *width < most) {
            graphs.find(width, model, pool, events)?;
        }
        Ok(graphs)
    }

    /// The graph for a step of so many sequences, if there is one.
    pub fn find(
        &mut self,
        sequences: usize,
        model: &CausalLm,
        pool: &mut SequencePool,
        events: &mut Vec<Event>,
    ) -> Result<Option<&mut DecodeGraph>> {
        let width = sequences.next_power_of_two().min(self.most);
        if self.choice == GraphChoice::Off || self.refused.is_some_and(|refused| width >= refused) {
            return Ok(None);
        }
        if let Some(i) = self.captured.iter().position(|graph| graph.batch() == width) {
            return Ok(Some(&mut self.captured[i]));
        }
        match DecodeGraph::capture_drawing(model, pool, width, &self.sampler) {
            Ok(graph) => self.captured.push(graph),
            Err(e) if self.choice == GraphChoice::On => return Err(e),
            Err(e) => {
                if self.refused.is_none() {
                    // An error may bring a backtrace.
                    let why = e.to_string().lines().next().unwrap_or_default().to_string();
                    events.push(Event::NoGraph { sequences: width, why });
                }
                self.refused = Some(width);
            }
        }
        Ok(self.captured.iter_mut().find(|graph| graph.batch() == width))
    }
}
