//! What operands of 16 bits cost an input: the bound of the kernels on tensor cores where it is hard.

use crate::rule_case::{Case, Decay};
use crate::support::Rng;
use candle_core::DType;
use candle_gdn::reference::{Constants, Dims, Inputs};
use half::{bf16, f16};
use std::cell::RefCell;

/// How often an input's cost is drawn: on hard ones a few roundings decide, and noise of 1e-6 before each of them, which is
/// less than f32 sums in another order, makes anything from 0.07 to 0.27 of it where the root of the mean square is 0.16.
const DRAWS: u64 = 8;

/// The cost to expect: the root of the mean square of the draws of [`gated_delta_rule`]'s errors.
pub fn cost<const N: usize>(errors: impl Fn(u64) -> [f64; N]) -> [f64; N] {
    let draws: Vec<_> = (1..=DRAWS).map(errors).collect();
    std::array::from_fn(|i| (draws.iter().map(|errors| errors[i].powi(2)).sum::<f64>() / DRAWS as f64).sqrt())
}

/// Most that o or a state may be off where tensor cores ran: `usual`, or, on an input on which 16 bits cost more than two
/// thirds of that, twice that cost. A tenth is what nothing may be off.
pub fn bound(usual: f64, cost: f64) -> f64 {
    if 1.5 * cost <= usual {
        usual
    } else {
        (2.0 * cost).min(0.1)
    }
}

/// The rule in its chunk form, exact but for what a kernel rounds because tensor cores multiply nothing wider. To `dtype`:
/// the state before a chunk, U = V - S K^T, T = (I + L)^-1, V' = T U as it is and times beta and its decay to the chunk's end,
/// and Q K^T diag(beta); to f16: what T is made of. Sums, o and the state itself are exact. On usual inputs that costs up to
/// 3e-3 with bf16. Where a key repeats and little decays, the V' of a chunk cancel in their sum while their roundings add up;
/// with beta near 2 those of T do too, to a tenth and more.
///
/// It takes what [`candle_gdn::reference::gated_delta_rule`] takes, and gives what that gives; `draw` is that of the noise
/// before each rounding.
pub fn gated_delta_rule(
    dtype: DType,
    draw: u64,
    dims: Dims,
    constants: Constants,
    cu_seqlens: &[usize],
    inputs: Inputs<'_>,
    state: &mut [f64],
) -> Vec<f64> {
    let Dims { key_heads, value_heads, key_dim, value_dim } = dims;
    let rng = RefCell::new(Rng::new(draw));
    let noisy = |x: f64| x * (1.0 + 1e-6 * (2.0 * rng.borrow_mut().uniform() - 1.0));
    let half = |x: f64| f16::from_f64(noisy(x)).to_f64();
    let round = |x: f64| if dtype == DType::BF16 { bf16::from_f64(noisy(x)).to_f64() } else { half(x) };
    let norm = |x: &[f64]| if constants.l2norm { 1.0 / (dot(x, x) + constants.l2_eps).sqrt() } else { 1.0 };
    let mut out = vec![0.0; inputs.v.len()];
    let heads = (0..cu_seqlens.len() - 1).flat_map(|n| (0..value_heads).map(move |h| (n, h)));
    for ((n, h), state) in heads.zip(state.chunks_exact_mut(value_dim * key_dim)) {
        for first in (cu_seqlens[n]..cu_seqlens[n + 1]).step_by(64) {
            let tokens = 0..64.min(cu_seqlens[n + 1] - first);
            let gate = |i: usize| (first + i) * value_heads + h;
            let key_row = |i: usize| ((first + i) * key_heads + h / (value_heads / key_heads)) * key_dim;
            let (q, k) = (|i| &inputs.q[key_row(i)..][..key_dim], |i| &inputs.k[key_row(i)..][..key_dim]);
            let q_norm: Vec<_> = tokens.clone().map(|i| constants.scale * norm(q(i))).collect();
            let k_norm: Vec<_> = tokens.clone().map(|i| norm(k(i))).collect();
            let beta = |i| constants.beta_scale / (1.0 + (-inputs.b[gate(i)]).exp());
            let weight: Vec<_> = tokens.clone().map(|i| beta(i) * k_norm[i]).collect();
            let log_decay = |i| -inputs.a_log[h].exp() * softplus(inputs.a[gate(i)] + inputs.dt_bias[h]);
            let c: Vec<f64> = tokens
                .clone()
                .scan(0.0, |c, i| {
                    *c += log_decay(i);
                    Some(*c)
                })
                .collect();
            // What is left at token i of what token j wrote.
            let left = |i: usize, j: usize| (c[i] - c[j]).exp();
            let last = tokens.end - 1;

            let l = |i, j| k_norm[i] * weight[j] * dot(k(i), k(j)) * left(i, j);
            let l = matrix(64, |i, j| if j < i && i <= last { l(i, j) } else { 0.0 });
            let inverse = invert(&l, 0, 64, &half);
            let t = matrix(last + 1, |i, j| round(inverse[i][j]));
            let attention = |i, j| round(q_norm[i] * weight[j] * dot(q(i), k(j)) * left(i, j));
            let attention = matrix(last + 1, |i, j| if j <= i { attention(i, j) } else { 0.0 });

            for (r, s) in state.chunks_exact_mut(key_dim).enumerate() {
                let before: Vec<_> = s.iter().map(|x| round(*x)).collect();
                let at = |i| gate(i) * value_dim + r;
                let u = |i| round(inputs.v[at(i)] - c[i].exp() * k_norm[i] * dot(&before, k(i)));
                let u: Vec<_> = tokens.clone().map(u).collect();
                let values: Vec<_> = t.iter().map(|t| dot(t, &u)).collect();
                let plain: Vec<_> = values.iter().map(|x| round(*x)).collect();
                s.iter_mut().for_each(|s| *s *= c[last].exp());
                for i in tokens.clone() {
                    out[at(i)] = c[i].exp() * q_norm[i] * dot(&before, q(i)) + dot(&attention[i], &plain);
                    let written = round(values[i] * left(last, i) * weight[i]);
                    s.iter_mut().zip(k(i)).for_each(|(s, k)| *s += written * k);
                }
            }
        }
    }
    out
}

/// (I + L)^-1 of the block of `size` on L's diagonal: [[A, 0], [C, B]]^-1 = [[A', 0], [-B' C A', B']]; products are of what
/// `rounded` makes of their factors.
fn invert(l: &[Vec<f64>], from: usize, size: usize, rounded: &dyn Fn(f64) -> f64) -> Vec<Vec<f64>> {
    if size == 1 {
        return vec![vec![1.0]];
    }
    let half = size / 2;
    // Kernels substitute in f32 up to blocks of 8.
    let round = |x: f64| if size > 8 { rounded(x) } else { x };
    let (a, b) = (invert(l, from, half, rounded), invert(l, from + half, half, rounded));
    let product = |x: &dyn Fn(usize, usize) -> f64, y: &dyn Fn(usize, usize) -> f64| {
        matrix(half, |i, j| (0..half).map(|m| round(x(i, m)) * round(y(m, j))).sum())
    };
    let bc = product(&|i, j| b[i][j], &|i, j| l[from + half + i][from + j]);
    let bca = product(&|i, j| bc[i][j], &|i, j| a[i][j]);
    matrix(size, |i, j| match (i < half, j < half) {
        (true, true) => a[i][j],
        (true, false) => 0.0,
        (false, true) => -bca[i - half][j],
        (false, false) => b[i - half][j - half],
    })
}

fn matrix(size: usize, f: impl Fn(usize, usize) -> f64) -> Vec<Vec<f64>> {
    (0..size).map(|i| (0..size).map(|j| f(i, j)).collect()).collect()
}

fn dot(x: &[f64], y: &[f64]) -> f64 {
    x.iter().zip(y).map(|(x, y)| x * y).sum()
}

fn softplus(x: f64) -> f64 {
    x.max(0.0) + (-x.abs()).exp().ln_1p()
}

#[test]
fn usual_inputs_keep_the_usual_bound() {
    for dtype in [DType::BF16, DType::F16] {
        for beta_scale in [1.0, 2.0] {
            let costs = Case { dtype, beta_scale, ..Case::new(heads(1, 2), &[200, 64]) }.cost_of_sixteen_bits();
            assert!(
                costs.iter().all(|cost| bound(5e-3, *cost) == 5e-3),
                "{dtype:?}, beta up to {beta_scale}: {costs:?}"
            );
        }
    }
}

/// Kernels were seen to be off by this much; the bound has room for that and not much more.
#[test]
fn hard_inputs_cost_what_kernels_were_off_by() {
    let case = |dims, lengths: &[usize]| {
        let case = Case { dtype: DType::BF16, beta_scale: 2.0, decay: Decay::None, ..Case::new(dims, lengths) };
        Case { repeat_keys: true, b_mean: 8.0, ..case }
    };
    let seen = [
        (1, 8.0e-3, Case { b_mean: 4.0, l2norm: false, ..case(heads(3, 1), &[16]) }),
        (0, 6.2e-2, case(heads(1, 2), &[130, 64])),
        (0, 5.4e-3, Case { repeat_keys: false, ..case(heads(1, 2), &[200, 64]) }),
    ];
    for (which, off, case) in seen {
        for seed in 1..=4 {
            let bound = bound(5e-3, Case { seed, ..case.clone() }.cost_of_sixteen_bits()[which]);
            assert!((off..4.0 * off).contains(&bound), "{bound:e}, seed {seed} of {case:?}");
        }
    }
}

fn heads(key_heads: usize, ratio: usize) -> Dims {
    Dims { key_heads, value_heads: key_heads * ratio, key_dim: 128, value_dim: 128 }
}
