//! Engines in whose passes a call fails: what their requests get.

use crate::faults::{model, Faulty};
use crate::serving::Completions;
use candle_core::{Device, Result};
use candle_gdn_models::{Engine, EngineOptions, Event, FinishReason, Request};
use std::sync::atomic::Ordering;
use std::sync::Arc;

fn numbers(n: u32, len: u32) -> Vec<u32> {
    (0..len).map(|i| (5 * i + n) % 30).collect()
}

/// Whichever call fails, a prompt that resumes and its completion begin again, and what was made of the prompt is made once.
#[test]
fn what_resumes_begins_again() -> Result<()> {
    let group = Faulty::new(None);
    let model = model(&Device::Cpu, &group)?;
    let mut pool = model.new_sequences(1, 64)?;
    let s = pool.begin()?;
    model.feed_only(&mut pool, &[(s, &numbers(3, 11))])?;
    let resume = Some(Arc::new(pool.snapshot(s)?));
    let run = |resume: Option<_>, calls: isize| -> Result<_> {
        // No room for what is fed twice.
        let options = EngineOptions { prefill_chunk: 4, ..EngineOptions::new(2, 26) };
        let mut engine = Engine::new(&model, options)?;
        let id = engine.submit(Request { resume, snapshot_at: Some(15), ..Request::new(numbers(3, 20), 6) })?;
        engine.submit(Request::new(numbers(7, 2), 9))?;
        let (mut all, mut snapshots) = (Completions::default(), 0);
        group.after(calls, false);
        while !engine.is_idle() {
            for event in engine.step()? {
                snapshots += usize::from(matches!(event, Event::Snapshot { .. }));
                all.add(event);
            }
        }
        Ok((all.remove(id), snapshots, group.disarm()))
    };
    let (want, ..) = run(None, -1)?;
    for calls in 0.. {
        let (got, snapshots, has_failed) = run(resume.clone(), calls)?;
        assert_eq!(got, want, "call {calls}");
        assert_eq!(snapshots, 1, "call {calls}");
        if !has_failed {
            assert!(calls > 50);
            return Ok(());
        }
    }
    Ok(())
}

/// After a failure fewer requests share a pass, and take turns: beside a prompt that is fed, and alone.
#[test]
fn requests_take_turns_after_a_failure() -> Result<()> {
    let group = Faulty::new(None);
    let model = model(&Device::Cpu, &group)?;
    for prompt in [0, 40] {
        let options = EngineOptions { prefill_chunk: 4, ..EngineOptions::new(4, 64) };
        let mut engine = Engine::new(&model, options)?;
        (0..3).try_for_each(|n| engine.submit(Request::new(numbers(n, 1), 60)).map(drop))?;
        engine.step()?;
        if prompt > 0 {
            engine.submit(Request::new(numbers(4, prompt), 1))?;
        }
        group.after(0, false);
        engine.step()?;
        while engine.unfed() > usize::from(prompt > 0) {
            engine.step()?;
        }
        let mut turns = vec![];
        for _ in 0..9 {
            let tokens = engine.step()?.into_iter().filter_map(|event| match event {
                Event::Token { id, .. } => Some(id),
                _ => None,
            });
            let tokens: Vec<_> = tokens.collect();
            assert_eq!(tokens.len(), 1, "a pass of one completion");
            turns.extend(tokens);
        }
        assert_eq!(engine.unfed(), usize::from(prompt > 0), "the prompt is not fed yet");
        assert!(turns.windows(3).all(|of| of[0] != of[1] && of[1] != of[2] && of[0] != of[2]), "{turns:?}");
    }
    Ok(())
}

/// Passes of more than a few tokens have no memory: prompts are fed in smaller pieces, and so are completions that such a pass broke.
#[test]
fn prompts_are_fed_in_the_pieces_that_there_is_memory_for() -> Result<()> {
    let group = Faulty::new(None);
    let model = model(&Device::Cpu, &group)?;
    let run = |rows: usize| -> Result<_> {
        let mut engine = Engine::new(&model, EngineOptions::new(3, 64))?;
        let mut ids = vec![engine.submit(Request::new(numbers(1, 3), 30))?];
        let mut all = Completions::default();
        for step in 0.. {
            if step == 20 {
                group.rows.store(rows, Ordering::SeqCst);
                ids.push(engine.submit(Request::new(numbers(5, 50), 4))?);
                ids.push(engine.submit(Request::new(numbers(9, 20), 4))?);
            }
            engine.step()?.into_iter().for_each(|event| all.add(event));
            if engine.is_idle() {
                group.rows.store(usize::MAX, Ordering::SeqCst);
                return Ok(ids.into_iter().map(|id| all.remove(id)).collect::<Vec<_>>());
            }
        }
        Ok(vec![])
    };
    let want = run(usize::MAX)?;
    assert!(want.iter().all(|end| end.end == Some(FinishReason::MaxNewTokens)));
    for rows in [40, 6, 3, 1] {
        assert_eq!(run(rows)?, want, "at most {rows} tokens a pass");
    }
    Ok(())
}

/// There is memory for passes of one token, with which its drafts do not fit: from the start, or once it has begun.
#[test]
fn a_request_outlives_its_drafts() -> Result<()> {
    let group = Faulty::new(None);
    let model = model(&Device::Cpu, &group)?;
    let run = |draft: usize, short_from: usize| -> Result<_> {
        let mut engine = Engine::new(&model, EngineOptions { draft, ..EngineOptions::new(1, 64) })?;
        let id = engine.submit(Request::new(vec![5, 6, 5, 6], 30))?;
        let mut all = Completions::default();
        for step in 0.. {
            if step == short_from {
                group.rows.store(1, Ordering::SeqCst);
            }
            engine.step()?.into_iter().for_each(|event| all.add(event));
            if engine.is_idle() {
                break;
            }
        }
        group.rows.store(usize::MAX, Ordering::SeqCst);
        Ok(all.remove(id))
    };
    let want = run(0, usize::MAX)?;
    for short_from in [0, 1] {
        assert_eq!(run(4, short_from)?, want, "from step {short_from}");
    }
    Ok(())
}
