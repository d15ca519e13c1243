//! A layer out of a checkpoint, in any of the layouts that are published.

use super::columns::by_key_head;
use super::layout::{Layout, FIRST, SEPARATE};
use super::{ConvWeight, GatedDeltaNet, GdnConfig, GdnParts, InProjection, Projection};
use crate::linear::DenseWeight;
use candle_core::{bail, DType, Result, Shape, Tensor};
use candle_gdn_core::device::Working;
use candle_nn::{Init, VarBuilder};
use std::ops::Range;

/// The weights of one layer, by their names under `..linear_attn`: whatever number format their matrices are in.
pub trait Matrices {
    /// A matrix `[rows, columns]` before a projection is made of it.
    type Matrix;
    /// Where the layer is, for messages.
    fn prefix(&self) -> String;
    /// Whether there is a weight of this name, such as `in_proj_qkv.weight`.
    fn contains(&self, name: &str) -> bool;
    /// The matrix `[rows, columns]` of this name; an error names one that is missing or has another shape.
    fn matrix(&self, rows: usize, columns: usize, name: &str) -> Result<Self::Matrix>;
    /// The rows of `matrix` in the order of `ranges`.
    fn select_rows(&self, matrix: Self::Matrix, ranges: &[Range<usize>]) -> Result<Self::Matrix>;
    /// One projection whose outputs are the rows of all matrices, in this order.
    fn projection(&self, matrices: Vec<Self::Matrix>) -> Result<Projection>;
    /// A dense weight of any shape, such as `conv1d.weight`, in the layer's dtype.
    fn tensor(&self, shape: Shape, name: &str) -> Result<Tensor>;
    /// A vector that the layer keeps in f32, such as `A_log`: never rounded to another dtype on its way.
    fn vector(&self, len: usize, name: &str) -> Result<Tensor>;
}

impl Matrices for VarBuilder<'_> {
    type Matrix = Tensor;

    fn prefix(&self) -> String {
        VarBuilder::prefix(self)
    }

    fn contains(&self, name: &str) -> bool {
        self.contains_tensor(name)
    }

    fn matrix(&self, rows: usize, columns: usize, name: &str) -> Result<Tensor> {
        self.tensor((rows, columns).into(), name)
    }

    fn select_rows(&self, matrix: Tensor, ranges: &[Range<usize>]) -> Result<Tensor> {
        select_rows(&matrix, ranges)
    }

    fn projection(&self, matrices: Vec<Tensor>) -> Result<Projection> {
        Ok(DenseWeight::new(Tensor::cat(&matrices, 0)?)?.into())
    }

    fn tensor(&self, shape: Shape, name: &str) -> Result<Tensor> {
        check_present(self, name)?;
        self.get(shape, name)
    }

    fn vector(&self, len: usize, name: &str) -> Result<Tensor> {
        check_present(self, name)?;
        self.get_with_hints_dtype(len, name, Init::default(), DType::F32)
    }
}

/// A map of variables that lacks a weight makes one, of zeros, when it is asked for it.
fn check_present(vb: &VarBuilder, name: &str) -> Result<()> {
    if !vb.contains_tensor(name) {
        let prefix = vb.prefix();
        let path = if prefix.is_empty() { name.to_owned() } else { format!("{prefix}.{name}") };
        bail!("linear attention: expected the weight `{path}`, found none");
    }
    Ok(())
}

/// The rows of `matrix [rows, ..]` in the order of `ranges`, copied.
///
/// # Errors
/// When a range lies outside the matrix.
pub fn select_rows(matrix: &Tensor, ranges: &[Range<usize>]) -> Result<Tensor> {
    let _working = Working::new(matrix.device());
    let rows = ranges.iter().map(|range| matrix.narrow(0, range.start, range.len()));
    Tensor::cat(&rows.collect::<Result<Vec<_>>>()?, 0)
}

impl GatedDeltaNet {
    /// Loads the layer from the weights under `vb`, which stands at `..linear_attn`.
    ///
    /// The layouts of published checkpoints are recognised by their names: Qwen3-Next's `in_proj_qkvz` and `in_proj_ba`
    /// (interleaved by key head); the split `in_proj_qkv`, `in_proj_z`, `in_proj_b` and `in_proj_a` of Qwen3.5 and later;
    /// Lara-4-Mini's one `in_proj`; OLMo-Hybrid's separate `q_proj`, `k_proj`, `v_proj`, `g_proj`, `b_proj` and `a_proj`, with a
    /// convolution each of q, k and v. All become one projection. `A_log`, `dt_bias` and the norm are read in f32, the
    /// rest in vb's dtype.
    ///
    /// Weights are read once, here: see [`GatedDeltaNet`](Self#training).
    ///
    /// # Errors
    /// When the config does not fit together, or a weight is missing or misshapen (the message names it).
    pub fn load(config: &GdnConfig, vb: VarBuilder) -> Result<Self> {
        let _working = Working::new(vb.device());
        Self::load_from(config, &vb)
    }

    /// A new layer with weights under `vb`, which stands at `..linear_attn` of a `VarMap`: with the names of Qwen3.5, so that
    /// the map's file loads as a checkpoint does, and the values that transformers begins with. Projections and convolution
    /// are normal with a deviation of 0.02, `A_log` is the logarithm of uniform values from 0.01 to 16, `dt_bias` and the norm
    /// are ones. `A_log`, `dt_bias` and the norm are in f32, the rest in vb's dtype. A weight that `vb` has already stays.
    ///
    /// Weights are read once, here: see [`GatedDeltaNet`](Self#training).
    ///
    /// ```
    /// # use candle_core::{DType, Device, Result};
    /// # use candle_gdn::{GatedDeltaNet, GdnConfig};
    /// # fn main() -> Result<()> {
    /// let weights = candle_nn::VarMap::new();
    /// let vb = candle_nn::VarBuilder::from_varmap(&weights, DType::F32, &Device::Cpu);
    /// let layer = GatedDeltaNet::init(&GdnConfig::new(32, (2, 16), (4, 16)), vb.pp("linear_attn"))?;
    /// assert!(weights.data().lock().unwrap().contains_key("linear_attn.in_proj_qkv.weight"));
    /// # let _ = layer;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// When the config does not fit together, `vb` has the weights of another layout or shape, or is no map that can grow.
    pub fn init(config: &GdnConfig, vb: VarBuilder) -> Result<Self> {
        init_weights(config, &vb)?;
        Self::load(config, vb)
    }

    /// [`GatedDeltaNet::load`] with matrices of any number format, which `weights` knows.
    ///
    /// # Errors
    /// As [`GatedDeltaNet::load`].
    pub fn load_from<M: Matrices>(config: &GdnConfig, weights: &M) -> Result<Self> {
        config.check()?;
        let (c, heads) = (config, config.num_value_heads);
        let get = |rows: usize, name: &str| weights.matrix(rows, c.hidden_size, name);
        let layout = Layout::find(&weights.prefix(), |name| weights.contains(name))?;
        let in_proj = match layout {
            Layout::Interleaved => vec![
                weights.select_rows(
                    get(c.conv_channels() + c.value_size(), "in_proj_qkvz.weight")?,
                    &by_key_head(c.num_key_heads, c.qkvz_sizes()).concat(),
                )?,
                weights.select_rows(
                    get(2 * heads, "in_proj_ba.weight")?,
                    &by_key_head(c.num_key_heads, c.ba_sizes()).concat(),
                )?,
            ],
            Layout::Split => vec![
                get(c.conv_channels(), "in_proj_qkv.weight")?,
                get(c.value_size(), "in_proj_z.weight")?,
                get(heads, "in_proj_b.weight")?,
                get(heads, "in_proj_a.weight")?,
            ],
            Layout::OneMatrix => vec![get(c.section_rows().iter().sum(), "in_proj.weight")?],
            Layout::Separate => {
                let matrices = SEPARATE.iter().zip(c.section_rows());
                matrices.map(|(name, rows)| get(rows, &format!("{name}.weight"))).collect::<Result<_>>()?
            }
        };
        let out_proj = weights.matrix(c.hidden_size, c.value_size(), &format!("{}.weight", layout.out_proj()))?;
        let conv_weight = match layout {
            Layout::Separate => convolutions(c, |shape, name| weights.tensor((&shape).into(), name))?,
            _ => weights.tensor((c.conv_channels(), 1, c.conv_kernel).into(), "conv1d.weight")?.into(),
        };
        let parts = GdnParts {
            in_proj: InProjection::Fused(weights.projection(in_proj)?),
            conv_weight,
            a_log: weights.vector(heads, "A_log")?,
            dt_bias: weights.vector(heads, "dt_bias")?,
            norm_weight: weights.vector(c.value_head_dim, layout.norm())?,
            out_proj: weights.projection(vec![out_proj])?,
        };
        Self::new(config, parts)
    }
}

/// The convolutions of q, k and v. transformers joins whatever it finds in the three tensors, and saves thirds of the whole, which
/// are cut elsewhere than q, k and v where V is not K.
pub(super) fn convolutions(c: &GdnConfig, get: impl Fn([usize; 3], &str) -> Result<Tensor>) -> Result<ConvWeight> {
    let three = |[q, k, v]: [usize; 3]| {
        let get = |rows, name| get([rows, 1, c.conv_kernel], name);
        Ok(ConvWeight::Separate([get(q, "q_conv1d.weight")?, get(k, "k_conv1d.weight")?, get(v, "v_conv1d.weight")?]))
    };
    three([c.key_size(), c.key_size(), c.value_size()]).or_else(|error| three(c.conv_thirds()).map_err(|_| error))
}

/// Adds to `vb` those weights of a layer in Qwen3.5's layout that it does not have yet; see [`GatedDeltaNet::init`].
pub(super) fn init_weights(config: &GdnConfig, vb: &VarBuilder) -> Result<()> {
    let _working = Working::new(vb.device());
    config.check()?;
    let (c, heads, normal) = (config, config.num_value_heads, Init::Randn { mean: 0.0, stdev: 0.02 });
    let mut others = FIRST.iter().filter(|(_, layout)| *layout != Layout::Split);
    if let Some((name, _)) = others.find(|(name, _)| vb.contains_tensor(name)) {
        bail!("GatedDeltaNet: init: {name}: expected no weights of a layout but Qwen3.5's; use load");
    }
    for (name, rows) in [
        ("in_proj_qkv.weight", c.conv_channels()),
        ("in_proj_z.weight", c.value_size()),
        ("in_proj_b.weight", heads),
        ("in_proj_a.weight", heads),
    ] {
        vb.get_with_hints((rows, c.hidden_size), name, normal)?;
    }
    vb.get_with_hints((c.hidden_size, c.value_size()), "out_proj.weight", normal)?;
    vb.get_with_hints((c.conv_channels(), 1, c.conv_kernel), "conv1d.weight", normal)?;
    let vector = |len, name, init| vb.get_with_hints_dtype(len, name, init, DType::F32);
    vector(heads, "dt_bias", Init::Const(1.0))?;
    vector(c.value_head_dim, "norm.weight", Init::Const(1.0))?;
    let is_new = !vb.contains_tensor("A_log");
    let a_log = vector(heads, "A_log", Init::Uniform { lo: 0.01, up: 16.0 })?;
    if is_new {
        // A map has no other way to its variable than the tensor that shares its memory.
        a_log.slice_set(&a_log.detach().log()?, 0, 0)?;
    }
    Ok(())
}
