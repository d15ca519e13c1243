//! The two gates of a token and value head: log decay `g = -exp(A_log) * softplus(a + dt_bias)` and
//! `beta = beta_scale * sigmoid(b)`. In f64, which costs nothing next to the state and keeps the gates exact in f32.

use candle_gdn_core::cpu::{parallel, Shared};

/// Tokens of one task, and of one partial sum of the parameters' gradients.
const TOKENS: usize = 64;

/// Pairs of (log decay, beta) of `a` and `b`, `[tokens, HV]`.
pub fn log_decay_and_beta(a: &[f32], b: &[f32], a_log: &[f32], dt_bias: &[f32], beta_scale: f32) -> Vec<(f32, f32)> {
    let heads = Heads::new(a_log, dt_bias, beta_scale);
    let gate = |(i, (&a, &b)): (usize, (&f32, &f32))| {
        let h = i % a_log.len();
        (heads.log_decay(h, a) as f32, heads.beta(b) as f32)
    };
    a.iter().zip(b).enumerate().map(gate).collect()
}

/// The parameters of all value heads.
pub struct Heads<'a> {
    /// `exp(A_log)`
    rate: Vec<f64>,
    dt_bias: &'a [f32],
    beta_scale: f64,
}

impl<'a> Heads<'a> {
    pub fn new(a_log: &[f32], dt_bias: &'a [f32], beta_scale: f32) -> Self {
        let rate = a_log.iter().map(|&x| f64::from(x).exp()).collect();
        Self { rate, dt_bias, beta_scale: f64::from(beta_scale) }
    }

    fn log_decay(&self, h: usize, a: f32) -> f64 {
        let x = f64::from(a) + f64::from(self.dt_bias[h]);
        -self.rate[h] * (x.max(0.0) + (-x.abs()).exp().ln_1p())
    }

    fn beta(&self, b: f32) -> f64 {
        self.beta_scale / (1.0 + (-f64::from(b)).exp())
    }

    /// Writes log decay and beta side by side, `[tokens, 2 HV]`, of b and a side by side.
    pub fn run(&self, ba: &[f32], gates: &mut [f32]) {
        let heads = self.rate.len();
        let gates = Shared::new(gates);
        let tasks = ba.len().div_ceil(2 * heads * TOKENS);
        parallel(tasks, 2 * heads * TOKENS * 16, |task| {
            let range = task * TOKENS * 2 * heads..ba.len().min((task + 1) * TOKENS * 2 * heads);
            // SAFETY: each task owns its tokens.
            let gates = unsafe { gates.part(range.start, range.len()) };
            for (ba, gates) in ba[range].chunks_exact(2 * heads).zip(gates.chunks_exact_mut(2 * heads)) {
                let ((b, a), (log_decay, beta)) = (ba.split_at(heads), gates.split_at_mut(heads));
                for h in 0..heads {
                    log_decay[h] = self.log_decay(h, a[h]) as f32;
                    beta[h] = self.beta(b[h]) as f32;
                }
            }
        });
    }

    /// Writes the gradient of `ba` and returns those of A_log and dt_bias; `grad` is the gradient of the gates.
    pub fn backward(&self, ba: &[f32], grad: &[f32], d_ba: &mut [f32]) -> [Vec<f32>; 2] {
        let heads = self.rate.len();
        let d_ba = Shared::new(d_ba);
        let tasks = ba.len().div_ceil(2 * heads * TOKENS);
        let mut partial = vec![0f64; tasks * 2 * heads];
        let sums = Shared::new(&mut partial);
        parallel(tasks, 2 * heads * TOKENS * 32, |task| {
            let range = task * TOKENS * 2 * heads..ba.len().min((task + 1) * TOKENS * 2 * heads);
            // SAFETY: each task owns its tokens and its sums.
            let (d_ba, sums) = unsafe { (d_ba.part(range.start, range.len()), sums.part(task * 2 * heads, 2 * heads)) };
            let (d_a_log, d_dt_bias) = sums.split_at_mut(heads);
            let rows = ba[range.clone()].chunks_exact(2 * heads).zip(grad[range].chunks_exact(2 * heads));
            for ((ba, grad), d_ba) in rows.zip(d_ba.chunks_exact_mut(2 * heads)) {
                let ((b, a), (d_log_decay, d_beta)) = (ba.split_at(heads), grad.split_at(heads));
                let (d_b, d_a) = d_ba.split_at_mut(heads);
                for h in 0..heads {
                    let x = f64::from(a[h]) + f64::from(self.dt_bias[h]);
                    let (d_x, d_rate) = match f64::from(d_log_decay[h]) {
                        0.0 => (0.0, 0.0), // also of what is infinite
                        d => (-self.rate[h] / (1.0 + (-x).exp()) * d, self.log_decay(h, a[h]) * d),
                    };
                    d_a[h] = d_x as f32;
                    d_dt_bias[h] += d_x;
                    d_a_log[h] += d_rate;
                    let sigmoid = 1.0 / (1.0 + (-f64::from(b[h])).exp());
                    let opposite = 1.0 / (1.0 + f64::from(b[h]).exp());
                    d_b[h] = (f64::from(d_beta[h]) * self.beta_scale * sigmoid * opposite) as f32;
                }
            }
        });
        // In the order of the tasks: equal inputs give equal bits.
        let sum = |start: usize| {
            (0..heads).map(|h| (0..tasks).map(|i| partial[i * 2 * heads + start + h]).sum::<f64>() as f32).collect()
        };
        [sum(0), sum(heads)]
    }
}
