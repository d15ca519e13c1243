//! Decode steps recorded as CUDA graphs.

use super::request::{EngineOptions, Event, GraphChoice};
use super::DraftDepth;
use crate::engine::round_graph::RoundGraph;
use crate::engine::sampling::Sampler;
use crate::{CausalLm, DecodeGraph, SequencePool};
use candle_core::{Error, Result};

/// A graph costs what its full number of sequences does: as sequences end, narrower ones take over.
#[derive(Debug)]
pub(super) struct Graphs {
    choice: GraphChoice,
    sampler: Sampler,
    /// For so many sequences at most.
    most: usize,
    captured: Vec<DecodeGraph>,
    /// No graph this wide can be had, and none that tells log-probabilities.
    refused: [Option<usize>; 2],
    /// Rounds with the draft head.
    rounds: Vec<RoundGraph>,
    /// None of so many tokens can be had, and none that tells.
    refused_round: [Option<usize>; 2],
    /// See [`EngineOptions`].
    forced: Option<f32>,
    /// For tests: rounds without graphs.
    pub rounds_without_graph: bool,
}

impl Graphs {
    /// For all sequences of a pool, and rounds of the depth that will be asked for, captured before anything is fed: [`GraphChoice::On`] fails here if it has to, and no
    /// request waits for a capture.
    pub fn new(
        options: &EngineOptions,
        sampler: Sampler,
        model: &CausalLm,
        pool: &mut SequencePool,
        events: &mut Vec<Event>,
    ) -> Result<Self> {
        // Nobody who did not ask for a graph misses one on the CPU.
        let choice = match options.cuda_graph {
            GraphChoice::Auto if model.device().is_cpu() => GraphChoice::Off,
            choice => choice,
        };
        let most = pool.capacity();
        let mut graphs = Self {
            choice,
            sampler,
            most,
            captured: Vec::new(),
            refused: [None; 2],
            rounds: Vec::new(),
            refused_round: [None; 2],
            forced: options.forced_acceptance,
            rounds_without_graph: false,
        };
        let depth = match options.draft_depth {
            DraftDepth::Fixed(depth) => depth.min(DraftDepth::MOST),
            // Others as they are tried.
            DraftDepth::Auto => 1,
        };
        let narrower = (0..usize::BITS).rev().map(|bit| 1 << bit).filter(|width| *width < most);
        for width in [most].into_iter().chain(narrower) {
            graphs.find((width, false), model, pool, events)?;
            if depth > 0 && pool.has_head() {
                graphs.find_round((width, depth, false), model, pool, events)?;
            }
        }
        Ok(graphs)
    }

    /// The graph for a step of so many sequences that tells log-probabilities or does not, if there is one. Those that tell are
    /// captured when somebody asks, so that nobody else pays for them.
    pub fn find(
        &mut self,
        (sequences, tells): (usize, bool),
        model: &CausalLm,
        pool: &mut SequencePool,
        events: &mut Vec<Event>,
    ) -> Result<Option<&mut DecodeGraph>> {
        let width = sequences.next_power_of_two().min(self.most);
        if self.choice == GraphChoice::Off || self.refused[usize::from(tells)].is_some_and(|refused| width >= refused) {
            return Ok(None);
        }
        let fits = |graph: &DecodeGraph| graph.batch() == width && graph.tells() == tells;
        if let Some(i) = self.captured.iter().position(fits) {
            return Ok(Some(&mut self.captured[i]));
        }
        match DecodeGraph::capture_drawing(model, pool, width, &self.sampler, tells) {
            Ok(graph) => self.captured.push(graph),
            Err(e) if self.choice == GraphChoice::On => return Err(e),
            Err(e) => {
                if self.refused == [None; 2] {
                    events.push(no_graph(width, &e));
                }
                self.refused[usize::from(tells)] = Some(width);
            }
        }
        Ok(self.captured.iter_mut().find(|graph| fits(graph)))
    }

    /// The graph for a round of so many sequences with so many drafts each, if there is one, as [`find`](Self::find).
    pub fn find_round(
        &mut self,
        (sequences, depth, tells): (usize, usize, bool),
        model: &CausalLm,
        pool: &mut SequencePool,
        events: &mut Vec<Event>,
    ) -> Result<Option<&mut RoundGraph>> {
        let width = sequences.next_power_of_two().min(self.most);
        let size = (width, depth);
        let fits = |round: &RoundGraph| round.size() == size && round.tells() == tells;
        if let Some(i) = self.rounds.iter().position(fits) {
            return Ok(Some(&mut self.rounds[i]));
        }
        let tokens = width * (depth + 1);
        let off = self.choice == GraphChoice::Off && !self.rounds_without_graph;
        if off || self.refused_round[usize::from(tells)].is_some_and(|refused| tokens >= refused) {
            return Ok(None);
        }
        match RoundGraph::new(model, pool, size, &self.sampler, self.forced, tells) {
            Ok(round) => self.rounds.push(round),
            Err(e) if self.choice == GraphChoice::On => return Err(e),
            Err(e) => {
                if self.refused_round == [None; 2] {
                    events.push(no_graph(width, &e));
                }
                self.refused_round[usize::from(tells)] = Some(tokens);
            }
        }
        Ok(self.rounds.iter_mut().find(|round| fits(round)))
    }
}

fn no_graph(sequences: usize, e: &Error) -> Event {
    // An error may bring a backtrace.
    Event::NoGraph { sequences, why: e.to_string().lines().next().unwrap_or_default().to_string() }
}
