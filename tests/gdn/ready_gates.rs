//! Gates that the caller computed, and calls without an initial state: for authors of other layers.

use crate::semantics::{args, options, Args};
use crate::support::{devices, refused, rel_rms, values};
use candle_core::{DType, Tensor};
use candle_gdn::ops::{GdnDecode, GdnPrefill};
use candle_gdn::{Algo, CuSeqlens, Slots};

/// Log decay and beta of raw gates, `[.., HV]` in f32.
fn ready(x: &Args) -> [Tensor; 2] {
    let [a, b, a_log, dt_bias] = [&x.gates.a, &x.gates.b, &x.gates.a_log, &x.gates.dt_bias].map(values);
    let log_decay: Vec<f32> = a
        .iter()
        .enumerate()
        .map(|(i, a)| (-a_log[i % 4].exp() * (1.0 + (a + dt_bias[i % 4]).exp()).ln()) as f32)
        .collect();
    let beta: Vec<f32> = b.iter().map(|b| (1.0 / (1.0 + (-b).exp())) as f32).collect();
    let tensor = |x: Vec<f32>, like: &Tensor| Tensor::from_vec(x, like.dims(), like.device()).unwrap();
    [tensor(log_decay, &x.gates.a), tensor(beta, &x.gates.b)]
}

fn near(what: &str, got: &Tensor, want: &Tensor) {
    let error = rel_rms(&values(got), &values(want));
    assert!(error < 2e-6, "{what} is off by {error:e}");
}

#[test]
fn ready_gates_are_what_raw_ones_become() {
    for device in devices() {
        for (batch, tokens) in [(2, 1), (3, 7), (2, 70)] {
            let x = args(batch, tokens, &device);
            let (want, want_state) = x.prefilled(None, options(Algo::Recurrent));
            let [g, beta] = ready(&x);
            for algo in [Algo::Auto, Algo::Recurrent] {
                let state = x.state.force_contiguous().unwrap();
                let op = GdnPrefill::with_ready_gates(g.clone(), beta.clone(), &state, None, options(algo)).unwrap();
                assert_eq!(op.algo(&x.q, &x.k, &x.v).unwrap(), Algo::Recurrent);
                near("o", &op.forward(&x.q, &x.k, &x.v).unwrap(), &want);
                near("the state", &state, &want_state);
            }
            // Packed, and one token by decode.
            let (all, state) = (x.packed(), x.state.force_contiguous().unwrap());
            let cu = CuSeqlens::from_lengths(&vec![tokens; batch], &device).unwrap();
            let [g, beta] = ready(&all);
            let op = GdnPrefill::with_ready_gates(g, beta, &state, Some(&cu), options(Algo::Auto)).unwrap();
            near("packed o", &op.forward(&all.q, &all.k, &all.v).unwrap(), &want.flatten(0, 1).unwrap());
            near("the state", &state, &want_state);
            let (one, state) = (x.token(0), x.state.force_contiguous().unwrap());
            let [g, beta] = ready(&one);
            let op = GdnDecode::with_ready_gates(g, beta, &state, options(Algo::Auto)).unwrap();
            let o = op.forward(&one.q, &one.k, &one.v).unwrap();
            near("o of decode", &o, &one.decoded(options(Algo::Recurrent)).0);
        }
    }
}

/// The state is written and not read: what it held plays no part, not even NaN.
#[test]
fn without_an_initial_state_sequences_begin_at_zero() {
    for device in devices() {
        for tokens in [1, 5, 70] {
            let x = args(2, tokens, &device);
            let zero = Args { state: x.state.zeros_like().unwrap(), ..x.clone() };
            let (want, want_state) = zero.prefilled(None, options(Algo::Recurrent));
            for algo in [Algo::Auto, Algo::Recurrent] {
                let state = Tensor::full(f32::NAN, x.state.dims(), &device).unwrap();
                let o = x.prefill(&state, None, options(algo), GdnPrefill::without_initial_state);
                near("o", &o, &want);
                near("the state", &state, &want_state);
            }
            // Into slots of a pool.
            let pool = Tensor::full(f32::NAN, (4, 4, 128, 128), &device).unwrap();
            let slots = Slots::new(&[3, 1], &device).unwrap();
            let o = x.prefill(&pool, None, options(Algo::Auto), |op| op.with_slots(&slots).without_initial_state());
            near("o in slots", &o, &want);
            for (n, slot) in [3, 1].into_iter().enumerate() {
                near("a slot", &pool.get(slot).unwrap(), &want_state.get(n).unwrap());
            }
            for slot in [0, 2] {
                assert!(values(&pool.get(slot).unwrap()).iter().all(|x| x.is_nan()), "slot {slot} was written");
            }
        }
    }
}

#[test]
fn other_kernels_refuse_both() {
    for device in &devices() {
        let x = args(1, 1, device).in_dtype(DType::BF16);
        let [g, beta] = ready(&x);
        for algo in [Algo::Recurrent128, Algo::Decode] {
            let sentence = format!("gdn_prefill: algo: {algo:?} supports raw gates and an initial state");
            let op = GdnPrefill::with_ready_gates(g.clone(), beta.clone(), &x.state, None, options(algo)).unwrap();
            refused(op.forward(&x.q, &x.k, &x.v), &[&sentence]);
            let op = GdnPrefill::new(x.gates.clone(), &x.state, None, options(algo)).unwrap().without_initial_state();
            refused(op.forward(&x.q, &x.k, &x.v), &[&sentence]);
        }
        let of = |algo| {
            let state = x.state.copy().unwrap();
            let op = GdnPrefill::with_ready_gates(g.clone(), beta.clone(), &state, None, options(algo)).unwrap();
            values(&op.forward(&x.q, &x.k, &x.v).unwrap())
        };
        assert_eq!(of(Algo::Unfused), of(Algo::Auto), "Unfused is of a step: the rule's kernel is picked");
        let wrong = Tensor::zeros((1, 1, 3), DType::F32, device).unwrap();
        let op = GdnPrefill::with_ready_gates(wrong, beta, &x.state, None, options(Algo::Auto)).unwrap();
        refused(op.forward(&x.q, &x.k, &x.v), &["gdn_prefill: log_decay: expected shape [1, 1, 4], got [1, 1, 3]"]);
    }
}
