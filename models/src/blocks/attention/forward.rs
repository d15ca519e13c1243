//! The layer on new tokens of some sequences: projections, append, attention, output projection.

use super::cpu::{run_all, Attention, Cache, Call, Positions};
use super::kv_cache::{typed, CpuCaches};
use super::{Angles, AttentionCache, AttentionDecode, AttentionPrepare, GatedAttention, HeadsNorm, PrepareOptions};
use crate::weights::Weight;
use candle_core::{bail, Module, Result, Tensor, D};
use candle_gdn::CuSeqlens;
use candle_gdn_core::cpu::matmul::products;
use candle_gdn_core::cpu::Element;
use candle_gdn_core::{host, Launch};
use std::ops::Range;

/// The new tokens of a pass on the CPU.
pub(crate) struct CpuTokens<'a> {
    /// Slot, and tokens before the pass, of each sequence.
    pub rows: &'a [(usize, usize)],
    /// New tokens of each sequence.
    pub lengths: &'a [usize],
    /// Angles of all new tokens.
    pub angles: &'a Angles,
    /// The most tokens of a sequence.
    pub max_tokens: usize,
    /// Whether attention follows the append.
    pub attend: bool,
}

/// New tokens of a pass on a device that one append and one read of a cache are about.
#[derive(Debug)]
pub(crate) struct DeviceTokens {
    /// Those of the packed ones.
    pub tokens: Range<usize>,
    /// Their boundaries; `None` where each sequence has one.
    pub cu_seqlens: Option<CuSeqlens>,
    pub cache: AttentionCache,
    /// The longest sequence after the pass.
    pub max_len: usize,
}

/// `x [.., hidden]` by each of the projections, in f32.
fn project<const N: usize>(x: &Tensor, projections: [&Weight; N]) -> Result<[Vec<f32>; N]> {
    let panels: Vec<_> =
        projections.iter().filter_map(|projection| projection.panels().map(|panels| &**panels)).collect();
    if let Ok(panels) = <[_; N]>::try_from(panels) {
        return host::with_f32(x, |x| products(x, panels));
    }
    let mut out = [(); N].map(|()| Vec::new());
    for (out, projection) in out.iter_mut().zip(projections) {
        *out = host::with_f32(&projection.forward(x)?, <[f32]>::to_vec)?;
    }
    Ok(out)
}

impl GatedAttention {
    /// `x [tokens, hidden]`, packed, to the same; `None` where the tokens are only appended.
    pub(crate) fn forward_cpu(&self, x: &Tensor, new: CpuTokens<'_>, caches: &mut CpuCaches) -> Result<Option<Tensor>> {
        typed!(caches, caches => self.forward_typed(x, new, caches))
    }

    /// One product for all sequences, then each on its cache, the work of all divided together.
    fn forward_typed<T: Element>(
        &self,
        x: &Tensor,
        new: CpuTokens<'_>,
        caches: &mut [Cache<T>],
    ) -> Result<Option<Tensor>> {
        let (tokens, kv_width) = (x.dim(0)?, self.cfg.num_kv_heads * self.cfg.head_dim);
        let (width, [mut q_gate, mut k, v]) = match new.attend {
            true => (self.cfg.num_heads * self.cfg.head_dim, project(x, [&self.q_proj, &self.k_proj, &self.v_proj])?),
            false => (0, project(x, [&self.k_proj, &self.v_proj]).map(|[k, v]| [Vec::new(), k, v])?),
        };
        let query_width = q_gate.len() / tokens;
        let by_head = match &self.norm {
            HeadsNorm::Head { .. } => true,
            HeadsNorm::Projection(norm) => {
                norm.on_host(&mut q_gate, &mut k)?;
                false
            }
        };
        let [q_norm, k_norm] = self.norm.norms();
        let pairs = if self.positions { new.angles.cos.len() / tokens } else { 0 };
        let mut o = vec![0f32; tokens * width];
        host::with_f32s([&q_norm.scale, &k_norm.scale], |scales| {
            let mut caches: Vec<Option<&mut Cache<T>>> = caches.iter_mut().map(Some).collect();
            let (mut rest, mut first) = (&mut o[..], 0);
            let mut calls = Vec::with_capacity(new.rows.len());
            for (&(slot, position), &tokens) in new.rows.iter().zip(new.lengths) {
                let Some(cache) = caches.get_mut(slot).and_then(Option::take) else {
                    bail!("attention: expected each slot once, got {slot}")
                };
                cache.truncate(position);
                if cache.len != position {
                    bail!("attention: expected {position} tokens in slot {slot}, got {}", cache.len)
                }
                let rows = |width: usize| first * width..(first + tokens) * width;
                let positions = Positions {
                    scales: by_head.then_some(scales),
                    eps: q_norm.eps,
                    cos: &new.angles.cos[rows(pairs)],
                    sin: &new.angles.sin[rows(pairs)],
                    pairs,
                };
                let (q_gate, k, v) = (&q_gate[rows(query_width)], &k[rows(kv_width)], &v[rows(kv_width)]);
                let (out, tail) = rest.split_at_mut(tokens * width);
                let (gated, max_tokens) = (self.cfg.output_gate, new.max_tokens);
                let attention = Attention { q_gate, gated, k, v, positions, tokens, max_tokens };
                calls.push(Call { attention, cache, out });
                (rest, first) = (tail, first + tokens);
            }
            run_all(calls);
            Ok(())
        })??;
        match new.attend {
            true => self.o_proj.forward(&host::tensor(o, (tokens, width), x.dtype())?).map(Some),
            false => Ok(None),
        }
    }

    /// Appends keys and values alone. The keys stand in for the queries, whose result is dropped.
    pub(crate) fn append_cuda(&self, x: &Tensor, calls: &[DeviceTokens], launch: &Launch) -> Result<()> {
        let heads = (x.dim(0)?, self.cfg.num_kv_heads, self.cfg.head_dim);
        let [k, v] = [&self.k_proj, &self.v_proj].map(|proj| proj.multiply(x, launch)?.reshape(heads));
        let (k, v) = (k?, v?);
        let k = match &self.norm {
            HeadsNorm::Head { .. } => k,
            HeadsNorm::Projection(norm) => norm.keys(&k.flatten_from(1)?, launch)?.reshape(heads)?,
        };
        for call in calls {
            let [k, v] = [&k, &v].map(|rows| rows.narrow(0, call.tokens.start, call.tokens.len()));
            let (k, v) = (k?, v?);
            self.prepare(call, launch)?.forward(&k, &k, &v)?;
        }
        Ok(())
    }

    fn prepare(&self, call: &DeviceTokens, launch: &Launch) -> Result<AttentionPrepare> {
        // The norms' scales are 1 + w already.
        let options = PrepareOptions { eps: f64::from(self.norm.norms()[0].eps), zero_centred: false };
        let (cache, frequencies) = (&call.cache, &self.frequencies);
        let prepare = match &self.norm {
            HeadsNorm::Head { q, k } => AttentionPrepare::new(cache, &q.scale, &k.scale, frequencies, options)?,
            HeadsNorm::Projection(_) => AttentionPrepare::of_normed(cache, frequencies)?,
        };
        Ok(AttentionPrepare { cu_seqlens: call.cu_seqlens.clone(), launch: launch.clone(), ..prepare })
    }

    /// `x [tokens, hidden]`, packed, to the same, by ops that read slots and positions on the device. The columns of the one
    /// projection stay where they are.
    pub(crate) fn forward_cuda(&self, x: &Tensor, calls: &[DeviceTokens], launch: &Launch) -> Result<Tensor> {
        let (tokens, _) = x.dims2()?;
        let (heads, kv_heads, d) = (self.cfg.num_heads, self.cfg.num_kv_heads, self.cfg.head_dim);
        let all = match &self.qkv_proj {
            // Launches may overlap: no kernel of a pass writes a weight, and only `advance`, after the last layer, a position.
            Some(proj) => proj.multiply(x, launch)?,
            None => {
                let [q, k, v] = [&self.q_proj, &self.k_proj, &self.v_proj].map(|proj| proj.forward(x));
                Tensor::cat(&[q?, k?, v?], D::Minus1)?
            }
        };
        // Heads [q | gate] or q, then k, then v.
        let query_rows = self.cfg.query_rows() / d;
        let rows = all.reshape((tokens, query_rows + 2 * kv_heads, d))?;
        let (k, v) = (rows.narrow(1, query_rows, kv_heads)?, rows.narrow(1, query_rows + kv_heads, kv_heads)?);
        let (mut q, mut gate) = (rows.narrow(1, 0, query_rows)?, None);
        if self.cfg.output_gate {
            let pairs = all.reshape((tokens, query_rows / 2 + kv_heads, 2 * d))?.narrow(1, 0, heads)?;
            (q, gate) = (pairs.narrow(2, 0, d)?, Some(pairs.narrow(2, d, d)?));
        }
        let k = match &self.norm {
            HeadsNorm::Head { .. } => k,
            HeadsNorm::Projection(norm) => {
                let [normed, k] = norm.forward(&q.flatten_from(1)?, &k.flatten_from(1)?, launch)?;
                q = normed.reshape((tokens, heads, d))?;
                k.reshape((tokens, kv_heads, d))?
            }
        };
        let attend = |call: &DeviceTokens| {
            let (cu_seqlens, max_len) = (call.cu_seqlens.clone(), call.max_len);
            let decode = AttentionDecode::new(&call.cache, None)?;
            let decode = AttentionDecode { cu_seqlens, max_len, launch: launch.clone(), ..decode };
            let rows = |x: &Tensor| x.narrow(0, call.tokens.start, call.tokens.len());
            let q = self.prepare(call, launch)?.forward(&rows(&q)?, &rows(&k)?, &rows(&v)?)?;
            decode.forward(&q, gate.as_ref().map(rows).transpose()?.as_ref())
        };
        let o = match calls {
            [call] => attend(call)?,
            calls => Tensor::cat(&calls.iter().map(attend).collect::<Result<Vec<_>>>()?, 0)?,
        };
        self.o_proj.multiply(&o.reshape((tokens, heads * d))?, launch)
    }
}
