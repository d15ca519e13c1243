//! Whose turn it is.

use super::depth::Depths;
use super::drafting::DraftDepth;
use super::filling::Filling;
use super::flight::Flight;
use super::graphs::Graphs;
use super::prefixes::Prefixes;
use super::recover::Width;
use super::request::{EngineOptions, EngineStats, Event, FinishReason, Request, RequestId};
use super::row::Row;
use super::sampler::Sampling;
use crate::engine::sampling::Sampler;
use crate::{CausalLm, Sequence, SequencePool, SequenceSnapshot};
use candle_core::{bail, Error, Result};
use std::borrow::Borrow;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Tokens of the prompt that is fed before the first request.
const WARM_UP: usize = 512;

/// Many requests on one model: each waits until there is room, then its prompt is fed, then it is completed token by
/// token. While there are prompts to be fed, those passes take the running completions along, a token each.
///
/// Tokens are drawn where the logits lie. Decode steps that are CUDA graphs begin before the tokens of the one before have come to the
/// host, where these only decide whether a completion ends: a token drawn after its end is dropped. A completion
/// with [`Request::snapshot_end`] keeps its step from that, and so do [`EngineOptions::draft`] and a draft head.
///
/// All memory is that of a [`SequencePool`], made with the engine: a request is admitted when a sequence of the pool is
/// free, and refused at once when it can never fit. One thread owns the engine, as a CUDA graph asks; `M` is the model,
/// or a reference or an [`Arc`] of it.
///
/// ```no_run
/// # fn demo(model: &candle_gdn_models::CausalLm) -> candle_core::Result<()> {
/// use candle_gdn_models::{Engine, EngineOptions, Event, Request};
/// let mut engine = Engine::new(model, EngineOptions::new(8, 4096))?;
/// let first = engine.submit(Request::new(vec![11, 22, 33], 100))?;
/// engine.submit(Request::new(vec![44], 100))?;
/// while !engine.is_idle() {
///     for event in engine.step()? {
///         match event {
///             Event::Token { id, token, .. } if id == first => println!("{token}"),
///             _ => {}
///         }
///     }
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Engine<M: Borrow<CausalLm>> {
    pub(super) model: M,
    pub(super) pool: SequencePool,
    pub(super) graphs: Graphs,
    pub(super) sampler: Sampler,
    pub(super) options: EngineOptions,
    pub(super) prefixes: Prefixes<Arc<SequenceSnapshot>>,
    pub(super) waiting: VecDeque<(RequestId, Request)>,
    pub(super) filling: Vec<Filling>,
    pub(super) rows: Vec<Row>,
    /// The step that the device is at, where it is ahead of the rows.
    pub(super) flight: Option<Flight>,
    /// For tests of what being ahead needs: it brings nothing where the host waits for each step.
    pub(in crate::engine) ahead_without_graph: bool,
    pub(super) events: Vec<Event>,
    pub(super) stats: EngineStats,
    pub(super) told_too_large: bool,
    pub(super) width: Width,
    /// The requests of the pass that runs.
    pub(super) passing: Vec<RequestId>,
    /// How far the draft head drafts.
    pub(super) depths: Depths,
    /// Steps that it does not know yet: sequences, depth, and what they took.
    pub(super) took: Vec<(usize, usize, Duration)>,
    /// How many tokens it is to draft for each row at the next step, where that was decided before.
    pub(super) planned: Option<(Vec<RequestId>, Vec<usize>)>,
    /// When the last step's tokens had come.
    pub(super) landed: Instant,
    next: u64,
}

impl<M: Borrow<CausalLm>> Engine<M> {
    /// Makes room for as many sequences, and as long ones, as the options say. On CUDA a prompt of nobody's is fed and decode
    /// steps are captured, so that the first request does not wait for kernels to be loaded.
    ///
    /// # Errors
    /// When the device is out of memory, an option is 0 that must not be, or [`GraphChoice::On`](super::GraphChoice)
    /// cannot be had.
    pub fn new(model: M, options: EngineOptions) -> Result<Self> {
        if options.prefill_chunk == 0 {
            bail!("Engine: prefill_chunk: expected at least 1, got 0")
        }
        let (lm, mut events) = (model.borrow(), Vec::new());
        let mut pool = lm.new_sequences(options.sequences, options.max_len)?;
        if options.draft_depth == DraftDepth::Fixed(0) {
            pool.forget_head();
        }
        let sampler = Sampler::new(lm.device())?;
        let graphs = Graphs::new(&options, sampler.clone(), lm, &mut pool, &mut events)?;
        warm_up(lm, &mut pool, &sampler, options.prefill_chunk)?;
        Ok(Self {
            pool,
            graphs,
            sampler,
            prefixes: Prefixes::new(options.prefix_block, options.prefix_cache, options.prefix_recent)?,
            depths: Depths::after(options.draft_after),
            options,
            model,
            waiting: VecDeque::new(),
            filling: Vec::new(),
            rows: Vec::new(),
            flight: None,
            ahead_without_graph: false,
            events,
            stats: EngineStats::default(),
            told_too_large: false,
            width: Width::default(),
            passing: Vec::new(),
            took: Vec::new(),
            planned: None,
            landed: Instant::now(),
            next: 0,
        })
    }

    /// As on CUDA with graphs, but for these: keys and values in tensors, rings, steps and rounds ahead of the host.
    #[cfg(test)]
    pub(in crate::engine) fn as_with_graphs(&mut self) -> Result<()> {
        let EngineOptions { sequences, max_len, draft_depth, .. } = self.options;
        self.pool = self.model.borrow().new_sequences_as(sequences, max_len, crate::Rings::Always, true)?;
        if draft_depth == DraftDepth::Fixed(0) {
            self.pool.forget_head();
        }
        (self.ahead_without_graph, self.graphs.rounds_without_graph) = (true, true);
        Ok(())
    }

    /// Takes a request in. It begins when there is room.
    ///
    /// # Errors
    /// When the prompt is empty, longer than a sequence can be here, or has an id outside the vocabulary; when what it
    /// resumes is not shorter than it; when it asks for more log-probabilities than there are; or when
    /// [`EngineOptions::max_waiting`] requests wait already.
    pub fn submit(&mut self, request: Request) -> Result<RequestId> {
        let (len, max_len, vocab) =
            (request.tokens.len(), self.pool.max_len(), self.model.borrow().config().vocab_size);
        if len == 0 {
            bail!("Engine: request: expected at least 1 token, got none")
        }
        if len > max_len {
            bail!("Engine: request: expected at most {max_len} tokens, for which there is room, got {len}")
        }
        if let Some(token) = request.tokens.iter().find(|&&token| token as usize >= vocab) {
            bail!("Engine: request: expected token ids below vocab_size ({vocab}), got {token}")
        }
        if let Some(resume) = request.resume.as_ref().filter(|resume| resume.len() >= len) {
            bail!("Engine: request: expected more than the {} tokens that it resumes, got {len}", resume.len())
        }
        if let Some(count) = request.logprobs.filter(|count| *count > Request::MOST_LOGPROBS) {
            bail!(
                "Engine: request: expected log-probabilities of at most {} tokens, got {count}",
                Request::MOST_LOGPROBS
            )
        }
        if self.waiting.len() >= self.options.max_waiting {
            bail!("Engine: request: expected at most {} that wait", self.options.max_waiting)
        }
        let id = RequestId(self.next);
        self.next += 1;
        self.waiting.push_back((id, request));
        Ok(id)
    }

    /// Ends a request wherever it is; the next step says so. False where it has ended already.
    ///
    /// # Errors
    /// When the pool refuses, which is a bug.
    pub fn cancel(&mut self, id: RequestId) -> Result<bool> {
        let sequence = if let Some(i) = self.waiting.iter().position(|(waiting, _)| *waiting == id) {
            self.waiting.remove(i);
            None
        } else if let Some(i) = self.filling.iter().position(|filling| filling.id == id) {
            Some(self.filling.remove(i).sequence)
        } else if let Some(i) = self.rows.iter().position(|row| row.id == id) {
            let row = self.rows.remove(i);
            // Without memory for its end there is none.
            let _ = self.give_end(&row);
            Some(row.sequence)
        } else {
            return Ok(false);
        };
        if let Some(sequence) = sequence {
            self.pool.end(sequence)?;
        }
        self.events.push(Event::Finished { id, reason: FinishReason::Cancelled });
        Ok(true)
    }

    /// One pass of the model: prompts if there are any to be fed, else a decode step. Returns what it brought, in order.
    ///
    /// A pass that fails, when a device refuses or is out of memory, is no error: the requests in it are fed anew, and
    /// the next passes take fewer of them. A request that fails alone twice ends with [`FinishReason::Failed`]; all others
    /// go on, with the tokens that they would have had.
    ///
    /// # Errors
    /// When the pool refuses, which is a bug.
    pub fn step(&mut self) -> Result<Vec<Event>> {
        self.admit()?;
        let pass = match (self.filling.is_empty(), self.rows.is_empty()) {
            (false, _) => self.land().and_then(|()| self.fill()),
            (true, false) => self.decode(),
            (true, true) => {
                self.flight = None;
                Ok(())
            }
        };
        // Before anything is fed anew: those that have ended need no more.
        self.retire()?;
        match pass {
            Ok(()) => self.width.passed(&std::mem::take(&mut self.passing)),
            Err(e) => {
                self.recover(&e)?;
                self.retire()?;
            }
        }
        Ok(std::mem::take(&mut self.events))
    }

    /// Whether there is nothing to do and nothing to tell.
    pub fn is_idle(&self) -> bool {
        self.waiting.is_empty() && self.filling.is_empty() && self.rows.is_empty() && self.events.is_empty()
    }

    /// Requests whose prompts have not been fed to the end.
    pub fn unfed(&self) -> usize {
        self.waiting.len() + self.filling.len()
    }

    /// Requests that wait for room.
    pub fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// What was done so far.
    pub fn stats(&self) -> EngineStats {
        EngineStats { prefixes: self.prefixes.tally(), ..self.stats }
    }

    /// Completions that have ended make room.
    pub(super) fn retire(&mut self) -> Result<()> {
        for row in std::mem::take(&mut self.rows) {
            let Some(mut reason) = row.finished.clone() else {
                self.rows.push(row);
                continue;
            };
            if !matches!(reason, FinishReason::Failed(_)) {
                if let Err(e) = self.give_end(&row) {
                    reason = FinishReason::Failed(e.to_string());
                }
            }
            self.pool.end(row.sequence)?;
            self.events.push(Event::Finished { id: row.id, reason });
        }
        Ok(())
    }

    /// A request that has no sequence ends.
    pub(super) fn failed(&mut self, id: RequestId, error: &Error) {
        self.events.push(Event::Finished { id, reason: FinishReason::Failed(error.to_string()) });
    }

    /// The snapshot at the end of a completion, where it was asked for.
    fn give_end(&mut self, row: &Row) -> Result<()> {
        if row.request.snapshot_end {
            let snapshot = Arc::new(self.pool.snapshot(row.sequence)?);
            self.events.push(Event::Snapshot { id: row.id, snapshot });
        }
        Ok(())
    }

    /// A new sequence, behind the tokens of `snapshot` if there is one.
    pub(super) fn begin(&mut self, snapshot: Option<&SequenceSnapshot>) -> Result<Sequence> {
        let sequence = self.pool.begin()?;
        if let Some(snapshot) = snapshot {
            if let Err(e) = self.pool.restore(sequence, snapshot) {
                self.pool.end(sequence)?;
                return Err(e);
            }
        }
        Ok(sequence)
    }
}

/// A prompt that nobody reads, and a draft behind it, in a sequence of its own: on CUDA kernels and libraries are loaded with their first use.
fn warm_up(model: &CausalLm, pool: &mut SequencePool, sampler: &Sampler, prefill_chunk: usize) -> Result<()> {
    if model.device().is_cpu() {
        return Ok(());
    }
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
