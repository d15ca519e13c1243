//! RMS norm over all heads of queries and of keys.

use super::RmsNorm;
use crate::parallel::Collective;
use candle_core::{DType, Device, Result, Tensor, D};
use candle_gdn_core::{host, Launch};
use std::sync::Arc;

/// Norms of the projections of queries and keys, of which a rank has some heads and the mean square is that of all.
#[derive(Debug, Clone)]
pub(crate) struct ProjectionNorm {
    q: RmsNorm,
    k: RmsNorm,
    group: Option<Arc<dyn Collective>>,
}

impl ProjectionNorm {
    pub(super) fn new(q: RmsNorm, k: RmsNorm, group: Option<Arc<dyn Collective>>) -> Self {
        Self { q, k, group }
    }

    pub(super) fn norms(&self) -> [&RmsNorm; 2] {
        [&self.q, &self.k]
    }

    /// In place, `[tokens, heads * head_dim]` each. Without queries only the keys; every rank makes the same calls.
    pub(super) fn on_host(&self, q: &mut [f32], k: &mut [f32]) -> Result<()> {
        host::with_f32s([&self.q.scale, &self.k.scale], |[q_scale, k_scale]| {
            let tokens = k.len() / k_scale.len();
            let squares = |x: &[f32], width: usize| -> Vec<f32> {
                let row = |row: &[f32]| row.iter().map(|x| f64::from(*x) * f64::from(*x)).sum::<f64>() / width as f64;
                x.chunks_exact(width).map(|x| row(x) as f32).collect()
            };
            let mut means = squares(q, q_scale.len());
            means.extend(squares(k, k_scale.len()));
            let means = Tensor::from_vec(means, q.len() / q_scale.len() + tokens, &Device::Cpu)?;
            let means = self.over_ranks(means)?;
            let means: Vec<f32> = means.to_vec1()?;
            let (of_q, of_k) = means.split_at(means.len() - tokens);
            for (x, scale, means, eps) in [(q, q_scale, of_q, self.q.eps), (k, k_scale, of_k, self.k.eps)] {
                for (row, mean) in x.chunks_exact_mut(scale.len()).zip(means) {
                    let factor = (mean + eps).sqrt().recip();
                    row.iter_mut().zip(scale).for_each(|(x, scale)| *x *= factor * scale);
                }
            }
            Ok(())
        })?
    }

    /// The same on a device.
    pub(super) fn forward(&self, q: &Tensor, k: &Tensor, launch: &Launch) -> Result<[Tensor; 2]> {
        Ok([self.normed(q, &self.q, launch)?, self.normed(k, &self.k, launch)?])
    }

    /// The keys alone.
    pub(super) fn keys(&self, k: &Tensor, launch: &Launch) -> Result<Tensor> {
        self.normed(k, &self.k, launch)
    }

    /// `x [tokens, heads * head_dim]`.
    fn normed(&self, x: &Tensor, norm: &RmsNorm, launch: &Launch) -> Result<Tensor> {
        if self.group.is_none() {
            return norm.forward(&x.contiguous()?, launch);
        }
        let (dtype, x) = (x.dtype(), x.to_dtype(DType::F32)?);
        let mean = self.over_ranks(x.sqr()?.mean_keepdim(D::Minus1)?)?;
        let root = (mean + f64::from(norm.eps))?.sqrt()?;
        x.broadcast_div(&root)?.broadcast_mul(&norm.scale)?.to_dtype(dtype)
    }

    /// The mean over all heads from that of this rank's, of which every rank has as many.
    fn over_ranks(&self, means: Tensor) -> Result<Tensor> {
        match &self.group {
            Some(group) => group.all_reduce(&means)? / group.size() as f64,
            None => Ok(means),
        }
    }
}
