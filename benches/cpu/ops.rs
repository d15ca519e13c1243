//! The convolution and the gated norm at Qwen3-Next's sizes, their data in the cache where it fits: no floor of bytes. And how fast
//! the memory is.

use crate::results::{Suite, Work};
use crate::{assert_close, randn};
use candle_core::{DType, Device, Result, Tensor};
use candle_gdn::ops::{causal_conv1d, gated_rms_norm};
use candle_gdn::GateActivation;
use candle_gdn_benches::record::{Row, Shape};
use candle_nn::ops::silu;
use criterion::{Criterion, Throughput};

const HEADS: usize = 32;
const DIM: usize = 128;
const CHANNELS: usize = 8192;
const WIDTH: usize = 4;

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

pub fn conv(c: &mut Criterion) -> Vec<Work> {
    let mut suite = Suite::new(c, "conv");
    for tokens in [1, 512] {
        let (x, weight) = (randn(&[1, tokens, CHANNELS]), randn(&[CHANNELS, WIDTH]));
        let state = Tensor::zeros((1, WIDTH - 1, CHANNELS), DType::F32, &Device::Cpu).unwrap();
        let kept = state.force_contiguous().unwrap();
        let run = || causal_conv1d(&x, &weight, &kept, None, true).unwrap();
        let tensor_ops = || tensor_conv(&x, &weight, &state).unwrap();
        assert_close("y", &run(), &tensor_ops());
        let shape = Shape::default().batch(1).tokens(tokens).channels(CHANNELS);
        let row = |who: &str| Row::new("conv", &format!("T={tokens}"), who).shape(shape);
        suite.group.throughput(Throughput::Elements(tokens as u64));
        suite.time("kernel", tokens, row("candle-gdn").includes("SiLU, state"), run);
        suite.time("tensor ops", tokens, row("tensor ops").includes("SiLU"), tensor_ops);
    }
    suite.works
}

pub fn norm(c: &mut Criterion) -> Vec<Work> {
    let mut suite = Suite::new(c, "norm");
    for tokens in [1, 512] {
        let shape = [1, tokens, HEADS, DIM];
        let (x, z, weight) = (randn(&shape), randn(&shape), randn(&[DIM]));
        let run = || gated_rms_norm(&x, &z, &weight, 1e-6, GateActivation::Silu).unwrap();
        let tensor_ops = || tensor_norm(&x, &z, &weight).unwrap();
        assert_close("norm", &run(), &tensor_ops());
        let shape = Shape { hv: Some(HEADS), v: Some(DIM), ..Shape::default() }.batch(1).tokens(tokens);
        let row = |who: &str| Row::new("norm", &format!("T={tokens}"), who).shape(shape);
        suite.group.throughput(Throughput::Elements(tokens as u64));
        suite.time("kernel", tokens, row("candle-gdn").includes("gate"), run);
        suite.time("tensor ops", tokens, row("tensor ops").includes("gate"), tensor_ops);
    }
    suite.works
}

/// A copy of 512 MiB to another place by all threads: what the memory gives.
pub fn copy(c: &mut Criterion) -> Vec<Work> {
    const FLOATS: usize = 128 << 20;
    let from = vec![1f32; FLOATS];
    let mut to = vec![0f32; FLOATS];
    let threads = candle_core::utils::get_num_threads();
    let piece = FLOATS.div_ceil(threads);
    let mut suite = Suite::new(c, "copy");
    suite.group.throughput(Throughput::Bytes(8 * FLOATS as u64));
    let row = Row::new("copy", "512 MiB", "memory").work(8 * FLOATS as u64, 0);
    suite.time("512 MiB", threads, row, || {
        std::thread::scope(|scope| {
            for (from, to) in from.chunks(piece).zip(to.chunks_mut(piece)) {
                scope.spawn(move || to.copy_from_slice(from));
            }
        });
    });
    suite.works
}
