//! Requests in, tokens out as they come.
//!
//! [`Engine`] is a plain struct that its owner drives; [`EngineHandle`] runs one on a thread of its own.

mod decode;
mod depth;
mod drafting;
mod fill;
mod filling;
mod flight;
mod graphs;
mod guess;
mod handle;
mod prefixes;
mod recover;
mod request;
mod row;
mod sampler;
mod scheduler;
#[cfg(test)]
mod tests;

pub use drafting::{DraftDepth, HeadTally};
pub use guess::DraftTally;
pub use handle::{EngineHandle, Submitted};
pub use prefixes::PrefixTally;
pub use request::{EngineOptions, EngineStats, Event, FinishReason, GraphChoice, Logprobs, Meter, Request, RequestId};
pub use sampler::{Sampling, SplitMix64};
pub use scheduler::Engine;
