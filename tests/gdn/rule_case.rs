//! One random case of the rule: its inputs in a chosen layout on a device, its result, and the reference's.

use crate::support::{poison, rel_rms, rounded, to_device, values, Rng};
use candle_core::{DType, Device, Result, Tensor};
use candle_gdn::reference::{gated_delta_rule, Constants, Dims, Inputs};
use candle_gdn::{Algo, CuSeqlens, Gates, GdnDecode, GdnPrefill, RuleOptions};

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
    /// Views of one projection `[.., q | k | v | a | b]` with padding before and between, heads merged.
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
    /// Whether the state after every token is asked for.
    pub token_states: bool,
    pub form: Form,
    /// The states are slots of a larger pool, in a shuffled order; a pool view where false.
    pub slots: bool,
    pub l2norm: bool,
    pub beta_scale: f64,
    /// Mean of b: large values make beta near its maximum.
    pub b_mean: f64,
    pub decay: Decay,
    pub repeat_keys: bool,
    pub norm: f64,
    pub algo: Algo,
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
            token_states: false,
            form: Form::Dense,
            slots: false,
            l2norm: true,
            beta_scale: 1.0,
            b_mean: 0.0,
            decay: Decay::Usual,
            repeat_keys: false,
            norm: 1.0,
            algo: Algo::Auto,
            seed: 1,
        }
    }

    /// Relative RMS errors of o, of the state and of the token states after a run on `device`.
    pub fn errors(&self, device: &Device) -> Result<[f64; 3]> {
        let drawn = Drawn::new(self)?;
        let want = drawn.reference(self);
        let got = drawn.run(self, device)?;
        self.check_last_token_states(&got);
        let error = |of: fn(&Results) -> &Vec<f64>| rel_rms(of(&got), of(&want));
        Ok([error(|r| &r.o), error(|r| &r.state), error(|r| &r.token_states)])
    }

    /// Fails unless the errors are within the bounds: f32 1e-5 on all; with bf16 or f16 inputs the output's rounding
    /// (4e-3, 5e-4) and 1e-5 on the states. A bf16 state starts exact and is rounded at the end, which takes o nothing
    /// and adds to an element of the state at most half a unit of its last place, 2^-8 of it.
    pub fn check(&self, device: &Device) {
        let [o, state, token_states] = self.errors(device).unwrap_or_else(|e| panic!("{e}\n{self:?}"));
        let bound = match self.dtype {
            DType::BF16 => 4e-3,
            DType::F16 => 5e-4,
            _ => 1e-5,
        };
        let state_bound = 1e-5 + if self.state_dtype == DType::BF16 { 2f64.powi(-8) } else { 0.0 };
        assert!(o <= bound, "o is off by {o:e} on {:?}: {self:?}", device.location());
        assert!(state <= state_bound, "state is off by {state:e} on {:?}: {self:?}", device.location());
        assert!(token_states <= state_bound, "token states are off by {token_states:e}: {self:?}");
    }

    /// The state after a sequence's last token is its new state, bit for bit.
    fn check_last_token_states(&self, got: &Results) {
        let Dims { value_heads, value_dim, key_dim, .. } = self.dims;
        let (size, mut end) = (value_heads * value_dim * key_dim, 0);
        for (n, &length) in self.lengths.iter().enumerate() {
            end += length;
            if self.token_states && length > 0 {
                let (last, state) = (&got.token_states[(end - 1) * size..][..size], &got.state[n * size..][..size]);
                let same = last.iter().zip(state).all(|(x, y)| x.to_bits() == y.to_bits());
                assert!(same, "the last token state of sequence {n} is not its state: {self:?}");
            }
        }
    }

    pub fn tokens(&self) -> usize {
        self.lengths.iter().sum()
    }

    fn options(&self) -> RuleOptions {
        RuleOptions { l2norm: self.l2norm, beta_scale: self.beta_scale, algo: self.algo, ..RuleOptions::default() }
    }
}

/// o, the new states by sequence, and (empty where not asked for) the state after every token.
struct Results {
    o: Vec<f64>,
    state: Vec<f64>,
    token_states: Vec<f64>,
}

/// The drawn inputs, packed, already rounded to the dtypes they travel in.
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
        Ok(Self {
            q: round(q, case.dtype)?,
            k: round(k, case.dtype)?,
            v: round(v, case.dtype)?,
            a: round(a, case.gate_dtype)?,
            b: round(b, case.gate_dtype)?,
            a_log: round(a_log, DType::F32)?,
            dt_bias: round(dt_bias, DType::F32)?,
            state: round(state, case.state_dtype)?,
        })
    }

    fn reference(&self, case: &Case) -> Results {
        let cu: Vec<usize> = std::iter::once(0)
            .chain(case.lengths.iter().scan(0, |sum, n| {
                *sum += n;
                Some(*sum)
            }))
            .collect();
        let constants = Constants {
            l2norm: case.l2norm,
            l2_eps: 1e-6,
            scale: (case.dims.key_dim as f64).powf(-0.5),
            beta_scale: case.beta_scale,
        };
        let inputs = Inputs {
            q: &self.q,
            k: &self.k,
            v: &self.v,
            a: &self.a,
            b: &self.b,
            a_log: &self.a_log,
            dt_bias: &self.dt_bias,
        };
        let mut state = self.state.clone();
        let o = gated_delta_rule(case.dims, constants, &cu, inputs, &mut state);
        let mut token_states = vec![];
        if case.token_states {
            let Dims { key_heads, value_heads, key_dim, value_dim } = case.dims;
            let mut states = self.state.clone();
            for (state, range) in states.chunks_exact_mut(value_heads * value_dim * key_dim).zip(cu.windows(2)) {
                for t in range[0]..range[1] {
                    let one = Inputs {
                        q: &self.q[t * key_heads * key_dim..][..key_heads * key_dim],
                        k: &self.k[t * key_heads * key_dim..][..key_heads * key_dim],
                        v: &self.v[t * value_heads * value_dim..][..value_heads * value_dim],
                        a: &self.a[t * value_heads..][..value_heads],
                        b: &self.b[t * value_heads..][..value_heads],
                        ..inputs
                    };
                    gated_delta_rule(case.dims, constants, &[0, 1], one, state);
                    token_states.extend_from_slice(state);
                }
            }
        }
        Results { o, state, token_states }
    }

    fn run(&self, case: &Case, device: &Device) -> Result<Results> {
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
                let aligned = matches!(case.algo, Algo::Recurrent128 | Algo::Decode128) || case.seed.is_multiple_of(2);
                let pad = |width: usize| -> Result<Tensor> {
                    Tensor::full(f32::NAN, [&lead[..], &[width]].concat(), device)?.to_dtype(case.dtype)
                };
                let before = if aligned { 8 } else { 3 };
                let mut columns = vec![];
                for part in &parts {
                    columns.extend([pad(before)?, part.clone()]);
                    if aligned {
                        columns.push(pad(8 - part.dims()[lead.len()] % 8)?);
                    }
                }
                let projection = Tensor::cat(&columns, lead.len())?;
                // A first row that belongs to nobody makes the offset non-zero.
                let spare = projection.narrow(0, 0, 1.min(lead[0]))?;
                let projection = Tensor::cat(&[&spare, &projection], 0)?.narrow(0, spare.dims()[0], lead[0])?;
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
        let map: Vec<u32> = if case.slots {
            let stride = if pool_slots % 5 == 0 { 3 } else { 5 };
            (0..sequences).map(|n| ((n * stride + 2) % pool_slots) as u32).collect()
        } else {
            (2..2 + sequences as u32).collect()
        };
        let mut pool = vec![7.0; pool_slots * head];
        for (n, &slot) in map.iter().enumerate() {
            pool[slot as usize * head..][..head].copy_from_slice(&self.state[n * head..][..head]);
        }
        let (pool, _) = rounded(&pool, &[pool_slots, value_heads, value_dim, key_dim], case.state_dtype)?;
        let pool = pool.to_device(device)?;
        let state = if case.slots { pool.clone() } else { pool.narrow(0, 2, sequences)? };
        let slots = case.slots.then(|| Tensor::new(&map[..], device)).transpose()?;

        // A view between rows that nobody owns.
        let token_shape = [&lead[..], &[value_heads, value_dim, key_dim]].concat();
        let (spare, kept) = (3 * key_dim, if case.token_states { tokens * head } else { 0 });
        let around = Tensor::full(9f32, kept + 2 * spare, device)?.to_dtype(case.state_dtype)?;
        let token_states =
            case.token_states.then(|| around.narrow(0, spare, kept)?.reshape(token_shape)).transpose()?;

        if device.is_cuda() {
            poison(tokens * value_heads * value_dim, case.dtype, device)?;
        }
        let o = if decode {
            let mut op = GdnDecode::new(gates, &state, case.options())?;
            op = slots.map_or(op.clone(), |slots| op.with_slots(&slots));
            op = token_states.map_or(op.clone(), |to| op.with_token_states(&to));
            op.forward(&q, &k, &v)?
        } else {
            let cu = case.packed.then(|| CuSeqlens::from_lengths(&case.lengths, device)).transpose()?;
            let mut op = GdnPrefill::new(gates, &state, cu.as_ref(), case.options())?;
            op = slots.map_or(op.clone(), |slots| op.with_slots(&slots));
            op = token_states.map_or(op.clone(), |to| op.with_token_states(&to));
            op.forward(&q, &k, &v)?
        };
        assert_eq!(o.dims(), [&lead[..], &[value_heads, value_dim]].concat());
        assert_eq!(o.dtype(), case.dtype);

        let pool = values(&pool);
        let mut new_state = Vec::with_capacity(sequences * head);
        for &slot in &map {
            new_state.extend_from_slice(&pool[slot as usize * head..][..head]);
        }
        for slot in (0..pool_slots).filter(|&s| !map.contains(&(s as u32))) {
            assert!(pool[slot * head..][..head].iter().all(|&x| x == 7.0), "slot {slot} was touched");
        }
        let around = values(&around);
        let (before, rest) = around.split_at(spare);
        let (token_states, after) = rest.split_at(kept);
        assert!(before.iter().chain(after).all(|&x| x == 9.0), "what lies around the token states was touched");
        Ok(Results { o: values(&o), state: new_state, token_states: token_states.to_vec() })
    }
}
