//! The whole layer at Qwen3-Next's sizes. Weights are cold: the calls go round several layers.

use crate::check::{self, f64s};
use crate::clock::Call;
use crate::rule::not_taken;
use crate::Bench;
use anyhow::Result;
use candle_core::{DType, Device, Tensor};
use candle_gdn::{Algo, GatedDeltaNet, GdnConfig, GdnState};
use candle_gdn_benches::record::{Row, Shape};
use candle_nn::VarBuilder;
use std::cell::RefCell;
use std::collections::HashMap;

const HIDDEN: usize = 2048;
const KEYS: usize = 16 * 128;
const VALUES: usize = 32 * 128;
const HEADS: usize = 32;
/// Rows of the one wide projection: q, k, v, z, b, a.
const WIDE: usize = 2 * KEYS + 2 * VALUES + 2 * HEADS;
const DECODE: [usize; 4] = [1, 8, 32, 128];
const PREFILL: [usize; 4] = [128, 512, 2048, 8192];
/// A layer in bf16 rounds its input four times on the way (projection, convolution, rule, norm) and sums over 4096.
const LAYER_BOUND: f64 = 2e-2;

fn config() -> GdnConfig {
    GdnConfig::new(HIDDEN, (16, 128), (HEADS, 128))
}

fn weights(device: &Device, dtype: DType) -> Result<HashMap<String, Tensor>> {
    let randn = |shape: &[usize], std: f32| Tensor::randn(0f32, std, shape, device)?.to_dtype(dtype);
    let projection = (HIDDEN as f32).powf(-0.5);
    Ok(HashMap::from([
        ("in_proj_qkv.weight".into(), randn(&[2 * KEYS + VALUES, HIDDEN], projection)?),
        ("in_proj_z.weight".into(), randn(&[VALUES, HIDDEN], projection)?),
        ("in_proj_b.weight".into(), randn(&[HEADS, HIDDEN], projection)?),
        ("in_proj_a.weight".into(), randn(&[HEADS, HIDDEN], projection)?),
        ("conv1d.weight".into(), randn(&[2 * KEYS + VALUES, 1, 4], 0.5)?),
        ("A_log".into(), Tensor::rand(1f32, 16., HEADS, device)?.log()?),
        ("dt_bias".into(), (Tensor::randn(0f32, 1., HEADS, device)? - 4.)?),
        ("norm.weight".into(), Tensor::ones(128, DType::F32, device)?),
        ("out_proj.weight".into(), randn(&[HIDDEN, VALUES], (VALUES as f32).powf(-0.5))?),
    ]))
}

fn load(weights: HashMap<String, Tensor>, dtype: DType, device: &Device) -> Result<GatedDeltaNet> {
    Ok(GatedDeltaNet::load(&config(), VarBuilder::from_tensors(weights, dtype, device))?)
}

struct Set {
    layer: GatedDeltaNet,
    state: RefCell<GdnState>,
    x: Tensor,
}

pub fn layer(bench: &mut Bench) -> Result<()> {
    let (device, dtype) = (bench.device.clone(), bench.dtype);
    let decode = bench.choice.batches(&DECODE).into_iter().map(|batch| (batch, 1));
    let prefill = bench.choice.tokens(&PREFILL).into_iter().map(|tokens| (1, tokens));
    let weight_bytes = ((WIDE + VALUES) * HIDDEN * dtype.size_in_bytes()) as u64;
    // The layers are made once: what the L2 cache must forget is their weights.
    let layers = bench.clock.cold_sets(weight_bytes)?;
    let first = weights(&device, dtype)?;
    let on_cpu: HashMap<_, _> = first
        .iter()
        .map(|(name, w)| Ok((name.clone(), w.to_device(&Device::Cpu)?.to_dtype(DType::F32)?)))
        .collect::<Result<_>>()?;
    let reference = load(on_cpu, DType::F32, &Device::Cpu)?.with_algo(Algo::Recurrent);
    let mut made = vec![load(first, dtype, &device)?];
    while made.len() < layers {
        made.push(load(weights(&device, dtype)?, dtype, &device)?);
    }
    let shapes: Vec<_> = decode.chain(prefill).collect();
    let algos = bench.algos.clone();
    for ((batch, tokens), algo) in shapes.into_iter().flat_map(|shape| algos.iter().map(move |algo| (shape, *algo))) {
        let rows = batch * tokens;
        let name = if tokens == 1 { format!("B={batch}") } else { format!("T={tokens}") };
        let sets = made
            .iter()
            .map(|layer| {
                let x = Tensor::randn(0f32, 1., (batch, tokens, HIDDEN), &device)?.to_dtype(dtype)?;
                Ok(Set { layer: layer.clone().with_algo(algo), state: RefCell::new(layer.new_state(batch)?), x })
            })
            .collect::<Result<Vec<_>>>()?;

        // The first sequence's beginning, in f32 on the CPU: what comes later does not change it.
        let seen = tokens.min(128);
        let x = sets[0].x.narrow(0, 0, 1)?.narrow(1, 0, seen)?.to_device(&Device::Cpu)?.to_dtype(DType::F32)?;
        let want = f64s(&reference.forward(&x, &mut reference.new_state(1)?)?)?;
        check::poison(&[batch, tokens, HIDDEN], dtype, &device)?;
        let row = Row::new("layer", &name, "candle-gdn").auto(algo == Algo::Auto).l2("cold");
        let row = if algo == Algo::Auto { row } else { row.variant(algo.name()) };
        let y = match sets[0].layer.forward(&sets[0].x, &mut sets[0].state.borrow_mut()) {
            Err(e) if bench.all_algos => {
                bench.push(row.note(&not_taken(&e)))?;
                continue;
            }
            y => y?,
        };
        let error = check::error(&y, &f64s(&y.narrow(0, 0, 1)?.narrow(1, 0, seen)?.contiguous()?)?, &want)?;
        drop(y);

        let state = &sets[0].state.borrow().size_in_bytes() * 2;
        let bytes = weight_bytes + (state + 2 * rows * HIDDEN * dtype.size_in_bytes()) as u64;
        let chunk = if tokens == 1 { 0 } else { 2 * 64 * 4 * 128 };
        let flop = rows as u64 * (2 * (WIDE + VALUES) * HIDDEN + HEADS * (6 * 128 * 128 + chunk)) as u64;
        let shape = Shape::heads(16, HEADS, 128, 128).hidden(HIDDEN).batch(batch).tokens(tokens);
        let row = row.shape(shape).work(bytes, flop).error("y", error);
        let calls: Vec<Call> = sets
            .iter()
            .map(|set| -> Call { Box::new(|| set.layer.forward(&set.x, &mut set.state.borrow_mut()).map(|_| ())) })
            .collect();
        bench.time_if_held(row, LAYER_BOUND, &calls)?;
    }
    Ok(())
}
