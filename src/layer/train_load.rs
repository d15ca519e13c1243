//! The layer in training out of a checkpoint, or new.

use super::layout::{Layout, SEPARATE};
use super::load::{convolutions, init_weights, Matrices};
use super::{GdnConfig, GdnParts, InProjection, Projection, TrainableGatedDeltaNet};
use candle_core::Result;
use candle_gdn_core::device::Working;
use candle_nn::{Linear, VarBuilder};

impl TrainableGatedDeltaNet {
    /// The layer with the weights under `vb`, which stands at `..linear_attn`, in any layout of published checkpoints, which
    /// is recognised by its names as in [`GatedDeltaNet::load`](crate::GatedDeltaNet::load). Projections and convolutions stay
    /// in that layout. `A_log`, `dt_bias` and the norm are read in f32, the rest in vb's dtype.
    ///
    /// What `vb` gives is used as it is: variables of a `VarMap` are trained, tensors of a file are constants.
    ///
    /// # Errors
    /// When the config does not fit together, or a weight is missing or misshapen (the message names it).
    pub fn load(config: &GdnConfig, vb: VarBuilder) -> Result<Self> {
        Self::load_with(config, vb, |_, linear| Ok(Projection::new(linear)))
    }

    /// The same with a choice of what each projection becomes: `wrap` gets its name in the checkpoint (`in_proj_qkvz`, `q_proj`, `out_proj`) and its matrix. It
    /// returns the matrix itself ([`Projection::new`]), or a module with a LoRA around it ([`Projection::module`]).
    ///
    /// # Errors
    /// As [`Self::load`], and when `wrap` fails.
    pub fn load_with(
        config: &GdnConfig,
        vb: VarBuilder,
        mut wrap: impl FnMut(&str, Linear) -> Result<Projection>,
    ) -> Result<Self> {
        let _working = Working::new(vb.device());
        config.check()?;
        let (c, heads) = (config, config.num_value_heads);
        let mut projection = |name: &str, outputs: usize, inputs: usize| {
            let weight = vb.matrix(outputs, inputs, &format!("{name}.weight"))?;
            wrap(name, Linear::new(weight, None))
        };
        let mut input = |name: &str, outputs: usize| projection(name, outputs, c.hidden_size);
        let layout = Layout::find(&vb.prefix(), |name| vb.contains_tensor(name))?;
        let in_proj = match layout {
            Layout::Interleaved => InProjection::Interleaved {
                qkvz: input("in_proj_qkvz", c.conv_channels() + c.value_size())?,
                ba: input("in_proj_ba", 2 * heads)?,
            },
            Layout::Split => InProjection::Split {
                qkv: input("in_proj_qkv", c.conv_channels())?,
                z: input("in_proj_z", c.value_size())?,
                b: input("in_proj_b", heads)?,
                a: input("in_proj_a", heads)?,
            },
            Layout::OneMatrix => InProjection::Fused(input("in_proj", c.section_rows().iter().sum())?),
            Layout::Separate => {
                let mut section = SEPARATE.iter().zip(c.section_rows()).map(|(name, rows)| input(name, rows));
                let mut next = || section.next().expect("a section for each");
                InProjection::Separate { q: next()?, k: next()?, v: next()?, z: next()?, b: next()?, a: next()? }
            }
        };
        let out_proj = projection(layout.out_proj(), c.hidden_size, c.value_size())?;
        let parts = GdnParts {
            in_proj,
            conv_weight: match layout {
                Layout::Separate => convolutions(c, |shape, name| vb.tensor((&shape).into(), name))?,
                _ => vb.tensor((c.conv_channels(), 1, c.conv_kernel).into(), "conv1d.weight")?.into(),
            },
            a_log: vb.vector(heads, "A_log")?,
            dt_bias: vb.vector(heads, "dt_bias")?,
            norm_weight: vb.vector(c.value_head_dim, layout.norm())?,
            out_proj,
        };
        Self::new(config, parts)
    }

    /// A new layer with weights under `vb`, which stands at `..linear_attn` of a `VarMap`, with the names and the values of
    /// [`GatedDeltaNet::init`](crate::GatedDeltaNet::init). A weight that `vb` has already stays.
    ///
    /// # Errors
    /// When the config does not fit together, `vb` has the weights of another layout or shape, or is no map that can grow.
    pub fn init(config: &GdnConfig, vb: VarBuilder) -> Result<Self> {
        init_weights(config, &vb)?;
        Self::load(config, vb)
    }
}
