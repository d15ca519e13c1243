//! AVX-512 with its dot products of bytes (VNNI), and AVX2.

use super::isa::Isa;
use std::arch::x86_64::*;

pub(super) struct Avx512;

impl Isa for Avx512 {
    type Bytes = __m512i;
    type Floats = __m512;
    type Sum = __m512i;
    const PARTS: usize = 1;
    const SIGNED: bool = false;

    #[inline(always)]
    unsafe fn load(src: *const u8) -> __m512i {
        _mm512_load_si512(src.cast())
    }

    #[inline(always)]
    unsafe fn store(dst: *mut u8, x: __m512i) {
        _mm512_store_si512(dst.cast(), x)
    }

    #[inline(always)]
    unsafe fn or(a: __m512i, b: __m512i) -> __m512i {
        _mm512_or_si512(a, b)
    }

    #[inline(always)]
    unsafe fn moved(x: __m512i, by: i32, mask: u8) -> __m512i {
        let moved = match by {
            0 => x,
            1.. => _mm512_sll_epi16(x, _mm_cvtsi32_si128(by)),
            _ => _mm512_srl_epi16(x, _mm_cvtsi32_si128(-by)),
        };
        _mm512_and_si512(moved, _mm512_set1_epi8(mask as i8))
    }

    #[inline(always)]
    unsafe fn begin(sum: i32) -> __m512i {
        _mm512_set1_epi32(sum)
    }

    #[inline(always)]
    unsafe fn dot(sum: __m512i, _: usize, _: usize, w: __m512i, x: i32) -> __m512i {
        _mm512_dpbusd_epi32(sum, w, _mm512_set1_epi32(x))
    }

    #[inline(always)]
    unsafe fn total(sum: __m512i) -> __m512 {
        _mm512_cvtepi32_ps(sum)
    }

    #[inline(always)]
    unsafe fn splat(x: f32) -> __m512 {
        _mm512_set1_ps(x)
    }

    #[inline(always)]
    unsafe fn mul(a: __m512, b: __m512) -> __m512 {
        _mm512_mul_ps(a, b)
    }

    #[inline(always)]
    unsafe fn mul_add(a: __m512, b: __m512, c: __m512) -> __m512 {
        _mm512_fmadd_ps(a, b, c)
    }

    #[inline(always)]
    unsafe fn load_f16(src: *const u8) -> __m512 {
        _mm512_cvtph_ps(_mm256_loadu_si256(src.cast()))
    }

    #[inline(always)]
    unsafe fn load_i8(src: *const u8) -> __m512 {
        _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(src.cast())))
    }

    #[inline(always)]
    unsafe fn store_f32(dst: *mut f32, x: __m512) {
        _mm512_storeu_ps(dst, x)
    }
}

pub(super) struct Avx2;

/// A sum in 16 bits, two for each row, and one in 32.
#[derive(Clone, Copy)]
pub(super) struct Sums {
    narrow: __m256i,
    wide: __m256i,
}

impl Isa for Avx2 {
    type Bytes = __m256i;
    type Floats = __m256;
    type Sum = Sums;
    const PARTS: usize = 2;
    const SIGNED: bool = true;

    #[inline(always)]
    unsafe fn load(src: *const u8) -> __m256i {
        _mm256_load_si256(src.cast())
    }

    #[inline(always)]
    unsafe fn store(dst: *mut u8, x: __m256i) {
        _mm256_store_si256(dst.cast(), x)
    }

    #[inline(always)]
    unsafe fn or(a: __m256i, b: __m256i) -> __m256i {
        _mm256_or_si256(a, b)
    }

    #[inline(always)]
    unsafe fn moved(x: __m256i, by: i32, mask: u8) -> __m256i {
        let moved = match by {
            0 => x,
            1.. => _mm256_sll_epi16(x, _mm_cvtsi32_si128(by)),
            _ => _mm256_srl_epi16(x, _mm_cvtsi32_si128(-by)),
        };
        _mm256_and_si256(moved, _mm256_set1_epi8(mask as i8))
    }

    #[inline(always)]
    unsafe fn begin(sum: i32) -> Sums {
        Sums { narrow: _mm256_setzero_si256(), wide: _mm256_set1_epi32(sum) }
    }

    #[inline(always)]
    unsafe fn dot(sum: Sums, i: usize, room: usize, w: __m256i, x: i32) -> Sums {
        let x = _mm256_set1_epi32(x);
        if room == 0 {
            let w = _mm256_xor_si256(w, _mm256_set1_epi8(-128));
            let products = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w));
            return Sums { narrow: products, wide: _mm256_add_epi32(sum.wide, widened(sum.narrow)) };
        }
        let products = _mm256_maddubs_epi16(w, x);
        match i % room {
            0 if i == 0 => Sums { narrow: products, ..sum },
            0 => Sums { narrow: products, wide: _mm256_add_epi32(sum.wide, widened(sum.narrow)) },
            _ => Sums { narrow: _mm256_add_epi16(sum.narrow, products), ..sum },
        }
    }

    #[inline(always)]
    unsafe fn total(sum: Sums) -> __m256 {
        _mm256_cvtepi32_ps(_mm256_add_epi32(sum.wide, widened(sum.narrow)))
    }

    #[inline(always)]
    unsafe fn splat(x: f32) -> __m256 {
        _mm256_set1_ps(x)
    }

    #[inline(always)]
    unsafe fn mul(a: __m256, b: __m256) -> __m256 {
        _mm256_mul_ps(a, b)
    }

    #[inline(always)]
    unsafe fn mul_add(a: __m256, b: __m256, c: __m256) -> __m256 {
        _mm256_fmadd_ps(a, b, c)
    }

    #[inline(always)]
    unsafe fn load_f16(src: *const u8) -> __m256 {
        _mm256_cvtph_ps(_mm_loadu_si128(src.cast()))
    }

    #[inline(always)]
    unsafe fn load_i8(src: *const u8) -> __m256 {
        _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(src.cast())))
    }

    #[inline(always)]
    unsafe fn store_f32(dst: *mut f32, x: __m256) {
        _mm256_storeu_ps(dst, x)
    }
}

#[inline(always)]
unsafe fn widened(narrow: __m256i) -> __m256i {
    _mm256_madd_epi16(narrow, _mm256_set1_epi16(1))
}
