//! From training to decoding.

use super::columns::{by_key_head, Runs};
use super::load::select_rows;
use super::{GatedDeltaNet, GdnConfig, GdnParts, InProjection, Project, Projection, TrainableGatedDeltaNet};
use crate::linear::DenseWeight;
use candle_core::{DType, Device, Result, Tensor};
use candle_gdn_core::device::{Launch, Working};

/// A projection whose gradients nobody wants any more.
struct Detached(Projection);

impl Project for Detached {
    fn project(&self, x: &Tensor, launch: &Launch) -> Result<Tensor> {
        Ok(self.0.project(x, launch)?.detach())
    }

    fn shape(&self) -> Option<[usize; 2]> {
        self.0.shape()
    }

    fn dtype_and_device(&self) -> Option<(DType, &Device)> {
        self.0.dtype_and_device()
    }
}

impl TrainableGatedDeltaNet {
    /// The layer that decodes, with the weights as they are now. Projections that have a dense weight ([`Project::dense`]:
    /// `candle_nn::Linear`) are copied, those of the input into one matrix; any other module stays as it is, is called each time
    /// and shows changes of its weights.
    ///
    /// # Errors
    /// When there is not enough memory, or a module fails to give its weight.
    pub fn freeze(&self) -> Result<GatedDeltaNet> {
        let _working = Working::new(self.parts().conv_weight.first().device());
        let GdnParts { in_proj, conv_weight, a_log, dt_bias, norm_weight, out_proj } = self.parts().clone();
        let dense = dense_rows(self.config(), &in_proj)?;
        let conv_weight = conv_weight.joined()?;
        // The convolution may be in f32 beside projections in 16 bits.
        let dtype = dense
            .as_ref()
            .map(Tensor::dtype)
            .or(in_proj.dtype(self.config()).map(|(_, dtype)| dtype))
            .unwrap_or(conv_weight.dtype());
        let in_proj = match (dense, in_proj) {
            (Some(weight), _) => InProjection::Fused(DenseWeight::new(weight)?.into()),
            (None, InProjection::Fused(all)) => InProjection::Fused(frozen(&all)?),
            (None, InProjection::Interleaved { qkvz, ba }) => {
                InProjection::Interleaved { qkvz: frozen(&qkvz)?, ba: frozen(&ba)? }
            }
            (None, InProjection::Split { qkv, z, b, a }) => {
                InProjection::Split { qkv: frozen(&qkv)?, z: frozen(&z)?, b: frozen(&b)?, a: frozen(&a)? }
            }
            (None, InProjection::Separate { q, k, v, z, b, a }) => InProjection::Separate {
                q: frozen(&q)?,
                k: frozen(&k)?,
                v: frozen(&v)?,
                z: frozen(&z)?,
                b: frozen(&b)?,
                a: frozen(&a)?,
            },
        };
        let vector = |x: &Tensor| x.detach().to_dtype(DType::F32);
        let parts = GdnParts {
            in_proj,
            conv_weight: conv_weight.detach().to_dtype(dtype)?.into(),
            a_log: vector(&a_log)?,
            dt_bias: vector(&dt_bias)?,
            norm_weight: vector(&norm_weight)?,
            out_proj: frozen(&out_proj)?,
        };
        GatedDeltaNet::new(self.config(), parts)
    }
}

/// The rows of all matrices in the order of [`InProjection::Fused`], where all are dense.
fn dense_rows(c: &GdnConfig, in_proj: &InProjection) -> Result<Option<Tensor>> {
    let rows = match in_proj {
        InProjection::Fused(all) => vec![all.dense()?],
        InProjection::Interleaved { qkvz, ba } => {
            let select = |weight: Option<Tensor>, rows: &[Runs]| {
                weight.map(|weight| select_rows(&weight, &rows.concat())).transpose()
            };
            let heads = c.num_key_heads;
            vec![
                select(qkvz.dense()?, &by_key_head(heads, c.qkvz_sizes()))?,
                select(ba.dense()?, &by_key_head(heads, c.ba_sizes()))?,
            ]
        }
        InProjection::Split { qkv, z, b, a } => vec![qkv.dense()?, z.dense()?, b.dense()?, a.dense()?],
        InProjection::Separate { q, k, v, z, b, a } => {
            [q, k, v, z, b, a].into_iter().map(Projection::dense).collect::<Result<_>>()?
        }
    };
    let rows: Option<Vec<Tensor>> = rows.into_iter().collect();
    rows.map(|rows| Tensor::cat(&rows, 0)).transpose()
}

fn frozen(projection: &Projection) -> Result<Projection> {
    match projection.dense()? {
        Some(weight) => Ok(DenseWeight::new(weight)?.into()),
        None => Ok(Projection::new(Detached(projection.clone()))),
    }
}
