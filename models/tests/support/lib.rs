//! Checkpoints for the tests of models and programs.
#![allow(clippy::new_without_default, reason = "test data has no default")]

pub mod demo;
pub mod gguf_writer;
pub mod golden;
pub mod serving;
pub mod tiny;
