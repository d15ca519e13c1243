//! An engine under load: requests come, resume earlier ones, finish and are cancelled while calls fail and memory is short at times.
//! What finishes has the tokens that it gets from an engine of its own in which nothing fails. `CANDLE_GDN_SOAK` sets the number of
//! steps (default 400); from 100,000 on, and with the test run by itself, memory is watched too.

use crate::faults::Faulty;
use crate::sequences::{tokens, want};
use crate::serving::{complete, Completion};
use crate::support::{resident, soak, Rng};
use crate::tiny::Tiny;
use candle_core::{DType, Device, Result};
use candle_gdn_models::{
    shard_of, CausalLm, Collective, Engine, EngineOptions, Event, FinishReason, Request, RequestId, SequenceSnapshot,
};
use candle_nn::VarBuilder;
use std::collections::BTreeMap;
use std::sync::atomic::Ordering;
use std::sync::Arc;

const MAX_LEN: usize = 200;
/// Logits that differ by less are a tie, which rounding decides: a batch adds in another order.
const TIE: f32 = 1e-4;

/// All its experts take part in every token, so that rounding chooses none.
fn model(group: &Arc<Faulty>) -> Result<CausalLm> {
    let tiny = Tiny::qwen3_next().set("max_position_embeddings", MAX_LEN).set("num_experts_per_tok", 4);
    let (config, group) = (tiny.model_config()?, group.clone() as Arc<dyn Collective>);
    let weights = shard_of(VarBuilder::from_tensors(tiny.weights, DType::F32, &Device::Cpu), &config, &*group)?;
    CausalLm::loader(&config).group(group).load(weights)
}

struct Asked {
    request: Request,
    want: Completion,
    got: Vec<u32>,
    is_cancelled: bool,
}

struct World<'a> {
    /// Of the same weights as the engine's; none of its calls fails.
    reference: &'a CausalLm,
    group: Arc<Faulty>,
    engine: Engine<&'a CausalLm>,
    rng: Rng,
    /// What prompts begin with.
    documents: Vec<Vec<u32>>,
    asked: BTreeMap<RequestId, Asked>,
    snapshots: Vec<(Vec<u32>, Arc<SequenceSnapshot>)>,
    /// Steps for which memory is short yet.
    short: usize,
    done: Done,
}

#[derive(Debug, Default)]
struct Done {
    completed: usize,
    resumed: usize,
    cancelled: usize,
    failed: usize,
    failed_calls: usize,
    ties: usize,
}

impl World<'_> {
    fn below(&mut self, n: usize) -> usize {
        (self.rng.uniform() * n as f64) as usize
    }

    fn ask(&mut self) -> Result<()> {
        let resumes = !self.snapshots.is_empty() && self.below(4) == 0;
        let (first, resume) = match resumes {
            true => {
                let n = self.below(self.snapshots.len());
                let (seen, snapshot) = self.snapshots[n].clone();
                (seen, Some(snapshot))
            }
            false => {
                let (n, len) = (self.below(self.documents.len()), self.below(self.documents[0].len()));
                (self.documents[n][..len].to_vec(), None)
            }
        };
        let own = 1 + self.below(20);
        let prompt = [first, tokens(&mut self.rng, own, self.reference)].concat();
        let request = Request {
            stop: [self.below(64) as u32].into(),
            logprobs: (self.below(8) == 0).then_some(2),
            ..Request::new(prompt, 1 + self.below(40))
        };
        let (want, _) =
            complete(self.reference, EngineOptions::new(1, MAX_LEN), std::slice::from_ref(&request), false)?;
        let want = want.into_iter().next().expect("a completion");
        let snapshot_at = (self.below(3) == 0).then(|| 1 + self.below(request.tokens.len()));
        let request = Request { resume, snapshot_at, snapshot_end: self.below(6) == 0, ..request };
        self.done.resumed += usize::from(request.resume.is_some());
        let id = self.engine.submit(request.clone())?;
        self.asked.insert(id, Asked { request, want, got: vec![], is_cancelled: false });
        Ok(())
    }

    fn step(&mut self) -> Result<()> {
        if self.engine.waiting() < 4 && self.below(2) == 0 {
            self.ask()?;
        }
        if self.below(60) == 0 && !self.asked.is_empty() {
            let n = self.below(self.asked.len());
            let (id, asked) = self.asked.iter_mut().nth(n).expect("one of them");
            asked.is_cancelled = self.engine.cancel(*id)?;
        }
        if self.below(100) == 0 {
            let calls = self.below(80) as isize;
            self.done.failed_calls += usize::from(self.group.disarm());
            self.group.after(calls, false);
        }
        if self.short > 0 {
            self.short -= 1;
        } else if self.below(200) == 0 {
            self.short = 1 + self.below(20);
            let rows = [1, 3, 8, 20][self.below(4)];
            self.group.rows.store(rows, Ordering::SeqCst);
        } else {
            self.group.rows.store(usize::MAX, Ordering::SeqCst);
        }
        self.engine.step()?.into_iter().try_for_each(|event| self.take(event))
    }

    fn take(&mut self, event: Event) -> Result<()> {
        match event {
            Event::Token { id, token, logprobs } => {
                let asked = self.asked.get_mut(&id).expect("a token of a request that goes on");
                assert_eq!(logprobs.is_some(), asked.request.logprobs.is_some());
                asked.got.push(token);
            }
            Event::Snapshot { id, snapshot } => {
                let asked = &self.asked[&id];
                if let Some(at) = asked.request.snapshot_at.filter(|at| *at == snapshot.len() && *at <= 160) {
                    self.snapshots.push((asked.request.tokens[..at].to_vec(), snapshot));
                    let old = self.snapshots.len().saturating_sub(6);
                    self.snapshots.drain(..old);
                }
            }
            Event::Finished { id, reason } => {
                let asked = self.asked.remove(&id).expect("finished once");
                let len = asked.got.len();
                let is_whole = match &reason {
                    FinishReason::Cancelled => {
                        assert!(asked.is_cancelled, "{id:?}");
                        self.done.cancelled += 1;
                        false
                    }
                    FinishReason::Failed(why) => {
                        assert!(why.contains("on purpose"), "{why}");
                        self.done.failed += 1;
                        false
                    }
                    _ => true,
                };
                if let Some(at) = (0..len).find(|&at| asked.want.tokens.get(at) != Some(&asked.got[at])) {
                    self.is_a_tie(&asked, at)?;
                } else if is_whole {
                    assert_eq!((len, Some(reason)), (asked.want.tokens.len(), asked.want.end), "{id:?}");
                }
                self.done.completed += usize::from(is_whole);
            }
            _ => {}
        }
        Ok(())
    }

    /// The token at `at` is as good as the one that was expected.
    fn is_a_tie(&mut self, asked: &Asked, at: usize) -> Result<()> {
        let logits = want(self.reference, &[&asked.request.tokens[..], &asked.got[..at]].concat())?;
        let (best, got) = (logits.iter().copied().fold(f32::MIN, f32::max), logits[asked.got[at] as usize]);
        assert!(best - got < TIE, "token {at} of {:?}, {:?} for {:?}", asked.request, asked.got, asked.want.tokens);
        self.done.ties += 1;
        Ok(())
    }
}

#[test]
fn completions_under_load_are_as_alone() -> Result<()> {
    let steps = soak().unwrap_or(400);
    for draft in [0, 3] {
        let group = Faulty::new(None);
        let (served, reference) = (model(&group)?, model(&Faulty::new(None))?);
        let options = EngineOptions {
            prefill_chunk: 24,
            draft,
            prefix_cache: 1 << 17,
            prefix_recent: 2,
            ..EngineOptions::new(5, MAX_LEN)
        };
        let mut rng = Rng::new(1 + draft as u64);
        let documents = (0..3).map(|_| tokens(&mut rng, 150, &reference)).collect();
        let mut world = World {
            reference: &reference,
            group,
            engine: Engine::new(&served, options)?,
            rng,
            documents,
            asked: BTreeMap::new(),
            snapshots: vec![],
            short: 0,
            done: Done::default(),
        };
        let mut half = None;
        for n in 0..steps / 2 {
            world.step().map_err(|e| e.context(format!("step {n}")))?;
            half = if n == steps / 4 { resident() } else { half };
        }
        let end = resident();
        world.done.failed_calls += usize::from(world.group.disarm());
        world.group.rows.store(usize::MAX, Ordering::SeqCst);
        while !world.engine.is_idle() {
            let events = world.engine.step()?;
            events.into_iter().try_for_each(|event| world.take(event))?;
        }
        println!("draft {draft}: {:?}, resident {half:?} -> {end:?}", world.done);
        assert!(world.asked.is_empty(), "each has ended");
        let Done { completed, resumed, cancelled, failed, failed_calls, .. } = world.done;
        assert!(steps < 400 || [completed, resumed, cancelled, failed_calls].iter().all(|n| *n > 0));
        // Two calls that fail while a request is alone, before it draws a token, end it.
        assert!(failed * 10 <= completed, "{failed} failed, {completed} completed");
        if let (Some(half), Some(end), true) = (half, end, steps >= 100_000) {
            assert!(end < half + (16 << 20), "resident {half} -> {end} bytes");
        }
    }
    Ok(())
}
