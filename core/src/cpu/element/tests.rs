//! Conversions against those of `half`.

use super::*;

#[test]
fn bf16_is_rounded_as_half_does() {
    for high in 0..=u16::MAX {
        for low in [0u32, 1, 0x7fff, 0x8000, 0x8001, 0xffff] {
            let x = f32::from_bits(u32::from(high) << 16 | low);
            assert_eq!(round_bf16(x).to_bits(), bf16::from_f32(x).to_bits(), "{:#x}", x.to_bits());
        }
    }
}

#[test]
fn every_half_widens_exactly() {
    for bits in 0..=u16::MAX {
        let (b, h) = (bf16::from_bits(bits), f16::from_bits(bits));
        for (got, want) in [(Element::to_f32(b), b.to_f32()), (Element::to_f32(h), h.to_f32())] {
            assert!(got.to_bits() == want.to_bits() || got.is_nan() && want.is_nan(), "{bits:#x}: {got} {want}");
        }
    }
}

/// By the instructions of this machine.
#[test]
fn every_half_is_loaded_exactly() {
    struct Load<'a, T>(&'a [T]);
    impl<T: Element> WithSimd for Load<'_, T> {
        type Output = Vec<f32>;

        #[inline(always)]
        fn with_simd<S: Simd>(self, simd: S) -> Vec<f32> {
            let vectors: Vec<S::f32s> = self.0.chunks_exact(S::F32_LANES).map(|src| T::load(simd, src)).collect();
            bytemuck::cast_slice(&vectors).to_vec()
        }
    }
    fn check<T: Element>(of_bits: fn(u16) -> T) {
        let all: Vec<T> = (0..=u16::MAX).map(of_bits).collect();
        let wide = dispatch(Load(&all));
        assert_eq!(wide.len(), all.len());
        for (bits, (got, want)) in wide.iter().zip(&all).enumerate() {
            let want = want.to_f32();
            assert!(got.to_bits() == want.to_bits() || got.is_nan() && want.is_nan(), "{bits:#x}: {got} {want}");
        }
    }
    check(bf16::from_bits);
    check(f16::from_bits);
}
