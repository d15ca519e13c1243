//! The generate and perplexity examples as a user runs them, on the CPU.

mod chat;
#[path = "../support/cli.rs"]
mod cli;
#[path = "../../../examples/common/dummy.rs"]
mod dummy;
mod faults;
mod generate;
mod gguf;
#[path = "../support/gguf_writer.rs"]
#[allow(dead_code)]
mod gguf_writer;
#[path = "../support/golden.rs"]
mod golden;
#[path = "../../../tests/support/skipped.rs"]
mod skipped;
// Has tests of its own.
#[path = "../../../examples/common/gpu_count.rs"]
mod gpu_count;
#[path = "../support/hub.rs"]
mod hub;
mod many;
mod memory;
mod parallel;
mod perplexity;
#[path = "../support/tiny.rs"]
#[allow(dead_code)]
mod tiny;
