//! Which instruction set the processor has.

use pulp::{Arch, WithSimd};

/// The best instruction set of this machine, looked up once. `CANDLE_GDN_AVX512=0` leaves AVX-512 out, to measure what
/// processors without it do.
pub fn arch() -> Arch {
    static ARCH: std::sync::OnceLock<Arch> = std::sync::OnceLock::new();
    *ARCH.get_or_init(|| {
        let found = match std::env::var_os("CANDLE_GDN_AVX512") {
            #[cfg(target_arch = "x86_64")]
            Some(value) if value == "0" => pulp::x86::V3::try_new().map_or(Arch::Scalar, Arch::V3),
            _ => Arch::new(),
        };
        match found {
            // `dispatch` relies on F16C, which every known processor with AVX2 has.
            #[cfg(target_arch = "x86_64")]
            Arch::V3(_) if !std::arch::is_x86_feature_detected!("f16c") => Arch::Scalar,
            found => found,
        }
    })
}

/// Runs a closure-like job with the best instruction set.
pub fn dispatch<Op: WithSimd>(op: Op) -> Op::Output {
    match arch() {
        // SAFETY: the processor has what V3 stands for, and F16C, which `arch` asked for.
        #[cfg(target_arch = "x86_64")]
        Arch::V3(simd) => unsafe { with_f16c(op, simd) },
        arch => arch.dispatch(op),
    }
}

/// What [`Arch::dispatch`] does for V3, which lacks the conversions of f16.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,bmi1,bmi2,f16c,fma,fxsr,lzcnt,popcnt")]
unsafe fn with_f16c<Op: WithSimd>(op: Op, simd: pulp::x86::V3) -> Op::Output {
    op.with_simd(simd)
}
