//! An engine on a thread of its own, driven by messages from others.

use super::engine::Engine;
use super::event::{Event, FinishReason};
use super::options::EngineOptions;
use super::request::{Request, RequestId};
use super::stats::EngineStats;
use crate::CausalLm;
use candle_core::{Error, Result};
use std::borrow::Borrow;
use std::collections::BTreeMap;
use std::sync::mpsc::{channel, Receiver, Sender, TryRecvError};
use std::sync::Arc;
use std::thread::JoinHandle;
use tokio::sync::mpsc::{unbounded_channel, UnboundedReceiver};
use tokio::sync::oneshot;

/// Sends requests to an [`Engine`] that another thread owns; any number of threads may have a copy. When the last one is dropped,
/// the engine finishes its requests and its thread ends.
#[derive(Clone, Debug)]
pub struct EngineHandle {
    messages: Sender<Message>,
}

/// A request that was accepted.
#[derive(Debug)]
pub struct Submitted {
    /// For [`EngineHandle::cancel`].
    pub id: RequestId,
    /// Its events, [`Event::Finished`] last: `recv().await` for a task of any runtime, `blocking_recv()` for a thread. Without that
    /// event they end where [`EngineHandle::stop`] ends the engine or [`EngineMessages::drive`] fails. Dropping the receiver cancels the
    /// request after the next step.
    pub events: UnboundedReceiver<Event>,
}

/// Makes a request, by the engine's model.
pub type MakeRequest = Box<dyn FnOnce(&CausalLm) -> Result<Request> + Send>;

/// A request, and what happens to its results. All of it is called on the engine's thread.
pub struct Submission {
    /// Makes the request.
    pub request: MakeRequest,
    /// Receives the id, or why the request was refused. False, where the submitter has gone, cancels the request.
    pub answer: Box<dyn FnOnce(Result<RequestId>) -> bool + Send>,
    /// Called after each step with the request's events of that step, which may be none; [`Event::Finished`] comes last. It is dropped
    /// without that event where [`EngineHandle::stop`] ends the engine or [`EngineMessages::drive`] fails. False, where the receiver
    /// has gone, cancels the request.
    pub events: Box<dyn FnMut(Vec<Event>) -> bool + Send>,
}

enum Message {
    Submit(Submission),
    Cancel(RequestId),
    Stop,
}

/// The messages of an [`EngineHandle`], for the thread that owns the engine.
#[derive(Debug)]
pub struct EngineMessages(Receiver<Message>);

/// Watches an engine from its own thread.
pub trait Observer {
    /// An event that belongs to no request.
    fn event(&mut self, event: Event) {
        let _ = event;
    }

    /// Called after each message and each step.
    fn progress(&mut self, progress: Progress) {
        let _ = progress;
    }
}

/// The load of an engine.
#[derive(Clone, Copy, Debug, Default)]
pub struct Progress {
    /// What was done so far.
    pub stats: EngineStats,
    /// Requests that wait for room.
    pub waiting: usize,
    /// Requests that run.
    pub running: usize,
    /// Tokens of the prompts and completions of both.
    pub tokens: usize,
}

/// Nobody watches.
impl Observer for () {}

/// What the first of several ranks did, which the others repeat.
#[derive(Clone)]
enum Command {
    Submit(Arc<Request>),
    Cancel(RequestId),
    Step,
}

/// The first rank's way to the engines of the others; empty where it is alone. With others a request with [`Request::resume`],
/// [`Request::snapshot_at`] or [`Request::snapshot_end`] is refused: a snapshot would be one of the first rank's shard, and the memory
/// that it holds there is free on the others.
#[derive(Default)]
pub struct Followers(Vec<Sender<Command>>);

/// The engine of a rank that repeats what the first one does.
pub struct Follower(Receiver<Command>);

impl Followers {
    /// For `count` ranks besides the first.
    pub fn new(count: usize) -> (Self, Vec<Follower>) {
        let (senders, followers) = (0..count).map(|_| channel()).map(|(dst, from)| (dst, Follower(from))).unzip();
        (Self(senders), followers)
    }

    fn send(&self, command: impl Fn() -> Command) -> Result<()> {
        let ended = |_| Error::Msg("Engine: expected all ranks, one has ended".into());
        self.0.iter().try_for_each(|follower| follower.send(command()).map_err(ended))
    }
}

impl Follower {
    /// Repeats what the first rank does until that ends.
    ///
    /// # Errors
    /// As [`Engine::step`].
    pub fn follow<M: Borrow<CausalLm>>(self, engine: &mut Engine<M>) -> Result<()> {
        while let Ok(command) = self.0.recv() {
            match command {
                // The first rank answers: here it is refused for the same reason.
                Command::Submit(request) => drop(engine.submit((*request).clone())),
                Command::Cancel(id) => drop(engine.cancel(id)?),
                Command::Step => drop(engine.step()?),
            }
        }
        Ok(())
    }
}

impl EngineHandle {
    /// A handle and the messages that it sends, for [`EngineMessages::drive`] on a thread of the caller's.
    pub fn new() -> (Self, EngineMessages) {
        let (sender, receiver) = channel();
        (Self { messages: sender }, EngineMessages(receiver))
    }

    /// Starts a thread. `model` makes or gives the model there: on CUDA a model belongs to the thread that runs it.
    ///
    /// # Errors
    /// When no thread can be started, or as [`Engine::new`] and `model`.
    pub fn spawn(
        model: impl FnOnce() -> Result<CausalLm> + Send + 'static,
        options: EngineOptions,
    ) -> Result<(Self, JoinHandle<()>)> {
        let ((handle, messages), (started, start)) = (Self::new(), channel());
        let run = move || match model().and_then(|model| Engine::new(model, options)) {
            Ok(engine) => {
                let _ = started.send(Ok(()));
                let mut driver = Driver::new(engine, Followers::default(), ());
                if let Err(e) = driver.run(&messages.0) {
                    driver.fail_all(&e);
                }
            }
            Err(e) => drop(started.send(Err(e))),
        };
        let thread = std::thread::Builder::new().name("engine".into()).spawn(run)?;
        start.recv().map_err(|_| gone())??;
        Ok((handle, thread))
    }

    /// Sends a request and waits until it is accepted or refused: at most a step of the model for each 64 messages before it.
    ///
    /// # Errors
    /// As [`Engine::submit`], or when the engine has ended.
    ///
    /// # Panics
    /// In a task of a tokio runtime, which it would block: [`submit_async`](Self::submit_async) is for tasks.
    pub fn submit(&self, request: Request) -> Result<Submitted> {
        let (answered, events) = self.send_request(request)?;
        let id = answered.blocking_recv().map_err(|_| gone())??;
        Ok(Submitted { id, events })
    }

    /// [`submit`](Self::submit) for a task of any runtime, which it does not block. Dropping the future cancels the request.
    ///
    /// ```no_run
    /// # async fn demo(engine: candle_gdn_models::EngineHandle) -> candle_core::Result<()> {
    /// use candle_gdn_models::{Event, Request};
    /// let mut submitted = engine.submit_async(Request::new(vec![11, 22, 33], 64)).await?;
    /// while let Some(event) = submitted.events.recv().await {
    ///     if let Event::Token { token, .. } = event {
    ///         println!("{token}");
    ///     }
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`submit`](Self::submit).
    pub async fn submit_async(&self, request: Request) -> Result<Submitted> {
        let (answered, events) = self.send_request(request)?;
        let id = answered.await.map_err(|_| gone())??;
        Ok(Submitted { id, events })
    }

    fn send_request(
        &self,
        request: Request,
    ) -> Result<(oneshot::Receiver<Result<RequestId>>, UnboundedReceiver<Event>)> {
        let ((sender, events), (answer, answered)) = (unbounded_channel(), oneshot::channel());
        self.send(Submission {
            request: Box::new(|_| Ok(request)),
            answer: Box::new(move |id| answer.send(id).is_ok()),
            events: Box::new(move |events| {
                events.into_iter().for_each(|event| drop(sender.send(event)));
                !sender.is_closed()
            }),
        })?;
        Ok((answered, events))
    }

    /// [`submit`](Self::submit) without waiting, for callers with channels of their own.
    ///
    /// # Errors
    /// When the engine has ended.
    pub fn send(&self, submission: Submission) -> Result<()> {
        self.messages.send(Message::Submit(submission)).map_err(|_| gone())
    }

    /// Ends a request, unless it has ended, once the messages before it are taken: 64 between two steps.
    pub fn cancel(&self, id: RequestId) {
        // An engine that has ended has no requests.
        let _ = self.messages.send(Message::Cancel(id));
    }

    /// Ends the engine's thread once the messages before it are taken, 64 between two steps, with all requests: they get no
    /// [`Event::Finished`].
    pub fn stop(&self) {
        let _ = self.messages.send(Message::Stop);
    }
}

fn gone() -> Error {
    Error::Msg("Engine: expected a running engine, its thread has ended".into())
}

impl EngineMessages {
    /// Runs the engine on this thread until it is stopped, or all handles are dropped and nothing is left to do.
    ///
    /// # Errors
    /// As [`Engine::step`], or when a rank has ended. Requests that run get no [`Event::Finished`] then: another engine may take them.
    pub fn drive<M: Borrow<CausalLm>>(
        self,
        engine: Engine<M>,
        followers: Followers,
        observer: impl Observer,
    ) -> Result<()> {
        Driver::new(engine, followers, observer).run(&self.0)
    }
}

/// A request that was accepted and has not ended.
struct Running {
    events: Box<dyn FnMut(Vec<Event>) -> bool + Send>,
    /// Tokens of the prompt and of the completion so far.
    tokens: usize,
    /// The results of this step.
    new: Vec<Event>,
}

/// The most messages between two steps, so that completions go on however many come.
const MESSAGES: usize = 64;

struct Driver<M: Borrow<CausalLm>, O> {
    engine: Engine<M>,
    followers: Followers,
    observer: O,
    running: BTreeMap<RequestId, Running>,
    /// The tokens of all of these.
    tokens: usize,
}

impl<M: Borrow<CausalLm>, O: Observer> Driver<M, O> {
    fn new(engine: Engine<M>, followers: Followers, observer: O) -> Self {
        Self { engine, followers, observer, running: BTreeMap::new(), tokens: 0 }
    }

    fn run(&mut self, messages: &Receiver<Message>) -> Result<()> {
        let mut count = 0;
        loop {
            let message = match self.engine.is_idle() {
                true => messages.recv().map_err(|_| TryRecvError::Disconnected),
                false if count == MESSAGES => Err(TryRecvError::Empty),
                false => messages.try_recv(),
            };
            count = if message.is_ok() { (count + 1).min(MESSAGES) } else { 0 };
            match message {
                Ok(Message::Submit(submission)) => self.submit(submission)?,
                Ok(Message::Cancel(id)) => self.cancel(id)?,
                Ok(Message::Stop) => return Ok(()),
                Err(TryRecvError::Disconnected) if self.engine.is_idle() => return Ok(()),
                Err(_) => self.step()?,
            }
            self.report();
        }
    }

    fn submit(&mut self, Submission { request, answer, events }: Submission) -> Result<()> {
        let id = match request(self.engine.model()) {
            // The other ranks cannot restore it, and would part from this one.
            Ok(Request { resume: Some(_), .. }) if !self.followers.0.is_empty() => Err(Error::Msg(
                "Engine: request: resume: expected none with several ranks, got a snapshot of one".into(),
            )),
            // Whoever asks holds this rank's, and the others drop theirs: from then on their memory differs.
            Ok(Request { snapshot_at, snapshot_end, .. })
                if !self.followers.0.is_empty() && (snapshot_at.is_some() || snapshot_end) =>
            {
                let arg = if snapshot_end { "snapshot_end" } else { "snapshot_at" };
                Err(Error::Msg(format!("Engine: request: {arg}: expected no snapshot with several ranks")))
            }
            Ok(request) => {
                self.followers.send(|| Command::Submit(Arc::new(request.clone())))?;
                let tokens = request.tokens.len();
                let id = self.engine.submit(request);
                if let Ok(id) = id {
                    self.tokens += tokens;
                    self.running.insert(id, Running { events, tokens, new: Vec::new() });
                }
                id
            }
            Err(e) => Err(e),
        };
        let accepted = id.as_ref().ok().copied();
        // Before the answer, so that the submitter finds its request in the figures.
        self.report();
        match (answer(id), accepted) {
            (false, Some(id)) => self.cancel(id),
            _ => Ok(()),
        }
    }

    fn cancel(&mut self, id: RequestId) -> Result<()> {
        if self.running.contains_key(&id) {
            self.followers.send(|| Command::Cancel(id))?;
            self.engine.cancel(id)?;
        }
        Ok(())
    }

    fn step(&mut self) -> Result<()> {
        self.followers.send(|| Command::Step)?;
        for event in self.engine.step()? {
            let id = match &event {
                Event::Token { id, .. } | Event::Snapshot { id, .. } | Event::Finished { id, .. } => *id,
                _ => {
                    self.observer.event(event);
                    continue;
                }
            };
            let Some(running) = self.running.get_mut(&id) else { continue };
            let tokens = usize::from(matches!(event, Event::Token { .. }));
            (running.tokens, self.tokens) = (running.tokens + tokens, self.tokens + tokens);
            running.new.push(event);
        }
        let mut gone = Vec::new();
        self.running.retain(|id, running| {
            let new = std::mem::take(&mut running.new);
            let has_ended = matches!(new.last(), Some(Event::Finished { .. }));
            if !(running.events)(new) && !has_ended {
                gone.push(*id);
            }
            if has_ended {
                self.tokens -= running.tokens;
            }
            !has_ended
        });
        gone.into_iter().try_for_each(|id| self.cancel(id))
    }

    fn report(&mut self) {
        let (waiting, all) = (self.engine.waiting(), self.running.len());
        let (stats, tokens) = (self.engine.stats(), self.tokens);
        let progress = Progress { stats, waiting, running: all.saturating_sub(waiting), tokens };
        self.observer.progress(progress);
    }

    fn fail_all(&mut self, error: &Error) {
        for (id, mut running) in std::mem::take(&mut self.running) {
            (running.events)(vec![Event::Finished { id, reason: FinishReason::failed(error) }]);
        }
    }
}
