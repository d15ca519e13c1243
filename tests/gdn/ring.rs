//! Pools with a ring beside their states, against pools without.

use crate::pool::poison_slot;
use crate::random_layer::{feed, layer, of_128, of_96_192, packed, parts, rows, small};
use crate::support::{devices, refused, rel_rms, values, Rng};
use candle_core::{DType, Device, Tensor};
use candle_gdn::{
    Accepted, Algo, CuSeqlens, GatedDeltaNet, GdnConfig, PoolOptions, RingSpans, Slots, StatePool, NO_SLOT,
};

/// A layer, its two pools, and what is fed to both.
struct Pair {
    layer: GatedDeltaNet,
    plain: StatePool,
    ring: StatePool,
    dtype: DType,
    device: Device,
    rng: Rng,
    bound: f64,
}

impl Pair {
    fn new(config: &GdnConfig, dtype: DType, state: DType, device: &Device, capacity: usize) -> Self {
        let layer = layer(config, dtype, device, 3);
        let plain = layer.new_pool_with(capacity, &PoolOptions::default().dtype(state)).unwrap();
        let ring = layer.new_pool_with(capacity, &PoolOptions::default().dtype(state).ring()).unwrap();
        assert!(ring.has_ring() && !plain.has_ring() && ring.size_in_bytes() > plain.size_in_bytes());
        let bound = if dtype == DType::F32 && state == DType::F32 { 1e-5 } else { 2e-2 };
        let mut pair = Self { layer, plain, ring, dtype, device: device.clone(), rng: Rng::new(9), bound };
        let all: Vec<u32> = (0..capacity as u32).collect();
        pair.poison(&all);
        for slot in all {
            pair.plain.zero(slot).unwrap();
            pair.ring.zero(slot).unwrap();
        }
        pair
    }

    /// `lengths` tokens to the slots that are read, in one call each.
    fn feed(&mut self, read: &[u32], write: &[u32], lengths: &[usize]) {
        let rows = rows(&mut self.rng, lengths.iter().sum(), self.layer.config().hidden_size);
        let x = packed(&rows, self.dtype, &self.device);
        let slots = match read == write {
            true => Slots::new(read, &self.device).unwrap(),
            false => Slots::from_to(read, write, &self.device).unwrap(),
        };
        let cu = CuSeqlens::from_lengths(lengths, &self.device).unwrap();
        let want = values(&self.layer.forward_slots(&x, Some(&cu), &slots, &mut self.plain).unwrap());
        let got = values(&self.layer.forward_slots(&x, Some(&cu), &slots, &mut self.ring).unwrap());
        self.near(&format!("y of {lengths:?}"), &got, &want);
    }

    /// NaN in all that the slots hold, and in every row of their rings: keys, updates, decays and inputs.
    fn poison(&mut self, slots: &[u32]) {
        let x = Tensor::full(f32::NAN, (8 * slots.len(), self.layer.config().hidden_size), &self.device).unwrap();
        let (x, cu) = (x.to_dtype(self.dtype).unwrap(), CuSeqlens::from_lengths(&vec![8; slots.len()], &self.device));
        let (cu, map) = (cu.unwrap(), Slots::new(slots, &self.device).unwrap());
        for _ in 0..RingSpans::ROWS.div_ceil(8) {
            self.layer.forward_slots(&x, Some(&cu), &map, &mut self.ring).unwrap();
        }
        for slot in slots {
            poison_slot(&self.plain, *slot);
            poison_slot(&self.ring, *slot);
        }
    }

    fn near(&self, what: &str, got: &[f64], want: &[f64]) {
        let error = rel_rms(got, want);
        assert!(error <= self.bound, "{what} is off by {error:e}");
    }

    /// The slots' states, as snapshots have them.
    fn states(&self, slots: &[u32]) {
        for slot in slots {
            let [got, want] = [&self.ring, &self.plain].map(|pool| parts(&pool.snapshot(*slot).unwrap()));
            assert_eq!(got[0], want[0], "the window of slot {slot}");
            self.near(&format!("the state of slot {slot}"), &got[1], &want[1]);
        }
    }
}

fn cases() -> Vec<(GdnConfig, DType, DType, Vec<Device>)> {
    let (f32, bf16, all) = (DType::F32, DType::BF16, devices);
    let cpu = || devices().into_iter().filter(Device::is_cpu).collect();
    vec![
        (small(), f32, f32, cpu()),
        (
            small().with(|c| (c.conv_kernel, c.num_key_heads, c.key_head_dim, c.value_head_dim) = (7, 4, 7, 5)),
            f32,
            f32,
            cpu(),
        ),
        (of_128(), f32, f32, all()),
        (of_128(), bf16, f32, all()),
        (of_128(), DType::F16, f32, all()),
        (of_128(), bf16, bf16, all()),
        (of_128().with(|c| (c.num_key_heads, c.num_value_heads) = (1, 3)), bf16, f32, all()),
        (of_96_192(), f32, f32, all()),
        (of_96_192(), bf16, f32, all()),
        (of_96_192().with(|c| c.num_key_heads = 1), bf16, bf16, all()),
    ]
}

/// Steps and prompts in turn, sequences that keep step and such that do not, padding, and flushes of all lengths.
#[test]
fn calls_of_any_length() {
    for (config, dtype, state, devices) in cases() {
        for device in devices {
            let mut pair = Pair::new(&config, dtype, state, &device, 5);
            let all = [0, 1, 2, 3, 4];
            for lengths in [[1; 5], [0, 3, 70, 1, 5], [1; 5], [2, 0, 1, 4, 8], [7, 1, 3, 5, 2], [40, 1, 65, 17, 9]] {
                pair.feed(&all, &all, &lengths);
            }
            for _ in 0..20 {
                pair.feed(&[3, NO_SLOT, 1, 0], &[3, NO_SLOT, 1, 0], &[1, 1, 1, 1]);
            }
            pair.states(&all);
            pair.feed(&[2, NO_SLOT, 4], &[2, NO_SLOT, 4], &[3, 2, 4]);
            pair.feed(&all, &all, &[1; 5]);
            pair.states(&all);
        }
    }
}

/// A sequence whose new state goes to another slot, by a step and by a prompt, with entries in its ring and without.
#[test]
fn states_that_move() {
    for (config, dtype, state, devices) in cases() {
        for device in devices {
            let mut pair = Pair::new(&config, dtype, state, &device, 6);
            pair.feed(&[0, 1], &[0, 1], &[5, 1]);
            pair.feed(&[0, 0, 1], &[2, 3, 4], &[1, 70, 2]);
            pair.feed(&[0, 2, 3], &[5, 2, 3], &[2, 1, 4]);
            pair.feed(&[5, 3], &[1, 3], &[0, 3]);
            pair.states(&[0, 1, 2, 3, 4, 5]);
            pair.feed(&[0, 1, 2, 3, 4], &[0, 1, 2, 3, 4], &[1; 5]);
            pair.states(&[0, 1, 2, 3, 4]);
        }
    }
}

/// Out of one pool and into another, by copies, snapshots and growth.
#[test]
fn slots_are_copied_and_kept() {
    for (config, dtype, state, devices) in cases() {
        for device in devices {
            let mut pair = Pair::new(&config, dtype, state, &device, 3);
            pair.feed(&[0, 1], &[0, 1], &[6, 12]);
            for pool in [&mut pair.plain, &mut pair.ring] {
                pool.copy(0, 2).unwrap();
                pool.grow(5).unwrap();
            }
            pair.feed(&[0, 1, 2, 4], &[0, 1, 2, 4], &[3, 7, 1, 2]);
            pair.states(&[0, 1, 2, 3, 4]);
            // Each takes over what the other has.
            let (from_plain, from_ring) = (pair.plain.snapshot(1).unwrap(), pair.ring.snapshot(1).unwrap());
            pair.ring.restore(3, &from_plain).unwrap();
            pair.plain.restore(3, &from_ring).unwrap();
            pair.feed(&[3, 1], &[3, 1], &[4, 4]);
            pair.states(&[1, 3]);
            // A slot of a sequence that ended is as new, whatever it held.
            pair.poison(&[1]);
            for pool in [&mut pair.plain, &mut pair.ring] {
                pool.zero(1).unwrap();
            }
            pair.feed(&[1, 3], &[1, 3], &[2, 1]);
            pair.states(&[0, 1, 2, 3, 4]);
        }
    }
}

/// Drafts in place, round after round: of each any number is accepted, and some are dropped.
#[test]
fn drafts_in_place() {
    for (config, dtype, state, devices) in cases() {
        for device in devices {
            let mut pair = Pair::new(&config, dtype, state, &device, 4);
            let all = [0, 1, 2, 3];
            pair.feed(&all, &all, &[3, 1, 20, 9]);
            for round in 0..12usize {
                let lengths: Vec<usize> = match round % 3 {
                    0 => vec![[1, 4, 8, 16][round / 3]; 4],
                    1 => (0..4).map(|n| (5 * n + round) % 17).collect(),
                    _ => vec![2, 7, 0, 3],
                };
                let accepted: Vec<usize> = lengths.iter().enumerate().map(|(n, t)| (round + 2 * n) % (t + 1)).collect();
                let draft: Vec<_> =
                    lengths.iter().map(|t| rows(&mut pair.rng, *t, pair.layer.config().hidden_size)).collect();
                let slots = Slots::new(&all, &device).unwrap();
                let cu = CuSeqlens::from_lengths(&lengths, &device).unwrap();
                let x = packed(draft.iter().flatten(), dtype, &device);
                // The first is dropped.
                pair.layer.verify(&x, &cu, &slots, &mut pair.ring).unwrap();
                pair.states(&all);
                let (y, kept) = pair.layer.verify(&x, &cu, &slots, &mut pair.ring).unwrap();
                assert_eq!(kept.size_in_bytes(), 0);
                let y = values(&y);
                pair.layer.commit(&kept, &Accepted::new(&kept, &accepted).unwrap(), &mut pair.ring).unwrap();
                let (mut first, hidden) = (0, config.hidden_size);
                for (n, draft) in draft.iter().enumerate() {
                    let want = match accepted[n] {
                        0 => vec![],
                        stay => feed(&pair.layer, &draft[..stay], n as u32, &mut pair.plain),
                    };
                    pair.near(&format!("round {round}, {n}"), &y[first * hidden..][..want.len()], &want);
                    first += draft.len();
                }
                pair.states(&all);
            }
        }
    }
}

/// Drafts of any length whose states go to other slots, as on a pool without a ring.
#[test]
fn drafts_in_other_slots() {
    for (config, dtype, state, devices) in cases() {
        for device in devices {
            let mut pair = Pair::new(&config, dtype, state, &device, 8);
            let (mut read, mut write) = (vec![0, 1, 2, 3], vec![4, 5, 6, 7]);
            pair.feed(&read, &read, &[3, 1, 20, 9]);
            for round in 0..8usize {
                let lengths: Vec<usize> = (0..4).map(|n| (7 * n + 5 * round) % [9, 30][round % 2]).collect();
                let accepted: Vec<usize> = lengths.iter().enumerate().map(|(n, t)| (3 * round + n) % (t + 1)).collect();
                let draft = rows(&mut pair.rng, lengths.iter().sum(), config.hidden_size);
                let slots = Slots::from_to(&read, &write, &device).unwrap();
                let cu = CuSeqlens::from_lengths(&lengths, &device).unwrap();
                let x = packed(&draft, dtype, &device);
                let mut y = vec![];
                for pool in [&mut pair.plain, &mut pair.ring] {
                    let (of_all, kept) = pair.layer.verify(&x, &cu, &slots, pool).unwrap();
                    pair.layer.commit(&kept, &Accepted::new(&kept, &accepted).unwrap(), pool).unwrap();
                    y.push(values(&of_all));
                }
                pair.near(&format!("round {round}, {lengths:?}"), &y[1], &y[0]);
                std::mem::swap(&mut read, &mut write);
                pair.states(&read);
                pair.feed(&read, &read, &[1; 4]);
                // What is left in the others is nobody's.
                pair.poison(&write);
            }
        }
    }
}

/// Over thousands of tokens the state stays the plain rule's.
#[test]
fn it_does_not_drift() {
    for device in devices() {
        let mut pair = Pair::new(&of_128(), DType::F32, DType::F32, &device, 1);
        for _ in 0..200 {
            let tokens = 1 + (pair.rng.uniform() * 8.0) as usize;
            pair.feed(&[0], &[0], &[tokens]);
        }
        for _ in 0..300 {
            pair.feed(&[0], &[0], &[1]);
        }
        pair.states(&[0]);
    }
}

#[test]
fn refusals() {
    for device in devices() {
        let layer = layer(&of_128(), DType::F32, &device, 1);
        refused(
            layer.new_pool_with(0, &PoolOptions::default().dtype(DType::F32).ring()),
            &["GatedDeltaNet: capacity: expected at least 1 slot, got 0"],
        );
        refused(
            layer.new_pool_with(1, &PoolOptions::default().dtype(DType::F16).ring()),
            &["expected dtype f32 or bf16, got F16"],
        );
        let mut ring = layer.new_pool_with(3, &PoolOptions::default().dtype(DType::F32).ring()).unwrap();
        let cu = CuSeqlens::from_lengths(&[17], &device).unwrap();
        let x = Tensor::zeros((17, 64), DType::F32, &device).unwrap();
        let slots = Slots::new(&[0], &device).unwrap();
        let long = layer.verify(&x, &cu, &slots, &mut ring);
        refused(
            long,
            &["slots: expected other slots to write than to read", "in place a ring supports up to 16 tokens"],
        );
        let short = CuSeqlens::from_lengths(&[4], &device).unwrap();
        let x = x.narrow(0, 0, 4).unwrap();
        let (_, kept) = layer.verify(&x, &short, &slots, &mut ring).unwrap();
        refused(Accepted::new(&kept, &[5]), &["expected at most 4 (the tokens of sequence 0), got 5"]);
        let accepted = Accepted::new(&kept, &[2]).unwrap();
        let mut plain = layer.new_pool(3).unwrap();
        refused(
            layer.commit(&kept, &accepted, &mut plain),
            &["pool: expected the one that was drafted on, got one without"],
        );
        let moved = Slots::from_to(&[0], &[1], &device).unwrap();
        let (_, other) = layer.verify(&x, &short, &moved, &mut ring).unwrap();
        let other = Accepted::new(&other, &[2]).unwrap();
        refused(layer.commit(&kept, &other, &mut ring), &["got those of another pass"]);
        // A chosen kernel, before the pool is made and after.
        let chosen = layer.clone().with_algo(Algo::Recurrent);
        let why = &["ring: expected no choice of kernel", "got recurrent"];
        refused(chosen.new_pool_with(1, &PoolOptions::default().dtype(DType::F32).ring()), why);
        let before = parts(&ring.snapshot(0).unwrap());
        let x = Tensor::ones((1, 40, 64), DType::F32, &device).unwrap();
        refused(chosen.forward_slots(&x, None, &slots, &mut ring), why);
        assert!(parts(&ring.snapshot(0).unwrap()) == before, "a refused call changed the state");
        if device.is_cuda() {
            let small = crate::random_layer::layer(&small(), DType::F32, &device, 1);
            refused(
                small.new_pool_with(1, &PoolOptions::default().dtype(DType::F32).ring()),
                &["ring: expected heads of 128, or 96 (K) and 192 (V), and a convolution of width 4 on CUDA"],
            );
        }
    }
}
