//! One token of each sequence.

use super::call::{Rule, RuleGates};
use super::dispatch::rule_op;
use super::options::{Gates, RuleOptions};
use crate::algo::Algo;
use candle_core::{Result, Tensor};
use candle_gdn_core::check::*;
use candle_gdn_core::Slots;

const OP: &str = "gdn_decode";

/// The gated delta rule for one new token of each sequence, as a
/// [`CustomOp3`](candle_core::CustomOp3) over (q, k, v); see
/// [`gdn_decode_in_place`] for shapes. The op holds the state and updates it when it is applied.
///
/// It has no backward pass: inputs, gates and states that are variables, or were computed from one, are refused. To train, use
/// [`gdn_rule_diff`](super::gdn_rule_diff).
#[derive(Debug, Clone)]
pub struct GdnDecode(Rule);

impl GdnDecode {
    /// Checks the gates and the state.
    ///
    /// # Errors
    /// When a dtype, shape or device does not fit; the message names the argument.
    pub fn new(gates: Gates, state: &Tensor, options: RuleOptions) -> Result<Self> {
        Rule::new(OP, gates.into(), state, options).checked().map(Self)
    }

    /// With gates that the caller computed; see [`GdnPrefill::with_ready_gates`](super::GdnPrefill::with_ready_gates).
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn with_ready_gates(log_decay: Tensor, beta: Tensor, state: &Tensor, options: RuleOptions) -> Result<Self> {
        let gates = RuleGates { a: log_decay, b: beta, raw: None };
        Rule::new(OP, gates, state, options).checked().map(Self)
    }

    /// Row `n` of the batch uses slot `slots[n]` of the state, which may then hold any number of slots. With [`Slots`]
    /// it may read one slot and write another.
    ///
    /// A tensor of slots is u32 or i64, `[batch]`, on the state's device. [`NO_SLOT`](candle_gdn_core::NO_SLOT) (-1 in i64) marks
    /// a padding row: it reads and writes no state and its output is zero. On the CPU a slot out of range or used twice
    /// is an error; on CUDA the host does not see the values of a tensor: one out of range is treated as padding, and
    /// one used twice leaves that slot undefined.
    pub fn with_slots(mut self, slots: impl Into<Slots>) -> Self {
        self.0.slots = Some(slots.into());
        self
    }

    /// Applies the op: o, `[batch, HV, V]` in q's dtype.
    ///
    /// # Errors
    /// When a dtype, shape or device does not fit, tensors share a storage that one of them is written in, or one is tracked
    /// for gradients.
    pub fn forward(&self, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor> {
        self.0.forward(self, q, k, v)
    }

    /// Which kernel [`Self::forward`] runs for these tensors: never [`Algo::Auto`].
    ///
    /// # Errors
    /// As [`Self::forward`].
    pub fn algo(&self, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Algo> {
        self.0.algo(self.lead(), q, k, v)
    }

    fn lead(&self) -> Lead {
        Lead::Decode
    }
}

rule_op!(GdnDecode);

/// One token of each sequence through the gated delta rule (Yang et al., *Gated Delta Networks*, arXiv 2412.06464),
/// updating `state` in place.
///
/// With `g = -exp(a_log) * softplus(a + dt_bias)`, `beta = sigmoid(b)`, q and k divided by their L2 norm and q times
/// `K^-0.5` (see [`RuleOptions`]):
///
/// ```text
/// S <- exp(g) S;   d = beta (v - S k);   S <- S + d k^T;   o = S q
/// ```
///
/// | tensor | shape | dtype |
/// |---|---|---|
/// | `q`, `k` | `[batch, HK, K]` or `[batch, HK * K]` | f32, bf16 or f16 |
/// | `v` | `[batch, HV, V]` or `[batch, HV * V]` | as q |
/// | `gates.a`, `gates.b` | `[batch, HV]` | f32, bf16 or f16 |
/// | `gates.a_log`, `gates.dt_bias` | `[HV]` | f32 |
/// | `state` | `[batch, HV, V, K]` | f32 or bf16 |
/// | result o | `[batch, HV, V]` | as q |
///
/// HK divides HV; value head `h` reads key head `h / (HV / HK)`. K and V are 1 to 256. q, k, v and the gates may be
/// strided views of one projection: they are read where they lie. `state` may be a view of a larger pool. Arithmetic
/// is f32 whatever the state is stored in: a bf16 state is rounded to nearest even once a call, see
/// [`crate::GatedDeltaNet::new_state_as`] for what that saves and costs.
///
/// # Errors
/// When a rank, shape, dtype or device does not fit, an input shares its storage with the state, or a tensor is tracked for
/// gradients, since [`gdn_rule_diff`](super::gdn_rule_diff) is the one with a backward pass; the message names the argument, what was expected and what came.
pub fn gdn_decode_in_place(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    gates: &Gates,
    state: &Tensor,
    options: RuleOptions,
) -> Result<Tensor> {
    GdnDecode::new(gates.clone(), state, options)?.forward(q, k, v)
}
