//! From the blocks of ggml's types that candle does not know to numbers, as gguf-py's `dequantize` has them to the bit.

use super::codebooks::{IQ1, IQ2_S, IQ2_XS, IQ2_XXS, IQ3_S, IQ3_XXS};
use std::sync::LazyLock;

/// The values of a 4-bit code of `IQ4_NL` and `IQ4_XS`.
const IQ4: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];
/// Twice the values of a 4-bit float with two bits of exponent and one of mantissa.
const FP4: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];
/// What `IQ1` adds to or subtracts from its words.
const DELTA: f32 = 0.125;

fn u16_of(bytes: &[u8]) -> u16 {
    u16::from_le_bytes([bytes[0], bytes[1]])
}

fn u32_of(bytes: &[u8]) -> u32 {
    u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])
}

fn f16_of(bytes: &[u8]) -> f32 {
    half::f16::from_bits(u16_of(bytes)).to_f32()
}

/// Number `i` of those of four bits in `bytes`.
fn nibble(bytes: &[u8], i: usize) -> u8 {
    bytes[i / 2] >> (4 * (i % 2)) & 15
}

/// The first half of `dst` from the low bits of each code, the second from the high ones.
fn codes(values: &[i8; 16], scale: f32, codes: &[u8], dst: &mut [f32]) {
    let (low, high) = dst.split_at_mut(codes.len());
    for (i, code) in codes.iter().enumerate() {
        low[i] = scale * f32::from(values[usize::from(code & 15)]);
        high[i] = scale * f32::from(values[usize::from(code >> 4)]);
    }
}

/// A word of a codebook, negative where the bit of `signs` is set.
fn word<const N: usize>(scale: f32, book: &LazyLock<Vec<[i8; N]>>, code: usize, signs: u8, dst: &mut [f32]) {
    for (i, value) in book[code].iter().enumerate() {
        dst[i] = scale * f32::from(if signs >> i & 1 == 1 { -value } else { *value });
    }
}

/// Eight signs, an even number of them negative, of which seven are stored.
fn signs(stored: u32) -> u8 {
    let seven = (stored & 127) as u8;
    seven | ((seven.count_ones() as u8 & 1) << 7)
}

pub(super) fn iq4_nl(block: &[u8], dst: &mut [f32]) {
    codes(&IQ4, f16_of(block), &block[2..], dst)
}

pub(super) fn iq4_xs(block: &[u8], dst: &mut [f32]) {
    let (scale, high) = (f16_of(block), u16_of(&block[2..]));
    for (i, dst) in dst.chunks_exact_mut(32).enumerate() {
        let own = i32::from(nibble(&block[4..], i)) | i32::from(high >> (2 * i) & 3) << 4;
        codes(&IQ4, scale * (own - 32) as f32, &block[8 + 16 * i..][..16], dst)
    }
}

pub(super) fn mxfp4(block: &[u8], dst: &mut [f32]) {
    // Half of a power of two, the values being doubled.
    let exponent = u32::from(block[0]);
    let scale = f32::from_bits(if exponent < 2 { 0x20_0000 << exponent } else { (exponent - 1) << 23 });
    codes(&FP4, scale, &block[1..], dst)
}

pub(super) fn nvfp4(block: &[u8], dst: &mut [f32]) {
    for (i, dst) in dst.chunks_exact_mut(16).enumerate() {
        // An e4m3 without a sign, halved.
        let (exponent, mantissa) = (i32::from(block[i] >> 3 & 15), f32::from(block[i] & 7));
        let scale = match exponent {
            _ if block[i] == 0x7f => 0.,
            0 => mantissa * 2f32.powi(-10),
            _ => (1. + mantissa / 8.) * 2f32.powi(exponent - 8),
        };
        codes(&FP4, scale, &block[4 + 8 * i..][..8], dst)
    }
}

pub(super) fn iq2_xxs(block: &[u8], dst: &mut [f32]) {
    for (i, dst) in dst.chunks_exact_mut(32).enumerate() {
        let part = &block[2 + 8 * i..][..8];
        let rest = u32_of(&part[4..]);
        let scale = f16_of(block) * (0.5 + (rest >> 28) as f32) * 0.25;
        for (k, dst) in dst.chunks_exact_mut(8).enumerate() {
            word(scale, &IQ2_XXS, part[k].into(), signs(rest >> (7 * k)), dst)
        }
    }
}

pub(super) fn iq2_xs(block: &[u8], dst: &mut [f32]) {
    for (i, dst) in dst.chunks_exact_mut(8).enumerate() {
        let scale = f16_of(block) * (0.5 + f32::from(nibble(&block[66..], i / 2))) * 0.25;
        let code = u16_of(&block[2 + 2 * i..]);
        word(scale, &IQ2_XS, usize::from(code & 511), signs(u32::from(code >> 9)), dst)
    }
}

pub(super) fn iq2_s(block: &[u8], dst: &mut [f32]) {
    for (i, dst) in dst.chunks_exact_mut(8).enumerate() {
        let scale = f16_of(block) * (0.5 + f32::from(nibble(&block[74..], i / 2))) * 0.25;
        let high = usize::from(block[66 + i / 4] >> (2 * (i % 4)) & 3);
        word(scale, &IQ2_S, usize::from(block[2 + i]) | high << 8, block[34 + i], dst)
    }
}

pub(super) fn iq3_xxs(block: &[u8], dst: &mut [f32]) {
    for (i, dst) in dst.chunks_exact_mut(4).enumerate() {
        let rest = u32_of(&block[66 + 4 * (i / 8)..]);
        let scale = f16_of(block) * (0.5 + (rest >> 28) as f32) * 0.5;
        let signs = signs(rest >> (7 * (i / 2 % 4))) >> (4 * (i % 2));
        word(scale, &IQ3_XXS, block[2 + i].into(), signs, dst)
    }
}

pub(super) fn iq3_s(block: &[u8], dst: &mut [f32]) {
    for (i, dst) in dst.chunks_exact_mut(4).enumerate() {
        let scale = f16_of(block) * (1. + 2. * f32::from(nibble(&block[106..], i / 8)));
        let high = usize::from(block[66 + i / 8] >> (i % 8) & 1);
        word(scale, &IQ3_S, usize::from(block[2 + i]) | high << 8, nibble(&block[74..], i), dst)
    }
}

/// `scale * (word + delta)`, or minus delta.
fn iq1(scale: f32, code: usize, minus: bool, dst: &mut [f32]) {
    let delta = if minus { -DELTA } else { DELTA };
    for (dst, value) in dst.iter_mut().zip(IQ1[code]) {
        *dst = scale * (f32::from(value) + delta);
    }
}

pub(super) fn iq1_s(block: &[u8], dst: &mut [f32]) {
    for (i, dst) in dst.chunks_exact_mut(8).enumerate() {
        let high = u16_of(&block[34 + 2 * (i / 4)..]);
        let scale = f16_of(block) * f32::from(2 * (high >> 12 & 7) + 1);
        let code = usize::from(block[2 + i]) | usize::from(high >> (3 * (i % 4)) & 7) << 8;
        iq1(scale, code, high >> 15 == 1, dst)
    }
}

pub(super) fn iq1_m(block: &[u8], dst: &mut [f32]) {
    // The scale of the block is in the high four bits of four numbers, the others' are in their low twelve.
    let number = |i: usize| u16_of(&block[48 + 2 * i..]);
    let scale = (0..4).fold(0, |bits, i| bits | (number(i) >> 12) << (4 * i));
    for (i, dst) in dst.chunks_exact_mut(8).enumerate() {
        let own = 2 * (number(i / 8) >> (3 * (i / 2 % 4)) & 7) + 1;
        let high = nibble(&block[32..], i);
        let code = usize::from(block[i]) | usize::from(high & 7) << 8;
        iq1(half::f16::from_bits(scale).to_f32() * f32::from(own), code, high & 8 != 0, dst)
    }
}

pub(super) fn tq1_0(block: &[u8], dst: &mut [f32]) {
    let scale = f16_of(&block[52..]);
    // Five digits of base 3 a byte, four in the last bytes; the first digits of a run of bytes come first.
    let runs = [(0..32, 5), (32..48, 5), (48..52, 4)];
    let digits = runs.into_iter().flat_map(|(run, digits)| {
        (0..digits).flat_map(move |n| run.clone().map(move |i| block[i].wrapping_mul(3u8.pow(n))))
    });
    for (dst, digit) in dst.iter_mut().zip(digits) {
        *dst = scale * f32::from(((u16::from(digit) * 3) >> 8) as i8 - 1);
    }
}

pub(super) fn tq2_0(block: &[u8], dst: &mut [f32]) {
    let scale = f16_of(&block[64..]);
    for (i, dst) in dst.iter_mut().enumerate() {
        let digit = block[i / 128 * 32 + i % 32] >> (2 * (i / 32 % 4)) & 3;
        *dst = scale * f32::from(digit as i8 - 1);
    }
}

pub(super) fn q1_0(block: &[u8], dst: &mut [f32]) {
    let scale = f16_of(block);
    for (i, dst) in dst.iter_mut().enumerate() {
        *dst = if block[2 + i / 8] >> (i % 8) & 1 == 1 { scale } else { -scale };
    }
}

pub(super) fn q2_0(block: &[u8], dst: &mut [f32]) {
    let scale = f16_of(block);
    for (i, dst) in dst.iter_mut().enumerate() {
        let code = block[2 + i / 4] >> (2 * (i % 4)) & 3;
        *dst = scale * f32::from(code as i8 - 1);
    }
}

pub(super) fn q8_1(block: &[u8], dst: &mut [f32]) {
    for (dst, value) in dst.iter_mut().zip(&block[4..]) {
        *dst = f16_of(block) * f32::from(*value as i8);
    }
}

pub(super) fn q8_k(block: &[u8], dst: &mut [f32]) {
    for (dst, value) in dst.iter_mut().zip(&block[4..]) {
        *dst = f32::from_bits(u32_of(block)) * f32::from(*value as i8);
    }
}

pub(super) fn f64(block: &[u8], dst: &mut [f32]) {
    let mut bytes = [0; 8];
    bytes.copy_from_slice(block);
    dst[0] = f64::from_le_bytes(bytes) as f32;
}
