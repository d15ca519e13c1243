//! The engine on the demo checkpoint: what each request gets, whatever else runs.

mod handle;

use candle_core::{DType, Device, Result, Tensor};
use candle_gdn_models::{CausalLm, Engine, EngineOptions, Event, FinishReason, Request, Sampling};
use candle_gdn_models_testing::golden::DEMO;
use candle_gdn_models_testing::serving::{finish, Completion};
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

/// A prompt that ends with a block is kept whole, for a longer one; of the same prompt the last token is fed.
#[test]
fn a_prompt_of_whole_blocks_is_kept_whole() -> Result<()> {
    let model = model()?;
    let options = EngineOptions { prefix_cache: 1 << 24, prefix_recent: 1, ..EngineOptions::new(1, 200) };
    let mut engine = Engine::new(&model, options)?;
    let prompt = |len: u32| (0..len).map(|i| 7 * i % 500).collect::<Vec<_>>();
    for (len, reused) in [(128, 0), (138, 128), (128, 128 + 64)] {
        let id = engine.submit(Request::new(prompt(len), 5))?;
        assert_eq!(finish(&mut engine)?.remove(id).tokens, alone(&model, Request::new(prompt(len), 5))?, "{len}");
        assert_eq!(engine.stats().prefixes.reused, reused, "{len}");
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
    for len in [20, 19, 18] {
        let last = engine.submit(Request::new(vec![1; len], 9))?;
        let last = finish(&mut engine)?.remove(last);
        assert_eq!((last.tokens.len(), last.end), (20 - len, Some(FinishReason::MaxLen)));
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

/// One of no tokens, which has no keys and values.
#[test]
fn an_empty_snapshot_comes_back_from_the_host() -> Result<()> {
    let model = model()?;
    let mut pool = model.new_sequences(1, 20)?;
    let s = pool.begin()?;
    let empty = model.snapshot_from_host(0, &pool.snapshot(s)?.to_host()?)?;
    let want = model.feed(&mut pool, &[(s, PROMPTS[0])])?.to_vec2::<f32>()?;
    pool.restore(s, &empty)?;
    assert_eq!((pool.len(s)?, model.feed(&mut pool, &[(s, PROMPTS[0])])?.to_vec2::<f32>()?), (0, want));
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
        // It waits there until it is restored.
        let there = &snapshots[snapshots.len() - 1];
        assert_eq!((there.size_in_bytes(), there.to_host()?.len()), (0, on_host.len()));
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
