//! The baseline of the benchmarks, the rule in tensor operations, against the op.

use candle_core::{DType, Device, Result, Tensor};
use candle_gdn::ops::{gdn_prefill_in_place, Gates, RuleOptions};
use candle_gdn_benches::tensor_ops;
use candle_gdn_testing::devices::{devices, rel_rms, values};

/// q, k, v, gates and state of sequences of equal lengths, with decays as a model has them.
fn inputs(
    batch: usize,
    tokens: usize,
    (hk, hv): (usize, usize),
    device: &Device,
) -> Result<([Tensor; 3], Gates, Tensor)> {
    let randn = |shape: &[usize]| Tensor::randn(0f32, 1., shape, device);
    let rows = |heads: usize, dim: usize| randn(&[batch, tokens, heads, dim]);
    let gates = Gates {
        a: randn(&[batch, tokens, hv])?,
        b: randn(&[batch, tokens, hv])?,
        a_log: Tensor::rand(1f32, 16., hv, device)?.log()?,
        dt_bias: (randn(&[hv])? - 4.)?,
    };
    Ok(([rows(hk, 32)?, rows(hk, 32)?, rows(hv, 48)?], gates, (randn(&[batch, hv, 48, 32])? * 0.1)?))
}

#[test]
fn both_forms_compute_the_rule() -> Result<()> {
    for device in devices() {
        for tokens in [1, 63, 64, 65, 200] {
            let ([q, k, v], gates, state) = inputs(2, tokens, (2, 4), &device)?;
            let want_state = state.force_contiguous()?;
            let want = gdn_prefill_in_place(&q, &k, &v, &gates, &want_state, None, RuleOptions::default())?;
            for (form, (o, new)) in [
                ("by tokens", tensor_ops::by_tokens(&q, &k, &v, &gates, &state)?),
                ("by chunks", tensor_ops::by_chunks(&q, &k, &v, &gates, &state)?),
            ] {
                assert_eq!((o.dims(), o.dtype(), new.dims()), (want.dims(), DType::F32, state.dims()));
                for (x, want) in [(&o, &want), (&new, &want_state)] {
                    let error = rel_rms(&values(x), &values(want));
                    assert!(error < 1e-5, "{form}, {tokens} tokens: {error:e}");
                }
            }
        }
    }
    Ok(())
}
