// Weights in e4m3: a sign, 4 bits of exponent and 3 of mantissa, with a scale for each block of a matrix (gdn_scales).
#pragma once

#include "../gdn_scaled.h"
#include "common/checks.h"
#include "common/convert.cuh"
#include "common/ptx.cuh"

namespace gdn {

struct E4m3 {
  uint8_t bits;
};

// Four of them as two pairs of T in their order, exactly. NOTES: the two bytes that stand for NaN come out as anything.
template <typename T> __device__ __forceinline__ void e4m3_pairs(uint32_t four, uint32_t (&pairs)[2]) {
#if __CUDA_ARCH__ >= 890
  if constexpr (std::is_same_v<T, __half>) {
    const uint16_t two[2] = {static_cast<uint16_t>(four), static_cast<uint16_t>(four >> 16)};
#pragma unroll
    for (int i = 0; i < 2; ++i) asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pairs[i]) : "h"(two[i]));
    return;
  }
#endif
  // Exponent and mantissa to their places. The number is then too small by the difference of the biases, 2^8 or 2^120,
  // also where it is subnormal, and a product with that power of two is exact.
  constexpr int kShift = std::is_same_v<T, __half> ? 1 : 4;
  constexpr uint32_t kMagnitude = 0x7f007f00u >> kShift;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t upper = __byte_perm(four, 0, i == 0 ? 0x1404 : 0x3424);    // the upper bytes of two halves
    const uint32_t x = (upper >> kShift & kMagnitude) | (upper & 0x80008000u);
    if constexpr (std::is_same_v<T, __half>) {
      const __half2 y = __hmul2(*reinterpret_cast<const __half2 *>(&x), __half2half2(__ushort_as_half(0x5c00)));
      pairs[i] = *reinterpret_cast<const uint32_t *>(&y);
    } else {
      const __nv_bfloat162 y =
          __hmul2(*reinterpret_cast<const __nv_bfloat162 *>(&x), __bfloat162bfloat162(__ushort_as_bfloat16(0x7b80)));
      pairs[i] = *reinterpret_cast<const uint32_t *>(&y);
    }
  }
}

// Four of them times their scale, each rounded to T once.
template <typename T> __device__ __forceinline__ void e4m3_scaled(uint32_t four, float scale, uint32_t (&pairs)[2]) {
  uint32_t halves[2];
  e4m3_pairs<__half>(four, halves);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float2 x = __half22float2(*reinterpret_cast<const __half2 *>(&halves[i]));
    if constexpr (std::is_same_v<T, __half>) {
      const __half2 y = __floats2half2_rn(x.x * scale, x.y * scale);
      pairs[i] = *reinterpret_cast<const uint32_t *>(&y);
    } else {
      const __nv_bfloat162 y = __floats2bfloat162_rn(x.x * scale, x.y * scale);
      pairs[i] = *reinterpret_cast<const uint32_t *>(&y);
    }
  }
}

// The same of two.
template <typename T> __device__ __forceinline__ uint32_t e4m3_scaled_pair(uint16_t two, float scale) {
  uint32_t pairs[2];
  e4m3_scaled<T>(two, scale, pairs);
  return pairs[0];
}

// The scale of (row, column) of a matrix: rows in blocks of 1 << shift.
struct ScaleArgs {
  const float *ptr;
  int64_t stride;
  int32_t shift;

  __device__ __forceinline__ const float *row(int64_t i) const { return ptr + (i >> shift) * stride; }
};

inline int check_scales(const gdn_scales &s) {
  if (!s.ptr) return GDN_OK;
  if (s.stride < 0) return GDN_BAD_STRIDE;
  return s.rows > 0 && (s.rows & (s.rows - 1)) == 0 && aligned(s.ptr, 4) ? GDN_OK : GDN_BAD_ALGO;
}

inline ScaleArgs scale_args(const gdn_scales &s) {
  ScaleArgs args = {s.ptr, s.stride, 0};
  while (s.ptr && 1 << args.shift < s.rows) ++args.shift;
  return args;
}

// Beside one row of x in bf16 the weights become numbers in f16, as one instruction makes two of those and five make two in bf16. So x has to
// be f16 too: each block of 128 inputs is divided by a power of two, the block's factor, that brings its largest input to 2^14 or above, below
// 2^15. Then inputs above 2^-29 of the largest stay exact, and smaller ones are at most 2^-39 of the largest off. For more rows this
// conversion would cost more than it saves.
//
// 8 inputs of a block, whose 16 pieces are those of 16 lanes side by side; by all lanes of the warp. Inputs past the end are zero.
__device__ __forceinline__ uint4 half_of_block(const uint4 &x, float *factor) {
  uint32_t words[] = {x.x, x.y, x.z, x.w}, most = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) most = max(most, max(words[i] & 0x7fff, words[i] >> 16 & 0x7fff));
#pragma unroll
  for (int d = 8; d > 0; d /= 2) most = max(most, __shfl_xor_sync(0xffffffffu, most, d));
  const uint32_t exponent = max(most >> 7, 15u);    // biased
  *factor = __uint_as_float((exponent - 14) << 23);
  const float up = __uint_as_float((268 - exponent) << 23);    // 1 / factor
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const __half2 pair = __floats2half2_rn(__uint_as_float(words[i] << 16) * up, __uint_as_float(words[i] & 0xffff0000u) * up);
    words[i] = *reinterpret_cast<const uint32_t *>(&pair);
  }
  return {words[0], words[1], words[2], words[3]};
}

// A row of so many pieces of 8 inputs, which load(piece) gives, and its blocks' factors, `step` apart; by `threads`, whole warps, of which this is `tid`.
template <typename Load>
__device__ __forceinline__ void half_of_row(Load load, uint4 *to, float *factors, int step, int pieces, int tid, int threads) {
  for (int first = tid - tid % 32; first < pieces; first += threads) {
    const int piece = first + tid % 32;
    float factor;
    const uint4 half = half_of_block(piece < pieces ? load(piece) : uint4{}, &factor);
    if (piece >= pieces) continue;
    to[piece] = half;
    if (piece % 16 == 0) factors[piece / 16 * step] = factor;
  }
}

}  // namespace gdn
