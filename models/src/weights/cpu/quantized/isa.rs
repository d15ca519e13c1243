//! What the products want of a processor.

use super::layout::Layout;
use super::rounded::{self, Block, Words};
use super::tile::{self, Task};
#[cfg(target_arch = "x86_64")]
use super::x86::{Avx2, Avx512};
#[cfg(target_arch = "x86_64")]
use candle_gdn_core::cpu::simd::arch;
#[cfg(target_arch = "x86_64")]
use pulp::Arch;

/// Bytes of a line, which has four columns of sixteen rows.
pub(super) const LINE: usize = 64;

/// Vectors of an instruction set. The functions of an `Isa` want its instructions, and to be inlined where those are enabled.
pub(super) trait Isa {
    /// Four bytes for each of some rows.
    type Bytes: Copy;
    /// A number for each of them.
    type Floats: Copy;
    /// Whole numbers that are being added up.
    type Sum: Copy;
    /// Vectors of a line.
    const PARTS: usize;
    /// Whether bytes of 8 bits are multiplied as signed ones, so that no offset is left in their sum.
    const SIGNED: bool;

    unsafe fn load(src: *const u8) -> Self::Bytes;
    unsafe fn store(dst: *mut u8, x: Self::Bytes);
    unsafe fn or(a: Self::Bytes, b: Self::Bytes) -> Self::Bytes;
    /// `mask` of each byte, moved left by `by` bits.
    unsafe fn moved(x: Self::Bytes, by: i32, mask: u8) -> Self::Bytes;

    unsafe fn begin(sum: i32) -> Self::Sum;
    /// Adds the products of the bytes `w` with the signed bytes in `x`, as the sum's `i`-th; `room` is
    /// [`Layout::ROOM`](super::layout::Layout::ROOM). Both are constants where it is inlined.
    unsafe fn dot(sum: Self::Sum, i: usize, room: usize, w: Self::Bytes, x: i32) -> Self::Sum;
    unsafe fn total(sum: Self::Sum) -> Self::Floats;

    unsafe fn splat(x: f32) -> Self::Floats;
    unsafe fn mul(a: Self::Floats, b: Self::Floats) -> Self::Floats;
    /// `a * b + c`
    unsafe fn mul_add(a: Self::Floats, b: Self::Floats, c: Self::Floats) -> Self::Floats;
    unsafe fn load_f16(src: *const u8) -> Self::Floats;
    unsafe fn load_i8(src: *const u8) -> Self::Floats;
    unsafe fn store_f32(dst: *mut f32, x: Self::Floats);
}

/// Instructions that a processor has; none where only candle's kernels multiply.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Instructions {
    #[cfg(target_arch = "x86_64")]
    Avx512,
    #[cfg(target_arch = "x86_64")]
    Avx2,
}

impl Instructions {
    /// All that this processor has, the best first.
    pub(super) fn all() -> Vec<Self> {
        #[cfg(target_arch = "x86_64")]
        return match arch() {
            Arch::V4(_) if is_x86_feature_detected!("avx512vnni") => vec![Self::Avx512, Self::Avx2],
            Arch::V3(_) | Arch::V4(_) if is_x86_feature_detected!("f16c") => vec![Self::Avx2],
            _ => Vec::new(),
        };
        #[cfg(not(target_arch = "x86_64"))]
        Vec::new()
    }

    /// Rows of x that are multiplied together: their sums fit the registers.
    pub(super) fn rows(self) -> usize {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => 8,
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => 4,
        }
    }

    /// # Safety
    /// No other task may write the columns of the panel.
    pub(super) unsafe fn multiply<F: Layout>(self, task: &Task<'_, '_>) {
        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
        unsafe fn avx512<F: Layout>(task: &Task<'_, '_>) {
            tile::multiply::<Avx512, F>(task)
        }
        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = "avx2,fma,f16c")]
        unsafe fn avx2<F: Layout>(task: &Task<'_, '_>) {
            tile::multiply::<Avx2, F>(task)
        }
        // The processor has them, or there were no such value.
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => avx512::<F>(task),
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => avx2::<F>(task),
        }
    }

    /// [`rounded::round`] by these instructions.
    pub(super) fn round(self, x: &[f32], words: &mut [Words], of: &mut [Block], stride: usize, weight: (i32, usize)) {
        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
        fn avx512(x: &[f32], words: &mut [Words], of: &mut [Block], stride: usize, weight: (i32, usize)) {
            rounded::round(x, words, of, stride, weight);
        }
        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = "avx2,fma")]
        fn avx2(x: &[f32], words: &mut [Words], of: &mut [Block], stride: usize, weight: (i32, usize)) {
            rounded::round(x, words, of, stride, weight);
        }
        // SAFETY: the processor has them, or there were no such value.
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => unsafe { avx512(x, words, of, stride, weight) },
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => unsafe { avx2(x, words, of, stride, weight) },
        }
    }
}
