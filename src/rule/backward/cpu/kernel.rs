//! The backward pass of the rule: one task per (sequence, value head), which walks the chunks of its sequence forward for the states
//! between them, and back for the gradients. The key heads' share of each value head is summed by a second loop.

use super::chunk::{Backward, Forward, Gradients, Kept};
use super::tokens::{Decays, Sizes, Tokens, CHUNK};
use crate::rule::cpu::kernel::Rule;
use candle_gdn_core::cpu::simd::dispatch;
use candle_gdn_core::cpu::{parallel, Element, Heads, Shared};
use pulp::{Simd, WithSimd};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Bytes of states that a task keeps at a time. A longer sequence is walked forward once more, for the states where its segments begin.
const KEPT_BYTES: usize = 16 << 20;

/// The call, with the gradients that come in.
pub struct RuleBackward<'a, T> {
    pub rule: Rule<'a, T>,
    pub d_o: Heads<'a, T>,
    /// `[sequences, HV, V, K]`; the initial state and the gradient of the final one, or zeros.
    pub state: Option<&'a [f32]>,
    pub d_last: Option<&'a [f32]>,
}

/// What is written: `[tokens, q|k|v channels]`, `[tokens, 2 HV]` and `[sequences, HV, V, K]`.
pub struct Output<'a, T> {
    pub qkv: &'a mut [T],
    pub gates: &'a mut [f32],
    pub state: &'a mut [f32],
}

/// The same, of which each task writes its own part, and the value heads' gradients of q and k, `[tokens, HV, K]`.
struct Parts<'a, 'b, T> {
    qkv: Shared<'a, T>,
    gates: Shared<'a, f32>,
    state: Shared<'a, f32>,
    q: Shared<'b, f32>,
    k: Shared<'b, f32>,
}

impl<T: Element> RuleBackward<'_, T> {
    pub fn run(&self, out: Output<'_, T>) {
        let sizes = self.rule.sizes;
        let (tokens, count) = (self.rule.seqs.total_tokens(), self.rule.seqs.count);
        let [mut q, mut k] = [(); 2].map(|()| vec![0f32; tokens * sizes.value_heads * sizes.key_dim]);
        let parts = &Parts {
            qkv: Shared::new(out.qkv),
            gates: Shared::new(out.gates),
            state: Shared::new(out.state),
            q: Shared::new(&mut q),
            k: Shared::new(&mut k),
        };
        let rooms = Mutex::default();
        let work = 4 * sizes.key_dim * sizes.value_dim * tokens.div_ceil(count.max(1));
        parallel(count * sizes.value_heads, work, |task| {
            Head::new(self, task / sizes.value_heads, task % sizes.value_heads).run(parts, &rooms);
        });
        let qkv = &parts.qkv;
        parallel(count * sizes.key_heads, sizes.key_dim * tokens, |task| {
            let (n, key_head) = (task / sizes.key_heads, task % sizes.key_heads);
            self.sum_group(n, key_head, [&q, &k], qkv);
        });
    }

    /// The gradients of q and k before their norm, summed over the value heads of a key head.
    fn sum_group(&self, n: usize, key_head: usize, [q, k]: [&[f32]; 2], qkv: &Shared<'_, T>) {
        let (rule, sizes) = (&self.rule, self.rule.sizes);
        let (group, dim) = (sizes.value_heads / sizes.key_heads, sizes.key_dim);
        let channels = 2 * sizes.key_heads * dim + sizes.value_heads * sizes.value_dim;
        let ((first, tokens), out_token) = (rule.seqs.range(n), rule.seqs.out_token(n));
        for t in 0..tokens {
            let heads = ((out_token + t) * sizes.value_heads + key_head * group) * dim;
            let range = heads..heads + group * dim;
            for (part, (rows, gradients, scale)) in
                [(&rule.q, q, rule.scale), (&rule.k, k, 1.0)].into_iter().enumerate()
            {
                let x = rows.row(n, first + t, key_head, dim);
                let start = (out_token + t) * channels + (part * sizes.key_heads + key_head) * dim;
                // SAFETY: a token's key head belongs to one task.
                let d_x = unsafe { qkv.part(start, dim) };
                dispatch(Unnormalise { rule, x, gradients: &gradients[range.clone()], scale, d_x });
            }
        }
    }
}

/// The gradient of a row of q or k from those of its normalised and scaled row in each value head.
struct Unnormalise<'a, 'b, T> {
    rule: &'a Rule<'b, T>,
    x: &'a [T],
    /// `[group, K]`
    gradients: &'a [f32],
    scale: f64,
    d_x: &'a mut [T],
}

impl<T: Element> WithSimd for Unnormalise<'_, '_, T> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _simd: S) {
        let Self { rule, x, gradients, scale, d_x } = self;
        let dim = x.len();
        let mut sums = [0f32; 256];
        let sums = &mut sums[..dim];
        for gradients in gradients.chunks_exact(dim) {
            sums.iter_mut().zip(gradients).for_each(|(sum, d)| *sum += d);
        }
        let (mut factor, mut along) = (scale, 0.0);
        if rule.l2norm {
            // Eight partial sums, so that the loop vectorises.
            let (mut squares, mut products) = ([0f64; 8], [0f64; 8]);
            let ((x, x_tail), (d, d_tail)) = (x.as_chunks::<8>(), sums.as_chunks::<8>());
            for (x, d) in x.iter().zip(d) {
                for i in 0..8 {
                    let x = f64::from(x[i].to_f32());
                    squares[i] += x * x;
                    products[i] += x * f64::from(d[i]);
                }
            }
            for (x, d) in x_tail.iter().zip(d_tail) {
                let x = f64::from(x.to_f32());
                squares[0] += x * x;
                products[0] += x * f64::from(*d);
            }
            let square = squares.iter().sum::<f64>() + rule.l2_eps;
            factor /= square.sqrt();
            along = products.iter().sum::<f64>() / square;
        }
        for ((d_x, x), d) in d_x.iter_mut().zip(x).zip(&*sums) {
            *d_x = T::from_f32((factor * (f64::from(*d) - f64::from(x.to_f32()) * along)) as f32);
        }
    }
}

/// One value head of one sequence.
struct Head<'a, 'b, T> {
    call: &'a RuleBackward<'b, T>,
    n: usize,
    h: usize,
    key_head: usize,
    /// Where the sequence begins, in the inputs and in the output.
    first: usize,
    out_token: usize,
    tokens: usize,
    sizes: Sizes,
}

impl<'a, 'b, T: Element> Head<'a, 'b, T> {
    fn new(call: &'a RuleBackward<'b, T>, n: usize, h: usize) -> Self {
        let (rule, dims) = (&call.rule, call.rule.sizes);
        let (first, tokens) = rule.seqs.range(n);
        Self {
            call,
            n,
            h,
            key_head: h / (dims.value_heads / dims.key_heads),
            first,
            out_token: rule.seqs.out_token(n),
            tokens,
            sizes: Sizes::new(dims.key_dim, dims.value_dim),
        }
    }

    /// This head's `[V, K]` of `[sequences, HV, V, K]`, with padded rows.
    fn padded(&self, states: Option<&[f32]>) -> Vec<f32> {
        let Sizes { key_dim, value_dim, keys, .. } = self.sizes;
        let mut padded = vec![0.0; self.sizes.state()];
        if let Some(states) = states {
            let head = &states[self.state_start()..][..value_dim * key_dim];
            let rows = padded.chunks_exact_mut(keys).zip(head.chunks_exact(key_dim));
            rows.for_each(|(padded, row)| padded[..key_dim].copy_from_slice(row));
        }
        padded
    }

    fn state_start(&self) -> usize {
        (self.n * self.call.rule.sizes.value_heads + self.h) * self.sizes.value_dim * self.sizes.key_dim
    }

    fn run(&self, parts: &Parts<'_, '_, T>, rooms: &Mutex<Vec<Room>>) {
        let Sizes { key_dim, value_dim, keys, values } = self.sizes;
        let mut d_state = self.padded(self.call.d_last);
        let chunks = self.tokens.div_ceil(CHUNK);
        if chunks > 0 {
            let per_segment = (KEPT_BYTES / (4 * self.sizes.state())).clamp(1, chunks);
            let mut room = lock(rooms).pop().unwrap_or_else(|| Room::new(self.sizes));
            room.reserve(per_segment);
            let Room { tokens, states, p, u, out } = &mut room;
            let begins = self.segments(chunks, per_segment, tokens);
            for (segment, begin) in begins.iter().enumerate().rev() {
                let range = segment * per_segment..chunks.min((segment + 1) * per_segment);
                let (size, rows) = (self.sizes.state(), CHUNK * values);
                states[..size].copy_from_slice(begin);
                for (i, chunk) in range.clone().enumerate() {
                    let (known, next) = states.split_at_mut((i + 1) * size);
                    let next = (chunk + 1 < range.end).then(|| &mut next[..size]);
                    let kept = Kept { p: &mut p[i * rows..][..rows], u: &mut u[i * rows..][..rows] };
                    self.load_keys(chunk, tokens);
                    dispatch(Forward { tokens, state: &known[i * size..], kept, next });
                }
                for (i, chunk) in range.enumerate().rev() {
                    self.load(chunk, tokens);
                    dispatch(Backward {
                        tokens,
                        state: &states[i * size..][..size],
                        p: &p[i * rows..][..rows],
                        u: &u[i * rows..][..rows],
                        d_state: &mut d_state,
                        out,
                    });
                    self.store(chunk, out, parts);
                }
            }
            lock(rooms).push(room);
        }
        // SAFETY: each task owns its head of the state.
        let state = unsafe { parts.state.part(self.state_start(), value_dim * key_dim) };
        let rows = state.chunks_exact_mut(key_dim).zip(d_state.chunks_exact(keys));
        rows.for_each(|(row, padded)| row.copy_from_slice(&padded[..key_dim]));
    }

    /// The states before the first chunk of each segment.
    fn segments(&self, chunks: usize, per_segment: usize, tokens: &mut Tokens) -> Vec<Vec<f32>> {
        let mut begins = vec![self.padded(self.call.state)];
        let [mut p, mut u] = [(); 2].map(|()| vec![0.0; CHUNK * self.sizes.values]);
        let mut next = vec![0.0; self.sizes.state()];
        while begins.len() * per_segment < chunks {
            let first = (begins.len() - 1) * per_segment;
            let mut state = begins[begins.len() - 1].clone();
            for chunk in first..first + per_segment {
                self.load_keys(chunk, tokens);
                let kept = Kept { p: &mut p, u: &mut u };
                dispatch(Forward { tokens, state: &state, kept, next: Some(&mut next) });
                std::mem::swap(&mut state, &mut next);
            }
            begins.push(state);
        }
        begins
    }

    /// The keys, values and gates of a chunk.
    #[allow(clippy::needless_range_loop)] // three arrays and a tensor
    fn load_keys(&self, chunk: usize, tokens: &mut Tokens) {
        let (rule, Sizes { key_dim, value_dim, keys, values }) = (&self.call.rule, self.sizes);
        let mut log_decays = [0.0; CHUNK];
        for i in 0..CHUNK {
            let t = chunk * CHUNK + i;
            let k = &mut tokens.qk[(CHUNK + i) * keys..][..key_dim];
            let v = &mut tokens.v[i * values..][..value_dim];
            if t < self.tokens {
                rule.load_key(rule.k.row(self.n, self.first + t, self.key_head, key_dim), k, 1.0);
                widen(rule.v.row(self.n, self.first + t, self.h, value_dim), v);
                let gate = (self.out_token + t) * rule.sizes.value_heads + self.h;
                (log_decays[i], tokens.beta[i]) = rule.gates[gate];
            } else {
                k.fill(0.0);
                v.fill(0.0);
                tokens.beta[i] = 0.0;
            }
        }
        tokens.decays = Decays::new(&log_decays);
    }

    /// The same with the queries and the gradient of o.
    fn load(&self, chunk: usize, tokens: &mut Tokens) {
        let (rule, Sizes { key_dim, value_dim, keys, values }) = (&self.call.rule, self.sizes);
        self.load_keys(chunk, tokens);
        for i in 0..CHUNK {
            let t = chunk * CHUNK + i;
            let q = &mut tokens.qk[i * keys..][..key_dim];
            let d_o = &mut tokens.d_op[i * values..][..value_dim];
            if t < self.tokens {
                rule.load_key(rule.q.row(self.n, self.first + t, self.key_head, key_dim), q, rule.scale);
                widen(self.call.d_o.row(self.n, self.first + t, self.h, value_dim), d_o);
            } else {
                q.fill(0.0);
                d_o.fill(0.0);
            }
        }
    }

    fn store(&self, chunk: usize, out: &Gradients, parts: &Parts<'_, '_, T>) {
        let (dims, Sizes { key_dim, value_dim, keys, values }) = (self.call.rule.sizes, self.sizes);
        let channels = 2 * dims.key_heads * key_dim + dims.value_heads * value_dim;
        for i in 0..CHUNK.min(self.tokens - chunk * CHUNK) {
            let token = self.out_token + chunk * CHUNK + i;
            let (head, v) = (token * dims.value_heads + self.h, channels - (dims.value_heads - self.h) * value_dim);
            // SAFETY: a token's value head belongs to one task.
            let (q, k, v, log_decay, beta) = unsafe {
                (
                    parts.q.part(head * key_dim, key_dim),
                    parts.k.part(head * key_dim, key_dim),
                    parts.qkv.part(token * channels + v, value_dim),
                    parts.gates.part(token * 2 * dims.value_heads + self.h, 1),
                    parts.gates.part((token * 2 + 1) * dims.value_heads + self.h, 1),
                )
            };
            q.copy_from_slice(&out.qk[i * keys..][..key_dim]);
            k.copy_from_slice(&out.qk[(CHUNK + i) * keys..][..key_dim]);
            v.iter_mut().zip(&out.v[i * values..]).for_each(|(v, x)| *v = T::from_f32(*x));
            (log_decay[0], beta[0]) = (out.log_decay[i], out.beta[i]);
        }
    }
}

/// What a task works in, used again by the next one of its thread: new memory would have to be mapped each time. All is written
/// before it is read.
struct Room {
    tokens: Tokens,
    states: Vec<f32>,
    p: Vec<f32>,
    u: Vec<f32>,
    out: Gradients,
}

impl Room {
    fn new(sizes: Sizes) -> Self {
        let [states, p, u] = [(); 3].map(|()| vec![]);
        Self { tokens: Tokens::new(sizes), states, p, u, out: Gradients::new(sizes) }
    }

    /// For so many chunks.
    fn reserve(&mut self, chunks: usize) {
        let sizes = self.tokens.sizes;
        for (data, len) in [
            (&mut self.states, sizes.state()),
            (&mut self.p, CHUNK * sizes.values),
            (&mut self.u, CHUNK * sizes.values),
        ] {
            data.resize(data.len().max(chunks * len), 0.0);
        }
    }
}

fn lock(rooms: &Mutex<Vec<Room>>) -> MutexGuard<'_, Vec<Room>> {
    rooms.lock().unwrap_or_else(PoisonError::into_inner)
}

fn widen<T: Element>(src: &[T], dst: &mut [f32]) {
    dst.iter_mut().zip(src).for_each(|(dst, x)| *dst = x.to_f32());
}
