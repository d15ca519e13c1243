//! The state after every so many tokens: what it must equal, where it goes, and what a call leaves alone. The property
//! tests compare it with the reference besides.

use crate::errors::Rule;
use crate::semantics::{args, options, Args};
use crate::support::{devices, dtype_for, has, refused, rel_rms, values, TENSOR_CORES};
use candle_core::{DType, Device, Tensor};
use candle_gdn::{checkpoint_rows, Algo, CuSeqlens, GdnPrefill, RuleOptions, CHECKPOINT_MULTIPLE};

const ALGOS: [Algo; 5] = [Algo::Auto, Algo::Recurrent, Algo::Recurrent128, Algo::ChunkedSm80, Algo::ChunkedSm90];

/// Those that the device has, with q, k and v in a dtype that they take, in one piece.
fn algos(device: &Device) -> impl Iterator<Item = (DType, RuleOptions)> + '_ {
    let on_device = ALGOS.into_iter().filter(|algo| has(device, *algo));
    on_device.map(|algo| (dtype_for(algo), RuleOptions { segments: 1, ..options(algo) }))
}

/// Room for so many checkpoints, filled with a number that no kernel writes.
fn room(rows: usize, dtype: DType, device: &Device) -> Tensor {
    Tensor::full(9f32, (rows, 4, 128, 128), device).unwrap().to_dtype(dtype).unwrap()
}

fn untouched(x: &Tensor) -> bool {
    values(x).iter().all(|&x| x == 9.0)
}

/// o and the new state, with checkpoints or without.
fn call(x: &Args, dtype: DType, options: RuleOptions, to: Option<(&Tensor, usize)>) -> [Vec<f64>; 2] {
    let state = x.state.to_dtype(dtype).unwrap().force_contiguous().unwrap();
    let o = x.prefill(&state, None, options, |op| match to {
        Some((to, every)) => op.with_checkpoints(to, every),
        None => op,
    });
    [values(&o), values(&state)]
}

/// Bit for bit the states of calls that end there, and asking for them changes nothing else.
#[test]
fn they_are_the_states_of_prefix_calls() {
    for device in devices() {
        for (io, options) in algos(&device) {
            for (dtype, every) in [(DType::F32, 64), (DType::F32, 128), (DType::BF16, 64)] {
                let x = args(2, 200, &device).in_dtype(io);
                let to = room(400 / every, dtype, &device);
                let with = call(&x, dtype, options, Some((&to, every)));
                let case = format!("{:?}, {dtype:?} every {every}", options.algo);
                assert!(with == call(&x, dtype, options, None), "{case}: asking changes the results");
                let mut used = vec![false; 400 / every];
                for n in 0..2 {
                    let rows = checkpoint_rows(n * 200, 200, every);
                    assert_eq!(rows.len(), 200 / every);
                    for (j, row) in rows.enumerate() {
                        let [_, want] = call(&x.tokens(0, (j + 1) * every), dtype, options, None);
                        let head = want.len() / 2;
                        let got = values(&to.get(row).unwrap());
                        assert!(got == want[n * head..][..head], "{case}: sequence {n}, checkpoint {j}");
                        used[row] = true;
                    }
                }
                for row in (0..used.len()).filter(|row| !used[*row]) {
                    assert!(untouched(&to.get(row).unwrap()), "{case}: row {row}, which is nobody's");
                }
            }
        }
    }
}

/// From a checkpoint the rest of the tokens gives what the whole gives.
#[test]
fn a_sequence_goes_on_from_one() {
    for device in devices() {
        for (io, options) in algos(&device) {
            let x = args(1, 300, &device).in_dtype(io);
            let to = room(300 / 64, DType::F32, &device);
            let [o, state] = call(&x, DType::F32, options, Some((&to, 64)));
            for j in 0..300 / 64 {
                let done = (j + 1) * 64;
                let rest = Args { state: to.narrow(0, j, 1).unwrap(), ..x.tokens(done, 300 - done) };
                let [o_rest, state_rest] = call(&rest, DType::F32, options, None);
                let errors = [rel_rms(&o_rest, &o[done * 4 * 128..]), rel_rms(&state_rest, &state)];
                // A cut at a chunk's end takes the chunks and tokens as they were; a state in f32 is not rounded.
                assert!(errors.iter().all(|e| *e < 1e-6), "{:?} from {done}: {errors:?}", options.algo);
            }
        }
    }
}

/// Packed sequences, of which some are empty or shorter than the first checkpoint and one is padding, with slots in
/// another order.
#[test]
fn packed_sequences_have_rows_of_their_own() {
    let lengths = [70, 0, 130, 63, 257, 64, 16];
    let slots = [2u32, 0, u32::MAX, 3, 1, 6, 5];
    for device in devices() {
        for (io, options) in algos(&device) {
            for (dtype, every) in [(DType::F32, 64), (DType::BF16, 128)] {
                let total = lengths.iter().sum::<usize>();
                let x = args(lengths.len(), 600 / lengths.len() + 1, &device).in_dtype(io).packed();
                let x = x.map(|t| t.narrow(0, 0, total).unwrap());
                let state = x.state.to_dtype(dtype).unwrap().force_contiguous().unwrap();
                let map = Tensor::new(&slots, &device).unwrap();
                let cu = CuSeqlens::from_lengths(&lengths, &device).unwrap();
                // More rows than there can be.
                let to = room(total / every + 2, dtype, &device);
                x.prefill(&state, Some(&cu), options, |op| op.with_slots(&map).with_checkpoints(&to, every));

                let (mut first, mut next) = (0, 0);
                for (n, &tokens) in lengths.iter().enumerate() {
                    let case = format!("{:?}, {dtype:?} every {every}, sequence {n}", options.algo);
                    let rows = checkpoint_rows(first, tokens, every);
                    assert!((next..rows.start).all(|row| untouched(&to.get(row).unwrap())), "{case}: rows before");
                    next = rows.end;
                    for (j, row) in rows.enumerate() {
                        let got = to.get(row).unwrap();
                        if slots[n] == u32::MAX {
                            assert!(untouched(&got), "{case}: padding");
                            continue;
                        }
                        // Alone, in a batch of one.
                        let part = |t: &Tensor| t.narrow(0, first, (j + 1) * every).unwrap().unsqueeze(0).unwrap();
                        let state = x.state.narrow(0, slots[n] as usize, 1).unwrap();
                        let [_, want] = call(&Args { state, ..x.map(part) }, dtype, options, None);
                        // A kernel may cut the work of one sequence up otherwise, and round elsewhere.
                        let bound = if dtype == DType::BF16 { 2f64.powi(-8) } else { 1e-6 };
                        let error = rel_rms(&values(&got), &want);
                        assert!(error <= bound, "{case}, checkpoint {j}: {error:e}");
                    }
                    first += tokens;
                }
                assert!((next..to.dims()[0]).all(|row| untouched(&to.get(row).unwrap())), "rows behind");
            }
        }
    }
}

/// Both ways to keep a state keep the same.
#[test]
fn they_are_among_the_token_states() {
    for device in devices() {
        for algo in [Algo::Auto, Algo::Recurrent, Algo::Recurrent128] {
            let x = args(1, 130, &device);
            let state = x.state.force_contiguous().unwrap();
            let (every_token, to) = (room(130, DType::F32, &device), room(2, DType::F32, &device));
            let tokens = every_token.unsqueeze(0).unwrap();
            x.prefill(&state, None, options(algo), |op| op.with_checkpoints(&to, 64).with_token_states(&tokens));
            for (row, token) in [(0, 63), (1, 127)] {
                let (got, want) = (to.get(row).unwrap(), every_token.get(token).unwrap());
                assert!(values(&got) == values(&want), "{algo:?}, after token {token}");
            }
        }
    }
}

/// Fewer tokens than one checkpoint needs no row, and a view that begins anywhere is written where it lies.
#[test]
fn few_tokens_and_any_place() {
    for device in devices() {
        for (io, options) in algos(&device) {
            let x = args(2, 20, &device).in_dtype(io);
            let none = room(1, DType::F32, &device).narrow(0, 0, 0).unwrap();
            call(&x, DType::F32, options, Some((&none, 64)));
            let spare = room(1, DType::F32, &device);
            call(&x, DType::F32, options, Some((&spare, 64)));
            assert!(untouched(&spare), "{:?}", options.algo);
        }
        for algo in [Algo::Auto, Algo::Recurrent] {
            let x = args(1, 64, &device);
            let all = Tensor::full(9f32, 4 * 128 * 128 + 2, &device).unwrap();
            let odd = all.narrow(0, 1, 4 * 128 * 128).unwrap().reshape((1, 4, 128, 128)).unwrap();
            let [_, state] = call(&x, DType::F32, options(algo), Some((&odd, 64)));
            let all = values(&all);
            assert!(all[1..=state.len()] == state && all[0] == 9.0 && all[state.len() + 1] == 9.0, "{algo:?}");
        }
    }
}

#[test]
fn nonsense_is_refused() {
    for device in &devices() {
        let z = |shape: &[usize]| Tensor::zeros(shape, DType::F32, device).unwrap();
        let good = Rule::new(&[2, 100], 2, device);
        let run = |rule: &Rule, to: &Tensor, every| rule.prefill(|op| op.with_checkpoints(to, every));
        let to = z(&[3, 4, 32, 16]);
        run(&good, &to, 64).unwrap();
        run(&good, &to, 128).unwrap();

        assert_eq!(CHECKPOINT_MULTIPLE, 64);
        for every in [0, 1, 63, 65, 96] {
            let sentence = format!("gdn_prefill: every: expected a positive multiple of 64 tokens, got {every}");
            refused(run(&good, &to, every), &[&sentence]);
        }
        let with = |to: &Tensor, parts: &[&str]| {
            refused(run(&good, to, 64), &[&["gdn_prefill: checkpoints:"], parts].concat());
        };
        let shape = "expected shape [rows, 4, 32, 16] with at least 3 rows (200 tokens, one for every 64), got";
        with(&z(&[2, 4, 32, 16]), &[shape, "[2, 4, 32, 16]"]);
        with(&z(&[3, 4, 16, 32]), &[shape, "[3, 4, 16, 32]"]);
        with(&z(&[3, 1, 4, 32, 16]), &[shape, "[3, 1, 4, 32, 16]"]);
        with(&z(&[4 * 32 * 16]), &[shape, "[2048]"]);
        with(&to.to_dtype(DType::BF16).unwrap(), &["expected dtype F32, got BF16"]);
        let half_state = good.with(|x| x.state = x.state.to_dtype(DType::BF16).unwrap());
        refused(run(&half_state, &to, 64), &["gdn_prefill: checkpoints: expected dtype BF16, got F32"]);
        with(&z(&[3, 4, 16, 32]).transpose(2, 3).unwrap(), &["expected a contiguous tensor, got strides"]);
        if device.is_cuda() {
            with(&to.to_device(&Device::Cpu).unwrap(), &["Cpu"]);
        }

        // Its storage is its own.
        good.shares_nothing("checkpoints", &[3, 4, 32, 16], |op, to| op.with_checkpoints(to, 64));
        let both = z(&[200 * 4 * 32 * 16]);
        let to = both.narrow(0, 0, 3 * 4 * 32 * 16).unwrap().reshape((3, 4, 32, 16)).unwrap();
        let token_states = both.reshape((2, 100, 4, 32, 16)).unwrap();
        let run = good.prefill(|op| op.with_checkpoints(&to, 64).with_token_states(&token_states));
        refused(run, &["checkpoints: shares its storage with token_states; it is written in place"]);
    }
}

/// No kernel that writes them is passed over for one that does not.
#[test]
fn auto_takes_a_kernel_that_writes_them() {
    for device in devices() {
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            let x = args(1, 4096, &device).in_dtype(dtype);
            let to = room(64, DType::F32, &device);
            let op = GdnPrefill::new(x.gates.clone(), &x.state, None, options(Algo::Auto)).unwrap();
            let algo = op.with_checkpoints(&to, 64).algo(&x.q, &x.k, &x.v).unwrap();
            let writes = [Algo::Recurrent, Algo::Recurrent128].into_iter().chain(TENSOR_CORES).any(|a| a == algo);
            assert!(writes, "{dtype:?}: {algo:?}");
        }
    }
}
