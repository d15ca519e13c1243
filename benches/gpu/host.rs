//! What an eager call costs the host, one token of each sequence: calls in a loop with one synchronisation at the end, the
//! time until a call returns, and calls that are each waited for. Best read with `--tiers wall`, since CUPTI, once it was
//! asked, stays attached to the driver's calls.

use crate::layer;
use anyhow::{Context, Result};
use candle_core::{DType, Device, Tensor};
use candle_gdn::ops::{gdn_decode_in_place, gdn_step_in_place, Gates, GdnDecode, RuleOptions, StepOptions};
use candle_gdn::Algo;
use std::time::Instant;

const CALLS: usize = 1000;
const ROUNDS: usize = 7;

pub fn host(ordinal: usize) -> Result<()> {
    println!("us a call of the host's clock: in a loop / until it returns / each waited for");
    for tracking in [true, false] {
        let device = Device::new_cuda(ordinal).with_context(|| format!("no CUDA device {ordinal}"))?;
        candle_gdn::keep_freed_memory(&device)?;
        if !tracking {
            // SAFETY: all is on the device's one stream.
            unsafe { device.as_cuda_device()?.disable_event_tracking() };
        }
        for batch in [1, 8] {
            let what = |op: &str| format!("{op}, B={batch}, event tracking {}", if tracking { "on" } else { "off" });
            calls(&device, batch, &|op, call| time(&device, &what(op), call))?;
        }
    }
    Ok(())
}

type Call<'a> = &'a dyn Fn() -> candle_core::Result<()>;

/// Hands each op at 16/32 heads of 128 to `time`.
fn calls(device: &Device, batch: usize, time: &dyn Fn(&str, Call<'_>) -> Result<()>) -> Result<()> {
    let (hk, hv, dim) = (16, 32, 128);
    let (keys, values) = (hk * dim, hv * dim);
    let channels = 2 * keys + values;
    let randn = |shape: &[usize]| Tensor::randn(0f32, 1., shape, device)?.to_dtype(DType::BF16);
    // As a layer has them: columns of one projection.
    let projected = randn(&[batch, channels + values + 2 * hv])?;
    let columns = |start: usize, n: usize| projected.narrow(1, start, n);
    let (qkv, z) = (columns(0, channels)?, columns(channels, values)?);
    let gates = Gates {
        a: columns(channels + values + hv, hv)?,
        b: columns(channels + values, hv)?,
        a_log: Tensor::rand(1f32, 16., hv, device)?.log()?,
        dt_bias: (Tensor::randn(0f32, 1., hv, device)? - 4.)?,
    };
    let (q, k, v) = (columns(0, keys)?, columns(keys, keys)?, columns(2 * keys, values)?);
    let state = Tensor::zeros((batch, hv, dim, dim), DType::F32, device)?;
    let conv_state = Tensor::zeros((batch, 3, channels), DType::BF16, device)?;
    let (taps, norm) = (randn(&[channels, 4])?, Tensor::ones(dim, DType::F32, device)?);

    let options = {
        let algo = Algo::from_env()?;
        RuleOptions::with(|o| o.algo = algo)
    };
    time("gdn_decode_in_place", &|| gdn_decode_in_place(&q, &k, &v, &gates, &state, options).map(|_| ()))?;
    let op = GdnDecode::new(gates.clone(), &state, options)?;
    time("GdnDecode::forward", &|| op.forward(&q, &k, &v).map(|_| ()))?;
    let options = StepOptions::default();
    time("gdn_step_in_place", &|| {
        gdn_step_in_place(&qkv, &z, &taps, &gates, &norm, &conv_state, &state, options).map(|_| ())
    })?;
    let layer = layer::random(device, DType::BF16)?;
    let state = std::cell::RefCell::new(layer.new_state(batch)?);
    let x = randn(&[batch, 1, layer.config().hidden_size])?;
    time("GatedDeltaNet::forward", &|| layer.forward(&x, &mut state.borrow_mut()).map(|_| ()))
}

fn time(device: &Device, what: &str, call: Call<'_>) -> Result<()> {
    let us = |start: Instant| start.elapsed().as_secs_f64() * 1e6;
    let (mut looped, mut returned, mut waited) = (vec![], vec![], vec![]);
    for _ in 0..ROUNDS {
        device.synchronize()?;
        let start = Instant::now();
        for _ in 0..CALLS {
            call()?;
        }
        device.synchronize()?;
        looped.push(us(start) / CALLS as f64);
        for _ in 0..CALLS / ROUNDS {
            let start = Instant::now();
            call()?;
            returned.push(us(start));
            device.synchronize()?;
            waited.push(us(start));
        }
    }
    let median = |mut times: Vec<f64>| {
        times.sort_by(f64::total_cmp);
        times[times.len() / 2]
    };
    println!("  {what:52} {:6.2} / {:6.2} / {:6.2}", median(looped), median(returned), median(waited));
    Ok(())
}
