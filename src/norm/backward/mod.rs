//! Gradients of the gated norm.

mod cpu;
#[cfg(feature = "cuda")]
mod cuda;

use super::{flat_layout, GatedRmsNorm, NormPlan, OP};
use candle_core::{bail, CpuStorage, Result, Tensor};
use candle_gdn_core::check::*;
use candle_gdn_core::cpu::{Element, Heads};
use candle_gdn_core::device::Working;
use candle_gdn_core::{by_dtype, host};

impl GatedRmsNorm {
    /// The gradients of x, z and the weight.
    pub(super) fn backward(&self, args: [&Tensor; 3], grad: &Tensor) -> Result<[Option<Tensor>; 3]> {
        let _working = Working::new(args[0].device());
        let [x, z, weight] = args;
        let plan = self.plan([Arg::tensor("x", x), Arg::tensor("z", z), Arg::tensor("weight", weight)])?;
        let lead = x.rank() - 2;
        let grad = uniform_tokens(grad, lead)?;
        let d_y = flat_layout("d_y", grad.layout(), &x.dims()[..lead], (plan.heads, plan.dim))?;
        #[cfg(feature = "cuda")]
        let [d_x, d_z, d_weight] = match x.device().is_cuda() {
            true => cuda::backward(self, &plan, args, (&grad, d_y))?,
            false => self.backward_on_cpu(&plan, args, (&grad, d_y))?,
        };
        #[cfg(not(feature = "cuda"))]
        let [d_x, d_z, d_weight] = self.backward_on_cpu(&plan, args, (&grad, d_y))?;
        Ok(tracked(args, [d_x, d_z.reshape(z.shape())?, d_weight.to_dtype(weight.dtype())?]))
    }

    fn backward_on_cpu(
        &self,
        plan: &NormPlan,
        [x, z, weight]: [&Tensor; 3],
        (grad, d_y): (&Tensor, HeadsLayout),
    ) -> Result<[Tensor; 3]> {
        host::with_storages([x, z, weight, grad], |[x, z, weight, grad]| {
            let weight = &host::values(weight, plan.weight_offset, plan.dim)?[..];
            Ok(by_dtype!(
                x, z, grad => self.gradients(plan, [x, z], weight, heads(grad, d_y)),
                else bail!("{OP}: d_y: expected x's dtype")
            ))
        })
    }

    fn gradients<T: Element>(
        &self,
        plan: &NormPlan,
        xz: [&Vec<T>; 2],
        weight: &[f32],
        d_y: Heads<'_, T>,
    ) -> [Tensor; 3] {
        let [mut d_x, mut d_z] = [(); 2].map(|()| vec![T::ZERO; plan.out_shape.elem_count()]);
        let norm = cpu::NormBackward { norm: self.rows(plan, xz, weight), d_y };
        let d_weight = CpuStorage::F32(norm.run(&mut d_x, &mut d_z));
        let [d_x, d_z] = [d_x, d_z].map(|x| host::tensor_of(T::storage(x), plan.out_shape.clone()));
        [d_x, d_z, host::tensor_of(d_weight, plan.dim)]
    }
}
