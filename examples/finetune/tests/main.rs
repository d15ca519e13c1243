//! Training against torch, and the program around it. `CANDLE_GDN_GOLDENS` names the folder of the full golden files, which has the
//! Qwen3.5 checkpoints.

mod families;
mod files;
mod goldens;
mod one_step;
mod optimizer;
mod runs;
mod support;
