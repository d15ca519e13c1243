//! A layer on the slots of a pool: against sequences on states of their own.

use crate::random_layer::{feed, from_scratch, layer, of_128, packed, parts, rows, small};
use crate::support::{devices, refused, rel_rms, values, Rng};
use candle_core::{DType, Tensor};
use candle_gdn::{CuSeqlens, GdnState, PoolOptions, Slots, StatePool, NO_SLOT};

/// NaN in every slot: whoever reads one that is not his shows it.
pub fn poison_pool(pool: &StatePool) {
    for slot in 0..pool.capacity() as u32 {
        poison_slot(pool, slot);
    }
}

pub fn poison_slot(pool: &StatePool, slot: u32) {
    for tensor in [pool.conv(), pool.recurrent()] {
        let shape = [&[1], &tensor.dims()[1..]].concat();
        let nan = Tensor::full(f32::NAN, shape, tensor.device()).unwrap().to_dtype(tensor.dtype()).unwrap();
        tensor.slice_set(&nan, 0, slot as usize).unwrap();
    }
}

fn bits(pool: &StatePool, slot: u32) -> Vec<u64> {
    let of = |t: &Tensor| values(&t.get(slot as usize).unwrap());
    of(pool.conv()).into_iter().chain(of(pool.recurrent())).map(f64::to_bits).collect()
}

fn near(what: &str, got: &[f64], want: &[f64], bound: f64) {
    let error = rel_rms(got, want);
    assert!(error <= bound, "{what} is off by {error:e}");
}

/// Calls of many kinds on one pool: all begin, go on with different lengths (none, one, as many as a step takes, more),
/// come in any order with padding between, and end where one call each would have.
#[test]
fn sequences_in_a_pool_are_those_on_their_own() {
    let calls: [&[(usize, usize)]; 6] = [
        // (sequence, tokens); 9 is padding
        &[(0, 70), (1, 0), (9, 5), (2, 3), (3, 65)],
        &[(2, 1), (0, 1), (3, 1), (9, 1), (1, 1)],
        &[(1, 130), (3, 1), (0, 1), (2, 1)],
        &[(9, 16), (0, 2), (1, 16), (2, 7)],
        &[(3, 4), (2, 4), (9, 4), (1, 4)],
        &[(0, 20), (1, 20), (2, 20), (3, 20)],
    ];
    let cases = [
        (small(), DType::F32, DType::F32, 1e-5),
        (of_128(), DType::F32, DType::F32, 1e-5),
        (of_128(), DType::BF16, DType::F32, 1e-2),
        (of_128(), DType::F32, DType::BF16, 2e-2),
    ];
    for device in devices() {
        for (config, dtype, state_dtype, bound) in &cases {
            let layer = layer(config, *dtype, &device, 1);
            let rng = &mut Rng::new(7);
            let mut pool = layer.new_pool_with(7, &PoolOptions::default().dtype(*state_dtype)).unwrap();
            poison_pool(&pool);
            let slots: Vec<u32> = (0..4).collect();
            slots.iter().for_each(|slot| pool.zero(*slot).unwrap());
            let (mut fed, mut y) = (vec![vec![]; 4], vec![vec![]; 4]);
            for call in calls {
                let x: Vec<_> = call.iter().map(|(_, n)| rows(rng, *n, config.hidden_size)).collect();
                let lengths: Vec<usize> = call.iter().map(|(_, n)| *n).collect();
                let cu = CuSeqlens::from_lengths(&lengths, &device).unwrap();
                let map: Vec<u32> = call.iter().map(|(n, _)| slots.get(*n).copied().unwrap_or(NO_SLOT)).collect();
                let map = Slots::new(&map, &device).unwrap();
                let idle: Vec<u32> = (4..7).collect();
                let before: Vec<_> = idle.iter().map(|s| bits(&pool, *s)).collect();
                let out = layer
                    .forward_slots(&packed(x.iter().flatten(), *dtype, &device), Some(&cu), &map, &mut pool)
                    .unwrap();
                assert_eq!(out.dims(), [cu.total_tokens(), config.hidden_size]);
                let mut first = 0;
                for ((n, tokens), x) in call.iter().zip(x) {
                    let out = values(&out.narrow(0, first, *tokens).unwrap());
                    first += tokens;
                    match fed.get_mut(*n) {
                        Some(fed) => {
                            fed.extend(x);
                            y[*n].extend(out);
                        }
                        None => assert!(out.iter().all(|y| *y == 0.0), "padding"),
                    }
                }
                for (slot, before) in idle.iter().zip(before) {
                    assert_eq!(bits(&pool, *slot), before, "slot {slot} was touched");
                }
            }
            for n in 0..4 {
                let (want_y, want) = from_scratch(&layer, &fed[n], *state_dtype, &device);
                let what = format!("{dtype:?}, state in {state_dtype:?}, sequence {n}");
                near(&format!("{what}: y"), &y[n], &want_y, *bound);
                for (got, want) in parts(&pool.snapshot(slots[n]).unwrap()).iter().zip(parts(&want)) {
                    near(&what, got, &want, *bound);
                }
            }
        }
    }
}

/// A batch of equal lengths, with boundaries or without: the same call.
#[test]
fn equal_lengths_are_a_batch() {
    for device in devices() {
        for (config, tokens) in [(small(), 1), (of_128(), 1), (of_128(), 5), (small(), 40)] {
            let layer = layer(&config, DType::F32, &device, 2);
            let x = packed(&rows(&mut Rng::new(1), 3 * tokens, config.hidden_size), DType::F32, &device);
            let slots = Slots::from_to(&[0, 0, NO_SLOT], &[2, 1, 3], &device).unwrap();
            let run = |batched: bool| {
                let mut pool = layer.new_pool(4).unwrap();
                let y = if batched {
                    let x = x.reshape((3, tokens, config.hidden_size)).unwrap();
                    let y = layer.forward_slots(&x, None, &slots, &mut pool).unwrap();
                    assert_eq!(y.dims(), x.dims());
                    y
                } else {
                    let cu = CuSeqlens::from_lengths(&[tokens; 3], &device).unwrap();
                    layer.forward_slots(&x, Some(&cu), &slots, &mut pool).unwrap()
                };
                [values(&y), values(pool.conv()), values(pool.recurrent())]
            };
            let (batched, packed) = (run(true), run(false));
            for (batched, packed) in batched.iter().zip(&packed) {
                near("packed", packed, batched, if tokens <= 16 { 0.0 } else { 1e-6 });
            }
        }
    }
}

#[test]
fn a_slot_is_made_zero() {
    for device in devices() {
        let layer = layer(&small(), DType::F32, &device, 3);
        for dtype in [DType::F32, DType::BF16] {
            let mut pool = layer.new_pool_with(3, &PoolOptions::default().dtype(dtype)).unwrap();
            poison_pool(&pool);
            pool.zero(1).unwrap();
            assert!(parts(&pool.snapshot(1).unwrap()).concat().iter().all(|x| x.to_bits() == 0));
            for other in [0, 2] {
                assert!(parts(&pool.snapshot(other).unwrap()).concat().iter().all(|x| x.is_nan()));
            }
        }
    }
}

/// Copies within a pool and in and out of it: bit for bit, and nothing else moves.
#[test]
fn fork_snapshot_and_restore() {
    for device in devices() {
        for (config, dtype) in [(small(), DType::F32), (of_128(), DType::BF16)] {
            let layer = layer(&config, DType::F32, &device, 4);
            let mut pool = layer.new_pool_with(4, &PoolOptions::default().dtype(dtype)).unwrap();
            poison_pool(&pool);
            pool.zero(1).unwrap();
            let rows = rows(&mut Rng::new(2), 20, config.hidden_size);
            let x = packed(&rows, DType::F32, &device).unsqueeze(0).unwrap();
            feed(&layer, &rows, 1, &mut pool);
            pool.copy(1, 3).unwrap();
            pool.copy(1, 1).unwrap();
            let before: Vec<_> = (0..4).map(|slot| bits(&pool, slot)).collect();
            assert_eq!(before[1], before[3]);
            let mut snapshot = pool.snapshot(1).unwrap();
            assert_eq!(snapshot.size_in_bytes() * 4, pool.size_in_bytes());
            let y = feed(&layer, &rows, 1, &mut pool);
            for slot in [0, 2, 3] {
                assert_eq!(bits(&pool, slot), before[slot as usize], "slot {slot}");
            }
            // The fork, the snapshot put elsewhere, and the snapshot by itself go on alike.
            assert_eq!(feed(&layer, &rows, 3, &mut pool), y);
            pool.restore(0, &snapshot).unwrap();
            assert_eq!(bits(&pool, 0), before[1]);
            assert_eq!(bits(&pool, 2), before[2]);
            assert_eq!(feed(&layer, &rows, 0, &mut pool), y);
            let mut alone = pool.snapshot(2).unwrap();
            alone.restore(&snapshot).unwrap();
            assert_eq!(values(&layer.forward(&x, &mut alone).unwrap()), y);
            assert_eq!(values(&layer.forward(&x, &mut snapshot).unwrap()), y);

            refused(pool.zero(4), &["StatePool: zero: expected a slot below 4, got 4"]);
            refused(pool.copy(4, 0), &["StatePool: copy: expected a slot below 4, got 4"]);
            refused(pool.copy(0, NO_SLOT), &["StatePool: copy: expected a slot below 4"]);
            refused(pool.snapshot(9), &["StatePool: snapshot: expected a slot below 4, got 9"]);
            refused(pool.restore(4, &snapshot), &["StatePool: restore: expected a slot below 4, got 4"]);
            let two = layer.new_state_as(2, dtype).unwrap();
            refused(pool.restore(0, &two), &["StatePool: restore: conv: expected F32 [1, 3,", "got F32 [2, 3,"]);
            let other = if dtype == DType::F32 { DType::BF16 } else { DType::F32 };
            let other = layer.new_state_as(1, other).unwrap();
            refused(pool.restore(0, &other), &["StatePool: restore: recurrent: expected", "got"]);
        }
    }
}

/// Nothing to feed: states stay, or are copied to where they are to be.
#[test]
fn calls_without_tokens_copy_states() {
    for device in devices() {
        let layer = layer(&small(), DType::F32, &device, 6);
        let mut pool = layer.new_pool(4).unwrap();
        let rows = rows(&mut Rng::new(4), 5, 32);
        feed(&layer, &rows, 1, &mut pool);
        let want = bits(&pool, 1);
        let none = packed(&rows, DType::F32, &device).narrow(0, 0, 0).unwrap();
        let cu = CuSeqlens::from_lengths(&[0, 0, 0], &device).unwrap();
        let slots = Slots::from_to(&[1, NO_SLOT, 1], &[3, 2, 0], &device).unwrap();
        let y = layer.forward_slots(&none, Some(&cu), &slots, &mut pool).unwrap();
        assert_eq!(y.dims(), [0, 32]);
        for slot in [0, 1, 3] {
            assert_eq!(bits(&pool, slot), want, "slot {slot}");
        }
        assert!(bits(&pool, 2).iter().all(|x| *x == 0));
        let slots = Slots::new(&[], &device).unwrap();
        let cu = CuSeqlens::from_lengths(&[], &device).unwrap();
        layer.forward_slots(&none, Some(&cu), &slots, &mut pool).unwrap();
    }
}

#[test]
fn what_is_refused_leaves_the_pool_as_it_was() {
    for device in &devices() {
        let layer = layer(&small(), DType::F32, device, 7);
        let mut pool = layer.new_pool(3).unwrap();
        let zeros = |shape: &[usize]| Tensor::zeros(shape, DType::F32, device).unwrap();
        let cu = CuSeqlens::from_lengths(&[2, 3], device).unwrap();
        let slots = Slots::new(&[0, 1], device).unwrap();
        poison_pool(&pool);
        let before: Vec<_> = (0..3).map(|s| bits(&pool, s)).collect();
        let mut refuse = |x: &Tensor, cu: Option<&CuSeqlens>, slots: &Slots, parts: &[&str]| {
            refused(layer.forward_slots(x, cu, slots, &mut pool), parts);
            (0..3).for_each(|s| assert_eq!(bits(&pool, s), before[s as usize]));
        };
        let x = zeros(&[5, 32]);
        refuse(&zeros(&[6, 32]), Some(&cu), &slots, &["GatedDeltaNet: x: expected shape [5, 32]", "got [6, 32]"]);
        refuse(&zeros(&[5, 31]), Some(&cu), &slots, &["GatedDeltaNet: x: expected shape [5, 32]", "got [5, 31]"]);
        refuse(&x, None, &slots, &["GatedDeltaNet: x: expected shape [batch, tokens, 32], got [5, 32]"]);
        refuse(&zeros(&[3, 1, 32]), None, &slots, &["GatedDeltaNet: slots:", "[3]", "[2]"]);
        let half = x.to_dtype(DType::F16).unwrap();
        refuse(&half, Some(&cu), &slots, &["GatedDeltaNet: x: expected dtype F32 (the weights'), got F16"]);
        let far = Slots::new(&[0, 3], device).unwrap();
        refuse(&x, Some(&cu), &far, &["slots: expected values below 3 (the state's slots), got 3 at 1"]);
        if device.is_cpu() {
            let twice = Slots::from(&Tensor::new(&[1u32, 1], device).unwrap());
            refuse(&x, Some(&cu), &twice, &["slots: expected distinct values, got 1 a second time at 1"]);
        }
        // Nor is a state copied, where there are no tokens, before all slots are known to fit.
        let (none, cu_none) = (x.narrow(0, 0, 0).unwrap(), CuSeqlens::from_lengths(&[0, 0], device).unwrap());
        let mut refuse_none = |slots: &Slots, parts: &[&str]| refuse(&none, Some(&cu_none), slots, parts);
        refuse_none(&far, &["slots: expected values below 3 (the state's slots), got 3 at 1"]);
        let far = Slots::from_to(&[0, 1], &[2, 3], device).unwrap();
        refuse_none(&far, &["slots: expected values below 3 (the state's slots), got 3 at 1"]);
        let map = |slots: [u32; 2]| Tensor::new(&slots, device).unwrap();
        let swap = Slots::from_tensors(&map([0, 1]), &map([1, 0]));
        let why = match device.is_cpu() {
            true => "expected no slot to be written that another sequence reads, got 0, read at 0 and written at 1",
            false => "expected them made from host values",
        };
        refuse_none(&swap, &[why]);
        let other = crate::random_layer::layer(&of_128(), DType::F32, device, 7);
        let mut wrong = other.new_pool(3).unwrap();
        let run = layer.forward_slots(&x, Some(&cu), &slots, &mut wrong);
        refused(run, &["GatedDeltaNet: pool: expected states of conv [3, 128]"]);
        refused(layer.new_pool(0), &["GatedDeltaNet: capacity: expected at least 1 slot, got 0"]);
        refused(
            layer.new_pool_with(1, &PoolOptions::default().dtype(DType::F16)),
            &["expected dtype f32 or bf16, got F16"],
        );
    }
}

/// A slot out of range is padding on a device and an error on the CPU, whatever is left of it in u32.
#[test]
fn slots_out_of_range_write_nothing() {
    for device in &devices() {
        let layer = layer(&of_128(), DType::F32, device, 1);
        let options = [PoolOptions::default(), PoolOptions::default().ring()];
        for (options, tokens) in options.iter().flat_map(|options| [1, 9, 40].map(|tokens| (options, tokens))) {
            let mut pool = layer.new_pool_with(4, options).unwrap();
            let x = packed(&rows(&mut Rng::new(3), tokens, layer.config().hidden_size), DType::F32, device)
                .unsqueeze(0)
                .unwrap();
            layer.forward_slots(&x, None, &Slots::new(&[2], device).unwrap(), &mut pool).unwrap();
            let before = parts(&pool.snapshot(2).unwrap());
            let read: &[i64] = if device.is_cpu() { &[7, -2, 1 << 32, i64::from(u32::MAX)] } else { &[7, -2] };
            for read in read {
                let [read, write] = [*read, 2].map(|slot| Tensor::new(&[slot], device).unwrap());
                let y = layer.forward_slots(&x, None, &Slots::from_tensors(&read, &write), &mut pool);
                match device.is_cpu() {
                    true => refused(y, &["slot"]),
                    false => assert!(values(&y.unwrap()).iter().all(|y| *y == 0.), "{read} with {tokens} tokens"),
                }
                assert!(before == parts(&pool.snapshot(2).unwrap()), "{read} with {tokens} tokens");
            }
        }
    }
}

#[test]
fn states_of_no_sequences() {
    for device in &devices() {
        let state = layer(&of_128(), DType::F32, device, 1).new_state(0).unwrap();
        let copy = GdnState::from_tensors(state.conv(), state.recurrent()).unwrap();
        assert_eq!(copy.snapshot().unwrap().batch(), 0);
    }
}
