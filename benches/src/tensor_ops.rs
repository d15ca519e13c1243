//! The rule in candle's own tensor operations, in f32: what a candle user would otherwise have.
//!
//! Sequences of equal lengths: q and k `[batch, tokens, HK, K]`, v `[batch, tokens, HV, V]`, gates `[batch, tokens, HV]`, state
//! `[batch, HV, V, K]`. Both give o `[batch, tokens, HV, V]` and the new state.

// Each benchmark uses its part of this.
#![allow(dead_code)]

use candle_core::{DType, Result, Tensor, D};
use candle_gdn::ops::Gates;
use candle_nn::ops::sigmoid;

/// Tokens that are computed at once.
const CHUNK: usize = 64;

/// q, k, v, the log decay and beta, in f32 and by value heads.
fn prepared(q: &Tensor, k: &Tensor, v: &Tensor, gates: &Gates) -> Result<[Tensor; 5]> {
    let (batch, tokens, heads, _) = v.dims4()?;
    let dim = q.dim(D::Minus1)?;
    let unit = |t: &Tensor| {
        let t = t.to_dtype(DType::F32)?;
        let norm = (t.sqr()?.sum_keepdim(D::Minus1)? + 1e-6)?.sqrt()?;
        let r = heads / t.dim(2)?;
        let t = t.broadcast_div(&norm)?.unsqueeze(3)?;
        t.broadcast_as((batch, tokens, heads / r, r, dim))?.reshape((batch, tokens, heads, dim))
    };
    let f32 = |t: &Tensor| t.to_dtype(DType::F32);
    let softplus = (f32(&gates.a)?.broadcast_add(&gates.dt_bias)?.exp()? + 1.)?.log()?;
    let log_decay = softplus.broadcast_mul(&gates.a_log.exp()?)?.neg()?;
    Ok([(unit(q)? * (dim as f64).powf(-0.5))?, unit(k)?, f32(v)?, log_decay, sigmoid(&f32(&gates.b)?)?])
}

/// Token by token.
pub fn by_tokens(q: &Tensor, k: &Tensor, v: &Tensor, gates: &Gates, state: &Tensor) -> Result<(Tensor, Tensor)> {
    let [qs, ks, vs, log_decay, beta] = prepared(q, k, v, gates)?;
    let decay = log_decay.exp()?;
    let mut state = state.clone();
    let mut outs = vec![];
    for t in 0..q.dim(1)? {
        let at = |x: &Tensor| x.narrow(1, t, 1)?.squeeze(1)?.contiguous()?.unsqueeze(D::Minus1); // [batch, HV, .., 1]
        let (q, k, v) = (at(&qs)?, at(&ks)?, at(&vs)?);
        state = state.broadcast_mul(&at(&decay)?.unsqueeze(D::Minus1)?)?;
        let delta = (v - state.matmul(&k)?)?.broadcast_mul(&at(&beta)?.unsqueeze(D::Minus1)?)?;
        state = (state + delta.matmul(&k.transpose(2, 3)?)?)?;
        outs.push(state.matmul(&q)?.squeeze(D::Minus1)?);
    }
    Ok((Tensor::stack(&outs, 1)?.to_dtype(v.dtype())?, state))
}

/// Chunk by chunk. Within a chunk the tokens' writes depend on each other through a triangular system, which is solved for
/// what they would write into a state of zero and for what they take out of the one before. candle has no triangular solve:
/// the inverse of I - N is the product of I + N, I + N^2, I + N^4, .. until the powers of N are zero.
pub fn by_chunks(q: &Tensor, k: &Tensor, v: &Tensor, gates: &Gates, state: &Tensor) -> Result<(Tensor, Tensor)> {
    let ((batch, tokens, heads, value_dim), key_dim) = (v.dims4()?, q.dim(D::Minus1)?);
    let chunks = tokens.div_ceil(CHUNK);
    let pad = chunks * CHUNK - tokens;
    // [batch * HV, chunks, 64, ..]; tokens of padding write nothing and let nothing decay.
    let by_heads = |x: &Tensor| {
        let x = x.pad_with_zeros(1, 0, pad)?.transpose(1, 2)?.contiguous()?;
        x.reshape((batch * heads, chunks, CHUNK, x.elem_count() / (batch * heads * chunks * CHUNK)))
    };
    let [q, k, vs, g, beta] = prepared(q, k, v, gates)?;
    let (q, k, vs, g, beta) = (by_heads(&q)?, by_heads(&k)?, by_heads(&vs)?, by_heads(&g)?, by_heads(&beta)?);
    let g = g.cumsum(2)?; // [.., 64, 1], as beta is
    let lower = Tensor::tril2(CHUNK, DType::F32, q.device())?;
    let below = (&lower - Tensor::eye(CHUNK, DType::F32, q.device())?)?;
    // Above the diagonal the differences are positive: masked before they overflow.
    let apart = g.broadcast_sub(&g.transpose(2, 3)?)?.broadcast_mul(&lower)?;
    let decay = apart.exp()?.broadcast_mul(&lower)?;
    let (written, faded, keys) = (k.broadcast_mul(&beta)?, g.exp()?, k.transpose(2, 3)?.contiguous()?);
    let mut power = (written.matmul(&keys)? * &decay)?.broadcast_mul(&below)?.neg()?;
    let mut sides = Tensor::cat(&[vs.broadcast_mul(&beta)?, written.broadcast_mul(&faded)?], 3)?;
    let mut exponent = 1;
    while exponent < CHUNK {
        sides = (&sides + power.matmul(&sides)?)?;
        exponent *= 2;
        power = power.matmul(&power)?;
    }
    let attention = (q.matmul(&keys)? * decay)?;
    let read = q.broadcast_mul(&faded)?;
    let last = g.narrow(2, CHUNK - 1, 1)?;
    let kept = k.broadcast_mul(&last.broadcast_sub(&g)?.exp()?)?;
    let fading = last.exp()?;
    let mut state = state.reshape((batch * heads, value_dim, key_dim))?.transpose(1, 2)?.contiguous()?;
    let mut outs = vec![];
    for c in 0..chunks {
        let at = |x: &Tensor| x.narrow(1, c, 1)?.squeeze(1)?.contiguous();
        let sides = at(&sides)?;
        let (u, w) = (sides.narrow(2, 0, value_dim)?, sides.narrow(2, value_dim, key_dim)?.contiguous()?);
        let new = (u - w.matmul(&state)?)?;
        outs.push((at(&read)?.matmul(&state)? + at(&attention)?.matmul(&new)?)?);
        let write = at(&kept)?.transpose(1, 2)?.contiguous()?.matmul(&new)?;
        state = (state.broadcast_mul(&at(&fading)?)? + write)?;
    }
    let o = Tensor::cat(&outs, 1)?.narrow(1, 0, tokens)?.reshape((batch, heads, tokens, value_dim))?;
    let state = state.transpose(1, 2)?.contiguous()?.reshape((batch, heads, value_dim, key_dim))?;
    Ok((o.transpose(1, 2)?.contiguous()?.to_dtype(v.dtype())?, state))
}
