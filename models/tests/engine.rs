//! The engine on the demo checkpoint: what each request gets, whatever else runs.

use candle_core::{DType, Device, Result};
use candle_gdn_models::{
    CausalLm, Engine, EngineHandle, EngineOptions, Event, FinishReason, Followers, Observer, Progress, Request,
    Sampling, Submission,
};
use candle_gdn_models_testing::golden::DEMO;
use candle_gdn_models_testing::serving::{finish, Completion};
use std::sync::mpsc::channel;
use std::sync::Arc;

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
    let mut engine = Engine::new(&model, EngineOptions { max_waiting: 1, ..EngineOptions::new(1, 20) })?;
    let mut refused = |request: Request, parts: &[&str]| {
        let error = engine.submit(request).unwrap_err().to_string();
        assert!(parts.iter().all(|part| error.contains(part)), "{error}");
    };
    refused(Request::new(vec![1; 21], 1), &["at most 20 tokens", "got 21"]);
    refused(Request::new(vec![], 1), &["at least 1 token"]);
    refused(Request::new(vec![1024], 1), &["vocab_size (1024)", "got 1024"]);
    let cold = Sampling { temperature: -1., ..Sampling::default() };
    refused(Request { sampling: cold, ..Request::new(vec![1], 1) }, &["temperature", "at least 0, got -1"]);
    let last = engine.submit(Request::new(vec![1; 20], 9))?;
    let error = engine.submit(request(1)).unwrap_err().to_string();
    assert!(error.contains("at most 1 that wait"), "{error}");
    let last = finish(&mut engine)?.remove(last);
    assert_eq!((last.tokens.len(), last.end), (1, Some(FinishReason::MaxLen)));
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
        on_host.remove("conv.1");
        assert!(model.snapshot_from_host(len, &on_host).unwrap_err().to_string().contains("conv.1"));
    }
    for snapshot in snapshots {
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
    let long = engine.submit(Request::new(PROMPTS[0].to_vec(), 1900))?;
    assert!(matches!(long.events.recv(), Ok(Event::Token { .. })));
    drop(long.events);
    let other = engine.clone();
    let submitted = std::thread::spawn(move || other.submit(request(1))).join().expect("a thread")?;
    let events: Vec<Event> = submitted.events.iter().collect();
    let tokens = events.iter().filter_map(|event| match event {
        Event::Token { token, .. } => Some(*token),
        _ => None,
    });
    assert_eq!(tokens.collect::<Vec<_>>(), want);
    assert!(matches!(events.last(), Some(Event::Finished { reason: FinishReason::MaxNewTokens, .. })));
    let long = engine.submit(Request::new(PROMPTS[0].to_vec(), 1900))?;
    engine.cancel(long.id);
    let last = long.events.iter().last();
    assert!(matches!(last, Some(Event::Finished { reason: FinishReason::Cancelled, .. })), "{last:?}");
    assert!(engine.submit(Request::new(vec![1; 3000], 1)).is_err());
    drop(engine);
    thread.join().expect("no panic");
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
