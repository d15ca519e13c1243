//! A Gated DeltaNet layer out of a checkpoint of any format.

use super::linear::Linear;
use crate::formats::{Matrix, Source};
use candle_core::{bail, Result};
use candle_gdn::plumbing::deinterleaved;
use candle_gdn::{Algo, GatedDeltaNet, GdnConfig, GdnParts, InProjection};

/// The layer at `source`, which stands at `..linear_attn`: its matrices dense or quantised.
pub(crate) fn gated_delta_net(config: &GdnConfig, source: &Source) -> Result<GatedDeltaNet> {
    let c = config;
    let in_proj = if source.contains("in_proj_qkvz.weight") {
        interleaved(c, source)?
    } else if source.contains("in_proj_qkv.weight") || source.is_gguf() {
        split(c, source)?
    } else {
        bail!(
            "no Gated DeltaNet under `{0}`: expected the weight `{0}.in_proj_qkvz.weight` (Qwen3-Next) or \
             `{0}.in_proj_qkv.weight` (Qwen3.5 and later), found neither",
            source.prefix()
        );
    };
    let parts = GdnParts {
        in_proj: InProjection::Fused(Linear::stack(in_proj, source.device())?.into()),
        conv_weight: source.get((c.conv_channels(), 1, c.conv_kernel), "conv1d.weight")?,
        a_log: source.get(c.num_value_heads, "A_log")?,
        dt_bias: source.get(c.num_value_heads, "dt_bias")?,
        norm_weight: source.get(c.value_head_dim, "norm.weight")?,
        out_proj: Linear::load(&source.pp("out_proj"), c.value_size(), c.hidden_size)?.into(),
    };
    Ok(GatedDeltaNet::new(config, parts)?.with_algo(Algo::from_env()?))
}

/// Qwen3-Next: rows by key head, put in order before they are quantised.
fn interleaved(c: &GdnConfig, source: &Source) -> Result<Vec<Matrix>> {
    let rows = |rows: usize, name: &str| source.staged((rows, c.hidden_size), name);
    let qkvz = || {
        let qkvz = rows(c.conv_channels() + c.value_size(), "in_proj_qkvz.weight")?;
        deinterleaved(c, &qkvz, c.qkvz_sizes())
    };
    let ba = || deinterleaved(c, &rows(2 * c.num_value_heads, "in_proj_ba.weight")?, c.ba_sizes());
    let stored = source.e4m3(&[c.conv_channels() + c.value_size(), c.hidden_size], "in_proj_qkvz.weight")?;
    Ok(vec![
        match stored {
            Some(stored) => Matrix::E4m3(stored.in_order(|rows| deinterleaved(c, rows, c.qkvz_sizes()))?),
            None => source.matrix_of(&source.path("in_proj_qkvz.weight"), qkvz)?,
        },
        source.matrix_of(&source.path("in_proj_ba.weight"), ba)?,
    ])
}

/// Qwen3.5 and later: already split, rows by head.
fn split(c: &GdnConfig, source: &Source) -> Result<Vec<Matrix>> {
    let get = |rows: usize, name: &str| source.matrix(rows, c.hidden_size, name);
    Ok(vec![
        get(c.conv_channels(), "in_proj_qkv.weight")?,
        get(c.value_size(), "in_proj_z.weight")?,
        get(c.num_value_heads, "in_proj_b.weight")?,
        get(c.num_value_heads, "in_proj_a.weight")?,
    ])
}
