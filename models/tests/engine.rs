//! The engine on the demo checkpoint: what each request gets, whatever else runs.

use candle_core::{DType, Device, Result, Tensor};
use candle_gdn_models::{
    CausalLm, Engine, EngineHandle, EngineOptions, Event, FinishReason, Followers, Observer, Progress, Request,
    Sampling, Submission,
};
use candle_gdn_models_testing::golden::DEMO;
use candle_gdn_models_testing::serving::{finish, Completion};
use std::future::Future;
use std::pin::pin;
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::task::{Poll, Wake};

const PROMPTS: [&[u32]; 4] = [&[49, 68, 7, 12, 90], &[300, 301], &[5; 40], &[17, 400, 23, 23, 500, 81, 2]];

fn model() -> Result<CausalLm> {
    DEMO.model(DType::F32, &Device::Cpu)
}

/// A request that draws, or takes the most likely token.
fn request(n: usize) -> Request {
    let sampling = match n % 2 {
        0 => Sampling::default(),
        _ => Sampling { temperature: 0.8, top_p: 0.9, ..Sampling::default() },
    };
    Request { sampling, seed: n as u64, ..Request::new(PROMPTS[n].to_vec(), 12 + n) }
}

fn alone(model: &CausalLm, request: Request) -> Result<Vec<u32>> {
    let mut engine = Engine::new(model, EngineOptions::new(1, 200))?;
    let id = engine.submit(request)?;
    Ok(finish(&mut engine)?.remove(id).tokens)
}

#[test]
fn requests_together_get_what_each_gets_alone() -> Result<()> {
    let model = model()?;
    let want = (0..4).map(|n| alone(&model, request(n))).collect::<Result<Vec<_>>>()?;
    // Room for all, room for some so that the others wait, prompts in pieces, and drafts.
    let all = EngineOptions::new(4, 100);
    let options = [
        all.clone(),
        EngineOptions { sequences: 2, ..all.clone() },
        EngineOptions { prefill_chunk: 7, ..all.clone() },
        EngineOptions { draft: 4, prefix_cache: 1 << 24, ..all },
    ];
    for options in options {
        let mut engine = Engine::new(&model, options)?;
        let ids = (0..4).map(|n| engine.submit(request(n))).collect::<Result<Vec<_>>>()?;
        let mut got = finish(&mut engine)?;
        for (n, id) in ids.into_iter().enumerate() {
            let Completion { tokens, end, .. } = got.remove(id);
            assert_eq!((&tokens, end), (&want[n], Some(FinishReason::MaxNewTokens)), "request {n}");
            assert_eq!(want[n].len(), 12 + n);
        }
    }
    Ok(())
}

/// The second prompt leaves the first one after 64 tokens, and the third begins there.
#[test]
fn prompts_one_after_the_other_share_beginnings() -> Result<()> {
    let model = model()?;
    let options = EngineOptions { prefix_cache: 1 << 24, prefix_recent: 8, ..EngineOptions::new(1, 200) };
    let mut engine = Engine::new(&model, options)?;
    let prompt = |n: u32| (0..64).chain([100 + n; 70]).collect::<Vec<_>>();
    for (n, reused) in [(0, 0), (1, 0), (2, 64), (2, 64 + 128)] {
        let id = engine.submit(Request::new(prompt(n), 5))?;
        assert_eq!(finish(&mut engine)?.remove(id).tokens, alone(&model, Request::new(prompt(n), 5))?, "prompt {n}");
        assert_eq!(engine.stats().prefixes.reused, reused, "prompt {n}");
    }
    Ok(())
}

#[test]
fn cancelling_frees_the_slot() -> Result<()> {
    let model = model()?;
    let mut engine = Engine::new(&model, EngineOptions::new(1, 100))?;
    let (first, second) = (engine.submit(request(0))?, engine.submit(request(1))?);
    let third = engine.submit(request(2))?;
    engine.step()?;
    assert_eq!(engine.waiting(), 2);
    assert!(engine.cancel(first)? && engine.cancel(third)?);
    assert!(!engine.cancel(first)?, "it has ended");
    let mut got = finish(&mut engine)?;
    assert_eq!(got.remove(first).end, Some(FinishReason::Cancelled));
    let [second, third] = [second, third].map(|id| got.remove(id));
    assert_eq!((third.tokens, third.end), (vec![], Some(FinishReason::Cancelled)));
    assert_eq!((second.tokens, second.end), (alone(&model, request(1))?, Some(FinishReason::MaxNewTokens)));
    Ok(())
}

#[test]
fn what_can_never_fit_is_refused() -> Result<()> {
    let model = model()?;
    let mut engine = Engine::new(&model, EngineOptions::new(1, 20))?;
    let mut refused = |request: Request, parts: &[&str]| {
        let error = engine.submit(request).unwrap_err().to_string();
        assert!(parts.iter().all(|part| error.contains(part)), "{error}");
    };
    refused(Request::new(vec![1; 21], 1), &["at most 20 tokens", "got 21"]);
    refused(Request::new(vec![], 1), &["at least 1 token"]);
    refused(Request::new(vec![1024], 1), &["vocab_size (1024)", "got 1024"]);
    let cold = Sampling { temperature: -1., ..Sampling::default() };
    refused(Request { sampling: cold, ..Request::new(vec![1], 1) }, &["temperature", "at least 0, got -1"]);
    // The last token drawn has no position, as it is not fed.
    for len in [20, 18] {
        let last = engine.submit(Request::new(vec![1; len], 9))?;
        let last = finish(&mut engine)?.remove(last);
        assert_eq!((last.tokens.len(), last.end), (21 - len, Some(FinishReason::MaxLen)));
    }
    for (options, says) in [
        (
            EngineOptions { prefix_block: 63, ..EngineOptions::new(1, 20) },
            "prefix_block: expected a positive multiple of 64, got 63",
        ),
        (EngineOptions::new(1, usize::MAX), "max_len: expected at most max_position_embeddings (4096)"),
    ] {
        let error = Engine::new(&model, options).unwrap_err().to_string();
        assert!(error.contains(says), "{error}");
    }
    Ok(())
}

#[test]
fn requests_wait_only_where_no_sequence_is_free() -> Result<()> {
    let model = model()?;
    for max_waiting in [0, 1] {
        let mut engine = Engine::new(&model, EngineOptions { max_waiting, ..EngineOptions::new(2, 100) })?;
        let full = format!("at most {max_waiting} that wait");
        for running in [0, 1] {
            // With two running, one has ended.
            let ids = (running..2 + max_waiting).map(|n| engine.submit(request(n))).collect::<Result<Vec<_>>>()?;
            assert!(engine.submit(request(3)).unwrap_err().to_string().contains(&full));
            engine.step()?;
            assert_eq!(engine.waiting(), max_waiting);
            assert!(engine.submit(request(3)).unwrap_err().to_string().contains(&full));
            ids[1..].iter().try_for_each(|id| engine.cancel(*id).map(drop))?;
            engine.step()?;
        }
    }
    Ok(())
}

#[test]
fn a_snapshot_continues_the_sequence() -> Result<()> {
    let model = model()?;
    let mut engine = Engine::new(&model, EngineOptions::new(1, 100))?;
    engine.submit(Request { snapshot_end: true, snapshot_at: Some(3), ..request(0) })?;
    let (mut snapshots, mut tokens) = (vec![], PROMPTS[0].to_vec());
    while !engine.is_idle() {
        for event in engine.step()? {
            match event {
                Event::Snapshot { snapshot, .. } => snapshots.push(snapshot),
                Event::Token { token, .. } => tokens.push(token),
                _ => {}
            }
        }
    }
    assert_eq!(snapshots.iter().map(|s| s.len()).collect::<Vec<_>>(), [3, tokens.len() - 1]);
    tokens.push(77);
    let want = alone(&model, Request::new(tokens.clone(), 5))?;
    // By the way of another process, too.
    for i in 0..snapshots.len() {
        let (len, mut on_host) = (snapshots[i].len(), snapshots[i].to_host()?);
        snapshots.push(Arc::new(model.snapshot_from_host(len, &on_host)?));
        let wrong = model.snapshot_from_host(len + 1, &on_host).unwrap_err().to_string();
        assert!(wrong.contains("k.0: expected"), "{wrong}");
        let fingerprint = on_host["fingerprint"].to_vec1::<i64>()?;
        let changed = on_host
            .clone()
            .into_iter()
            .chain([("fingerprint".to_string(), Tensor::new(&[fingerprint[0] + 1, fingerprint[1]], &Device::Cpu)?)]);
        let wrong = model.snapshot_from_host(len, &changed.collect()).unwrap_err().to_string();
        assert!(wrong.contains("fingerprint: expected one of this model"), "{wrong}");
        on_host.remove("conv.1");
        assert!(model.snapshot_from_host(len, &on_host).unwrap_err().to_string().contains("conv.1"));
    }
    let refused = |engine: &mut Engine<_>, snapshot: &Arc<_>, tokens: &[u32], why: &str| {
        let request = Request { resume: Some(Arc::clone(snapshot)), ..Request::new(tokens.to_vec(), 5) };
        let error = engine.submit(request).unwrap_err().to_string();
        assert!(error.contains(why), "{error}");
    };
    for snapshot in snapshots {
        let len = snapshot.len();
        refused(&mut engine, &snapshot, &tokens[..len], &format!("expected more than the {len} tokens"));
        for changed in [0, len - 1] {
            let mut other = tokens.clone();
            other[changed] += 1;
            refused(&mut engine, &snapshot, &other, "got one of other tokens");
        }
        let fed = engine.stats().prompt.tokens;
        let more = tokens.len() - snapshot.len();
        let id = engine.submit(Request { resume: Some(snapshot), ..Request::new(tokens.clone(), 5) })?;
        assert_eq!(finish(&mut engine)?.remove(id).tokens, want);
        assert_eq!(engine.stats().prompt.tokens - fed, more);
    }
    Ok(())
}

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
