//! What the layer projects with, and what a projection of its input gives.

use super::columns::{self, by_key_head};
use super::config::GdnConfig;
use super::layout::SEPARATE;
use crate::linear::DenseWeight;
use crate::rule::Gates;
use candle_core::{bail, DType, Device, Module, Result, Tensor, D};
use candle_gdn_core::device::Launch;
use std::sync::Arc;

/// A projection `[.., in]` to `[.., out]` of a [`GatedDeltaNet`](crate::GatedDeltaNet).
///
/// ```
/// use candle_core::{quantized::{GgmlDType, QMatMul, QTensor}, DType, Device, Tensor};
/// use candle_gdn::{DenseWeight, Projection};
///
/// # fn main() -> candle_core::Result<()> {
/// let weight = Tensor::zeros((64, 256), DType::F32, &Device::Cpu)?;
/// let dense = Projection::from(DenseWeight::new(weight.clone())?);
/// let quantised = Projection::module(QMatMul::from_qtensor(QTensor::quantize(&weight, GgmlDType::Q4K)?)?);
/// # let _ = (dense, quantised);
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Projection(Arc<dyn Project + Send + Sync>);

/// A weight with kernels of its own, which are launched as the layer says. A [`Projection`] is made of it by [`Projection::new`].
pub trait Project {
    /// `x [.., in]` to `[.., out]` in x's dtype. A kernel that cannot overlap or place its output ignores `launch`.
    ///
    /// # Errors
    /// When x does not fit, or the device refuses.
    fn project(&self, x: &Tensor, launch: &Launch) -> Result<Tensor>;

    /// Outputs and inputs, where they are known.
    fn shape(&self) -> Option<[usize; 2]> {
        None
    }

    /// The dtype that x needs and the device where the weight lies, where they are known.
    fn dtype_and_device(&self) -> Option<(DType, &Device)> {
        None
    }

    /// The weight `[outputs, inputs]` as it is now, where the projection is nothing but the product with one:
    /// [`TrainableGatedDeltaNet::freeze`](crate::TrainableGatedDeltaNet::freeze) makes one matrix of those of the input. A LoRA returns its sum with the base.
    ///
    /// # Errors
    /// When the device refuses.
    fn dense(&self) -> Result<Option<Tensor>> {
        Ok(None)
    }
}

/// With gradients of x and of its weight: for [`TrainableGatedDeltaNet`](crate::TrainableGatedDeltaNet).
impl Project for candle_nn::Linear {
    fn project(&self, x: &Tensor, _: &Launch) -> Result<Tensor> {
        self.forward(x)
    }

    fn shape(&self) -> Option<[usize; 2]> {
        self.weight().dims2().ok().map(|(outputs, inputs)| [outputs, inputs])
    }

    fn dtype_and_device(&self) -> Option<(DType, &Device)> {
        Some((self.weight().dtype(), self.weight().device()))
    }

    fn dense(&self) -> Result<Option<Tensor>> {
        Ok(self.bias().is_none().then(|| self.weight().detach()))
    }
}

struct ModuleProjection<M>(M);

impl<M: Module> Project for ModuleProjection<M> {
    /// A module's launches wait for all before them.
    fn project(&self, x: &Tensor, _: &Launch) -> Result<Tensor> {
        self.0.forward(x)
    }
}

impl Project for DenseWeight {
    fn project(&self, x: &Tensor, launch: &Launch) -> Result<Tensor> {
        self.multiply(x, launch)
    }

    fn shape(&self) -> Option<[usize; 2]> {
        Some([self.outputs(), self.inputs()])
    }

    fn dtype_and_device(&self) -> Option<(DType, &Device)> {
        Some((self.dtype(), self.device()))
    }
}

/// An op and one of its projections, for messages.
type Named<'a> = (&'a str, &'a str);

impl Projection {
    /// Of any module: a quantised matrix, one with a LoRA, one of several ranks. Its input and output have the layer's dtype. As
    /// input projection it returns a detached tensor ([training](crate::GatedDeltaNet#training)).
    pub fn module(module: impl Module + Send + Sync + 'static) -> Self {
        Self(Arc::new(ModuleProjection(module)))
    }

    /// Of a weight with kernels of its own.
    pub fn new(weight: impl Project + Send + Sync + 'static) -> Self {
        Self(Arc::new(weight))
    }

    pub(super) fn project(&self, x: &Tensor, launch: &Launch) -> Result<Tensor> {
        self.0.project(x, launch)
    }

    pub(super) fn shape(&self) -> Option<[usize; 2]> {
        self.0.shape()
    }

    pub(super) fn dtype_and_device(&self) -> Option<(DType, &Device)> {
        self.0.dtype_and_device()
    }

    pub(super) fn dense(&self) -> Result<Option<Tensor>> {
        self.0.dense()
    }

    /// `x [.., in]` to `[.., outputs]`.
    pub(super) fn forward(&self, (op, name): Named, x: &Tensor, outputs: usize, launch: &Launch) -> Result<Tensor> {
        let y = self.0.project(x, launch)?;
        let rank = x.rank() - 1;
        if y.dims().len() != rank + 1 || y.dims()[..rank] != x.dims()[..rank] || y.dims()[rank] != outputs {
            let want = [&x.dims()[..rank], &[outputs]].concat();
            bail!("{op}: {name}: expected it to give shape {want:?}, got {:?}", y.dims());
        }
        if y.dtype() != x.dtype() {
            bail!("{op}: {name}: expected it to give dtype {:?} (x's), got {:?}", x.dtype(), y.dtype());
        }
        Ok(y)
    }

    /// The same for training: where x has a gradient the output has one. candle multiplies by a quantised matrix without, and
    /// without a word.
    pub(super) fn forward_tracked(&self, (op, name): Named, x: &Tensor, outputs: usize) -> Result<Tensor> {
        let y = self.forward((op, name), x, outputs, &Launch::default())?;
        if x.track_op() && !y.track_op() {
            bail!(
                "{op}: {name}: expected a projection with gradients, as its input is tracked for them, got an \
                 output that is not tracked: candle's QMatMul of a quantised matrix has no backward pass; use a \
                 candle_nn::Linear of the dequantised matrix"
            );
        }
        Ok(y)
    }

    /// That sizes and device fit, where they are known.
    pub(super) fn check(&self, (op, name): Named, [outputs, inputs]: [usize; 2], device: &Device) -> Result<()> {
        match self.0.shape() {
            Some(got) if got != [outputs, inputs] => {
                bail!("{op}: {name}: expected a weight of shape {:?}, got {got:?}", [outputs, inputs])
            }
            _ => {}
        }
        match self.0.dtype_and_device() {
            Some((_, own)) if !own.same_device(device) => bail!(
                "{op}: {name}: expected a weight on {:?} (the convolution's device), got one on {:?}",
                device.location(),
                own.location()
            ),
            _ => Ok(()),
        }
    }
}

impl From<DenseWeight> for Projection {
    fn from(weight: DenseWeight) -> Self {
        Self::new(weight)
    }
}

/// A layer without a bias, whose weight has no gradient, becomes a [`DenseWeight`]; any other is called as it is.
impl From<candle_nn::Linear> for Projection {
    fn from(linear: candle_nn::Linear) -> Self {
        if linear.bias().is_none() && !linear.weight().track_op() {
            if let Ok(weight) = DenseWeight::new(linear.weight().clone()) {
                return weight.into();
            }
        }
        Self::new(linear)
    }
}

impl std::fmt::Debug for Projection {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Projection({:?})", self.0.shape())
    }
}

/// The input projection, as one matrix or as the matrices of a checkpoint. The first is the fastest: its outputs are read where
/// they lie. The outputs of several are copied where the layer needs them side by side.
///
/// K, V, HK and HV are the head sizes and head counts of the config, `kd = HK * K`, `vd = HV * V`, `r = HV / HK`.
#[derive(Debug, Clone)]
pub enum InProjection {
    /// `[2 kd + 2 vd + 2 HV]` outputs: q, k, v, z, b, a, each by head.
    Fused(Projection),
    /// As in Qwen3-Next's checkpoints, by key head.
    Interleaved {
        /// `[2 kd + 2 vd]`: for each key head q (K), k (K), v (r V), z (r V).
        qkvz: Projection,
        /// `[2 HV]`: for each key head b (r), a (r).
        ba: Projection,
    },
    /// As in Qwen3.5's checkpoints and later.
    Split {
        /// `[2 kd + vd]`: q, k, v, each by head.
        qkv: Projection,
        /// `[vd]`
        z: Projection,
        /// `[HV]`
        b: Projection,
        /// `[HV]`
        a: Projection,
    },
    /// As in OLMo-Hybrid's checkpoints, each by head.
    Separate {
        /// `[kd]`
        q: Projection,
        /// `[kd]`
        k: Projection,
        /// `[vd]`
        v: Projection,
        /// `[vd]`
        z: Projection,
        /// `[HV]`
        b: Projection,
        /// `[HV]`
        a: Projection,
    },
}

impl InProjection {
    pub(super) fn check(&self, op: &str, c: &GdnConfig, device: &Device) -> Result<()> {
        let mut all = self.each(c).into_iter();
        all.try_for_each(|(name, projection, outputs)| projection.check((op, name), [outputs, c.hidden_size], device))
    }

    /// The first of the projections whose weight has a dtype that is known, and the dtype.
    pub(super) fn dtype(&self, c: &GdnConfig) -> Option<(&'static str, DType)> {
        self.each(c).into_iter().find_map(|(name, projection, _)| Some((name, projection.dtype_and_device()?.0)))
    }

    /// The projections with their names and outputs.
    fn each(&self, c: &GdnConfig) -> Vec<(&'static str, &Projection, usize)> {
        let (channels, values, heads) = (c.conv_channels(), c.value_size(), c.num_value_heads);
        match self {
            Self::Fused(all) => vec![("in_proj", all, channels + values + 2 * heads)],
            Self::Interleaved { qkvz, ba } => {
                vec![("in_proj_qkvz", qkvz, channels + values), ("in_proj_ba", ba, 2 * heads)]
            }
            Self::Split { qkv, z, b, a } => vec![
                ("in_proj_qkv", qkv, channels),
                ("in_proj_z", z, values),
                ("in_proj_b", b, heads),
                ("in_proj_a", a, heads),
            ],
            Self::Separate { q, k, v, z, b, a } => {
                let each = SEPARATE.into_iter().zip([q, k, v, z, b, a]).zip(c.section_rows());
                each.map(|((name, projection), rows)| (name, projection, rows)).collect()
            }
        }
    }

    /// Of x `[lead.., hidden_size]`. What follows has no backward pass, in which the gradients of a module would vanish.
    pub(super) fn forward(&self, op: &str, c: &GdnConfig, x: &Tensor, launch: &Launch) -> Result<Outputs> {
        self.outputs((op, false), c, x, launch)
    }

    /// The same for training.
    pub(super) fn forward_tracked(&self, op: &str, c: &GdnConfig, x: &Tensor) -> Result<Outputs> {
        self.outputs((op, true), c, x, &Launch::default())
    }

    fn outputs(&self, (op, training): (&str, bool), c: &GdnConfig, x: &Tensor, launch: &Launch) -> Result<Outputs> {
        let mut launch = launch.clone();
        let mut outputs = vec![];
        for (name, projection, columns) in self.each(c) {
            if training {
                outputs.push(projection.forward_tracked((op, name), x, columns)?);
                continue;
            }
            let y = projection.forward((op, name), x, columns, &launch)?;
            if y.track_op() {
                bail!(
                    "{op}: {name}: expected a module whose output is detached, as there is no backward pass, got one \
                     that is tracked for gradients; to train, use TrainableGatedDeltaNet; without training, return y.detach() \
                     from the module"
                );
            }
            outputs.push(y);
            // Only the first launch has the kernel of the layer before it in front of it.
            launch.overlap = false;
        }
        let last = D::Minus1;
        Ok(match (self, &outputs[..]) {
            (Self::Fused(_), [all]) => Outputs::Fused(all.clone()),
            (Self::Interleaved { .. }, [qkvz, ba]) => {
                let (of_qkvz, of_ba) = (c.qkvz_sizes(), c.ba_sizes());
                if training && x.device().is_cpu() {
                    let [q, k, v, z] = by_key_head(c.num_key_heads, of_qkvz);
                    let [qkv, z] = columns::columns(qkvz, [[q, k, v].concat(), z])?;
                    let [b, a] = columns::columns(ba, by_key_head(c.num_key_heads, of_ba))?;
                    return Ok(Outputs::Split { qkv, z, b, a });
                }
                let [q, k, v, z] = narrowed(c, qkvz, of_qkvz)?;
                let [b, a] = narrowed(c, ba, of_ba)?;
                let qkv = Tensor::cat(&[q, k, v], last)?;
                Outputs::Split { qkv, z: z.contiguous()?, b: b.contiguous()?, a: a.contiguous()? }
            }
            (_, [qkv, z, b, a]) => Outputs::Split { qkv: qkv.clone(), z: z.clone(), b: b.clone(), a: a.clone() },
            (_, [q, k, v, z, b, a]) => {
                let qkv = Tensor::cat(&[q, k, v], last)?;
                Outputs::Split { qkv, z: z.clone(), b: b.clone(), a: a.clone() }
            }
            _ => unreachable!("as many outputs as projections"),
        })
    }
}

/// [`by_key_head`] of the columns of `x` as views where they may be, for devices that copy no runs of columns.
fn narrowed<const N: usize>(c: &GdnConfig, x: &Tensor, sizes: [usize; N]) -> Result<[Tensor; N]> {
    let (lead, _) = x.dims().split_at(x.rank() - 1);
    let heads = x.reshape([lead, &[c.num_key_heads, sizes.iter().sum()]].concat())?;
    let mut start = 0;
    let mut parts = Vec::with_capacity(N);
    for size in sizes {
        parts.push(heads.narrow(D::Minus1, start, size)?.flatten_from(lead.len())?);
        start += size;
    }
    Ok(parts.try_into().expect("a part for each size"))
}

/// What the input projection gave: tensors that the columns are views of.
#[derive(Debug, Clone)]
pub(super) enum Outputs {
    Fused(Tensor),
    Split { qkv: Tensor, z: Tensor, b: Tensor, a: Tensor },
}

/// The columns of the input projection, `[lead.., columns]`.
#[derive(Debug, Clone)]
pub(super) struct Projected {
    outputs: Outputs,
    pub qkv: Tensor,
    pub z: Tensor,
    pub gates: Gates,
}

impl Projected {
    pub fn new(c: &GdnConfig, outputs: Outputs, a_log: &Tensor, dt_bias: &Tensor) -> Result<Self> {
        let (a_log, dt_bias) = (a_log.clone(), dt_bias.clone());
        let (qkv, z, b, a) = match &outputs {
            Outputs::Fused(all) => {
                let (last, mut start) = (all.rank() - 1, 0);
                let mut columns = |n: usize| {
                    start += n;
                    all.narrow(last, start - n, n)
                };
                let (qkv, z) = (columns(c.conv_channels())?, columns(c.value_size())?);
                (qkv, z, columns(c.num_value_heads)?, columns(c.num_value_heads)?)
            }
            Outputs::Split { qkv, z, b, a } => (qkv.clone(), z.clone(), b.clone(), a.clone()),
        };
        Ok(Self { outputs, qkv, z, gates: Gates { a, b, a_log, dt_bias } })
    }

    /// With the batch and its tokens, `[batch, tokens, columns]`, as one dimension. Nothing is copied.
    pub fn packed(self, c: &GdnConfig) -> Result<Self> {
        let flat = |x: Tensor| x.flatten(0, 1);
        let outputs = match self.outputs {
            Outputs::Fused(all) => Outputs::Fused(flat(all)?),
            Outputs::Split { qkv, z, b, a } => {
                Outputs::Split { qkv: flat(qkv)?, z: flat(z)?, b: flat(b)?, a: flat(a)? }
            }
        };
        Self::new(c, outputs, &self.gates.a_log, &self.gates.dt_bias)
    }

    /// Bytes of device memory held.
    pub fn size_in_bytes(&self) -> usize {
        let bytes = |x: &Tensor| x.elem_count() * x.dtype().size_in_bytes();
        match &self.outputs {
            Outputs::Fused(all) => bytes(all),
            Outputs::Split { qkv, z, b, a } => [qkv, z, b, a].map(bytes).iter().sum(),
        }
    }
}
