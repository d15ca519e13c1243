//! Random calls on one pool of sequences, as a server makes them, each checked against the tokens that should have been
//! seen, fed from the beginning to a state of their own. `CANDLE_GDN_SOAK` sets the number of calls (default 400).

use crate::golden::DEMO;
use crate::sequences::{assert_near, tokens, want};
use crate::support::{single_stream_devices, soak, Rng};
use crate::tiny::Tiny;
use candle_core::{DType, Device, Result, Tensor};
use candle_gdn_models::{CausalLm, DecodeGraph, Rings, Sequence, SequencePool, SequenceSnapshot};

const CAPACITY: usize = 5;
const MAX_LEN: usize = 150;
const BATCH: usize = 4;

struct World<'a> {
    model: &'a CausalLm,
    rng: Rng,
    pool: SequencePool,
    graph: Option<DecodeGraph>,
    sequences: Vec<(Sequence, Vec<u32>)>,
    snapshots: Vec<(SequenceSnapshot, Vec<u32>)>,
    ended: Vec<Sequence>,
    /// How often each kind of call came to pass.
    done: [usize; 11],
}

impl World<'_> {
    fn below(&mut self, n: usize) -> usize {
        (self.rng.uniform() * n as f64) as usize
    }

    /// Some sequences that have room, each with new tokens up to `most`.
    fn batch(&mut self, most: usize) -> Vec<(usize, Vec<u32>)> {
        let mut batch = vec![];
        let first = self.below(self.sequences.len().max(1));
        for i in 0..self.sequences.len() {
            let n = (first + i) % self.sequences.len();
            let room = (MAX_LEN - self.sequences[n].1.len()).min(most);
            if batch.len() < BATCH && room > 0 && self.rng.uniform() < 0.7 {
                let len = 1 + self.below(room);
                batch.push((n, tokens(&mut self.rng, len, self.model)));
            }
        }
        batch
    }

    /// The batch was fed: its logits, and what has been seen from here on.
    fn fed(&mut self, batch: Vec<(usize, Vec<u32>)>, logits: &Tensor, what: &str) -> Result<()> {
        for (row, (n, new)) in batch.into_iter().enumerate() {
            let seen = &mut self.sequences[n].1;
            seen.extend(new);
            assert_near(&logits.get(row)?.to_vec1()?, &want(self.model, seen)?, what);
        }
        Ok(())
    }

    /// All but some of what is kept to be used again, so that memory stays as it is.
    fn forget(&mut self) {
        while self.snapshots.len() > 6 {
            let old = self.below(6);
            self.snapshots.swap_remove(old);
        }
        if self.ended.len() > 100 {
            self.ended.swap_remove(0);
        }
    }

    fn call(&mut self) -> Result<()> {
        let kind = self.below(self.done.len());
        let some = self.below(self.sequences.len().max(1));
        let model = self.model;
        match kind {
            0 if self.pool.available() > 0 => {
                let s = self.pool.begin()?;
                self.sequences.push((s, vec![]));
            }
            1 if self.sequences.len() > 1 && self.rng.uniform() < 0.5 => {
                let (s, _) = self.sequences.swap_remove(some);
                self.pool.end(s)?;
                self.ended.push(s);
            }
            2 if self.pool.available() > 0 && !self.sequences.is_empty() => {
                let (s, seen) = &self.sequences[some];
                self.sequences.push((self.pool.fork(*s)?, seen.clone()));
            }
            3 if !self.sequences.is_empty() => {
                let (s, seen) = &self.sequences[some];
                self.snapshots.push((self.pool.snapshot(*s)?, seen.clone()));
                self.forget();
            }
            4 if !self.sequences.is_empty() && !self.snapshots.is_empty() => {
                let (snapshot, seen) = &self.snapshots[self.done[4] % self.snapshots.len()];
                self.pool.restore(self.sequences[some].0, snapshot)?;
                self.sequences[some].1.clone_from(seen);
            }
            5 => {
                let batch = self.batch(40);
                if batch.is_empty() {
                    return Ok(());
                }
                let logits = model.feed(&mut self.pool, &handles(&self.sequences, &batch))?;
                self.fed(batch, &logits, "feed")?;
            }
            6 => {
                let batch = self.batch(1);
                if batch.is_empty() {
                    return Ok(());
                }
                // Several steps of one batch, as long as all have room.
                let room = batch.iter().map(|(n, _)| MAX_LEN - self.sequences[*n].1.len()).min().unwrap_or(0);
                for step in 0..room.min(3) {
                    let batch: Vec<_> = batch.iter().map(|(n, new)| (*n, vec![(new[0] + step as u32) % 32])).collect();
                    let logits = match &mut self.graph {
                        Some(graph) if self.rng.uniform() < 0.7 => {
                            let batch: Vec<_> = batch.iter().map(|(n, new)| (self.sequences[*n].0, new[0])).collect();
                            graph.step(model, &mut self.pool, &batch)?
                        }
                        _ => model.feed(&mut self.pool, &handles(&self.sequences, &batch))?,
                    };
                    self.fed(batch, &logits, "a step")?;
                }
            }
            7 | 8 => {
                let batch = self.batch(if kind == 7 { 6 } else { 25 });
                if batch.is_empty() {
                    return Ok(());
                }
                let (logits, drafts) = model.verify(&mut self.pool, &handles(&self.sequences, &batch))?;
                let mut row = 0;
                let mut accepted = vec![];
                for (n, draft) in &batch {
                    let all = [&self.sequences[*n].1[..], draft].concat();
                    row += draft.len();
                    assert_near(&logits.get(row - 1)?.to_vec1()?, &want(model, &all)?, "verify");
                    accepted.push((self.rng.uniform() * (draft.len() + 1) as f64) as usize);
                }
                if self.rng.uniform() < 0.2 {
                    return Ok(()); // dropped
                }
                model.accept(&mut self.pool, drafts, &accepted)?;
                for ((n, draft), accepted) in batch.iter().zip(accepted) {
                    self.sequences[*n].1.extend(&draft[..accepted]);
                }
            }
            9 => {
                let Some((n, new)) = self.batch(MAX_LEN).pop() else { return Ok(()) };
                let s = self.sequences[n].0;
                let before = self.sequences[n].1.clone();
                let all = [&before[..], &new].concat();
                let logits = model.feed(&mut self.pool, &[(s, &new)])?;
                self.fed(vec![(n, new)], &logits, "feed")?;
                self.snapshots.push((self.pool.snapshot(s)?, all));
                self.forget();
            }
            10 if !self.ended.is_empty() => {
                let old = self.ended[self.done[10] % self.ended.len()];
                assert!(model.feed(&mut self.pool, &[(old, &[1])]).is_err());
                assert!(self.pool.end(old).is_err());
            }
            _ => return Ok(()),
        }
        self.done[kind] += 1;
        for (s, seen) in &self.sequences {
            assert_eq!(self.pool.len(*s)?, seen.len());
        }
        assert_eq!(self.pool.available(), CAPACITY - self.sequences.len());
        // Room for new ones before long.
        if let Some(full) = self.sequences.iter().position(|(_, seen)| seen.len() == MAX_LEN) {
            let (s, _) = self.sequences.swap_remove(full);
            self.pool.end(s)?;
            self.ended.push(s);
        }
        Ok(())
    }
}

fn handles<'b>(sequences: &[(Sequence, Vec<u32>)], batch: &'b [(usize, Vec<u32>)]) -> Vec<(Sequence, &'b [u32])> {
    batch.iter().map(|(n, new)| (sequences[*n].0, &new[..])).collect()
}

/// All its experts take part in every token: of many tokens there is one where two are as good as equal to a router, and
/// rounding would choose.
fn model(device: &Device) -> Result<CausalLm> {
    if device.is_cpu() {
        return Tiny::qwen3_next().set("max_position_embeddings", 512).set("num_experts_per_tok", 4).model();
    }
    let mut config = DEMO.config()?;
    config.moe.iter_mut().for_each(|moe| moe.experts_per_token = moe.num_experts);
    CausalLm::load(&config, DEMO.weights(DType::F32, device)?)
}

#[test]
fn random_calls() -> Result<()> {
    calls_on(Rings::Never)
}

#[test]
fn random_calls_on_rings() -> Result<()> {
    calls_on(Rings::Always)
}

fn calls_on(rings: Rings) -> Result<()> {
    let calls = soak().unwrap_or(400);
    single_stream_devices().iter().try_for_each(|device| {
        let model = &model(device)?;
        let mut pool = model.new_sequences_with(CAPACITY, MAX_LEN, rings)?;
        let graph = DecodeGraph::capture(model, &mut pool, BATCH);
        assert_eq!(graph.is_ok(), model.device().is_cuda(), "{:?}", graph.err().map(|e| e.to_string()));
        let mut world = World {
            model,
            rng: Rng::new(11),
            pool,
            graph: graph.ok(),
            sequences: vec![],
            snapshots: vec![],
            ended: vec![],
            done: [0; 11],
        };
        for n in 0..calls {
            world.call().map_err(|e| e.context(format!("call {n}")))?;
        }
        println!("calls by kind: {:?}", world.done);
        assert!(calls < 400 || world.done.iter().all(|&done| done > 0), "{:?}", world.done);
        // No spare state went missing: as many as drafts were ever at once.
        assert!(world.pool.size_in_bytes() <= (CAPACITY + BATCH) * world.pool.bytes_per_sequence());
        Ok(())
    })
}
