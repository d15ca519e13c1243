//! The graphs of decode steps, by their sizes.

use super::event::{first_line, Event};
use super::options::{DraftDepth, EngineOptions, GraphChoice};
use crate::sampling::Sampler;
use crate::sequences::step_graph::SharedGraph;
use crate::sequences::SequencePool;
use crate::CausalLm;
use candle_core::Result;
use std::fmt::Debug;

/// Makes graphs.
pub(crate) trait Capture: Debug {
    /// # Errors
    /// When a step of this size cannot be captured.
    fn capture(
        &self,
        model: &CausalLm,
        pool: &mut SequencePool,
        sampler: &Sampler,
        size: StepSize,
    ) -> Result<SharedGraph>;
}

/// The size of a decode step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct StepSize {
    /// The most sequences.
    pub sequences: usize,
    /// Drafts of each sequence by the draft head; 0 for a plain step.
    pub depth: usize,
    /// Whether rows may request log-probabilities.
    pub logprobs: bool,
}

/// CUDA graphs.
#[derive(Debug)]
pub(super) struct CudaGraphs {
    /// The chance that a draft is accepted, whatever was drawn.
    pub forced_acceptance: Option<f32>,
}

impl Capture for CudaGraphs {
    fn capture(
        &self,
        model: &CausalLm,
        pool: &mut SequencePool,
        sampler: &Sampler,
        size: StepSize,
    ) -> Result<SharedGraph> {
        crate::sequences::decode_graph::check(model, pool, size.sequences)?;
        let _ = (self.forced_acceptance, sampler);
        #[cfg(not(feature = "cuda"))]
        candle_core::bail!("DecodeGraph: expected a build with the feature `cuda`");
        #[cfg(feature = "cuda")]
        {
            use crate::drafting::speculative_graph::SpeculativeGraph;
            use crate::sequences::captured_step::CapturedStep;
            use std::{cell::RefCell, rc::Rc};
            let StepSize { sequences, depth, logprobs } = size;
            if depth == 0 {
                let graph = CapturedStep::new(model, pool, sequences, Some((sampler, logprobs)))?;
                return Ok(Rc::new(RefCell::new(graph)));
            }
            let size = (sequences, depth);
            let graph = SpeculativeGraph::new(model, pool, size, sampler, self.forced_acceptance, logprobs)?;
            Ok(Rc::new(RefCell::new(graph)))
        }
    }
}

/// A graph costs as much as its full number of sequences: as sequences end, narrower graphs replace it.
#[derive(Debug)]
pub(super) struct Graphs {
    choice: GraphChoice,
    source: Box<dyn Capture>,
    /// The most sequences.
    most: usize,
    captured: Vec<(StepSize, SharedGraph)>,
    /// No graph of this many tokens can be captured: of plain and of speculative steps, without and with log-probabilities.
    refused: [[Option<usize>; 2]; 2],
}

impl Graphs {
    /// Captures graphs for all sequences of a pool, and speculative ones of the depth that will be used, before anything is fed:
    /// [`GraphChoice::On`] fails here if it must, and no request waits for a capture.
    pub fn new(
        options: &EngineOptions,
        source: Box<dyn Capture>,
        sampler: &Sampler,
        model: &CausalLm,
        pool: &mut SequencePool,
        events: &mut Vec<Event>,
    ) -> Result<Self> {
        // On the CPU the lack of a graph is no news.
        let choice = match options.cuda_graph {
            GraphChoice::Auto if model.device().is_cpu() => GraphChoice::Off,
            choice => choice,
        };
        let most = pool.capacity();
        let mut graphs = Self { choice, source, most, captured: Vec::new(), refused: [[None; 2]; 2] };
        let depth = match options.draft_depth {
            DraftDepth::Fixed(depth) => depth.min(DraftDepth::MOST),
            // Others when they are tried.
            DraftDepth::Auto => 1,
        };
        let narrower = (0..usize::BITS).rev().map(|bit| 1 << bit).filter(|width| *width < most);
        for sequences in [most].into_iter().chain(narrower) {
            for depth in [0, depth] {
                if depth == 0 || pool.has_head() {
                    let size = StepSize { sequences, depth, logprobs: false };
                    graphs.find_or_capture(size, sampler, model, pool, events)?;
                }
            }
        }
        // An error from here on would fail the pass of requests, again and again.
        if graphs.choice == GraphChoice::On {
            graphs.choice = GraphChoice::Auto;
        }
        Ok(graphs)
    }

    /// The graph for a step of this size, if there can be one. Graphs with log-probabilities are captured when a request needs them, so
    /// that others do not pay for them.
    pub fn find_or_capture(
        &mut self,
        size: StepSize,
        sampler: &Sampler,
        model: &CausalLm,
        pool: &mut SequencePool,
        events: &mut Vec<Event>,
    ) -> Result<Option<SharedGraph>> {
        let size = StepSize { sequences: size.sequences.next_power_of_two().min(self.most), ..size };
        // One that the pool has outgrown would be captured again as it is launched, while the old one takes memory, and an error there
        // fails the pass.
        self.captured.retain(|(_, graph)| graph.borrow().is_valid(model, pool));
        if let Some((_, graph)) = self.captured.iter().find(|(captured, _)| *captured == size) {
            return Ok(Some(graph.clone()));
        }
        let tokens = size.sequences * (size.depth + 1);
        let refused = &mut self.refused[usize::from(size.depth > 0)];
        let limit = refused[usize::from(size.logprobs)];
        if self.choice == GraphChoice::Off || limit.is_some_and(|limit| tokens >= limit) {
            return Ok(None);
        }
        // The ranks must go on alike: all with the graph, or all without.
        match model.agree(self.source.capture(model, pool, sampler, size)) {
            Err(e) if model.has_lost_a_rank() => Err(e),
            Ok(graph) => {
                self.captured.push((size, graph.clone()));
                Ok(Some(graph))
            }
            Err(e) if self.choice == GraphChoice::On => Err(e),
            Err(e) => {
                if *refused == [None; 2] {
                    let why = first_line(&e);
                    events.push(Event::NoGraph { sequences: size.sequences, why });
                }
                refused[usize::from(size.logprobs)] = Some(tokens);
                Ok(None)
            }
        }
    }
}
