//! The pools of two layers on one `RingSpans`, as an engine has them, against pools without a ring.

use crate::random_layer::{feed, layer, of_128, of_96_192, packed, parts, rows, small};
use crate::support::{devices, refused, rel_rms, values, Rng};
use candle_core::{DType, Device, Tensor};
use candle_gdn::{Accepted, CuSeqlens, Drafted, GatedDeltaNet, GdnConfig, PoolOptions, RingSpans, Slots, StatePool};

const SLOTS: usize = 6;

struct Layers {
    layers: [GatedDeltaNet; 2],
    plain: [StatePool; 2],
    rings: [StatePool; 2],
    spans: RingSpans,
    device: Device,
    rng: Rng,
}

impl Layers {
    fn new(config: &GdnConfig, device: &Device) -> Self {
        let layers = [3, 4].map(|seed| layer(config, DType::F32, device, seed));
        let spans = RingSpans::new(SLOTS, device).unwrap();
        let shared = PoolOptions::default().shared_ring(&spans);
        let plain = layers.each_ref().map(|layer| layer.new_pool(SLOTS).unwrap());
        let rings = layers.each_ref().map(|layer| layer.new_pool_with(SLOTS, &shared).unwrap());
        Self { layers, plain, rings, spans, device: device.clone(), rng: Rng::new(9) }
    }

    fn rows(&mut self, tokens: usize) -> Vec<Vec<f32>> {
        rows(&mut self.rng, tokens, self.layers[0].config().hidden_size)
    }

    /// Of no rows too, of which CUDA makes no tensor.
    fn tensor(&self, rows: &[Vec<f32>]) -> Tensor {
        let one = vec![vec![0.0; self.layers[0].config().hidden_size]];
        packed(rows.iter().chain(&one), DType::F32, &self.device).narrow(0, 0, rows.len()).unwrap()
    }

    fn call(&self, read: &[u32], write: &[u32], lengths: &[usize]) -> (Slots, CuSeqlens) {
        let slots = match read == write {
            true => Slots::new(read, &self.device).unwrap(),
            false => Slots::from_to(read, write, &self.device).unwrap(),
        };
        (slots, CuSeqlens::from_lengths(lengths, &self.device).unwrap())
    }

    fn feed(&mut self, read: &[u32], write: &[u32], lengths: &[usize]) {
        let rows = self.rows(lengths.iter().sum());
        let (x, (slots, cu)) = (self.tensor(&rows), self.call(read, write, lengths));
        for ((layer, plain), ring) in self.layers.iter().zip(&mut self.plain).zip(&mut self.rings) {
            let want = layer.forward_slots(&x, Some(&cu), &slots, plain).unwrap();
            let got = layer.forward_slots(&x, Some(&cu), &slots, ring).unwrap();
            if !rows.is_empty() {
                near(&format!("y of {lengths:?}"), &values(&got), &values(&want));
            }
        }
        self.layers[1].advance_rings(&self.spans, &slots, Some(&cu), cu.max_len()).unwrap();
        self.states(write);
    }

    fn states(&self, slots: &[u32]) {
        for (plain, ring) in self.plain.iter().zip(&self.rings) {
            for slot in slots {
                let [got, want] = [ring, plain].map(|pool| parts(&pool.snapshot(*slot).unwrap()));
                assert_eq!(got[0], want[0], "the window of slot {slot}");
                near(&format!("the state of slot {slot}"), &got[1], &want[1]);
            }
        }
    }

    /// Drafts in both layers, and the spans after them.
    fn verify(&mut self, rows: &[Vec<f32>], slots: &Slots, cu: &CuSeqlens) -> Vec<Drafted> {
        let x = self.tensor(rows);
        let pairs = self.layers.iter().zip(&mut self.rings);
        let drafted = pairs.map(|(layer, ring)| layer.verify(&x, cu, slots, ring).unwrap().1).collect();
        match slots.in_place() {
            true => self.spans.draft(slots, cu).unwrap(),
            false => self.layers[0].advance_rings(&self.spans, slots, Some(cu), cu.max_len()).unwrap(),
        }
        drafted
    }

    fn commit(&mut self, drafted: &[Drafted], accepted: &[usize]) {
        let accepted = Accepted::new(&drafted[0], accepted).unwrap();
        for ((layer, ring), drafted) in self.layers.iter().zip(&mut self.rings).zip(drafted) {
            layer.commit(drafted, &accepted, ring).unwrap();
        }
        accepted.advance_rings(&self.layers[0], &self.spans).unwrap();
    }

    /// What was accepted, on the pools without a ring, whose sequences go from slot to slot.
    fn accept(&mut self, drafts: &[Vec<Vec<f32>>], accepted: &[usize], read: &[u32], write: &[u32]) {
        for (layer, pool) in self.layers.iter().zip(&mut self.plain) {
            for (n, draft) in drafts.iter().enumerate() {
                pool.copy(read[n], write[n]).unwrap();
                if accepted[n] > 0 {
                    feed(layer, &draft[..accepted[n]], write[n], pool);
                }
            }
        }
    }
}

fn near(what: &str, got: &[f64], want: &[f64]) {
    let error = rel_rms(got, want);
    assert!(error <= 1e-5, "{what} is off by {error:e}");
}

/// The small one has no step on a GPU.
fn cases() -> impl Iterator<Item = (GdnConfig, Device)> {
    let of = |device: Device| [small(), of_128(), of_96_192()].map(|c| (c, device.clone()));
    devices().into_iter().flat_map(of).filter(|(c, device)| device.is_cpu() || c.has_fused_step())
}

/// Steps, prompts, forks, and calls without tokens, which move what waits in a ring too.
#[test]
fn calls_of_any_length() {
    for (config, device) in cases() {
        let mut x = Layers::new(&config, &device);
        x.feed(&[0, 1, 2], &[0, 1, 2], &[5, 1, 30]);
        for _ in 0..9 {
            x.feed(&[0, 1, 2], &[0, 1, 2], &[1, 2, 0]);
        }
        // With the entries of the tokens before.
        x.feed(&[0, 1, 1], &[3, 4, 5], &[0, 0, 0]);
        x.feed(&[3, 4, 5, 0], &[3, 4, 5, 0], &[1, 0, 3, 2]);
        x.feed(&[5, 2], &[1, 2], &[0, 0]);
        x.feed(&[0, 1], &[0, 1], &[0, 0]);
        x.feed(&[0, 1, 2, 3, 4], &[0, 1, 2, 3, 4], &[20, 1, 17, 8, 1]);
        x.states(&[0, 1, 2, 3, 4, 5]);
    }
}

#[test]
fn drafts() {
    for (config, device) in cases() {
        let mut x = Layers::new(&config, &device);
        x.feed(&[0, 1], &[0, 1], &[3, 20]);
        let (mut here, mut there) = ([0, 1], [2, 3]);
        for round in 0..12 {
            let lengths = [1 + 5 * round % 16, 3 + 2 * round % 9];
            let accepted = [round % (lengths[0] + 1), (2 * round + 1) % (lengths[1] + 1)];
            let drafts = lengths.map(|n| x.rows(n));
            let in_place = round % 3 != 2;
            let (slots, cu) = x.call(&here, if in_place { &here } else { &there }, &lengths);
            if in_place {
                // Dropped: a trace of it would show.
                x.verify(&drafts.concat(), &slots, &cu);
                x.states(&here);
            }
            let drafted = x.verify(&drafts.concat(), &slots, &cu);
            x.commit(&drafted, &accepted);
            if !in_place {
                x.accept(&drafts, &accepted, &here, &there);
                (here, there) = (there, here);
            } else {
                x.accept(&drafts, &accepted, &here, &here);
            }
            x.states(&here);
            x.feed(&here, &here, &[1, 2]);
        }
    }
}

#[test]
fn spans_refuse_more_tokens_than_a_call_appends() {
    for device in &devices() {
        let layer = layer(&of_128(), DType::F32, device, 1);
        let (spans, slots) = (RingSpans::new(1, device).unwrap(), Slots::new(&[0], device).unwrap());
        let cu = CuSeqlens::from_lengths(&[RingSpans::MAX_TOKENS + 1], device).unwrap();
        let counts = Tensor::new(&[1u32], device).unwrap();
        let tried = [
            layer.advance_rings(&spans, &slots, Some(&cu), 1),
            spans.draft(&slots, &cu),
            spans.accept(&slots, &cu, &counts),
        ];
        for moved in tried {
            refused(moved, &["expected at most 16 tokens a sequence, got 17"]);
        }
    }
}
