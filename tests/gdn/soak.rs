//! Thousands of random calls on one pool, as a server makes them, against a plain model: the tokens of every sequence,
//! fed from the beginning to a state of their own.
//!
//! `CANDLE_GDN_SOAK` sets the number of calls (default 2000); with more, and the test run by itself, memory is watched too.

use crate::pool::{poison_pool, poison_slot};
use crate::random_layer::{layer, of_128, parts, rows, small};
use crate::support::{devices, rel_rms, resident, soak, values, Rng};
use candle_core::{DType, Device, Tensor};
use candle_gdn::{Accepted, CuSeqlens, GatedDeltaNet, GdnState, PoolOptions, Slots, StatePool, NO_SLOT};

const CAPACITY: usize = 12;
const VOCABULARY: usize = 50;
const LONGEST: usize = 260;
const BLOCK: usize = 64;

/// f32 kernels are within 1e-5 of exact arithmetic, and here are two of them.
const BOUND: f64 = 2e-5;

#[derive(Clone)]
struct Sequence {
    slot: u32,
    tokens: Vec<u32>,
    /// Of the tokens from `y_from` on; those before came out of a cache or a snapshot.
    y: Vec<f64>,
    y_from: usize,
}

struct World {
    layer: GatedDeltaNet,
    device: Device,
    rng: Rng,
    embedding: Vec<Vec<f32>>,
    /// Prefixes that prompts share.
    documents: Vec<Vec<u32>>,
    pool: StatePool,
    /// Slots that no sequence has; the last is the next.
    free: Vec<u32>,
    sequences: Vec<Sequence>,
    snapshots: Vec<(GdnState, Vec<u32>)>,
    /// The states after some prefixes; the oldest goes first.
    cache: Vec<(Vec<u32>, GdnState)>,
    hits: usize,
    worst: f64,
    /// How often each kind of call came to pass.
    done: [usize; 7],
    /// The calls so far: slots read and written, and tokens.
    calls: Vec<String>,
}

impl World {
    fn new(device: &Device, seed: u64, ring: bool) -> Self {
        let config = if device.is_cuda() { of_128() } else { small() };
        let layer = layer(&config, DType::F32, device, seed);
        let mut rng = Rng::new(seed);
        let embedding = rows(&mut rng, VOCABULARY, config.hidden_size);
        let pool = match ring {
            true => layer.new_pool_with(CAPACITY, &PoolOptions::default().dtype(DType::F32).ring()).unwrap(),
            false => layer.new_pool(CAPACITY).unwrap(),
        };
        poison_pool(&pool);
        let mut world = Self {
            layer,
            device: device.clone(),
            rng,
            embedding,
            documents: vec![],
            pool,
            free: (0..CAPACITY as u32).rev().collect(),
            sequences: vec![],
            snapshots: vec![],
            cache: vec![],
            hits: 0,
            worst: 0.0,
            done: [0; 7],
            calls: vec![],
        };
        world.documents = (0..3).map(|_| world.draw(200)).collect();
        world
    }

    /// Below `n`.
    fn below(&mut self, n: usize) -> usize {
        ((self.rng.uniform() * n as f64) as usize).min(n.saturating_sub(1))
    }

    fn draw(&mut self, n: usize) -> Vec<u32> {
        (0..n).map(|_| self.below(VOCABULARY) as u32).collect()
    }

    fn x(&self, tokens: &[u32]) -> Tensor {
        let hidden = self.embedding[0].len();
        if tokens.is_empty() {
            return Tensor::zeros((1, hidden), DType::F32, &self.device).unwrap().narrow(0, 0, 0).unwrap();
        }
        let flat: Vec<f32> = tokens.iter().flat_map(|t| self.embedding[*t as usize].clone()).collect();
        Tensor::from_vec(flat, (tokens.len(), hidden), &self.device).unwrap()
    }

    fn slots(&self, read: &[u32], write: &[u32]) -> Slots {
        match read == write {
            true => Slots::new(read, &self.device).unwrap(),
            false => Slots::from_to(read, write, &self.device).unwrap(),
        }
    }

    /// A few of the sequences, in any order.
    fn choose(&mut self) -> Vec<usize> {
        let mut all: Vec<usize> = (0..self.sequences.len()).collect();
        for i in (1..all.len()).rev() {
            let j = self.below(i + 1);
            all.swap(i, j);
        }
        let count = self.below(all.len() + 1);
        all.truncate(count.max(1));
        all
    }

    /// A prompt: some of a document, some tokens of its own. What the cache has of it is not fed again.
    fn begin(&mut self) {
        if self.free.is_empty() || self.sequences.len() >= CAPACITY - 3 {
            return;
        }
        let document = self.below(3);
        let shared = self.below(200);
        let own = 1 + self.below(40);
        let mut tokens = self.documents[document][..shared].to_vec();
        tokens.extend(self.draw(own));
        let slot = self.free.pop().unwrap();
        let known = self.cache.iter().filter(|(prefix, _)| tokens[..tokens.len() - 1].starts_with(prefix));
        let done = match known.max_by_key(|(prefix, _)| prefix.len()) {
            Some((prefix, state)) => {
                self.pool.restore(slot, state).unwrap();
                self.hits += 1;
                prefix.len()
            }
            None => {
                self.pool.zero(slot).unwrap();
                0
            }
        };
        let slots = Slots::new(&[slot], &self.device).unwrap();
        self.calls.push(format!("begin {slot}: {done} known, {} fed", tokens.len() - done));
        // Cut where a state goes to the cache.
        let mut y = vec![];
        for start in (done..tokens.len()).step_by(BLOCK) {
            let end = tokens.len().min(start + BLOCK);
            let cu = CuSeqlens::from_lengths(&[end - start], &self.device).unwrap();
            let x = self.x(&tokens[start..end]);
            y.extend(values(&self.layer.forward_slots(&x, Some(&cu), &slots, &mut self.pool).unwrap()));
            if end == start + BLOCK {
                self.cache.retain(|(prefix, _)| *prefix != tokens[..end]);
                self.cache.push((tokens[..end].to_vec(), self.pool.snapshot(slot).unwrap()));
                self.cache.drain(..self.cache.len().saturating_sub(5));
            }
        }
        self.sequences.push(Sequence { slot, tokens, y, y_from: done });
    }

    /// Some sequences and padding go on: one token each, or any number. One of them may go on in another slot, beside
    /// the sequence it was, which stays.
    fn feed(&mut self, one_each: bool) {
        let mut chosen = self.choose();
        let fork = !one_each && self.free.len() > 1 && self.below(3) == 0;
        chosen.retain(|n| self.sequences[*n].tokens.len() < LONGEST);
        let (mut fed, mut read, mut write, mut lengths) = (vec![], vec![], vec![], vec![]);
        for (i, &n) in chosen.iter().enumerate() {
            if self.below(4) == 0 {
                let padding = if one_each { 1 } else { self.below(20) };
                fed.push(self.draw(padding));
                lengths.push(padding);
                read.push(NO_SLOT);
                write.push(NO_SLOT);
            }
            let count = if one_each { 1 } else { [0, 1, 1, 2, 5, 16, 17, 40, 66][self.below(9)] };
            fed.push(self.draw(count));
            lengths.push(count);
            read.push(self.sequences[n].slot);
            let to = if fork && i == 0 { self.free.pop().unwrap() } else { self.sequences[n].slot };
            if fork && i == 0 {
                self.sequences.push(Sequence { slot: to, ..self.sequences[n].clone() });
            }
            write.push(to);
        }
        if fed.is_empty() {
            return;
        }
        let slots = self.slots(&read, &write);
        self.calls.push(format!("feed {read:?} -> {write:?}: {lengths:?}"));
        let x = self.x(&fed.concat());
        let y = if one_each && self.below(2) == 0 {
            let y = self.layer.forward_slots(&x.unsqueeze(1).unwrap(), None, &slots, &mut self.pool).unwrap();
            y.squeeze(1).unwrap()
        } else {
            let cu = CuSeqlens::from_lengths(&lengths, &self.device).unwrap();
            self.layer.forward_slots(&x, Some(&cu), &slots, &mut self.pool).unwrap()
        };
        let (y, hidden) = (values(&y), self.embedding[0].len());
        let mut first = 0;
        for ((tokens, to), from) in fed.iter().zip(&write).zip(&read) {
            let y = &y[first * hidden..][..tokens.len() * hidden];
            first += tokens.len();
            if *from == NO_SLOT {
                assert!(y.iter().all(|y| *y == 0.0), "padding");
                continue;
            }
            let n = self.sequences.iter().position(|s| s.slot == *to).unwrap();
            self.sequences[n].tokens.extend(tokens);
            self.sequences[n].y.extend(y);
        }
    }

    fn fork(&mut self) {
        let n = self.below(self.sequences.len());
        let Some(slot) = self.free.pop() else { return };
        self.calls.push(format!("copy {} -> {slot}", self.sequences[n].slot));
        self.pool.copy(self.sequences[n].slot, slot).unwrap();
        self.sequences.push(Sequence { slot, ..self.sequences[n].clone() });
    }

    fn snapshot(&mut self) {
        let n = self.below(self.sequences.len());
        let state = self.pool.snapshot(self.sequences[n].slot).unwrap();
        if self.snapshots.len() == 4 {
            let old = self.below(4);
            self.snapshots.swap_remove(old);
        }
        self.snapshots.push((state, self.sequences[n].tokens.clone()));
    }

    /// A sequence goes back, or becomes another one.
    fn restore(&mut self) {
        let n = self.below(self.sequences.len());
        let from = self.below(self.snapshots.len());
        let Some((state, tokens)) = self.snapshots.get(from) else { return };
        self.pool.restore(self.sequences[n].slot, state).unwrap();
        self.calls.push(format!("restore {}: {}", self.sequences[n].slot, tokens.len()));
        let (slot, tokens) = (self.sequences[n].slot, tokens.clone());
        self.sequences[n] = Sequence { slot, y: vec![], y_from: tokens.len(), tokens };
    }

    fn verify(&mut self) {
        let mut chosen = self.choose();
        chosen.retain(|n| self.sequences[*n].tokens.len() < LONGEST);
        chosen.truncate(self.free.len());
        if chosen.is_empty() {
            return;
        }
        let long = self.below(4) == 0;
        let counts: Vec<_> = chosen.iter().map(|_| self.below(if long { 30 } else { 9 })).collect();
        let drafts: Vec<_> = counts.into_iter().map(|count| self.draw(count)).collect();
        let accepted: Vec<usize> = drafts.iter().map(|draft| self.below(draft.len() + 1)).collect();
        let read: Vec<u32> = chosen.iter().map(|n| self.sequences[*n].slot).collect();
        // A ring keeps drafts of up to 16 tokens where they are.
        let in_place = self.pool.has_ring() && !long;
        let write: Vec<u32> = match in_place {
            true => read.clone(),
            false => chosen.iter().map(|_| self.free.pop().unwrap()).collect(),
        };
        let slots = self.slots(&read, &write);
        let lengths: Vec<usize> = drafts.iter().map(Vec::len).collect();
        let cu = CuSeqlens::from_lengths(&lengths, &self.device).unwrap();
        self.calls.push(format!("verify {read:?} -> {write:?}: {lengths:?}, {accepted:?} accepted"));
        let x = self.x(&drafts.concat());
        let (y, kept) = self.layer.verify(&x, &cu, &slots, &mut self.pool).unwrap();
        if in_place && self.below(4) == 0 {
            return; // a draft that is dropped leaves no trace
        }
        self.layer.commit(&kept, &Accepted::new(&kept, &accepted).unwrap(), &mut self.pool).unwrap();
        let (y, hidden) = (values(&y), self.embedding[0].len());
        let mut first = 0;
        for (i, &n) in chosen.iter().enumerate() {
            self.sequences[n].tokens.extend(&drafts[i][..accepted[i]]);
            self.sequences[n].y.extend(&y[first * hidden..][..accepted[i] * hidden]);
            self.sequences[n].slot = write[i];
            first += lengths[i];
            if read[i] != write[i] {
                self.give_back(read[i]);
            }
        }
    }

    fn end(&mut self, n: usize) {
        self.check(n);
        let sequence = self.sequences.swap_remove(n);
        self.give_back(sequence.slot);
    }

    fn give_back(&mut self, slot: u32) {
        self.free.push(slot);
        poison_slot(&self.pool, slot);
    }

    /// One sequence against the plain model.
    fn check(&mut self, n: usize) {
        let Sequence { slot, tokens, y, y_from } = &self.sequences[n];
        let mut state = self.layer.new_state(1).unwrap();
        let hidden = self.embedding[0].len();
        let want = match tokens.is_empty() {
            true => vec![],
            false => values(&self.layer.forward(&self.x(tokens).unsqueeze(0).unwrap(), &mut state).unwrap()),
        };
        let got = parts(&self.pool.snapshot(*slot).unwrap());
        let want_state = parts(&state);
        let errors =
            [rel_rms(y, &want[y_from * hidden..]), rel_rms(&got[0], &want_state[0]), rel_rms(&got[1], &want_state[1])];
        let last = &self.calls[self.calls.len().saturating_sub(12)..];
        assert!(
            errors.iter().all(|e| *e <= BOUND),
            "y, conv, recurrent are off by {errors:?} after {} tokens in slot {slot}; the last calls were {last:#?}",
            tokens.len()
        );
        self.worst = errors.into_iter().fold(self.worst, f64::max);
    }

    fn step(&mut self) {
        let kind = if self.sequences.is_empty() { 0 } else { self.below(14) };
        let done = match kind {
            0 | 1 => (0, self.begin()).0,
            2..=4 => (1, self.feed(true)).0,
            5..=7 => (2, self.feed(false)).0,
            8 => (3, self.fork()).0,
            9 => {
                self.snapshot();
                self.restore();
                4
            }
            10 | 11 => (5, self.verify()).0,
            _ => {
                let n = self.below(self.sequences.len());
                self.end(n);
                6
            }
        };
        self.done[done] += 1;
        assert_eq!(CAPACITY - self.free.len(), self.sequences.len(), "slots and sequences");
        if !self.sequences.is_empty() {
            let n = self.below(self.sequences.len());
            self.check(n);
        }
        // Those that are too long for more make room.
        if let Some(n) = self.sequences.iter().position(|s| s.tokens.len() >= LONGEST) {
            self.end(n);
        }
    }
}

#[test]
fn a_pool_serves_thousands_of_calls() {
    serves_thousands_of_calls(false);
}

#[test]
fn a_pool_with_a_ring_serves_thousands_of_calls() {
    serves_thousands_of_calls(true);
}

fn serves_thousands_of_calls(ring: bool) {
    let wanted = soak();
    let calls = wanted.unwrap_or(2000);
    for device in devices() {
        let mut world = World::new(&device, 20, ring);
        let bytes = world.pool.size_in_bytes();
        let mut early = None;
        for call in 0..calls {
            world.step();
            if call == calls / 4 {
                early = resident();
            }
        }
        if let (Some(2001..), Some(early), Some(late)) = (wanted, early, resident()) {
            println!("resident after a quarter of the calls {} MiB, after all {} MiB", early >> 20, late >> 20);
            assert!(late < early + (64 << 20), "memory grew from {early} to {late} bytes");
        }
        println!(
            "{calls} calls on {:?}: worst error {:e}, kinds {:?}, cache {} hits",
            device.location(),
            world.worst,
            world.done,
            world.hits
        );
        assert!(world.done.iter().all(|n| *n > 0) && world.hits > 0, "{:?}", world.done);
        while !world.sequences.is_empty() {
            world.end(0);
        }
        assert_eq!(world.free.len(), CAPACITY);
        assert_eq!(world.pool.size_in_bytes(), bytes);
        // All that is left is poison.
        let left = [world.pool.conv(), world.pool.recurrent()].map(values).concat();
        assert!(left.iter().all(|x| x.is_nan()), "a slot was written after it was freed");
    }
}
