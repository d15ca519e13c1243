//! The backward pass of the rule: one task per (sequence, key head), which walks the chunks of its sequence forward for the states
//! between them, and back for the gradients, all value heads of the key head at each chunk. They share what is made of its queries and keys,
//! and their gradients of these are summed in their order.

use super::chunk::{Backward, Forward, Gradients};
use super::tokens::{Decays, Prepare, Sizes, Tokens, CHUNK};
use crate::rule::cpu::kernel::Rule;
use candle_gdn_core::cpu::simd::{dispatch, dot};
use candle_gdn_core::cpu::{parallel, prefetch, Element, Heads, Pages, Shared};
use pulp::{Simd, WithSimd};
use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Bytes of states that a task keeps at a time. A longer sequence is walked forward once more, for the states where its segments begin.
const KEPT_BYTES: usize = 16 << 20;

/// The call, with the gradients that come in.
pub struct RuleBackward<'a, T> {
    pub rule: Rule<'a, T>,
    pub d_o: Heads<'a, T>,
    /// `[sequences, HV, V, K]`: the initial state, and the gradient of the final one. `None` is zeros.
    pub state: Option<&'a [f32]>,
    pub d_last: Option<&'a [f32]>,
}

/// What is written: `[tokens, q|k|v channels]`, `[tokens, 2 HV]`, and where there is an initial state, `[sequences, HV, V, K]`.
pub struct Output<'a, T> {
    pub qkv: &'a mut [T],
    pub gates: &'a mut [f32],
    pub state: &'a mut [f32],
}

/// The same, of which each task writes its own part.
struct Parts<'a, T> {
    qkv: Shared<'a, T>,
    gates: Shared<'a, f32>,
    state: Shared<'a, f32>,
}

impl<T: Element> RuleBackward<'_, T> {
    pub fn run(&self, out: Output<'_, T>) {
        let sizes = self.rule.sizes;
        let (tokens, count) = (self.rule.seqs.total_tokens(), self.rule.seqs.count);
        let longest = (0..count).map(|n| self.rule.seqs.range(n).1).max().unwrap_or(0);
        let heads = sizes.value_heads / sizes.key_heads;
        let state = Sizes::new(sizes.key_dim, sizes.value_dim).state();
        let per_segment = (KEPT_BYTES / (4 * heads * state)).clamp(1, longest.div_ceil(CHUNK).max(1));
        let parts = Parts { qkv: Shared::new(out.qkv), gates: Shared::new(out.gates), state: Shared::new(out.state) };
        let rooms = Mutex::default();
        let work = 4 * sizes.key_dim * sizes.value_dim * tokens.div_ceil(count.max(1));
        parallel(count * sizes.key_heads, work, |task| {
            Group::new(self, task / sizes.key_heads, task % sizes.key_heads).run(per_segment, &parts, &rooms);
        });
    }
}

/// The gradient of a row of q or k from that of the same row normalised and scaled.
struct Unnormalise<'a, T> {
    unit: &'a [f32],
    d_unit: &'a [f32],
    /// By what the row was multiplied.
    factor: f32,
    /// Of the gradient along the row, the part that the norm takes away, times the square of the scale.
    along: f32,
    d_x: &'a mut [T],
}

impl<T: Element> WithSimd for Unnormalise<'_, T> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self { unit, d_unit, factor, along, d_x } = self;
        let along = along * dot(simd, unit, d_unit);
        for ((d_x, x), d) in d_x.iter_mut().zip(unit).zip(d_unit) {
            *d_x = T::from_f32(factor * (d - x * along));
        }
    }
}

/// The value heads of one key head of one sequence.
struct Group<'a, 'b, T> {
    call: &'a RuleBackward<'b, T>,
    n: usize,
    key_head: usize,
    /// How many value heads.
    heads: usize,
    /// Where the sequence begins, in the inputs and in the output.
    first: usize,
    out_token: usize,
    tokens: usize,
    sizes: Sizes,
}

impl<'a, 'b, T: Element> Group<'a, 'b, T> {
    fn new(call: &'a RuleBackward<'b, T>, n: usize, key_head: usize) -> Self {
        let (rule, dims) = (&call.rule, call.rule.sizes);
        let (first, tokens) = rule.seqs.range(n);
        Self {
            call,
            n,
            key_head,
            heads: dims.value_heads / dims.key_heads,
            first,
            out_token: rule.seqs.out_token(n),
            tokens,
            sizes: Sizes::new(dims.key_dim, dims.value_dim),
        }
    }

    /// Whether the state before a chunk is anything but zeros that nobody wants the gradient of.
    fn has_state(&self, chunk: usize) -> bool {
        chunk > 0 || self.call.state.is_some()
    }

    /// The number of value head `g` of the group.
    fn head(&self, g: usize) -> usize {
        self.key_head * self.heads + g
    }

    /// The heads' `[V, K]` of `[sequences, HV, V, K]`, with padded rows.
    fn padded(&self, states: &[f32]) -> Vec<f32> {
        let Sizes { key_dim, keys, .. } = self.sizes;
        let mut padded = vec![0.0; self.heads * self.sizes.state()];
        let rows = padded.chunks_exact_mut(keys).zip(states[self.states()].chunks_exact(key_dim));
        rows.for_each(|(padded, row)| padded[..key_dim].copy_from_slice(row));
        padded
    }

    /// Where the heads lie in `[sequences, HV, V, K]`.
    fn states(&self) -> Range<usize> {
        let size = self.sizes.value_dim * self.sizes.key_dim;
        let start = (self.n * self.call.rule.sizes.value_heads + self.head(0)) * size;
        start..start + self.heads * size
    }

    fn run(&self, per_segment: usize, parts: &Parts<'_, T>, rooms: &Mutex<Vec<Room>>) {
        let Sizes { key_dim, keys, .. } = self.sizes;
        let zeros = || vec![0.0; self.heads * self.sizes.state()];
        let mut d_states = self.call.d_last.map_or_else(zeros, |d_last| self.padded(d_last));
        let chunks = self.tokens.div_ceil(CHUNK);
        if chunks > 0 {
            let room = lock(rooms).pop();
            let mut room = room.unwrap_or_else(|| Room::new(self.sizes, per_segment * self.heads));
            let begins = self.segments(chunks, per_segment, &mut room);
            for (segment, begin) in begins.iter().enumerate().rev() {
                let range = segment * per_segment..chunks.min((segment + 1) * per_segment);
                room.states[..begin.len()].copy_from_slice(begin);
                self.forward(range.clone(), &mut room);
                for (i, chunk) in range.enumerate().rev() {
                    self.backward(chunk, i, &mut d_states, &mut room, parts);
                }
            }
            lock(rooms).push(room);
        }
        if self.call.state.is_none() {
            return;
        }
        let states = self.states();
        // SAFETY: each task owns its heads of the state.
        let out = unsafe { parts.state.part(states.start, states.len()) };
        let rows = out.chunks_exact_mut(key_dim).zip(d_states.chunks_exact(keys));
        rows.for_each(|(row, padded)| row.copy_from_slice(&padded[..key_dim]));
    }

    /// Walks the chunks from the states in the first place of the room, and keeps what their backward passes need.
    fn forward(&self, chunks: Range<usize>, room: &mut Room) {
        let (size, rows) = (self.sizes.state(), CHUNK * self.sizes.values);
        for (i, chunk) in chunks.clone().enumerate() {
            self.load_keys((chunk, Some(chunk + 1)), false, &mut room.tokens);
            for g in 0..self.heads {
                self.load_values((chunk, Some(chunk + 1)), g, &mut room.tokens);
                let (at, next) = (i * self.heads + g, (i + 1) * self.heads + g);
                let end = (next * size).min(room.states.len()); // there is none after the last
                let (known, later) = room.states.split_at_mut(end);
                let (next, ahead) = later.split_at_mut(size.min(later.len()));
                dispatch(Forward {
                    tokens: &mut room.tokens,
                    state: self.has_state(chunk).then(|| &known[at * size..][..size]),
                    u: &mut room.u[at * rows..][..rows],
                    next: (chunk + 1 < chunks.end).then_some(next),
                    ahead: &ahead[..size.min(ahead.len())],
                });
            }
        }
    }

    /// The gradients of a chunk, place `i` in the room.
    fn backward(&self, chunk: usize, i: usize, d_states: &mut [f32], room: &mut Room, parts: &Parts<'_, T>) {
        let (size, rows) = (self.sizes.state(), CHUNK * self.sizes.values);
        let Room { tokens, states, u, out } = room;
        let chunks = (chunk, chunk.checked_sub(1));
        let later = (chunk + 1) * CHUNK < self.tokens || self.call.d_last.is_some();
        self.load_keys(chunks, true, tokens);
        out.qk.fill(0.0);
        for (g, d_state) in d_states.chunks_exact_mut(size).enumerate() {
            self.load_values(chunks, g, tokens);
            self.load_d_o(chunks, g, tokens);
            let at = i * self.heads + g;
            let state = self.has_state(chunk).then(|| &states[at * size..][..size]);
            // The next call is that of the next head, or of the first one at the chunk before.
            let next = if g + 1 < self.heads { Some(at + 1) } else { (i * self.heads).checked_sub(self.heads) };
            let ahead = next.map_or([&[][..]; 2], |at| [&states[at * size..][..size], &u[at * rows..][..rows]]);
            let u = &u[at * rows..][..rows];
            self.prefetch_results(chunk, g, parts);
            dispatch(Backward { tokens, state, u, d_state, later, ahead, out });
            self.store_values(chunk, g, out, parts);
        }
        self.store_keys(chunk, tokens, &out.qk, parts);
    }

    /// The states before the first chunk of each segment; of the first one nothing, where these are zeros.
    fn segments(&self, chunks: usize, per_segment: usize, room: &mut Room) -> Vec<Vec<f32>> {
        let mut begins = vec![self.call.state.map_or_else(Vec::new, |state| self.padded(state))];
        let (mut u, mut next) = (vec![0.0; CHUNK * self.sizes.values], vec![0.0; self.sizes.state()]);
        while begins.len() * per_segment < chunks {
            let first = (begins.len() - 1) * per_segment;
            let mut states = begins[begins.len() - 1].clone();
            states.resize(self.heads * next.len(), 0.0);
            for chunk in first..first + per_segment {
                self.load_keys((chunk, Some(chunk + 1)), false, &mut room.tokens);
                for (g, state) in states.chunks_exact_mut(next.len()).enumerate() {
                    self.load_values((chunk, Some(chunk + 1)), g, &mut room.tokens);
                    let known = self.has_state(chunk).then_some(&*state);
                    dispatch(Forward {
                        tokens: &mut room.tokens,
                        state: known,
                        u: &mut u,
                        next: Some(&mut next),
                        ahead: &[],
                    });
                    state.copy_from_slice(&next);
                }
            }
            begins.push(states);
        }
        begins
    }

    /// Whether row `i` of a chunk is a token, and which one of the sequence.
    fn token(&self, chunk: usize, i: usize) -> Option<usize> {
        Some(chunk * CHUNK + i).filter(|t| *t < self.tokens)
    }

    /// Prefetches a head's rows of a chunk. They lie a whole token apart, each on pages of its own, where no hardware prefetches.
    fn prefetch(&self, chunk: Option<usize>, heads: &Heads<'_, T>, (head, dim): (usize, usize)) {
        let tokens = chunk.into_iter().flat_map(|chunk| (0..CHUNK).filter_map(move |i| self.token(chunk, i)));
        tokens.for_each(|t| prefetch(heads.row(self.n, self.first + t, head, dim)));
    }

    /// The keys of a chunk (before another one, which is loaded next), and where they are wanted the queries, with what the value
    /// heads share of them.
    fn load_keys(&self, (chunk, next): (usize, Option<usize>), queries: bool, tokens: &mut Tokens) {
        let (rule, Sizes { key_dim, keys, .. }) = (&self.call.rule, self.sizes);
        for i in 0..CHUNK {
            let t = self.token(chunk, i);
            let mut load = |heads: &Heads<'_, T>, row: usize, scale: f64| {
                let dst = &mut tokens.qk[row * keys..][..key_dim];
                match t {
                    Some(t) => {
                        let x = heads.row(self.n, self.first + t, self.key_head, key_dim);
                        tokens.factors[row] = rule.load_key(x, dst, scale);
                    }
                    None => dst.fill(0.0),
                }
            };
            load(&rule.k, CHUNK + i, 1.0);
            if queries {
                load(&rule.q, i, rule.scale);
            }
        }
        self.prefetch(next, &rule.k, (self.key_head, key_dim));
        if queries {
            self.prefetch(next, &rule.q, (self.key_head, key_dim));
        }
        dispatch(Prepare { tokens, queries });
    }

    /// The values and gates of a value head.
    #[allow(clippy::needless_range_loop)] // three arrays and a tensor
    fn load_values(&self, (chunk, next): (usize, Option<usize>), g: usize, tokens: &mut Tokens) {
        let (rule, Sizes { value_dim, values, .. }) = (&self.call.rule, self.sizes);
        let mut log_decays = [0.0; CHUNK];
        for i in 0..CHUNK {
            let v = &mut tokens.v[i * values..][..value_dim];
            match self.token(chunk, i) {
                Some(t) => {
                    widen(rule.v.row(self.n, self.first + t, self.head(g), value_dim), v);
                    let gate = (self.out_token + t) * rule.sizes.value_heads + self.head(g);
                    (log_decays[i], tokens.beta[i]) = rule.gates[gate];
                }
                None => {
                    v.fill(0.0);
                    tokens.beta[i] = 0.0;
                }
            }
        }
        self.prefetch(next, &rule.v, (self.head(g), value_dim));
        tokens.decays = Decays::new(&log_decays);
    }

    /// The gradient of a value head's o.
    fn load_d_o(&self, (chunk, next): (usize, Option<usize>), g: usize, tokens: &mut Tokens) {
        let Sizes { value_dim, values, .. } = self.sizes;
        for (i, d_o) in tokens.d_ow[..CHUNK * values].chunks_exact_mut(values).enumerate() {
            let d_o = &mut d_o[..value_dim];
            match self.token(chunk, i) {
                Some(t) => widen(self.call.d_o.row(self.n, self.first + t, self.head(g), value_dim), d_o),
                None => d_o.fill(0.0),
            }
        }
        self.prefetch(next, &self.call.d_o, (self.head(g), value_dim));
    }

    /// Columns of qkv.
    fn channels(&self) -> usize {
        let dims = self.call.rule.sizes;
        2 * dims.key_heads * dims.key_dim + dims.value_heads * dims.value_dim
    }

    /// Prefetches where a value head's results go, and the last one's those of q and k.
    fn prefetch_results(&self, chunk: usize, g: usize, parts: &Parts<'_, T>) {
        let dims = self.call.rule.sizes;
        let keys = [self.key_head, dims.key_heads + self.key_head].map(|head| (head * dims.key_dim, dims.key_dim));
        let values = (2 * dims.key_heads * dims.key_dim + self.head(g) * dims.value_dim, dims.value_dim);
        let n = if g + 1 == self.heads { 3 } else { 1 };
        for t in (0..CHUNK).filter_map(|i| self.token(chunk, i)) {
            for (column, dim) in [values, keys[0], keys[1]].into_iter().take(n) {
                // SAFETY: a token's head belongs to one task.
                prefetch(unsafe { parts.qkv.part((self.out_token + t) * self.channels() + column, dim) });
            }
        }
    }

    fn store_values(&self, chunk: usize, g: usize, out: &Gradients, parts: &Parts<'_, T>) {
        let (dims, h, channels) = (self.call.rule.sizes, self.head(g), self.channels());
        let column = channels - (dims.value_heads - h) * dims.value_dim;
        for (i, t) in (0..CHUNK).filter_map(|i| Some((i, self.token(chunk, i)?))) {
            let token = self.out_token + t;
            // SAFETY: a token's value head belongs to one task.
            let (v, log_decay, beta) = unsafe {
                (
                    parts.qkv.part(token * channels + column, dims.value_dim),
                    parts.gates.part(token * 2 * dims.value_heads + h, 1),
                    parts.gates.part((token * 2 + 1) * dims.value_heads + h, 1),
                )
            };
            v.iter_mut().zip(&out.v[i * self.sizes.values..]).for_each(|(v, x)| *v = T::from_f32(*x));
            (log_decay[0], beta[0]) = (out.log_decay[i], out.beta[i]);
        }
    }

    /// The gradients of q and k before their norm.
    fn store_keys(&self, chunk: usize, tokens: &Tokens, d_qk: &[f32], parts: &Parts<'_, T>) {
        let (rule, Sizes { key_dim, keys, .. }) = (&self.call.rule, self.sizes);
        for (i, t) in (0..CHUNK).filter_map(|i| Some((i, self.token(chunk, i)?))) {
            for (part, scale) in [rule.scale, 1.0].into_iter().enumerate() {
                let column = (part * rule.sizes.key_heads + self.key_head) * key_dim;
                // SAFETY: a token's key head belongs to one task.
                let d_x = unsafe { parts.qkv.part((self.out_token + t) * self.channels() + column, key_dim) };
                let (row, at) = (part * CHUNK + i, (part * CHUNK + i) * keys);
                let (unit, d_unit) = (&tokens.qk[at..][..key_dim], &d_qk[at..][..key_dim]);
                // The square of a tiny scale has no reciprocal in f32. The gradient of q is as small as the scale there.
                let along = if rule.l2norm { (scale * scale).recip() as f32 } else { 0.0 };
                let along = if along.is_finite() { along } else { 0.0 };
                dispatch(Unnormalise { unit, d_unit, factor: tokens.factors[row] as f32, along, d_x });
            }
        }
    }
}

/// What a task works in, used again by the next one of its thread: new memory would have to be mapped each time. All is written
/// before it is read.
struct Room {
    tokens: Tokens,
    states: Pages<f32>,
    u: Pages<f32>,
    out: Gradients,
}

impl Room {
    /// For so many chunks of a head.
    fn new(sizes: Sizes, chunks: usize) -> Self {
        let [states, u] = [sizes.state(), CHUNK * sizes.values].map(|n| Pages::zeroed(chunks * n));
        Self { tokens: Tokens::new(sizes), states, u, out: Gradients::new(sizes) }
    }
}

fn lock(rooms: &Mutex<Vec<Room>>) -> MutexGuard<'_, Vec<Room>> {
    rooms.lock().unwrap_or_else(PoisonError::into_inner)
}

fn widen<T: Element>(src: &[T], dst: &mut [f32]) {
    dst.iter_mut().zip(src).for_each(|(dst, x)| *dst = x.to_f32());
}
