// Operands of m16n8k16 products in fragments of eight elements. Lane l of a warp holds, of row (or column) l / 4 of K elements,
// the fragments that begin at 8 (l % 4) + 32 m. Which elements a product calls its k-th does not matter as long as both operands
// agree: so every lane loads runs of 16 bytes, without shuffles.
//
// Elements wider than bf16 are split into bf16 terms whose sum they are, exactly: f16 into two, f32 into three. Products of
// terms are exact; those below the last bit of f32 are skipped.
#pragma once

#include "../common/convert.cuh"
#include "../common/ptx.cuh"
#include "entries.cuh"

namespace gdn {
namespace ring {

constexpr int kFragmentStep = 32;
template <int K> constexpr int kFragments = K / kFragmentStep;

// The bf16 terms of two floats, a word of both each. Each term has the leading bits of what remains.
template <int TERMS> __device__ __forceinline__ void split(float x, float y, uint32_t (&w)[TERMS]) {
#pragma unroll
  for (int i = 0; i < TERMS; ++i) {
    const uint32_t a = __float_as_uint(x), b = __float_as_uint(y);
    w[i] = __byte_perm(a, b, 0x7632);
    x -= __uint_as_float(a & 0xffff0000u), y -= __uint_as_float(b & 0xffff0000u);
  }
}

template <typename E> struct Fragment {
  static constexpr int kTerms = std::is_same_v<E, float> ? 3 : std::is_same_v<E, __half> ? 2 : 1;
  static constexpr int kLoads = sizeof(E) / 2, kEach = 8 / kLoads;
  uint4 raw[kLoads];

  __device__ __forceinline__ void load(const E *p) {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) raw[i] = reinterpret_cast<const uint4 *>(p)[i];
  }

  static __device__ __forceinline__ void store(E *p, const float (&x)[8]) {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      float y[kEach];
#pragma unroll
      for (int j = 0; j < kEach; ++j) y[j] = x[i * kEach + j];
      store_pack<E, kEach>(p + i * kEach, y);
    }
  }

  // Sixteen bytes as floats.
  static __device__ __forceinline__ void unpack(const uint4 &words, float *x) {
    if constexpr (std::is_same_v<E, __half>) {
      const uint32_t w[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 both = __half22float2(reinterpret_cast<const __half2 &>(w[i]));
        x[2 * i] = both.x, x[2 * i + 1] = both.y;
      }
    } else {
      step::Lanes<E>::unpack(words, x);
    }
  }

  __device__ __forceinline__ void floats(float (&x)[8]) const {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) unpack(raw[i], &x[i * kEach]);
  }

  // Words of two elements each.
  __device__ __forceinline__ void terms(uint32_t (&w)[kTerms][4]) const {
    if constexpr (kTerms == 1) {
      w[0][0] = raw[0].x, w[0][1] = raw[0].y, w[0][2] = raw[0].z, w[0][3] = raw[0].w;
    } else {
      float x[8];
      floats(x);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        uint32_t both[kTerms];
        split(x[2 * j], x[2 * j + 1], both);
#pragma unroll
        for (int i = 0; i < kTerms; ++i) w[i][j] = both[i];
      }
    }
  }
};

// acc + rest += a b over the sixteen rows `low` and `high` (8 after it) of a and the eight columns of b, for one fragment of each.
// The terms' leading products are summed apart from the others: a tensor core truncates its sums, it does not round them.
template <int AS, int BS>
__device__ __forceinline__ void multiply(float (&acc)[4], float (&rest)[4], const uint32_t (&low)[AS][4],
                                         const uint32_t (&high)[AS][4], const uint32_t (&b)[BS][4]) {
#pragma unroll
  for (int i = 0; i < AS; ++i)
#pragma unroll
    for (int j = 0; j < BS; ++j) {
      if (i + j > 2) continue;
#pragma unroll
      for (int s = 0; s < 4; s += 2)
        ptx::mma16816<__nv_bfloat16>(i + j == 0 ? acc : rest, low[i][s], high[i][s], low[i][s + 1], high[i][s + 1], b[j][s],
                                     b[j][s + 1]);
    }
}

// Rows of K elements in shared memory, so far apart that the lanes of a fragment's load meet no bank twice: by 16 bytes more than a
// multiple of 128 in f32, by 64 more in 16 bits.
template <typename E, int K> constexpr int kRowStride = K + (sizeof(E) == 4 ? 4 : K % 64 == 0 ? 32 : 0);

}  // namespace ring
}  // namespace gdn
