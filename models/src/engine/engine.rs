//! The engine: its parts, and the order in which a step uses them.

use super::batch::Batch;
use super::core::Core;
use super::drafter::Drafter;
use super::event::{Event, FinishReason};
use super::graphs::{Capture, CudaGraphs};
use super::options::{DraftDepth, EngineOptions};
use super::prompts::Prompts;
use super::queue::Queue;
use super::recovery::Recovery;
use super::request::{Request, RequestId};
use super::stats::EngineStats;
use super::stepper::Stepper;
use crate::CausalLm;
use candle_core::{bail, Error, Result};
use std::borrow::Borrow;

/// Many requests on one model. Each waits until there is room, then its prompt is fed, then it is completed token by
/// token. While prompts are fed, the same passes advance the running completions by a token each.
///
/// Tokens are drawn where the logits lie. A decode step that is a CUDA graph is launched before the host reads the tokens of the step
/// before, which only decide whether a completion ends; a token drawn after its end is dropped. Steps do not run ahead with
/// [`EngineOptions::draft`], nor while a completion with [`Request::snapshot_end`] runs.
///
/// All memory is that of a [`SequencePool`](crate::SequencePool), made with the engine: a request is admitted when a sequence of the
/// pool is free, and refused at once when it can never fit. One thread owns the engine, as CUDA graphs require; `M` is the
/// model, or a reference or an [`Arc`](std::sync::Arc) of it.
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
    core: Core<M>,
    queue: Queue,
    prompts: Prompts,
    batch: Batch,
    stepper: Stepper,
    drafter: Drafter,
    pub(super) recovery: Recovery,
}

impl<M: Borrow<CausalLm>> Engine<M> {
    /// Makes room for as many sequences, and as long ones, as the options say. On CUDA a prompt is fed and decode steps are
    /// captured, so that the first request does not wait for kernels to be loaded.
    ///
    /// # Errors
    /// When the device is out of memory, an option is outside its range, or [`GraphChoice::On`](super::GraphChoice)
    /// cannot be satisfied.
    pub fn new(model: M, options: EngineOptions) -> Result<Self> {
        Self::with_capture(model, options, Box::new(CudaGraphs { forced_acceptance: None }))
    }

    /// For benchmarks of models with random weights: in CUDA graphs a token of the draft head is accepted with the chance `accepted`,
    /// whatever the model drew.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn with_forced_acceptance(model: M, options: EngineOptions, accepted: f32) -> Result<Self> {
        Self::with_capture(model, options, Box::new(CudaGraphs { forced_acceptance: Some(accepted) }))
    }

    pub(super) fn with_capture(model: M, options: EngineOptions, source: Box<dyn Capture>) -> Result<Self> {
        if options.prefill_chunk == 0 {
            bail!("Engine: prefill_chunk: expected at least 1, got 0")
        }
        let block = options.prefix_block;
        if block == 0 || !block.is_multiple_of(64) {
            bail!("Engine: prefix_block: expected a positive multiple of 64, got {block}")
        }
        let (lm, mut events) = (model.borrow(), Vec::new());
        let mut pool = lm.new_sequences(options.sequences, options.max_len)?;
        if options.draft_depth == DraftDepth::Fixed(0) {
            pool.drop_head();
        }
        let drafter = Drafter::new(&options, &pool);
        let stepper = Stepper::new(&options, source, lm, &mut pool, &mut events)?;
        Ok(Self {
            queue: Queue::new(options.max_waiting),
            prompts: Prompts::new(&options)?,
            batch: Batch::default(),
            stepper,
            drafter,
            recovery: Recovery::new(options.prefill_chunk),
            core: Core { model, pool, events, stats: EngineStats::default() },
        })
    }

    /// Accepts a request. It begins when there is room.
    ///
    /// # Errors
    /// When the prompt is empty, longer than a sequence can be here, or has an id outside the vocabulary; when what it
    /// resumes is not shorter than it, or is of other tokens; when it requests more log-probabilities than there are; as
    /// [`Sampling::check`](crate::Sampling::check); or when all sequences are in use and [`EngineOptions::max_waiting`] requests wait already.
    pub fn submit(&mut self, request: Request) -> Result<RequestId> {
        let id = self.queue.submit(request, self.core.model.borrow(), &self.core.pool)?;
        if let Some(request) = self.queue.get(self.queue.len() - 1).filter(|request| request.resume.is_none()) {
            self.prompts.expect(&request.tokens);
        }
        Ok(id)
    }

    /// Ends a request wherever it is; the next step reports it. False where it has ended already.
    ///
    /// # Errors
    /// When the pool refuses, which is a bug.
    pub fn cancel(&mut self, id: RequestId) -> Result<bool> {
        let cx = &mut self.core.context();
        if !self.queue.remove(id) {
            match self.prompts.remove(id).or_else(|| self.batch.remove(id, cx)) {
                Some(sequence) => cx.pool.end(sequence)?,
                None => return Ok(false),
            }
        }
        cx.events.push(Event::Finished { id, reason: FinishReason::Cancelled });
        Ok(true)
    }

    /// One pass of the model: prompts if there are any to be fed, else a decode step. Returns its results in order.
    ///
    /// A pass that fails, when a device refuses or is out of memory, is no error for a model on one device: its requests are fed again,
    /// and the next passes have no drafts, fewer of them and shorter pieces of prompts. A request ends with [`FinishReason::Failed`] if it fails alone
    /// twice with a single token, or at once if it cannot begin again, its logits are not finite, or its
    /// [`snapshot_at`](super::Request::snapshot_at) cannot be made. All others go on, with the same tokens as without the failure.
    ///
    /// # Errors
    /// Where the model has several ranks, when a pass of this one fails, or another one is gone: then all end, since no pass can succeed
    /// any more. When the pool refuses, which is a bug.
    pub fn step(&mut self) -> Result<Vec<Event>> {
        let Self { core, queue, prompts, batch, stepper, drafter, recovery } = self;
        let cx = &mut core.context();
        prompts.admit(queue, cx)?;
        let pass = if !prompts.is_empty() {
            let collected = stepper.collect(batch, drafter, recovery, cx);
            collected.and_then(|()| prompts.prefill(batch, &stepper.sampler, drafter, recovery, cx))
        } else if !batch.is_empty() {
            stepper.decode(batch, drafter, recovery, cx)
        } else {
            stepper.discard();
            Ok(())
        };
        let pass = match pass {
            Err(error) if cx.model.has_lost_a_rank() => return Err(error),
            Err(error) if cx.model.leave() => {
                return Err(Error::Msg(format!("Engine: a pass of this rank failed, and all ranks end: {error}")));
            }
            pass => pass,
        };
        // First, so that requests that have ended are not fed again.
        batch.retire(cx)?;
        match pass {
            Ok(()) => recovery.passed(cx.events),
            Err(error) => {
                stepper.discard();
                let lost = recovery.failed();
                let broken = batch.recover(lost, &error, cx);
                prompts.recover(lost, &error, broken, cx)?;
                batch.retire(cx)?;
            }
        }
        Ok(std::mem::take(cx.events))
    }

    /// Whether there is nothing to do and nothing to report.
    pub fn is_idle(&self) -> bool {
        self.queue.is_empty() && self.prompts.is_empty() && self.batch.is_empty() && self.core.events.is_empty()
    }

    /// Requests whose prompts have not been fed completely.
    pub fn unfed(&self) -> usize {
        self.queue.len() + self.prompts.len()
    }

    /// Requests that wait for room.
    pub fn waiting(&self) -> usize {
        self.queue.len()
    }

    /// The model.
    pub fn model(&self) -> &CausalLm {
        self.core.model.borrow()
    }

    /// What was done so far.
    pub fn stats(&self) -> EngineStats {
        EngineStats { prefixes: self.prompts.tally(), ..self.core.stats }
    }
}
