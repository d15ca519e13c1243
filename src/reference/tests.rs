//! The rule by hand, and its gradients by differences.

use super::*;

/// One head of size one is a scalar recurrence that fits on paper.
#[test]
fn scalar_recurrence_by_hand() {
    let dims = Dims { key_heads: 1, value_heads: 1, key_dim: 1, value_dim: 1 };
    let constants = Constants { l2norm: false, l2_eps: 0.0, scale: 0.5, beta_scale: 1.0 };
    // softplus(0) = ln 2 and exp(A_log) = 1, so a token halves the state; sigmoid(0) = 1/2.
    let inputs = Inputs {
        q: &[2.0, 4.0],
        k: &[1.0, 2.0],
        v: &[3.0, 5.0],
        a: &[0.0, 0.0],
        b: &[0.0, 0.0],
        a_log: &[0.0],
        dt_bias: &[0.0],
    };
    let mut state = [8.0];
    let out = gated_delta_rule(dims, constants, &[0, 2], inputs, &mut state);
    // t0: S = 4, d = (3 - 4) / 2 = -0.5, S = 3.5, o = 0.5 * 2 * 3.5
    // t1: S = 1.75, d = (5 - 3.5) / 2 = 0.75, S = 1.75 + 1.5 = 3.25, o = 0.5 * 4 * 3.25
    assert!((out[0] - 3.5).abs() < 1e-12, "{out:?}");
    assert!((out[1] - 6.5).abs() < 1e-12, "{out:?}");
    assert!((state[0] - 3.25).abs() < 1e-12, "{state:?}");
}

#[test]
fn softplus_neither_overflows_nor_loses_small_values() {
    assert_eq!(softplus(1000.0), 1000.0);
    assert!((softplus(-40.0) / (-40f64).exp() - 1.0).abs() < 1e-12);
    assert!((softplus(0.0) - 2f64.ln()).abs() < 1e-15);
}

/// Numbers between -1 and 1 that look random.
fn numbers(seed: u64, n: usize) -> Vec<f64> {
    let mut x = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        (x >> 11) as f64 / (1u64 << 52) as f64 - 1.0
    };
    (0..n).map(|_| next()).collect()
}

/// The loss is `<d_out, o> + <d_state, final state>`: central differences of it in every single number.
#[test]
fn gradients_are_differences() {
    for (seed, (key_heads, value_heads, key_dim, value_dim), cu_seqlens, l2norm) in [
        (1, (1, 1, 1, 1), &[0, 1][..], false),
        (2, (1, 2, 3, 2), &[0, 4, 4, 6], true),
        (3, (2, 4, 2, 3), &[0, 0, 5], true),
        (4, (2, 2, 4, 1), &[0, 3, 7], false),
        (5, (1, 3, 5, 4), &[0, 9], true),
    ] {
        let dims = Dims { key_heads, value_heads, key_dim, value_dim };
        let constants =
            Constants { l2norm, l2_eps: 1e-3, scale: 0.7, beta_scale: if seed % 2 == 0 { 2.0 } else { 1.0 } };
        let (tokens, sequences) = (cu_seqlens[cu_seqlens.len() - 1], cu_seqlens.len() - 1);
        let (keys, gates) = (tokens * key_heads * key_dim, tokens * value_heads);
        let (values, states) = (gates * value_dim, sequences * value_heads * value_dim * key_dim);
        let sizes = [keys, keys, values, gates, gates, value_heads, value_heads, states];
        let all: Vec<Vec<f64>> = sizes.iter().enumerate().map(|(i, n)| numbers(10 * seed + i as u64, *n)).collect();
        let (d_out, d_state) = (numbers(10 * seed + 8, values), numbers(10 * seed + 9, states));
        let inputs = |x: &[Vec<f64>]| -> [Vec<f64>; 8] { std::array::from_fn(|i| x[i].clone()) };
        let loss = |x: &[Vec<f64>]| {
            let [q, k, v, a, b, a_log, dt_bias, mut state] = inputs(x);
            let of = Inputs { q: &q, k: &k, v: &v, a: &a, b: &b, a_log: &a_log, dt_bias: &dt_bias };
            let out = gated_delta_rule(dims, constants, cu_seqlens, of, &mut state);
            dot(&out, &d_out) + dot(&state, &d_state)
        };
        let [q, k, v, a, b, a_log, dt_bias, state] = inputs(&all);
        let of = Inputs { q: &q, k: &k, v: &v, a: &a, b: &b, a_log: &a_log, dt_bias: &dt_bias };
        let g = gated_delta_rule_backward(dims, constants, cu_seqlens, of, &state, (&d_out, &d_state));
        let got = [g.q, g.k, g.v, g.a, g.b, g.a_log, g.dt_bias, g.state];
        for (argument, got) in got.iter().enumerate() {
            let (mut error, mut norm) = (0.0, 0.0);
            for i in 0..sizes[argument] {
                const STEP: f64 = 1e-5;
                let moved = |by: f64| {
                    let mut x = all.clone();
                    x[argument][i] += by;
                    loss(&x)
                };
                let want = (moved(STEP) - moved(-STEP)) / (2.0 * STEP);
                error += (got[i] - want).powi(2);
                norm += want * want;
            }
            assert!(error.sqrt() <= 1e-7 * norm.sqrt(), "seed {seed}, argument {argument}: {error:e} of {norm:e}");
        }
    }
}
