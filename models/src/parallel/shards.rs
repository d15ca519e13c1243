//! The rows or columns of each weight that a rank has.

use super::{Collective, Shard};
use crate::config::{ModelConfig, QkNorm};
use candle_core::Result;
use std::ops::Range;

/// A rank's shards of the weights of a model.
#[derive(Debug, Clone)]
pub(crate) struct WeightShards {
    /// That of the whole model.
    config: ModelConfig,
    shard: Shard,
}

/// Ranges along one dimension, kept in this order.
#[derive(Debug, PartialEq)]
pub(crate) struct DimRanges {
    pub dim: usize,
    /// Length of the dimension in the whole weight.
    pub of: usize,
    pub ranges: Vec<Range<usize>>,
}

/// A shard of matrices.
#[derive(Debug, PartialEq)]
pub(crate) enum RowsOrColumns {
    /// Numbered over all matrices, one below the other.
    Rows(Vec<Range<usize>>),
    Columns(Vec<Range<usize>>),
}

impl DimRanges {
    /// The shape of the whole weight from that of a shard.
    pub fn whole(&self, shard: &[usize]) -> Vec<usize> {
        let mut whole = shard.to_vec();
        whole[self.dim] = self.of;
        whole
    }

    /// The same as rows or columns of the matrices in a weight of shape `whole`. A vector has rows of one number.
    pub fn rows_or_columns(self, whole: &[usize]) -> RowsOrColumns {
        let last = whole.len().saturating_sub(1);
        if self.dim == last && self.dim > 0 {
            return RowsOrColumns::Columns(self.ranges);
        }
        let each: usize = whole.get(self.dim + 1..last).unwrap_or_default().iter().product();
        let matrices: usize = whole[..self.dim].iter().product();
        let row = |i: usize, index: usize| (i * self.of + index) * each;
        let of_matrix = |i: usize| self.ranges.iter().map(move |r| row(i, r.start)..row(i, r.end));
        RowsOrColumns::Rows((0..matrices).flat_map(of_matrix).collect())
    }
}

impl WeightShards {
    /// # Errors
    /// When the model cannot be divided among the ranks.
    pub fn new(config: &ModelConfig, group: &dyn Collective) -> Result<Self> {
        config.split(group.size())?;
        Ok(Self { config: config.clone(), shard: Shard::of_rank(group)? })
    }

    /// The rank's ranges of a weight whose shard has `shape`; `None` where every rank has the whole weight.
    pub fn ranges_of(&self, name: &str, shape: &[usize]) -> Option<DimRanges> {
        let (c, a, shard) = (&self.config.gdn, &self.config.attention, self.shard);
        let name = name.strip_suffix(".weight").unwrap_or(name);
        let mut parts = name.rsplit('.');
        let (last, above) = (parts.next()?, parts.next().unwrap_or_default());
        let along = |dim: usize| {
            let of = shape.get(dim)? * shard.size;
            Some(DimRanges { dim, of, ranges: vec![shard.range(of)] })
        };
        // q, k and v, or gate and up: a range of each.
        let sections = |dim: usize, sizes: &[usize]| {
            let mut start = 0;
            let ranges = sizes.iter().map(|size| {
                let range = shard.range(*size);
                start += size;
                start - size + range.start..start - size + range.end
            });
            Some(DimRanges { dim, ranges: ranges.collect(), of: sizes.iter().sum() })
        };
        match (above, last) {
            // By key head, with the value heads that belong to it.
            ("linear_attn", "in_proj_qkvz" | "in_proj_ba" | "in_proj_z" | "in_proj_b" | "in_proj_a") => along(0),
            ("linear_attn", "A_log" | "dt_bias") => along(0),
            ("linear_attn", "q_proj" | "k_proj" | "v_proj" | "g_proj" | "b_proj" | "a_proj") => along(0),
            // By head, as a rank reads them; files that have thirds: `in_thirds`.
            ("linear_attn", "q_conv1d" | "k_conv1d") if shape.first()? * shard.size == c.key_size() => along(0),
            ("linear_attn", "v_conv1d") if shape.first()? * shard.size == c.value_size() => along(0),
            ("linear_attn", "in_proj") => {
                let heads = c.num_value_heads;
                sections(0, &[c.key_size(), c.key_size(), c.value_size(), c.value_size(), heads, heads])
            }
            ("linear_attn", "in_proj_qkv" | "conv1d") => sections(0, &[c.key_size(), c.key_size(), c.value_size()]),
            ("linear_attn", "out_proj" | "o_proj") => along(1),
            ("self_attn", "q_norm" | "k_norm") if a.qk_norm == QkNorm::Head => None,
            ("self_attn", "q_proj" | "q_norm") => along(0),
            ("self_attn", "k_proj" | "v_proj" | "k_norm") if shard.size.is_multiple_of(a.num_kv_heads) => {
                let head = shard.rank * a.num_kv_heads / shard.size;
                let range = head * a.head_dim..(head + 1) * a.head_dim;
                Some(DimRanges { dim: 0, of: a.num_kv_heads * a.head_dim, ranges: vec![range] })
            }
            ("self_attn", "k_proj" | "v_proj" | "k_norm") => along(0),
            ("self_attn", "o_proj") => along(1),
            // All experts in one tensor.
            ("experts", "gate_up_proj") => {
                let inner = shape.get(1)? / 2 * shard.size;
                sections(1, &[inner, inner])
            }
            ("experts", "gate_proj" | "up_proj") => along(1),
            ("experts", "down_proj") => along(2),
            (_, "gate_proj" | "up_proj") => along(0),
            (_, "down_proj") => along(1),
            (_, "embed_tokens" | "lm_head") => along(0),
            _ => None,
        }
    }

    /// The rank's shard, of this shape, of one of OLMo-Hybrid's three convolutions where the file has thirds of the whole
    /// ([`GdnConfig::conv_thirds`](candle_gdn::GdnConfig::conv_thirds)), which may be cut inside a head: its rows in each of the
    /// tensors that it lies in. `None` for any other weight.
    pub fn in_thirds(&self, name: &str, shape: &[usize]) -> Option<Vec<(String, DimRanges)>> {
        const NAMES: [&str; 3] = ["q_conv1d.weight", "k_conv1d.weight", "v_conv1d.weight"];
        let c = &self.config.gdn;
        let (at, last) = name.rsplit_once("linear_attn.")?;
        let section = NAMES.iter().position(|name| *name == last)?;
        let kept = self.shard.range([c.key_size(), c.key_size(), c.value_size()][section]);
        if *shape.first()? != kept.len() {
            return None;
        }
        let wanted = section * c.key_size() + kept.start..section * c.key_size() + kept.end;
        let (mut parts, mut first) = (Vec::new(), 0);
        for (name, of) in NAMES.iter().zip(c.conv_thirds()) {
            let rows = wanted.start.clamp(first, first + of) - first..wanted.end.clamp(first, first + of) - first;
            if !rows.is_empty() {
                parts.push((format!("{at}linear_attn.{name}"), DimRanges { dim: 0, of, ranges: Vec::from([rows]) }));
            }
            first += of;
        }
        Some(parts)
    }
}

#[cfg(test)]
mod tests;
