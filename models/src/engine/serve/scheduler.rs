//! Whose turn it is.

use super::depth::Depths;
use super::drafting::DraftDepth;
use super::filling::Filling;
use super::graphs::Graphs;
use super::greedy::{Greedy, Logits};
use super::prefixes::Prefixes;
use super::recover::Width;
use super::request::{EngineOptions, EngineStats, Event, FinishReason, Request, RequestId};
use super::row::Row;
use crate::{CausalLm, Sequence, SequencePool, SequenceSnapshot};
use candle_core::{bail, Error, Result, Tensor};
use std::borrow::Borrow;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

/// Many requests on one model: each waits until there is room, then its prompt is fed, then it is completed token by
/// token. While there are prompts to be fed, those passes take the running completions along, a token each.
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
///             Event::Token { id, token } if id == first => println!("{token}"),
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
    greedy: Option<Greedy>,
    pub(super) options: EngineOptions,
    pub(super) prefixes: Prefixes<Arc<SequenceSnapshot>>,
    pub(super) waiting: VecDeque<(RequestId, Request)>,
    pub(super) filling: Vec<Filling>,
    pub(super) rows: Vec<Row>,
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
    next: u64,
}

impl<M: Borrow<CausalLm>> Engine<M> {
    /// Makes room for as many sequences, and as long ones, as the options say.
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
        let graphs = Graphs::new(options.cuda_graph, lm, &mut pool, &mut events)?;
        let greedy = match lm.device().is_cpu() {
            true => None,
            false => Some(Greedy::new(lm.config().vocab_size, lm.device())?),
        };
        Ok(Self {
            pool,
            graphs,
            greedy,
            prefixes: Prefixes::new(options.prefix_block, options.prefix_cache)?,
            options,
            model,
            waiting: VecDeque::new(),
            filling: Vec::new(),
            rows: Vec::new(),
            events,
            stats: EngineStats::default(),
            told_too_large: false,
            width: Width::default(),
            passing: Vec::new(),
            depths: Depths::default(),
            took: Vec::new(),
            next: 0,
        })
    }

    /// Takes a request in. It begins when there is room.
    ///
    /// # Errors
    /// When the prompt is empty, longer than a sequence can be here, or has an id outside the vocabulary; when what it
    /// resumes is not shorter than it; or when [`EngineOptions::max_waiting`] requests wait already.
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
            (false, _) => self.fill(),
            (true, false) => self.decode(),
            (true, true) => Ok(()),
        };
        match pass {
            Ok(()) => self.width.passed(&std::mem::take(&mut self.passing)),
            Err(e) => self.recover(&e)?,
        }
        self.retire()?;
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
    fn retire(&mut self) -> Result<()> {
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

    /// From `[rows, vocabulary]`, on the host; `greedy` where none of them needs more than the most likely token.
    pub(super) fn read(&self, logits: &Tensor, greedy: bool) -> Result<Vec<Logits>> {
        match &self.greedy {
            Some(best) if greedy => best.best(logits),
            _ => Ok(logits.to_vec2()?.into_iter().map(Logits::All).collect()),
        }
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
