//! Products with a weight: trained, frozen, or frozen with an adapter beside it.

use candle_core::backend::BackendStorage;
use candle_core::{bail, CpuStorage, CudaStorage, CustomOp1, Layout, Module, Result, Shape, Storage, Tensor};
use candle_nn::VarBuilder;

/// `x [rows, inputs]` to `x W^T`, with an adapter (LoRA) to `x W^T + scale (x A^T) B^T`.
pub struct Projection {
    /// `[outputs, inputs]`
    weight: Tensor,
    adapter: Option<Adapter>,
}

struct Adapter {
    /// `[rank, inputs]`
    a: Tensor,
    /// `[outputs, rank]`
    b: Tensor,
    scale: f64,
}

impl Projection {
    /// With an adapter where `vb` has `lora_A.weight` and `lora_B.weight`.
    ///
    /// # Errors
    /// When the adapter's shapes do not fit.
    pub fn new(weight: Tensor, scale: f64, vb: &VarBuilder) -> Result<Self> {
        let (outputs, inputs) = weight.dims2()?;
        let adapter = match vb.contains_tensor("lora_A.weight") {
            true => {
                let a = vb.get_unchecked("lora_A.weight")?;
                let rank = a.dim(0)?;
                let [a, b] = [("lora_A.weight", (rank, inputs)), ("lora_B.weight", (outputs, rank))]
                    .map(|(name, shape)| vb.get(shape, name));
                Some(Adapter { a: a?, b: b?, scale })
            }
            false => None,
        };
        Ok(Self { weight, adapter })
    }
}

impl Module for Projection {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let y = match self.weight.track_op() {
            true => x.matmul(&self.weight.t()?)?,
            false => x.contiguous()?.apply_op1(FrozenProduct(self.weight.clone()))?,
        };
        match &self.adapter {
            Some(Adapter { a, b, scale }) => y + (x.matmul(&a.t()?)?.matmul(&b.t()?)? * *scale)?,
            None => Ok(y),
        }
    }
}

/// The product with a frozen weight. The backward pass of candle's matmul also multiplies and keeps the gradient of a matrix that is no
/// variable: for a frozen model the memory of all its weights again.
struct FrozenProduct(Tensor);

impl FrozenProduct {
    fn multiply<S: BackendStorage>(&self, x: &S, layout: &Layout, weight: &S, own: &Layout) -> Result<(S, Shape)> {
        let (rows, inputs) = layout.shape().dims2()?;
        let (outputs, width) = own.shape().dims2()?;
        if inputs != width {
            bail!("projection: x: expected shape [rows, {width}], got {:?}", layout.dims())
        }
        let y = x.matmul(weight, (1, rows, outputs, inputs), layout, &own.transpose(0, 1)?)?;
        Ok((y, (rows, outputs).into()))
    }
}

impl CustomOp1 for FrozenProduct {
    fn name(&self) -> &'static str {
        "frozen_product"
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let (weight, own) = self.0.storage_and_layout();
        let Storage::Cpu(weight) = &*weight else { bail!("projection: expected x on the weight's device") };
        self.multiply(x, layout, weight, own)
    }

    fn cuda_fwd(&self, x: &CudaStorage, layout: &Layout) -> Result<(CudaStorage, Shape)> {
        let (weight, own) = self.0.storage_and_layout();
        let Storage::Cuda(weight) = &*weight else { bail!("projection: expected x on the weight's device") };
        self.multiply(x, layout, weight, own)
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        Ok(Some(gradient.matmul(&self.0)?))
    }
}
