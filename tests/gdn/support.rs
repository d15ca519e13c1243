//! Kernels to test, golden files and a bound; beside them what the tests of the models use too.

use candle_core::{DType, Device, Result, Tensor};
use candle_gdn::ops::{gdn_decode_in_place, gdn_prefill_in_place, Gates, GdnPrefill, RuleOptions};
use candle_gdn::{Algo, CuSeqlens, GateActivation};
pub use candle_gdn_testing::devices::*;
use std::path::PathBuf;

/// The kernels that multiply in bf16 or f16 and take nothing else.
pub const TENSOR_CORES: [Algo; 2] = [Algo::ChunkedSm80, Algo::ChunkedSm90];
pub const HALVES: [DType; 2] = [DType::BF16, DType::F16];
/// What two results of theirs that are each 5e-3 off may differ by.
pub const APART: f64 = 1e-2;

pub fn on_tensor_cores(algo: Algo) -> bool {
    TENSOR_CORES.contains(&algo)
}

/// The kernels that take f32.
pub fn f32_algos() -> impl Iterator<Item = Algo> {
    Algo::RULE.into_iter().filter(|algo| !on_tensor_cores(*algo))
}

/// What `algo` is tested with where one dtype must do.
pub fn dtype_for(algo: Algo) -> DType {
    if on_tensor_cores(algo) {
        DType::BF16
    } else {
        DType::F32
    }
}

/// Whether `device` has the instructions of `algo`, which only [`Algo::ChunkedSm90`] may find missing. Says so where not.
pub fn has(device: &Device, algo: Algo) -> bool {
    if algo != Algo::ChunkedSm90 || device.is_cpu() {
        return true;
    }
    let zeros = |shape: &[usize], dtype| Tensor::zeros(shape, dtype, device).unwrap();
    let x = zeros(&[1, 64, 1, 128], DType::BF16);
    let (ab, heads) = (zeros(&[1, 64, 1], DType::F32), zeros(&[1], DType::F32));
    let gates = Gates { a: ab.clone(), b: ab, a_log: heads.clone(), dt_bias: heads };
    let options = RuleOptions::with(|o| o.algo = algo);
    let op = GdnPrefill::new(gates, &zeros(&[1, 1, 128, 128], DType::F32), None, options).unwrap();
    match op.algo(&x, &x, &x) {
        Ok(_) => true,
        Err(e) if e.to_string().contains("refused with status 7") => {
            crate::skipped::skipped(format!("{algo:?}: {e}"));
            false
        }
        Err(e) => panic!("{algo:?}: {e}"),
    }
}

/// A file of the golden data.
pub fn golden(name: &str) -> PathBuf {
    let thinned = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/goldens");
    // A binary that was carried to a GPU machine runs in the checkout there, not where it was built.
    let here = if std::path::Path::new(thinned).exists() { thinned } else { "tests/goldens" };
    let dir = std::env::var("CANDLE_GDN_GOLDENS").unwrap_or_else(|_| here.to_owned());
    PathBuf::from(dir).join(name)
}

/// The gated norm's definition, of rows as long as `weight`.
pub fn gated_norm(x: &[f64], z: &[f64], weight: &[f64], eps: f64, gate: GateActivation) -> Vec<f64> {
    let mut y = vec![];
    for (x, z) in x.chunks(weight.len()).zip(z.chunks(weight.len())) {
        let mean = x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64;
        for ((x, z), w) in x.iter().zip(z).zip(weight) {
            let sigmoid = 1.0 / (1.0 + (-z).exp());
            let act = if gate == GateActivation::Silu { z * sigmoid } else { sigmoid };
            y.push(x / (mean + eps).sqrt() * w * act);
        }
    }
    y
}

/// `got` is `exact` in bf16, rounded to nearest: half a unit in the last of 8 bits, and what f32 sums may differ by.
pub fn assert_rounded(what: &str, got: &[f64], exact: &[f64]) {
    let rms = (exact.iter().map(|x| x * x).sum::<f64>() / exact.len() as f64).sqrt();
    for (got, exact) in got.iter().zip(exact) {
        let half = (-8.0f64).exp2() * (got.abs().max(exact.abs()));
        assert!((got - exact).abs() <= half + 1e-5 * rms, "{what}: {got} for {exact}");
    }
}

/// [`gdn_decode_in_place`] on a copy of the state: o and the new state.
pub fn gdn_decode(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    gates: &Gates,
    state: &Tensor,
    options: RuleOptions,
) -> Result<(Tensor, Tensor)> {
    let state = state.force_contiguous()?;
    Ok((gdn_decode_in_place(q, k, v, gates, &state, options)?, state))
}

/// [`gdn_prefill_in_place`] on a copy of the state: o and the new state.
pub fn gdn_prefill(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    gates: &Gates,
    state: &Tensor,
    cu_seqlens: Option<&CuSeqlens>,
    options: RuleOptions,
) -> Result<(Tensor, Tensor)> {
    let state = state.force_contiguous()?;
    Ok((gdn_prefill_in_place(q, k, v, gates, &state, cu_seqlens, options)?, state))
}
