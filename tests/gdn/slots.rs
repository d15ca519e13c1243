//! Slots of the ops: read here and written there, forks, padding, dtypes of the maps, and what is refused.

use crate::semantics::{args, options};
use crate::step_args::StepArgs;
use crate::support::{devices, dtype_for, has, poison, refused, rel_rms, to_device, values, Rng};
use candle_core::{DType, Device, Tensor};
use candle_gdn::ops::{CausalConv1d, GdnPrefill, RuleOptions};
use candle_gdn::{Algo, CuSeqlens, Slots, NO_SLOT};
use std::convert::identity;

const CAPACITY: usize = 9;
/// Four sequences: two read slot 2, one is padding by what it writes, and one stays in its slot.
const READ: [u32; 5] = [2, 2, 7, 4, NO_SLOT];
const WRITE: [u32; 5] = [0, 5, NO_SLOT, 4, 3];

/// A pool of `shape` slots with numbers in all that are read, and NaN in the others.
fn pool(shape: &[usize], dtype: DType, device: &Device, seed: u64) -> Tensor {
    let size: usize = shape.iter().product();
    let rng = &mut Rng::new(seed);
    let mut data = vec![f32::NAN; CAPACITY * size];
    for slot in [2, 4] {
        data[slot * size..][..size].iter_mut().for_each(|x| *x = rng.normal() as f32);
    }
    let pool = Tensor::from_vec(data, [&[CAPACITY], shape].concat(), device).unwrap();
    pool.to_dtype(dtype).unwrap()
}

fn slot(pool: &Tensor, slot: u32) -> Vec<u64> {
    values(&pool.get(slot as usize).unwrap()).into_iter().map(f64::to_bits).collect()
}

/// Runs `together` on copies of the pools, through separate slots to read and to write, and compares: the pools are those
/// before but for the slots written, which hold what `alone` made in place of a copy of the slot that was read. Rows of y
/// likewise; of padding they are zero. An empty sequence has its state copied. `together` is None where the device refuses.
///
/// On CUDA it may depend on the number of sequences how one is cut up, and so where it is rounded.
fn check(
    what: &str,
    lengths: [usize; 5],
    before: &[Tensor],
    alone: impl Fn(usize, &[Tensor]) -> Tensor,
    together: impl Fn(&Slots, &[Tensor]) -> Option<Tensor>,
) {
    for (name, slots) in maps(before[0].device()) {
        let after: Vec<_> = before.iter().map(|pool| pool.force_contiguous().unwrap()).collect();
        let Some(y) = together(&slots, &after) else { continue };
        for (before, after) in before.iter().zip(&after) {
            for s in (0..CAPACITY as u32).filter(|s| ![0, 4, 5].contains(s)) {
                assert_eq!(slot(before, s), slot(after, s), "{what}, {name}: slot {s} was not written");
            }
        }
        let mut first = 0;
        for (n, (&from, &to)) in READ.iter().zip(&WRITE).enumerate() {
            let y = y.narrow(0, first, lengths[n]).unwrap();
            first += lengths[n];
            if from == NO_SLOT || to == NO_SLOT {
                assert!(values(&y).iter().all(|y| *y == 0.0), "{what}, {name}: padding {n}");
                continue;
            }
            let read = |pool: &Tensor| pool.narrow(0, from as usize, 1).unwrap().force_contiguous().unwrap();
            let states: Vec<_> = before.iter().map(read).collect();
            let near = |part: &str, got: &Tensor, want: &[f64]| {
                let bound = match () {
                    () if got.device().is_cpu() => 0.0,
                    () if what.contains("BF16") => 4e-3,
                    () => 1e-5,
                };
                let error = rel_rms(&values(got), want);
                assert!(error <= bound, "{what}, {name}: {part} of {n} is off by {error:e}");
            };
            near("y", &y, &if lengths[n] == 0 { vec![] } else { values(&alone(n, &states)) });
            for (after, want) in after.iter().zip(&states) {
                near("the new state", &after.get(to as usize).unwrap(), &values(want));
            }
        }
    }
}

fn maps(device: &Device) -> [(&'static str, Slots); 3] {
    let u32s = |map: &[u32]| Tensor::new(map, device).unwrap();
    let i64s = |map: &[u32]| {
        let wide: Vec<i64> = map.iter().map(|&s| if s == NO_SLOT { -1 } else { i64::from(s) }).collect();
        Tensor::new(&wide[..], device).unwrap()
    };
    [
        ("host", Slots::from_to(&READ, &WRITE, device).unwrap()),
        ("u32", Slots::from_tensors(&u32s(&READ), &u32s(&WRITE))),
        ("i64", Slots::from_tensors(&i64s(&READ), &i64s(&WRITE))),
    ]
}

/// In one piece, alone as in a batch.
fn in_one_piece(algo: Algo) -> RuleOptions {
    RuleOptions::with(|o| (o.segments, o.algo) = (1, algo))
}

#[test]
fn the_rule_reads_one_slot_and_writes_another() {
    for device in devices() {
        for algo in Algo::RULE.into_iter().filter(|algo| has(&device, *algo)) {
            for state_dtype in [DType::F32, DType::BF16] {
                let lengths: &[usize] = if algo == Algo::Decode { &[1, 7] } else { &[1, 7, 70] };
                for &tokens in lengths {
                    let (x, o) = (args(5, tokens, &device).in_dtype(dtype_for(algo)), in_one_piece(algo));
                    let before = [pool(&[4, 128, 128], state_dtype, &device, 1)];
                    let what = format!("{algo:?}, {:?}, state in {state_dtype:?}, {tokens} tokens", x.q.dtype());
                    let alone = |n, state: &[Tensor]| x.sequences(n, 1).prefill(&state[0], None, o, identity);
                    check(&what, [tokens; 5], &before, alone, |slots, after| {
                        poison(5 * tokens * 512, x.q.dtype(), &device).unwrap();
                        Some(x.prefill(&after[0], None, o, |op| op.with_slots(slots)).flatten(0, 1).unwrap())
                    });
                }
            }
        }
    }
}

#[test]
fn decode_reads_one_slot_and_writes_another() {
    for device in devices() {
        let (x, o) = (args(5, 1, &device).token(0), options(Algo::Recurrent));
        let before = [pool(&[4, 128, 128], DType::F32, &device, 2)];
        let alone = |n, state: &[Tensor]| x.sequences(n, 1).decode(&state[0], o, identity);
        let together = |slots: &Slots, after: &[Tensor]| Some(x.decode(&after[0], o, |op| op.with_slots(slots)));
        check("decode", [1; 5], &before, alone, together);
    }
}

/// Lengths of no token and of some: an empty sequence has its state copied.
#[test]
fn packed_sequences_read_one_slot_and_write_another() {
    for device in devices() {
        for algo in Algo::RULE.into_iter().filter(|algo| has(&device, *algo)) {
            let lengths = [if algo == Algo::Decode { 16 } else { 70 }, 0, 5, 3, 9];
            let cu = CuSeqlens::from_lengths(&lengths, &device).unwrap();
            let (x, o) = (args(1, cu.total_tokens(), &device).in_dtype(dtype_for(algo)).packed(), in_one_piece(algo));
            let before = [pool(&[4, 128, 128], DType::F32, &device, 3)];
            let alone = |n: usize, state: &[Tensor]| {
                let part = x.map(|t| t.narrow(0, cu.as_slice()[n] as usize, lengths[n]).unwrap());
                let cu = CuSeqlens::from_lengths(&[lengths[n]], &device).unwrap();
                part.prefill(&state[0], Some(&cu), o, identity)
            };
            check(&format!("packed, {algo:?}, {:?}", x.q.dtype()), lengths, &before, alone, |slots, after| {
                Some(x.prefill(&after[0], Some(&cu), o, |op| op.with_slots(slots)))
            });
        }
    }
}

#[test]
fn the_convolution_reads_one_slot_and_writes_another() {
    const CHANNELS: usize = 24;
    for device in devices() {
        for width in [2, 4, 8] {
            // Shorter than the window, as long, and longer; and sequences of none.
            for lengths in [[1; 5], [2; 5], [0; 5], [70, 0, 5, 3, 9], [3, 40, 0, 0, 1]] {
                let cu = CuSeqlens::from_lengths(&lengths, &device).unwrap();
                let total = cu.total_tokens();
                let x = to_device(&Tensor::randn(0f32, 1., (total, CHANNELS), &Device::Cpu).unwrap(), &device).unwrap();
                if total == 0 && device.is_cuda() {
                    continue; // candle has no empty launch
                }
                let weight = Tensor::randn(0f32, 1., (CHANNELS, width), &device).unwrap();
                let before = [pool(&[width - 1, CHANNELS], DType::F32, &device, 4)];
                let alone = |n: usize, state: &[Tensor]| {
                    let x = x.narrow(0, cu.as_slice()[n] as usize, lengths[n]).unwrap().unsqueeze(0).unwrap();
                    CausalConv1d::new(&state[0], None, true).unwrap().forward(&x, &weight).unwrap()
                };
                check(&format!("width {width}, {lengths:?}"), lengths, &before, alone, |slots, after| {
                    poison(total * CHANNELS, DType::F32, &device).unwrap();
                    let op = CausalConv1d::new(&after[0], Some(&cu), true).unwrap().with_slots(slots);
                    Some(op.forward(&x, &weight).unwrap())
                });
            }
        }
    }
}

/// The step in all its variants: one token, several, and packed sequences of different lengths.
#[test]
fn the_step_reads_one_slot_and_writes_another() {
    for device in devices() {
        let randn = |shape: &[usize]| Tensor::randn(0f32, 1., shape, &device).unwrap();
        for algo in Algo::STEP {
            for lengths in [[1; 5], [3; 5], [16, 0, 5, 1, 9]] {
                let cu = CuSeqlens::from_lengths(&lengths, &device).unwrap();
                let total = cu.total_tokens();
                if algo == Algo::StepSplit && cu.max_len() > 1 {
                    continue;
                }
                let x = StepArgs::new(&[total], 1, [128, 128], randn).with(|x| x.options.rule.algo = algo);
                let before = [&x.conv, &x.state].map(|state| pool(&state.dims()[1..], DType::F32, &device, 5));
                let on = |states: &[Tensor]| x.with(|x| (x.conv, x.state) = (states[0].clone(), states[1].clone()));
                let alone = |n: usize, states: &[Tensor]| {
                    let part = |t: &Tensor| t.narrow(0, cu.as_slice()[n] as usize, lengths[n])?.unsqueeze(0);
                    on(states).map(|t| part(t).unwrap()).forward(identity).unwrap()
                };
                let batched = (cu.max_len() * 5 == total).then_some(false);
                let packed = (algo != Algo::StepSplit).then_some(true);
                for packed in packed.into_iter().chain(batched) {
                    let shaped = |t: &Tensor| match packed {
                        true => t.clone(),
                        false => t.reshape((5, total / 5, t.dims()[1])).unwrap(),
                    };
                    check(
                        &format!("{algo:?}, {lengths:?}, packed {packed}"),
                        lengths,
                        &before,
                        alone,
                        |slots, after| {
                            poison(total * 512, DType::F32, &device).unwrap();
                            let y = on(after).map(shaped).forward(|op| match packed {
                                true => op.with_slots(slots).with_cu_seqlens(&cu).unwrap(),
                                false => op.with_slots(slots),
                            });
                            match y {
                                Err(e) if device.is_cuda() && e.to_string().contains("on this device") => None,
                                y => Some(y.unwrap().flatten_to(if packed { 0 } else { 1 }).unwrap()),
                            }
                        },
                    );
                }
            }
        }
    }
}

#[test]
fn what_is_refused() {
    for device in &devices() {
        let x = args(2, 3, device);
        let state = Tensor::zeros((4, 4, 128, 128), DType::F32, device).unwrap();
        let run = |slots: &Slots| {
            let op = GdnPrefill::new(x.gates.clone(), &state, None, options(Algo::Auto))?.with_slots(slots);
            op.forward(&x.q, &x.k, &x.v)
        };
        let new = |read: &[u32], write: &[u32]| Slots::from_to(read, write, device);
        run(&new(&[0, 0], &[1, 2]).unwrap()).unwrap();
        // Values that the host knows, on any device.
        refused(Slots::new(&[1, 1], device), &["slots: expected distinct values, got 1 a second time at 1"]);
        refused(new(&[0, 1], &[2, 2]), &["slots: expected distinct values, got 2 a second time at 1"]);
        refused(new(&[0, 1], &[1, 2]), &["that another sequence reads, got 1, read at 1 and written at 0"]);
        refused(new(&[0, 1], &[2]), &["slots: expected as many slots to write as to read (2), got 1"]);
        refused(
            run(&Slots::new(&[0, 4], device).unwrap()),
            &["gdn_prefill: slots: expected values below 4", "got 4 at 1"],
        );
        refused(run(&new(&[0, 1], &[2, 4]).unwrap()), &["gdn_prefill: slots: expected values below 4", "got 4 at 1"]);
        refused(run(&Slots::new(&[0], device).unwrap()), &["gdn_prefill: slots: expected", "[2]", "[1]"]);
        // Tensors.
        let u32s = |map: &[u32]| Tensor::new(map, device).unwrap();
        let i64s = |map: &[i64]| Tensor::new(map, device).unwrap();
        let tensors = |read: &Tensor, write: &Tensor| run(&Slots::from_tensors(read, write));
        tensors(&u32s(&[0, 1]), &i64s(&[3, 2])).unwrap();
        let half = u32s(&[0, 1]).to_dtype(DType::F16).unwrap();
        refused(tensors(&u32s(&[0, 1]), &half), &["gdn_prefill: slots to write: expected dtype U32 or I64, got F16"]);
        refused(tensors(&u32s(&[0, 1]), &u32s(&[2])), &["gdn_prefill: slots to write:", "[2]", "[1]"]);
        let strided = u32s(&[0, 9, 1, 9]).reshape((2, 2)).unwrap().narrow(1, 0, 1).unwrap().squeeze(1).unwrap();
        refused(tensors(&strided, &u32s(&[2, 3])), &["gdn_prefill: slots: expected a contiguous tensor"]);
        if device.is_cpu() {
            refused(tensors(&u32s(&[0, 1]), &u32s(&[1, 0])), &["that another sequence reads, got 0"]);
            refused(tensors(&u32s(&[0, 1]), &u32s(&[2, 2])), &["gdn_prefill: slots: expected distinct values, got 2"]);
            let negative = i64s(&[0, -2]);
            refused(tensors(&negative, &negative), &["gdn_prefill: slots: expected -1 or a slot, got -2 at 1"]);
        }
    }
}

/// Packed sequences in a step: 17 tokens are too many, and shapes must be those of packed tokens.
#[test]
fn what_a_packed_step_refuses() {
    for device in &devices() {
        let step = |lengths: &[usize], qkv: &[usize], algo: Algo| {
            let zeros = |shape: &[usize]| Tensor::zeros(shape, DType::F32, device).unwrap();
            let cu = CuSeqlens::from_lengths(lengths, device)?;
            let step = StepArgs::new(&[lengths.iter().sum()], 2, [128, 128], zeros).with(|s| {
                (s.qkv, s.z) = (zeros(qkv), zeros(&[&qkv[..qkv.len() - 1], &[512]].concat()));
                s.options.rule.algo = algo;
            });
            step.op()?.with_cu_seqlens(&cu)?.forward(&step.qkv, &step.z, &step.conv_weight)
        };
        let auto = Algo::Auto;
        assert_eq!(step(&[16, 3], &[19, 1024], auto).unwrap().dims(), [19, 512]);
        let shape = "gdn_step: qkv: expected shape [tokens, 1024], got";
        refused(step(&[17, 2], &[19, 1024], auto), &["gdn_step: qkv: expected at most 16 tokens a sequence, got 17"]);
        refused(step(&[2, 2], &[2, 2, 1024], auto), &[shape, "[2, 2, 1024]"]);
        refused(step(&[2, 2], &[4, 1023], auto), &[shape, "[4, 1023]"]);
        refused(step(&[2, 1], &[4, 1024], auto), &["gdn_step:", "expected"]);
        refused(step(&[1, 1, 1], &[3, 1024], auto), &["gdn_step: state: expected 3 slots", "got 2"]);
        refused(step(&[1, 1], &[2, 1024], Algo::StepSplit), &["StepSplit supports one token a sequence, got 1 packed"]);
    }
    let Some(gpu) = devices().into_iter().find(Device::is_cuda) else { return };
    let here = CuSeqlens::from_lengths(&[1], &Device::Cpu).unwrap();
    let step = StepArgs::new(&[1], 1, [128, 128], |shape| Tensor::zeros(shape, DType::F32, &gpu).unwrap());
    refused(step.op().unwrap().with_cu_seqlens(&here), &["gdn_step: cu_seqlens:", "Cpu"]);
}
