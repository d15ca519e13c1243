//! An engine on a thread of its own.

use super::request::{EngineOptions, Event, FinishReason, Request, RequestId};
use super::scheduler::Engine;
use crate::CausalLm;
use candle_core::{Error, Result};
use std::collections::HashMap;
use std::sync::mpsc::{channel, Receiver, Sender, TryRecvError};
use std::thread::JoinHandle;

/// Drives an [`Engine`] on a thread that owns it; any number of threads submit requests. When the last handle is
/// dropped, the thread finishes what it has and ends.
#[derive(Clone, Debug)]
pub struct EngineHandle {
    to_engine: Sender<Message>,
}

/// A request that was taken in.
#[derive(Debug)]
pub struct Submitted {
    /// For [`EngineHandle::cancel`].
    pub id: RequestId,
    /// What comes of it, [`Event::Finished`] last. Dropping it cancels the request.
    pub events: Receiver<Event>,
}

enum Message {
    Submit(Box<Request>, Sender<Event>, Sender<Result<RequestId>>),
    Cancel(RequestId),
}

impl EngineHandle {
    /// Starts the thread. `model` makes or gives the model there: on CUDA a model belongs to the thread that runs it.
    ///
    /// # Errors
    /// When no thread can be started, or as [`Engine::new`] and `model`.
    pub fn spawn(
        model: impl FnOnce() -> Result<CausalLm> + Send + 'static,
        options: EngineOptions,
    ) -> Result<(Self, JoinHandle<()>)> {
        let ((to_engine, messages), (started, start)) = (channel(), channel());
        let run = move || {
            let engine = model().and_then(|model| Engine::new(model, options));
            match engine {
                Ok(engine) => {
                    let _ = started.send(Ok(()));
                    drive(engine, &messages);
                }
                Err(e) => drop(started.send(Err(e))),
            }
        };
        let thread = std::thread::Builder::new().name("engine".into()).spawn(run)?;
        start.recv().map_err(|_| gone())??;
        Ok((Self { to_engine }, thread))
    }

    /// Hands a request over and waits until it is taken in or refused, at most for one step of the model.
    ///
    /// # Errors
    /// As [`Engine::submit`], or when the engine has ended.
    pub fn submit(&self, request: Request) -> Result<Submitted> {
        let ((sender, events), (answer, answered)) = (channel(), channel());
        self.to_engine.send(Message::Submit(Box::new(request), sender, answer)).map_err(|_| gone())?;
        let id = answered.recv().map_err(|_| gone())??;
        Ok(Submitted { id, events })
    }

    /// Ends a request before the next step; of one that has ended nothing is left to end.
    pub fn cancel(&self, id: RequestId) {
        // An engine that has ended has no requests.
        let _ = self.to_engine.send(Message::Cancel(id));
    }
}

fn gone() -> Error {
    Error::Msg("Engine: expected a running engine, its thread has ended".into())
}

/// Until nobody can send any more and nothing is left to do.
fn drive(mut engine: Engine<CausalLm>, messages: &Receiver<Message>) {
    let mut receivers = HashMap::new();
    loop {
        let message = match engine.is_idle() {
            true => messages.recv().map_err(|_| TryRecvError::Disconnected),
            false => messages.try_recv(),
        };
        let done = match message {
            Ok(message) => take(&mut engine, &mut receivers, message),
            Err(TryRecvError::Disconnected) if engine.is_idle() => return,
            Err(_) => advance(&mut engine, &mut receivers),
        };
        if let Err(e) = done {
            let reason = FinishReason::Failed(e.to_string());
            for (id, events) in receivers {
                let _ = events.send(Event::Finished { id, reason: reason.clone() });
            }
            return;
        }
    }
}

fn take(
    engine: &mut Engine<CausalLm>,
    receivers: &mut HashMap<RequestId, Sender<Event>>,
    message: Message,
) -> Result<()> {
    match message {
        Message::Submit(request, events, answer) => {
            let id = engine.submit(*request);
            if let Ok(id) = id {
                receivers.insert(id, events);
            }
            // Nobody waits for the answer any more: nobody reads the events either.
            if let Err(unread) = answer.send(id) {
                if let Ok(id) = unread.0 {
                    engine.cancel(id)?;
                }
            }
            Ok(())
        }
        Message::Cancel(id) => engine.cancel(id).map(drop),
    }
}

fn advance(engine: &mut Engine<CausalLm>, receivers: &mut HashMap<RequestId, Sender<Event>>) -> Result<()> {
    for event in engine.step()? {
        let (id, last) = match &event {
            Event::Token { id, .. } | Event::Snapshot { id, .. } => (*id, false),
            Event::Finished { id, .. } => (*id, true),
            Event::PrefixKept { .. }
            | Event::PrefixDropped { .. }
            | Event::PrefixTooLarge { .. }
            | Event::NoGraph { .. } => continue,
        };
        let gone = receivers.get(&id).is_some_and(|events| events.send(event).is_err());
        if last || gone {
            receivers.remove(&id);
        }
        if gone && !last {
            engine.cancel(id)?;
        }
    }
    Ok(())
}
