//! Many sequences of one model: their memory, and the passes over them.
//!
//! * [`SequencePool`] holds what the layers remember: a [`StatePool`](candle_gdn::StatePool) of each Gated DeltaNet layer, keys and
//!   values by slot of each softmax layer. [`CausalLm::new_sequences`](crate::CausalLm::new_sequences) makes one.
//! * [`CausalLm::feed`](crate::CausalLm::feed) feeds tokens of any number of sequences, prompts and single tokens mixed, in one
//!   pass over packed tokens.
//! * [`CausalLm::verify`](crate::CausalLm::verify) and [`CausalLm::accept`](crate::CausalLm::accept) feed drafts and accept a part
//!   of them.
//! * [`DecodeGraph`] is a decode step of the whole model as one CUDA graph.

#[cfg(feature = "cuda")]
mod capture;
#[cfg(feature = "cuda")]
pub(crate) mod captured_step;
#[cfg(feature = "cuda")]
mod decode_buffers;
pub(crate) mod decode_graph;
mod feed;
pub(crate) mod fingerprint;
mod forward;
pub(crate) mod kv;
mod kv_segment;
mod new_pool;
pub(crate) mod pass;
pub(crate) mod pool;
#[cfg(feature = "cuda")]
pub(crate) mod readback;
mod snapshot;
mod state;
pub(crate) mod step_graph;
#[cfg(test)]
pub(crate) mod tests;
mod verify;

pub use decode_graph::DecodeGraph;
pub use new_pool::StateLayout;
pub use pool::{Sequence, SequencePool};
pub use snapshot::SequenceSnapshot;
pub use state::ModelState;
pub use verify::Drafts;
