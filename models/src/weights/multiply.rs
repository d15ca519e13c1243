//! Products with a weight.

#[cfg(feature = "cuda")]
use super::cuda::{linear, packed};
use super::Weight;
use crate::ops::Swiglu;
use candle_core::{bail, DType, Module, Result, Tensor};
use candle_gdn::formats::Project;
use candle_gdn::ops::multiply;
use candle_gdn::Projection;
use candle_gdn_core::check::zeros;
use candle_gdn_core::cpu::matmul::products;
use candle_gdn_core::{host, Launch};

impl Weight {
    /// `x [.., in]` times the transpose of the weight: `[.., out]` in x's dtype. With `launch.overlap` the weight is read
    /// while the kernel before this one on the stream may still run, which must therefore not write it.
    ///
    /// For matrices in ggml's types x is rounded to 8 bits, by our kernels on CUDA to 16.
    ///
    /// # Errors
    /// When x has another width, or a dtype that no kernel of the weight supports.
    pub fn multiply(&self, x: &Tensor, launch: &Launch) -> Result<Tensor> {
        let (rows, mut dims) = self.rows_of(x)?;
        dims.push(self.outputs());
        self.multiply_rows(&rows, launch)?.reshape(dims)
    }

    /// `silu(x gate^T) * (x up^T)`, the weight's rows being those of the gate, then up's: `x [.., in]` to `[.., out / 2]`, in
    /// one kernel where one is faster than two.
    pub fn swiglu(&self, x: &Tensor, launch: &Launch) -> Result<Tensor> {
        #[cfg(feature = "cuda")]
        {
            let (rows, mut dims) = self.rows_of(x)?;
            let fused = match self {
                Self::Dense(weight) => linear::dense_swiglu(&rows, weight, launch)?,
                Self::E4m3(weight) => linear::e4m3_swiglu(&rows, weight, launch)?,
                Self::Packed(weight) => packed::swiglu(&rows, weight, launch)?,
                _ => None,
            };
            if let Some(y) = fused {
                dims.push(y.dim(1)?);
                return y.reshape(dims);
            }
        }
        Swiglu { launch: launch.clone() }.forward(&self.multiply(x, launch)?)
    }

    /// The rows of x, `[rows, in]`, and its other dimensions.
    fn rows_of(&self, x: &Tensor) -> Result<(Tensor, Vec<usize>)> {
        let mut dims = x.dims().to_vec();
        let inputs = dims.pop().unwrap_or(0);
        if inputs != self.inputs() {
            bail!("product: x: expected shape [.., {}], got {:?}", self.inputs(), x.dims())
        }
        Ok((x.reshape((x.elem_count() / inputs.max(1), inputs))?, dims))
    }

    fn multiply_rows(&self, x: &Tensor, launch: &Launch) -> Result<Tensor> {
        let rows = x.dim(0)?;
        if rows == 0 {
            return zeros("Weight", "rows", &[0, self.outputs()], x.dtype(), x.device());
        }
        match self {
            Self::Dense(weight) => multiply(x, weight, launch),
            Self::Panels(weights) => {
                let [y] = host::with_f32(x, |x| products(x, [weights]))?;
                host::tensor(y, (rows, self.outputs()), x.dtype())
            }
            #[cfg(feature = "cuda")]
            Self::E4m3(weight) => linear::e4m3(x, weight, None, launch),
            #[cfg(not(feature = "cuda"))]
            Self::E4m3(_) => bail!("weight in e4m3: expected a build with CUDA"),
            Self::Quantized(weight) => {
                let y = host::with_f32(x, |x| weight.product(x, rows))?;
                host::tensor(y, (rows, self.outputs()), x.dtype())
            }
            #[cfg(feature = "cuda")]
            Self::Packed(weight) => packed::product(x, &[weight], None, launch),
            Self::Ggml(weight) => {
                x.to_dtype(DType::F32)?.contiguous()?.apply_op1_no_bwd(&**weight)?.to_dtype(x.dtype())
            }
            Self::Tiled(weight, tiles) => {
                #[cfg(feature = "cuda")]
                if let Self::Packed(weight) = &**weight {
                    return packed::product(x, &[weight], Some(*tiles), launch);
                }
                weight.multiply_rows(&tiles.apply(x)?, launch)
            }
            Self::Stacked(weights) => {
                #[cfg(feature = "cuda")]
                if let Some(y) = in_one_launch(x, weights, launch)? {
                    return Ok(y);
                }
                let outs = weights.iter().map(|weight| weight.multiply_rows(x, launch));
                Tensor::cat(&outs.collect::<Result<Vec<_>>>()?, 1)
            }
        }
    }

    /// Whether one launch multiplies all of `weights`.
    #[cfg(feature = "cuda")]
    pub fn are_one_launch(weights: &[Weight]) -> bool {
        packed_together(weights).is_some()
    }
}

/// The product with the rows of all weights, where they are of one launch.
#[cfg(feature = "cuda")]
fn in_one_launch(x: &Tensor, weights: &[Weight], launch: &Launch) -> Result<Option<Tensor>> {
    if let [Weight::E4m3(weight), Weight::Dense(below)] = weights {
        return linear::e4m3(x, weight, Some(below), launch).map(Some);
    }
    packed_together(weights).map(|weights| packed::product(x, &weights, None, launch)).transpose()
}

#[cfg(feature = "cuda")]
fn packed_together(weights: &[Weight]) -> Option<Vec<&packed::Packed>> {
    let packed = weights.iter().map(|weight| match weight {
        Weight::Packed(weight) => Some(&**weight),
        _ => None,
    });
    packed.collect::<Option<Vec<_>>>().filter(|weights| (1..=packed::MAX_MATRICES).contains(&weights.len()))
}

impl Module for Weight {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.multiply(x, &Launch::default())
    }
}

impl Project for Weight {
    fn project(&self, x: &Tensor, launch: &Launch) -> Result<Tensor> {
        self.multiply(x, launch)
    }

    fn shape(&self) -> Option<[usize; 2]> {
        Some([self.outputs(), self.inputs()])
    }
}

impl From<Weight> for Projection {
    fn from(weight: Weight) -> Self {
        Self::new(weight)
    }
}
