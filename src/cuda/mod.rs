//! The CUDA side of dense projections and of the profile.

#[cfg(feature = "profile")]
pub(crate) mod profile;
