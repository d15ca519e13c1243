//! CUDA launchers behind the ops, one file a header of `models/cuda`.

pub(crate) mod model;
