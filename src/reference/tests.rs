//! The rule by hand.

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
