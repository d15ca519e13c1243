//! What the worker shares with the program `generate`: how options are written, and `generation_config.json`.

#[allow(dead_code)]
#[path = "../../examples/generate/args.rs"]
pub mod args;
#[path = "../../examples/generate/settings.rs"]
pub mod settings;

use crate::common;
