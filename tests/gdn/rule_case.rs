//! One random case of the rule: its inputs in a chosen layout on a device, its result, and the reference's.

use crate::sixteen_bits;
use crate::slot_pool::SlotPool;
use crate::support::{has, on_tensor_cores, poison, rel_rms, rounded, to_device, values, Rng};
use candle_core::{DType, Device, Result, Tensor};
use candle_gdn::ops::{Gates, GdnDecode, GdnPrefill, RuleOptions};
use candle_gdn::reference::{gated_delta_rule, Constants, Dims, Inputs};
use candle_gdn::{Algo, CuSeqlens};

/// How the decay input is drawn.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Decay {
    /// Log decay of zero: the state never fades.
    None,
    Usual,
    /// Log decay down to about -30 a token.
    Strong,
    /// One token in eight forgets everything, the others hardly anything.
    Bursts,
    /// Inputs that overflow `exp`: the decay is total.
    Huge,
}

/// How q, k and v lie in memory.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Form {
    /// Tensors of their own.
    Dense,
    /// Views of one projection `[.., q | k | v | a | b]` with padding before and between, heads merged, and rows that
    /// belong to nobody around the tokens. What lies around is NaN.
    Projection,
}

#[derive(Debug, Clone)]
pub struct Case {
    pub dims: Dims,
    pub lengths: Vec<usize>,
    /// Packed with cu_seqlens; otherwise all lengths are the same.
    pub packed: bool,
    pub dtype: DType,
    pub gate_dtype: DType,
    /// f32 or bf16: how the state is stored. It is drawn so that either holds it.
    pub state_dtype: DType,
    pub form: Form,
    /// The states are slots of a larger pool, in a shuffled order; a pool view where false.
    pub slots: bool,
    /// With `slots`, every third sequence is padding, its inputs NaN.
    pub padding: bool,
    pub l2norm: bool,
    pub beta_scale: f64,
    /// Mean of b: large values make beta near its maximum.
    pub b_mean: f64,
    pub decay: Decay,
    pub repeat_keys: bool,
    pub norm: f64,
    pub algo: Algo,
    pub segments: usize,
    pub seed: u64,
}

impl Case {
    pub fn new(dims: Dims, lengths: &[usize]) -> Self {
        Self {
            dims,
            lengths: lengths.to_vec(),
            packed: true,
            dtype: DType::F32,
            gate_dtype: DType::F32,
            state_dtype: DType::F32,
            form: Form::Dense,
            slots: false,
            padding: false,
            l2norm: true,
            beta_scale: 1.0,
            b_mean: 0.0,
            decay: Decay::Usual,
            repeat_keys: false,
            norm: 1.0,
            algo: Algo::Auto,
            segments: 0,
            seed: 1,
        }
    }

    /// Most that o and the states may be off where `algo` ran: f32 1e-5 on all; with bf16 or f16 inputs the output's
    /// rounding (4e-3, 5e-4) and 1e-5 on the states; where tensor cores multiply in bf16 or f16 5e-3 on all, on inputs that
    /// are hard for 16 bits, or where products cancel, more ([`Self::check`]).
    fn bounds(&self, algo: Algo) -> [f64; 2] {
        match self.dtype {
            _ if on_tensor_cores(algo) => [5e-3, 5e-3],
            DType::BF16 => [4e-3, 1e-5],
            DType::F16 => [5e-4, 1e-5],
            _ => [1e-5, 1e-5],
        }
    }

    /// What operands of 16 bits cost on this input, as relative RMS errors of o and of the state.
    pub fn cost_of_sixteen_bits(&self) -> [f64; 2] {
        let drawn = Drawn::new(self).unwrap();
        let exact = drawn.reference(self, None);
        sixteen_bits::cost(|draw| drawn.reference(self, Some(draw)).errors(&exact))
    }

    /// What the last place of f32 operands is worth on this input, as relative RMS errors: hardly anything, but where a
    /// single product of q and k nearly cancels. q, k and v move by half a unit of it, up or down.
    fn cost_of_f32(&self, drawn: &Drawn) -> [f64; 2] {
        let mut rng = Rng::new(self.seed ^ 0xf32);
        let mut moved = drawn.clone();
        for x in moved.q.iter_mut().chain(&mut moved.k).chain(&mut moved.v) {
            *x *= 1.0 + 2f64.powi(-24) * if rng.uniform() < 0.5 { 1.0 } else { -1.0 };
        }
        moved.reference(self, None).errors(&drawn.reference(self, None))
    }

    /// Fails unless the errors are within the bounds. Passes with a message where the device lacks the kernel's
    /// instructions.
    pub fn check(&self, device: &Device) {
        if !has(device, self.algo) {
            return;
        }
        let drawn = Drawn::new(self).unwrap_or_else(|e| panic!("{e}\n{self:?}"));
        let (algo, got) = drawn.run(self, device).unwrap_or_else(|e| panic!("{e}\n{self:?}"));
        // A bf16 state starts exact and is rounded at the end, which takes o nothing and adds to an element of the state at
        // most half a unit of its last place, 2^-8 of it.
        let stored = if self.state_dtype == DType::BF16 { 2f64.powi(-8) } else { 0.0 };
        let (errors, bounds) = (got.errors(&drawn.reference(self, None)), self.bounds(algo));
        let mut costs = None;
        for (i, what) in ["o", "state"].iter().enumerate() {
            let (error, mut bound, stored) = (errors[i], bounds[i], if i == 0 { 0.0 } else { stored });
            if error > bound + stored {
                bound = match on_tensor_cores(algo) {
                    true => sixteen_bits::bound(bound, costs.get_or_insert_with(|| self.cost_of_sixteen_bits())[i]),
                    false => bound.max(F32_SUMS * costs.get_or_insert_with(|| self.cost_of_f32(&drawn))[i]).min(0.1),
                };
            }
            let case = || format!("bound {:e}, {algo:?} on {:?}: {self:?}", bound + stored, device.location());
            assert!(error <= bound + stored, "{what} off by {error:e}, {}", case());
        }
    }

    pub fn tokens(&self) -> usize {
        self.lengths.iter().sum()
    }

    fn options(&self) -> RuleOptions {
        let Self { l2norm, beta_scale, algo, segments, .. } = *self;
        RuleOptions::with(|o| {
            (o.l2norm, o.beta_scale, o.algo, o.segments) = (l2norm, beta_scale, algo, segments);
        })
    }

    /// Whether sequence `n` has no state.
    fn is_padding(&self, n: usize) -> bool {
        self.slots && self.padding && n % 3 == 1
    }

    /// First token and length of each sequence.
    fn ranges(&self) -> Vec<(usize, usize)> {
        let mut first = 0;
        let range = |&length: &usize| {
            first += length;
            (first - length, length)
        };
        self.lengths.iter().map(range).collect()
    }
}

/// A sum of f32 products may be off by so many times what rounding its operands does: partial
/// sums are that much larger than the root of the squares.
const F32_SUMS: f64 = 8.0;

/// o, and the new states by sequence (of padding as they were).
struct Results {
    o: Vec<f64>,
    state: Vec<f64>,
}

impl Results {
    /// Relative RMS errors of o and of the state.
    fn errors(&self, want: &Self) -> [f64; 2] {
        [rel_rms(&self.o, &want.o), rel_rms(&self.state, &want.state)]
    }
}

fn part(x: &[f64], start: usize, len: usize) -> &[f64] {
    &x[start..start + len]
}

/// The drawn inputs, packed, already rounded to the dtypes they travel in; those of padding are NaN.
#[derive(Clone)]
struct Drawn {
    q: Vec<f64>,
    k: Vec<f64>,
    v: Vec<f64>,
    a: Vec<f64>,
    b: Vec<f64>,
    a_log: Vec<f64>,
    dt_bias: Vec<f64>,
    state: Vec<f64>,
}

impl Drawn {
    fn new(case: &Case) -> Result<Self> {
        let Dims { key_heads, value_heads, key_dim, value_dim } = case.dims;
        let (tokens, rng) = (case.tokens(), &mut Rng::new(case.seed));
        let round = |x: Vec<f64>, dtype| -> Result<Vec<f64>> { Ok(rounded(&x, &[x.len()], dtype)?.1) };

        let key = |rng: &mut Rng| {
            let mut rows = rng.normals(tokens * key_heads * key_dim);
            for (t, row) in rows.chunks_exact_mut(key_dim).enumerate() {
                // Without the kernel's own norm, unit rows keep the recurrence bounded.
                let norm = row.iter().map(|x| x * x).sum::<f64>().sqrt();
                let size = if case.l2norm { case.norm * (1.0 + t as f64 % 3.0) } else { 1.0 };
                row.iter_mut().for_each(|x| *x *= size / norm);
            }
            rows
        };
        let (q, mut k) = (key(rng), key(rng));
        if case.repeat_keys && tokens > 0 {
            let (first, rest) = k.split_at_mut(key_heads * key_dim);
            rest.chunks_exact_mut(key_heads * key_dim).for_each(|row| row.copy_from_slice(first));
        }
        let a = (0..tokens * value_heads)
            .map(|i| match case.decay {
                Decay::None => -200.0,
                Decay::Usual => rng.normal(),
                Decay::Strong => 6.0 + 4.0 * rng.uniform(),
                Decay::Bursts if i / value_heads % 8 == 5 => 60.0,
                Decay::Bursts => -6.0 + rng.normal(),
                Decay::Huge => 1e4 * (1.0 + rng.uniform()),
            })
            .collect();
        let b = (0..tokens * value_heads).map(|_| case.b_mean + rng.normal()).collect();
        let v = rng.normals(tokens * value_heads * value_dim);
        let state = rng.normals(case.lengths.len() * value_heads * value_dim * key_dim);
        let a_log = (0..value_heads).map(|_| rng.uniform() * 1.2).collect();
        let dt_bias = (0..value_heads).map(|_| rng.uniform() - 1.0).collect();
        let mut drawn = Self {
            q: round(q, case.dtype)?,
            k: round(k, case.dtype)?,
            v: round(v, case.dtype)?,
            a: round(a, case.gate_dtype)?,
            b: round(b, case.gate_dtype)?,
            a_log: round(a_log, DType::F32)?,
            dt_bias: round(dt_bias, DType::F32)?,
            state: round(state, case.state_dtype)?,
        };
        let (keys, values) = (key_heads * key_dim, value_heads * value_dim);
        for (_, (first, tokens)) in case.ranges().into_iter().enumerate().filter(|(n, _)| case.is_padding(*n)) {
            let Self { q, k, v, a, b, .. } = &mut drawn;
            for (x, size) in [(q, keys), (k, keys), (v, values), (a, value_heads), (b, value_heads)] {
                x[first * size..][..tokens * size].fill(f64::NAN);
            }
        }
        Ok(drawn)
    }

    /// The exact results, or a draw of those of operands rounded to 16 bits.
    fn reference(&self, case: &Case, rounded: Option<u64>) -> Results {
        let Dims { key_heads, value_heads, key_dim, value_dim } = case.dims;
        let constants = Constants {
            l2norm: case.l2norm,
            l2_eps: 1e-6,
            scale: (key_dim as f64).powf(-0.5),
            beta_scale: case.beta_scale,
        };
        let head = value_heads * value_dim * key_dim;
        let mut results = Results { o: vec![], state: self.state.clone() };
        for (n, (first, tokens)) in case.ranges().into_iter().enumerate() {
            if case.is_padding(n) {
                results.o.resize(results.o.len() + tokens * value_heads * value_dim, 0.0);
                continue;
            }
            let state = &mut results.state[n * head..][..head];
            let part = |x, size| part(x, first * size, tokens * size);
            let inputs = Inputs {
                q: part(&self.q, key_heads * key_dim),
                k: part(&self.k, key_heads * key_dim),
                v: part(&self.v, value_heads * value_dim),
                a: part(&self.a, value_heads),
                b: part(&self.b, value_heads),
                a_log: &self.a_log,
                dt_bias: &self.dt_bias,
            };
            let cu_seqlens = &[0, tokens];
            results.o.extend(match rounded {
                None => gated_delta_rule(case.dims, constants, cu_seqlens, inputs, state),
                Some(draw) => {
                    let draw = draw << 32 | first as u64;
                    sixteen_bits::gated_delta_rule(case.dtype, draw, case.dims, constants, cu_seqlens, inputs, state)
                }
            });
        }
        results
    }

    fn run(&self, case: &Case, device: &Device) -> Result<(Algo, Results)> {
        let Dims { key_heads, value_heads, key_dim, value_dim } = case.dims;
        let (sequences, tokens) = (case.lengths.len(), case.tokens());
        let decode = !case.packed && case.lengths.iter().all(|&n| n == 1);
        let lead: Vec<usize> = match (case.packed, decode) {
            (true, _) => vec![tokens],
            (false, true) => vec![sequences],
            (false, false) => vec![sequences, case.lengths.first().copied().unwrap_or(0)],
        };
        let tensor = |x: &[f64], tail: &[usize], dtype| -> Result<Tensor> {
            to_device(&rounded(x, &[&lead, tail].concat(), dtype)?.0, device)
        };
        let (a, b) =
            (tensor(&self.a, &[value_heads], case.gate_dtype)?, tensor(&self.b, &[value_heads], case.gate_dtype)?);
        let form = if tokens == 0 { Form::Dense } else { case.form };
        let [q, k, v, a, b] = match form {
            Form::Dense => [
                tensor(&self.q, &[key_heads, key_dim], case.dtype)?,
                tensor(&self.k, &[key_heads, key_dim], case.dtype)?,
                tensor(&self.v, &[value_heads, value_dim], case.dtype)?,
                a,
                b,
            ],
            Form::Projection => {
                let parts = [
                    tensor(&self.q, &[key_heads * key_dim], case.dtype)?,
                    tensor(&self.k, &[key_heads * key_dim], case.dtype)?,
                    tensor(&self.v, &[value_heads * value_dim], case.dtype)?,
                    a.to_dtype(case.dtype)?,
                    b.to_dtype(case.dtype)?,
                ];
                // Rows that start anywhere, or rows that vector loads can take.
                let aligned = matches!(case.algo, Algo::Recurrent128 | Algo::Decode128)
                    || on_tensor_cores(case.algo)
                    || case.seed.is_multiple_of(2);
                let nan = |shape: Vec<usize>| Tensor::full(f32::NAN, shape, device)?.to_dtype(case.dtype);
                let pad = |width: usize| nan([&lead[..], &[width]].concat());
                let before = if aligned { 8 } else { 3 };
                let mut columns = vec![];
                for part in &parts {
                    columns.extend([pad(before)?, part.clone()]);
                    if aligned {
                        columns.push(pad(8 - part.dims()[lead.len()] % 8)?);
                    }
                }
                let mut projection = Tensor::cat(&columns, lead.len())?;
                // Rows of no sequence before and after: the offset is not zero, and sequences of a batch do not touch.
                for dim in 0..lead.len() {
                    let mut shape = projection.dims().to_vec();
                    shape[dim] = 1;
                    let row = nan(shape)?;
                    projection = Tensor::cat(&[&row, &projection, &row], dim)?.narrow(dim, 1, lead[dim])?;
                }
                let mut start = 0;
                let views: Vec<Tensor> = parts
                    .iter()
                    .map(|part| {
                        let width = part.dims()[lead.len()];
                        let view = projection.narrow(lead.len(), start + before, width);
                        start += before + width + if aligned { 8 - width % 8 } else { 0 };
                        view
                    })
                    .collect::<Result<_>>()?;
                views.try_into().expect("five views")
            }
        };
        let gates = Gates {
            a,
            b,
            a_log: rounded(&self.a_log, &[value_heads], DType::F32)?.0.to_device(device)?,
            dt_bias: rounded(&self.dt_bias, &[value_heads], DType::F32)?.0.to_device(device)?,
        };

        // A pool of more slots than sequences; what no sequence owns must stay as it is.
        let head = value_heads * value_dim * key_dim;
        let pool_slots = sequences + 3;
        let stride = if pool_slots % 5 == 0 { 3 } else { 5 };
        let slot = |n: usize| if case.slots { (n * stride + 2) % pool_slots } else { n + 2 };
        let map: Vec<_> = (0..sequences).map(|n| (!case.is_padding(n)).then(|| slot(n))).collect();
        let shape = [value_heads, value_dim, key_dim];
        let pool = SlotPool::new(&self.state, &map, pool_slots, &shape, case.state_dtype, device)?;
        let state = if case.slots { pool.all.clone() } else { pool.all.narrow(0, 2, sequences)? };
        let slots = case.slots.then(|| pool.slots()).transpose()?;

        if device.is_cuda() {
            poison(tokens * value_heads * value_dim, case.dtype, device)?;
        }
        let (o, algo) = if decode {
            let mut op = GdnDecode::new(gates, &state, case.options())?;
            op = slots.map_or(op.clone(), |slots| op.with_slots(&slots));
            (op.forward(&q, &k, &v)?, op.algo(&q, &k, &v)?)
        } else {
            let cu = case.packed.then(|| CuSeqlens::from_lengths(&case.lengths, device)).transpose()?;
            let mut op = GdnPrefill::new(gates, &state, cu.as_ref(), case.options())?;
            op = slots.map_or(op.clone(), |slots| op.with_slots(&slots));
            (op.forward(&q, &k, &v)?, op.algo(&q, &k, &v)?)
        };
        assert_eq!(o.dims(), [&lead[..], &[value_heads, value_dim]].concat());
        assert_eq!(o.dtype(), case.dtype);

        let (states, o) = (pool.states(), values(&o));
        let mut new_state = self.state.clone();
        let live = (0..sequences).filter(|n| !case.is_padding(*n));
        for (n, state) in live.zip(states.chunks_exact(head)) {
            new_state[n * head..][..head].copy_from_slice(state);
        }
        for (n, (first, tokens)) in case.ranges().into_iter().enumerate() {
            let size = value_heads * value_dim;
            let zero = o[first * size..][..tokens * size].iter().all(|&x| x == 0.0);
            assert!(zero || !case.is_padding(n), "o of padding is not zero");
        }
        Ok((algo, Results { o, state: new_state }))
    }
}
