//! The engine on a thread of its own, or on one for each rank: all ranks repeat what the first one does.

use crate::asked::{Ends, Kind};
use crate::blocks::{tell, Blocks, Router};
use crate::figures::{Figures, Shared};
use crate::fingerprint::{Fingerprint, ModelFingerprint};
use crate::transfer::State;
use crate::Args;
use anyhow::{anyhow, Context, Result};
use candle_gdn_cli::{draft_after, load_model, ranks, Checkpoint, Need, Rank, Room};
use candle_gdn_models::{
    CausalLm, DraftHeadChoice, Engine, EngineHandle, EngineMessages, EngineOptions, Event, FinishReason, Followers,
    Logprobs, ModelConfig, Observer, Progress, Request, Submission,
};
use dynamo_backend_common::DisaggregationMode;
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use tokio::sync::{mpsc, oneshot};

/// The results of a step for a request. The one with a reason is the last.
#[derive(Debug)]
pub struct Output {
    pub tokens: Vec<u32>,
    /// One of each token, where [`Request::logprobs`] requests them.
    pub logprobs: Vec<Logprobs>,
    /// The state of the sequence, where [`Request::snapshot_end`] requests it.
    pub state: Option<State>,
    pub finished: Option<FinishReason>,
}

/// Why a request was refused.
#[derive(Debug)]
pub enum Refusal {
    /// As many requests run and wait as may.
    Full,
    /// It can never run.
    Invalid(String),
}

/// What a client may see of an error: a backtrace is not for it.
pub fn first_line(error: &candle_core::Error) -> String {
    error.to_string().lines().next().unwrap_or_default().to_string()
}

/// The results of a request that was accepted. Dropping it ends the request.
pub type Running = mpsc::UnboundedReceiver<Output>;

/// The engine's thread.
pub struct Driver {
    engine: EngineHandle,
    thread: JoinHandle<()>,
    shared: Arc<Shared>,
    /// Requests that run and wait, and the most that may.
    requests: Arc<AtomicUsize>,
    room: usize,
    /// The most tokens of a sequence.
    pub max_len: usize,
    /// The most prompt tokens of a pass.
    pub prefill_chunk: usize,
    fingerprint: ModelFingerprint,
}

/// What an engine that has started has room for, and whose states it has.
struct Ready {
    max_len: usize,
    prefill_chunk: usize,
    fingerprint: ModelFingerprint,
}

impl Driver {
    /// Loads the model and makes room for the requests.
    ///
    /// # Errors
    /// When the files are not a model, or there is no room.
    pub async fn start(args: Arc<Args>, shared: Arc<Shared>, router: Router) -> Result<Self> {
        let ((engine, messages), (started, start)) = (EngineHandle::new(), oneshot::channel());
        let room = args.serve.batch.saturating_add(args.serve.max_waiting);
        let figures = shared.clone();
        let run = move || {
            let started = Mutex::new(Some(started));
            let take = || started.lock().unwrap_or_else(PoisonError::into_inner).take();
            // Who started it may have gone: then the messages end too.
            let ready = |ready| take().map_or((), |started| drop(started.send(Ok(ready))));
            let work = AssertUnwindSafe(|| run(&args, messages, &figures, &router, &ready));
            let Err(e) = catch_unwind(work).unwrap_or_else(|_| Err(anyhow!("it panicked"))) else { return };
            match take() {
                Some(started) => drop(started.send(Err(e))),
                None => {
                    // A worker without an engine would be sent requests on and on. Those under way go elsewhere.
                    tracing::error!("the engine has ended, and so does the worker: {e:#}");
                    std::process::exit(1)
                }
            }
        };
        let thread = std::thread::Builder::new().name("engine".into()).spawn(run)?;
        let Ready { max_len, prefill_chunk, fingerprint } = start.await.context("the engine's thread has ended")??;
        Ok(Self { engine, thread, shared, requests: Arc::default(), room, max_len, prefill_chunk, fingerprint })
    }

    /// Sends a request, with the state after its first tokens if there is one, and waits until it is accepted or refused: at
    /// most a step of the model for each 64 messages before it. None where the engine has ended. It ends where the engine or
    /// `ends` says so.
    pub async fn submit(&self, request: Request, ends: Ends, state: Option<State>) -> Option<Result<Running, Refusal>> {
        let ((sender, outputs), (answer, answered)) = (mpsc::unbounded_channel(), oneshot::channel());
        let (requests, room, is_full) = (self.requests.clone(), self.room, Arc::new(AtomicBool::new(false)));
        let full = is_full.clone();
        let (accepted, ended) = (self.requests.clone(), self.requests.clone());
        let refused = self.shared.clone();
        let mut answer_to = Answer { sender, ends, shared: self.shared.clone(), sent: 0, is_whole: false };
        let (own, model) = (self.fingerprint.after(&request.tokens), self.fingerprint.clone());
        // These run on the engine's thread, one after the other.
        self.engine
            .send(Submission {
                request: Box::new(move |loaded| {
                    if requests.load(Ordering::SeqCst) >= room {
                        full.store(true, Ordering::SeqCst);
                        candle_core::bail!("the engine is full")
                    }
                    Ok(resuming(loaded, request, state, &model))
                }),
                answer: Box::new(move |id| {
                    let answered = id.map(drop).map_err(|e| match is_full.load(Ordering::SeqCst) {
                        true => {
                            refused.count_refused();
                            Refusal::Full
                        }
                        false => Refusal::Invalid(first_line(&e)),
                    });
                    accepted.fetch_add(usize::from(answered.is_ok()), Ordering::SeqCst);
                    answer.send(answered).is_ok()
                }),
                events: Box::new(move |events| {
                    if events.is_empty() {
                        return !answer_to.sender.is_closed();
                    }
                    let output = output(events, &own);
                    ended.fetch_sub(usize::from(output.finished.is_some()), Ordering::SeqCst);
                    answer_to.send(output)
                }),
            })
            .ok()?;
        Some(answered.await.ok()?.map(|()| outputs))
    }

    /// Ends all requests and the thread.
    pub async fn end(self) {
        // Requests that run would be finished if the handle were only dropped.
        self.engine.stop();
        let _ = tokio::task::spawn_blocking(move || self.thread.join()).await;
    }
}

fn run(
    args: &Args,
    messages: EngineMessages,
    shared: &Shared,
    router: &Router,
    ready: &(dyn Fn(Ready) + Sync),
) -> Result<()> {
    let mut checkpoint = Checkpoint::find(&args.model)?;
    let config = checkpoint.config()?;
    let draft_head = checkpoint.draft_head(args.serve.mtp, &config)?;
    let n = args.model.tensor_parallel.get();
    let started = |model: &CausalLm, options: &EngineOptions| -> Result<()> {
        let fingerprint = ModelFingerprint::new(&args.model, &checkpoint, &config, model.dtype())?;
        ready(Ready { max_len: options.max_len, prefill_chunk: options.prefill_chunk, fingerprint });
        Ok(())
    };
    if n == 1 {
        let rank = Rank::single(args.model.device()?);
        let (model, options) = load(args, &checkpoint, &config, draft_head, &rank)?;
        let engine = Engine::new(&model, options.clone())?;
        started(&model, &options)?;
        return Ok(messages.drive(engine, Followers::default(), Watch::new(args, shared, router))?);
    }
    // Before any rank begins: all of them would say it.
    config.split(n)?;
    let (leads, follows) = Followers::new(n - 1);
    let first = Mutex::new(Some((messages, leads)));
    let follows = Mutex::new(follows);
    ranks::run(n, args.model.on_cpu(), |rank| {
        let (model, options) = load(args, &checkpoint, &config, draft_head, rank)?;
        let mut engine = Engine::new(&model, options.clone())?;
        if ranks::is_first() {
            let first = first.lock().unwrap_or_else(PoisonError::into_inner).take();
            let (messages, leads) = first.ok_or_else(|| anyhow!("two first ranks"))?;
            started(&model, &options)?;
            Ok(messages.drive(engine, leads, Watch::new(args, shared, router))?)
        } else {
            let follower = follows.lock().unwrap_or_else(PoisonError::into_inner).pop();
            Ok(follower.ok_or_else(|| anyhow!("more ranks than there are"))?.follow(&mut engine)?)
        }
    })
}

/// The model of a rank, and what its engine is to have room for.
fn load(
    args: &Args,
    checkpoint: &Checkpoint,
    config: &ModelConfig,
    draft_head: bool,
    rank: &Rank,
) -> Result<(CausalLm, EngineOptions)> {
    let serve = &args.serve;
    let part = rank.group.as_ref().map(|group| config.split(group.size())).transpose()?;
    let of_rank = part.as_ref().unwrap_or(config);
    let options = EngineOptions {
        prefill_chunk: args.model.prefill_chunk(&rank.device),
        draft: serve.draft,
        draft_after: draft_after(serve.mtp, &rank.device),
        prefix_cache: serve.prefix_cache.saturating_mul(1 << 20),
        prefix_recent: serve.prefix_recent,
        prefix_block: serve.prefix_block,
        cuda_graph: serve.cuda_graph,
        ..EngineOptions::new(serve.batch, serve.max_seq_len.min(config.max_position_embeddings))
    };
    let need = |draft_head: bool| {
        let room = Room {
            sequences: options.sequences,
            max_len: options.max_len,
            least_len: 1024.min(options.max_len),
            draft: serve.draft,
            // A state on its way to or from the host.
            snapshots: usize::from(args.dynamo.disaggregation_mode != DisaggregationMode::Aggregated),
            cache: options.prefix_cache,
            prefixes: usize::MAX,
            draft_head,
        };
        Need::new(&args.model, checkpoint, of_rank, &room, rank)
    };
    let mut draft_head = draft_head;
    // Nobody who did not ask for the head goes without the rest for it.
    if draft_head && serve.mtp == DraftHeadChoice::Auto {
        draft_head = rank.on_all(need(true)?.fits(&rank.device))?;
    }
    need(draft_head)?.check(rank)?;
    let model = load_model(&args.model, checkpoint, config, draft_head, rank)?;
    Ok((model, options))
}

/// The request, which goes on from the state if that is of use. The state stays on the host until the request is admitted.
fn resuming(model: &CausalLm, request: Request, state: Option<State>, fingerprint: &ModelFingerprint) -> Request {
    let Some(state) = state.filter(|state| state.tokens < request.tokens.len()) else { return request };
    match state.snapshot(model, &fingerprint.after(&request.tokens[..state.tokens])) {
        Ok(snapshot) => Request { resume: Some(Arc::new(snapshot)), ..request },
        Err(e) => {
            tracing::warn!("a state is of no use, so the prompt is fed here: {e:#}");
            request
        }
    }
}

/// The events of a request in one step; `fingerprint` is that of its state.
fn output(events: Vec<Event>, fingerprint: &Fingerprint) -> Output {
    let mut output = Output { tokens: Vec::new(), logprobs: Vec::new(), state: None, finished: None };
    for event in events {
        match event {
            Event::Token { token, logprobs, .. } => {
                output.tokens.push(token);
                output.logprobs.extend(logprobs.map(|logprobs| *logprobs));
            }
            Event::Snapshot { snapshot, .. } => match State::of(&snapshot, fingerprint) {
                Ok(state) => output.state = Some(state),
                Err(e) => tracing::warn!("a state cannot be handed on: {e:#}"),
            },
            Event::Finished { reason, .. } => output.finished = Some(reason),
            _ => {}
        }
    }
    output
}

/// The results that one client gets.
struct Answer {
    sender: mpsc::UnboundedSender<Output>,
    ends: Ends,
    shared: Arc<Shared>,
    /// Tokens so far.
    sent: usize,
    /// Whether the last result was sent.
    is_whole: bool,
}

impl Answer {
    /// Sends the results of a step, up to the end of the answer, which is counted here. False where the engine is to end the
    /// request: the answer is whole, or the client has gone.
    fn send(&mut self, mut output: Output) -> bool {
        if self.is_whole {
            return false;
        }
        let kinds = output.tokens.iter().zip(self.sent..).map(|(token, n)| self.ends.kind(*token, n));
        let end = kinds.enumerate().find(|(_, kind)| *kind != Kind::Inner);
        if let Some((end, kind)) = end {
            output.tokens.truncate(end + usize::from(kind == Kind::Last));
            output.logprobs.truncate(output.tokens.len());
            output.finished = Some(FinishReason::Stop);
        }
        self.sent += output.tokens.len();
        if let Some(reason) = &output.finished {
            self.shared.count_finished(reason);
            self.is_whole = true;
        }
        self.sender.send(output).is_ok() && !self.is_whole
    }
}

/// Reports to the router and the figures.
struct Watch<'a> {
    blocks: Blocks,
    shared: &'a Shared,
    router: &'a Router,
}

impl<'a> Watch<'a> {
    fn new(args: &Args, shared: &'a Shared, router: &'a Router) -> Self {
        Self { blocks: Blocks::new(args.serve.prefix_block), shared, router }
    }
}

impl Observer for Watch<'_> {
    fn event(&mut self, event: Event) {
        match event {
            Event::PrefixKept { tokens } => tell(self.router, self.blocks.kept(&tokens)),
            Event::PrefixDropped { tokens } => tell(self.router, self.blocks.dropped(&tokens)),
            Event::PrefixTooLarge { tokens, bytes } => {
                tracing::warn!("the state after {tokens} tokens takes {bytes} bytes, more than --prefix-cache")
            }
            Event::NoGraph { sequences, why } => {
                tracing::warn!("no CUDA graph of {sequences} sequences, going on without: {why}")
            }
            _ => {}
        }
    }

    fn progress(&mut self, Progress { stats, waiting, running, tokens }: Progress) {
        self.shared.tell(Figures { stats, waiting, running, tokens });
    }
}

#[cfg(test)]
mod tests;
