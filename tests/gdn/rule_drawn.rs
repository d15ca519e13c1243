//! What a case of the rule draws, what the reference makes of it, and what an op does.

use crate::rule_case::{Case, Decay, Form};
use crate::sixteen_bits;
use crate::slot_pool::SlotPool;
use crate::support::{on_tensor_cores, poison, rel_rms, rounded, to_device, values, Rng};
use candle_core::{DType, Device, Result, Tensor};
use candle_gdn::ops::{Gates, GdnDecode, GdnPrefill};
use candle_gdn::reference::{gated_delta_rule, Constants, Dims, Inputs};
use candle_gdn::{Algo, CuSeqlens};

/// o, and the new states by sequence (of padding as they were).
pub struct Results {
    o: Vec<f64>,
    state: Vec<f64>,
}

impl Results {
    /// Relative RMS errors of o and of the state.
    pub fn errors(&self, want: &Self) -> [f64; 2] {
        [rel_rms(&self.o, &want.o), rel_rms(&self.state, &want.state)]
    }
}

fn part(x: &[f64], start: usize, len: usize) -> &[f64] {
    &x[start..start + len]
}

/// The drawn inputs, packed, already rounded to the dtypes they travel in; those of padding are NaN.
#[derive(Clone)]
pub struct Drawn {
    pub q: Vec<f64>,
    pub k: Vec<f64>,
    pub v: Vec<f64>,
    a: Vec<f64>,
    b: Vec<f64>,
    a_log: Vec<f64>,
    dt_bias: Vec<f64>,
    state: Vec<f64>,
}

impl Drawn {
    pub fn new(case: &Case) -> Result<Self> {
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
    pub fn reference(&self, case: &Case, rounded: Option<u64>) -> Results {
        let Dims { key_heads, value_heads, key_dim, value_dim } = case.dims;
        let constants = Constants {
            l2norm: case.l2norm,
            l2_eps: case.l2_eps,
            scale: case.scale.unwrap_or((key_dim as f64).powf(-0.5)),
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

    pub fn run(&self, case: &Case, device: &Device) -> Result<(Algo, Results)> {
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
                let aligned = matches!(case.algo, Algo::Recurrent128 | Algo::Decode)
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
