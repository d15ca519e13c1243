//! The gated delta rule over sequences and heads: one task per (sequence, value head), which walks its tokens one by
//! one or chunk by chunk.

use super::chunked::{Workspace, CHUNK};
use super::recurrent::Step;
use super::simd::dispatch;
use super::view::{parallel, Element, Heads, Sequences, Shared, Slots};
use crate::reference::Dims;
use pulp::{Simd, WithSimd};

/// Everything but the output and the state.
pub(crate) struct Rule<'a, T> {
    pub dims: Dims,
    pub q: Heads<'a, T>,
    pub k: Heads<'a, T>,
    pub v: Heads<'a, T>,
    /// `[tokens, HV]` in the packed order of the output: log decay and beta.
    pub gates: &'a [(f32, f32)],
    pub seqs: Sequences<'a>,
    pub slots: Slots<'a>,
    pub l2norm: bool,
    pub l2_eps: f64,
    pub scale: f64,
    /// Chunk by chunk instead of token by token.
    pub chunked: bool,
}

impl<T: Element> Rule<'_, T> {
    /// Writes o, contiguous `[tokens, HV, V]`, and advances `state`, `[slot, HV, V, K]` with contiguous slots.
    pub fn run(&self, out: &mut [T], state: &mut [f32]) {
        let Dims { value_heads, key_dim, value_dim, .. } = self.dims;
        let head_size = value_dim * key_dim;
        let tasks = self.seqs.count * value_heads;
        let work = head_size * (self.seqs.total_tokens().div_ceil(self.seqs.count.max(1)));
        let (out, state) = (Shared::new(out), Shared::new(state));
        parallel(tasks, work, |task| {
            let (n, h) = (task / value_heads, task % value_heads);
            match self.slots.offset(n) {
                // SAFETY: slots are distinct, so each task owns its head of its slot.
                Some(slot) => self.head(n, h, &out, unsafe { state.part(slot + h * head_size, head_size) }),
                None => self.zero(n, h, &out),
            }
        });
    }

    fn head(&self, n: usize, h: usize, out: &Shared<'_, T>, state: &mut [f32]) {
        let Dims { key_heads, value_heads, key_dim, value_dim } = self.dims;
        let (first, tokens) = self.seqs.range(n);
        let out_token = self.seqs.out_token(n);
        let key_head = h / (value_heads / key_heads);
        let load = |t: usize, q: &mut [f32], k: &mut [f32], v: &mut [f32]| {
            dispatch(LoadKey { row: self.q.row(n, t, key_head, key_dim), to: q, rule: self, scale: self.scale });
            dispatch(LoadKey { row: self.k.row(n, t, key_head, key_dim), to: k, rule: self, scale: 1.0 });
            v.iter_mut().zip(self.v.row(n, t, h, value_dim)).for_each(|(v, x)| *v = x.to_f32());
        };
        let store = |i: usize, o: &[f32]| {
            // SAFETY: a token's head belongs to one task.
            let to = unsafe { out.part(((out_token + i) * value_heads + h) * value_dim, value_dim) };
            to.iter_mut().zip(o).for_each(|(to, &o)| *to = T::from_f32(o));
        };

        if self.chunked {
            let mut ws = Workspace::new(key_dim, value_dim);
            for start in (0..tokens).step_by(CHUNK) {
                let count = CHUNK.min(tokens - start);
                ws.gates.clear();
                for i in 0..count {
                    let keys = i * key_dim..(i + 1) * key_dim;
                    let values = i * value_dim..(i + 1) * value_dim;
                    load(first + start + i, &mut ws.q[keys.clone()], &mut ws.k[keys], &mut ws.v[values]);
                    ws.gates.push(self.gates[(out_token + start + i) * value_heads + h]);
                }
                ws.advance(key_dim, value_dim, state);
                for i in 0..count {
                    store(start + i, &ws.o[i * value_dim..][..value_dim]);
                }
            }
        } else {
            let mut row = vec![0.0; 2 * key_dim + value_dim];
            let (q, rest) = row.split_at_mut(key_dim);
            let (k, v) = rest.split_at_mut(key_dim);
            for i in 0..tokens {
                load(first + i, q, k, v);
                let (log_decay, beta) = self.gates[(out_token + i) * value_heads + h];
                dispatch(Step { q, k, v_to_o: v, log_decay, beta, state });
                store(i, v);
            }
        }
    }

    fn zero(&self, n: usize, h: usize, out: &Shared<'_, T>) {
        let Dims { value_heads, value_dim, .. } = self.dims;
        let first = self.seqs.out_token(n);
        for t in first..first + self.seqs.range(n).1 {
            // SAFETY: a token's head belongs to one task.
            unsafe { out.part((t * value_heads + h) * value_dim, value_dim) }.fill(T::ZERO);
        }
    }
}

/// A query or key row in f32, normalised where the rule says so, times `scale`.
struct LoadKey<'a, 'b, T> {
    row: &'a [T],
    to: &'a mut [f32],
    rule: &'a Rule<'b, T>,
    scale: f64,
}

impl<T: Element> WithSimd for LoadKey<'_, '_, T> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _simd: S) {
        let mut factor = self.scale;
        if self.rule.l2norm {
            // In f64, rounded once an element: a factor in f32 would make every key of a head too long or too short by
            // the same bit, and with repeated keys and beta near 2 that bias adds up token by token.
            factor /= (sum_of_squares(self.row) + self.rule.l2_eps).sqrt();
        }
        for (to, x) in self.to.iter_mut().zip(self.row) {
            *to = (f64::from(x.to_f32()) * factor) as f32;
        }
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
