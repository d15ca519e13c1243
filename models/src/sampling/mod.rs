//! From logits to the next tokens: on CUDA where the logits lie, so that only the tokens come to the host.

mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
mod options;
#[cfg(feature = "cuda")]
pub(crate) mod rows;
mod sampler;
#[cfg(test)]
mod tests;

pub use options::{Sampling, SplitMix64};
pub use sampler::Logprobs;
pub(crate) use sampler::{Choice, Drawn, Sampler, Token};
