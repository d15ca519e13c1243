//! Ops, layer and models against the f64 reference and the golden files, on the CPU and, built with `--features cuda` on a
//! machine with a GPU, on CUDA: one binary, the same cases.
//!
//! `CANDLE_GDN_TEST_DEVICE=cpu|cuda` picks one device; `cuda` fails where there is none.
//! `CANDLE_GDN_GOLDENS` names the folder of the full golden files (default: the thinned ones of this repository, which
//! are without the Qwen3.5 checkpoints). `CANDLE_GDN_SOAK` sets the number of calls of the soak tests.

mod attention;
mod checkpoints;
mod conv_norm;
mod decode_graph;
mod errors;
mod fused;
mod gguf;
#[path = "../../examples/common/gguf_tokenizer.rs"]
mod gguf_tokenizer;
#[path = "../support/gguf_writer.rs"]
mod gguf_writer;
#[path = "../support/golden.rs"]
mod golden;
mod goldens;
mod layer;
mod model;
mod moe;
mod parallel;
mod parallel_quantised;
mod pool;
#[cfg(feature = "profile")]
mod profile;
mod properties;
mod random_layer;
mod rule_case;
mod semantics;
mod sequences;
mod sequences_soak;
mod sixteen_bits;
mod slots;
mod soak;
mod step;
mod stored_state;
mod support;
mod tensor_cores;
mod threads;
#[path = "../support/tiny.rs"]
mod tiny;
mod token_states;
mod verify;
