//! Which instruction set the processor has.

use pulp::{Arch, WithSimd};

/// The best instruction set of this machine, looked up once. `CANDLE_GDN_AVX512=0` leaves AVX-512 out, to measure what
/// processors without it do.
pub fn arch() -> Arch {
    static ARCH: std::sync::OnceLock<Arch> = std::sync::OnceLock::new();
    *ARCH.get_or_init(|| match std::env::var_os("CANDLE_GDN_AVX512") {
        #[cfg(target_arch = "x86_64")]
        Some(value) if value == "0" => pulp::x86::V3::try_new().map_or(Arch::Scalar, Arch::V3),
        _ => Arch::new(),
    })
}

/// Runs a closure-like job with the best instruction set.
pub fn dispatch<Op: WithSimd>(op: Op) -> Op::Output {
    arch().dispatch(op)
}
