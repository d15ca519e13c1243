//! Products on the CPU.

pub(crate) mod bytes;
pub(crate) mod experts;
pub(crate) mod swiglu;
