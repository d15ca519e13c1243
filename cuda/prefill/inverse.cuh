// (I + L)^-1 for a strictly lower triangular 64 x 64 matrix, by a warpgroup, in f32.
//
// Blocks of 16 by substitution in f32, a warp each; then [[A, 0], [C, B]]^-1 = [[A', 0], [-B' C A', B']] for blocks of 16 and
// of 32 on tensor cores in TF32. Nothing but entries of inverses and of L is ever formed: powers of L, which a series would
// need, reach 2^63 for repeated keys where the inverse is at most 2. What a product reads from shared memory was rounded to
// TF32 when it was written, since the hardware only cuts off.
#pragma once

#include "../common/ptx.cuh"

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

// The diagonal block at `d`, by a warp: lane % 16 solves for a column.
__device__ __forceinline__ void invert16(float *d, int lane) {
  const int column = lane % 16;
  float x[16];
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    float row[16];
#pragma unroll
    for (int m = 0; m < (i + 3) / 4; ++m)
      *reinterpret_cast<float4 *>(&row[4 * m]) = *reinterpret_cast<const float4 *>(d + i * kLd + 4 * m);
    float sum = i == column ? 1.f : 0.f;
#pragma unroll
    for (int m = 0; m < i; ++m) sum = fmaf(-row[m], x[m], sum);
    x[i] = sum;
  }
  __syncwarp();
  if (lane < 16)
#pragma unroll
    for (int i = 0; i < 16; ++i) d[i * kLd + column] = to_tf32(x[i]);
}

}  // namespace detail

// In place, L's blocks below those on the diagonal being near_tf32; what stands above the diagonal outside the 16 x 16 blocks on it is neither read nor written. `warp` 0..3 of
// the group, `barrier` one of the block's that nobody else uses meanwhile. Ends with a barrier.
__device__ __forceinline__ void invert64(float *l, int warp, int lane, int barrier) {
  using namespace detail;
  invert16(l + 16 * warp * (kLd + 1), lane);
  ptx::group_barrier<128>(barrier);

  {    // two pairs of 16: a warp eight columns of one
    float *base = l + warp / 2 * 32 * (kLd + 1);
    const float *low = base + 16 * kLd, *b_inverse = low + 16;
    const int n = warp % 2 * 8;
    float w[2][4] = {}, z[4] = {};
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      float a[4];
      load_a(a, b_inverse + 8 * k, lane);
#pragma unroll
      for (int t = 0; t < 2; ++t) {
        float b[2];
        load_b(b, low + 8 * k * kLd + 8 * t, lane);
        ptx::mma1688_tf32(w[t], a, b);
      }
    }
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const float a[4] = {near_tf32(w[k][0]), near_tf32(w[k][2]), near_tf32(w[k][1]), near_tf32(w[k][3])};
      float b[2];
      load_b(b, base + 8 * k * kLd + n, lane);
      ptx::mma1688_tf32(z, a, b);
    }
    ptx::group_barrier<128>(barrier);
    float *to = base + (16 + lane / 4) * kLd + n + 2 * (lane % 4);
    *reinterpret_cast<float2 *>(to) = make_float2(to_tf32(-z[0]), to_tf32(-z[1]));
    *reinterpret_cast<float2 *>(to + 8 * kLd) = make_float2(to_tf32(-z[2]), to_tf32(-z[3]));
  }
  ptx::group_barrier<128>(barrier);

  {    // the pair of 32: a warp 16 rows and 16 columns
    const int m = warp / 2, n = warp % 2;
    const float *low = l + 32 * kLd, *b_inverse = l + (32 + 16 * m) * kLd + 32;
    float w[4][4] = {}, z[2][4] = {};
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      if (k >= 2 * (m + 1)) break;    // zero above the diagonal
      float a[4];
      load_a(a, b_inverse + 8 * k, lane);
#pragma unroll
      for (int t = 0; t < 4; ++t) {
        float b[2];
        load_b(b, low + 8 * k * kLd + 8 * t, lane);
        ptx::mma1688_tf32(w[t], a, b);
      }
    }
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      if (k < 2 * n) continue;
      const float a[4] = {near_tf32(w[k][0]), near_tf32(w[k][2]), near_tf32(w[k][1]), near_tf32(w[k][3])};
#pragma unroll
      for (int t = 0; t < 2; ++t) {
        float b[2];
        load_b(b, l + 8 * k * kLd + 16 * n + 8 * t, lane);
        ptx::mma1688_tf32(z[t], a, b);
      }
    }
    ptx::group_barrier<128>(barrier);
#pragma unroll
    for (int t = 0; t < 2; ++t) {
      float *to = l + (32 + 16 * m + lane / 4) * kLd + 16 * n + 8 * t + 2 * (lane % 4);
      *reinterpret_cast<float2 *>(to) = make_float2(to_tf32(-z[t][0]), to_tf32(-z[t][1]));
      *reinterpret_cast<float2 *>(to + 8 * kLd) = make_float2(to_tf32(-z[t][2]), to_tf32(-z[t][3]));
    }
  }
  ptx::group_barrier<128>(barrier);
}

}  // namespace prefill
}  // namespace gdn
