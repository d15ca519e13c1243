//! Requests in, tokens out as they come.
//!
//! [`Engine`] is a plain struct that its owner drives; [`EngineHandle`] drives one on a thread of its own. Its parts, each a file:
//! [`Queue`](queue::Queue) (requests that wait), [`Prompts`](prompts::Prompts) (prompts being fed), [`Batch`](batch::Batch) (completions),
//! [`Stepper`](stepper::Stepper) (decode steps), [`Drafter`](drafter::Drafter) (drafts) and [`Recovery`](recovery::Recovery) (failed passes).

mod batch;
mod core;
mod drafter;
#[allow(clippy::module_inception)]
mod engine;
mod event;
#[cfg(test)]
mod fault_tests;
mod graphs;
mod handle;
mod options;
mod prefix_cache;
mod prefixes;
mod prompts;
mod queue;
mod recovery;
mod request;
mod stats;
mod stepper;
#[cfg(test)]
mod tests;

pub use engine::Engine;
pub use event::{Event, FinishReason};
pub use handle::{
    EngineHandle, EngineMessages, Follower, Followers, MakeRequest, Observer, Progress, Submission, Submitted,
};
pub use options::{DraftDepth, EngineOptions, GraphChoice};
pub use request::{Request, RequestId};
pub use stats::EngineStats;
