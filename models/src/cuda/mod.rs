//! CUDA launchers behind the ops, one file a header of `models/cuda`.

pub(crate) mod logprobs;
pub(crate) mod model;
pub(crate) mod round;
pub(crate) mod sampling;
