//! The gated delta rule, one token after another in `f64`: what every kernel of this crate is tested against.
//!
//! It is written to be read next to the paper (Yang et al., *Gated Delta Networks*, arXiv 2412.06464) and is slow on
//! purpose. It uses nothing of the kernels; they use its [`Dims`].

/// Head counts and head sizes of the rule.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Dims {
    /// Key (and query) heads, HK.
    pub key_heads: usize,
    /// Value heads, HV: a multiple of HK. Value head `h` reads key head `h / (HV / HK)`.
    pub value_heads: usize,
    /// Size of a key head, K.
    pub key_dim: usize,
    /// Size of a value head, V.
    pub value_dim: usize,
}

/// Constants of the rule.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Constants {
    /// Whether q and k are divided by their L2 norm first.
    pub l2norm: bool,
    /// Added to the sum of squares, inside the root.
    pub l2_eps: f64,
    /// Multiplies q after the norm.
    pub scale: f64,
    /// Multiplies `sigmoid(b)`: 1, or 2 where the state transition may have negative eigenvalues.
    pub beta_scale: f64,
}

/// The inputs, packed along the tokens of all sequences, row-major.
#[derive(Debug, Clone, Copy)]
pub struct Inputs<'a> {
    /// `[tokens, HK, K]`
    pub q: &'a [f64],
    /// `[tokens, HK, K]`
    pub k: &'a [f64],
    /// `[tokens, HV, V]`
    pub v: &'a [f64],
    /// `[tokens, HV]`, the raw decay input.
    pub a: &'a [f64],
    /// `[tokens, HV]`, the raw beta input.
    pub b: &'a [f64],
    /// `[HV]`, the natural log of the decay rate.
    pub a_log: &'a [f64],
    /// `[HV]`, added to `a`.
    pub dt_bias: &'a [f64],
}

/// Runs the rule over every sequence and returns o, `[tokens, HV, V]`.
///
/// Sequence `n` owns the tokens `cu_seqlens[n]..cu_seqlens[n + 1]` and the state `state[n]` of shape `[HV, V, K]`,
/// which is updated in place.
///
/// # Panics
/// When a slice has another length than its shape says.
pub fn gated_delta_rule(
    dims: Dims,
    constants: Constants,
    cu_seqlens: &[usize],
    inputs: Inputs<'_>,
    state: &mut [f64],
) -> Vec<f64> {
    let Dims { key_heads, value_heads, key_dim, value_dim } = dims;
    let tokens = cu_seqlens[cu_seqlens.len() - 1];
    let sequences = cu_seqlens.len() - 1;
    assert_eq!(inputs.q.len(), tokens * key_heads * key_dim, "q");
    assert_eq!(inputs.k.len(), tokens * key_heads * key_dim, "k");
    assert_eq!(inputs.v.len(), tokens * value_heads * value_dim, "v");
    assert_eq!(inputs.a.len(), tokens * value_heads, "a");
    assert_eq!(inputs.b.len(), tokens * value_heads, "b");
    assert_eq!(state.len(), sequences * value_heads * value_dim * key_dim, "state");

    let mut out = vec![0.0; tokens * value_heads * value_dim];
    for n in 0..sequences {
        for h in 0..value_heads {
            let head = n * value_heads + h;
            let state = &mut state[head * value_dim * key_dim..][..value_dim * key_dim];
            let key_head = h / (value_heads / key_heads);
            for t in cu_seqlens[n]..cu_seqlens[n + 1] {
                let key_row = (t * key_heads + key_head) * key_dim;
                let q = unit(&inputs.q[key_row..][..key_dim], constants);
                let k = unit(&inputs.k[key_row..][..key_dim], constants);
                let gate = t * value_heads + h;
                let decay = (-inputs.a_log[h].exp() * softplus(inputs.a[gate] + inputs.dt_bias[h])).exp();
                let beta = constants.beta_scale / (1.0 + (-inputs.b[gate]).exp());

                for i in 0..value_dim {
                    let row = &mut state[i * key_dim..][..key_dim];
                    row.iter_mut().for_each(|s| *s *= decay);
                    let delta = beta * (inputs.v[gate * value_dim + i] - dot(row, &k));
                    row.iter_mut().zip(&k).for_each(|(s, k)| *s += delta * k);
                    out[gate * value_dim + i] = constants.scale * dot(row, &q);
                }
            }
        }
    }
    out
}

fn dot(x: &[f64], y: &[f64]) -> f64 {
    x.iter().zip(y).map(|(x, y)| x * y).sum()
}

fn unit(x: &[f64], constants: Constants) -> Vec<f64> {
    let norm = if constants.l2norm { (dot(x, x) + constants.l2_eps).sqrt() } else { 1.0 };
    x.iter().map(|x| x / norm).collect()
}

/// `ln(1 + e^x)` without overflow.
fn softplus(x: f64) -> f64 {
    x.max(0.0) + (-x.abs()).exp().ln_1p()
}

#[cfg(test)]
mod tests;
