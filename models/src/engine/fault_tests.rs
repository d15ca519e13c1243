//! Engines in which a call fails: what each request gets, and the size of passes afterwards.

use super::graphs::{Capture, Graphs, StepSize};
use super::tests::{fail_after, left, HostGraphs, BEGIN, READ, SNAPSHOT};
use super::{DraftDepth, Engine, EngineOptions, Event, FinishReason, GraphChoice, Request, RequestId};
use crate::parallel::{Collective, LocalRank};
use crate::sampling::{Choice, Sampler};
use crate::sequences::step_graph::{Pending, SharedGraph, Step, StepGraph};
use crate::sequences::tests::{model, shard, weights, VOCAB};
use crate::sequences::{Sequence, SequencePool};
use crate::CausalLm;
use candle_core::Result;
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;

/// With steps ahead of the host, of so many drafts each.
fn engine(model: &CausalLm, options: EngineOptions, depth: usize) -> Result<Engine<&CausalLm>> {
    let options = EngineOptions { draft_depth: DraftDepth::Fixed(depth), cuda_graph: GraphChoice::On, ..options };
    Engine::with_capture(model, options, Box::new(HostGraphs))
}

fn prompt(n: u32, len: u32) -> Vec<u32> {
    (0..len).map(|i| (n + i * i + i / 7) % VOCAB as u32).collect()
}

/// What a request got: tokens, lengths of snapshots, the end.
type End = (Vec<u32>, Vec<usize>, Option<FinishReason>);

#[derive(Default)]
struct Ends(BTreeMap<RequestId, End>);

impl Ends {
    /// Adds the results of a step; returns those that are of no request.
    fn step(&mut self, engine: &mut Engine<&CausalLm>) -> Result<Vec<Event>> {
        let mut others = vec![];
        for event in engine.step()? {
            match event {
                Event::Token { id, token, .. } => self.0.entry(id).or_default().0.push(token),
                Event::Snapshot { id, snapshot } => self.0.entry(id).or_default().1.push(snapshot.len()),
                Event::Finished { id, reason } => self.0.entry(id).or_default().2 = Some(reason),
                other => others.push(other),
            }
        }
        Ok(others)
    }

    /// Until the engine is idle; the results in the order of the requests.
    fn finish(mut self, engine: &mut Engine<&CausalLm>) -> Result<Vec<End>> {
        while !engine.is_idle() {
            self.step(engine)?;
        }
        Ok(self.0.into_values().collect())
    }
}

/// Tokens of a step that ran are lost: its sequences are longer than what is known of them.
#[test]
fn tokens_that_cannot_be_read_are_drawn_again() -> Result<()> {
    let model = model(0.1)?;
    for depth in [0, 2] {
        let run = |calls: isize| -> Result<_> {
            let mut engine = engine(&model, EngineOptions::new(7, 64), depth)?;
            (0..6).try_for_each(|n| engine.submit(Request::new(prompt(n, 2), 12)).map(drop))?;
            let mut ends = Ends::default();
            fail_after(READ, calls);
            // The last read of these is that of a step in flight while a prompt comes.
            (0..4).try_for_each(|_| ends.step(&mut engine).map(drop))?;
            engine.submit(Request::new(prompt(7, 5), 12))?;
            ends.step(&mut engine)?;
            fail_after(READ, -1);
            let limit = engine.recovery.limit;
            Ok((ends.finish(&mut engine)?, limit))
        };
        let (want, limit) = run(-1)?;
        assert_eq!((want.len(), limit), (7, usize::MAX));
        for calls in 0..4 {
            let (got, limit) = run(calls)?;
            assert_eq!(got, want, "read {calls} fails at depth {depth}");
            assert_eq!(limit, 3, "half of the batch: read {calls} fails at depth {depth}");
        }
    }
    Ok(())
}

/// Drafts beyond the last position would fail a pass, and halve the batch.
#[test]
fn drafts_end_with_the_positions() -> Result<()> {
    let model = model(0.1)?;
    for depth in 1..=DraftDepth::MOST {
        for len in 3..9 {
            let mut engine = engine(&model, EngineOptions::new(2, 30), depth)?;
            [3, len].into_iter().try_for_each(|len| engine.submit(Request::new(prompt(len, len), 100)).map(drop))?;
            let ends = Ends::default().finish(&mut engine)?;
            for (end, len) in ends.iter().zip([3, len as usize]) {
                assert_eq!((end.0.len(), &end.2), (30 - len, &Some(FinishReason::MaxLen)), "{depth} drafts");
            }
            assert_eq!(engine.recovery.limit, usize::MAX, "a pass failed: {depth} drafts after {len} tokens");
        }
    }
    Ok(())
}

#[derive(Debug)]
struct NoLogprobs;

impl Capture for NoLogprobs {
    fn capture(
        &self,
        model: &CausalLm,
        pool: &mut SequencePool,
        sampler: &Sampler,
        size: StepSize,
    ) -> Result<SharedGraph> {
        match size.logprobs {
            true => candle_core::bail!("none of this size"),
            false => HostGraphs.capture(model, pool, sampler, size),
        }
    }
}

/// A graph that is needed later and cannot be captured fails no pass, where graphs are a must too.
#[test]
fn steps_without_their_graph_run() -> Result<()> {
    let model = model(0.1)?;
    let (cuda_graph, draft_depth) = (GraphChoice::On, DraftDepth::Fixed(0));
    let options = EngineOptions { cuda_graph, draft_depth, ..EngineOptions::new(2, 64) };
    let mut engine = Engine::with_capture(&model, options, Box::new(NoLogprobs))?;
    let request = Request { logprobs: Some(2), ..Request::new(prompt(1, 3), 9) };
    engine.submit(request.clone())?;
    engine.submit(Request { logprobs: None, ..request })?;
    let (mut ends, mut others) = (Ends::default(), vec![]);
    while !engine.is_idle() {
        others.extend(ends.step(&mut engine)?);
    }
    let ends = ends.finish(&mut engine)?;
    assert_eq!((ends[0].0.len(), &ends[0].2), (9, &Some(FinishReason::MaxNewTokens)));
    assert_eq!(ends[0], ends[1]);
    assert!(matches!(&others[..], [Event::NoGraph { why, .. }] if why == "none of this size"), "{others:?}");
    assert_eq!(engine.recovery.limit, usize::MAX);
    Ok(())
}

/// Graphs of the pool as it was, captured as long as `true` is inside.
#[derive(Debug)]
struct Narrow(Rc<Cell<bool>>);

#[derive(Debug)]
struct OfMemory(u64);

impl Capture for Narrow {
    fn capture(&self, _: &CausalLm, pool: &mut SequencePool, _: &Sampler, _: StepSize) -> Result<SharedGraph> {
        match self.0.get() {
            true => Ok(Rc::new(RefCell::new(OfMemory(pool.memory)))),
            false => candle_core::bail!("no memory for it"),
        }
    }
}

impl StepGraph for OfMemory {
    fn is_valid(&self, _: &CausalLm, pool: &SequencePool) -> bool {
        self.0 == pool.memory
    }

    fn is_ready(&self, _: &CausalLm, _: &SequencePool, _: &[Sequence]) -> bool {
        false
    }

    fn launch(
        &mut self,
        _: &CausalLm,
        _: &mut SequencePool,
        _: &[Sequence],
        _: Option<&[Choice]>,
    ) -> Result<Box<dyn Pending>> {
        candle_core::bail!("not launched")
    }

    fn end(&self, _: &CausalLm, _: &mut SequencePool, _: &Step<'_>) -> Result<()> {
        Ok(())
    }
}

/// A graph is dropped where the pool's memory has moved; where it cannot be captured again, the step runs without.
#[test]
fn a_graph_of_old_memory_is_captured_again_or_left_out() -> Result<()> {
    let (model, mut events, can_capture) = (model(0.1)?, vec![], Rc::new(Cell::new(true)));
    let (mut pool, sampler) = (model.new_sequences(1, 16)?, Sampler::new(model.device())?);
    let options = EngineOptions { cuda_graph: GraphChoice::On, ..EngineOptions::new(1, 16) };
    let source = Box::new(Narrow(can_capture.clone()));
    let mut graphs = Graphs::new(&options, source, &sampler, &model, &mut pool, &mut events)?;
    let size = StepSize { sequences: 1, depth: 0, logprobs: false };
    let mut valid = |pool: &mut SequencePool, events: &mut Vec<Event>| -> Result<Option<bool>> {
        let graph = graphs.find_or_capture(size, &sampler, &model, pool, events)?;
        Ok(graph.map(|graph| graph.borrow().is_valid(&model, pool)))
    };
    assert_eq!(valid(&mut pool, &mut events)?, Some(true));
    pool.grow_to(20)?;
    assert_eq!(valid(&mut pool, &mut events)?, Some(true));
    can_capture.set(false);
    assert_eq!(valid(&mut pool, &mut events)?, Some(true));
    pool.grow_to(24)?;
    assert_eq!(valid(&mut pool, &mut events)?, None);
    assert!(matches!(&events[..], [Event::NoGraph { why, .. }] if why == "no memory for it"), "{events:?}");
    Ok(())
}

/// A snapshot that was requested and cannot be made ends its request; one for the prefix cache is not missed.
#[test]
fn a_snapshot_that_fails_is_told_to_its_request() -> Result<()> {
    let model = model(0.1)?;
    let options = EngineOptions { prefix_cache: 1 << 24, prefill_chunk: 80, ..EngineOptions::new(3, 200) };
    let run = |snapshot_at: Option<usize>, calls: isize| -> Result<_> {
        let mut engine = engine(&model, options.clone(), 0)?;
        engine.submit(Request { snapshot_at, ..Request::new(prompt(1, 100), 6) })?;
        (0..2).try_for_each(|_| engine.submit(Request::new(prompt(1, 90), 4)).map(drop))?;
        fail_after(SNAPSHOT, calls);
        let ends = Ends::default().finish(&mut engine)?;
        assert_eq!(engine.recovery.limit, usize::MAX);
        Ok((ends, engine.stats().prefixes.reused))
    };
    let (want, reused) = run(Some(20), -1)?;
    assert_eq!((&want[0].1, reused), (&vec![20], 128));
    let (got, reused) = run(Some(20), 0)?;
    assert!(matches!(&got[0].2, Some(FinishReason::Failed(why)) if why.starts_with("a fault on purpose")), "{got:?}");
    assert_eq!((&got[0].0, &got[0].1), (&vec![], &vec![]));
    assert_eq!((&got[1..], reused), (&want[1..], 64), "of the second prompt");
    for (snapshot_at, calls) in [(None, 0), (Some(20), 1)] {
        let (got, _) = run(snapshot_at, calls)?;
        let ends = |ends: &[End]| ends.iter().map(|end| (end.0.clone(), end.2.clone())).collect::<Vec<_>>();
        assert_eq!(ends(&got), ends(&want));
    }
    Ok(())
}

/// Each snapshot in turn: the ranks would part where one goes on with it and the other without.
#[test]
fn a_snapshot_that_fails_on_one_rank_fails_on_all() -> Result<()> {
    let weights = weights(0.1)?;
    let run = |group: LocalRank, calls: isize| -> Result<_> {
        let is_second = group.rank() == 1;
        let model = shard(weights.clone(), Arc::new(group))?;
        let options = EngineOptions { prefix_cache: 1 << 24, prefill_chunk: 80, ..EngineOptions::new(3, 200) };
        let mut engine = Engine::new(&model, options)?;
        engine.submit(Request { snapshot_at: Some(20), snapshot_end: true, ..Request::new(prompt(1, 100), 6) })?;
        (0..2).try_for_each(|_| engine.submit(Request::new(prompt(1, 90), 4)).map(drop))?;
        fail_after(SNAPSHOT, if is_second { calls } else { -1 });
        let mut ends = Ends::default().finish(&mut engine)?;
        for (.., end) in &mut ends {
            if let Some(FinishReason::Failed(why)) = end {
                why.clear(); // each rank has its own
            }
        }
        Ok((ends, engine.stats().prefixes))
    };
    let both = |calls: isize| -> Result<Vec<_>> {
        std::thread::scope(|scope| {
            let run = &run;
            let ranks: Vec<_> =
                LocalRank::group(2).into_iter().map(|rank| scope.spawn(move || run(rank, calls))).collect();
            ranks.into_iter().map(|rank| rank.join().expect("no panic")).collect()
        })
    };
    let want = both(-1)?;
    assert_eq!((&want[0].0[0].1, want[0].1.reused), (&vec![20, 105], 128));
    for (calls, snapshots, reused) in [(0, &[][..], 64), (1, &[20, 105][..], 64), (2, &[20][..], 128)] {
        let got = both(calls)?;
        assert_eq!(got[0], got[1], "snapshot {calls}");
        assert_eq!((&got[0].0[0].1[..], got[0].1.reused), (snapshots, reused), "snapshot {calls}");
        assert_eq!(got[0].0[1..], want[0].0[1..], "snapshot {calls}");
    }
    Ok(())
}

/// States that are larger than the whole cache are not copied.
#[test]
fn what_is_too_large_is_not_copied() -> Result<()> {
    let model = model(0.1)?;
    let options = EngineOptions { prefix_cache: 1, prefix_recent: 4, ..EngineOptions::new(1, 250) };
    let mut engine = engine(&model, options, 0)?;
    fail_after(SNAPSHOT, 100);
    let mut told = 0;
    for n in 0..3 {
        engine.submit(Request::new(prompt(n, 150), 2))?;
        while !engine.is_idle() {
            told += engine.step()?.iter().filter(|event| matches!(event, Event::PrefixTooLarge { .. })).count();
        }
        assert_eq!((left(SNAPSHOT), told), (100, 1), "prompt {n}");
    }
    fail_after(SNAPSHOT, -1);
    Ok(())
}

#[derive(Debug)]
struct Refuses(bool);

impl Capture for Refuses {
    fn capture(
        &self,
        model: &CausalLm,
        pool: &mut SequencePool,
        sampler: &Sampler,
        size: StepSize,
    ) -> Result<SharedGraph> {
        match self.0 {
            true => candle_core::bail!("not on this rank"),
            false => HostGraphs.capture(model, pool, sampler, size),
        }
    }
}

/// A sequence that the second rank cannot begin, and a graph that it cannot capture.
#[test]
fn what_one_rank_cannot_do_none_does() -> Result<()> {
    let weights = weights(0.1)?;
    for (begin, refuses) in [(-1, false), (1, false), (-1, true)] {
        let (sender, results) = std::sync::mpsc::channel();
        for group in LocalRank::group(2) {
            let (weights, sender) = (weights.clone(), sender.clone());
            std::thread::spawn(move || -> Result<()> {
                let is_second = group.rank() == 1;
                let model = shard(weights, Arc::new(group))?;
                let options = EngineOptions { cuda_graph: GraphChoice::On, ..EngineOptions::new(2, 64) };
                let made = Engine::with_capture(&model, options.clone(), Box::new(Refuses(is_second && refuses)));
                let (mut engine, is_refused) = match made {
                    Ok(engine) => (engine, false),
                    Err(_) => (Engine::new(&model, EngineOptions { cuda_graph: GraphChoice::Off, ..options })?, true),
                };
                (0..3).try_for_each(|n| engine.submit(Request::new(prompt(n, 9), 5)).map(drop))?;
                fail_after(BEGIN, if is_second { begin } else { -1 });
                let ends = Ends::default().finish(&mut engine)?;
                let ends: Vec<_> = ends.into_iter().map(|(tokens, ..)| tokens).collect();
                drop(sender.send((is_refused, ends)));
                Ok(())
            });
        }
        let limit = std::time::Duration::from_secs(30);
        let got = [(); 2].map(|()| results.recv_timeout(limit).expect("no rank waits for ever"));
        assert_eq!(got[0], got[1]);
        assert_eq!(got[0].0, refuses);
        let lengths: Vec<_> = got[0].1.iter().map(Vec::len).collect();
        assert_eq!(lengths, if begin > 0 { [5, 0, 5] } else { [5; 3] });
    }
    Ok(())
}

/// The completion is whole without it.
#[test]
fn a_last_snapshot_that_fails_is_left_out() -> Result<()> {
    let model = model(0.1)?;
    let run = |calls: isize| -> Result<_> {
        let mut engine = engine(&model, EngineOptions::new(1, 200), 0)?;
        engine.submit(Request { snapshot_end: true, ..Request::new(prompt(1, 50), 6) })?;
        fail_after(SNAPSHOT, calls);
        Ends::default().finish(&mut engine)
    };
    let (want, got) = (run(-1)?, run(0)?);
    assert_eq!((want[0].1.len(), &got[0]), (1, &(want[0].0.clone(), vec![], want[0].2.clone())));
    Ok(())
}

/// Of a prompt that comes while another one is fed, what both share is fed once, whether there is a free sequence or not.
#[test]
fn a_prompt_that_comes_later_shares_its_prefix() -> Result<()> {
    let model = model(0.1)?;
    for sequences in [1, 3] {
        let options = EngineOptions { prefix_cache: 1 << 24, prefill_chunk: 32, ..EngineOptions::new(sequences, 250) };
        let mut engine = engine(&model, options, 0)?;
        let (first, mut ends) = (prompt(1, 200), Ends::default());
        engine.submit(Request::new(first.clone(), 4))?;
        ends.step(&mut engine)?;
        engine.submit(Request::new([&first[..130], &[7; 20]].concat(), 4))?;
        let (mut got, reused) = (ends.finish(&mut engine)?, engine.stats().prefixes.reused);
        assert_eq!((reused, engine.stats().prompt.tokens), (128, 200 + 22), "{sequences} sequences");
        let mut alone = self::engine(&model, EngineOptions::new(1, 250), 0)?;
        alone.submit(Request::new([&first[..130], &[7; 20]].concat(), 4))?;
        assert_eq!(got.pop(), Ends::default().finish(&mut alone)?.pop());
    }
    Ok(())
}
