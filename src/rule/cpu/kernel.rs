//! The gated delta rule over sequences and heads: one task per (sequence, value head), which walks its tokens one by
//! one or a few at a time. A chunk form was slower at every length, by 1.2 times or more: in f32 it has more arithmetic,
//! and the CPU needs no large matrices to be busy.

use super::recurrent::Step;
use super::transposed::{padded, TransposedState, AT_ONCE};
use crate::reference::Dims;
use candle_gdn_core::cpu::simd::dispatch;
use candle_gdn_core::cpu::{parallel, prefetch, Element, Heads, Sequences, Shared, Slots, Stored};
use pulp::{Simd, WithSimd};

/// From this many tokens on it pays to transpose a head's state and back.
const TRANSPOSE_FROM: usize = 8;

/// Everything but the output and the state.
pub struct Rule<'a, T> {
    pub sizes: Dims,
    pub q: Heads<'a, T>,
    pub k: Heads<'a, T>,
    pub v: Heads<'a, T>,
    /// `[tokens, HV]` in the packed order of the output: log decay and beta.
    pub gates: &'a [(f32, f32)],
    pub seqs: Sequences<'a>,
    pub slots: Slots<'a>,
    /// Sequences begin at zero, and the state is only written.
    pub from_zeros: bool,
    pub l2norm: bool,
    pub l2_eps: f64,
    pub scale: f64,
}

impl<T: Element> Rule<'_, T> {
    /// Writes o, contiguous `[tokens, HV, V]`, and advances `state`, `[slot, HV, V, K]` with contiguous slots.
    pub fn run<S: Stored>(&self, out: &mut [T], state: &mut [S]) {
        let Dims { value_heads, key_dim, value_dim, .. } = self.sizes;
        let head_size = value_dim * key_dim;
        let tasks = self.seqs.count * value_heads;
        let work = head_size * (self.seqs.total_tokens().div_ceil(self.seqs.count.max(1)));
        let (out, state) = (Shared::new(out), Shared::new(state));
        parallel(tasks, work, |task| {
            let (n, h) = (task / value_heads, task % value_heads);
            match self.slots.offsets(n) {
                // SAFETY: the slots written are distinct and no other sequence reads them, so that each task owns its head
                // of the one it writes.
                Some((src, dst)) => {
                    let head = h * head_size;
                    let state = unsafe { state.part_from(src + head, dst + head, head_size) };
                    self.head(n, h, &out, state);
                }
                None => self.zero(n, h, &out),
            }
        });
    }

    /// A row of q or k in f32, normalised where the rule says so, times `scale`. Returns by what it was multiplied.
    pub fn load_key(&self, row: &[T], dst: &mut [f32], scale: f64) -> f64 {
        dispatch(LoadKey { row, dst, rule: self, scale })
    }

    fn head<S: Stored>(&self, n: usize, h: usize, out: &Shared<'_, T>, state: &mut [S]) {
        let (first, tokens) = self.seqs.range(n);
        if self.from_zeros {
            state.fill(S::ZERO);
        }
        if tokens == 0 {
            return;
        }
        let key_head = h / (self.sizes.value_heads / self.sizes.key_heads);
        let head = Head { rule: self, n, h, key_head, first, tokens, out_token: self.seqs.out_token(n), out };
        S::in_f32(state, |state| match tokens >= TRANSPOSE_FROM {
            true => head.passes(state),
            false => head.steps(state),
        });
    }

    fn zero(&self, n: usize, h: usize, out: &Shared<'_, T>) {
        let Dims { value_heads, value_dim, .. } = self.sizes;
        let first = self.seqs.out_token(n);
        for t in first..first + self.seqs.range(n).1 {
            // SAFETY: a token's head belongs to one task.
            unsafe { out.part((t * value_heads + h) * value_dim, value_dim) }.fill(T::ZERO);
        }
    }
}

/// One value head of one sequence.
struct Head<'a, 'b, T> {
    rule: &'a Rule<'b, T>,
    n: usize,
    h: usize,
    key_head: usize,
    /// Where the sequence begins, in the inputs and in the output.
    first: usize,
    out_token: usize,
    tokens: usize,
    out: &'a Shared<'a, T>,
}

impl<T: Element> Head<'_, '_, T> {
    /// Token `i` of the sequence: q and k as the rule wants them, and v.
    fn load(&self, i: usize, q: &mut [f32], k: &mut [f32], v: &mut [f32]) {
        let (rule, t) = (self.rule, self.first + i);
        let key = |heads: &Heads<'_, T>, dst, scale| {
            rule.load_key(heads.row(self.n, t, self.key_head, rule.sizes.key_dim), dst, scale);
        };
        key(&rule.q, q, rule.scale);
        key(&rule.k, k, 1.0);
        v.iter_mut().zip(rule.v.row(self.n, t, self.h, rule.sizes.value_dim)).for_each(|(v, x)| *v = x.to_f32());
    }

    /// Prefetches the rows of the next tokens. Those of one head lie a whole token apart, each on pages of its own, where no
    /// hardware prefetches.
    fn prefetch(&self, tokens: std::ops::Range<usize>) {
        let Dims { key_dim, value_dim, .. } = self.rule.sizes;
        for i in tokens.start..tokens.end.min(self.tokens) {
            let t = self.first + i;
            prefetch(self.rule.q.row(self.n, t, self.key_head, key_dim));
            prefetch(self.rule.k.row(self.n, t, self.key_head, key_dim));
            prefetch(self.rule.v.row(self.n, t, self.h, value_dim));
        }
    }

    /// Log decay and beta of token `i`.
    fn gate(&self, i: usize) -> (f32, f32) {
        self.rule.gates[(self.out_token + i) * self.rule.sizes.value_heads + self.h]
    }

    fn store(&self, i: usize, o: &[f32]) {
        let Dims { value_heads, value_dim, .. } = self.rule.sizes;
        // SAFETY: a token's head belongs to one task.
        let dst = unsafe { self.out.part(((self.out_token + i) * value_heads + self.h) * value_dim, value_dim) };
        dst.iter_mut().zip(o).for_each(|(dst, &o)| *dst = T::from_f32(o));
    }

    /// Token by token over the state as it lies.
    fn steps(&self, state: &mut [f32]) {
        let Dims { key_dim, value_dim, .. } = self.rule.sizes;
        let mut rows = vec![0.0; 2 * key_dim + value_dim];
        let (q, rest) = rows.split_at_mut(key_dim);
        let (k, v) = rest.split_at_mut(key_dim);
        for i in 0..self.tokens {
            self.load(i, q, k, v);
            let (log_decay, beta) = self.gate(i);
            dispatch(Step { q, k, v_to_o: v, log_decay, beta, state });
            self.store(i, v);
        }
    }

    /// A few tokens at a time over a transposed state.
    fn passes(&self, state: &mut [f32]) {
        let Dims { key_dim, value_dim, .. } = self.rule.sizes;
        let row = padded(value_dim);
        let mut transposed = TransposedState::new(state, key_dim, value_dim);
        let (mut q, mut k) = (vec![0.0; AT_ONCE * key_dim], vec![0.0; AT_ONCE * key_dim]);
        let mut v = vec![0.0; AT_ONCE * row];
        let mut i = 0;
        while i < self.tokens {
            let count = if self.tokens - i >= AT_ONCE { AT_ONCE } else { 1 };
            for j in 0..count {
                let keys = j * key_dim..(j + 1) * key_dim;
                self.load(i + j, &mut q[keys.clone()], &mut k[keys], &mut v[j * row..][..value_dim]);
            }
            self.prefetch(i + count..i + count + AT_ONCE);
            if count == AT_ONCE {
                transposed.advance::<AT_ONCE>(&q, &k, &mut v, std::array::from_fn(|j| self.gate(i + j)));
            } else {
                transposed.advance::<1>(&q, &k, &mut v, [self.gate(i)]);
            }
            for j in 0..count {
                self.store(i + j, &v[j * row..][..value_dim]);
            }
            i += count;
        }
        transposed.store(state);
    }
}

/// A query or key row in f32, normalised where the rule says so, times `scale`.
struct LoadKey<'a, 'b, T> {
    row: &'a [T],
    dst: &'a mut [f32],
    rule: &'a Rule<'b, T>,
    scale: f64,
}

impl<T: Element> WithSimd for LoadKey<'_, '_, T> {
    type Output = f64;

    #[inline(always)]
    fn with_simd<S: Simd>(self, _simd: S) -> f64 {
        let mut factor = self.scale;
        if self.rule.l2norm {
            // In f64, rounded once an element: a factor in f32 would make every key of a head too long or too short by
            // the same bit, and with repeated keys and beta near 2 that bias adds up token by token.
            factor /= (sum_of_squares(self.row) + self.rule.l2_eps).sqrt();
        }
        for (dst, x) in self.dst.iter_mut().zip(self.row) {
            *dst = (f64::from(x.to_f32()) * factor) as f32;
        }
        factor
    }
}

/// Eight partial sums, so that the loop vectorises.
#[inline(always)]
fn sum_of_squares<T: Element>(row: &[T]) -> f64 {
    let square = |x: &T| f64::from(x.to_f32()) * f64::from(x.to_f32());
    let mut sums = [0f64; 8];
    let (blocks, tail) = row.as_chunks::<8>();
    for block in blocks {
        sums.iter_mut().zip(block).for_each(|(s, x)| *s += square(x));
    }
    sums.iter().sum::<f64>() + tail.iter().map(square).sum::<f64>()
}
