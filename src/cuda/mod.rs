//! The CUDA side of dense projections and of the profile.

pub mod block_scaled;
pub mod linear;
#[cfg(feature = "profile")]
pub(crate) mod profile;
