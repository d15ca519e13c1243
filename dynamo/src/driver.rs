//! The engine on a thread of its own, or on one for each rank: all of them do what the first one decides.

use crate::blocks::{tell, Blocks, Router};
use candle_gdn_cli::{draft_after, load_model, ranks, Checkpoint, Need, Rank, Room};
use crate::figures::{Figures, Shared};
use crate::transfer::State;
use crate::Args;
use anyhow::{anyhow, Context, Result};
use candle_gdn_models::{
    CausalLm, DraftHeadChoice, Engine, EngineOptions, Event, FinishReason, Logprobs, ModelConfig, Request, RequestId,
};
use std::collections::HashMap;
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::sync::mpsc::{channel, Receiver, Sender, TryRecvError};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use tokio::sync::{mpsc, oneshot};

/// What a step brought for a request. Nothing comes behind a reason.
#[derive(Debug)]
pub struct Output {
    pub tokens: Vec<u32>,
    /// Of each of these, where [`Request::logprobs`] asks for them.
    pub logprobs: Vec<Logprobs>,
    /// The sequence's, where [`Request::snapshot_end`] asks for it.
    pub state: Option<State>,
    pub finished: Option<FinishReason>,
}

/// Why a request was not taken in.
#[derive(Debug)]
pub enum Refusal {
    /// As many wait as may.
    Full,
    /// It can never run.
    Invalid(String),
}

/// A request that was taken in. Dropping it ends the request.
#[derive(Debug)]
pub struct Running {
    pub outputs: mpsc::UnboundedReceiver<Output>,
    id: RequestId,
    to_engine: Sender<Message>,
}

impl Drop for Running {
    fn drop(&mut self) {
        // Of one that has ended nothing is left to end, and an engine that has ended has none.
        let _ = self.to_engine.send(Message::Cancel(self.id));
    }
}

enum Message {
    Submit(Box<Request>, Option<State>, mpsc::UnboundedSender<Output>, oneshot::Sender<Result<RequestId, Refusal>>),
    Cancel(RequestId),
    /// All requests end.
    End,
}

/// What the first rank decided.
#[derive(Clone)]
enum Decision {
    Submit(Arc<Request>),
    Cancel(RequestId),
    Step,
}

/// The way to the engine.
pub struct Driver {
    to_engine: Sender<Message>,
    thread: JoinHandle<()>,
    /// Tokens that a sequence can have.
    pub max_len: usize,
    /// Tokens of prompts in one pass.
    pub prefill_chunk: usize,
}

impl Driver {
    /// Loads the model and makes room for the requests.
    ///
    /// # Errors
    /// When the files are not a model, or there is no room.
    pub async fn start(args: Arc<Args>, shared: Arc<Shared>, router: Router) -> Result<Self> {
        let ((to_engine, messages), (started, start)) = (channel(), oneshot::channel());
        let run = move || {
            let started = Mutex::new(Some(started));
            let take = || started.lock().unwrap_or_else(PoisonError::into_inner).take();
            // Who started it may have gone: then the messages end too.
            let ready = |room| take().map_or((), |started| drop(started.send(Ok(room))));
            let work = AssertUnwindSafe(|| run(&args, messages, &shared, &router, &ready));
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
        let (max_len, prefill_chunk) = start.await.context("the engine's thread has ended")??;
        Ok(Self { to_engine, thread, max_len, prefill_chunk })
    }

    /// Hands a request over, with the state after its first tokens if there is one, and waits until it is taken in or
    /// refused, at most for one step of the model; None where the engine has ended.
    pub async fn submit(&self, request: Request, state: Option<State>) -> Option<Result<Running, Refusal>> {
        let ((sender, outputs), (answer, answered)) = (mpsc::unbounded_channel(), oneshot::channel());
        self.to_engine.send(Message::Submit(Box::new(request), state, sender, answer)).ok()?;
        let to_engine = self.to_engine.clone();
        Some(answered.await.ok()?.map(|id| Running { outputs, id, to_engine }))
    }

    /// Ends all requests and the thread.
    pub async fn end(self) {
        let _ = self.to_engine.send(Message::End);
        // Running requests have senders of their own: the thread does not wait for these.
        let _ = tokio::task::spawn_blocking(move || self.thread.join()).await;
    }
}

/// `ready` is given what there is room for.
fn run(
    args: &Args,
    messages: Receiver<Message>,
    shared: &Shared,
    router: &Router,
    ready: &(dyn Fn((usize, usize)) + Sync),
) -> Result<()> {
    let mut checkpoint = Checkpoint::find(&args.model)?;
    let config = checkpoint.config()?;
    let draft_head = checkpoint.draft_head(args.serve.mtp, &config)?;
    let n = args.model.tensor_parallel.get();
    if n == 1 {
        let rank = Rank::single(args.model.device()?);
        let (model, options) = load(args, &checkpoint, &config, draft_head, &rank)?;
        let engine = Engine::new(&model, options.clone())?;
        ready((options.max_len, options.prefill_chunk));
        return Lead::new(&model, engine, args, Vec::new(), shared, router).run(&messages);
    }
    // Before any rank begins: all of them would say it.
    config.split(n)?;
    let (leads, follows): (Vec<_>, Vec<_>) = (1..n).map(|_| channel::<Decision>()).unzip();
    let first = Mutex::new(Some((messages, leads)));
    let follows = Mutex::new(follows);
    ranks::run(n, args.model.on_cpu(), |rank| {
        let (model, options) = load(args, &checkpoint, &config, draft_head, rank)?;
        let engine = Engine::new(&model, options.clone())?;
        if ranks::is_first() {
            let first = first.lock().unwrap_or_else(PoisonError::into_inner).take();
            let (messages, leads) = first.ok_or_else(|| anyhow!("two first ranks"))?;
            ready((options.max_len, options.prefill_chunk));
            Lead::new(&model, engine, args, leads, shared, router).run(&messages)
        } else {
            let decisions = follows.lock().unwrap_or_else(PoisonError::into_inner).pop();
            follow(engine, &decisions.ok_or_else(|| anyhow!("more ranks than there are"))?)
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
            // While the pool grows for drafts, the old one is still there.
            spare_states: if serve.draft > 0 { options.sequences.saturating_mul(2) } else { 0 },
            snapshots: 0,
            cache: options.prefix_cache,
            prefixes: usize::MAX,
            draft_head,
        };
        Need::new(&args.model, checkpoint, of_rank, &room, &rank.device)
    };
    let mut draft_head = draft_head;
    // Nobody who did not ask for the head goes without the rest for it.
    if draft_head && serve.mtp == DraftHeadChoice::Auto {
        draft_head = rank.pace.agree(u8::from(need(true)?.fits(&rank.device))) == 1;
    }
    need(draft_head)?.check(&rank.device)?;
    let model = load_model(&args.model, checkpoint, config, draft_head, rank)?;
    Ok((model, options))
}

/// A rank that is not the first one, until that has ended.
fn follow(mut engine: Engine<&CausalLm>, decisions: &Receiver<Decision>) -> Result<()> {
    while let Ok(decision) = decisions.recv() {
        match decision {
            // The first rank answers for it: here it is refused for the same reason.
            Decision::Submit(request) => drop(engine.submit((*request).clone())),
            Decision::Cancel(id) => drop(engine.cancel(id)?),
            Decision::Step => drop(engine.step()?),
        }
    }
    Ok(())
}

/// The rank that decides and answers.
struct Lead<'a> {
    model: &'a CausalLm,
    engine: Engine<&'a CausalLm>,
    /// To the other ranks.
    leads: Vec<Sender<Decision>>,
    requests: HashMap<RequestId, InFlight>,
    /// Requests at most that run and that wait.
    room: usize,
    blocks: Blocks,
    shared: &'a Shared,
    router: &'a Router,
}

/// A request that was taken in and has not ended.
struct InFlight {
    outputs: mpsc::UnboundedSender<Output>,
    /// Of the prompt and of the completion so far.
    tokens: usize,
    /// What this step brought.
    new: Vec<u32>,
    logprobs: Vec<Logprobs>,
    state: Option<State>,
}

impl<'a> Lead<'a> {
    fn new(
        model: &'a CausalLm,
        engine: Engine<&'a CausalLm>,
        args: &Args,
        leads: Vec<Sender<Decision>>,
        shared: &'a Shared,
        router: &'a Router,
    ) -> Self {
        let (serve, requests) = (&args.serve, HashMap::new());
        let (blocks, room) = (Blocks::new(serve.prefix_block), serve.batch.saturating_add(serve.max_waiting));
        Self { model, engine, leads, requests, room, blocks, shared, router }
    }

    /// Until the end is asked for.
    fn run(mut self, messages: &Receiver<Message>) -> Result<()> {
        loop {
            let message = match self.engine.is_idle() {
                true => messages.recv().map_err(|_| TryRecvError::Disconnected),
                false => messages.try_recv(),
            };
            match message {
                Ok(Message::Submit(request, state, outputs, answer)) => {
                    self.submit(self.resuming(*request, state), outputs, answer)?
                }
                Ok(Message::Cancel(id)) => self.cancel(id)?,
                Ok(Message::End) | Err(TryRecvError::Disconnected) => return Ok(()),
                Err(TryRecvError::Empty) => self.step()?,
            }
            self.tell_figures();
        }
    }

    fn decide(&self, decision: Decision) -> Result<()> {
        for lead in &self.leads {
            lead.send(decision.clone()).map_err(|_| anyhow!("a rank has ended"))?;
        }
        Ok(())
    }

    /// The request, which goes on from the state if that is of use.
    fn resuming(&self, request: Request, state: Option<State>) -> Request {
        let Some(state) = state.filter(|state| state.tokens < request.tokens.len()) else { return request };
        match state.snapshot(self.model) {
            Ok(snapshot) => Request { resume: Some(Arc::new(snapshot)), ..request },
            Err(e) => {
                tracing::warn!("a state is of no use, so the prompt is fed here: {e:#}");
                request
            }
        }
    }

    fn submit(
        &mut self,
        request: Request,
        outputs: mpsc::UnboundedSender<Output>,
        answer: oneshot::Sender<Result<RequestId, Refusal>>,
    ) -> Result<()> {
        if self.requests.len() >= self.room {
            self.shared.count_refused();
            // Who asked may have gone.
            let _ = answer.send(Err(Refusal::Full));
            return Ok(());
        }
        if !self.leads.is_empty() {
            self.decide(Decision::Submit(Arc::new(request.clone())))?;
        }
        let tokens = request.tokens.len();
        let taken = self.engine.submit(request).map_err(|e| Refusal::Invalid(e.to_string()));
        if let Ok(id) = taken {
            self.requests.insert(id, InFlight { outputs, tokens, new: Vec::new(), logprobs: Vec::new(), state: None });
        }
        // Before the answer: from then on the worker's end waits for this request.
        self.tell_figures();
        match answer.send(taken) {
            // Nobody reads what comes of it.
            Err(Ok(id)) => self.cancel(id),
            _ => Ok(()),
        }
    }

    fn cancel(&mut self, id: RequestId) -> Result<()> {
        if self.requests.contains_key(&id) {
            self.decide(Decision::Cancel(id))?;
            self.engine.cancel(id)?;
        }
        Ok(())
    }

    fn step(&mut self) -> Result<()> {
        self.decide(Decision::Step)?;
        let mut ended = Vec::new();
        let mut came = Vec::new();
        for event in self.engine.step()? {
            match event {
                Event::Token { id, token, logprobs } => {
                    let Some(request) = self.requests.get_mut(&id) else { continue };
                    if request.new.is_empty() {
                        came.push(id);
                    }
                    request.new.push(token);
                    request.logprobs.extend(logprobs.map(|logprobs| *logprobs));
                    request.tokens += 1;
                }
                Event::Finished { id, reason } => ended.push((id, reason)),
                Event::PrefixKept { tokens } => tell(self.router, self.blocks.kept(&tokens)),
                Event::PrefixDropped { tokens } => tell(self.router, self.blocks.dropped(&tokens)),
                Event::PrefixTooLarge { tokens, bytes } => {
                    tracing::warn!("the state after {tokens} tokens takes {bytes} bytes, more than --prefix-cache")
                }
                Event::NoGraph { sequences, why } => {
                    tracing::warn!("no CUDA graph of {sequences} sequences, going on without: {why}")
                }
                Event::Snapshot { id, snapshot } => {
                    let Some(request) = self.requests.get_mut(&id) else { continue };
                    match State::of(&snapshot) {
                        Ok(state) => request.state = Some(state),
                        Err(e) => tracing::warn!("a state cannot be handed on: {e:#}"),
                    }
                }
            }
        }
        for (id, reason) in ended {
            let Some(request) = self.requests.remove(&id) else { continue };
            self.shared.count_finished(&reason);
            // Who asked may have gone; of a token too.
            let InFlight { outputs, new: tokens, logprobs, state, .. } = request;
            let _ = outputs.send(Output { tokens, logprobs, state, finished: Some(reason) });
        }
        for id in came {
            let Some(request) = self.requests.get_mut(&id) else { continue };
            let (tokens, logprobs) = (std::mem::take(&mut request.new), std::mem::take(&mut request.logprobs));
            let _ = request.outputs.send(Output { tokens, logprobs, state: None, finished: None });
        }
        Ok(())
    }

    fn tell_figures(&self) {
        let (waiting, all) = (self.engine.waiting(), self.requests.len());
        self.shared.tell(Figures {
            stats: self.engine.stats(),
            waiting,
            running: all.saturating_sub(waiting),
            tokens: self.requests.values().map(|request| request.tokens).sum(),
        });
    }
}
