//! The gated delta rule over a state that is only read and a ring of the tokens since it was last written. With entries
//! 1 .. P (key k_j, update e_j, log decay g_j) behind the state S0, a token (k, q, v, g, beta) does
//!
//! ```text
//! left_j = exp(g_(j + 1) + .. + g_P + g),  left_0 = exp(g_1 + .. + g_P + g)
//! S k = left_0 S0 k + sum_j left_j e_j (k_j . k),  S q alike
//! e   = |k|^-1 beta (v - |k|^-1 S k),  o = |q|^-1 scale (S q + e (k . q))
//! ```
//!
//! and appends (k, e, g). A fold is `S0 <- left_0 S0 + sum_j left_j e_j k_j^T`. Keys are kept as they came: their norm is in the
//! update. Decays are kept token by token, so that what is left of an entry is a sum of the decays behind it alone.

use super::element::{Element, Stored};
use super::simd::{axpy, dispatch, dot, dot2_x4, scale_add};
use super::view::{parallel, Heads, Sequences, Shared, Slots};
use crate::reference::Dims;
use pulp::{Simd, WithSimd};

/// Where a ring begins, and how many entries it has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cursor {
    pub first: usize,
    pub length: usize,
}

impl Cursor {
    pub fn from_bits(bits: u32) -> Self {
        Self { first: (bits >> 16) as usize, length: (bits & 0xffff) as usize }
    }

    pub fn to_bits(self) -> u32 {
        (self.first as u32) << 16 | self.length as u32
    }

    /// The row of entry `j`, where there are `rows`.
    pub fn row(self, j: usize, rows: usize) -> usize {
        (self.first + j) % rows
    }

    /// The row `back` before that of the next entry, further back than the first too.
    pub fn row_before(self, back: usize, rows: usize) -> usize {
        (self.first + self.length + rows - back) % rows
    }

    /// Whether a call with so many tokens folds the ring first; `moved` where the state goes to another slot.
    pub fn folds(self, tokens: usize, window: usize, fold: bool, moved: bool) -> bool {
        moved || (self.length > 0 && (fold || self.length + tokens > window))
    }

    /// The cursor behind a call with so many tokens, of which `kept` stay.
    pub fn after(self, tokens: usize, kept: usize, (rows, window): (usize, usize), fold: bool, moved: bool) -> Self {
        match fold || moved || self.length + tokens > window {
            true => Self { first: self.row(self.length, rows), length: kept },
            false => Self { length: self.length + kept, ..self },
        }
    }
}

/// The entries of all slots; slots lie one after the other.
pub struct Ring<'a, T> {
    /// `[slot, HK, rows, K]`
    pub keys: &'a mut [T],
    /// `[slot, HV, rows, V]`
    pub updates: &'a mut [f32],
    /// `[slot, HV, rows]`
    pub decays: &'a mut [f32],
    /// One a slot.
    pub cursors: &'a [u32],
    pub rows: usize,
    pub window: usize,
}

/// Everything but the output, the state and the ring.
pub struct Replay<'a, T> {
    pub dims: Dims,
    pub q: Heads<'a, T>,
    pub k: Heads<'a, T>,
    pub v: Heads<'a, T>,
    /// `[tokens, HV]` in the packed order of the output: log decay and beta.
    pub gates: &'a [(f32, f32)],
    pub seqs: Sequences<'a>,
    /// Of the state.
    pub slots: Slots<'a>,
    pub l2norm: bool,
    pub l2_eps: f64,
    pub scale: f64,
}

/// The state that is read, and where a folded one goes.
pub enum States<'a, S> {
    InPlace(&'a mut [S]),
    /// Every slot that is written is of the second.
    Apart(&'a [S], &'a mut [S]),
}

impl<T: Element> Replay<'_, T> {
    /// Writes o, contiguous `[tokens, HV, V]`, and appends to the ring; full rings are folded first.
    pub fn run<S: Stored>(&self, out: &mut [T], state: &mut [S], ring: Ring<'_, T>) {
        self.all(out, States::InPlace(state), ring, false);
    }

    /// Folds every ring of the sequences, which have no tokens.
    pub fn fold<S: Stored>(&self, states: States<'_, S>, ring: Ring<'_, T>) {
        self.all(&mut [], states, ring, true);
    }

    fn all<S: Stored>(&self, out: &mut [T], states: States<'_, S>, ring: Ring<'_, T>, fold: bool) {
        let Dims { value_heads, key_dim, value_dim, .. } = self.dims;
        let head_size = value_dim * key_dim;
        let tasks = self.seqs.count * value_heads;
        let work = head_size * (self.seqs.total_tokens().div_ceil(self.seqs.count.max(1))).max(1);
        let (apart, from, to) = match states {
            States::InPlace(state) => (None, None, Shared::new(state)),
            States::Apart(from, to) => (Some(()), Some(from), Shared::new(to)),
        };
        let all = All {
            replay: self,
            out: Shared::new(out),
            from,
            to,
            keys: Shared::new(ring.keys),
            updates: Shared::new(ring.updates),
            decays: Shared::new(ring.decays),
            cursors: ring.cursors,
            rows: ring.rows,
            window: ring.window,
            fold,
            apart: apart.is_some(),
        };
        parallel(tasks, work, |task| {
            let (n, h) = (task / value_heads, task % value_heads);
            match self.slots.numbers(n) {
                Some(slots) => all.head(n, h, slots),
                None => all.zero(n, h),
            }
        });
    }
}

/// What all tasks share.
struct All<'a, 'b, T, S> {
    replay: &'a Replay<'b, T>,
    out: Shared<'a, T>,
    /// The states that are read, where they are not those that are written.
    from: Option<&'a [S]>,
    to: Shared<'a, S>,
    keys: Shared<'a, T>,
    updates: Shared<'a, f32>,
    decays: Shared<'a, f32>,
    cursors: &'a [u32],
    rows: usize,
    window: usize,
    fold: bool,
    apart: bool,
}

/// What a head has of its ring, in f32.
#[derive(Default)]
struct Entries {
    /// `[P, K]` as they came.
    keys: Vec<f32>,
    /// `[P, V]`
    updates: Vec<f32>,
    /// What is left of each.
    left: Vec<f32>,
    /// And of the state.
    state_left: f32,
}

impl<T: Element, S: Stored> All<'_, '_, T, S> {
    fn head(&self, n: usize, h: usize, (read, write): (usize, usize)) {
        let Dims { key_heads, value_heads, key_dim, value_dim } = self.replay.dims;
        let (first, tokens) = self.replay.seqs.range(n);
        let cursor = Cursor::from_bits(self.cursors[read]);
        let moved = self.apart || read != write;
        let folds = cursor.folds(tokens, self.window, self.fold, moved);
        if tokens == 0 && !folds {
            return;
        }
        let key_head = h / (value_heads / key_heads);
        let mut entries = self.entries(cursor, h, key_head, read);
        let size = key_dim * value_dim;
        let at = |slot: usize| slot * self.replay.slots.stride + h * size;
        if tokens > 0 {
            // SAFETY: a head that is read is written, if at all, by this task, and only further down.
            let state = match self.from {
                Some(from) => &from[at(read)..][..size],
                None => unsafe { self.to.view(at(read), size) },
            };
            S::with_f32(state, |state| {
                let mut head = Head { all: self, n, h, key_head, write, cursor, state, entries: &mut entries };
                for i in 0..tokens {
                    head.token(first + i, self.replay.seqs.out_token(n) + i, i);
                }
            });
        }
        if folds {
            // SAFETY: the slots written are distinct and no other sequence reads them, so that each task owns its head of the
            // one it writes.
            let state = unsafe {
                match self.from {
                    Some(from) => {
                        let to = self.to.part(at(write), size);
                        to.copy_from_slice(&from[at(read)..][..size]);
                        to
                    }
                    None => self.to.part_from(at(read), at(write), size),
                }
            };
            // Of the entries as they were before the call.
            let old = self.entries(cursor, h, key_head, read);
            S::in_f32(state, |state| dispatch(Fold { state, entries: &old, key_dim }));
        }
    }

    /// The ring's entries before the call.
    fn entries(&self, cursor: Cursor, h: usize, key_head: usize, slot: usize) -> Entries {
        let Dims { key_heads, value_heads, key_dim, value_dim } = self.replay.dims;
        let mut entries = Entries { left: vec![1.0; cursor.length], state_left: 1.0, ..Entries::default() };
        let mut sum = 0.0;
        for j in (0..cursor.length).rev() {
            entries.left[j] = f32::exp(sum);
            // SAFETY: rows of entries are written by no task of this call.
            sum += unsafe { self.decays.view((slot * value_heads + h) * self.rows + cursor.row(j, self.rows), 1) }[0];
        }
        entries.state_left = sum.exp();
        for j in 0..cursor.length {
            let row = cursor.row(j, self.rows);
            let (key, update) = ((slot * key_heads + key_head) * self.rows, (slot * value_heads + h) * self.rows);
            // SAFETY: as above.
            let (key, update) = unsafe {
                (
                    self.keys.view((key + row) * key_dim, key_dim),
                    self.updates.view((update + row) * value_dim, value_dim),
                )
            };
            entries.keys.extend(key.iter().map(|x| x.to_f32()));
            entries.updates.extend_from_slice(update);
        }
        entries
    }

    fn zero(&self, n: usize, h: usize) {
        let Dims { value_heads, value_dim, .. } = self.replay.dims;
        let first = self.replay.seqs.out_token(n);
        for t in first..first + self.replay.seqs.range(n).1 {
            // SAFETY: a token's head belongs to one task.
            unsafe { self.out.part((t * value_heads + h) * value_dim, value_dim) }.fill(T::ZERO);
        }
    }
}

/// One value head of one sequence.
struct Head<'a, 'b, 'c, T, S> {
    all: &'a All<'a, 'b, T, S>,
    n: usize,
    h: usize,
    key_head: usize,
    /// The slot whose ring is appended to.
    write: usize,
    cursor: Cursor,
    state: &'a [f32],
    /// Grows by every token.
    entries: &'c mut Entries,
}

impl<T: Element, S: Stored> Head<'_, '_, '_, T, S> {
    /// Token number `i` of the call, `t` of the inputs and `out_token` of the output.
    fn token(&mut self, t: usize, out_token: usize, i: usize) {
        let (all, replay) = (self.all, self.all.replay);
        let Dims { key_heads, value_heads, key_dim, value_dim } = replay.dims;
        let wide = |row: &[T]| row.iter().map(|x| x.to_f32()).collect::<Vec<f32>>();
        let raw_key = replay.k.row(self.n, t, self.key_head, key_dim);
        let (q, k) = (wide(replay.q.row(self.n, t, self.key_head, key_dim)), wide(raw_key));
        let mut update = wide(replay.v.row(self.n, t, self.h, value_dim));
        let (log_decay, beta) = replay.gates[out_token * value_heads + self.h];
        let mut o = vec![0.0; value_dim];
        let factor = |x: &[f32]| match replay.l2norm {
            true => (x.iter().map(|x| f64::from(*x) * f64::from(*x)).sum::<f64>() + replay.l2_eps).sqrt().recip(),
            false => 1.0,
        };
        dispatch(Token {
            state: self.state,
            entries: self.entries,
            q: &q,
            k: &k,
            v_to_update: &mut update,
            o: &mut o,
            decay: log_decay.exp(),
            beta: f64::from(beta),
            k_factor: factor(&k),
            q_factor: factor(&q) * replay.scale,
        });
        let row = self.cursor.row(self.cursor.length + i, all.rows);
        let head = (self.write * value_heads + self.h) * all.rows + row;
        // SAFETY: a row behind the entries of a head is written by its task, that of a key by the first value head's.
        unsafe {
            all.updates.part(head * value_dim, value_dim).copy_from_slice(&update);
            all.decays.part(head, 1)[0] = log_decay;
            if self.h.is_multiple_of(value_heads / key_heads) {
                let key = (self.write * key_heads + self.key_head) * all.rows + row;
                all.keys.part(key * key_dim, key_dim).copy_from_slice(raw_key);
            }
        }
        // SAFETY: a token's head belongs to one task.
        let to = unsafe { all.out.part((out_token * value_heads + self.h) * value_dim, value_dim) };
        to.iter_mut().zip(&o).for_each(|(to, &o)| *to = T::from_f32(o));
        self.entries.keys.extend(k);
        self.entries.updates.extend(update);
    }
}

/// One token: `v` becomes the update, and the entries decay.
struct Token<'a> {
    state: &'a [f32],
    entries: &'a mut Entries,
    q: &'a [f32],
    k: &'a [f32],
    v_to_update: &'a mut [f32],
    o: &'a mut [f32],
    decay: f32,
    beta: f64,
    k_factor: f64,
    q_factor: f64,
}

impl WithSimd for Token<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Token { state, entries, q, k, v_to_update, o, decay, beta, k_factor, q_factor } = self;
        let (dim, kq) = (k.len(), dot(simd, k, q));
        entries.state_left *= decay;
        let left = entries.state_left;
        let mut sk = vec![0.0; o.len()];
        let mut groups = state.chunks_exact(4 * dim);
        let mut at = 0;
        for rows in groups.by_ref() {
            let (r01, r23) = rows.split_at(2 * dim);
            let ((r0, r1), (r2, r3)) = (r01.split_at(dim), r23.split_at(dim));
            for (k, q) in dot2_x4(simd, [r0, r1, r2, r3], k, q) {
                (sk[at], o[at]) = (left * k, left * q);
                at += 1;
            }
        }
        for row in groups.remainder().chunks_exact(dim) {
            (sk[at], o[at]) = (left * dot(simd, row, k), left * dot(simd, row, q));
            at += 1;
        }
        let Entries { keys, updates, left, .. } = entries;
        for ((key, update), left) in keys.chunks_exact(dim).zip(updates.chunks_exact(o.len())).zip(left.iter_mut()) {
            *left *= decay;
            axpy(simd, &mut sk, *left * dot(simd, key, k), update);
            axpy(simd, o, *left * dot(simd, key, q), update);
        }
        left.push(1.0);
        // In f64, rounded once: with repeated keys and beta near 2 a factor in f32 would add up token by token.
        for ((v, sk), o) in v_to_update.iter_mut().zip(&sk).zip(o) {
            *v = (k_factor * (beta * (f64::from(*v) - k_factor * f64::from(*sk)))) as f32;
            *o = (q_factor * (f64::from(*o) + f64::from(*v) * f64::from(kq))) as f32;
        }
    }
}

/// Entries into the state.
struct Fold<'a> {
    state: &'a mut [f32],
    entries: &'a Entries,
    key_dim: usize,
}

impl WithSimd for Fold<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Fold { state, entries, key_dim } = self;
        let value_dim = state.len() / key_dim;
        for (v, row) in state.chunks_exact_mut(key_dim).enumerate() {
            let mut scale = entries.state_left;
            for (j, key) in entries.keys.chunks_exact(key_dim).enumerate() {
                scale_add(simd, row, scale, entries.left[j] * entries.updates[j * value_dim + v], key);
                scale = 1.0;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cursors_go_round() {
        let cursor = Cursor { first: 30, length: 4 };
        assert_eq!(Cursor::from_bits(cursor.to_bits()), cursor);
        assert_eq!(
            (cursor.row(1, 32), cursor.row(2, 32), cursor.row_before(1, 32), cursor.row_before(3, 32)),
            (31, 0, 1, 31)
        );
        assert!(
            !cursor.folds(12, 16, false, false)
                && cursor.folds(13, 16, false, false)
                && cursor.folds(0, 16, true, false)
        );
        assert!(!Cursor { first: 3, length: 0 }.folds(16, 16, true, false));
        let after = |tokens, kept, fold| cursor.after(tokens, kept, (32, 16), fold, false);
        assert_eq!(after(12, 5, false), Cursor { first: 30, length: 9 });
        assert_eq!(after(13, 5, false), Cursor { first: 2, length: 5 });
        assert_eq!(after(0, 0, true), Cursor { first: 2, length: 0 });
    }
}
