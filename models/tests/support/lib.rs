//! Checkpoints for the tests of models and programs.

pub mod demo;
pub mod gguf_writer;
pub mod golden;
pub mod serving;
pub mod tiny;
