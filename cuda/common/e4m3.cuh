// Weights in e4m3: a sign, 4 bits of exponent and 3 of mantissa, with a scale for each block of a matrix (gdn_scales).
#pragma once

#include "convert.cuh"
#include "ptx.cuh"

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

// The scale of (row, column) of a matrix: rows in blocks of 1 << shift.
struct ScaleArgs {
  const float *ptr;
  int64_t stride;
  int32_t shift;

  __device__ __forceinline__ const float *row(int64_t i) const { return ptr + (i >> shift) * stride; }
};

inline ScaleArgs scale_args(const gdn_scales &s) {
  ScaleArgs args = {s.ptr, s.stride, 0};
  while (s.ptr && 1 << args.shift < s.rows) ++args.shift;
  return args;
}

}  // namespace gdn
