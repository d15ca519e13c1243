//! Any number of tokens of each sequence.

use super::call::{Rule, RuleGates};
use super::dispatch::rule_op;
use super::options::{Gates, RuleOptions};
use crate::algo::Algo;
use candle_core::{Layout, Result, Tensor};
use candle_gdn_core::check::*;
use candle_gdn_core::{CuSeqlens, Slots};

const OP: &str = "gdn_prefill";

/// The gated delta rule over any number of tokens of each sequence, as a
/// [`CustomOp3`](candle_core::CustomOp3) over (q, k, v); see
/// [`gdn_prefill_in_place`] for shapes. The op holds the state and updates it when it is applied.
///
/// It has no backward pass: inputs, gates and states that are variables, or were computed from one, are refused. To train, use
/// [`gdn_rule_diff`](super::gdn_rule_diff).
#[derive(Debug, Clone)]
pub struct GdnPrefill(Rule);

impl GdnPrefill {
    /// Checks the gates and the state. With `cu_seqlens` the tokens of all sequences are packed along one dimension.
    ///
    /// # Errors
    /// When a dtype, shape or device does not fit; the message names the argument.
    pub fn new(gates: Gates, state: &Tensor, cu_seqlens: Option<&CuSeqlens>, options: RuleOptions) -> Result<Self> {
        Self::of(Rule::new(OP, gates.into(), state, options), cu_seqlens).0.checked().map(Self)
    }

    /// With gates that the caller computed: the log decay (0 or less) and beta, both `[.., HV]` with the leading dimensions
    /// of v, in one of f32, bf16 and f16; `beta_scale` is not applied. For layers whose gates have another formula. All kernels but
    /// [`Algo::Recurrent128`] and [`Algo::Decode`] support them.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn with_ready_gates(
        log_decay: Tensor,
        beta: Tensor,
        state: &Tensor,
        cu_seqlens: Option<&CuSeqlens>,
        options: RuleOptions,
    ) -> Result<Self> {
        let gates = RuleGates { a: log_decay, b: beta, raw: None };
        Self::of(Rule::new(OP, gates, state, options), cu_seqlens).0.checked().map(Self)
    }

    /// An op on arguments that a layer has checked.
    pub(crate) fn unchecked(
        gates: Gates,
        state: &Tensor,
        cu_seqlens: Option<&CuSeqlens>,
        slots: Option<&Slots>,
        options: RuleOptions,
    ) -> Self {
        let mut op = Self::of(Rule::new(OP, gates.into(), state, options), cu_seqlens);
        op.0.slots = slots.cloned();
        op
    }

    fn of(mut rule: Rule, cu_seqlens: Option<&CuSeqlens>) -> Self {
        rule.cu_seqlens = cu_seqlens.cloned();
        Self(rule)
    }

    /// Sequence `n` uses slot `slots[n]` of the state, or reads one slot and writes another; see
    /// [`GdnDecode::with_slots`](super::GdnDecode::with_slots).
    pub fn with_slots(mut self, slots: impl Into<Slots>) -> Self {
        self.0.slots = Some(slots.into());
        self
    }

    /// Every sequence begins at a zero state: the state is only written, whatever it held. All kernels but
    /// [`Algo::Recurrent128`] and [`Algo::Decode`] support this.
    pub fn without_initial_state(mut self) -> Self {
        self.0.from_zeros = true;
        self
    }

    /// Applies the op: o, `[batch, tokens, HV, V]` or packed `[tokens, HV, V]`, in q's dtype.
    ///
    /// # Errors
    /// When a dtype, shape or device does not fit, tensors share a storage that one of them is written in, or one is tracked
    /// for gradients.
    pub fn forward(&self, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor> {
        self.0.forward(self, q, k, v)
    }

    /// Refuses what [`Self::forward`] refuses of q, k and v that are columns, first and count, of a contiguous tensor like `qkv`.
    pub(crate) fn check_columns(&self, qkv: &Tensor, columns: [(usize, usize); 3]) -> Result<()> {
        let (all, last) = (Layout::contiguous(qkv.dims()), qkv.rank() - 1);
        let [q, k, v] = columns.map(|(first, count)| all.narrow(last, first, count));
        let plan = self.0.plan_layouts(self.lead(), qkv.dtype(), [&q?, &k?, &v?])?;
        #[cfg(feature = "cuda")]
        if let candle_core::Storage::Cuda(like) = &*qkv.storage_and_layout().0 {
            super::cuda::check_choice(&self.0, &plan, like)?;
        }
        drop(plan);
        Ok(())
    }

    /// Which kernel [`Self::forward`] runs for these tensors: never [`Algo::Auto`].
    ///
    /// # Errors
    /// As [`Self::forward`].
    pub fn algo(&self, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Algo> {
        self.0.algo(self.lead(), q, k, v)
    }

    fn lead(&self) -> Lead {
        Lead::of_tokens(self.0.cu_seqlens.as_ref())
    }
}

rule_op!(GdnPrefill);

/// Any number of tokens of each sequence through the gated delta rule (formula: [`gdn_decode_in_place`](super::gdn_decode_in_place)),
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
/// When a rank, shape, dtype or device does not fit, `cu_seqlens` does not end at the number of tokens, an input
/// shares its storage with the state, or a tensor is tracked for gradients, since [`gdn_rule_diff`](super::gdn_rule_diff) is the one with a backward pass; the message names
/// the argument, what was expected and what came.
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
