//! Which side runs a rule, the CPU's or CUDA's.

use super::call::Rule;
use crate::algo::Algo;
use candle_core::{CustomOp3, Result, Tensor};
use candle_gdn_core::check::*;
use candle_gdn_core::device::{apply3, Working};

impl Rule {
    /// Runs the op on q, k and v, copying only those whose rows are not contiguous.
    pub fn forward<C: CustomOp3>(&self, op: &C, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor> {
        let _working = Working::new(self.state.device());
        for (arg, tensor) in [("q", q), ("k", k), ("v", v)] {
            check_device(op.name(), arg, tensor, self.state.device())?;
        }
        apply3(op, None, [("q", &dense_rows(q)?), ("k", &dense_rows(k)?), ("v", &dense_rows(v)?)])
    }

    pub fn on_cpu(&self, lead: Lead, [q, k, v]: [CpuArg<'_>; 3]) -> CpuOutput {
        let plan = self.plan(lead, [Arg::cpu("q", q), Arg::cpu("k", k), Arg::cpu("v", v)])?;
        Ok((super::cpu::run(self, &plan, [q.0, k.0, v.0])?, plan.out_shape))
    }

    #[cfg(feature = "cuda")]
    pub fn on_cuda(&self, lead: Lead, [q, k, v]: [CudaArg<'_>; 3]) -> CudaOutput {
        let plan = self.plan(lead, [Arg::cuda("q", q), Arg::cuda("k", k), Arg::cuda("v", v)])?;
        Ok((super::cuda::run(self, &plan, [q.0, k.0, v.0])?, plan.out_shape))
    }

    /// The variant that [`Self::forward`] runs for these tensors.
    pub fn algo(&self, lead: Lead, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Algo> {
        let _working = Working::new(self.state.device());
        let (q, k, v) = (dense_rows(q)?, dense_rows(k)?, dense_rows(v)?);
        let plan = self.plan(lead, [Arg::tensor("q", &q), Arg::tensor("k", &k), Arg::tensor("v", &v)])?;
        #[cfg(feature = "cuda")]
        {
            use candle_core::Storage;
            let guards = [q.storage_and_layout().0, k.storage_and_layout().0, v.storage_and_layout().0];
            if let [Storage::Cuda(q), Storage::Cuda(k), Storage::Cuda(v)] = [&*guards[0], &*guards[1], &*guards[2]] {
                return super::cuda::choice(self, &plan, [q, k, v]);
            }
        }
        drop(plan);
        Ok(Algo::Recurrent) // all there is on the CPU
    }
}

/// A custom op over (q, k, v) for a struct around a [`Rule`] that has a `lead`.
macro_rules! rule_op {
    ($op:ident) => {
        impl $op {
            fn on_cpu(&self, args: [CpuArg<'_>; 3]) -> CpuOutput {
                self.0.on_cpu(self.lead(), args)
            }

            #[cfg(feature = "cuda")]
            fn on_cuda(&self, args: [CudaArg<'_>; 3]) -> CudaOutput {
                self.0.on_cuda(self.lead(), args)
            }
        }

        candle_gdn_core::custom_op!(CustomOp3 for $op, OP, q q_layout, k k_layout, v v_layout);
    };
}
pub(super) use rule_op;
