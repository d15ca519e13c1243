//! Many sequences of one model at once: what a server or a chat with drafts and prefixes works with.
//!
//! * [`SequencePool`] holds what the layers remember: of each Gated DeltaNet layer a [`StatePool`](candle_gdn::StatePool),
//!   of each softmax layer keys and values by slot. [`CausalLm::new_sequences`](super::CausalLm::new_sequences) makes
//!   one.
//! * [`CausalLm::feed`](super::CausalLm::feed) takes tokens of any number of sequences, prompts and single tokens
//!   mixed, in one pass over packed tokens.
//! * [`CausalLm::verify`](super::CausalLm::verify) and [`CausalLm::accept`](super::CausalLm::accept) feed drafts of
//!   which a part may stay.
//! * [`Engine`] schedules requests on all of that: prompts in, tokens out as they come.
//! * [`DecodeGraph`] is a decode step of the whole model as one CUDA graph.
//!
//! The module docs of [`models`](super) tell how the same is built for another model.

#[cfg(feature = "cuda")]
mod capture;
mod drafts;
mod feed;
mod graph;
mod head;
mod kept;
mod kv;
#[cfg(feature = "cuda")]
mod landing;
mod pass;
mod pool;
mod round;
mod round_graph;
mod sampling;
#[cfg(test)]
mod sampling_tests;
mod serve;
mod snapshot;
#[cfg(any(feature = "cuda", test))]
mod step;
#[cfg(test)]
mod tests;

pub use drafts::Drafts;
pub use graph::DecodeGraph;
pub use pool::{Rings, Sequence, SequencePool};
pub use serve::{
    DraftDepth, DraftTally, Engine, EngineHandle, EngineOptions, EngineStats, Event, FinishReason, GraphChoice,
    HeadTally, Logprobs, Meter, PrefixTally, Request, RequestId, Sampling, SplitMix64, Submitted,
};
pub use snapshot::SequenceSnapshot;
