//! The op of a step and what it holds.

use crate::algo::Algo;
use crate::norm::{GateActivation, GatedRmsNorm};
use crate::rule::{Gates, Rule, RuleOptions};
use crate::state::Ring;
use candle_core::{bail, Result, Tensor};
use candle_gdn_core::check::*;
use candle_gdn_core::device::{Launch, Working};
use candle_gdn_core::{CuSeqlens, Slots};

pub(super) const OP: &str = "gdn_step";

/// A decode step of a layer between its two projections, as a [`CustomOp3`](candle_core::CustomOp3) over
/// (qkv, z, conv_weight); see [`gdn_step_in_place`](super::gdn_step_in_place) for shapes. The op holds both states and updates them when it is applied.
///
/// It has no backward pass: inputs, gates and states that are variables, or were computed from one, are refused.
#[derive(Debug, Clone)]
pub struct GdnStep {
    /// Its kernel is that of a step whose parts run one by one.
    pub(super) rule: Rule,
    pub(super) algo: Algo,
    pub(super) conv_state: Tensor,
    pub(super) norm_weight: Tensor,
    pub(super) norm_eps: f64,
    pub(super) gate: GateActivation,
    /// With one the state is only read, and what would be written is appended to it.
    pub(super) ring: Option<Ring>,
    pub(super) launch: Launch,
}

/// Constants of a [`GdnStep`]: those of the rule and of the gated norm. The default is Qwen3-Next's.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub struct StepOptions {
    /// Those of the rule; its `algo` is the step's.
    pub rule: RuleOptions,
    /// Added to the mean square in the gated norm. Default 1e-6.
    pub norm_eps: f64,
    /// Activation of the output gate z. Default SiLU.
    pub gate: GateActivation,
}

impl Default for StepOptions {
    fn default() -> Self {
        Self { rule: RuleOptions::default(), norm_eps: 1e-6, gate: GateActivation::Silu }
    }
}

impl StepOptions {
    /// The default with some fields changed.
    pub fn with(change: impl FnOnce(&mut Self)) -> Self {
        let mut options = Self::default();
        change(&mut options);
        options
    }
}

impl GdnStep {
    /// Checks the gates, the norm's weight `[V]` and the states: `conv_state` `[batch, width - 1, channels]`, `state`
    /// `[batch, HV, V, K]`.
    ///
    /// # Errors
    /// When a dtype, shape or device does not fit; the message names the argument.
    pub fn new(
        gates: Gates,
        norm_weight: &Tensor,
        conv_state: &Tensor,
        state: &Tensor,
        options: StepOptions,
    ) -> Result<Self> {
        let _working = Working::new(state.device());
        let rule = Rule::new(OP, gates.into(), state, options.rule).checked()?;
        check_float(OP, "conv_state", conv_state.dtype())?;
        if conv_state.rank() != 3 {
            bail!("{OP}: conv_state: expected shape [slots, width - 1, channels], got {:?}", conv_state.dims());
        }
        check_state_strides(OP, "conv_state", conv_state.layout())?;
        check_weight_dtype(OP, "norm_weight", norm_weight.dtype(), conv_state.dtype())?;
        if norm_weight.dims() != [state.dims()[2]] {
            bail!(
                "{OP}: norm_weight: expected shape [{}], got {:?}; the state is [slots, value_heads, value_dim, key_dim], {:?}",
                state.dims()[2],
                norm_weight.dims(),
                state.dims()
            );
        }
        for (arg, tensor) in [("conv_state", conv_state), ("norm_weight", norm_weight)] {
            Arg::tensor(arg, tensor).check_place(OP, state.device(), &[("the state", state)])?;
            check_untracked(OP, arg, tensor)?;
        }
        for (arg, tensor) in rule.gates.tensors().chain([("norm_weight", norm_weight)]) {
            check_not_in(OP, arg, storage_key(tensor), "conv_state", conv_state)?;
        }
        GatedRmsNorm::new(options.norm_eps, options.gate).map_err(|_| {
            candle_core::Error::msg(format!(
                "{OP}: norm_eps: expected a finite value of at least 0, got {}",
                options.norm_eps
            ))
        })?;
        Ok(Self::unchecked(rule, &norm_weight.contiguous()?, conv_state, options))
    }

    /// An op on arguments that a layer has checked.
    pub(crate) fn unchecked(mut rule: Rule, norm_weight: &Tensor, conv_state: &Tensor, options: StepOptions) -> Self {
        let algo = options.rule.algo;
        rule.options.algo = algo.of_rule();
        Self {
            rule,
            algo,
            conv_state: conv_state.clone(),
            norm_weight: norm_weight.clone(),
            norm_eps: options.norm_eps,
            gate: options.gate,
            ring: None,
            launch: Launch::default(),
        }
    }

    /// The rule of a step on arguments that a layer has checked.
    pub(crate) fn unchecked_rule(gates: Gates, state: &Tensor, options: RuleOptions) -> Rule {
        Rule::new(OP, gates.into(), state, options)
    }

    /// Sequence `n` uses slot `slots[n]` of both states, or reads one slot and writes another; see
    /// [`GdnDecode::with_slots`](crate::ops::GdnDecode::with_slots).
    pub fn with_slots(mut self, slots: impl Into<Slots>) -> Self {
        self.rule.slots = Some(slots.into());
        self
    }

    /// The tokens of all sequences are packed along one dimension: qkv is `[tokens, channels]`, z and the result
    /// `[tokens, HV * V]`, the gates `[tokens, HV]`. Sequences have up to 16 tokens each and may be empty.
    ///
    /// # Errors
    /// When `cu_seqlens` is not on the state's device.
    pub fn with_cu_seqlens(mut self, cu_seqlens: &CuSeqlens) -> Result<Self> {
        check_device(OP, "cu_seqlens", cu_seqlens.tensor(), self.rule.state.device())?;
        self.rule.cu_seqlens = Some(cu_seqlens.clone());
        Ok(self)
    }

    /// The state is only read, and the tokens are appended to the rings of its slots, whose spans the caller moves; the
    /// convolution's state is any memory of its shape. Up to 16 tokens a sequence.
    pub(crate) fn with_ring(mut self, ring: &Ring) -> Self {
        self.ring = Some(ring.clone());
        self
    }

    /// How the kernel is launched. With `overlap` it may read the weights, the old states and the slots, which are u32,
    /// while the kernel before it on the stream still runs, which must therefore write none of them.
    pub(crate) fn launched(mut self, launch: &Launch) -> Self {
        self.launch = launch.clone();
        self
    }

    /// The tensors as the kernels read them, copied only where their rows are not contiguous, or where the sequences and
    /// tokens of z do not count through.
    pub(super) fn prepare(&self, qkv: &Tensor, z: &Tensor, conv_weight: &Tensor) -> Result<[Tensor; 3]> {
        let _working = Working::new(self.rule.state.device());
        for (arg, tensor) in [("qkv", qkv), ("z", z), ("conv_weight", conv_weight)] {
            check_device(OP, arg, tensor, self.rule.state.device())?;
        }
        let z = uniform_tokens(z, qkv.rank().saturating_sub(1))?;
        let (mut qkv, mut z, conv_weight) = (dense_rows(qkv)?, z, conv_weight.contiguous()?);
        if self.ring.is_some() {
            // Its kernel reads rows at multiples of 16 bytes.
            for x in [&mut qkv, &mut z] {
                if !on_16_bytes(x) {
                    *x = x.force_contiguous()?;
                }
            }
        }
        Ok([qkv, z, conv_weight])
    }
}

/// Whether all rows begin at multiples of 16 bytes.
fn on_16_bytes(x: &Tensor) -> bool {
    let (layout, each) = (x.layout(), 16 / x.dtype().size_in_bytes());
    let Some((_, lead)) = layout.stride().split_last() else { return true };
    layout.start_offset().is_multiple_of(each) && lead.iter().all(|stride| stride.is_multiple_of(each))
}
