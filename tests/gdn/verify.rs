//! Drafted tokens: verified at once, kept in part, as if only those had been fed.

use crate::pool::{poison_pool, poison_slot};
use crate::random_layer::{feed, layer, of_128, packed, parts, rows, small};
use crate::support::{devices, refused, rel_rms, values, Rng};
use candle_core::{DType, Device, Tensor};
use candle_gdn::{Accepted, CuSeqlens, GatedDeltaNet, GdnConfig, PoolOptions, Slots, StatePool, NO_SLOT};

struct Case {
    config: GdnConfig,
    dtype: DType,
    state_dtype: DType,
    drafted: usize,
}

/// A sequence by itself: what it was fed before, the draft, and what comes next.
struct Sequence {
    before: Vec<Vec<f32>>,
    draft: Vec<Vec<f32>>,
    next: Vec<Vec<f32>>,
}

impl Sequence {
    fn new(rng: &mut Rng, before: usize, draft: usize, hidden: usize) -> Self {
        Self { before: rows(rng, before, hidden), draft: rows(rng, draft, hidden), next: rows(rng, 2, hidden) }
    }

    /// State and next outputs where `accepted` tokens of the draft were all that was fed, in calls of so many tokens.
    fn want(&self, layer: &GatedDeltaNet, case: &Case, accepted: usize, a_call: usize) -> Want {
        let mut pool = layer.new_pool_with(1, &PoolOptions::default().dtype(case.state_dtype)).unwrap();
        feed(layer, &self.before, 0, &mut pool);
        for x in self.draft[..accepted].chunks(a_call.max(1)) {
            feed(layer, x, 0, &mut pool);
        }
        let state = parts(&pool.snapshot(0).unwrap());
        Want { state, next: feed(layer, &self.next, 0, &mut pool) }
    }
}

struct Want {
    state: [Vec<f64>; 2],
    next: Vec<f64>,
}

/// Exactly on the CPU, where one kernel runs any number of tokens of any number of sequences. On CUDA the number of
/// sequences decides which one does.
fn same(what: &str, got: &[f64], want: &[f64], case: &Case, device: &Device) {
    let bound = match (device.is_cpu(), case.dtype, case.state_dtype) {
        (true, ..) => 0.0,
        (_, DType::F32, DType::F32) => 1e-5,
        _ => 2e-2,
    };
    let error = rel_rms(got, want);
    assert!(error <= bound, "{what} is off by {error:e}");
}

fn cases() -> Vec<Case> {
    let case = |config, dtype, state_dtype, drafted| Case { config, dtype, state_dtype, drafted };
    let (f32, bf16) = (DType::F32, DType::BF16);
    vec![
        case(small(), f32, f32, 1),
        case(small(), f32, f32, 5),
        case(small(), f32, f32, 16),
        case(small(), f32, f32, 20),
        case(small(), f32, bf16, 6),
        case(small().with(|c| c.conv_kernel = 7), f32, f32, 9),
        case(of_128(), f32, f32, 4),
        case(of_128(), f32, f32, 16),
        case(of_128(), bf16, f32, 8),
        case(of_128(), bf16, f32, 40),
    ]
}

/// Every count from none to all of the draft, side by side in one batch.
#[test]
fn every_count_is_as_if_no_more_had_been_fed() {
    for device in devices() {
        for case in cases() {
            let Case { ref config, dtype, state_dtype, drafted } = case;
            let layer = layer(config, dtype, &device, 11);
            let rng = &mut Rng::new(5);
            let count = drafted + 1;
            let bound = if dtype == DType::F32 && state_dtype == DType::F32 { 1e-5 } else { 2e-2 };
            let sequences: Vec<_> =
                (0..count).map(|n| Sequence::new(rng, 1 + n % 3, drafted, config.hidden_size)).collect();
            let mut pool = layer.new_pool_with(2 * count + 1, &PoolOptions::default().dtype(state_dtype)).unwrap();
            poison_pool(&pool);
            let read: Vec<u32> = (0..count as u32).collect();
            let write: Vec<u32> = (0..count as u32).map(|n| 2 * count as u32 - n).collect();
            for (n, sequence) in sequences.iter().enumerate() {
                pool.zero(n as u32).unwrap();
                feed(&layer, &sequence.before, n as u32, &mut pool);
            }
            let slots = Slots::from_to(&read, &write, &device).unwrap();
            let cu = CuSeqlens::from_lengths(&vec![drafted; count], &device).unwrap();
            let x = packed(sequences.iter().flat_map(|s| &s.draft), dtype, &device);
            let before = read.iter().map(|slot| parts(&pool.snapshot(*slot).unwrap())).collect::<Vec<_>>();
            let (y, kept) = layer.verify(&x, &cu, &slots, &mut pool).unwrap();
            for (slot, before) in read.iter().zip(&before) {
                assert!(parts(&pool.snapshot(*slot).unwrap()) == *before, "verify wrote slot {slot}");
            }
            // As small as promised: no state of any token.
            assert!(kept.size_in_bytes() <= count * drafted * 16 * config.hidden_size * config.num_value_heads * 4);

            let counts: Vec<usize> = (0..count).collect();
            let accepted = Accepted::new(&kept, &counts).unwrap();
            layer.commit(&kept, &accepted, &mut pool).unwrap();
            // Nobody needs the other slots from here on.
            read.iter().for_each(|slot| poison_slot(&pool, *slot));
            for (n, sequence) in sequences.iter().enumerate() {
                let what = format!("{dtype:?}, state in {state_dtype:?}, {n} of {drafted}");
                let want = sequence.want(&layer, &case, n, drafted);
                let got = parts(&pool.snapshot(write[n]).unwrap());
                // Token by token: the CPU rounds elsewhere from 8 tokens a call on, and a bf16 state each call.
                let single = sequence.want(&layer, &case, n, 1);
                let exact = n < 8 && state_dtype == DType::F32;
                for (i, part) in ["conv", "recurrent"].into_iter().enumerate() {
                    same(&format!("{what}: {part}"), &got[i], &want.state[i], &case, &device);
                    if exact {
                        same(&format!("{what}, one by one: {part}"), &got[i], &single.state[i], &case, &device);
                    }
                }
                assert!(exact || rel_rms(&got[1], &single.state[1]) < bound, "{what}, one by one");
                // The tokens after the draft.
                let got = feed(&layer, &sequence.next, write[n], &mut pool);
                same(&format!("{what}: next"), &got, &want.next, &case, &device);
            }
            // What verify said of the accepted tokens is what they give by themselves.
            let alone = layer.forward(
                &packed(sequences[0].before.iter().chain(&sequences[0].draft), dtype, &device).unsqueeze(0).unwrap(),
                &mut layer.new_state_as(1, state_dtype).unwrap(),
            );
            let alone = values(&alone.unwrap().squeeze(0).unwrap().narrow(0, 1, drafted).unwrap());
            assert!(rel_rms(&values(&y.narrow(0, 0, drafted).unwrap()), &alone) < bound);
        }
    }
}

/// Drafts of different lengths, one of none and one that is padding, and two drafts for one sequence: a fork.
#[test]
fn drafts_differ_in_length() {
    for device in devices() {
        for (config, longest) in [(small(), 7), (of_128(), 16), (small(), 30)] {
            let case = Case { config: config.clone(), dtype: DType::F32, state_dtype: DType::F32, drafted: 0 };
            let layer = layer(&config, DType::F32, &device, 12);
            let rng = &mut Rng::new(6);
            let lengths = [longest, 0, 3, 2, 5];
            let mut sequences: Vec<_> = lengths.iter().map(|n| Sequence::new(rng, 3, *n, config.hidden_size)).collect();
            sequences[4].before = sequences[0].before.clone();
            let mut pool = layer.new_pool(9).unwrap();
            poison_pool(&pool);
            let (read, write) = ([0, 1, 2, NO_SLOT, 0], [4, 5, 6, 7, 8]);
            for n in 0..3 {
                pool.zero(n).unwrap();
                feed(&layer, &sequences[n as usize].before, n, &mut pool);
            }
            let slots = Slots::from_to(&read, &write, &device).unwrap();
            let cu = CuSeqlens::from_lengths(&lengths, &device).unwrap();
            let x = packed(sequences.iter().flat_map(|s| &s.draft), DType::F32, &device);
            let before = [0, 1, 2].map(|slot| parts(&pool.snapshot(slot).unwrap()));
            let (_, kept) = layer.verify(&x, &cu, &slots, &mut pool).unwrap();
            let counts = [longest - 1, 0, 3, 1, 4];
            let accepted = Accepted::new(&kept, &counts).unwrap();
            layer.commit(&kept, &accepted, &mut pool).unwrap();
            for n in [0, 1, 2, 4] {
                let want = sequences[n].want(&layer, &case, counts[n], longest);
                let got = parts(&pool.snapshot(write[n]).unwrap());
                for (got, want) in got.iter().zip(&want.state) {
                    same(&format!("sequence {n}"), got, want, &case, &device);
                }
            }
            for (slot, before) in [0, 1, 2].iter().zip(before) {
                assert!(parts(&pool.snapshot(*slot).unwrap()) == before, "slot {slot} was written");
            }
            assert!(values(&pool.recurrent().get(7).unwrap()).iter().all(|x| x.is_nan()), "padding was written");
        }
    }
}

#[test]
fn what_is_refused() {
    for device in &devices() {
        let layer = layer(&small(), DType::F32, device, 13);
        let mut pool = layer.new_pool(4).unwrap();
        let cu = CuSeqlens::from_lengths(&[2, 3], device).unwrap();
        let slots = Slots::from_to(&[0, 1], &[2, 3], device).unwrap();
        let x = Tensor::zeros((5, 32), DType::F32, device).unwrap();
        let verify = |slots: &Slots, pool: &mut StatePool| layer.verify(&x, &cu, slots, pool);
        let same = Slots::from_to(&[0, 1], &[2, 1], device).unwrap();
        refused(verify(&same, &mut pool), &["slots: expected other slots to write than to read, got 1 for both at 1"]);
        let same = Slots::new(&[0, 1], device).unwrap();
        refused(verify(&same, &mut pool), &["slots: expected other slots to write than to read, got 0"]);
        let tensor = Tensor::new(&[0u32, 1], device).unwrap();
        refused(verify(&Slots::from(&tensor), &mut pool), &["slots: expected other slots to write than to read"]);

        let (_, kept) = verify(&slots, &mut pool).unwrap();
        refused(Accepted::new(&kept, &[1]), &["Accepted: accepted: expected 2 (one for each sequence), got 1"]);
        let most = "Accepted: accepted: expected at most 3 (the tokens of sequence 1), got 4";
        refused(Accepted::new(&kept, &[1, 4]), &[most]);
        let tensors = Slots::from_tensors(slots.read(), slots.write());
        let (_, of_tensors) = verify(&tensors, &mut pool).unwrap();
        refused(Accepted::new(&of_tensors, &[1, 1]), &["Accepted: slots: expected them made from host values"]);

        // Counts of another pass, though of the same lengths and slots.
        let equal = Slots::from_to(&[0, 1], &[2, 3], device).unwrap();
        let (_, other) = verify(&equal, &mut pool).unwrap();
        let accepted = Accepted::new(&other, &[1, 1]).unwrap();
        refused(layer.commit(&kept, &accepted, &mut pool), &["accepted: expected counts for the sequences that were"]);
        let accepted = Accepted::new(&kept, &[1, 1]).unwrap();
        let twin = crate::random_layer::layer(&small(), DType::F32, device, 14);
        refused(twin.commit(&kept, &accepted, &mut pool), &["drafted: expected what this layer's verify returned"]);
        layer.clone().commit(&kept, &accepted, &mut pool).unwrap();
        let mut short = layer.new_pool(1).unwrap();
        refused(layer.commit(&kept, &accepted, &mut short), &["slots: expected values below 1"]);
    }
}

/// A token that is not finite reaches no token before it, not even one that a kernel computes beside it.
#[test]
fn drafts_that_are_not_finite_leave_those_before_them() {
    for device in &devices() {
        for (dtype, drafted) in
            [DType::F32, DType::BF16].into_iter().flat_map(|dtype| [4, 7, 8, 16].map(|n| (dtype, n)))
        {
            let layer = layer(&of_128(), dtype, device, 5);
            let finite = drafted - 2;
            let mut draft = rows(&mut Rng::new(drafted as u64), drafted, layer.config().hidden_size);
            draft[finite..].iter_mut().for_each(|row| row.fill(f32::NAN));
            let mut pool = layer.new_pool_with(1, &PoolOptions::default().ring()).unwrap();
            let (slots, cu) = (Slots::new(&[0], device).unwrap(), CuSeqlens::from_lengths(&[drafted], device).unwrap());
            let (y, tried) = layer.verify(&packed(&draft, dtype, device), &cu, &slots, &mut pool).unwrap();
            layer.commit(&tried, &Accepted::new(&tried, &[finite]).unwrap(), &mut pool).unwrap();
            let what = format!("{dtype:?}, {drafted} drafts on {:?}", device.location());
            assert!(values(&y.narrow(0, 0, finite).unwrap()).iter().all(|x| x.is_finite()), "y: {what}");
            let state = parts(&pool.snapshot(0).unwrap());
            assert!(state.iter().flatten().all(|x| x.is_finite()), "state: {what}");
        }
    }
}
