//! CUDA launchers behind the ops, one file a header of `models/cuda`.

pub(crate) mod attention;
pub(crate) mod logprobs;
pub(crate) mod model;
#[cfg(feature = "nccl")]
pub(crate) mod nccl;
pub(crate) mod round;
pub(crate) mod sampling;
