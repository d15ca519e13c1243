//! The memory of a file's weights once they are loaded.

use super::super::blocks::float;
use super::super::type_for;
use super::header::TensorInfo;
use super::names::is_of_model;
use super::types::{GgmlType, Kept};
use super::GgufFile;
use crate::config::ModelConfig;
use crate::memory::{quantized_bytes, quantized_cpu_bytes};
use candle_core::quantized::GgmlDType;
use candle_core::{DType, DeviceLocation};
use std::collections::BTreeMap;

const TABLE: &str = "token_embd.weight";
/// Matrices whose columns are divided among ranks.
const BY_COLUMNS: [&str; 5] = [".attn_output.", SSM_OUT, ".ffn_down.", ".ffn_down_exps.", ".ffn_down_shexp."];
const SSM_OUT: &str = ".ssm_out.";

impl GgufFile {
    /// How many matrices of `config`, the file's own or with a draft head as its last layer,
    /// [`Loader::quantize`](crate::Loader::quantize) converts to `dst`, or to what takes its place.
    pub fn converted(&self, config: &ModelConfig, dst: GgmlDType) -> usize {
        let is_converted =
            |(name, info): (&str, &TensorInfo)| converted(name, info, info.rows_and_columns().1, dst).is_some();
        self.of_model(config).filter(|tensor| is_converted(*tensor)).count()
    }

    /// Whether any matrix of `config` is quantised.
    pub fn is_quantized(&self, config: &ModelConfig) -> bool {
        let is_quantized = |of: &GgmlType| of.dtype().is_some_and(|dtype| float(dtype).is_none());
        self.of_model(config).any(|(_, info)| info.of.is_some_and(is_quantized))
    }

    /// The types, by ggml's names, whose tensors are decoded as they are read and kept in another type, for which there are
    /// kernels; with that type and how many tensors of `config` they are.
    pub fn kept_types(&self, config: &ModelConfig) -> Vec<(&'static str, GgmlDType, usize)> {
        let mut counts = BTreeMap::new();
        for (_, info) in self.of_model(config) {
            if let Some(GgmlType { name, kept: Kept::Decoded(dtype, _), .. }) = info.of {
                counts.entry(*name).or_insert((*name, *dtype, 0)).2 += 1;
            }
        }
        counts.into_values().collect()
    }

    /// Bytes of the weights of `config`, the file's own or with a draft head as its last layer, in `dtype` on a device: those of one of
    /// `ranks` ranks, but for the little that each rank has whole. `quantize` is that of the loader.
    pub fn weight_bytes(
        &self,
        config: &ModelConfig,
        dtype: DType,
        quantize: Option<GgmlDType>,
        device: DeviceLocation,
        ranks: usize,
    ) -> u64 {
        let (is_cpu, tied) = (device == DeviceLocation::Cpu, config.tie_word_embeddings);
        let blocks = |dtype: GgmlDType, numbers: u64, is_multiplied: bool| match (is_cpu, is_multiplied) {
            (false, _) => quantized_bytes(dtype, numbers),
            (true, false) => quantized_cpu_bytes(dtype, numbers)[0],
            (true, true) => quantized_cpu_bytes(dtype, numbers).iter().sum(),
        };
        let bytes = |(name, info): (&str, &TensorInfo)| {
            let (rows, columns) = info.rows_and_columns();
            let (numbers, is_table) = (rows.saturating_mul(columns) as u64, name == TABLE);
            let columns = self.columns_of_shard(name, columns, config, ranks);
            let dst = quantize.and_then(|dst| converted(name, info, columns, dst)).or(info.of?.dtype())?;
            let Some(dst) = type_for(dst, columns) else {
                return Some(numbers.saturating_mul(dtype.size_in_bytes() as u64));
            };
            let Some(own) = float(dst) else { return Some(blocks(dst, numbers, !is_table || tied)) };
            let size = match is_cpu {
                _ if !is_matrix(name, info) => DType::F32.size_in_bytes(),
                // On the CPU numbers stay in the 16 bits that hold them, but for a table that is not the head.
                true if !is_table || tied && quantize.is_none() => dtype.size_in_bytes().min(own.size_in_bytes()),
                _ => dtype.size_in_bytes(),
            };
            // A tied head is quantised, its table is not.
            let head = quantize.filter(|_| is_table && tied).map_or(0, |dst| blocks(dst, numbers, true));
            Some(numbers.saturating_mul(size as u64) + head)
        };
        let all: u64 = self.of_model(config).filter_map(bytes).sum();
        all.div_ceil(ranks.max(1) as u64)
    }

    /// Its tensors that belong to a model with these layers.
    fn of_model(&self, config: &ModelConfig) -> impl Iterator<Item = (&str, &TensorInfo)> {
        let layers = config.layers.len();
        self.infos().filter(move |(name, _)| is_of_model(name, layers))
    }

    /// The columns that must be whole blocks: of a rank's shard those that follow each other in the file.
    fn columns_of_shard(&self, name: &str, columns: usize, config: &ModelConfig, ranks: usize) -> usize {
        if ranks < 2 || !BY_COLUMNS.iter().any(|tensor| name.contains(tensor)) {
            return columns;
        }
        let (keys, values) = (config.gdn.num_key_heads.max(1), config.gdn.num_value_heads);
        let is_tiled = name.contains(SSM_OUT) && self.tiles_value_heads(config.family).unwrap_or(false);
        columns / ranks / if is_tiled { (values / keys).max(1) } else { 1 }
    }
}

/// Whether a tensor is a matrix of projections or embeddings: routers and vectors are kept in f32.
fn is_matrix(name: &str, info: &TensorInfo) -> bool {
    info.dims.len() > 1 && ![".ffn_gate_inp", ".ssm_conv1d"].iter().any(|part| name.contains(part))
}

/// The type that a quantiser to `dst` gives a tensor, or a shard of so many columns; `None` where it leaves it as it is.
fn converted(name: &str, info: &TensorInfo, columns: usize, dst: GgmlDType) -> Option<GgmlDType> {
    let is_left = match info.of?.kept {
        Kept::Same(dtype) => float(dtype).is_none(),
        Kept::Decoded(..) => false,
        Kept::Refused => true,
    };
    if is_left || name == TABLE || !is_matrix(name, info) {
        return None;
    }
    type_for(dst, columns)
}
