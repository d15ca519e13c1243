//! CUDA launchers behind the ops, one file a header of `models/cuda`.

pub(crate) mod attention;
pub(crate) mod model;
pub(crate) mod moe;
#[cfg(feature = "nccl")]
pub(crate) mod nccl;
pub(crate) mod quantized;
