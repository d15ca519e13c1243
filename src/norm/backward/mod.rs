//! Gradients of the gated norm.

mod cpu;
#[cfg(feature = "cuda")]
mod cuda;

use super::{flat_layout, GateActivation, GatedRmsNorm, NormPlan, OP};
use candle_core::{bail, CpuStorage, Result, Tensor};
use candle_gdn_core::check::*;
use candle_gdn_core::cpu::Element;
use candle_gdn_core::device::Working;
use candle_gdn_core::host;

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
        use CpuStorage::{BF16, F16, F32};
        let (d_x, d_z, d_weight) = host::with_storages([x, z, weight, grad], |[x, z, weight, grad]| {
            let weight = &host::values(weight, plan.weight_offset, plan.dim)?[..];
            Ok(match (x, z, grad) {
                (F32(x), F32(z), F32(grad)) => {
                    let (d_x, d_z, d_weight) = self.gradients(plan, [x, z, grad], d_y, weight);
                    (F32(d_x), F32(d_z), d_weight)
                }
                (BF16(x), BF16(z), BF16(grad)) => {
                    let (d_x, d_z, d_weight) = self.gradients(plan, [x, z, grad], d_y, weight);
                    (BF16(d_x), BF16(d_z), d_weight)
                }
                (F16(x), F16(z), F16(grad)) => {
                    let (d_x, d_z, d_weight) = self.gradients(plan, [x, z, grad], d_y, weight);
                    (F16(d_x), F16(d_z), d_weight)
                }
                (x, ..) => bail!("{OP}: expected a gradient in {:?}", storage_dtype(x)),
            })
        })?;
        let shape = &plan.out_shape;
        let d_weight = Tensor::from_vec(d_weight, plan.dim, x.device())?;
        Ok([host::tensor_of(d_x, shape.clone()), host::tensor_of(d_z, shape.clone()), d_weight])
    }

    fn gradients<T: Element>(
        &self,
        plan: &NormPlan,
        [x, z, grad]: [&Vec<T>; 3],
        d_y: HeadsLayout,
        weight: &[f32],
    ) -> (Vec<T>, Vec<T>, Vec<f32>) {
        let [mut d_x, mut d_z] = [(); 2].map(|()| vec![T::ZERO; plan.out_shape.elem_count()]);
        let norm = cpu::NormBackward {
            x: heads(x, plan.x),
            z: heads(z, plan.z),
            d_y: heads(grad, d_y),
            weight,
            tokens: plan.tokens,
            heads: plan.heads,
            eps: self.eps as f32,
            sigmoid: self.gate == GateActivation::Sigmoid,
        };
        let d_weight = norm.run(&mut d_x, &mut d_z);
        (d_x, d_z, d_weight)
    }
}
