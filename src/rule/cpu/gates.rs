//! The two gates of a token and value head: log decay `g = -exp(A_log) * softplus(a + dt_bias)` and
//! `beta = beta_scale * sigmoid(b)`.

use super::element::Element;
use super::view::{Heads, Sequences};

/// `[tokens, HV]` pairs of (log decay, beta), in the packed order of the output.
pub fn log_decay_and_beta<G: Element>(
    a: Heads<'_, G>,
    b: Heads<'_, G>,
    a_log: &[f32],
    dt_bias: &[f32],
    seqs: Sequences<'_>,
    beta_scale: f32,
) -> Vec<(f32, f32)> {
    let heads = a_log.len();
    // f64 here costs nothing next to the state and keeps the gates exact in f32.
    let rate: Vec<f64> = a_log.iter().map(|&x| f64::from(x).exp()).collect();
    let mut gates = Vec::with_capacity(seqs.total_tokens() * heads);
    for n in 0..seqs.count {
        let (first, tokens) = seqs.range(n);
        for t in first..first + tokens {
            for h in 0..heads {
                let a = f64::from(a.row(n, t, h, 1)[0].to_f32());
                let b = f64::from(b.row(n, t, h, 1)[0].to_f32());
                let x = a + f64::from(dt_bias[h]);
                let softplus = x.max(0.0) + (-x.abs()).exp().ln_1p();
                let beta = f64::from(beta_scale) / (1.0 + (-b).exp());
                gates.push(((-rate[h] * softplus) as f32, beta as f32));
            }
        }
    }
    gates
}
