//! The convolution and the gated norm at Qwen3-Next's sizes, as strided views of a projection.

use crate::check::{self, f64s};
use crate::clock::Call;
use crate::Bench;
use anyhow::Result;
use candle_core::Tensor;
use candle_gdn::ops::{causal_conv1d, gated_rms_norm};
use candle_gdn::GateActivation;
use candle_gdn_benches::record::{Row, Shape};

const CHANNELS: usize = 8192;
const WIDTH: usize = 4;
/// Columns of the projection: q, k, v and z.
const COLUMNS: usize = 12288;
const HEADS: usize = 32;
const DIM: usize = 128;
const CONV: [(usize, usize); 10] =
    [(1, 1), (8, 1), (32, 1), (128, 1), (256, 1), (1, 64), (1, 512), (1, 2048), (1, 8192), (8, 1024)];
const NORM: [usize; 7] = [1, 8, 32, 128, 512, 2048, 8192];

/// Three tensors that a call reads.
type Set = [Tensor; 3];

/// Times an op that holds its bound, on as many sets as it takes to find nothing in the L2 cache.
fn time(
    bench: &mut Bench,
    row: Row,
    first: Set,
    set: impl Fn() -> Result<Set>,
    op: impl Fn(&Set) -> candle_core::Result<Tensor>,
) -> Result<()> {
    let mut sets = vec![first];
    while sets.len() < bench.clock.cold_sets(row.bytes.unwrap_or(0))? {
        sets.push(set()?);
    }
    let calls: Vec<Call> = sets.iter().map(|set| -> Call { Box::new(|| op(set).map(|_| ())) }).collect();
    bench.time_if_held(row, 4e-3, &calls)
}

pub fn conv(bench: &mut Bench) -> Result<()> {
    let (device, dtype) = (bench.device.clone(), bench.dtype);
    let element = dtype.size_in_bytes();
    let op = |[x, weight, state]: &Set| causal_conv1d(x, weight, state, None, true);
    let grid = if bench.choice.quick { &CONV[..3] } else { &CONV };
    for &(batch, tokens) in grid {
        let bytes = (batch * CHANNELS * element * (2 * tokens + 2 * (WIDTH - 1)) + CHANNELS * WIDTH * element) as u64;
        let randn = |shape: &[usize]| Tensor::randn(0f32, 1., shape, &device)?.to_dtype(dtype);
        let set = || -> Result<Set> {
            let x = randn(&[batch, tokens, COLUMNS])?.narrow(2, 0, CHANNELS)?;
            Ok([x, randn(&[CHANNELS, WIDTH])?, randn(&[batch, WIDTH - 1, CHANNELS])?])
        };
        let first = set()?;
        let want = conv_reference(&first)?;
        check::poison(&[batch, tokens, CHANNELS], dtype, &device)?;
        let y = op(&first)?;
        let shape = Shape::default().batch(batch).tokens(tokens).channels(CHANNELS);
        let row = Row::new("conv", &format!("{batch}x{tokens}"), "candle-gdn").shape(shape).includes("SiLU, state");
        let row = row.l2("cold").work(bytes, 0).error("y", check::error(&y, &columns(&y)?, &want)?);
        time(bench, row, first, set, op)?;
    }
    Ok(())
}

/// Every 64th channel of the last sequence.
fn columns(x: &Tensor) -> Result<Vec<f64>> {
    let last = x.narrow(0, x.dim(0)? - 1, 1)?.contiguous()?;
    let index: Vec<u32> = (0..CHANNELS as u32).step_by(64).collect();
    f64s(&last.index_select(&Tensor::new(index, x.device())?, 2)?)
}

fn conv_reference([x, weight, state]: &Set) -> Result<Vec<f64>> {
    let (tokens, n) = (x.dim(1)?, CHANNELS / 64);
    let (x, state, all) = (columns(x)?, columns(state)?, f64s(weight)?);
    let mut out = vec![];
    for t in 0..tokens {
        for c in 0..n {
            let at = |j: usize| match (t + j).checked_sub(WIDTH - 1) {
                Some(t) => x[t * n + c],
                None => state[(t + j) * n + c],
            };
            let sum: f64 = (0..WIDTH).map(|j| all[64 * c * WIDTH + j] * at(j)).sum();
            out.push(sum / (1. + (-sum).exp()));
        }
    }
    Ok(out)
}

pub fn norm(bench: &mut Bench) -> Result<()> {
    let (device, dtype) = (bench.device.clone(), bench.dtype);
    let op = |[x, z, weight]: &Set| gated_rms_norm(x, z, weight, 1e-6, GateActivation::Silu);
    for tokens in bench.choice.tokens(&NORM) {
        let bytes = (3 * tokens * HEADS * DIM * dtype.size_in_bytes()) as u64;
        let randn = |shape: &[usize]| Tensor::randn(0f32, 1., shape, &device);
        let set = || -> Result<Set> {
            let x = randn(&[1, tokens, HEADS, DIM])?.to_dtype(dtype)?;
            let z = randn(&[1, tokens, COLUMNS])?.to_dtype(dtype)?.narrow(2, CHANNELS, HEADS * DIM)?;
            Ok([x, z, randn(&[DIM])?])
        };
        let first = set()?;
        check::poison(&[1, tokens, HEADS, DIM], dtype, &device)?;
        let out = op(&first)?;
        let error = check::error(&out, &f64s(&out.narrow(1, tokens - 1, 1)?)?, &norm_reference(&first)?)?;
        let shape = Shape { hv: Some(HEADS), v: Some(DIM), ..Shape::default() }.batch(1).tokens(tokens);
        let row = Row::new("norm", &format!("T={tokens}"), "candle-gdn").shape(shape).includes("gate");
        time(bench, row.l2("cold").work(bytes, 0).error("out", error), first, set, op)?;
    }
    Ok(())
}

/// The last token's heads.
fn norm_reference([x, z, weight]: &Set) -> Result<Vec<f64>> {
    let last = x.dim(1)? - 1;
    let (x, z, w) = (f64s(&x.narrow(1, last, 1)?)?, f64s(&z.narrow(1, last, 1)?)?, f64s(weight)?);
    let mut out = vec![];
    for (x, z) in x.chunks(DIM).zip(z.chunks(DIM)) {
        let scale = (x.iter().map(|x| x * x).sum::<f64>() / DIM as f64 + 1e-6).powf(-0.5);
        out.extend(x.iter().zip(z).zip(&w).map(|((x, z), w)| x * scale * w * z / (1. + (-z).exp())));
    }
    Ok(out)
}
