//! What tensors are made of: inputs of three types, and states that are stored in two.

use super::dispatch::dispatch;
use candle_core::CpuStorage;
use half::{bf16, f16};
use pulp::{bytemuck, Simd, WithSimd};

/// An input element: read as `f32`, written rounded to nearest.
pub trait Element: Copy + Send + Sync + bytemuck::Zeroable + 'static {
    /// The zero value.
    const ZERO: Self;
    fn to_f32(self) -> f32;
    fn from_f32(x: f32) -> Self;
    /// The storage as a slice of this type, when it is of this type.
    fn slice(storage: &CpuStorage) -> Option<&[Self]>;
    fn slice_mut(storage: &mut CpuStorage) -> Option<&mut [Self]>;
    fn storage(data: Vec<Self>) -> CpuStorage;

    /// The first elements of `src`, as many as a vector has lanes.
    #[inline(always)]
    fn load<S: Simd>(_simd: S, src: &[Self]) -> S::f32s {
        load_lanes::<S, Self>(src)
    }
}

#[inline(always)]
fn load_lanes<S: Simd, T: Element>(src: &[T]) -> S::f32s {
    // A loop of constant length over an array becomes one widening load; over a slice it does not.
    macro_rules! lanes {
        ($n:literal) => {{
            let src = &src[..$n];
            let mut dst = [0f32; $n];
            for i in 0..$n {
                dst[i] = src[i].to_f32();
            }
            bytemuck::cast(dst)
        }};
    }
    match S::F32_LANES {
        16 => lanes!(16),
        8 => lanes!(8),
        4 => lanes!(4),
        1 => lanes!(1),
        n => unreachable!("vectors of {n} lanes"),
    }
}

macro_rules! element {
    ($ty:ty, $variant:ident, $zero:expr, $dst:expr, $src:expr $(, $load:item)?) => {
        impl Element for $ty {
            const ZERO: Self = $zero;
            #[inline(always)]
            fn to_f32(self) -> f32 {
                $dst(self)
            }
            #[inline(always)]
            fn from_f32(x: f32) -> Self {
                $src(x)
            }
            fn slice(storage: &CpuStorage) -> Option<&[Self]> {
                match storage {
                    CpuStorage::$variant(data) => Some(data),
                    _ => None,
                }
            }
            fn slice_mut(storage: &mut CpuStorage) -> Option<&mut [Self]> {
                match storage {
                    CpuStorage::$variant(data) => Some(data),
                    _ => None,
                }
            }
            fn storage(data: Vec<Self>) -> CpuStorage {
                CpuStorage::$variant(data)
            }
            $($load)?
        }
    };
}
element!(f32, F32, 0.0, |x| x, |x| x);
element!(bf16, BF16, bf16::ZERO, widen_bf16, round_bf16);
element!(
    f16,
    F16,
    f16::ZERO,
    widen_f16,
    f16::from_f32,
    // The processor's own conversion: one instruction in the place of nine.
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    fn load<S: Simd>(_simd: S, src: &[f16]) -> S::f32s {
        use std::{any::TypeId, arch::x86_64::*};
        if TypeId::of::<S>() == TypeId::of::<pulp::x86::V3>() {
            let halves: [f16; 8] = src[..8].try_into().expect("8 lanes");
            // SAFETY: `dispatch` gives out a V3 where the processor has F16C, and in code that is compiled for it.
            return bytemuck::cast(unsafe { _mm256_cvtph_ps(bytemuck::cast(halves)) });
        }
        if TypeId::of::<S>() == TypeId::of::<pulp::x86::V4>() {
            let halves: [f16; 16] = src[..16].try_into().expect("16 lanes");
            // SAFETY: a V4 is proof of AVX-512.
            return bytemuck::cast(unsafe { _mm512_cvtph_ps(bytemuck::cast(halves)) });
        }
        load_lanes::<S, f16>(src)
    }
);

/// `$run` with each `$storage` as the numbers in it, where all have the same one of the three types, else `$refused`.
#[macro_export]
macro_rules! by_dtype {
    ($($storage:ident),+ => $run:expr, else $refused:expr) => {
        match ($($storage,)+) {
            ($(candle_core::CpuStorage::F32($storage),)+) => $run,
            ($(candle_core::CpuStorage::BF16($storage),)+) => $run,
            ($(candle_core::CpuStorage::F16($storage),)+) => $run,
            _ => $refused,
        }
    };
}

// Written out, since those of `half` branch or ask for the processor's features at every element, and loops over them do
// not vectorise.

#[inline(always)]
fn widen_bf16(x: bf16) -> f32 {
    f32::from_bits(u32::from(x.to_bits()) << 16)
}

#[inline(always)]
fn round_bf16(x: f32) -> bf16 {
    let bits = x.to_bits();
    // To even: a half and nothing more carries only into an odd number. A NaN would carry into infinity or zero.
    let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
    let nan = bits >> 16 | 0x40;
    bf16::from_bits(if bits & 0x7fff_ffff > 0x7f80_0000 { nan } else { rounded } as u16)
}

#[inline(always)]
fn widen_f16(x: f16) -> f32 {
    const REBIAS: f32 = f32::from_bits((127 + 127 - 15) << 23);
    let half = x.to_bits();
    // Sign, exponent and mantissa where f32 has them; the copies of the sign between the first two go.
    let bits = (i32::from(half as i16) << 13) as u32 & 0x8fff_e000;
    // The exponent is too small by the difference of the biases; the product mends that for subnormal numbers as well.
    let finite = (f32::from_bits(bits) * REBIAS).to_bits();
    let infinite_or_nan = if half & 0x7c00 == 0x7c00 { 0x7f80_0000 } else { 0 };
    f32::from_bits(finite | infinite_or_nan)
}

/// An element of a stored state.
pub trait Stored: Element {
    /// `f` on the state in f32: on itself where it is, else on a copy that is rounded back to nearest even.
    fn in_f32(state: &mut [Self], f: impl FnOnce(&mut [f32]));
}

impl Stored for f32 {
    #[inline(always)]
    fn in_f32(state: &mut [f32], f: impl FnOnce(&mut [f32])) {
        f(state);
    }
}

impl Stored for bf16 {
    fn in_f32(state: &mut [bf16], f: impl FnOnce(&mut [f32])) {
        let mut copy = vec![0.0; state.len()];
        dispatch(Convert { src: state, dst: &mut copy, one: widen_bf16 });
        f(&mut copy);
        dispatch(Convert { src: &copy, dst: state, one: round_bf16 });
    }
}

struct Convert<'a, A, B, F> {
    src: &'a [A],
    dst: &'a mut [B],
    one: F,
}

impl<A: Copy, B, F: Fn(A) -> B> WithSimd for Convert<'_, A, B, F> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _simd: S) {
        assert_eq!(self.src.len(), self.dst.len());
        self.dst.iter_mut().zip(self.src).for_each(|(dst, &src)| *dst = (self.one)(src));
    }
}

#[cfg(test)]
mod tests;
