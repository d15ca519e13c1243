//! The engine with steps ahead of the host, and the parts that need no model.

use super::core::Context;
use super::graphs::{Capture, StepSize};
use super::prefixes::Prefixes;
use super::stats::{DraftTally, EngineStats, PrefixTally};
use super::{DraftDepth, Engine, EngineOptions, Event, FinishReason, GraphChoice, Request, RequestId};
use crate::drafting::lookup::look_up;
use crate::sampling::{Choice, Logprobs, Sampler, Sampling, Token};
use crate::sequences::step_graph::{Pending, SharedGraph, Step, StepGraph};
use crate::sequences::tests::{model, VOCAB};
use crate::sequences::{Sequence, SequencePool};
use crate::CausalLm;
use candle_core::Result;
use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::rc::Rc;

/// Calls that may fail: an engine makes a snapshot, reads the tokens of a step, or begins a sequence.
pub(super) const SNAPSHOT: usize = 0;
pub(super) const READ: usize = 1;
pub(super) const BEGIN: usize = 2;

thread_local! {
    /// Of each, how many come before the one that fails; negative: none does.
    static LEFT: [Cell<isize>; 3] = const { [Cell::new(-1), Cell::new(-1), Cell::new(-1)] };
}

/// Calls that come before the one that fails.
pub(super) fn left(kind: usize) -> isize {
    LEFT.with(|left| left[kind].get())
}

pub(super) fn fail_after(kind: usize, calls: isize) {
    LEFT.with(|left| left[kind].set(calls));
}

/// Fails where it is time.
pub(super) fn fault(kind: usize) -> Result<()> {
    match LEFT.with(|left| left[kind].replace((left[kind].get() - 1).max(-1))) {
        0 => candle_core::bail!("a fault on purpose"),
        _ => Ok(()),
    }
}

/// The results of a run: each request's tokens, snapshots' lengths, end and log-probabilities.
type Ends = HashMap<RequestId, (Vec<u32>, Vec<usize>, Option<FinishReason>, Vec<Reported>)>;

/// Log-probabilities, which are the same within rounding.
#[derive(Clone, Debug)]
struct Reported(Option<Box<Logprobs>>);

impl PartialEq for Reported {
    fn eq(&self, other: &Self) -> bool {
        let near = |a: f32, b: f32| (a - b).abs() < 1e-4;
        match (&self.0, &other.0) {
            (None, None) => true,
            (Some(a), Some(b)) => {
                let all = |reported: &Logprobs| {
                    [reported.token].into_iter().chain(reported.likeliest.iter().map(|(_, x)| *x)).collect()
                };
                let (a, b): (Vec<f32>, Vec<f32>) = (all(a), all(b));
                // Ids of equal ones are rounding's choice.
                a.len() == b.len() && a.iter().zip(b).all(|(a, b)| near(*a, b))
            }
            _ => false,
        }
    }
}

fn note(events: Vec<Event>, all: &mut Ends) {
    for event in events {
        match event {
            Event::Token { id, token, logprobs } => {
                let all = all.entry(id).or_default();
                all.0.push(token);
                all.3.push(Reported(logprobs));
            }
            Event::Snapshot { id, snapshot } => all.entry(id).or_default().1.push(snapshot.len()),
            Event::Finished { id, reason } => {
                let end = &mut all.entry(id).or_default().2;
                assert_eq!(end.replace(reason), None, "finished twice");
            }
            _ => {}
        }
    }
}

/// Requests that come and are cancelled while others run, end by a token, by their number or by the room, draw or do not, and
/// want snapshots or do not.
#[test]
fn a_step_ahead_changes_nothing() -> Result<()> {
    let model = model(0.1)?;
    let request = |n: u32| {
        let sampling = match n % 3 {
            0 => Sampling::default(),
            1 => Sampling { temperature: 0.9, top_k: 9, repeat_penalty: 1.4, repeat_last_n: 5, ..Sampling::default() },
            _ => Sampling {
                temperature: 1.2,
                top_p: 0.8,
                presence_penalty: 0.6,
                frequency_penalty: 0.2,
                ..Sampling::default()
            },
        };
        let logprobs = [None, None, Some(3), Some(0), Some(20)][n as usize % 5];
        // One in 24 tokens, or some, or none.
        let stop = (0..[1, 0, 4][n as usize / 2 % 3]).map(|i| (n + 5 * i) % VOCAB as u32).collect();
        let prompt = (0..1 + n % 7).map(|i| (n + i * i) % VOCAB as u32).collect();
        let most = [50, 3, 17, 1, 2][n as usize % 5];
        Request { sampling, stop, seed: n.into(), snapshot_end: n % 8 == 5, logprobs, ..Request::new(prompt, most) }
    };
    let (mut drafted, mut accepted) = (0, 0);
    let mut run = |sequences: usize, how: Steps, cancelled: &[(usize, u64)]| {
        let options = EngineOptions { prefill_chunk: 8, ..EngineOptions::new(sequences, 40) };
        let mut engine = match how {
            Steps::Waiting => Engine::new(&model, options)?,
            Steps::Graphs(draft_depth) => {
                let options = EngineOptions { draft_depth, cuda_graph: GraphChoice::On, ..options };
                Engine::with_capture(&model, options, Box::new(HostGraphs))?
            }
        };
        let (mut all, mut ids) = (Ends::new(), vec![]);
        for step in 0.. {
            // New ones come now and then.
            if step % 5 == 0 && ids.len() < 40 {
                ids.push(engine.submit(request(ids.len() as u32))?);
                ids.push(engine.submit(request(ids.len() as u32))?);
            }
            for (_, n) in cancelled.iter().filter(|(at, _)| *at == step) {
                if let Some(id) = ids.get(*n as usize) {
                    engine.cancel(*id)?;
                }
            }
            note(engine.step()?, &mut all);
            if engine.is_idle() && ids.len() == 40 {
                // All slots are free again.
                (0..sequences).try_for_each(|_| engine.submit(Request::new(vec![1], 2)).map(drop))?;
                engine.step()?;
                assert_eq!(engine.waiting(), 0);
                if let Steps::Graphs(_) = how {
                    drafted += engine.stats().head.drafted[1];
                    accepted += engine.stats().head.accepted[1];
                }
                break;
            }
        }
        Ok::<_, candle_core::Error>(ids.into_iter().map(|id| all.remove(&id).unwrap()).collect::<Vec<_>>())
    };
    let want = run(1, Steps::Waiting, &[])?;
    let ended = |reason: FinishReason| want.iter().filter(|end| end.2.as_ref() == Some(&reason)).count();
    assert!(ended(FinishReason::Stop) > 0 && ended(FinishReason::MaxLen) > 1 && ended(FinishReason::MaxNewTokens) > 4);
    for sequences in [1, 3, 6] {
        let fixed = [0, 1, 2, 3, 7].map(|depth| Steps::Graphs(DraftDepth::Fixed(depth)));
        for how in [Steps::Waiting, Steps::Graphs(DraftDepth::Auto)].into_iter().chain(fixed) {
            assert_eq!(run(sequences, how, &[])?, want, "{sequences} sequences, {how:?}");
            let cancelled = [(3, 0), (7, 2), (12, 3), (21, 6), (22, 7), (40, 12), (41, 15), (60, 20)];
            let got = run(sequences, how, &cancelled)?;
            for (n, (got, want)) in got.iter().zip(&want).enumerate() {
                match &got.2 {
                    Some(FinishReason::Cancelled) => assert_eq!(got.0, want.0[..got.0.len()], "request {n}, {how:?}"),
                    _ => assert_eq!(got, want, "request {n}, {how:?}"),
                }
            }
        }
    }
    println!("{accepted} of {drafted} accepted at depth 2");
    assert!(accepted > 30);
    Ok(())
}

/// How decode steps run.
#[derive(Clone, Copy, Debug)]
enum Steps {
    /// The host sees the tokens of a step before the next one.
    Waiting,
    /// Steps run ahead of the host, with so many drafts.
    Graphs(DraftDepth),
}

/// Graphs whose steps run on the host as they are launched: before the engine reads the tokens of the step before.
#[derive(Debug)]
pub(super) struct HostGraphs;

impl Capture for HostGraphs {
    fn capture(&self, _: &CausalLm, _: &mut SequencePool, sampler: &Sampler, size: StepSize) -> Result<SharedGraph> {
        let (sampler, depth) = (sampler.clone(), size.depth);
        Ok(Rc::new(RefCell::new(HostStep { sampler, depth, sequences: vec![], choices: vec![] })))
    }
}

#[derive(Debug)]
struct HostStep {
    sampler: Sampler,
    depth: usize,
    sequences: Vec<Sequence>,
    /// How each sequence chooses its next token.
    choices: Vec<Choice>,
}

#[derive(Debug)]
struct HostTokens(Vec<Vec<Token>>);

impl Pending for HostTokens {
    fn read(&self) -> Result<Vec<Vec<Token>>> {
        fault(READ)?;
        Ok(self.0.clone())
    }
}

/// A choice for the token after `id`, as a kernel advances its rows.
fn advance(choice: &mut Choice, id: u32) {
    choice.row.index += u64::from(choice.row.scale > 0.);
    if choice.row.window > 0 {
        choice.recent.push(choice.last);
        choice.row.seen += 1;
        if choice.recent.len() >= choice.row.window as usize {
            choice.recent.remove(0);
        }
    }
    choice.last = id;
}

impl StepGraph for HostStep {
    fn is_ready(&self, _: &CausalLm, _: &SequencePool, sequences: &[Sequence]) -> bool {
        self.sequences == sequences
    }

    fn launch(
        &mut self,
        model: &CausalLm,
        pool: &mut SequencePool,
        sequences: &[Sequence],
        choices: Option<&[Choice]>,
    ) -> Result<Box<dyn Pending>> {
        match choices {
            Some(choices) => (self.sequences, self.choices) = (sequences.to_vec(), choices.to_vec()),
            None => assert_eq!(self.sequences, sequences),
        }
        let batch = sequences.iter().zip(&self.choices).map(|(s, choice)| (*s, choice.last, self.depth));
        let drafts = match self.depth {
            0 => vec![vec![]; sequences.len()],
            _ => model.draft(pool, &batch.collect::<Vec<_>>())?.0,
        };
        let fed: Vec<Vec<u32>> =
            self.choices.iter().zip(&drafts).map(|(choice, draft)| [&[choice.last], &draft[..]].concat()).collect();
        let batch: Vec<_> = sequences.iter().copied().zip(fed.iter().map(Vec::as_slice)).collect();
        let (logits, verified) = match self.depth {
            0 => (model.feed(pool, &batch)?, None),
            _ => model.verify(pool, &batch).map(|(logits, verified)| (logits, Some(verified)))?,
        };
        let mut choices = vec![];
        for (choice, draft) in self.choices.iter().zip(&drafts) {
            let mut choice = choice.clone();
            choices.push(choice.clone());
            for id in draft {
                advance(&mut choice, *id);
                choices.push(choice.clone());
            }
        }
        let mut rows = self.sampler.draw(&logits, &choices)?.into_iter();
        let mut drawn: Vec<Vec<Token>> = vec![];
        for (choice, draft) in self.choices.iter_mut().zip(&drafts) {
            let rows: Vec<Token> = rows.by_ref().take(1 + draft.len()).collect();
            let id = |token: &Token| token.as_ref().map_or(0, |drawn| drawn.id);
            let accepted = 1 + rows.iter().zip(draft).take_while(|(row, draft)| id(row) == **draft).count();
            rows[..accepted].iter().for_each(|row| advance(choice, id(row)));
            drawn.push(rows[..accepted].to_vec());
        }
        if let Some(verified) = verified {
            model.accept(pool, verified, &drawn.iter().map(Vec::len).collect::<Vec<_>>())?;
        }
        Ok(Box::new(HostTokens(drawn)))
    }

    fn end(&self, _: &CausalLm, _: &mut SequencePool, _: &Step<'_>) -> Result<()> {
        Ok(())
    }
}

#[test]
fn look_up_follows_the_latest_match() {
    assert_eq!(look_up(&[1, 2, 3, 9, 8, 5, 1, 2, 3], 2), [9, 8]);
    assert_eq!(look_up(&[1, 2, 3, 9, 4, 2, 3, 7, 7, 2, 3], 1), [7], "two tokens, the later place");
    assert_eq!(look_up(&[1, 2, 3, 7, 9, 2, 3, 8, 1, 2, 3], 1), [7], "three tokens go before a later two");
    assert_eq!(look_up(&[5, 6, 5], 4), [6, 5, 6, 5], "in a circle");
    assert_eq!(look_up(&[5, 5], 3), [5, 5, 5]);
    assert!(look_up(&[1, 2, 3], 3).is_empty(), "nothing like it before");
    assert!(look_up(&[1, 1], 0).is_empty());
    assert_eq!((look_up(&[], 3), look_up(&[1], 3)), (vec![], vec![]));
    let tally = DraftTally { drafted: 60, accepted: 34, tokens: 57, steps: 30 };
    assert_eq!(tally.to_string(), "draft: 34 of 60 tokens accepted (57 %), 1.9 tokens a step");
    assert_eq!(DraftTally::default().to_string(), "draft: 0 of 0 tokens accepted (0 %), 0.0 tokens a step");
}

#[test]
fn prompts_wait_for_what_they_share() {
    let mut prefixes = Prefixes::new(2, 100, 0).unwrap();
    let (a, b) = ([1, 2, 3, 4, 5], [1, 2, 3, 4]);
    // Four tokens agree, but one of `b` must be fed.
    assert_eq!(prefixes.cuts(&a, 0, [&b[..], &a[..], &[7, 8]].into_iter()), [2, 4]);
    assert_eq!(prefixes.cuts(&a, 2, [&b[..]].into_iter()), [] as [usize; 0]);
    assert!(prefixes.will_keep(&b, [(&a[..], &[2, 4][..])].into_iter()));
    assert!(!prefixes.will_keep(&b, [(&a[..], &[4][..])].into_iter()), "not kept");
    assert_eq!(prefixes.find(&a), None);
    let mut events = vec![];
    prefixes.keep(&a[..2], "two", vec![(2, 60)], &mut events).unwrap();
    assert!(!prefixes.will_keep(&b, [(&a[..], &[2, 4][..])].into_iter()), "it is there");
    assert_eq!(prefixes.find(&b), Some((2, &"two")));
    prefixes.keep(&a[..4], "four", vec![(4, 1 << 20)], &mut events).unwrap();
    assert!(matches!(&events[..], [Event::PrefixKept { .. }, Event::PrefixTooLarge { tokens: 4, .. }]), "{events:?}");
    assert_eq!(prefixes.tally(), PrefixTally { reused: 2, asked: 9, hits: 1, misses: 1, bytes: 60 });
    let mut none = Prefixes::new(2, 0, 0).unwrap();
    none.keep(&a[..2], 0, vec![(0, 1)], &mut events).unwrap();
    assert_eq!(none.find(&a), None);
    assert!(!none.will_keep(&b, [(&a[..], &[2][..])].into_iter()));
}

/// Two states are kept of one prompt: the keys and values of the shorter prefix are those of the longer one too.
#[test]
fn shared_keys_and_values_count_once() -> Result<()> {
    let (model, prompt) = (model(0.1)?, (0..150).map(|i| i % VOCAB as u32).collect::<Vec<_>>());
    let draft_depth = DraftDepth::Fixed(0);
    let options = EngineOptions { prefix_cache: 1 << 24, draft_depth, ..EngineOptions::new(3, 200) };
    let mut engine = Engine::new(&model, options)?;
    [150, 140, 70].into_iter().try_for_each(|len| engine.submit(Request::new(prompt[..len].to_vec(), 1)).map(drop))?;
    while !engine.is_idle() {
        engine.step()?;
    }
    let mut pool = model.new_sequences(1, 200)?;
    pool.drop_head();
    let s = pool.begin()?;
    let mut snapshot = |tokens: &[u32]| {
        model.feed_only(&mut pool, &[(s, tokens)])?;
        pool.snapshot(s)
    };
    let (short, long) = (snapshot(&prompt[..64])?, snapshot(&prompt[64..128])?);
    let (events, stats) = (&mut Vec::new(), &mut EngineStats::default());
    let core = Context { model: &model, pool: &mut pool, events, stats };
    assert_eq!([64, 128].map(|tokens| core.bytes_of(tokens)), [&short, &long].map(|copy| copy.size_in_bytes()));
    let prefixes = engine.stats().prefixes;
    assert_eq!((prefixes.reused, prefixes.bytes), (128 + 64, short.size_in_bytes() + long.bytes_added()));
    Ok(())
}

#[test]
fn the_last_prompts_stand_for_those_to_come() {
    let mut prefixes = Prefixes::<u8>::new(2, 100, 2).unwrap();
    let none = || [].into_iter();
    assert_eq!(prefixes.cuts(&[1, 2, 3, 4, 5], 0, none()), [4], "its own end");
    assert_eq!(prefixes.cuts(&[1, 2, 7, 8, 9, 10], 0, none()), [2, 4, 6], "where it leaves the first one, and its end");
    assert_eq!(prefixes.cuts(&[5, 6, 7], 0, none()), [2]);
    assert_eq!(prefixes.cuts(&[1, 2, 3, 4, 6], 0, none()), [2, 4]);
    assert_eq!(prefixes.cuts(&[5, 6, 8, 9, 1], 0, none()), [2, 4]);
    let last = [1, 2, 7, 8, 1, 1, 1];
    assert_eq!(prefixes.cuts(&last, 0, none()), [2, 6], "not 4: the second one is forgotten");
    assert_eq!(prefixes.cuts(&last, 6, none()), [] as [usize; 0]);
    assert_eq!(prefixes.cuts(&[1, 2, 9, 9, 9], 0, none()), [2, 4]);
    assert_eq!(prefixes.cuts(&[1, 2, 3, 4, 9], 0, none()), [2, 4]);
    assert_eq!(prefixes.cuts(&[1, 2, 3, 4, 5, 6, 7], 0, none()), [4, 6], "the most");
}

#[test]
fn what_is_kept_and_dropped_is_reported() {
    let mut prefixes = Prefixes::new(2, 100, 0).unwrap();
    let mut reported = |prefix: &[u32], bytes| {
        let (mut events, parts) = (vec![], vec![(prefix.iter().sum::<u32>() as usize, bytes)]);
        prefixes.keep(prefix, (), parts, &mut events).unwrap();
        let prefixes = events.into_iter().map(|event| match event {
            Event::PrefixKept { tokens } => (true, tokens),
            Event::PrefixDropped { tokens } => (false, tokens),
            Event::PrefixTooLarge { tokens, bytes } => (false, vec![tokens as u32, bytes as u32]),
            other => panic!("{other:?}"),
        });
        prefixes.collect::<Vec<_>>()
    };
    assert_eq!(reported(&[1, 2], 40), [(true, vec![1, 2])]);
    assert_eq!(reported(&[1, 2, 3, 4], 40), [(true, vec![1, 2, 3, 4])]);
    assert_eq!(reported(&[1, 2], 50), [], "in its own place");
    assert_eq!(reported(&[5, 6], 40), [(false, vec![1, 2, 3, 4]), (true, vec![5, 6])]);
    assert_eq!(reported(&[5, 6], 101), [(false, vec![5, 6]), (false, vec![2, 101])], "too large now");
    assert_eq!(reported(&[5, 6], 101), [], "said once");
}
