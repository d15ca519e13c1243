//! The step: convolution, rule and gated norm as one op, against the definition in f64 and against the three ops.

use crate::slot_pool::SlotPool;
use crate::step_args::StepArgs;
use crate::support::{devices, gated_norm, poison, rel_rms, rounded, values, Rng};
use candle_core::{DType, Device, Result, Tensor};
use candle_gdn::ops::{
    causal_conv1d, gated_rms_norm, CausalConv1d, Gates, GdnDecode, GdnPrefill, GdnStep, StepOptions,
};
use candle_gdn::reference::{gated_delta_rule, Constants, Dims, Inputs};
use candle_gdn::{Algo, GateActivation};
use std::convert::identity;

// Large enough to be missed, and no two constants alike.
const L2_EPS: f64 = 0.02;
const NORM_EPS: f64 = 0.05;

/// One random step: its inputs are columns of one projection, its states slots of pools.
#[derive(Debug, Clone)]
struct Case {
    dims: Dims,
    width: usize,
    batch: usize,
    /// Of each sequence; `None` leaves the dimension out.
    tokens: Option<usize>,
    dtype: DType,
    gate_dtype: DType,
    /// Of the weights of the convolution and of the norm: f32 instead of `dtype`.
    f32_weights: bool,
    state_dtype: DType,
    /// Slots in a shuffled order with padding for every third sequence but the first, instead of views of the pools.
    slots: bool,
    gate: GateActivation,
    beta_scale: f64,
    l2norm: bool,
    scale: Option<f64>,
    /// Columns in front of qkv: 3 or 8. The kernels read four at once.
    before: usize,
    algo: Algo,
    seed: u64,
}

impl Case {
    fn new(ratio: usize, batch: usize, tokens: usize, seed: u64) -> Self {
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

    fn options(&self) -> StepOptions {
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
    fn check(&self, device: &Device) -> Algo {
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
struct Results {
    out: Vec<f64>,
    conv: Vec<f64>,
    state: Vec<f64>,
}

#[derive(Clone, Copy)]
enum Way {
    Step,
    Ops,
}

/// The drawn inputs, by sequence and token, already rounded to the dtypes they travel in.
struct Drawn {
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
    fn new(case: &Case) -> Self {
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

    fn run(&self, case: &Case, device: &Device, way: Way) -> Result<(Algo, Results)> {
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
fn has_clusters(device: &Device) -> bool {
    let case = Case { algo: Algo::StepSplit, ..Case::new(1, 1, 1, 1) };
    device.is_cuda() && Drawn::new(&case).run(&case, device, Way::Step).is_ok()
}

/// Heads, batches and lengths, each in every dtype; what else there is to choose changes from case to case.
#[test]
fn equals_its_definition_and_the_three_ops() {
    for device in devices() {
        let mut seed = 0;
        for ratio in [1, 2, 3, 4, 8] {
            for (batch, tokens) in [1, 2, 5, 33].into_iter().flat_map(|n| [1, 2, 5, 16].map(|t| (n, t))) {
                // The reference takes its time.
                if batch * tokens > 80 && ratio != 3 {
                    continue;
                }
                for dtype in [DType::F32, DType::BF16, DType::F16] {
                    seed += 1;
                    let bit = |n: u64| ((seed * 0x9e37_79b9) >> (8 + n)) % 2 == 1;
                    let case = Case {
                        tokens: if tokens == 1 && bit(0) { None } else { Some(tokens) },
                        dtype,
                        gate_dtype: if bit(1) { dtype } else { DType::F32 },
                        f32_weights: bit(2),
                        state_dtype: if bit(3) { DType::BF16 } else { DType::F32 },
                        slots: bit(5),
                        gate: if bit(6) { GateActivation::Sigmoid } else { GateActivation::Silu },
                        beta_scale: if bit(7) { 2.0 } else { 1.0 },
                        scale: if bit(8) { Some(0.3) } else { None },
                        ..Case::new(ratio, batch, tokens, seed)
                    };
                    let algo = case.check(&device);
                    assert_eq!(algo == Algo::Unfused, device.is_cpu(), "{case:?}");
                }
            }
        }
    }
}

/// Each variant where it is asked for, with everything there is to choose.
#[test]
fn every_variant_and_option() {
    for device in devices() {
        let clusters = has_clusters(&device);
        for (algo, ratio, tokens) in [
            (Algo::StepWhole, 2, 1),
            (Algo::StepWhole, 3, 6),
            (Algo::StepSplit, 1, 1),
            (Algo::StepSplit, 4, 1),
            (Algo::StepHeads, 2, 1),
            (Algo::StepHeads, 8, 1),
            (Algo::StepHeads, 3, 6),
            (Algo::Unfused, 2, 1),
            (Algo::Unfused, 2, 6),
        ] {
            if matches!(algo, Algo::StepSplit | Algo::StepHeads) && device.is_cuda() && !clusters {
                continue;
            }
            let plain = Case { algo, ..Case::new(ratio, 4, tokens, 77) };
            let half = Case { dtype: DType::BF16, gate_dtype: DType::BF16, ..plain.clone() };
            let cases = [
                half.clone(),
                Case { dtype: DType::F16, ..plain.clone() },
                Case { gate: GateActivation::Sigmoid, ..plain.clone() },
                Case { beta_scale: 2.0, ..plain.clone() },
                Case { l2norm: false, ..plain.clone() },
                Case { scale: Some(0.3), ..plain.clone() },
                Case { slots: true, ..half.clone() },
                Case { state_dtype: DType::BF16, slots: true, ..half.clone() },
                Case { f32_weights: true, ..half },
                plain,
            ];
            for case in cases {
                let got = case.check(&device);
                assert_eq!(got, if device.is_cpu() { Algo::Unfused } else { algo }, "{case:?}");
            }
        }
    }
}

/// Other head sizes, widths and offsets are taken as well.
#[test]
fn what_no_fused_kernel_takes_is_composed() {
    for device in devices() {
        let of = |key_dim, value_dim| Dims { key_heads: 2, value_heads: 4, key_dim, value_dim };
        for (tokens, dtype) in [(None, DType::F32), (Some(1), DType::BF16), (Some(5), DType::F16)] {
            let case = Case { tokens, dtype, ..Case::new(2, 3, 1, 5) };
            for case in [
                Case { dims: of(64, 64), ..case.clone() },
                Case { dims: of(96, 96), slots: true, ..case.clone() },
                Case { dims: of(64, 128), ..case.clone() },
                Case { width: 3, ..case.clone() },
                Case { width: 2, gate: GateActivation::Sigmoid, ..case.clone() },
                Case { before: 3, state_dtype: DType::BF16, ..case.clone() },
            ] {
                assert_eq!(case.check(&device), Algo::Unfused, "{case:?}");
            }
        }
    }
}

#[test]
fn runs_repeat_bit_for_bit() {
    for device in devices() {
        for algo in Algo::STEP {
            for (batch, tokens) in [(1, 1), (33, 1), (2, 16)] {
                let clustered = matches!(algo, Algo::StepSplit | Algo::StepHeads);
                if clustered && !device.is_cpu() && !has_clusters(&device) || algo == Algo::StepSplit && tokens > 1 {
                    continue;
                }
                let case = Case { algo, dtype: DType::BF16, ..Case::new(2, batch, tokens, 8) };
                let drawn = Drawn::new(&case);
                let run = || drawn.run(&case, &device, Way::Step).unwrap().1;
                let first = run();
                for _ in 0..3 {
                    assert!(run() == first, "{case:?}");
                }
            }
        }
    }
}

/// With the constants of the cases, heads of 128.
fn random(lead: &[usize], slots: usize, device: &Device) -> StepArgs {
    let step = StepArgs::new(lead, slots, [128, 128], |shape| Tensor::randn(0f32, 1., shape, device).unwrap());
    step.with(|x| x.options = Case::new(2, 1, 1, 0).options())
}

/// Sixteen tokens whole, in pieces and one by one.
#[test]
fn any_split_gives_the_same() {
    const TOKENS: usize = 16;
    for device in devices() {
        for (dtype, out_bound) in [(DType::F32, 1e-5), (DType::BF16, 4e-3), (DType::F16, 5e-4)] {
            let x = random(&[3, TOKENS], 3, &device).in_dtype(dtype);
            let run = |cuts: &[usize]| {
                let x = x.copied();
                let step = |cut: &[usize]| x.map(|t| t.narrow(1, cut[0], cut[1] - cut[0]).unwrap()).forward(identity);
                let outs: Vec<Tensor> = cuts.windows(2).map(|cut| step(cut).unwrap()).collect();
                let [conv, state] = x.states();
                (values(&Tensor::cat(&outs, 1).unwrap()), conv, state)
            };
            let whole = run(&[0, 16]);
            for cuts in
                [vec![0, 4, 8, 12, 16], vec![0, 1, 16], vec![0, 2, 2, 9, 16], vec![0, 15, 16], (0..=16).collect()]
            {
                let got = run(&cuts);
                let (out, state) = (rel_rms(&got.0, &whole.0), rel_rms(&got.2, &whole.2));
                assert!(out < out_bound && state < 1e-5, "{dtype:?} {cuts:?}: out {out:e}, state {state:e}");
                assert!(got.1 == whole.1, "{dtype:?} {cuts:?}: the convolution's state");
            }
        }
    }
}

/// A z split into heads, one whose batch and token strides do not count through, and gates with any strides.
#[test]
fn odd_strides() {
    for device in devices() {
        let a = Tensor::randn(0f32, 1., (2, 4, 9), &device).unwrap().transpose(1, 2).unwrap();
        let x = random(&[2, 9], 2, &device).with(|x| x.gates.a = a);
        let part = |t: &Tensor| t.narrow(1, 3, 5).unwrap();
        let run = |x: &StepArgs| {
            let x = x.copied();
            (values(&x.forward(identity).unwrap()), x.states())
        };
        let (want, views) = (run(&x.map(|t| part(t).contiguous().unwrap())), x.map(part));
        assert!(run(&views) == want);
        assert!(run(&views.with(|x| x.z = x.z.reshape((2, 5, 4, 128)).unwrap())) == want);
    }
}

/// Nothing comes of no tokens.
#[test]
fn nothing_to_do() {
    for device in devices() {
        let x = random(&[2, 3], 2, &device).map(|t| t.narrow(1, 0, 0).unwrap());
        let before = x.states();
        assert_eq!(x.forward(identity).unwrap().dims(), [2, 0, 512]);
        assert!(x.states() == before);
    }
}

/// The state that a call was refused with is as it was.
#[test]
fn a_refused_call_writes_nothing() {
    let x = random(&[2], 2, &Device::Cpu);
    let (before, other) = (x.states(), x.copied().conv);
    let slots = Tensor::new(&[1u32, 1], &Device::Cpu).unwrap();
    x.forward(|op| op.with_slots(&slots)).unwrap_err();
    x.with(|x| x.z = x.z.narrow(1, 0, 511).unwrap()).forward(identity).unwrap_err();
    assert!(x.states() == before);
    x.forward(identity).unwrap();
    let after = x.states();
    assert!(after[0] != before[0] && after[1] != before[1]);
    // The functions of the three ops see the same convolution's state.
    causal_conv1d(&x.qkv.unsqueeze(1).unwrap(), &x.conv_weight, &other, None, true).unwrap();
    assert!(values(&other) == after[0]);
}
