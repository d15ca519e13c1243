//! The memory of a file's weights once they are loaded.

use super::super::blocks::{float, row_bytes};
use super::header::TensorInfo;
use super::types::Kept;
use super::GgufFile;
use crate::config::ModelConfig;
use crate::memory::{quantized_bytes, quantized_cpu_bytes};
use candle_core::quantized::GgmlDType;
use candle_core::{DType, DeviceLocation};

const TABLE: &str = "token_embd.weight";

impl GgufFile {
    /// How many matrices [`Loader::quantize`](crate::Loader::quantize) converts to `dst`, or to what takes its place.
    pub fn converted(&self, dst: GgmlDType) -> usize {
        self.infos().filter(|(name, info)| converted(name, info, dst).is_some()).count()
    }

    /// Bytes of the weights of `config`, the file's own or with a draft head as its last layer, in `dtype` on a device. `quantize` is
    /// that of the loader.
    pub fn weight_bytes(
        &self,
        config: &ModelConfig,
        dtype: DType,
        quantize: Option<GgmlDType>,
        device: DeviceLocation,
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
            let dst = quantize.and_then(|dst| converted(name, info, dst)).or(info.of?.dtype())?;
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
        let layers = config.layers.len();
        let is_loaded = |name: &str| match name.strip_prefix("blk.").and_then(|rest| rest.split_once('.')) {
            Some((layer, _)) => layer.parse::<usize>().is_ok_and(|layer| layer < layers),
            None => true,
        };
        self.infos().filter(|(name, _)| is_loaded(name)).filter_map(bytes).sum()
    }
}

/// Whether a tensor is a matrix of projections or embeddings: routers and vectors are kept in f32.
fn is_matrix(name: &str, info: &TensorInfo) -> bool {
    info.dims.len() > 1 && ![".ffn_gate_inp", ".ssm_conv1d"].iter().any(|part| name.contains(part))
}

/// The type that a quantiser to `dst` gives a tensor; `None` where it leaves the tensor as it is.
fn converted(name: &str, info: &TensorInfo, dst: GgmlDType) -> Option<GgmlDType> {
    let is_left = match info.of?.kept {
        Kept::Same(dtype) => float(dtype).is_none(),
        Kept::Decoded(..) => false,
        Kept::Refused => true,
    };
    if is_left || name == TABLE || !is_matrix(name, info) {
        return None;
    }
    let (_, columns) = info.rows_and_columns();
    [dst, GgmlDType::Q8_0].into_iter().find(|dtype| row_bytes(*dtype, columns).is_some())
}
