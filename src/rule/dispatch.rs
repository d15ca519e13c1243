//! Which side runs a rule, the CPU's or CUDA's.

use super::call::Rule;
use crate::algo::Algo;
use candle_core::{CpuStorage, CustomOp3, Layout, Result, Shape, Tensor};
use candle_gdn_core::check::{dense_rows, Arg, Lead};
use candle_gdn_core::device::apply3;

impl Rule {
    /// Runs the op on q, k and v, copying only those whose rows are not contiguous.
    pub fn forward<C: CustomOp3>(&self, op: &C, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor> {
        apply3(op, None, &dense_rows(q)?, &dense_rows(k)?, &dense_rows(v)?)
    }

    pub fn cpu_fwd(&self, lead: Lead, args: [(&CpuStorage, &Layout); 3]) -> Result<(CpuStorage, Shape)> {
        let [(q, ql), (k, kl), (v, vl)] = args;
        let plan = self.plan(lead, [Arg::cpu("q", q, ql), Arg::cpu("k", k, kl), Arg::cpu("v", v, vl)])?;
        Ok((super::cpu::run(self, &plan, [q, k, v])?, plan.out_shape))
    }

    #[cfg(feature = "cuda")]
    pub fn cuda_fwd(
        &self,
        lead: Lead,
        args: [(&candle_core::CudaStorage, &Layout); 3],
    ) -> Result<(candle_core::CudaStorage, Shape)> {
        let [(q, ql), (k, kl), (v, vl)] = args;
        let plan = self.plan(lead, [Arg::cuda("q", q, ql), Arg::cuda("k", k, kl), Arg::cuda("v", v, vl)])?;
        Ok((super::cuda::run(self, &plan, [q, k, v])?, plan.out_shape))
    }

    /// The variant that [`Self::forward`] runs for these tensors.
    pub fn algo(&self, lead: Lead, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Algo> {
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

/// `CustomOp3` over (q, k, v) for an op with a [`Rule`] and a `lead`.
macro_rules! custom_op3 {
    ($op:ty) => {
        impl candle_core::CustomOp3 for $op {
            fn name(&self) -> &'static str {
                self.0.name
            }

            fn cpu_fwd(
                &self,
                q: &candle_core::CpuStorage,
                ql: &candle_core::Layout,
                k: &candle_core::CpuStorage,
                kl: &candle_core::Layout,
                v: &candle_core::CpuStorage,
                vl: &candle_core::Layout,
            ) -> Result<(candle_core::CpuStorage, candle_core::Shape)> {
                self.0.cpu_fwd(self.lead(), [(q, ql), (k, kl), (v, vl)])
            }

            #[cfg(feature = "cuda")]
            fn cuda_fwd(
                &self,
                q: &candle_core::CudaStorage,
                ql: &candle_core::Layout,
                k: &candle_core::CudaStorage,
                kl: &candle_core::Layout,
                v: &candle_core::CudaStorage,
                vl: &candle_core::Layout,
            ) -> Result<(candle_core::CudaStorage, candle_core::Shape)> {
                self.0.cuda_fwd(self.lead(), [(q, ql), (k, kl), (v, vl)])
            }
        }
    };
}
pub(super) use custom_op3;
