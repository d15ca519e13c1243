//! Any number of tokens of each sequence.

use super::check::Lead;
use super::options::{Algo, Gates, RuleOptions};
use super::rule::{custom_op3, Rule};
use super::sequences::CuSeqlens;
use super::slots::Slots;
use candle_core::{DType, Result, Tensor};

/// The gated delta rule over any number of tokens of each sequence, as a
/// [`CustomOp3`](candle_core::CustomOp3) over (q, k, v); see
/// [`gdn_prefill_in_place`] for shapes. The op holds the state and updates it when it is applied.
///
/// It has no backward pass: `backward()` through it gives candle's "backward is not supported" error.
#[derive(Debug, Clone)]
pub struct GdnPrefill(pub(super) Rule);

impl GdnPrefill {
    /// Checks the gates and the state. With `cu_seqlens` the tokens of all sequences are packed along one dimension.
    ///
    /// # Errors
    /// When a dtype, shape or device does not fit; the message names the argument.
    pub fn new(gates: Gates, state: &Tensor, cu_seqlens: Option<&CuSeqlens>, options: RuleOptions) -> Result<Self> {
        let lead = if cu_seqlens.is_some() { Lead::Packed } else { Lead::Batched };
        Rule::new("gdn_prefill", lead, gates, state, cu_seqlens, options).map(Self)
    }

    /// Sequence `n` uses slot `slots[n]` of the state, or reads one slot and writes another; see
    /// [`crate::GdnDecode::with_slots`].
    pub fn with_slots(mut self, slots: impl Into<Slots>) -> Self {
        self.0.slots = Some(slots.into());
        self
    }

    /// Applies the op: o, `[batch, tokens, HV, V]` or packed `[tokens, HV, V]`, in q's dtype.
    ///
    /// # Errors
    /// When a dtype, shape or device does not fit, or tensors share a storage that one of them is written in.
    pub fn forward(&self, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor> {
        self.0.forward(self, q, k, v)
    }

    /// Refuses what the kernel asked for does not take of a call with these sizes.
    pub(crate) fn check_algo(&self, dtype: DType, dims: (usize, usize), max_tokens: usize) -> Result<()> {
        self.0.check_algo(dtype, dims, max_tokens)
    }

    /// Which kernel [`Self::forward`] runs for these tensors: never [`Algo::Auto`].
    ///
    /// # Errors
    /// As [`Self::forward`].
    pub fn algo(&self, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Algo> {
        self.0.algo(q, k, v)
    }
}

custom_op3!(GdnPrefill);

/// Any number of tokens of each sequence through the gated delta rule (formula: [`crate::gdn_decode_in_place`]),
/// starting from `state` and leaving the new one in it.
///
/// | tensor | without `cu_seqlens` | with `cu_seqlens` (packed) | dtype |
/// |---|---|---|---|
/// | `q`, `k` | `[batch, tokens, HK, K]` | `[tokens, HK, K]` | f32, bf16 or f16 |
/// | `v` | `[batch, tokens, HV, V]` | `[tokens, HV, V]` | as q |
/// | `gates.a`, `gates.b` | `[batch, tokens, HV]` | `[tokens, HV]` | f32, bf16 or f16 |
/// | `gates.a_log`, `gates.dt_bias` | `[HV]` | `[HV]` | f32 |
/// | `state` | `[batch, HV, V, K]` | `[sequences, HV, V, K]` | f32 or bf16 |
/// | result o | `[batch, tokens, HV, V]` | `[tokens, HV, V]` | as q |
///
/// The last two dimensions of q, k and v may be merged into one. Lengths may be zero, which leaves a state as it is.
/// A sequence cut in two and fed with the same state gives what it gives whole, up to rounding: sums are f32, products
/// too but for [`Algo::ChunkedSm80`] and [`Algo::ChunkedSm90`], and a bf16 state is rounded to nearest even at the end
/// of each call.
///
/// # Errors
/// When a rank, shape, dtype or device does not fit, `cu_seqlens` does not end at the number of tokens, or an input
/// shares its storage with the state; the message names the argument, what was expected and what came.
pub fn gdn_prefill_in_place(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    gates: &Gates,
    state: &Tensor,
    cu_seqlens: Option<&CuSeqlens>,
    options: RuleOptions,
) -> Result<Tensor> {
    GdnPrefill::new(gates.clone(), state, cu_seqlens, options)?.forward(q, k, v)
}

/// [`gdn_prefill_in_place`] on a copy of the state: returns o and the new state.
///
/// # Errors
/// As [`gdn_prefill_in_place`].
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
    let out = gdn_prefill_in_place(q, k, v, gates, &state, cu_seqlens, options)?;
    Ok((out, state))
}
