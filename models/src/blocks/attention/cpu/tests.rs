//! Attention against plain f64, however the tokens come.

use super::*;
use half::{bf16, f16};

// Large enough to be missed.
const EPS: f32 = 0.03;

fn wave(n: usize, a: f32) -> Vec<f32> {
    (0..n).map(|i| (i as f32 * a + a).sin() * 1.5).collect()
}

/// Sequences of one length.
struct Case {
    batch: usize,
    shape: Shape,
    pairs: usize,
    q_gate: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    q_scale: Vec<f32>,
    k_scale: Vec<f32>,
    cos: Vec<f32>,
    sin: Vec<f32>,
    tokens: usize,
}

impl Case {
    fn new(batch: usize, shape: Shape, pairs: usize, tokens: usize) -> Self {
        let Shape { heads, kv_heads, dim, .. } = shape;
        let rows = batch * tokens;
        Self {
            batch,
            shape,
            pairs,
            q_gate: wave(rows * heads * 2 * dim, 0.371),
            k: wave(rows * kv_heads * dim, 0.773),
            v: wave(rows * kv_heads * dim, 0.559),
            q_scale: wave(dim, 0.3).iter().map(|x| 1.0 + 0.2 * x).collect(),
            k_scale: wave(dim, 0.8).iter().map(|x| 1.0 + 0.2 * x).collect(),
            cos: (0..tokens * pairs).map(|i| (i as f32 * 0.01).cos()).collect(),
            sin: (0..tokens * pairs).map(|i| (i as f32 * 0.01).sin()).collect(),
            tokens,
        }
    }

    /// The call of `tokens` tokens of a sequence from `start` on.
    fn attention(&self, sequence: usize, start: usize, tokens: usize) -> Attention<'_> {
        let Shape { heads, kv_heads, dim, .. } = self.shape;
        let rows =
            |width: usize| (sequence * self.tokens + start) * width..(sequence * self.tokens + start + tokens) * width;
        let angles = start * self.pairs..(start + tokens) * self.pairs;
        Attention {
            q_gate: &self.q_gate[rows(heads * 2 * dim)],
            gated: true,
            k: &self.k[rows(kv_heads * dim)],
            v: &self.v[rows(kv_heads * dim)],
            positions: Positions {
                scales: Some([&self.q_scale, &self.k_scale]),
                eps: EPS,
                cos: &self.cos[angles.clone()],
                sin: &self.sin[angles],
                pairs: self.pairs,
            },
            tokens,
            max_tokens: self.tokens + 5,
        }
    }

    /// All sequences, by calls of `parts` tokens one after the other: `[batch, tokens, heads, dim]`.
    fn run<T: Element>(&self, parts: &[usize]) -> Vec<f32> {
        let row = self.shape.heads * self.shape.dim;
        let mut caches: Vec<Cache<T>> = (0..self.batch).map(|_| Cache::new(self.shape)).collect();
        let mut out = vec![f32::NAN; self.batch * self.tokens * row];
        let mut start = 0;
        for &tokens in parts {
            let sequences = caches.iter_mut().zip(out.chunks_exact_mut(self.tokens * row)).enumerate();
            let calls = sequences.map(|(n, (cache, out))| Call {
                attention: self.attention(n, start, tokens),
                cache,
                out: &mut out[start * row..][..tokens * row],
            });
            run_all(calls.collect());
            start += tokens;
            assert!(caches.iter().all(|cache| cache.len == start));
        }
        out
    }

    fn placed(&self, x: &[f32], scale: &[f32], t: usize) -> Vec<f64> {
        let mean = x.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>() / x.len() as f64;
        let mut x: Vec<f64> =
            x.iter().zip(scale).map(|(&x, &s)| f64::from(x) * f64::from(s) / (mean + f64::from(EPS)).sqrt()).collect();
        for i in 0..self.pairs {
            let (c, s) = (f64::from(self.cos[t * self.pairs + i]), f64::from(self.sin[t * self.pairs + i]));
            let (a, b) = (x[i], x[i + self.pairs]);
            (x[i], x[i + self.pairs]) = (a * c - b * s, a * s + b * c);
        }
        x
    }

    /// The definition.
    fn naive(&self) -> Vec<f32> {
        let Shape { heads, kv_heads, dim, window } = self.shape;
        let mut out = Vec::new();
        for b in 0..self.batch {
            let row = |t: usize| b * self.tokens + t;
            let keys: Vec<Vec<f64>> = (0..self.tokens * kv_heads)
                .map(|i| self.placed(&self.k[(row(0) * kv_heads + i) * dim..][..dim], &self.k_scale, i / kv_heads))
                .collect();
            for t in 0..self.tokens {
                for h in 0..heads {
                    let q_gate = &self.q_gate[(row(t) * heads + h) * 2 * dim..][..2 * dim];
                    let q = self.placed(&q_gate[..dim], &self.q_scale, t);
                    let g = h / (heads / kv_heads);
                    let score = |j: usize| {
                        let dot: f64 = q.iter().zip(&keys[j * kv_heads + g]).map(|(q, k)| q * k).sum();
                        (dot / (dim as f64).sqrt()).exp()
                    };
                    let first = window.map_or(0, |window| (t + 1).saturating_sub(window));
                    let weights: Vec<f64> = (first..=t).map(score).collect();
                    let total: f64 = weights.iter().sum();
                    for c in 0..dim {
                        let v = |j: usize| f64::from(self.v[(row(j) * kv_heads + g) * dim + c]);
                        let o: f64 = weights.iter().enumerate().map(|(j, w)| w / total * v(first + j)).sum();
                        out.push((o / (1.0 + f64::from(-q_gate[dim + c]).exp())) as f32);
                    }
                }
            }
        }
        out
    }
}

fn assert_close(got: &[f32], want: &[f32], bound: f32) {
    assert_eq!(got.len(), want.len());
    // A NaN must not pass.
    let worst = got.iter().zip(want).map(|(a, b)| (a - b).abs()).fold(0.0, |m, d| if d <= m { m } else { d });
    assert!(worst <= bound, "{worst:e}");
}

#[test]
fn is_the_definition_however_the_tokens_come() {
    for (batch, heads, kv_heads, dim, pairs, tokens) in
        [(1, 4, 2, 8, 2, 70), (2, 3, 1, 33, 16, 40), (1, 2, 2, 64, 32, 200), (3, 6, 2, 5, 0, 9), (1, 64, 1, 4, 1, 33)]
    {
        let case = Case::new(batch, Shape { heads, kv_heads, dim, window: None }, pairs, tokens);
        let want = case.naive();
        let ones = vec![1; tokens];
        let uneven = [1, tokens - 8, 0, 5, 2];
        for parts in [&[tokens][..], &ones, &uneven] {
            assert_close(&case.run::<f32>(parts), &want, 2e-6);
            assert_close(&case.run::<f16>(parts), &want, 2e-3);
            assert_close(&case.run::<bf16>(parts), &want, 2e-2);
        }
    }
}

#[test]
fn a_long_context_in_parts() {
    let tokens = 2 * SPLIT + 200;
    let case = Case::new(2, Shape { heads: 2, kv_heads: 1, dim: 6, window: None }, 3, tokens);
    let want = case.naive();
    // Up to four blocks of queries, of 24 tokens each.
    for parts in [&[tokens][..], &[tokens - 3, 1, 2], &[SPLIT, 20, tokens - SPLIT - 20], &[tokens - 100, 40, 60]] {
        assert_close(&case.run::<f32>(parts), &want, 2e-6);
    }
}

/// As many tasks for a few tokens more than a block of queries has.
#[test]
fn several_blocks_of_queries_are_divided_too() {
    let shape = Shape { heads: 16, kv_heads: 2, dim: 4, window: None };
    let (case, mut cache) = (Case::new(1, shape, 2, 6 * 64), Cache::<f32>::new(shape));
    cache.len = 20 * SPLIT;
    let tasks = |tokens: usize| Plan::new(&case.attention(0, 0, tokens), &cache, &mut [], 0).tasks();
    assert_eq!(tasks(6), 2 * 20);
    assert!(tasks(7) >= tasks(6) && tasks(48) >= 64, "{} and {}", tasks(7), tasks(48));
    assert_eq!(tasks(6 * 64), 2 * 64);
}

/// Some turns of the ring.
#[test]
fn a_window_is_the_definition_however_the_tokens_come() {
    for (batch, heads, kv_heads, dim, tokens) in [(1, 4, 2, 8, 330), (2, 3, 1, 33, 290), (1, 2, 2, 64, 200)] {
        for window in [1, 7, 40, tokens + 9] {
            let shape = Shape { heads, kv_heads, dim, window: Some(window) };
            let case = Case::new(batch, shape, dim / 4, tokens);
            let want = case.naive();
            let ones = vec![1; tokens];
            let uneven = [1, 0, 5, 2, tokens - 81, 64, 9];
            for parts in [&[tokens][..], &ones, &uneven] {
                assert_close(&case.run::<f32>(parts), &want, 2e-6);
                assert_close(&case.run::<f16>(parts), &want, 2e-3);
                assert_close(&case.run::<bf16>(parts), &want, 2e-2);
            }
        }
    }
}

#[test]
fn a_long_window_in_parts() {
    let tokens = 3 * SPLIT;
    let case = Case::new(1, Shape { heads: 2, kv_heads: 1, dim: 6, window: Some(SPLIT + 300) }, 3, tokens);
    let want = case.naive();
    for parts in [&[tokens][..], &[tokens - 300, 1, 2, 200, 97]] {
        assert_close(&case.run::<f32>(parts), &want, 2e-6);
    }
}

/// Drafts as long as there is room for, of which the next tokens keep some or none.
#[test]
fn a_rejected_draft_overwrites_nothing_that_is_seen() {
    let tokens = 330;
    for window in [1, 7, 40, 100] {
        let shape = Shape { heads: 2, kv_heads: 1, dim: 8, window: Some(window) };
        let (case, draft) = (Case::new(1, shape, 2, tokens), Case::new(2, shape, 2, tokens));
        let (mut cache, mut out) = (Cache::<f32>::new(shape), vec![f32::NAN; tokens * 16]);
        let (mut start, mut unread) = (0, vec![0f32; tokens * 16]);
        for part in [1, 40, 3, 64, 1, 1, 50, 90, 1, 1, 1, 77] {
            let drafted = new_tokens(window).min(tokens - start);
            // Another sequence's tokens.
            let attention = draft.attention(1, start, drafted);
            run_all(vec![Call { attention, cache: &mut cache, out: &mut unread[..drafted * 16] }]);
            cache.truncate(start);
            let out = &mut out[start * 16..][..part * 16];
            run_all(vec![Call { attention: case.attention(0, start, part), cache: &mut cache, out }]);
            start += part;
        }
        assert_eq!(start, tokens);
        assert_close(&out, &case.naive(), 2e-6);
    }
}

/// The rows of the window alone, to a cache that has seen another sequence.
#[test]
fn a_copied_window_goes_on_alike() {
    for window in [1, 7, 40] {
        let shape = Shape { heads: 2, kv_heads: 1, dim: 8, window: Some(window) };
        let case = Case::new(2, shape, 2, 330);
        let (mut cache, mut copy) = (Cache::<f32>::new(shape), Cache::<f32>::new(shape));
        let run = |cache: &mut Cache<f32>, sequence, start, tokens| {
            let mut out = vec![f32::NAN; tokens * 16];
            run_all(vec![Call { attention: case.attention(sequence, start, tokens), cache, out: &mut out }]);
            out
        };
        run(&mut copy, 1, 0, 201);
        let mut start = 0;
        for tokens in [5, 30, 110, 60] {
            run(&mut cache, 0, start, tokens);
            start += tokens;
            let first = start - window.min(start);
            let [keys, values] = cache.read_rows(first..start);
            copy.seek(first);
            copy.append_rows([&keys, &values], start - first, 335);
            assert_eq!(run(&mut copy, 0, start, 90), run(&mut cache, 0, start, 90));
            cache.truncate(start);
        }
    }
}

#[test]
fn a_ring_does_not_grow() {
    let shape = Shape { heads: 2, kv_heads: 1, dim: 8, window: Some(100) };
    let case = Case::new(1, shape, 2, 1000);
    let mut cache = Cache::<f32>::new(shape);
    let full = cache.bytes_of(usize::MAX);
    assert_eq!(full, 224 * (8 + 32) * 4);
    for start in (0..1000).step_by(20) {
        let mut out = vec![f32::NAN; 20 * 16];
        run_all(vec![Call { attention: case.attention(0, start, 20), cache: &mut cache, out: &mut out }]);
        assert_eq!(cache.size_in_bytes(), full);
    }
}

#[test]
fn a_reset_cache_is_a_new_one() {
    let case = Case::new(1, Shape { heads: 2, kv_heads: 1, dim: 8, window: None }, 2, 40);
    let mut cache = Cache::<f32>::new(case.shape);
    // Whatever an earlier sequence has written must not matter.
    cache.reserve(100, 100);
    cache.keys.fill(f32::NAN);
    cache.values.fill(f32::NAN);
    cache.truncate(0);
    let mut out = vec![f32::NAN; 40 * 2 * 8];
    run_all(vec![Call { attention: case.attention(0, 0, 40), cache: &mut cache, out: &mut out }]);
    assert_close(&out, &case.naive(), 2e-6);
}

#[test]
fn tokens_without_queries_are_only_appended() {
    let case = Case::new(1, Shape { heads: 2, kv_heads: 1, dim: 8, window: None }, 2, 40);
    let (mut cache, mut out) = (Cache::<f32>::new(case.shape), vec![f32::NAN; 2 * 8]);
    let attention = Attention { q_gate: &[], ..case.attention(0, 0, 39) };
    run_all(vec![Call { attention, cache: &mut cache, out: &mut [] }]);
    run_all(vec![Call { attention: case.attention(0, 39, 1), cache: &mut cache, out: &mut out }]);
    assert_close(&out, &case.naive()[39 * 2 * 8..], 2e-6);
}

/// Queries before it do not change, all later ones become NaN.
#[test]
fn a_value_that_is_not_finite_reaches_the_queries_that_see_it() {
    fn check<T: Element>(dim: usize, tokens: usize, wrong: f32, in_keys: bool) {
        let (heads, bad) = (4, tokens / 2);
        let mut case = Case::new(1, Shape { heads, kv_heads: 2, dim, window: None }, 1, tokens);
        let want = case.run::<T>(&[tokens]);
        let rows = if in_keys { &mut case.k } else { &mut case.v };
        // In the first key head, which the first two heads read.
        rows[bad * 2 * dim + 1] = wrong;
        let got = case.run::<T>(&[tokens]);
        for (token, (got, want)) in got.chunks(heads * dim).zip(want.chunks(heads * dim)).enumerate() {
            match token < bad {
                true => assert_eq!(got, want, "token {token} of {tokens}"),
                false => assert!(got[..2 * dim].iter().any(|x| x.is_nan()), "token {token} of {tokens}"),
            }
        }
    }
    for (dim, tokens) in [(64, 4), (128, 7), (256, 130), (8, 300)] {
        for (wrong, in_keys) in [(f32::NAN, false), (f32::INFINITY, false), (f32::NAN, true), (f32::INFINITY, true)] {
            check::<f32>(dim, tokens, wrong, in_keys);
            check::<f16>(dim, tokens, wrong, in_keys);
            check::<bf16>(dim, tokens, wrong, in_keys);
        }
    }
}

/// The tiles differ between instruction sets, and a machine picks only one of them.
#[test]
fn every_instruction_set_gives_the_same() {
    let case = Case::new(1, Shape { heads: 4, kv_heads: 2, dim: 40, window: None }, 8, 50);
    let want = case.naive();
    let run = |vectorize: &dyn Fn(QueriesTask<'_, '_, '_, f32>)| {
        let mut cache = Cache::<f32>::new(case.shape);
        let mut out = vec![f32::NAN; want.len()];
        let attention = case.attention(0, 0, case.tokens);
        attention.append(&mut cache);
        let shared = Shared::new(&mut out);
        for head in 0..2 {
            let queries =
                Queries { attention: &attention, cache: &cache, head, tokens: 0..case.tokens, keys: 0..cache.len };
            vectorize(QueriesTask { queries, out: Destination::Final(&shared) });
        }
        assert_close(&out, &want, 2e-6);
    };
    run(&|task| Simd::vectorize(pulp::Scalar::new(), task));
    #[cfg(target_arch = "x86_64")]
    {
        if let Some(simd) = pulp::x86::V3::try_new() {
            run(&|task| Simd::vectorize(simd, task));
        }
        if let Some(simd) = pulp::x86::V4::try_new() {
            run(&|task| Simd::vectorize(simd, task));
        }
    }
    #[cfg(target_arch = "aarch64")]
    if let Some(simd) = pulp::aarch64::Neon::try_new() {
        run(&|task| Simd::vectorize(simd, task));
    }
}
