//! What the tests of all packages share.

pub mod c_layout;
pub mod devices;
pub mod program;
pub mod skipped;
#[cfg(target_os = "linux")]
pub mod streams;
