//! Decode steps: one token of every row, or more where drafts are accepted.
//!
//! A step that is a graph can be in flight: launched, with tokens that the host has not read. The next step is launched before
//! they are.

use super::batch::{Batch, Row};
use super::core::Context;
use super::drafter::{Drafter, Tried};
use super::event::Event;
use super::graphs::{Capture, Graphs, StepSize};
use super::options::EngineOptions;
use super::recovery::Recovery;
use super::request::RequestId;
use crate::sampling::{Sampler, Sampling, Token};
use crate::sequences::step_graph::{Pending, SharedGraph, Step};
use crate::sequences::{Sequence, SequencePool};
use crate::CausalLm;
use candle_core::Result;
use std::time::Instant;

/// Tokens of the prompt that is fed before the first request.
const WARM_UP: usize = 512;

#[derive(Debug)]
pub(super) struct Stepper {
    graphs: Graphs,
    pub sampler: Sampler,
    in_flight: Option<InFlight>,
    /// When the tokens of the last step were read.
    finished: Instant,
}

/// A step that was launched. Tokens of requests that have ended since are dropped.
#[derive(Debug)]
struct InFlight {
    /// The requests of the step's rows. The rows that remain are in this order.
    requests: Vec<RequestId>,
    sequences: Vec<Sequence>,
    /// Drafts of each by the draft head.
    depth: usize,
    drawing: Drawing,
    launched: Instant,
}

#[derive(Debug)]
enum Drawing {
    /// A step without a graph, which the host has waited for.
    Done(Vec<Token>),
    Graph(SharedGraph, Box<dyn Pending>),
}

/// How the next step runs.
enum Plan {
    /// The host makes or sees the drafts.
    OnHost,
    Launch(Option<SharedGraph>, usize),
}

impl Stepper {
    /// Captures graphs and runs every kernel once: on CUDA kernels and libraries are loaded with their first use.
    pub fn new(
        options: &EngineOptions,
        source: Box<dyn Capture>,
        model: &CausalLm,
        pool: &mut SequencePool,
        events: &mut Vec<Event>,
    ) -> Result<Self> {
        let sampler = Sampler::new(model.device())?;
        let graphs = Graphs::new(options, source, &sampler, model, pool, events)?;
        if model.device().is_cuda() {
            warm_up(model, pool, &sampler, options.prefill_chunk)?;
        }
        Ok(Self { graphs, sampler, in_flight: None, finished: Instant::now() })
    }

    /// Drops the step in flight. Its tokens are drawn again later, by the same random numbers.
    pub fn discard(&mut self) {
        self.in_flight = None;
    }

    /// One step of all completions; after a failed pass of some, those that waited before first.
    pub fn decode(
        &mut self,
        batch: &mut Batch,
        drafter: &mut Drafter,
        recovery: &mut Recovery,
        cx: &mut Context,
    ) -> Result<()> {
        let waiting = batch.rows.split_off(recovery.limit.min(batch.rows.len()));
        drafter.set_paused(!recovery.drafts);
        recovery.begin_step(batch.ids().collect(), drafter.may_draft(cx.pool));
        let done = self.decode_batch(batch, drafter, waiting.is_empty(), cx);
        batch.rows.splice(0..0, waiting);
        done
    }

    fn decode_batch(
        &mut self,
        batch: &mut Batch,
        drafter: &mut Drafter,
        may_run_ahead: bool,
        cx: &mut Context,
    ) -> Result<()> {
        let start = Instant::now();
        if self.in_flight.is_none() {
            let depths = drafter.plan(&batch.rows, cx.pool);
            match self.plan(&depths, batch, drafter, cx)? {
                Plan::Launch(graph, depth) => self.in_flight = Some(self.launch(graph, depth, batch, cx)?),
                Plan::OnHost => return self.decode_on_host(&depths, batch, drafter, start, cx),
            }
        }
        let accepted = self.finish_step(batch, drafter, may_run_ahead, cx)?;
        cx.stats.decode.add(accepted, start.elapsed());
        Ok(())
    }

    /// How a step with these depths of drafts runs.
    fn plan(&mut self, depths: &[usize], batch: &Batch, drafter: &Drafter, cx: &mut Context) -> Result<Plan> {
        if drafter.looks_up() {
            return Ok(Plan::OnHost);
        }
        let depth = depths.iter().copied().max().unwrap_or(0);
        if depth == 0 || !cx.pool.can_draft(batch.sequences()) {
            return Ok(Plan::Launch(self.graph(0, batch, cx)?, 0));
        }
        // A speculative graph runs past the end of a completion, of which a snapshot may be requested.
        if !batch.has_room(depth + 1, cx.pool.max_len()) || batch.rows.iter().any(|row| row.request.snapshot_end) {
            return Ok(Plan::OnHost);
        }
        Ok(match self.graph(depth, batch, cx)? {
            Some(graph) => Plan::Launch(Some(graph), depth),
            None => Plan::OnHost,
        })
    }

    fn graph(&mut self, depth: usize, batch: &Batch, cx: &mut Context) -> Result<Option<SharedGraph>> {
        let size = StepSize { sequences: batch.rows.len(), depth, logprobs: batch.logprobs() };
        self.graphs.find_or_capture(size, &self.sampler, cx.model, cx.pool, cx.events)
    }

    fn launch(&self, graph: Option<SharedGraph>, depth: usize, batch: &Batch, cx: &mut Context) -> Result<InFlight> {
        let (requests, sequences): (Vec<_>, Vec<_>) = (batch.ids().collect(), batch.sequences().collect());
        let choices: Vec<_> = batch.rows.iter().map(|row| row.choice(&[])).collect();
        let launched = Instant::now();
        let drawing = match graph {
            Some(graph) => {
                let pending = graph.borrow_mut().launch(cx.model, cx.pool, &sequences, Some(&choices))?;
                Drawing::Graph(graph, pending)
            }
            None => {
                let last: Vec<u32> = batch.rows.iter().map(Row::last).collect();
                let fed: Vec<_> = sequences.iter().copied().zip(last.chunks(1)).collect();
                Drawing::Done(self.sampler.draw(&cx.model.feed(cx.pool, &fed)?, &choices)?)
            }
        };
        Ok(InFlight { requests, sequences, depth, drawing, launched })
    }

    /// Reads the tokens of the step in flight, after launching the next one where it may run ahead. Returns how many tokens were
    /// accepted.
    fn finish_step(
        &mut self,
        batch: &mut Batch,
        drafter: &mut Drafter,
        may_run_ahead: bool,
        cx: &mut Context,
    ) -> Result<usize> {
        let Some(in_flight) = self.in_flight.take() else { return Ok(0) };
        let ahead = match &in_flight.drawing {
            Drawing::Graph(graph, _) if may_run_ahead && in_flight.runs_ahead(graph, batch, drafter, cx) => {
                in_flight.launch_ahead(graph, cx).map(Some)
            }
            _ => Ok(None),
        };
        // Tokens that were drawn are not lost when the launch of the next step fails.
        let accepted = in_flight.accept(!matches!(ahead, Ok(Some(_))), batch, drafter, cx)?;
        self.in_flight = ahead?;
        // Since when the device could begin with the step.
        let since = in_flight.launched.max(self.finished);
        self.finished = Instant::now();
        drafter.measured(in_flight.requests.len(), in_flight.depth, self.finished - since, cx)?;
        Ok(accepted)
    }

    /// Reads the tokens of the step in flight where another kind of pass follows.
    pub fn collect(
        &mut self,
        batch: &mut Batch,
        drafter: &mut Drafter,
        recovery: &mut Recovery,
        cx: &mut Context,
    ) -> Result<()> {
        let (start, Some(in_flight)) = (Instant::now(), self.in_flight.take()) else { return Ok(()) };
        recovery.begin_step(batch.ids().collect(), in_flight.depth > 0);
        let accepted = in_flight.accept(true, batch, drafter, cx)?;
        cx.stats.decode.add(accepted, start.elapsed());
        batch.retire(cx)
    }

    /// Drafts that the host sees, and the pass that verifies them.
    fn decode_on_host(
        &mut self,
        depths: &[usize],
        batch: &mut Batch,
        drafter: &mut Drafter,
        start: Instant,
        cx: &mut Context,
    ) -> Result<()> {
        let (drafts, tried) = drafter.draft(depths, &batch.rows, cx)?;
        if drafts.iter().all(Vec::is_empty) {
            let graph = self.graph(0, batch, cx)?;
            self.in_flight = Some(self.launch(graph, 0, batch, cx)?);
            let accepted = self.finish_step(batch, drafter, false, cx)?;
            cx.stats.decode.add(accepted, start.elapsed());
            return Ok(());
        }
        let accepted = self.verify(&drafts, batch, cx)?;
        let time = start.elapsed();
        cx.stats.decode.add(accepted.iter().sum(), time);
        self.finished = Instant::now();
        drafter.count(&mut batch.rows, &tried, &accepted, cx.stats);
        if !tried.iter().any(|tried| tried.by_lookup) {
            let depth = tried.iter().map(|tried| tried.count).max().unwrap_or(0);
            drafter.measured(accepted.len(), depth, time, cx)?;
        }
        Ok(())
    }

    /// How many tokens each row accepted: its drafts as long as they equal the tokens drawn, and the token after them.
    fn verify(&self, drafts: &[Vec<u32>], batch: &mut Batch, cx: &mut Context) -> Result<Vec<usize>> {
        let rows = batch.rows.iter().zip(drafts);
        let tokens: Vec<Vec<u32>> = rows.map(|(row, draft)| [&[row.last()], &draft[..]].concat()).collect();
        let rows = batch.rows.iter().zip(&tokens);
        let fed: Vec<(Sequence, &[u32])> = rows.map(|(row, tokens)| (row.sequence, tokens.as_slice())).collect();
        let (logits, verified) = cx.model.verify(cx.pool, &fed)?;
        let rows = batch.rows.iter().zip(drafts);
        let choices: Vec<_> =
            rows.flat_map(|(row, draft)| (0..=draft.len()).map(|n| row.choice(&draft[..n]))).collect();
        let drawn = self.sampler.draw(&logits, &choices)?;
        let (mut drawn, mut accepted) = (drawn.as_slice(), Vec::with_capacity(drafts.len()));
        for (row, draft) in batch.rows.iter_mut().zip(drafts) {
            let (own, others) = drawn.split_at(draft.len() + 1);
            accepted.push(row.accept(own, draft, cx.events));
            drawn = others;
        }
        // As many as were fed: the last token drawn replaces the token that the row began with, and is fed next.
        cx.model.accept(cx.pool, verified, &accepted)?;
        Ok(accepted)
    }
}

impl InFlight {
    /// Whether the next step is known but for its tokens: it has the same rows and as many drafts, no row can end except by the token
    /// that it drew, and no drafts are looked up in these tokens.
    fn runs_ahead(&self, graph: &SharedGraph, batch: &Batch, drafter: &mut Drafter, cx: &mut Context) -> bool {
        let same = batch.ids().eq(self.requests.iter().copied());
        if !same || drafter.looks_up() || !batch.rows.iter().all(Row::can_run_ahead) {
            return false;
        }
        let depths = drafter.plan(&batch.rows, cx.pool);
        let depth = depths.iter().copied().max().unwrap_or(0);
        // Room for the tokens of this step and the next one.
        let has_room = depth == 0 || batch.has_room(2 * (depth + 1), cx.pool.max_len());
        let ready = || graph.borrow().is_ready(cx.model, cx.pool, &self.sequences);
        let runs = depth == self.depth && has_room && ready();
        if !runs {
            drafter.keep_plan(self.requests.clone(), depths);
        }
        runs
    }

    /// The next step of the same rows.
    fn launch_ahead(&self, graph: &SharedGraph, cx: &mut Context) -> Result<Self> {
        let launched = Instant::now();
        let pending = graph.borrow_mut().launch(cx.model, cx.pool, &self.sequences, None)?;
        let (requests, sequences) = (self.requests.clone(), self.sequences.clone());
        Ok(Self { requests, sequences, depth: self.depth, drawing: Drawing::Graph(graph.clone(), pending), launched })
    }

    /// Waits for the tokens and gives them to their rows; `is_last` is whether no step was launched after this one. Returns how many
    /// tokens were accepted.
    fn accept(&self, is_last: bool, batch: &mut Batch, drafter: &mut Drafter, cx: &mut Context) -> Result<usize> {
        let drawn: Vec<Vec<Token>> = match &self.drawing {
            Drawing::Done(drawn) => drawn.iter().map(|token| vec![token.clone()]).collect(),
            Drawing::Graph(graph, pending) => {
                let drawn = pending.read()?;
                let mut rows = batch.rows.iter().peekable();
                let fed = |id: &RequestId| rows.next_if(|row| row.id == *id).map(Row::last);
                let fed: Vec<_> = self.requests.iter().map(fed).collect();
                let step = Step { sequences: &self.sequences, fed: &fed, drawn: &drawn, is_last };
                graph.borrow().end(cx.model, cx.pool, &step)?;
                drawn
            }
        };
        let mut rows = batch.rows.iter_mut().peekable();
        let mut accepted = Vec::with_capacity(drawn.len());
        for (id, drawn) in self.requests.iter().zip(&drawn) {
            if let Some(row) = rows.next_if(|row| row.id == *id) {
                // All but the last one were drafts.
                let drafts: Vec<u32> = drawn[..drawn.len() - 1].iter().flatten().map(|drawn| drawn.id).collect();
                accepted.push(row.accept(drawn, &drafts, cx.events));
            }
        }
        let tried = vec![Tried { count: self.depth, by_lookup: false }; accepted.len()];
        drafter.count(&mut batch.rows, &tried, &accepted, cx.stats);
        Ok(accepted.iter().sum())
    }
}

/// A prompt, and a draft after it, in a sequence of its own.
fn warm_up(model: &CausalLm, pool: &mut SequencePool, sampler: &Sampler, prefill_chunk: usize) -> Result<()> {
    let sequence = pool.begin()?;
    let prompt = vec![0; WARM_UP.min(prefill_chunk).min(pool.max_len().saturating_sub(2).max(1))];
    let random =
        Sampling { temperature: 1., top_p: 0.5, ..Sampling::default() }.choice(0, 0, prompt.len(), &prompt, &[]);
    let drawn = model.feed(pool, &[(sequence, &prompt)]).and_then(|logits| {
        sampler.draw(&logits, &[random])?;
        if pool.has_head() && prompt.len() + 2 <= pool.max_len() {
            let (tokens, _) = model.draft(pool, &[(sequence, 0, 1)])?;
            let (_, drafts) = model.verify(pool, &[(sequence, &[0, tokens[0][0]])])?;
            model.accept(pool, drafts, &[1])?;
        }
        Ok(())
    });
    pool.end(sequence)?;
    drawn
}
