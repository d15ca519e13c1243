//! The generate and perplexity examples as a user runs them, on the CPU.

mod chat;
#[path = "../support/cli.rs"]
mod cli;
// Has tests of its own.
#[path = "../../../examples/common/mod.rs"]
mod common;
mod cut_files;
mod faults;
mod generate;
mod gguf;
#[path = "../support/gguf_writer.rs"]
#[allow(dead_code)]
mod gguf_writer;
#[path = "../support/golden.rs"]
mod golden;
mod host_memory;
#[path = "../support/hub.rs"]
mod hub;
mod interrupts;
mod many;
mod memory;
mod mtp;
mod output;
mod parallel;
mod perplexity;
#[path = "../../../tests/support/skipped.rs"]
mod skipped;
#[path = "../support/tiny.rs"]
#[allow(dead_code)]
mod tiny;
