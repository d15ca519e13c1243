//! Which instruction set the processor has.

use pulp::{Arch, WithSimd};

/// The best instruction set of this machine, looked up once.
pub fn arch() -> Arch {
    static ARCH: std::sync::OnceLock<Arch> = std::sync::OnceLock::new();
    *ARCH.get_or_init(Arch::new)
}

/// Runs a closure-like job with the best instruction set.
pub fn dispatch<Op: WithSimd>(op: Op) -> Op::Output {
    arch().dispatch(op)
}
