//! Blocks, checkpoint formats, models and sequences, on the CPU and, built with `--features cuda` on a machine with a GPU,
//! on CUDA: one binary, the same cases.
//!
//! `CANDLE_GDN_TEST_DEVICE=cpu|cuda` picks one device; `cuda` fails where there is none.
//! `CANDLE_GDN_GOLDENS` names the folder of the full golden files, which has the Qwen3.5 checkpoints.
//! `CANDLE_GDN_SOAK` sets the number of calls of the soak tests, and of allocations on a GPU that are made to fail; from 1000 on
//! 1,000 prompts are completed with drafts, and 10^5 tokens drawn; below 400 a perplexity is not taken token by token.

mod attention;
mod attention_case;
mod broken_files;
mod decode_graph;
mod device_memory;
mod draft_engine;
mod draft_head;
mod draft_head_formats;
mod dying_ranks;
mod engine;
mod engine_faults;
mod engine_soak;
mod families;
mod faults;
mod fp8;
mod fp8_files;
mod fused;
mod gguf;
mod gguf_entries;
mod gguf_refused;
mod logprobs;
mod lora;
mod lora_families;
mod lora_refused;
mod model;
mod moe;
mod norm_eps;
mod parallel;
mod parallel_quantised;
mod quantize;
mod read_once;
mod safetensors;
mod sequences;
mod sequences_soak;
mod windows;
mod yarn;

use candle_gdn_models_testing::{gguf_writer, golden, serving, tiny};
use candle_gdn_testing::devices as support;
