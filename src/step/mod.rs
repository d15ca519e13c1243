//! What a layer does between its two projections, for a few tokens: convolution, rule and gated norm as one op. It runs as one
//! kernel on CUDA where there is one for the call, else as the three one after the other.

mod call;
#[cfg(feature = "cuda")]
mod cuda;
mod op;
mod ring_cpu;
#[cfg(feature = "cuda")]
mod ring_cuda;

pub use op::{GdnStep, StepOptions};

use crate::algo::Algo;
use crate::conv::CausalConv1d;
use crate::norm::GatedRmsNorm;
use crate::rule::Gates;
#[cfg(feature = "cuda")]
use crate::rule::{cuda::check_choice, RulePlan};
#[cfg(feature = "cuda")]
use call::StepPlan;
use candle_core::{bail, Layout, Result, Storage, Tensor};
use candle_gdn_core::check::*;
use candle_gdn_core::device::apply3;
use candle_gdn_core::{cpu_slots, custom_op};
use op::OP;

impl GdnStep {
    /// Applies the op: `[batch, HV * V]`, or with several tokens `[batch, tokens, HV * V]`, in qkv's dtype.
    ///
    /// # Errors
    /// When a dtype, shape or device does not fit, tensors share a storage that one of them is written in, or one is tracked
    /// for gradients.
    pub fn forward(&self, qkv: &Tensor, z: &Tensor, conv_weight: &Tensor) -> Result<Tensor> {
        let [qkv, z, conv_weight] = self.prepare(qkv, z, conv_weight)?;
        let args = [("qkv", &qkv), ("z", &z), ("conv_weight", &conv_weight)];
        apply3(self, self.launch.arena.as_ref(), args)
    }

    /// How [`Self::forward`] runs for these tensors: a kernel of the step, or [`Algo::Unfused`].
    ///
    /// # Errors
    /// As [`Self::forward`].
    pub fn algo(&self, qkv: &Tensor, z: &Tensor, conv_weight: &Tensor) -> Result<Algo> {
        let [qkv, z, conv_weight] = self.prepare(qkv, z, conv_weight)?;
        self.choice(&qkv, &z, &conv_weight)
    }

    /// How a call on these tensors runs.
    pub(super) fn choice(&self, qkv: &Tensor, z: &Tensor, conv_weight: &Tensor) -> Result<Algo> {
        let args = [("qkv", qkv), ("z", z), ("conv_weight", conv_weight)];
        let plan = self.plan(args.map(|(name, tensor)| Arg::tensor(name, tensor)))?;
        #[cfg(feature = "cuda")]
        if self.may_fuse(&plan) {
            let guards = args.map(|(_, tensor)| tensor.storage_and_layout().0);
            if let [Storage::Cuda(x), Storage::Cuda(z), Storage::Cuda(w)] = [&*guards[0], &*guards[1], &*guards[2]] {
                return match cuda::StepCall::new(self, &plan, [x, z, w])?.choice()? {
                    Some(algo) => Ok(algo),
                    None => self.unfused(),
                };
            }
        }
        drop(plan);
        Ok(Algo::Unfused)
    }

    /// Whether to ask for a fused kernel.
    #[cfg(feature = "cuda")]
    fn may_fuse(&self, plan: &StepPlan) -> bool {
        let RulePlan { sizes, seqs, .. } = &plan.rule;
        self.algo.may_fuse()
            && crate::plan::has_fused_step(sizes.key_dim, sizes.value_dim, plan.conv_width)
            && seqs.total_tokens > 0
    }

    /// What runs where no fused kernel supports the call.
    #[cfg(feature = "cuda")]
    fn unfused(&self) -> Result<Algo> {
        let besides = match self.algo {
            Algo::StepWhole => ", shared memory for all tokens of a key head's value heads",
            Algo::StepSplit => {
                ", compute capability 9.0, 1 to 4 value heads a key head (1 or 2 of V 192), gates in f32 or as qkv"
            }
            Algo::StepHeads => ", compute capability 9.0, 2 to 8 value heads a key head",
            _ => return Ok(Algo::Unfused),
        };
        bail!(
            "{OP}: algo: {:?} does not support these tensors on this device: expected rows of qkv, z and conv_state at \
             multiples of 4 elements, state and conv_weight at multiples of 16 bytes{besides}; Auto supports any",
            self.algo
        )
    }

    fn conv(&self) -> CausalConv1d {
        CausalConv1d::unchecked(&self.conv_state, self.rule.cu_seqlens.as_ref(), self.rule.slots.as_ref(), true)
    }

    fn norm(&self) -> Result<GatedRmsNorm> {
        GatedRmsNorm::new(self.norm_eps, self.gate)
    }

    fn on_cpu(&self, [x, z, w]: [CpuArg<'_>; 3]) -> CpuOutput {
        let plan = self.plan([Arg::cpu("qkv", x), Arg::cpu("z", z), Arg::cpu("conv_weight", w)])?;
        // Before anything is written.
        cpu_slots(OP, self.rule.slots.as_ref(), plan.rule.seqs.num_slots)?;
        let (x, [q, k, v]) = (x.0, &plan.columns);
        let (o, o_shape) = match (&self.ring, &self.rule.slots) {
            (Some(ring), Some(slots)) => {
                ring_cpu::append_inputs(ring, &self.conv_state, slots, (x, &plan), self.rule.cu_seqlens.as_ref())?;
                let (y, _) =
                    self.conv().with_slots(slots.written(plan.rule.seqs.num_slots)?).on_cpu([(x, &plan.conv_x), w])?;
                (ring_cpu::run(ring, &self.rule, &plan.rule, &y)?, plan.rule.out_shape.clone())
            }
            _ => {
                let (y, _) = self.conv().on_cpu([(x, &plan.conv_x), w])?;
                self.rule.on_cpu(plan.lead, [(&y, q), (&y, k), (&y, v)])?
            }
        };
        let (norm_weight, layout) = self.norm_weight.storage_and_layout();
        let Storage::Cpu(norm_weight) = &*norm_weight else { bail!("{OP}: norm_weight: expected a CPU tensor") };
        let (out, _) = self.norm()?.on_cpu([(&o, &Layout::contiguous(o_shape)), z, (norm_weight, layout)])?;
        Ok((out, plan.out_shape))
    }

    #[cfg(feature = "cuda")]
    fn on_cuda(&self, [x, z, w]: [CudaArg<'_>; 3]) -> CudaOutput {
        let plan = self.plan([Arg::cuda("qkv", x), Arg::cuda("z", z), Arg::cuda("conv_weight", w)])?;
        let call = || cuda::StepCall::new(self, &plan, [x.0, z.0, w.0]);
        if let Some(ring) = &self.ring {
            return Ok((ring_cuda::run(&call()?, ring)?, plan.out_shape));
        }
        if self.may_fuse(&plan) {
            if let Some(out) = call()?.run()? {
                return Ok((out, plan.out_shape));
            }
            self.unfused()?;
        }
        // Before the convolution writes its state.
        check_choice(&self.rule, &plan.rule, x.0)?;
        let (y, _) = self.conv().on_cuda([(x.0, &plan.conv_x), w])?;
        let [q, k, v] = &plan.columns;
        let (o, o_shape) = self.rule.on_cuda(plan.lead, [(&y, q), (&y, k), (&y, v)])?;
        let (norm_weight, layout) = self.norm_weight.storage_and_layout();
        let Storage::Cuda(norm_weight) = &*norm_weight else { bail!("{OP}: norm_weight: expected a CUDA tensor") };
        let (out, _) = self.norm()?.on_cuda([(&o, &Layout::contiguous(o_shape)), z, (norm_weight, layout)])?;
        Ok((out, plan.out_shape))
    }
}

custom_op!(CustomOp3 for GdnStep, OP, x x_layout, z z_layout, w w_layout);

/// A decode step of a layer between its two projections: [`causal_conv1d`](crate::ops::causal_conv1d) with SiLU, the gated
/// delta rule ([`gdn_decode_in_place`](crate::ops::gdn_decode_in_place) has its formula) and
/// [`gated_rms_norm`](crate::ops::gated_rms_norm), updating both states in place:
///
/// ```text
/// q, k, v = silu(causal_conv1d(qkv))
/// o = gated_delta_rule(q, k, v, a, b)
/// out = rms_norm(o) * act(z)
/// ```
///
/// On CUDA this is one kernel for the sizes of [`Algo::StepWhole`] and a convolution of width 4, and
/// nothing is rounded between its parts; otherwise and on the CPU the three run one after the other.
///
/// | tensor | one token a sequence | up to 16 tokens a sequence | dtype |
/// |---|---|---|---|
/// | `qkv` | `[batch, channels]` | `[batch, tokens, channels]` | f32, bf16 or f16 |
/// | `z` | `[batch, HV * V]` | `[batch, tokens, HV * V]` | as qkv |
/// | `conv_weight` | `[channels, width]`, width 2 to 8 | same | as qkv, or f32 |
/// | `gates.a`, `gates.b` | `[batch, HV]` | `[batch, tokens, HV]` | f32, bf16 or f16 |
/// | `gates.a_log`, `gates.dt_bias` | `[HV]` | same | f32 |
/// | `norm_weight` | `[V]` | same | as qkv, or f32 |
/// | `conv_state` | `[batch, width - 1, channels]`, the last inputs, oldest first | same | as qkv |
/// | `state` | `[batch, HV, V, K]` | same | f32 or bf16 |
/// | result | `[batch, HV * V]` | `[batch, tokens, HV * V]` | as qkv |
///
/// `channels` is `2 * HK * K + HV * V`: q, k and v, each by head. The last dimension of z may be split into `[HV, V]`.
/// qkv, z and the gates may be strided views of one projection, and the states views of larger pools. K and V are 1 to
/// 256, HK divides HV. A padding row's output is zero where its z is finite and `norm_eps` is above 0.
///
/// # Errors
/// When a rank, shape, dtype or device does not fit, there are more than 16 tokens a sequence, an input shares its
/// storage with a state, or the states with each other, or a tensor is tracked for gradients, since the ops that it fuses are those with a backward pass;
/// the message names the argument, what was expected and what came.
#[allow(clippy::too_many_arguments)]
pub fn gdn_step_in_place(
    qkv: &Tensor,
    z: &Tensor,
    conv_weight: &Tensor,
    gates: &Gates,
    norm_weight: &Tensor,
    conv_state: &Tensor,
    state: &Tensor,
    options: StepOptions,
) -> Result<Tensor> {
    GdnStep::new(gates.clone(), norm_weight, conv_state, state, options)?.forward(qkv, z, conv_weight)
}
