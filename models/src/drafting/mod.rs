//! Drafts: by the draft head of a checkpoint or by look-up in the text, and how deep.

#[cfg(feature = "cuda")]
mod cuda;
pub(crate) mod depth;
mod head_pass;
pub(crate) mod head_state;
pub(crate) mod lookup;
#[cfg(feature = "cuda")]
mod speculative_buffers;
#[cfg(feature = "cuda")]
pub(crate) mod speculative_graph;
#[cfg(all(test, feature = "cuda"))]
mod speculative_tests;
