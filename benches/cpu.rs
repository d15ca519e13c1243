//! The CPU kernels against the same thing written with candle tensor ops: what a candle user would otherwise have.
//!
//! `cargo bench --bench cpu`; `CANDLE_NUM_THREADS` and `RAYON_NUM_THREADS` set the threads. Shapes are Qwen3-Next's: 16
//! key heads, 32 value heads of 128, 8192 channels, f32. Every contender's result is checked against the other's first.

use candle_core::{DType, Device, Result, Tensor, D};
use candle_gdn::{
    causal_conv1d, gated_rms_norm, gdn_decode_in_place, gdn_prefill_in_place, Algo, GateActivation, Gates, RuleOptions,
};
use candle_nn::ops::{sigmoid, silu};
use criterion::{criterion_group, criterion_main, BenchmarkId, Criterion, Throughput};

const KEY_HEADS: usize = 16;
const VALUE_HEADS: usize = 32;
const DIM: usize = 128;
const CHANNELS: usize = (2 * KEY_HEADS + VALUE_HEADS) * DIM;

fn randn(shape: &[usize]) -> Tensor {
    Tensor::randn(0f32, 1., shape, &Device::Cpu).unwrap()
}

struct Inputs {
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Gates,
    state: Tensor,
}

fn inputs(tokens: usize) -> Inputs {
    Inputs {
        q: randn(&[1, tokens, KEY_HEADS, DIM]),
        k: randn(&[1, tokens, KEY_HEADS, DIM]),
        v: randn(&[1, tokens, VALUE_HEADS, DIM]),
        gates: Gates {
            a: randn(&[1, tokens, VALUE_HEADS]),
            b: randn(&[1, tokens, VALUE_HEADS]),
            a_log: randn(&[VALUE_HEADS]),
            dt_bias: randn(&[VALUE_HEADS]),
        },
        state: randn(&[1, VALUE_HEADS, DIM, DIM]),
    }
}

/// The rule token by token in tensor ops: o `[1, tokens, HV, V]` and the new state.
fn tensor_rule(x: &Inputs) -> Result<(Tensor, Tensor)> {
    let unit = |t: &Tensor| {
        let norm = (t.sqr()?.sum_keepdim(D::Minus1)? + 1e-6)?.sqrt()?;
        let (b, tokens, heads, dim) = t.dims4()?;
        let r = VALUE_HEADS / heads;
        let t = t.broadcast_div(&norm)?.unsqueeze(3)?;
        t.broadcast_as((b, tokens, heads, r, dim))?.reshape((b, tokens, VALUE_HEADS, dim))
    };
    let q = (unit(&x.q)? * (DIM as f64).powf(-0.5))?;
    let k = unit(&x.k)?;
    let softplus = (x.gates.a.broadcast_add(&x.gates.dt_bias)?.exp()? + 1.)?.log()?;
    let decay = softplus.broadcast_mul(&x.gates.a_log.exp()?)?.neg()?.exp()?;
    let beta = sigmoid(&x.gates.b)?;
    let mut state = x.state.clone();
    let mut outs = vec![];
    for t in 0..x.q.dim(1)? {
        let at = |x: &Tensor| x.narrow(1, t, 1)?.squeeze(1)?.unsqueeze(D::Minus1); // [1, HV, .., 1]
        let (q, k, v) = (at(&q)?, at(&k)?, at(&x.v)?);
        state = state.broadcast_mul(&at(&decay)?.unsqueeze(D::Minus1)?)?;
        let delta = (v - state.matmul(&k)?)?.broadcast_mul(&at(&beta)?.unsqueeze(D::Minus1)?)?;
        state = (state + delta.matmul(&k.transpose(2, 3)?)?)?;
        outs.push(state.matmul(&q)?.squeeze(D::Minus1)?);
    }
    Ok((Tensor::stack(&outs, 1)?, state))
}

/// The convolution as a sum of shifted inputs: candle's grouped `conv1d` loops over the channels.
fn tensor_conv(x: &Tensor, weight: &Tensor, state: &Tensor) -> Result<Tensor> {
    let tokens = x.dim(1)?;
    let inputs = Tensor::cat(&[state, x], 1)?;
    let mut sum = inputs.narrow(1, 0, tokens)?.broadcast_mul(&weight.narrow(1, 0, 1)?.t()?)?;
    for j in 1..weight.dim(1)? {
        sum = (sum + inputs.narrow(1, j, tokens)?.broadcast_mul(&weight.narrow(1, j, 1)?.t()?)?)?;
    }
    silu(&sum)
}

fn tensor_norm(x: &Tensor, z: &Tensor, weight: &Tensor) -> Result<Tensor> {
    candle_nn::ops::rms_norm(x, weight, 1e-6)? * silu(z)?
}

fn assert_close(what: &str, got: &Tensor, want: &Tensor) {
    let norm = |t: &Tensor| t.sqr().unwrap().sum_all().unwrap().to_scalar::<f32>().unwrap().sqrt();
    let error = norm(&(got - want).unwrap()) / norm(want);
    assert!(error < 1e-4, "{what}: the contenders disagree by {error:e}");
}

fn rule(c: &mut Criterion) {
    let mut group = c.benchmark_group("rule");
    for tokens in [1, 64, 512, 1024] {
        let x = inputs(tokens);
        let state = x.state.force_contiguous().unwrap();
        let (want, want_state) = tensor_rule(&x).unwrap();
        group.throughput(Throughput::Elements(tokens as u64));
        for algo in [Algo::Recurrent, Algo::Chunked] {
            let options = RuleOptions { algo, ..RuleOptions::default() };
            let run = |state: &Tensor| gdn_prefill_in_place(&x.q, &x.k, &x.v, &x.gates, state, None, options).unwrap();
            let check = x.state.force_contiguous().unwrap();
            assert_close("o", &run(&check), &want);
            assert_close("state", &check, &want_state);
            group.bench_function(BenchmarkId::new(format!("{algo:?}"), tokens), |b| b.iter(|| run(&state)));
        }
        if tokens == 1 {
            let at = |t: &Tensor| t.squeeze(1).unwrap();
            let (q, k, v) = (at(&x.q), at(&x.k), at(&x.v));
            let gates = Gates { a: at(&x.gates.a), b: at(&x.gates.b), ..x.gates.clone() };
            let options = RuleOptions::default();
            group.bench_function(BenchmarkId::new("decode", tokens), |b| {
                b.iter(|| gdn_decode_in_place(&q, &k, &v, &gates, &state, options).unwrap());
            });
        }
        if tokens <= 64 {
            group.bench_function(BenchmarkId::new("tensor ops", tokens), |b| b.iter(|| tensor_rule(&x).unwrap()));
        }
    }
}

fn conv(c: &mut Criterion) {
    let mut group = c.benchmark_group("conv");
    for tokens in [1, 512] {
        let (x, weight) = (randn(&[1, tokens, CHANNELS]), randn(&[CHANNELS, 4]));
        let state = Tensor::zeros((1, 3, CHANNELS), DType::F32, &Device::Cpu).unwrap();
        let want = tensor_conv(&x, &weight, &state).unwrap();
        let check = state.force_contiguous().unwrap();
        assert_close("y", &causal_conv1d(&x, &weight, &check, None, true).unwrap(), &want);
        group.throughput(Throughput::Elements(tokens as u64));
        group.bench_function(BenchmarkId::new("kernel", tokens), |b| {
            b.iter(|| causal_conv1d(&x, &weight, &check, None, true).unwrap());
        });
        group.bench_function(BenchmarkId::new("tensor ops", tokens), |b| {
            b.iter(|| tensor_conv(&x, &weight, &state).unwrap());
        });
    }
}

fn norm(c: &mut Criterion) {
    let mut group = c.benchmark_group("norm");
    for tokens in [1, 512] {
        let shape = [1, tokens, VALUE_HEADS, DIM];
        let (x, z, weight) = (randn(&shape), randn(&shape), randn(&[DIM]));
        let run = || gated_rms_norm(&x, &z, &weight, 1e-6, GateActivation::Silu).unwrap();
        assert_close("norm", &run(), &tensor_norm(&x, &z, &weight).unwrap());
        group.throughput(Throughput::Elements(tokens as u64));
        group.bench_function(BenchmarkId::new("kernel", tokens), |b| b.iter(run));
        group.bench_function(BenchmarkId::new("tensor ops", tokens), |b| {
            b.iter(|| tensor_norm(&x, &z, &weight).unwrap());
        });
    }
}

criterion_group! {
    name = benches;
    config = Criterion::default().sample_size(20).measurement_time(std::time::Duration::from_secs(2)).without_plots();
    targets = rule, conv, norm
}
criterion_main!(benches);
