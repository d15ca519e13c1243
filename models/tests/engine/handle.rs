//! An engine on a thread of its own: who submits, who waits, who has gone.

use super::{alone, model, request, PROMPTS};
use candle_core::Result;
use candle_gdn_models::{
    CausalLm, Engine, EngineHandle, EngineOptions, Event, FinishReason, Followers, Observer, Progress, Request,
    Submission,
};
use std::future::Future;
use std::pin::pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::task::{Poll, Wake};

#[test]
fn a_thread_serves_others() -> Result<()> {
    let want = alone(&model()?, request(1))?;
    let (engine, thread) = EngineHandle::spawn(model, EngineOptions::new(1, 2000))?;
    // It would go on for long: dropping the receiver makes room for the next one.
    let mut long = engine.submit(Request::new(PROMPTS[0].to_vec(), 1900))?;
    assert!(matches!(long.events.blocking_recv(), Some(Event::Token { .. })));
    drop(long.events);
    let other = engine.clone();
    let mut submitted = std::thread::spawn(move || other.submit(request(1))).join().expect("a thread")?;
    let events: Vec<Event> = std::iter::from_fn(|| submitted.events.blocking_recv()).collect();
    let tokens = events.iter().filter_map(|event| match event {
        Event::Token { token, .. } => Some(*token),
        _ => None,
    });
    assert_eq!(tokens.collect::<Vec<_>>(), want);
    assert!(matches!(events.last(), Some(Event::Finished { reason: FinishReason::MaxNewTokens, .. })));
    let mut long = engine.submit(Request::new(PROMPTS[0].to_vec(), 1900))?;
    engine.cancel(long.id);
    let last = std::iter::from_fn(|| long.events.blocking_recv()).last();
    assert!(matches!(last, Some(Event::Finished { reason: FinishReason::Cancelled, .. })), "{last:?}");
    assert!(engine.submit(Request::new(vec![1; 3000], 1)).is_err());
    drop(engine);
    thread.join().expect("no panic");
    Ok(())
}

/// Wakes a thread.
struct Unpark(std::thread::Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// A runtime of one task.
fn block_on<T>(future: impl Future<Output = T>) -> T {
    let (mut future, waker) = (pin!(future), Arc::new(Unpark(std::thread::current())).into());
    loop {
        match future.as_mut().poll(&mut std::task::Context::from_waker(&waker)) {
            Poll::Ready(output) => return output,
            Poll::Pending => std::thread::park(),
        }
    }
}

#[test]
fn a_task_awaits_requests() -> Result<()> {
    let model_here = self::model()?;
    let (engine, thread) = EngineHandle::spawn(model, EngineOptions::new(4, 200))?;
    block_on(async {
        let mut submitted = vec![];
        for n in 0..4 {
            submitted.push((n, engine.submit_async(request(n)).await?, vec![]));
        }
        assert!(engine.submit_async(Request::new(vec![], 1)).await.is_err());
        // Of each in turn.
        while !submitted.is_empty() {
            for (n, of, tokens) in &mut submitted {
                match of.events.recv().await {
                    Some(Event::Token { token, .. }) => tokens.push(token),
                    Some(Event::Finished { reason, .. }) => {
                        assert_eq!(reason, FinishReason::MaxNewTokens);
                        assert_eq!(*tokens, alone(&model_here, request(*n))?);
                    }
                    other => assert!(other.is_none(), "{other:?}"),
                }
            }
            submitted.retain(|(_, of, _)| !(of.events.is_closed() && of.events.is_empty()));
        }
        Ok::<_, candle_core::Error>(())
    })?;
    drop(engine);
    thread.join().expect("no panic");
    Ok(())
}

/// A receiver that was dropped, a submitter that has gone before the answer, and a receiver that says so after its first events: while
/// the requests wait, while their prompts are fed and while they are completed.
#[test]
fn requests_that_nobody_waits_for_are_cancelled() -> Result<()> {
    let model = model()?;
    for chunk in [1, 1000] {
        let (handle, messages) = EngineHandle::new();
        let long = || Request::new(vec![5; 150], 1000);
        let ends = Arc::new(Mutex::new(vec![]));
        let submit = |is_awaited: bool, most: usize| {
            let (ends, mut seen) = (ends.clone(), 0);
            handle.send(Submission {
                request: Box::new(move |_| Ok(long())),
                answer: Box::new(move |id| id.is_ok() && is_awaited),
                events: Box::new(move |events| {
                    seen += events.len();
                    let end = events.into_iter().find_map(|event| match event {
                        Event::Finished { reason, .. } => Some(reason),
                        _ => None,
                    });
                    ends.lock().expect("no panic").extend(end.map(|end| (end, seen)));
                    seen < most
                }),
            })
        };
        submit(true, 3)?; // Two tokens, and in the meantime a third.
        submit(true, 0)?;
        submit(false, usize::MAX)?;
        submit(true, 0)?;
        // Its future is polled once, and dropped before the answer.
        let mut future = Box::pin(handle.submit_async(long()));
        let poll = future.as_mut().poll(&mut std::task::Context::from_waker(std::task::Waker::noop()));
        assert!(poll.is_pending());
        drop(future);
        drop(handle);
        let options = EngineOptions { prefill_chunk: chunk, ..EngineOptions::new(2, 2000) };
        let mut seen = Seen::default();
        messages.drive(Engine::new(&model, options)?, Followers::default(), &mut seen)?;
        let ends = std::mem::take(&mut *ends.lock().expect("no panic"));
        assert_eq!(ends.len(), 4, "{ends:?}");
        assert!(ends.iter().all(|(end, seen)| *end == FinishReason::Cancelled && *seen <= 5), "{ends:?}");
        // The first prompt, and no more than begin before it is known that nobody waits for them.
        let fed = seen.progress.stats.prompt.tokens;
        assert!(if chunk == 1 { fed <= 153 } else { fed <= 300 }, "{fed}");
        assert!(seen.progress.stats.decode.tokens <= 4, "{:?}", seen.progress.stats);
    }
    Ok(())
}

/// Messages that never cease to come: each sends the next one while it is answered. A completion goes on nevertheless.
#[test]
fn a_flood_of_messages_does_not_stop_completions() -> Result<()> {
    fn flood(handle: &EngineHandle, left: &Arc<AtomicUsize>) {
        if left.fetch_sub(1, Ordering::SeqCst) > 1 {
            let (next, left) = (handle.clone(), left.clone());
            drop(handle.send(Submission {
                request: Box::new(move |_| {
                    flood(&next, &left);
                    candle_core::bail!("nothing to do")
                }),
                answer: Box::new(|_| true),
                events: Box::new(|_| true),
            }));
        }
    }
    let (model, (handle, messages), left) = (model()?, EngineHandle::new(), Arc::new(AtomicUsize::new(20_000)));
    let (seen, at_end) = (left.clone(), Arc::new(AtomicUsize::new(0)));
    let end = at_end.clone();
    handle.send(Submission {
        request: Box::new(|_| Ok(request(0))),
        answer: Box::new(|id| id.is_ok()),
        events: Box::new(move |events| {
            if matches!(events.last(), Some(Event::Finished { .. })) {
                end.store(seen.load(Ordering::SeqCst), Ordering::SeqCst);
            }
            true
        }),
    })?;
    flood(&handle, &left);
    drop(handle);
    messages.drive(Engine::new(&model, EngineOptions::new(1, 200))?, Followers::default(), ())?;
    assert!(at_end.load(Ordering::SeqCst) > 10_000, "messages that came after the end: {at_end:?}");
    Ok(())
}

/// Dropping the receiver ends a request before its first token too.
#[test]
fn a_dropped_receiver_ends_its_request() -> Result<()> {
    let model = model()?;
    let (handle, messages) = EngineHandle::new();
    let client = std::thread::spawn(move || handle.submit(Request::new(vec![5; 1500], 10)).map(drop));
    let options = EngineOptions { prefill_chunk: 1, ..EngineOptions::new(1, 2000) };
    let mut seen = Seen::default();
    messages.drive(Engine::new(&model, options)?, Followers::default(), &mut seen)?;
    client.join().expect("no panic")?;
    assert!(seen.progress.stats.prompt.tokens < 1500, "{}", seen.progress.stats.prompt);
    Ok(())
}

/// The last report of an engine, and all prefixes kept.
#[derive(Default)]
struct Seen {
    progress: Progress,
    kept: Vec<Vec<u32>>,
}

impl Observer for &mut Seen {
    fn event(&mut self, event: Event) {
        match event {
            Event::PrefixKept { tokens } => self.kept.push(tokens),
            other => panic!("{other:?}"),
        }
    }

    fn progress(&mut self, progress: Progress) {
        self.progress = progress;
    }
}

/// A second engine does what the first one is asked to do; requests are made on the first one's thread, and refused there.
#[test]
fn a_follower_repeats_the_first_engine() -> Result<()> {
    let model = &model()?;
    let options = EngineOptions { prefix_cache: 1 << 24, prefix_recent: 1, ..EngineOptions::new(2, 200) };
    let ((handle, messages), (followers, mut follow)) = (EngineHandle::new(), Followers::new(1));
    let follower = follow.pop().expect("a follower");
    let (mut seen, engine) = (Seen::default(), Engine::new(model, options.clone())?);
    let second = std::thread::scope(|scope| -> Result<_> {
        let second = scope.spawn(|| -> Result<_> {
            let mut engine = Engine::new(model, options)?;
            follower.follow(&mut engine)?;
            Ok(engine.stats())
        });
        let ((events, results), (answer, answers)) = (channel(), channel());
        for n in 0..3 {
            let (events, answer) = (events.clone(), answer.clone());
            let prompt = move |model: &CausalLm| match n {
                1 => candle_core::bail!("not now"),
                _ => Ok(Request::new((0..70).map(|i| i % model.config().vocab_size as u32).collect(), 5)),
            };
            handle.send(Submission {
                request: Box::new(prompt),
                answer: Box::new(move |id| answer.send(id.map_err(|e| e.to_string())).is_ok()),
                events: Box::new(move |new| events.send(new).is_ok()),
            })?;
        }
        drop((events, answer, handle));
        messages.drive(engine, followers, &mut seen)?;
        let answers: Vec<_> = answers.iter().collect();
        assert!(answers[0].is_ok() && answers[2].is_ok(), "{answers:?}");
        assert!(answers[1].as_ref().is_err_and(|why| why.starts_with("not now")), "{answers:?}");
        let tokens = results.iter().flatten().filter(|event| matches!(event, Event::Token { .. })).count();
        assert_eq!(tokens, 10);
        second.join().expect("no panic")
    })?;
    assert_eq!((seen.progress.waiting, seen.progress.running, seen.progress.tokens), (0, 0, 0));
    assert_eq!(seen.kept, [(0..64).collect::<Vec<u32>>()]);
    assert_eq!(second.decode.tokens, seen.progress.stats.decode.tokens);
    assert_eq!(second.prompt.tokens, seen.progress.stats.prompt.tokens);
    Ok(())
}
