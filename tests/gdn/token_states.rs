//! The state after every token: what it must equal, and what a call leaves alone.

use crate::semantics::{args, one_token, options, Args};
use crate::support::{assert_rounded, devices, rel_rms, values};
use candle_core::{DType, Device, Tensor};
use candle_gdn::{Algo, CuSeqlens, Gates, GdnDecode, GdnPrefill};

const ALGOS: [Algo; 4] = [Algo::Auto, Algo::Recurrent, Algo::Recurrent128, Algo::Decode128];

/// Room for `lead` token states, filled with a number that no kernel writes.
fn room(lead: &[usize], dtype: DType, device: &Device) -> Tensor {
    Tensor::full(9f32, [lead, &[4, 128, 128]].concat(), device).unwrap().to_dtype(dtype).unwrap()
}

/// o, the new state and the token states of one call over all tokens.
fn call(x: &Args, dtype: DType, algo: Algo) -> [Tensor; 3] {
    let (batch, tokens, ..) = x.q.dims4().unwrap();
    let state = x.state.to_dtype(dtype).unwrap().force_contiguous().unwrap();
    let to = room(&[batch, tokens], dtype, x.q.device());
    let op = GdnPrefill::new(x.gates.clone(), &state, None, options(algo)).unwrap().with_token_states(&to);
    [op.forward(&x.q, &x.k, &x.v).unwrap(), state, to]
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
                let at = one_token(&x, t);
                let to = room(&[2], DType::F32, &device);
                let op = GdnDecode::new(at.gates.clone(), &single, options(algo)).unwrap().with_token_states(&to);
                near("o", &o.narrow(1, t, 1).unwrap(), &op.forward(&at.q, &at.k, &at.v).unwrap());
                assert_eq!(values(&to), values(&single), "{algo:?}: decode, token {t}");
                near("token state", &token_states.narrow(1, t, 1).unwrap(), &single);
            }
            assert_eq!(values(&token_states.narrow(1, 15, 1).unwrap()), values(&state), "{algo:?}");
            let plain = x.state.force_contiguous().unwrap();
            let op = GdnPrefill::new(x.gates.clone(), &plain, None, options(algo)).unwrap();
            near("o without token states", &op.forward(&x.q, &x.k, &x.v).unwrap(), &o);
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
            let slots = Tensor::new(&[2u32, u32::MAX, 0], &device).unwrap();
            let row = |t: &Tensor, n: usize, len: usize| t.narrow(0, n, len).unwrap();
            let same =
                |what: &str, a: &Tensor, b: &Tensor| assert_eq!(values(a), values(b), "{algo:?} {dtype:?} {what}");

            let (state, to) = (start.force_contiguous().unwrap(), room(&[3, 5], dtype, &device));
            let op = GdnPrefill::new(x.gates.clone(), &state, None, options(algo)).unwrap();
            op.with_slots(&slots).with_token_states(&to).forward(&x.q, &x.k, &x.v).unwrap();
            assert!(untouched(&row(&to, 1, 1)), "{algo:?} {dtype:?}");
            same("slot 1", &row(&state, 1, 1), &row(&start, 1, 1));
            for (n, slot) in [(0, 2), (2, 0)] {
                same("last token", &row(&to, n, 1).narrow(1, 4, 1).unwrap(), &row(&state, slot, 1));
                // Alone, in a state of its own.
                let gates = Gates { a: row(&x.gates.a, n, 1), b: row(&x.gates.b, n, 1), ..x.gates.clone() };
                let (q, k, v) = (row(&x.q, n, 1), row(&x.k, n, 1), row(&x.v, n, 1));
                let [_, _, alone] = call(&Args { q, k, v, gates, state: row(&start, slot, 1) }, dtype, algo);
                same("alone", &row(&to, n, 1), &alone);
            }

            // 15 tokens: 4 of the first, 7 of the padding, none of the third, which keeps its state, and 4 of the last.
            let flat = |t: &Tensor| t.flatten(0, 1).unwrap();
            let cu = CuSeqlens::from_lengths(&[4, 7, 0, 4], &device).unwrap();
            let slots = Tensor::new(&[2u32, u32::MAX, 1, 0], &device).unwrap();
            let gates = Gates { a: flat(&x.gates.a), b: flat(&x.gates.b), ..x.gates.clone() };
            let (state, to) = (start.force_contiguous().unwrap(), room(&[15], dtype, &device));
            let op = GdnPrefill::new(gates, &state, Some(&cu), options(algo)).unwrap();
            op.with_slots(&slots).with_token_states(&to).forward(&flat(&x.q), &flat(&x.k), &flat(&x.v)).unwrap();
            assert!(untouched(&row(&to, 4, 7)), "{algo:?} {dtype:?}");
            same("packed, slot 1", &row(&state, 1, 1), &row(&start, 1, 1));
            same("packed, slot 2", &row(&to, 3, 1), &row(&state, 2, 1));
            same("packed, slot 0", &row(&to, 14, 1), &row(&state, 0, 1));
            assert!([0, 1, 2, 11, 12, 13].iter().all(|&t| values(&row(&to, t, 1)).iter().all(|&x| x != 9.0)));

            let at = one_token(&x, 2);
            let slots = Tensor::new(&[u32::MAX, 1, u32::MAX], &device).unwrap();
            let (state, to) = (start.force_contiguous().unwrap(), room(&[3], dtype, &device));
            let op = GdnDecode::new(at.gates.clone(), &state, options(algo)).unwrap();
            op.with_slots(&slots).with_token_states(&to).forward(&at.q, &at.k, &at.v).unwrap();
            assert!(untouched(&row(&to, 0, 1)) && untouched(&row(&to, 2, 1)), "{algo:?} {dtype:?}");
            same("decode", &row(&to, 1, 1), &row(&state, 1, 1));
        }
    }
}
