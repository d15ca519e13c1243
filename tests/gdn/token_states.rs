//! The state after every token: what it must equal, and what a call leaves alone.

use crate::semantics::{args, options, Args};
use crate::support::{assert_rounded, devices, rel_rms, values};
use candle_core::{DType, Device, Tensor};
use candle_gdn::{Algo, CuSeqlens};
use std::convert::identity;

const ALGOS: [Algo; 4] = [Algo::Auto, Algo::Recurrent, Algo::Recurrent128, Algo::Decode128];

/// Room for `lead` token states, filled with a number that no kernel writes.
fn room(lead: &[usize], dtype: DType, device: &Device) -> Tensor {
    Tensor::full(9f32, [lead, &[4, 128, 128]].concat(), device).unwrap().to_dtype(dtype).unwrap()
}

/// o, the new state and the token states of one call over all tokens.
fn call(x: &Args, dtype: DType, algo: Algo) -> [Tensor; 3] {
    let state = x.state.to_dtype(dtype).unwrap().force_contiguous().unwrap();
    let to = room(&x.q.dims()[..2], dtype, x.q.device());
    [x.prefill(&state, None, options(algo), |op| op.with_token_states(&to)), state, to]
}

/// As after as many calls of one token each, whichever op makes them; and asking for them changes nothing else.
#[test]
fn they_are_the_states_of_single_tokens() {
    for device in devices() {
        for algo in ALGOS {
            let x = args(2, 16, &device);
            let [o, state, token_states] = call(&x, DType::F32, algo);
            let near = |what: &str, got: &Tensor, want: &Tensor| {
                let error = rel_rms(&values(got), &values(want));
                assert!(error < 1e-6, "{algo:?}: {what}: {error:e}");
            };
            let single = x.state.force_contiguous().unwrap();
            for t in 0..16 {
                let to = room(&[2], DType::F32, &device);
                let single_o = x.token(t).decode(&single, options(algo), |op| op.with_token_states(&to));
                near("o", &o.narrow(1, t, 1).unwrap(), &single_o);
                assert_eq!(values(&to), values(&single), "{algo:?}: decode, token {t}");
                near("token state", &token_states.narrow(1, t, 1).unwrap(), &single);
            }
            assert_eq!(values(&token_states.narrow(1, 15, 1).unwrap()), values(&state), "{algo:?}");
            let plain = x.state.force_contiguous().unwrap();
            near("o without token states", &x.prefill(&plain, None, options(algo), identity), &o);
            near("state without token states", &plain, &state);
        }
    }
}

/// In bf16 they are those of f32 rounded: the state between the tokens of a call is not.
#[test]
fn within_a_call_a_bf16_state_is_f32() {
    for device in devices() {
        for algo in ALGOS {
            let mut x = args(2, 16, &device);
            x.state = x.state.to_dtype(DType::BF16).unwrap().to_dtype(DType::F32).unwrap();
            let [o, _, want] = call(&x, DType::F32, algo);
            let [o_bf16, state, got] = call(&x, DType::BF16, algo);
            assert_eq!(values(&got.narrow(1, 15, 1).unwrap()), values(&state), "{algo:?}");
            if device.is_cuda() && algo == Algo::Decode128 {
                // It adds up a row in another order where its elements are half as wide.
                assert_rounded(&format!("{algo:?}"), &values(&got), &values(&want));
                let error = rel_rms(&values(&o_bf16), &values(&o));
                assert!(error < 1e-6, "{algo:?}: o: {error:e}");
                continue;
            }
            let want = want.to_device(&Device::Cpu).unwrap().to_dtype(DType::BF16).unwrap();
            assert_eq!(values(&got), values(&want), "{algo:?}");
            assert_eq!(values(&o), values(&o_bf16), "{algo:?}");
        }
    }
}

/// Padding in a batch, among packed sequences (one of them empty) and in decode: its rows and the slots of nobody stay
/// as they are, and the others' states are what they are without it.
#[test]
fn rows_of_padding_are_left_alone() {
    let untouched = |x: &Tensor| values(x).iter().all(|&x| x == 9.0);
    for device in devices() {
        for (algo, dtype) in ALGOS.into_iter().flat_map(|algo| [(algo, DType::F32), (algo, DType::BF16)]) {
            let x = args(3, 5, &device);
            let start = x.state.to_dtype(dtype).unwrap();
            let slots = |map: &[u32]| Tensor::new(map, &device).unwrap();
            let row = |t: &Tensor, n: usize, len: usize| t.narrow(0, n, len).unwrap();
            let same =
                |what: &str, a: &Tensor, b: &Tensor| assert_eq!(values(a), values(b), "{algo:?} {dtype:?} {what}");

            let (state, to) = (start.force_contiguous().unwrap(), room(&[3, 5], dtype, &device));
            let map = slots(&[2, u32::MAX, 0]);
            x.prefill(&state, None, options(algo), |op| op.with_slots(&map).with_token_states(&to));
            assert!(untouched(&row(&to, 1, 1)), "{algo:?} {dtype:?}");
            same("slot 1", &row(&state, 1, 1), &row(&start, 1, 1));
            for (n, slot) in [(0, 2), (2, 0)] {
                same("last token", &row(&to, n, 1).narrow(1, 4, 1).unwrap(), &row(&state, slot, 1));
                // Alone, in a state of its own.
                let alone = Args { state: row(&start, slot, 1), ..x.sequences(n, 1) };
                same("alone", &row(&to, n, 1), &call(&alone, dtype, algo)[2]);
            }

            // 15 tokens: 4 of the first, 7 of the padding, none of the third, which keeps its state, and 4 of the last.
            let cu = CuSeqlens::from_lengths(&[4, 7, 0, 4], &device).unwrap();
            let (state, to) = (start.force_contiguous().unwrap(), room(&[15], dtype, &device));
            let map = slots(&[2, u32::MAX, 1, 0]);
            let options = options(algo);
            x.packed().prefill(&state, Some(&cu), options, |op| op.with_slots(&map).with_token_states(&to));
            assert!(untouched(&row(&to, 4, 7)), "{algo:?} {dtype:?}");
            same("packed, slot 1", &row(&state, 1, 1), &row(&start, 1, 1));
            same("packed, slot 2", &row(&to, 3, 1), &row(&state, 2, 1));
            same("packed, slot 0", &row(&to, 14, 1), &row(&state, 0, 1));
            assert!([0, 1, 2, 11, 12, 13].iter().all(|&t| values(&row(&to, t, 1)).iter().all(|&x| x != 9.0)));

            let (state, to) = (start.force_contiguous().unwrap(), room(&[3], dtype, &device));
            let map = slots(&[u32::MAX, 1, u32::MAX]);
            x.token(2).decode(&state, options, |op| op.with_slots(&map).with_token_states(&to));
            assert!(untouched(&row(&to, 0, 1)) && untouched(&row(&to, 2, 1)), "{algo:?} {dtype:?}");
            same("decode", &row(&to, 1, 1), &row(&state, 1, 1));
        }
    }
}
