//! The gated delta rule and its backward pass, one token after another in `f64`: what every kernel of this crate is tested
//! against.
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
/// When q, k, v, a, b or the state has another length than its shape says, a_log or dt_bias is shorter than HV, or `cu_seqlens` is empty.
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
                let token = Token::new(dims, constants, inputs, (t, h, key_head));
                token.advance(state);
                let out = &mut out[(t * value_heads + h) * value_dim..][..value_dim];
                for (o, row) in out.iter_mut().zip(state.chunks_exact(key_dim)) {
                    *o = constants.scale * dot(row, &token.q);
                }
            }
        }
    }
    out
}

/// Gradients of a loss, each with the shape of what it is the gradient of.
#[derive(Debug, Clone, PartialEq)]
#[allow(missing_docs)] // those of `Inputs`, and the initial state
pub struct Gradients {
    pub q: Vec<f64>,
    pub k: Vec<f64>,
    pub v: Vec<f64>,
    pub a: Vec<f64>,
    pub b: Vec<f64>,
    pub a_log: Vec<f64>,
    pub dt_bias: Vec<f64>,
    pub state: Vec<f64>,
}

/// The backward pass of [`gated_delta_rule`]: the gradients of its inputs and of the initial state, from those of o (`d_out`) and of
/// the final state (`d_state`). It keeps the state after every token.
///
/// # Panics
/// As [`gated_delta_rule`], and when `d_out` or `d_state` has another length than v or the state.
pub fn gated_delta_rule_backward(
    dims: Dims,
    constants: Constants,
    cu_seqlens: &[usize],
    inputs: Inputs<'_>,
    state: &[f64],
    (d_out, d_state): (&[f64], &[f64]),
) -> Gradients {
    let Dims { key_heads, value_heads, key_dim, value_dim } = dims;
    assert_eq!(d_out.len(), inputs.v.len(), "d_out");
    assert_eq!(d_state.len(), state.len(), "d_state");
    let zeros = |like: &[f64]| vec![0.0; like.len()];
    let mut grads = Gradients {
        q: zeros(inputs.q),
        k: zeros(inputs.k),
        v: zeros(inputs.v),
        a: zeros(inputs.a),
        b: zeros(inputs.b),
        a_log: zeros(inputs.a_log),
        dt_bias: zeros(inputs.dt_bias),
        state: d_state.to_vec(),
    };
    let size = value_dim * key_dim;
    for head in 0..(cu_seqlens.len() - 1) * value_heads {
        let (n, h) = (head / value_heads, head % value_heads);
        let key_head = h / (value_heads / key_heads);
        let token = |t: usize| Token::new(dims, constants, inputs, (t, h, key_head));
        let mut states = vec![state[head * size..][..size].to_vec()];
        for t in cu_seqlens[n]..cu_seqlens[n + 1] {
            let mut next = states[states.len() - 1].clone();
            token(t).advance(&mut next);
            states.push(next);
        }
        // The gradient of the state after the token, all of what comes later included.
        let d_state = &mut grads.state[head * size..][..size];
        for t in (cu_seqlens[n]..cu_seqlens[n + 1]).rev() {
            let (token, after) = (token(t), states.pop().expect("a state a token"));
            let before = &states[states.len() - 1];
            let (gate, key_row) = (t * value_heads + h, (t * key_heads + key_head) * key_dim);
            let (mut d_q, mut d_k) = (vec![0.0; key_dim], vec![0.0; key_dim]);
            let (mut d_decay, mut d_beta) = (0.0, 0.0);
            for i in 0..value_dim {
                let d_o = constants.scale * d_out[gate * value_dim + i];
                let row = i * key_dim..(i + 1) * key_dim;
                let decayed: Vec<f64> = before[row.clone()].iter().map(|s| s * token.decay).collect();
                let missing = inputs.v[gate * value_dim + i] - dot(&decayed, &token.k);
                let d_row = &mut d_state[row.clone()];
                d_row.iter_mut().zip(&token.q).for_each(|(d, q)| *d += d_o * q);
                d_q.iter_mut().zip(&after[row]).for_each(|(d, s)| *d += d_o * s);
                // S = decayed + beta missing k^T
                let d_update = dot(d_row, &token.k);
                d_k.iter_mut().zip(&*d_row).for_each(|(d, ds)| *d += token.beta * missing * ds);
                d_beta += d_update * missing;
                let d_missing = token.beta * d_update;
                grads.v[gate * value_dim + i] = d_missing;
                d_k.iter_mut().zip(&decayed).for_each(|(d, s)| *d -= d_missing * s);
                d_row.iter_mut().zip(&token.k).for_each(|(d, k)| *d -= d_missing * k);
                // decayed = e^g S
                d_decay += dot(d_row, &decayed);
                d_row.iter_mut().for_each(|d| *d *= token.decay);
            }
            add_unit(&mut grads.q[key_row..][..key_dim], &d_q, &inputs.q[key_row..][..key_dim], constants);
            add_unit(&mut grads.k[key_row..][..key_dim], &d_k, &inputs.k[key_row..][..key_dim], constants);
            let x = inputs.a[gate] + inputs.dt_bias[h];
            let d_a = -inputs.a_log[h].exp() / (1.0 + (-x).exp()) * d_decay;
            grads.a[gate] = d_a;
            grads.dt_bias[h] += d_a;
            grads.a_log[h] -= inputs.a_log[h].exp() * softplus(x) * d_decay;
            grads.b[gate] = d_beta * token.beta * (1.0 - token.beta / constants.beta_scale);
        }
    }
    grads
}

/// What a token brings to a value head.
struct Token<'a> {
    /// Normalised, not scaled.
    q: Vec<f64>,
    /// Normalised.
    k: Vec<f64>,
    v: &'a [f64],
    decay: f64,
    beta: f64,
}

impl<'a> Token<'a> {
    fn new(dims: Dims, constants: Constants, inputs: Inputs<'a>, (t, h, key_head): (usize, usize, usize)) -> Self {
        let Dims { key_heads, value_heads, key_dim, value_dim } = dims;
        let key_row = (t * key_heads + key_head) * key_dim;
        let gate = t * value_heads + h;
        Self {
            q: unit(&inputs.q[key_row..][..key_dim], constants),
            k: unit(&inputs.k[key_row..][..key_dim], constants),
            v: &inputs.v[gate * value_dim..][..value_dim],
            decay: (-inputs.a_log[h].exp() * softplus(inputs.a[gate] + inputs.dt_bias[h])).exp(),
            beta: constants.beta_scale / (1.0 + (-inputs.b[gate]).exp()),
        }
    }

    /// The state `[V, K]` after the token.
    fn advance(&self, state: &mut [f64]) {
        for (row, v) in state.chunks_exact_mut(self.k.len()).zip(self.v) {
            row.iter_mut().for_each(|s| *s *= self.decay);
            let update = self.beta * (v - dot(row, &self.k));
            row.iter_mut().zip(&self.k).for_each(|(s, k)| *s += update * k);
        }
    }
}

/// Adds the gradient of x, whose unit vector has the gradient `d_unit`.
fn add_unit(d_x: &mut [f64], d_unit: &[f64], x: &[f64], constants: Constants) {
    if !constants.l2norm {
        d_x.iter_mut().zip(d_unit).for_each(|(d, g)| *d += g);
        return;
    }
    let (norm, unit) = ((dot(x, x) + constants.l2_eps).sqrt(), unit(x, constants));
    let along = dot(&unit, d_unit);
    for ((d, g), u) in d_x.iter_mut().zip(d_unit).zip(&unit) {
        *d += (g - u * along) / norm;
    }
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
