//! One random step: its inputs in the layout of a layer on a device, its result, and those of the reference and of the three ops.

use crate::slot_pool::SlotPool;
use crate::support::{gated_norm, poison, rel_rms, rounded, values, Rng};
use candle_core::{DType, Device, Result, Tensor};
use candle_gdn::ops::{gated_rms_norm, CausalConv1d, Gates, GdnDecode, GdnPrefill, GdnStep, StepOptions};
use candle_gdn::reference::{gated_delta_rule, Constants, Dims, Inputs};
use candle_gdn::{Algo, GateActivation};

// Large enough to be missed, and no two constants alike.
const L2_EPS: f64 = 0.02;
const NORM_EPS: f64 = 0.05;

/// One random step: its inputs are columns of one projection, its states slots of pools.
#[derive(Debug, Clone)]
pub struct Case {
    pub dims: Dims,
    pub width: usize,
    pub batch: usize,
    /// Of each sequence; `None` leaves the dimension out.
    pub tokens: Option<usize>,
    pub dtype: DType,
    pub gate_dtype: DType,
    /// Of the weights of the convolution and of the norm: f32 instead of `dtype`.
    pub f32_weights: bool,
    pub state_dtype: DType,
    /// Slots in a shuffled order with padding for every third sequence but the first, instead of views of the pools.
    pub slots: bool,
    pub gate: GateActivation,
    pub beta_scale: f64,
    pub l2norm: bool,
    pub scale: Option<f64>,
    /// Columns in front of qkv: 3 or 8. The kernels read four at once.
    pub before: usize,
    pub algo: Algo,
    pub seed: u64,
}

impl Case {
    pub fn new(ratio: usize, batch: usize, tokens: usize, seed: u64) -> Self {
        Self {
            dims: Dims { key_heads: 2, value_heads: 2 * ratio, key_dim: 128, value_dim: 128 },
            width: 4,
            batch,
            tokens: Some(tokens),
            dtype: DType::F32,
            gate_dtype: DType::F32,
            f32_weights: false,
            state_dtype: DType::F32,
            slots: false,
            gate: GateActivation::Silu,
            beta_scale: 1.0,
            l2norm: true,
            scale: None,
            before: 8,
            algo: Algo::Auto,
            seed,
        }
    }

    /// The same with heads of K and V.
    pub fn with_dims(mut self, (key_dim, value_dim): (usize, usize)) -> Self {
        (self.dims.key_dim, self.dims.value_dim) = (key_dim, value_dim);
        self
    }

    fn len(&self) -> usize {
        self.tokens.unwrap_or(1)
    }

    /// batch and tokens, or batch
    fn lead(&self) -> Vec<usize> {
        [self.batch].into_iter().chain(self.tokens).collect()
    }

    fn keys(&self) -> usize {
        self.dims.key_heads * self.dims.key_dim
    }

    fn values(&self) -> usize {
        self.dims.value_heads * self.dims.value_dim
    }

    fn channels(&self) -> usize {
        2 * self.keys() + self.values()
    }

    fn state_size(&self) -> usize {
        self.values() * self.dims.key_dim
    }

    fn conv_size(&self) -> usize {
        (self.width - 1) * self.channels()
    }

    pub fn options(&self) -> StepOptions {
        let Self { l2norm, scale, beta_scale, gate, algo, .. } = *self;
        StepOptions::with(|o| {
            (o.norm_eps, o.gate) = (NORM_EPS, gate);
            (o.rule.l2norm, o.rule.l2_eps, o.rule.scale) = (l2norm, L2_EPS, scale);
            (o.rule.beta_scale, o.rule.algo) = (beta_scale, algo);
        })
    }

    /// The slot of each sequence; `None` is padding.
    fn map(&self) -> Vec<Option<usize>> {
        let slot = |n: usize| match self.slots {
            true if n % 3 == 2 => None,
            true => Some(self.batch - n),
            false => Some(n + 1),
        };
        (0..self.batch).map(slot).collect()
    }

    /// Relative RMS a result may be off. What the fused kernels round is the output alone. One after the other, the
    /// convolution's output (q, k and v; k is in the state twice) and o are rounded besides, each with an error of a
    /// quarter of `unit` on average: six such errors, and room for those that add up.
    fn bounds(&self, composed: bool) -> (f64, f64) {
        let (unit, output) = match self.dtype {
            DType::BF16 => (2f64.powi(-8), 4e-3),
            DType::F16 => (2f64.powi(-11), 5e-4),
            _ => (0.0, 1e-5),
        };
        let between = if composed { 2.5 * unit } else { 0.0 };
        let stored = if self.state_dtype == DType::BF16 { 2f64.powi(-8) } else { 0.0 };
        (output + between, 1e-5 + between + stored)
    }

    /// Runs it and compares with the definition. Returns how it ran.
    pub fn check(&self, device: &Device) -> Algo {
        let drawn = Drawn::new(self);
        let (algo, got) = drawn.run(self, device, Way::Step).unwrap_or_else(|e| panic!("{e}\n{self:?}"));
        let want = drawn.reference(self);
        let (out_bound, state_bound) = self.bounds(algo == Algo::Unfused);
        let case = format!("{algo:?} on {:?}: {self:?}", device.location());
        let (out, state) = (rel_rms(&got.out, &want.out), rel_rms(&got.state, &want.state));
        assert!(out <= out_bound, "out is off by {out:e}, {case}");
        assert!(state <= state_bound, "state is off by {state:e}, {case}");
        // Inputs are kept as they came.
        assert!(got.conv == want.conv, "the convolution's state is off, {case}");

        let (_, ops) = drawn.run(self, device, Way::Ops).unwrap_or_else(|e| panic!("{e}\n{self:?}"));
        if algo == Algo::Unfused {
            assert!(got == ops, "not bit for bit what the three ops give, {case}");
        } else {
            let (out_ops, state_ops) = self.bounds(true);
            let (out, state) = (rel_rms(&got.out, &ops.out), rel_rms(&got.state, &ops.state));
            assert!(out <= out_bound + out_ops, "out is {out:e} from the three ops', {case}");
            assert!(state <= state_bound + state_ops, "state is {state:e} from the three ops', {case}");
            assert!(got.conv == ops.conv, "the convolution's state is not the op's, {case}");
        }
        algo
    }
}

/// Outputs of all tokens, and states by sequence (of those that have one).
#[derive(Debug, Default, PartialEq)]
pub struct Results {
    out: Vec<f64>,
    conv: Vec<f64>,
    state: Vec<f64>,
}

#[derive(Clone, Copy)]
pub enum Way {
    Step,
    Ops,
}

/// The drawn inputs, by sequence and token, already rounded to the dtypes they travel in.
pub struct Drawn {
    qkv: Vec<f64>,
    z: Vec<f64>,
    a: Vec<f64>,
    b: Vec<f64>,
    a_log: Vec<f64>,
    dt_bias: Vec<f64>,
    conv_weight: Vec<f64>,
    norm_weight: Vec<f64>,
    conv: Vec<f64>,
    state: Vec<f64>,
}

impl Drawn {
    pub fn new(case: &Case) -> Self {
        let (rng, rows, heads) = (&mut Rng::new(case.seed), case.batch * case.len(), case.dims.value_heads);
        let mut draw = |n: usize, of: fn(&mut Rng) -> f64, dtype| {
            let values: Vec<f64> = (0..n).map(|_| of(rng)).collect();
            rounded(&values, &[n], dtype).unwrap().1
        };
        let weight = if case.f32_weights { DType::F32 } else { case.dtype };
        // Without their norm, long keys would make the state grow from token to token.
        let qkv = if case.l2norm { Rng::normal } else { |rng: &mut Rng| 0.1 * rng.normal() };
        Self {
            qkv: draw(rows * case.channels(), qkv, case.dtype),
            z: draw(rows * case.values(), Rng::normal, case.dtype),
            a: draw(rows * heads, Rng::normal, case.gate_dtype),
            b: draw(rows * heads, Rng::normal, case.gate_dtype),
            a_log: draw(heads, |rng| rng.uniform() * 1.2, DType::F32),
            dt_bias: draw(heads, |rng| rng.uniform() - 1.0, DType::F32),
            conv_weight: draw(case.channels() * case.width, Rng::normal, weight),
            norm_weight: draw(case.dims.value_dim, |rng| 1.0 + 0.2 * rng.normal(), weight),
            conv: draw(case.batch * case.conv_size(), qkv, case.dtype),
            state: draw(case.batch * case.state_size(), Rng::normal, case.state_dtype),
        }
    }

    fn reference(&self, case: &Case) -> Results {
        let Case { dims, width, .. } = *case;
        let (channels, keys, tokens, size) = (case.channels(), case.keys(), case.len(), case.values());
        let scale = case.scale.unwrap_or((dims.key_dim as f64).powf(-0.5));
        let constants = Constants { l2norm: case.l2norm, l2_eps: L2_EPS, scale, beta_scale: case.beta_scale };
        let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
        let mut results = Results::default();
        for (n, slot) in case.map().into_iter().enumerate() {
            if slot.is_none() {
                results.out.extend(vec![0.0; tokens * size]);
                continue;
            }
            let mut inputs = self.conv[n * case.conv_size()..][..case.conv_size()].to_vec();
            inputs.extend_from_slice(&self.qkv[n * tokens * channels..][..tokens * channels]);
            let mut state = self.state[n * case.state_size()..][..case.state_size()].to_vec();
            for t in 0..tokens {
                let convolved = |c: usize| {
                    let sum = (0..width).map(|j| self.conv_weight[c * width + j] * inputs[(t + j) * channels + c]);
                    let sum: f64 = sum.sum();
                    sum * sigmoid(sum)
                };
                let qkv: Vec<f64> = (0..channels).map(convolved).collect();
                let row = n * tokens + t;
                let one = Inputs {
                    q: &qkv[..keys],
                    k: &qkv[keys..2 * keys],
                    v: &qkv[2 * keys..],
                    a: &self.a[row * dims.value_heads..][..dims.value_heads],
                    b: &self.b[row * dims.value_heads..][..dims.value_heads],
                    a_log: &self.a_log,
                    dt_bias: &self.dt_bias,
                };
                let o = gated_delta_rule(dims, constants, &[0, 1], one, &mut state);
                let z = &self.z[row * size..][..size];
                results.out.extend(gated_norm(&o, z, &self.norm_weight, NORM_EPS, case.gate));
            }
            results.conv.extend_from_slice(&inputs[tokens * channels..]);
            results.state.extend(state);
        }
        results
    }

    pub fn run(&self, case: &Case, device: &Device, way: Way) -> Result<(Algo, Results)> {
        let Dims { value_heads, value_dim, key_dim, .. } = case.dims;
        let (lead, dtype) = (case.lead(), case.dtype);
        let tensor = |x: &[f64], shape: &[usize], dtype| rounded(x, shape, dtype)?.0.to_device(device);
        let rows = |x: &[f64], columns: usize, dtype| tensor(x, &[&lead[..], &[columns]].concat(), dtype);
        let pad = |n: usize| Tensor::full(f32::NAN, [&lead[..], &[n]].concat(), device)?.to_dtype(dtype);

        // [before | qkv | z | b | a | after], its rows a multiple of 8 long where they begin at one.
        let (a, b) = (rows(&self.a, value_heads, case.gate_dtype)?, rows(&self.b, value_heads, case.gate_dtype)?);
        let (qkv, z) = (rows(&self.qkv, case.channels(), dtype)?, rows(&self.z, case.values(), dtype)?);
        let after = if case.before.is_multiple_of(8) { 16 - 2 * value_heads % 8 } else { 2 };
        let parts = [pad(case.before)?, qkv, z, b.to_dtype(dtype)?, a.to_dtype(dtype)?, pad(after)?];
        let projection = Tensor::cat(&parts, lead.len())?;
        let mut start = case.before;
        let mut columns = |n: usize| {
            start += n;
            projection.narrow(lead.len(), start - n, n)
        };
        let (qkv, z) = (columns(case.channels())?, columns(case.values())?);
        let (b, a) = match case.gate_dtype == dtype {
            true => (columns(value_heads)?, columns(value_heads)?),
            false => (b, a),
        };
        let head = |x: &[f64]| tensor(x, &[value_heads], DType::F32);
        let gates = Gates { a, b, a_log: head(&self.a_log)?, dt_bias: head(&self.dt_bias)? };
        let weight = if case.f32_weights { DType::F32 } else { dtype };
        let conv_weight = tensor(&self.conv_weight, &[case.channels(), case.width], weight)?;
        let norm_weight = tensor(&self.norm_weight, &[value_dim], weight)?;

        let (map, pool_slots) = (case.map(), case.batch + 2);
        let pool = |x: &[f64], shape: &[usize], dtype| SlotPool::new(x, &map, pool_slots, shape, dtype, device);
        let conv_pool = pool(&self.conv, &[case.width - 1, case.channels()], dtype)?;
        let shape = [value_heads, value_dim, key_dim];
        let state_pool = pool(&self.state, &shape, case.state_dtype)?;
        let view = |pool: &SlotPool| if case.slots { Ok(pool.all.clone()) } else { pool.all.narrow(0, 1, case.batch) };
        let (conv, state) = (view(&conv_pool)?, view(&state_pool)?);
        let slots = case.slots.then(|| conv_pool.slots()).transpose()?;

        if device.is_cuda() {
            poison(case.batch * case.len() * case.values(), dtype, device)?;
        }
        let (algo, out) = match way {
            Way::Step => {
                let mut op = GdnStep::new(gates, &norm_weight, &conv, &state, case.options())?;
                op = slots.as_ref().map_or(op.clone(), |slots| op.with_slots(slots));
                (op.algo(&qkv, &z, &conv_weight)?, op.forward(&qkv, &z, &conv_weight)?)
            }
            Way::Ops => {
                let qkv = if case.tokens.is_none() { qkv.unsqueeze(1)? } else { qkv };
                let mut op = CausalConv1d::new(&conv, None, true)?;
                op = slots.as_ref().map_or(op.clone(), |slots| op.with_slots(slots));
                let y = op.forward(&qkv, &conv_weight)?.reshape([&lead[..], &[case.channels()]].concat())?;
                let column = |start, n| y.narrow(lead.len(), start, n);
                let (q, k) = (column(0, case.keys())?, column(case.keys(), case.keys())?);
                let v = column(2 * case.keys(), case.values())?;
                let mut options = case.options().rule;
                options.algo = Algo::Auto;
                let o = if case.tokens.is_none() {
                    let mut op = GdnDecode::new(gates, &state, options)?;
                    op = slots.as_ref().map_or(op.clone(), |slots| op.with_slots(slots));
                    op.forward(&q, &k, &v)?
                } else {
                    let mut op = GdnPrefill::new(gates, &state, None, options)?;
                    op = slots.as_ref().map_or(op.clone(), |slots| op.with_slots(slots));
                    op.forward(&q, &k, &v)?
                };
                let out = gated_rms_norm(&o, &z, &norm_weight, NORM_EPS, case.gate)?;
                (Algo::Unfused, out.reshape([&lead[..], &[case.values()]].concat())?)
            }
        };
        assert_eq!((out.dims(), out.dtype()), (&[&lead[..], &[case.values()]].concat()[..], dtype));

        // What sequences own, and nothing else, is written.
        let (conv, state) = (conv_pool.states(), state_pool.states());
        let results = Results { out: values(&out), conv, state };
        for (n, slot) in map.iter().enumerate() {
            let row = &results.out[n * case.len() * case.values()..][..case.len() * case.values()];
            assert!(slot.is_some() || row.iter().all(|&x| x == 0.0), "padding's output is not zero: {case:?}");
        }
        Ok((algo, results))
    }
}

/// Whether the device has the clusters that [`Algo::StepSplit`] and [`Algo::StepHeads`] need.
pub fn has_clusters(device: &Device) -> bool {
    let case = Case { algo: Algo::StepSplit, ..Case::new(1, 1, 1, 1) };
    device.is_cuda() && Drawn::new(&case).run(&case, device, Way::Step).is_ok()
}
