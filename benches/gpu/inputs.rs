//! What a shape of the rule is run on.

use crate::workloads::{Heads, Work};
use anyhow::Result;
use candle_core::{DType, Device, Tensor};
use candle_gdn::ops::Gates;

/// One set of inputs. q, k and v lie side by side in the rows of one tensor, the gates in another, as a layer has them.
pub struct Inputs {
    pub q: Tensor,
    pub k: Tensor,
    pub v: Tensor,
    pub gates: Gates,
    /// `[sequences, HV, V, K]`
    pub state: Tensor,
}

impl Inputs {
    /// Random, in `dtype`.
    pub fn new(work: &Work, dtype: DType, device: &Device) -> Result<Self> {
        let Heads { hk, hv, dim } = work.heads;
        let tokens = work.tokens();
        let (keys, values) = (hk * dim, hv * dim);
        let randn = |shape: &[usize]| Tensor::randn(0f32, 1., shape, device);
        let qkv = randn(&[tokens, 2 * keys + values])?.to_dtype(dtype)?;
        let ba = randn(&[tokens, 2 * hv])?.to_dtype(dtype)?;
        let (a_log, dt_bias) = (Tensor::rand(1f32, 16., hv, device)?.log()?, (randn(&[hv])? - 4.)?);
        let gates = Gates { a: ba.narrow(1, hv, hv)?, b: ba.narrow(1, 0, hv)?, a_log, dt_bias };
        let state = (randn(&[work.lengths.len(), hv, dim, dim])? * 0.1)?;
        let heads = |start: usize, n: usize| qkv.narrow(1, start * dim, n * dim);
        Ok(Inputs { q: heads(0, hk)?, k: heads(hk, hk)?, v: heads(2 * hk, hv)?, gates, state })
    }
}
