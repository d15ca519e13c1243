//! Slots of the ops: read here and written there, forks, padding, dtypes of the maps, and what is refused.

use crate::errors::refused;
use crate::semantics::{args, options, Args};
use crate::support::{devices, dtype_for, has, poison, rel_rms, to_device, values, Rng};
use candle_core::{DType, Device, Tensor};
use candle_gdn::{
    Algo, CausalConv1d, CuSeqlens, Gates, GdnDecode, GdnPrefill, GdnStep, Slots, StepAlgo, StepOptions, NO_SLOT,
};

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

/// The pools after a call through separate slots are those before, but for the slots written: which hold what `alone`
/// made in place of a copy of the slot that was read. Rows of y likewise; of padding they are zero.
///
/// On CUDA it may depend on the number of sequences how one is cut up, and so where it is rounded.
fn check(what: &str, before: &[&Tensor], after: &[&Tensor], alone: impl Fn(usize, u32) -> Vec<Vec<f64>>, y: &[Tensor]) {
    for (before, after) in before.iter().zip(after) {
        for s in (0..CAPACITY as u32).filter(|s| ![0, 4, 5].contains(s)) {
            assert_eq!(slot(before, s), slot(after, s), "{what}: slot {s} was not written");
        }
    }
    for (n, (&from, &to)) in READ.iter().zip(&WRITE).enumerate() {
        if from == NO_SLOT || to == NO_SLOT {
            assert!(values(&y[n]).iter().all(|y| *y == 0.0), "{what}: padding {n}");
            continue;
        }
        let want = alone(n, from);
        let near = |part: &str, got: &Tensor, want: &[f64]| {
            let bound = match () {
                () if got.device().is_cpu() => 0.0,
                () if what.contains("BF16") => 4e-3,
                () => 1e-5,
            };
            let error = rel_rms(&values(got), want);
            assert!(error <= bound, "{what}: {part} of {n} is off by {error:e}");
        };
        near("y", &y[n], &want[0]);
        for (after, want) in after.iter().zip(&want[1..]) {
            near("the new state", &after.get(to as usize).unwrap(), want);
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

#[test]
fn the_rule_reads_one_slot_and_writes_another() {
    for device in devices() {
        for algo in Algo::ALL.into_iter().filter(|algo| has(&device, *algo)) {
            for state_dtype in [DType::F32, DType::BF16] {
                let lengths: &[usize] = if algo == Algo::Decode128 { &[1, 7] } else { &[1, 7, 70] };
                for &tokens in lengths {
                    let x = args(5, tokens, &device).in_dtype(dtype_for(algo));
                    let before = pool(&[4, 128, 128], state_dtype, &device, 1);
                    let one = |n: usize, from: u32| {
                        let x = x.sequences(n, 1);
                        let state = before.narrow(0, from as usize, 1).unwrap().force_contiguous().unwrap();
                        // In one piece, as in the batch.
                        let options = candle_gdn::RuleOptions { segments: 1, ..options(algo) };
                        let op = GdnPrefill::new(x.gates.clone(), &state, None, options).unwrap();
                        let o = op.forward(&x.q, &x.k, &x.v).unwrap();
                        vec![values(&o), values(&state)]
                    };
                    for (name, slots) in maps(&device) {
                        let what =
                            format!("{algo:?}, {:?}, state in {state_dtype:?}, {tokens} tokens, {name}", x.q.dtype());
                        let after = before.force_contiguous().unwrap();
                        poison(5 * tokens * 512, x.q.dtype(), &device).unwrap();
                        let options = candle_gdn::RuleOptions { segments: 1, ..options(algo) };
                        let op = GdnPrefill::new(x.gates.clone(), &after, None, options).unwrap();
                        let o = op.with_slots(&slots).forward(&x.q, &x.k, &x.v).unwrap();
                        let y: Vec<_> = (0..5).map(|n| o.get(n).unwrap()).collect();
                        check(&what, &[&before], &[&after], one, &y);
                    }
                }
            }
        }
    }
}

#[test]
fn decode_reads_one_slot_and_writes_another() {
    for device in devices() {
        let x = args(5, 1, &device);
        let x = crate::semantics::one_token(&x, 0);
        let before = pool(&[4, 128, 128], DType::F32, &device, 2);
        let run = |x: &Args, state: &Tensor, slots: Option<&Slots>| {
            let mut op = GdnDecode::new(x.gates.clone(), state, options(Algo::Recurrent)).unwrap();
            if let Some(slots) = slots {
                op = op.with_slots(slots);
            }
            op.forward(&x.q, &x.k, &x.v).unwrap()
        };
        let one = |n: usize, from: u32| {
            let part = |t: &Tensor| t.narrow(0, n, 1).unwrap();
            let gates = Gates { a: part(&x.gates.a), b: part(&x.gates.b), ..x.gates.clone() };
            let state = before.narrow(0, from as usize, 1).unwrap().force_contiguous().unwrap();
            let x = Args { q: part(&x.q), k: part(&x.k), v: part(&x.v), gates, state: state.clone() };
            vec![values(&run(&x, &state, None)), values(&state)]
        };
        for (name, slots) in maps(&device) {
            let after = before.force_contiguous().unwrap();
            let o = run(&x, &after, Some(&slots));
            let y: Vec<_> = (0..5).map(|n| o.get(n).unwrap()).collect();
            check(name, &[&before], &[&after], one, &y);
        }
    }
}

/// Lengths of no token and of some: an empty sequence has its state copied.
#[test]
fn packed_sequences_read_one_slot_and_write_another() {
    for device in devices() {
        for algo in Algo::ALL.into_iter().filter(|algo| has(&device, *algo)) {
            let long = if algo == Algo::Decode128 { 16 } else { 70 };
            let lengths = [long, 0, 5, 3, 9];
            let cu = CuSeqlens::from_lengths(&lengths, &device).unwrap();
            let x = args(1, cu.total_tokens(), &device).in_dtype(dtype_for(algo)).packed();
            let before = pool(&[4, 128, 128], DType::F32, &device, 3);
            let first = cu.as_slice();
            let options = candle_gdn::RuleOptions { segments: 1, ..options(algo) };
            let one = |n: usize, from: u32| {
                let state = before.narrow(0, from as usize, 1).unwrap().force_contiguous().unwrap();
                if lengths[n] == 0 {
                    return vec![vec![], values(&state)];
                }
                let part = |t: &Tensor| t.narrow(0, first[n] as usize, lengths[n]).unwrap();
                let gates = Gates { a: part(&x.gates.a), b: part(&x.gates.b), ..x.gates.clone() };
                let cu = CuSeqlens::from_lengths(&[lengths[n]], &device).unwrap();
                let op = GdnPrefill::new(gates, &state, Some(&cu), options).unwrap();
                let o = op.forward(&part(&x.q), &part(&x.k), &part(&x.v)).unwrap();
                vec![values(&o), values(&state)]
            };
            for (name, slots) in maps(&device) {
                let after = before.force_contiguous().unwrap();
                let op = GdnPrefill::new(x.gates.clone(), &after, Some(&cu), options).unwrap().with_slots(&slots);
                let o = op.forward(&x.q, &x.k, &x.v).unwrap();
                let y: Vec<_> = (0..5).map(|n| o.narrow(0, first[n] as usize, lengths[n]).unwrap()).collect();
                check(&format!("{algo:?}, {:?}, {name}", x.q.dtype()), &[&before], &[&after], one, &y);
            }
        }
    }
}

#[test]
fn the_convolution_reads_one_slot_and_writes_another() {
    const CHANNELS: usize = 24;
    for device in devices() {
        let randn = |shape: &[usize]| Tensor::randn(0f32, 1., shape, &device).unwrap();
        for width in [2, 4, 8] {
            // Shorter than the window, as long, and longer; and sequences of none.
            for lengths in [[1; 5], [2; 5], [0; 5], [70, 0, 5, 3, 9], [3, 40, 0, 0, 1]] {
                let cu = CuSeqlens::from_lengths(&lengths, &device).unwrap();
                let (total, first) = (cu.total_tokens(), cu.as_slice());
                let x = to_device(&Tensor::randn(0f32, 1., (total, CHANNELS), &Device::Cpu).unwrap(), &device).unwrap();
                if total == 0 && device.is_cuda() {
                    continue; // candle has no empty launch
                }
                let (weight, before) =
                    (randn(&[CHANNELS, width]), pool(&[width - 1, CHANNELS], DType::F32, &device, 4));
                let one = |n: usize, from: u32| {
                    let state = before.narrow(0, from as usize, 1).unwrap().force_contiguous().unwrap();
                    if lengths[n] == 0 {
                        return vec![vec![], values(&state)];
                    }
                    let x = x.narrow(0, first[n] as usize, lengths[n]).unwrap().unsqueeze(0).unwrap();
                    let y = CausalConv1d::new(&state, None, true).unwrap().forward(&x, &weight).unwrap();
                    vec![values(&y), values(&state)]
                };
                for (name, slots) in maps(&device) {
                    let after = before.force_contiguous().unwrap();
                    poison(total * CHANNELS, DType::F32, &device).unwrap();
                    let op = CausalConv1d::new(&after, Some(&cu), true).unwrap().with_slots(&slots);
                    let y = op.forward(&x, &weight).unwrap();
                    let y: Vec<_> = (0..5).map(|n| y.narrow(0, first[n] as usize, lengths[n]).unwrap()).collect();
                    check(&format!("width {width}, {lengths:?}, {name}"), &[&before], &[&after], one, &y);
                }
            }
        }
    }
}

/// The step in all its variants: one token, several, and packed sequences of different lengths.
#[test]
fn the_step_reads_one_slot_and_writes_another() {
    let (heads, dim, keys) = (4, 128, 2 * 128);
    let (channels, size) = (2 * keys + heads * dim, heads * dim);
    for device in devices() {
        let randn = |shape: &[usize]| Tensor::randn(0f32, 1., shape, &device).unwrap();
        for algo in StepAlgo::ALL {
            for lengths in [[1; 5], [3; 5], [16, 0, 5, 1, 9]] {
                let cu = CuSeqlens::from_lengths(&lengths, &device).unwrap();
                let (total, first) = (cu.total_tokens(), cu.as_slice());
                let same = cu.max_len() * 5 == total;
                if algo == StepAlgo::Split && cu.max_len() > 1 {
                    continue;
                }
                let (qkv, z) = (randn(&[total, channels]), randn(&[total, size]));
                let (a, b) = (randn(&[total, heads]), randn(&[total, heads]));
                let (a_log, dt_bias) = (randn(&[heads]), randn(&[heads]));
                let (weight, norm) = (randn(&[channels, 4]), randn(&[dim]));
                let conv_before = pool(&[3, channels], DType::F32, &device, 5);
                let before = pool(&[heads, dim, dim], DType::F32, &device, 6);
                let part = |t: &Tensor, n: usize| t.narrow(0, first[n] as usize, lengths[n]).unwrap();
                let options = StepOptions { algo, ..StepOptions::default() };
                let one = |n: usize, from: u32| {
                    let alone = |t: &Tensor| t.narrow(0, from as usize, 1).unwrap().force_contiguous().unwrap();
                    let (conv, state) = (alone(&conv_before), alone(&before));
                    if lengths[n] == 0 {
                        return vec![vec![], values(&conv), values(&state)];
                    }
                    let row = |t: &Tensor| part(t, n).unsqueeze(0).unwrap();
                    let gates = Gates { a: row(&a), b: row(&b), a_log: a_log.clone(), dt_bias: dt_bias.clone() };
                    let op = GdnStep::new(gates, &norm, &conv, &state, options).unwrap();
                    let y = op.forward(&row(&qkv), &row(&z), &weight).unwrap();
                    vec![values(&y), values(&conv), values(&state)]
                };
                for packed in [true, false].into_iter().filter(|packed| *packed || same) {
                    if packed && algo == StepAlgo::Split {
                        continue;
                    }
                    for (name, slots) in maps(&device) {
                        let what = format!("{algo:?}, {lengths:?}, packed {packed}, {name}");
                        let after = [&conv_before, &before].map(|t| t.force_contiguous().unwrap());
                        let shaped = |t: &Tensor| match packed {
                            true => t.clone(),
                            false => t.reshape((5, total / 5, t.dims()[1])).unwrap(),
                        };
                        let (a, b) = (shaped(&a), shaped(&b));
                        let gates = Gates { a, b, a_log: a_log.clone(), dt_bias: dt_bias.clone() };
                        let mut op = GdnStep::new(gates, &norm, &after[0], &after[1], options).unwrap();
                        op = op.with_slots(&slots);
                        if packed {
                            op = op.with_cu_seqlens(&cu).unwrap();
                        }
                        poison(total * size, DType::F32, &device).unwrap();
                        let run = op.forward(&shaped(&qkv), &shaped(&z), &weight);
                        let y = match run {
                            Err(e) if device.is_cuda() && e.to_string().contains("on this device") => continue,
                            run => run.unwrap().flatten_to(if packed { 0 } else { 1 }).unwrap(),
                        };
                        let y: Vec<_> = (0..5).map(|n| part(&y, n)).collect();
                        check(&what, &[&conv_before, &before], &[&after[0], &after[1]], one, &y);
                    }
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
        let zeros = |shape: &[usize]| Tensor::zeros(shape, DType::F32, device).unwrap();
        let step = |lengths: &[usize], qkv: &[usize], algo: StepAlgo| {
            let cu = CuSeqlens::from_lengths(lengths, device)?;
            let (ab, heads) = (zeros(&[lengths.iter().sum(), 4]), zeros(&[4]));
            let gates = Gates { a: ab.clone(), b: ab, a_log: heads.clone(), dt_bias: heads };
            let (conv, state) = (zeros(&[2, 3, 1024]), zeros(&[2, 4, 128, 128]));
            let options = StepOptions { algo, ..StepOptions::default() };
            let op = GdnStep::new(gates, &zeros(&[128]), &conv, &state, options)?.with_cu_seqlens(&cu)?;
            let z = zeros(&[&qkv[..qkv.len() - 1], &[512]].concat());
            op.forward(&zeros(qkv), &z, &zeros(&[1024, 4]))
        };
        let auto = StepAlgo::Auto;
        assert_eq!(step(&[16, 3], &[19, 1024], auto).unwrap().dims(), [19, 512]);
        refused(step(&[17, 2], &[19, 1024], auto), &["gdn_step: qkv: expected at most 16 tokens a sequence, got 17"]);
        refused(
            step(&[2, 2], &[2, 2, 1024], auto),
            &["gdn_step: qkv: expected shape [tokens, 1024], got [2, 2, 1024]"],
        );
        refused(step(&[2, 2], &[4, 1023], auto), &["gdn_step: qkv: expected shape [tokens, 1024], got [4, 1023]"]);
        refused(step(&[2, 1], &[4, 1024], auto), &["gdn_step:", "expected"]);
        refused(step(&[1, 1, 1], &[3, 1024], auto), &["gdn_step: state: expected 3 slots", "got 2"]);
        refused(step(&[1, 1], &[2, 1024], StepAlgo::Split), &["Split takes one token a sequence, got 1 packed"]);
    }
    let Some(gpu) = devices().into_iter().find(Device::is_cuda) else { return };
    let zeros = |shape: &[usize]| Tensor::zeros(shape, DType::F32, &gpu).unwrap();
    let gates = Gates { a: zeros(&[1, 4]), b: zeros(&[1, 4]), a_log: zeros(&[4]), dt_bias: zeros(&[4]) };
    let (conv, state, norm) = (zeros(&[1, 3, 1024]), zeros(&[1, 4, 128, 128]), zeros(&[128]));
    let op = GdnStep::new(gates, &norm, &conv, &state, StepOptions::default()).unwrap();
    let here = CuSeqlens::from_lengths(&[1], &Device::Cpu).unwrap();
    refused(op.with_cu_seqlens(&here), &["gdn_step: cu_seqlens:", "Cpu"]);
}
