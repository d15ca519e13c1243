//! The two gates of a token and value head: log decay `g = -exp(A_log) * softplus(a + dt_bias)` and
//! `beta = beta_scale * sigmoid(b)`.

/// Pairs of (log decay, beta) of `a` and `b`, `[tokens, HV]`.
pub fn log_decay_and_beta(a: &[f32], b: &[f32], a_log: &[f32], dt_bias: &[f32], beta_scale: f32) -> Vec<(f32, f32)> {
    // f64 here costs nothing next to the state and keeps the gates exact in f32.
    let rate: Vec<f64> = a_log.iter().map(|&x| f64::from(x).exp()).collect();
    let gate = |(i, (&a, &b)): (usize, (&f32, &f32))| {
        let h = i % rate.len();
        let x = f64::from(a) + f64::from(dt_bias[h]);
        let softplus = x.max(0.0) + (-x.abs()).exp().ln_1p();
        let beta = f64::from(beta_scale) / (1.0 + (-f64::from(b)).exp());
        ((-rate[h] * softplus) as f32, beta as f32)
    };
    a.iter().zip(b).enumerate().map(gate).collect()
}
