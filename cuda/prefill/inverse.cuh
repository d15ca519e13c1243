// (I + L)^-1 for a strictly lower triangular 64 x 64 matrix, by a warpgroup, in f32.
//
// Blocks of 8 by substitution in f32; then [[A, 0], [C, B]]^-1 = [[A', 0], [-B' C A', B']] for blocks of 8, of 16 and of 32 on
// tensor cores in TF32. Nothing but entries of inverses and of L is ever formed: powers of L, which a series would
// need, reach 2^63 for repeated keys where the inverse is at most 2. What a product reads from shared memory was rounded to
// TF32 when it was written, since the hardware only cuts off.
#pragma once

#include "layout.cuh"

namespace gdn {
namespace prefill {

constexpr int kLd = 68;    // floats a row: rows 2c and lanes n of a B operand fall on 32 banks
constexpr int kSquareFloats = 64 * kLd;

namespace detail {

struct Split {
  float hi, lo;
};
__device__ __forceinline__ Split split(float x) {
  const float hi = __uint_as_float(__float_as_uint(x) & 0xffffe000u);
  return {hi, x - hi};
}

// To TF32, half away from zero; the lower bits of the first are for the hardware to cut off.
__device__ __forceinline__ float near_tf32(float x) { return __uint_as_float(__float_as_uint(x) + 0x1000u); }
__device__ __forceinline__ float to_tf32(float x) { return __uint_as_float((__float_as_uint(x) + 0x1000u) & 0xffffe000u); }

// acc += a b to about f32's precision. The order of k is any that a and b agree on; here lane % 4 holds k = 2 (lane % 4)
// and the one after it, as an accumulator holds its columns.
__device__ __forceinline__ void mma_f32(float (&acc)[4], const float (&a)[4], const float (&b)[2]) {
  float ah[4], al[4], bh[2], bl[2];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const Split s = split(a[i]);
    ah[i] = s.hi, al[i] = s.lo;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const Split s = split(b[i]);
    bh[i] = s.hi, bl[i] = s.lo;
  }
  ptx::mma1688_tf32(acc, ah, bl);
  ptx::mma1688_tf32(acc, al, bh);
  ptx::mma1688_tf32(acc, ah, bh);
}

// The 16 x 8 block at `m` as a, the 8 x 8 block at `m` as b.
__device__ __forceinline__ void load_a(float (&a)[4], const float *m, int lane) {
  const float *row = m + lane / 4 * kLd + 2 * (lane % 4);
  const float2 top = *reinterpret_cast<const float2 *>(row), low = *reinterpret_cast<const float2 *>(row + 8 * kLd);
  a[0] = top.x, a[1] = low.x, a[2] = top.y, a[3] = low.y;
}
__device__ __forceinline__ void load_b(float (&b)[2], const float *m, int lane) {
  const float *at = m + 2 * (lane % 4) * kLd + lane / 4;
  b[0] = at[0], b[1] = at[kLd];
}

// The 16 x 16 block at `d` on the diagonal, by a warp: two blocks of 8, of which lane % 8 solves for a column, and their merge.
__device__ __forceinline__ void invert16(float *d, int lane) {
  const int column = lane % 8;
  float *block = d + lane / 8 % 2 * 8 * (kLd + 1);
  float x[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    float row[8];
#pragma unroll
    for (int m = 0; m < (i + 3) / 4; ++m)
      *reinterpret_cast<float4 *>(&row[4 * m]) = *reinterpret_cast<const float4 *>(block + i * kLd + 4 * m);
    float sum = i == column ? 1.f : 0.f;
#pragma unroll
    for (int m = 0; m < i; ++m) sum = fmaf(-row[m], x[m], sum);
    x[i] = sum;
  }
  __syncwarp();
  if (lane < 16)
#pragma unroll
    for (int i = 0; i < 8; ++i) block[i * kLd + column] = to_tf32(x[i]);
  __syncwarp();
  // Eight rows of the sixteen that a product has.
  const float *low = d + 8 * kLd;
  const float2 top = *reinterpret_cast<const float2 *>(low + 8 + lane / 4 * kLd + 2 * (lane % 4));
  float b[2], w[4] = {}, z[4] = {};
  load_b(b, low, lane);
  ptx::mma1688_tf32(w, {top.x, 0.f, top.y, 0.f}, b);
  load_b(b, d, lane);
  ptx::mma1688_tf32(z, {near_tf32(w[0]), 0.f, near_tf32(w[1]), 0.f}, b);
  *reinterpret_cast<float2 *>(d + (8 + lane / 4) * kLd + 2 * (lane % 4)) = make_float2(to_tf32(-z[0]), to_tf32(-z[1]));
  __syncwarp();
}

}  // namespace detail

// What a warp has of the inverse times diag(beta) at the end, packed: the diagonal block `warp`, eight columns of the block
// below the diagonal of a pair of 16, and of the block of 32 below the diagonal 16 rows (warp / 2) and columns (warp % 2).
template <typename T> struct InverseParts {
  uint32_t diagonal[4], half[2], quarter[4];
};

// L at `l`, its blocks of 8 below those on the diagonal near_tf32. `warp` 0..3 of the group, `barrier` one of the block's that
// nobody else uses meanwhile. The blocks of a pair of 16 go above the diagonal, where nothing is read meanwhile.
template <typename T>
__device__ __forceinline__ void invert64(float *l, const float *beta, InverseParts<T> &parts, int warp, int lane, int barrier) {
  using namespace detail;
  float *diagonal = l + 16 * warp * (kLd + 1);
  const int column = 2 * (lane % 4);
  const auto beta_pair = [&](int j) { return *reinterpret_cast<const float2 *>(beta + j + column); };
  invert16(diagonal, lane);
  {
    const float *at = diagonal + lane / 4 * kLd + column;
    const float2 x = *reinterpret_cast<const float2 *>(at), y = *reinterpret_cast<const float2 *>(at + 8 * kLd);
    const float2 z = *reinterpret_cast<const float2 *>(at + 8 * kLd + 8);
    const float2 bl = beta_pair(16 * warp), br = beta_pair(16 * warp + 8);
    parts.diagonal[0] = pack2<T>(x.x * bl.x, x.y * bl.y);
    parts.diagonal[1] = pack2<T>(y.x * bl.x, y.y * bl.y);
    parts.diagonal[2] = 0;
    parts.diagonal[3] = pack2<T>(z.x * br.x, z.y * br.y);
  }
  // Above the diagonal of a 16 x 16 block products read zeros.
  *reinterpret_cast<float2 *>(diagonal + lane / 4 * kLd + 8 + column) = make_float2(0.f, 0.f);
  ptx::group_barrier<128>(barrier);

  {    // two pairs of 16: a warp eight columns of one
    float *base = l + warp / 2 * 32 * (kLd + 1);
    const float *low = base + 16 * kLd;
    const int n = warp % 2 * 8;
    float a[2][4], b[2][2][2], c[2][2], w[2][4] = {}, z[4] = {};
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      load_a(a[k], low + 16 + 8 * k, lane);
      load_b(c[k], base + 8 * k * kLd + n, lane);
#pragma unroll
      for (int t = 0; t < 2; ++t) load_b(b[k][t], low + 8 * k * kLd + 8 * t, lane);
    }
#pragma unroll
    for (int k = 0; k < 2; ++k)
#pragma unroll
      for (int t = 0; t < 2; ++t) ptx::mma1688_tf32(w[t], a[k], b[k][t]);
#pragma unroll
    for (int k = 0; k < 2; ++k)
      ptx::mma1688_tf32(z, {near_tf32(w[k][0]), near_tf32(w[k][2]), near_tf32(w[k][1]), near_tf32(w[k][3])}, c[k]);
    float *to = base + lane / 4 * kLd + 16 + n + column;
    *reinterpret_cast<float2 *>(to) = make_float2(to_tf32(-z[0]), to_tf32(-z[1]));
    *reinterpret_cast<float2 *>(to + 8 * kLd) = make_float2(to_tf32(-z[2]), to_tf32(-z[3]));
    const float2 bj = beta_pair(warp / 2 * 32 + n);
    parts.half[0] = pack2<T>(-z[0] * bj.x, -z[1] * bj.y);
    parts.half[1] = pack2<T>(-z[2] * bj.x, -z[3] * bj.y);
  }
  ptx::group_barrier<128>(barrier);

  {    // the pair of 32: a warp 16 rows and 16 columns
    const int m = warp / 2, n = warp % 2;
    const float *low = l + 32 * kLd, *corner = low + 32;
    // Rows 16 m of the lower inverse: of m = 1 the first 16 columns are the block of a pair.
    const float *first = corner + (m ? 16 : 0), *second = corner + 16 * (kLd + 1);
    float w[4][4] = {}, z[2][4] = {};
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      float a[4];
      load_a(a, k < 2 ? first + 8 * k : second + 8 * (k - 2), lane);
      if (k >= 2 && m == 0) a[0] = a[1] = a[2] = a[3] = 0.f;    // above the diagonal
#pragma unroll
      for (int t = 0; t < 4; ++t) {
        float b[2];
        load_b(b, low + 8 * k * kLd + 8 * t, lane);
        ptx::mma1688_tf32(w[t], a, b);
      }
    }
    // Columns 16 n of the upper inverse: of n = 0 the last 16 rows are the block of a pair, of n = 1 the first are zero.
    const float *rows[2] = {l, n ? l + 16 * (kLd + 1) : l + 16};
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const float a[4] = {near_tf32(w[k][0]), near_tf32(w[k][2]), near_tf32(w[k][1]), near_tf32(w[k][3])};
#pragma unroll
      for (int t = 0; t < 2; ++t) {
        float b[2];
        load_b(b, rows[k / 2] + 8 * (k % 2) * kLd + 8 * t, lane);
        if (k < 2 && n == 1) b[0] = b[1] = 0.f;
        ptx::mma1688_tf32(z[t], a, b);
      }
    }
    const float2 bl = beta_pair(16 * n), br = beta_pair(16 * n + 8);
    parts.quarter[0] = pack2<T>(-z[0][0] * bl.x, -z[0][1] * bl.y);
    parts.quarter[1] = pack2<T>(-z[0][2] * bl.x, -z[0][3] * bl.y);
    parts.quarter[2] = pack2<T>(-z[1][0] * br.x, -z[1][1] * br.y);
    parts.quarter[3] = pack2<T>(-z[1][2] * br.x, -z[1][3] * br.y);
  }
}

}  // namespace prefill
}  // namespace gdn
