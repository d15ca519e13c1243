//! A call of attention over a cache, and its definition in f64.

use crate::support::{poison, rel_rms, rounded, values, Rng};
use candle_core::{DType, Device, Result, Tensor, D};
use candle_gdn::{CuSeqlens, NO_SLOT};
use candle_gdn_models::{rotary_frequencies, AttentionCache, AttentionDecode, AttentionPrepare, PrepareOptions};

// Large enough to be missed.
const EPS: f64 = 0.03;

/// Sequences with tokens in the cache and new ones, columns of one projection `heads x [q | gate] | k | v`.
#[derive(Debug, Clone)]
pub struct Case {
    /// Tokens in the cache, and new ones, of each sequence.
    pub before: Vec<usize>,
    pub lens: Vec<usize>,
    pub heads: usize,
    pub kv_heads: usize,
    pub dim: usize,
    pub pairs: usize,
    pub capacity: usize,
    /// With one the cache is a ring.
    pub window: Option<usize>,
    pub dtype: DType,
    pub packed: bool,
    pub slots: bool,
    pub gated: bool,
    pub zero_centred: bool,
    /// Queries and gates are views whose rows begin one element late.
    pub shifted: bool,
    /// `None`: dim^-0.5.
    pub scale: Option<f64>,
    pub seed: u64,
}

/// What a call returns and leaves: queries, o, and the caches' rows of the live sequences.
struct Results {
    q: Vec<f64>,
    o: Vec<f64>,
    k: Vec<f64>,
    v: Vec<f64>,
}

impl Case {
    pub fn new(before: &[usize], lens: &[usize], heads: usize, kv_heads: usize, dim: usize, seed: u64) -> Self {
        let longest = before.iter().zip(lens).map(|(b, t)| b + t).max().unwrap_or(0);
        Self {
            before: before.to_vec(),
            lens: lens.to_vec(),
            heads,
            kv_heads,
            dim,
            pairs: dim / 8,
            capacity: longest + 3,
            window: None,
            dtype: DType::F32,
            packed: lens.iter().any(|&t| t != lens[0]),
            slots: false,
            gated: true,
            zero_centred: true,
            shifted: false,
            scale: None,
            seed,
        }
    }

    /// Positions of a slot that keys and values are drawn for.
    fn positions(&self) -> usize {
        self.before.iter().copied().max().unwrap_or(0).max(self.capacity)
    }

    fn total(&self) -> usize {
        self.lens.iter().sum()
    }

    fn width(&self) -> usize {
        (2 * self.heads + 2 * self.kv_heads) * self.dim
    }

    /// The slot of each sequence; `None` is padding.
    fn map(&self) -> Vec<Option<usize>> {
        let n = self.lens.len();
        (0..n).map(|i| if self.slots { (i % 3 != 1).then_some(n - i) } else { Some(i) }).collect()
    }

    fn num_slots(&self) -> usize {
        self.lens.len() + 2 * usize::from(self.slots)
    }

    fn bound(&self) -> f64 {
        match self.dtype {
            DType::BF16 => 4e-3,
            DType::F16 => 6e-4,
            _ => 1e-5,
        }
    }

    fn inv_freq(&self) -> Vec<f64> {
        (0..self.pairs).map(|i| 1e6f64.powf(-(i as f64) / self.pairs as f64)).collect()
    }

    fn draw(&self) -> Drawn {
        let rng = &mut Rng::new(self.seed);
        let rows = self.num_slots() * self.kv_heads * self.positions() * self.dim;
        let mut draw = |n: usize, scale: f64, dtype| {
            let x: Vec<f64> = rng.normals(n).into_iter().map(|x| x * scale).collect();
            rounded(&x, &[n], dtype).unwrap().1
        };
        Drawn {
            x: draw(self.total() * self.width(), 1.0, self.dtype),
            k: draw(rows, 1.0, self.dtype),
            v: draw(rows, 1.0, self.dtype),
            q_weight: draw(self.dim, 0.3, DType::F32),
            k_weight: draw(self.dim, 0.3, DType::F32),
        }
    }

    pub fn check(&self, device: &Device) {
        let drawn = self.draw();
        let got = drawn.run(self, device).unwrap_or_else(|e| panic!("{e}\n{self:?}"));
        let want = drawn.reference(self, None);
        let case = format!("on {:?}: {self:?}", device.location());
        let bound = self.bound();
        for (what, got, want) in [("q", &got.q, &want.q), ("k", &got.k, &want.k)] {
            let error = rel_rms(got, want);
            assert!(error <= bound, "{what} is off by {error:e}, {case}");
        }
        assert!(got.v == want.v, "v is not a copy, {case}");
        // From the queries and keys as they were rounded: the attention's own error.
        let want = drawn.reference(self, Some((&got.q, &got.k)));
        let error = rel_rms(&got.o, &want.o);
        assert!(error <= bound, "o is off by {error:e}, {case}");
    }
}

/// Inputs by token, old keys and values by slot, kv head and position, rounded to the dtypes they travel in.
struct Drawn {
    x: Vec<f64>,
    k: Vec<f64>,
    v: Vec<f64>,
    q_weight: Vec<f64>,
    k_weight: Vec<f64>,
}

/// The last columns of a tensor with one more.
fn shifted(x: &Tensor) -> Result<Tensor> {
    let columns = x.dim(D::Minus1)?;
    let first = x.narrow(D::Minus1, 0, 1)?.contiguous()?;
    let wide = Tensor::cat(&[&first, &x.contiguous()?], D::Minus1)?.contiguous()?;
    wide.narrow(D::Minus1, 1, columns)
}

/// In eight sums, which the compiler makes vectors of: the tests of windows take long, and tests of graphs wait for them.
fn dot(a: &[f64], b: &[f64]) -> f64 {
    let mut sums = [0.0; 8];
    for (a, b) in a.chunks(8).zip(b.chunks(8)) {
        sums.iter_mut().zip(a.iter().zip(b)).for_each(|(sum, (a, b))| *sum += a * b);
    }
    sums.iter().sum()
}

impl Drawn {
    /// A cache with the case's old tokens, all else `empty`.
    fn cache(&self, case: &Case, data: &[f64], empty: f64, device: &Device) -> Result<Tensor> {
        let (capacity, dim, kv_heads) = (case.capacity, case.dim, case.kv_heads);
        let mut rows = vec![empty; case.num_slots() * kv_heads * capacity * dim];
        for (slot, &before) in case.map().into_iter().zip(&case.before) {
            for head in slot.map_or(0..0, |slot| slot * kv_heads..(slot + 1) * kv_heads) {
                for position in before.saturating_sub(capacity)..before {
                    let old = &data[(head * case.positions() + position) * dim..][..dim];
                    rows[(head * capacity + position % capacity) * dim..][..dim].copy_from_slice(old);
                }
            }
        }
        rounded(&rows, &[case.num_slots(), case.kv_heads, capacity, dim], case.dtype)?.0.to_device(device)
    }

    fn run(&self, case: &Case, device: &Device) -> Result<Results> {
        let Case { heads, kv_heads, dim, .. } = *case;
        let lead = if case.packed { vec![case.total()] } else { vec![case.lens.len(), case.lens[0]] };
        let shape = [&lead[..], &[case.width()]].concat();
        let x = rounded(&self.x, &shape, case.dtype)?.0.to_device(device)?;
        let column = |start: usize, heads: usize, dim: usize| {
            x.narrow(D::Minus1, start, heads * dim)?.reshape([&lead[..], &[heads, dim]].concat())
        };
        let rows = x.reshape([&lead[..], &[case.width() / dim, dim]].concat())?;
        // Of a copy, since a reshape of a narrowed tensor is one; its heads alternate between q and gate.
        let every_other = |first: usize| -> Result<Tensor> {
            let q_gate = rows.narrow(lead.len(), 0, 2 * heads)?.contiguous()?;
            q_gate
                .reshape([&lead[..], &[heads, 2, dim]].concat())?
                .narrow(lead.len() + 1, first, 1)?
                .squeeze(lead.len() + 1)
        };
        let (q, gate) = (every_other(0)?, every_other(1)?);
        let k = column(2 * heads * dim, kv_heads, dim)?;
        let v = rows.narrow(lead.len(), 2 * heads + kv_heads, kv_heads)?;
        let weight = |w: &[f64]| -> Result<Tensor> { rounded(w, &[dim], DType::F32)?.0.to_device(device) };
        // With a window values are finite from the start.
        let empty = [f64::NAN, if case.window.is_some() { 0.0 } else { f64::NAN }];
        let caches = [self.cache(case, &self.k, empty[0], device)?, self.cache(case, &self.v, empty[1], device)?];
        let n = case.lens.len();
        let positions = Tensor::new(case.before.iter().map(|&b| b as u32).collect::<Vec<_>>(), device)?;
        let mut cache = AttentionCache::new(&caches[0], &caches[1], &positions)?;
        if let Some(window) = case.window {
            cache = cache.with_window(window)?;
        }
        if case.slots {
            let slots: Vec<u32> = case.map().iter().map(|s| s.map_or(NO_SLOT, |s| s as u32)).collect();
            cache = cache.with_slots(&Tensor::from_vec(slots, n, device)?);
        }
        let options = PrepareOptions { eps: EPS, zero_centred: case.zero_centred };
        let frequencies = rotary_frequencies(&case.inv_freq(), device)?;
        let mut prepare =
            AttentionPrepare::new(&cache, &weight(&self.q_weight)?, &weight(&self.k_weight)?, &frequencies, options)?;
        let mut decode = AttentionDecode::new(&cache, case.scale)?;
        let cu = CuSeqlens::from_lengths(&case.lens, device)?;
        if case.packed {
            (prepare, decode) = (prepare.with_cu_seqlens(&cu), decode.with_cu_seqlens(&cu));
        }
        poison(case.total() * heads * dim, case.dtype, device)?;
        let mut q = prepare.forward(&q, &k, &v)?;
        let mut gate = gate;
        if case.shifted {
            // Heads apart, and one after the other.
            (q, gate) = (shifted(&q)?, shifted(&gate.flatten_from(lead.len())?)?);
        }
        let o = decode.forward(&q, case.gated.then_some(&gate))?;
        if case.packed {
            cache.advance_packed(&cu)?;
        } else {
            cache.advance(case.lens[0])?;
        }
        let new = case.map().into_iter().zip(&case.lens).map(|(slot, len)| slot.map_or(0, |_| *len));
        let want: Vec<u32> = case.before.iter().zip(new).map(|(before, new)| (before + new) as u32).collect();
        assert_eq!(positions.to_vec1::<u32>()?, want, "{case:?}");
        let mut results = Results { q: values(&q), o: values(&o), k: vec![], v: vec![] };
        for ((to, cache), (old, empty)) in
            [&mut results.k, &mut results.v].into_iter().zip(&caches).zip([&self.k, &self.v].into_iter().zip(empty))
        {
            let rows = values(cache);
            for ((slot, before), len) in case.map().into_iter().zip(&case.before).zip(&case.lens) {
                for head in slot.map_or(0..0, |slot| slot * kv_heads..(slot + 1) * kv_heads) {
                    let row = |row: usize| &rows[(head * case.capacity + row) * dim..][..dim];
                    for position in 0..before + len {
                        // What a ring no longer has is not compared.
                        to.extend(match position + case.capacity < before + len {
                            true => &old[(head * case.positions() + position) * dim..][..dim],
                            false => row(position % case.capacity),
                        });
                    }
                    let mut rest = (before + len..case.capacity).flat_map(row);
                    assert!(
                        rest.all(|x| *x == empty || x.is_nan() && empty.is_nan()),
                        "wrote past the new tokens: {case:?}"
                    );
                }
            }
        }
        Ok(results)
    }

    /// The definition; `rounded` are queries and keys to take instead of the exact ones.
    fn reference(&self, case: &Case, rounded: Option<(&[f64], &[f64])>) -> Results {
        let Case { heads, kv_heads, dim, pairs, .. } = *case;
        let freq = case.inv_freq();
        let centre = f64::from(u8::from(case.zero_centred));
        let scale = case.scale.unwrap_or((dim as f64).powf(-0.5));
        let place = |x: &[f64], weight: &[f64], position: usize| -> Vec<f64> {
            let mean = x.iter().map(|x| x * x).sum::<f64>() / dim as f64;
            let mut y: Vec<f64> = x.iter().zip(weight).map(|(x, w)| x / (mean + EPS).sqrt() * (w + centre)).collect();
            for i in 0..pairs {
                let (sin, cos) = (position as f64 * freq[i]).sin_cos();
                let (a, b) = (y[i], y[i + pairs]);
                (y[i], y[i + pairs]) = (a * cos - b * sin, a * sin + b * cos);
            }
            y
        };
        let mut results = Results { q: vec![], o: vec![], k: vec![], v: vec![] };
        let (mut token, mut key_at) = (0, 0);
        for (n, slot) in case.map().into_iter().enumerate() {
            let (before, len) = (case.before[n], case.lens[n]);
            let row = |t: usize, column: usize| &self.x[(token + t) * case.width() + column * dim..][..dim];
            let Some(slot) = slot else {
                results.q.extend(vec![0.0; len * heads * dim]);
                results.o.extend(vec![0.0; len * heads * dim]);
                token += len;
                continue;
            };
            let (first_k, first_q) = (results.k.len(), results.q.len());
            for h in 0..kv_heads {
                let first = (slot * kv_heads + h) * case.positions() * dim;
                let old = first..first + before * dim;
                results.k.extend(&self.k[old.clone()]);
                results.v.extend(&self.v[old]);
                for t in 0..len {
                    results.k.extend(place(row(t, 2 * heads + h), &self.k_weight, before + t));
                    results.v.extend(row(t, 2 * heads + kv_heads + h));
                }
            }
            for t in 0..len {
                for h in 0..heads {
                    results.q.extend(place(row(t, 2 * h), &self.q_weight, before + t));
                }
            }
            let keys = match rounded {
                Some((_, k)) => &k[key_at..],
                None => &results.k[first_k..],
            };
            let queries = match rounded {
                Some((q, _)) => &q[first_q..],
                None => &results.q[first_q..],
            };
            for t in 0..len {
                for h in 0..heads {
                    let head = h / (heads / kv_heads) * (before + len) * dim;
                    let q = &queries[(t * heads + h) * dim..][..dim];
                    // A ring has the last keys alone, whichever of them the first tokens would see.
                    let lost = (before + len).saturating_sub(case.capacity);
                    let first = case.window.map_or(0, |window| (before + t + 1).saturating_sub(window).max(lost));
                    let weights: Vec<f64> = (first..before + t + 1)
                        .map(|j| (dot(q, &keys[head + j * dim..][..dim]) * scale).exp())
                        .collect();
                    let total: f64 = weights.iter().sum();
                    let mut o = vec![0.0; dim];
                    for (w, v) in weights.iter().zip(results.v[first_k + head + first * dim..].chunks_exact(dim)) {
                        o.iter_mut().zip(v).for_each(|(o, v)| *o += w * v);
                    }
                    results.o.extend(o.iter().enumerate().map(|(c, o)| {
                        let gate = if case.gated { 1.0 / (1.0 + (-row(t, 2 * h + 1)[c]).exp()) } else { 1.0 };
                        o / total * gate
                    }));
                }
            }
            key_at += kv_heads * (before + len) * dim;
            token += len;
        }
        results
    }
}
