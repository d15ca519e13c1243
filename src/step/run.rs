//! How a step runs: as one kernel on CUDA where that takes it, else as convolution, rule and norm one after the other.

use super::check::storage_dtype;
use super::options::StepAlgo;
#[cfg(feature = "cuda")]
use super::plan::{RulePlan, StepPlan};
use super::ring::Window;
use super::ring_cpu::append_inputs;
#[cfg(feature = "cuda")]
use super::sequences::CuSeqlens;
use super::slots::cpu_slots;
#[cfg(feature = "cuda")]
use super::slots::Slots;
#[cfg(feature = "cuda")]
use super::step::fused_sizes;
use super::step::{GdnStep, OP};
use candle_core::{bail, CpuStorage, CustomOp2, CustomOp3, Layout, Result, Shape, Storage, Tensor};

impl GdnStep {
    /// How [`Self::forward`] runs for these tensors: never [`StepAlgo::Auto`].
    ///
    /// # Errors
    /// As [`Self::forward`].
    pub fn algo(&self, qkv: &Tensor, z: &Tensor, conv_weight: &Tensor) -> Result<StepAlgo> {
        let [qkv, z, conv_weight] = self.prepare(qkv, z, conv_weight)?;
        let call = self.call(qkv.layout(), z.layout(), conv_weight.layout())?;
        #[cfg(feature = "cuda")]
        if self.may_fuse(&call.plan) {
            let guards = [qkv.storage_and_layout().0, z.storage_and_layout().0, conv_weight.storage_and_layout().0];
            if let [Storage::Cuda(x), Storage::Cuda(z), Storage::Cuda(w)] = [&*guards[0], &*guards[1], &*guards[2]] {
                let slots = self.rule.slots.as_ref().map(Slots::in_u32).transpose()?;
                let args = self.cuda_args(&call.plan, slots.as_ref(), [x, z, w]);
                return match crate::cuda::step::choice(&args, &self.conv_state, &self.rule.state)? {
                    Some(algo) => Ok(algo),
                    None => self.not_fused(),
                };
            }
        }
        drop(call);
        Ok(StepAlgo::Composed)
    }

    /// Whether a fused kernel is worth asking for.
    #[cfg(feature = "cuda")]
    fn may_fuse(&self, plan: &StepPlan) -> bool {
        let RulePlan { dims, seqs, .. } = &plan.rule;
        self.options.algo != StepAlgo::Composed
            && fused_sizes(dims.key_dim, dims.value_dim, plan.conv_width)
            && seqs.total_tokens > 0
    }

    /// What runs where no fused kernel takes the call.
    #[cfg(feature = "cuda")]
    fn not_fused(&self) -> Result<StepAlgo> {
        let besides = match self.options.algo {
            StepAlgo::Auto | StepAlgo::Composed => return Ok(StepAlgo::Composed),
            StepAlgo::Whole => "",
            StepAlgo::Split => ", compute capability 9.0, 1 to 4 value heads a key head, gates in f32 or as qkv",
            StepAlgo::Heads => ", compute capability 9.0, 2 to 8 value heads a key head",
        };
        bail!(
            "{OP}: algo: {:?} does not take these tensors on this device: expected rows of qkv, z and conv_state at \
             multiples of 4 elements, state and conv_weight at multiples of 16 bytes{besides}; Auto takes any",
            self.options.algo
        )
    }

    #[cfg(feature = "cuda")]
    fn cuda_args<'a>(
        &'a self,
        plan: &'a StepPlan,
        slots: Option<&'a Slots>,
        [x, z, conv_weight]: [&'a candle_core::CudaStorage; 3],
    ) -> crate::cuda::step::StepArgs<'a> {
        crate::cuda::step::StepArgs {
            name: OP,
            plan,
            x,
            z,
            conv_weight,
            norm_weight: &self.norm_weight,
            gates: &self.rule.gates,
            slots,
            cu_seqlens: self.rule.cu_seqlens.as_ref().map(CuSeqlens::tensor),
        }
    }
}

impl CustomOp3 for GdnStep {
    fn name(&self) -> &'static str {
        OP
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        xl: &Layout,
        z: &CpuStorage,
        zl: &Layout,
        w: &CpuStorage,
        wl: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        for (arg, storage) in [("qkv", x), ("z", z), ("conv_weight", w)] {
            self.check_input(arg, storage_dtype(storage), std::ptr::from_ref(storage).addr())?;
        }
        let call = self.call(xl, zl, wl)?;
        // Before anything is written.
        cpu_slots(OP, self.rule.slots.as_ref(), call.plan.rule.seqs.num_slots)?;
        let y = match (&self.ring, &self.rule.slots) {
            (Some(ring), Some(slots)) => {
                ring.window(&self.conv_state, slots, Window::ToState)?;
                append_inputs(ring, x, &call.plan, &call.rule)?;
                self.conv.clone().with_slots(slots.written()).cpu_fwd(x, &call.conv_x, w, wl)?.0
            }
            _ => self.conv.cpu_fwd(x, &call.conv_x, w, wl)?.0,
        };
        let [q, k, v] = &call.columns;
        let (o, o_shape) = match &self.ring {
            Some(ring) => call.rule.cpu_replay(ring, [(&y, q), (&y, k), (&y, v)])?,
            None => call.rule.cpu_fwd([(&y, q), (&y, k), (&y, v)])?,
        };
        let (norm_weight, layout) = self.norm_weight.storage_and_layout();
        let Storage::Cpu(norm_weight) = &*norm_weight else { bail!("{OP}: norm_weight: expected a CPU tensor") };
        let (out, _) = self.norm.cpu_fwd(&o, &Layout::contiguous(o_shape), z, zl, norm_weight, layout)?;
        Ok((out, call.out_shape))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        x: &candle_core::CudaStorage,
        xl: &Layout,
        z: &candle_core::CudaStorage,
        zl: &Layout,
        w: &candle_core::CudaStorage,
        wl: &Layout,
    ) -> Result<(candle_core::CudaStorage, Shape)> {
        use candle_core::backend::BackendStorage;
        for (arg, storage) in [("qkv", x), ("z", z), ("conv_weight", w)] {
            self.check_input(arg, storage.dtype(), std::ptr::from_ref(storage).addr())?;
        }
        let call = self.call(xl, zl, wl)?;
        if let Some(ring) = &self.ring {
            let slots = self.rule.slots.as_ref().map(Slots::in_u32).transpose()?;
            let args = self.cuda_args(&call.plan, slots.as_ref(), [x, z, w]);
            return Ok((crate::cuda::ring::step(&args, ring, &self.rule.state)?, call.out_shape));
        }
        if self.may_fuse(&call.plan) {
            let slots = self.rule.slots.as_ref().map(Slots::in_u32).transpose()?;
            let args = self.cuda_args(&call.plan, slots.as_ref(), [x, z, w]);
            if let Some(out) = crate::cuda::step::run(&args, &self.conv_state, &self.rule.state)? {
                return Ok((out, call.out_shape));
            }
            self.not_fused()?;
        }
        let (y, _) = self.conv.cuda_fwd(x, &call.conv_x, w, wl)?;
        let [q, k, v] = &call.columns;
        let (o, o_shape) = call.rule.cuda_fwd([(&y, q), (&y, k), (&y, v)])?;
        let (norm_weight, layout) = self.norm_weight.storage_and_layout();
        let Storage::Cuda(norm_weight) = &*norm_weight else { bail!("{OP}: norm_weight: expected a CUDA tensor") };
        let (out, _) = self.norm.cuda_fwd(&o, &Layout::contiguous(o_shape), z, zl, norm_weight, layout)?;
        Ok((out, call.out_shape))
    }
}
