//! The vector loops, written once and compiled for each instruction set by pulp.

pub use super::dispatch::{arch, dispatch};
use super::element::Element;
use pulp::Simd;

/// `(row . x, row . y)` for four rows at once: one pass, eight independent sums.
#[inline(always)]
pub fn dot2_x4<S: Simd>(simd: S, rows: [&[f32]; 4], x: &[f32], y: &[f32]) -> [(f32, f32); 4] {
    let (xh, xt) = S::as_simd_f32s(x);
    let (yh, yt) = S::as_simd_f32s(y);
    let split = rows.map(|row| S::as_simd_f32s(row));
    let n = xh.len();
    let (r0, r1, r2, r3) = (&split[0].0[..n], &split[1].0[..n], &split[2].0[..n], &split[3].0[..n]);
    let yh = &yh[..n];
    let zero = simd.splat_f32s(0.0);
    let mut sx = [zero; 4];
    let mut sy = [zero; 4];
    for i in 0..n {
        let (x, y) = (xh[i], yh[i]);
        sx[0] = simd.mul_add_e_f32s(r0[i], x, sx[0]);
        sy[0] = simd.mul_add_e_f32s(r0[i], y, sy[0]);
        sx[1] = simd.mul_add_e_f32s(r1[i], x, sx[1]);
        sy[1] = simd.mul_add_e_f32s(r1[i], y, sy[1]);
        sx[2] = simd.mul_add_e_f32s(r2[i], x, sx[2]);
        sy[2] = simd.mul_add_e_f32s(r2[i], y, sy[2]);
        sx[3] = simd.mul_add_e_f32s(r3[i], x, sx[3]);
        sy[3] = simd.mul_add_e_f32s(r3[i], y, sy[3]);
    }
    let mut out = [(0.0, 0.0); 4];
    for r in 0..4 {
        let tail = split[r].1;
        out[r].0 = simd.reduce_sum_f32s(sx[r]) + scalar_dot(tail, xt);
        out[r].1 = simd.reduce_sum_f32s(sy[r]) + scalar_dot(tail, yt);
    }
    out
}

/// `x . y`
#[inline(always)]
pub fn dot<S: Simd>(simd: S, x: &[f32], y: &[f32]) -> f32 {
    let (xh, xt) = S::as_simd_f32s(x);
    let (yh, yt) = S::as_simd_f32s(y);
    let mut sum = simd.splat_f32s(0.0);
    for (&x, &y) in xh.iter().zip(yh) {
        sum = simd.mul_add_e_f32s(x, y, sum);
    }
    simd.reduce_sum_f32s(sum) + scalar_dot(xt, yt)
}

#[inline(always)]
fn scalar_dot(x: &[f32], y: &[f32]) -> f32 {
    x.iter().zip(y).map(|(x, y)| x * y).sum()
}

/// `row <- scale * row + factor * x`
#[inline(always)]
pub fn scale_add<S: Simd>(simd: S, row: &mut [f32], scale: f32, factor: f32, x: &[f32]) {
    let (rh, rt) = S::as_mut_simd_f32s(row);
    let (xh, xt) = S::as_simd_f32s(x);
    let (s, f) = (simd.splat_f32s(scale), simd.splat_f32s(factor));
    for (r, &x) in rh.iter_mut().zip(xh) {
        *r = simd.mul_add_e_f32s(f, x, simd.mul_f32s(s, *r));
    }
    for (r, x) in rt.iter_mut().zip(xt) {
        *r = scale * *r + factor * x;
    }
}

/// `row <- row + factor * x`
#[inline(always)]
pub fn axpy<S: Simd>(simd: S, row: &mut [f32], factor: f32, x: &[f32]) {
    let (rh, rt) = S::as_mut_simd_f32s(row);
    let (xh, xt) = S::as_simd_f32s(x);
    let f = simd.splat_f32s(factor);
    for (r, &x) in rh.iter_mut().zip(xh) {
        *r = simd.mul_add_e_f32s(f, x, *r);
    }
    for (r, x) in rt.iter_mut().zip(xt) {
        *r += factor * x;
    }
}

/// `x . x`: sixteen partial sums, so that the loop vectorises without reassociation.
#[inline(always)]
pub fn sum_of_squares<T: Element>(x: &[T]) -> f32 {
    let square = |x: &T| x.to_f32() * x.to_f32();
    let mut sums = [0f32; 16];
    let (blocks, tail) = x.as_chunks::<16>();
    for block in blocks {
        sums.iter_mut().zip(block).for_each(|(s, x)| *s += square(x));
    }
    sums.iter().sum::<f32>() + tail.iter().map(square).sum::<f32>()
}

/// `e^x` to about one ulp, without branches so that loops over it vectorise. Below -87.3 the result is zero, above 88.3 infinite.
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    const LOG2E: f32 = std::f32::consts::LOG2_E;
    // ln 2 in two parts: the first has few bits, so its product with a small integer is exact.
    const LN2_HI: f32 = 0.693_359_4;
    const LN2_LO: f32 = -2.121_944_4e-4;
    // Adding 1.5 * 2^23 rounds to an integer.
    const ROUND: f32 = 12_582_912.0;
    let clamped = x.clamp(-87.3, 88.3);
    let n = (clamped * LOG2E + ROUND) - ROUND;
    let r = (clamped - n * LN2_HI) - n * LN2_LO;
    // Minimax polynomial of (e^r - 1 - r) / r^2 on |r| <= ln(2) / 2.
    let mut p = 1.987_569_1e-4;
    p = p * r + 1.398_199_9e-3;
    p = p * r + 8.333_452e-3;
    p = p * r + 4.166_579_6e-2;
    p = p * r + 1.666_666_5e-1;
    p = p * r + 0.5;
    let e = p * (r * r) + r + 1.0;
    let two_n = f32::from_bits(((n as i32 + 127) as u32) << 23);
    let y = e * two_n;
    if x < -87.3 {
        0.0
    } else if x > 88.3 {
        f32::INFINITY
    } else {
        // NaN came through the clamp and the polynomial.
        y
    }
}

/// `1 / (1 + e^-x)`
#[inline(always)]
pub fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

/// `x * sigmoid(x)`
#[inline(always)]
pub fn silu(x: f32) -> f32 {
    x / (1.0 + exp(-x))
}

#[cfg(test)]
mod tests;
