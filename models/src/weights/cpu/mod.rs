//! Products on the CPU.

pub(crate) mod experts;
pub(crate) mod quantized;
pub(crate) mod swiglu;
