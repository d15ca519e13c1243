// x in fixed point, as gdn_quantized multiplies it.
#pragma once

#include "common/convert.cuh"
#include "common/math.cuh"
#include "common/ptx.cuh"
#include "layout.cuh"
#include "unit.cuh"

namespace gdn {
namespace quantized {

constexpr int kChunkOfX = 2 * kChunk;                  // bytes of a row of x in fixed point
constexpr int kScalesOfX = 32;                         // bytes of its scales: of 4 blocks the scale, and with it the sum

// n / d in a few instructions, of n below 2^22 and quotients below 2^11.
__device__ __forceinline__ int quotient(int n, int d) { return static_cast<int>(__fdividef(static_cast<float>(n) + 0.5f, static_cast<float>(d))); }

__device__ __forceinline__ void store_8(uint32_t address, uint32_t a, uint32_t b) {
  asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(address), "r"(a), "r"(b) : "memory");
}

// 8 numbers of x in fixed point: a number is (256 hi + lo) * scale. Of a block of 32, which a quad of lanes has: its scale, and its sum.
struct Fixed {
  uint32_t hi[2], lo[2];
  float scale, sum;
};

// By all lanes. `words` are the numbers as they lie.
template <typename T> __device__ __forceinline__ Fixed fixed_of(const uint32_t (&words)[2 * sizeof(T)]) {
  constexpr float kLargest = 127.f * 256.f;
  constexpr float kRound = 12582912.f;    // 1.5 * 2^23: a sum with it ends with the integer's bits
  float x[8];
  uint32_t most = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if constexpr (sizeof(T) == 4) x[i] = __uint_as_float(words[i]);
    else if constexpr (std::is_same_v<T, __half>) x[i] = half_bits(words[i / 2] >> 16 * (i % 2) & 0xffff);
    else x[i] = __uint_as_float(i % 2 ? words[i / 2] & 0xffff0000u : words[i / 2] << 16);
    most = max(most, __float_as_uint(x[i]) & 0x7fffffffu);
  }
  most = max(most, __shfl_xor_sync(0xffffffffu, most, 1));
  most = max(most, __shfl_xor_sync(0xffffffffu, most, 2));
  const float largest = __uint_as_float(most);
  float inverse = kLargest / largest, scale = largest * (1.f / kLargest);
  if (largest < 1e-30f) inverse = scale = 0.f;
  if (most >= 0x7f800000u) scale = __uint_as_float(0x7fffffffu);
  uint32_t upper[8], lower[8];
  int sum = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    lower[i] = __float_as_uint(fmaf(x[i], inverse, kRound));
    upper[i] = lower[i] + 0x80;    // lo has a sign of its own
    sum += static_cast<int>(lower[i] - __float_as_uint(kRound));
  }
  sum += __shfl_xor_sync(0xffffffffu, sum, 1);
  sum += __shfl_xor_sync(0xffffffffu, sum, 2);
  Fixed made;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    made.hi[i] = __byte_perm(__byte_perm(upper[4 * i], upper[4 * i + 1], 0x0051),
                             __byte_perm(upper[4 * i + 2], upper[4 * i + 3], 0x0051), 0x5410);
    made.lo[i] = __byte_perm(__byte_perm(lower[4 * i], lower[4 * i + 1], 0x0040),
                             __byte_perm(lower[4 * i + 2], lower[4 * i + 3], 0x0040), 0x5410);
  }
  made.scale = scale;
  made.sum = scale * static_cast<float>(sum);
  return made;
}

// To where the row's numbers and scales are: a chunk's 256 bytes are those of the first 16 inputs of each of its four blocks, hi before lo, and then
// of the last 16. A piece is 8 inputs.
__device__ __forceinline__ void store_fixed(const Fixed &x, uint32_t row, uint32_t scales, int piece) {
  const int block = piece / 4, part = piece % 4;
  const uint32_t to = row + block / 4 * kChunkOfX + part / 2 * 128 + block % 4 * 32 + part % 2 * 8;
  store_8(to, x.hi[0], x.hi[1]);
  store_8(to + 16, x.lo[0], x.lo[1]);
  if (part == 0) store_8(scales + block * 8, __float_as_uint(x.scale), __float_as_uint(x.sum));
}

// x in fixed point, by `threads` threads, of which this is number `thread`. Of `a`: the fields of Args that say where x is, and where it goes.
template <typename T, int R, typename A>
__device__ __forceinline__ void convert_x(const A &a, int rank, uint32_t x_shared, uint32_t scales_shared, int thread, int threads) {
  const int pieces = a.chunks * (kChunk / 8), all = a.rows * pieces;
#pragma unroll 2
  for (int at = thread; at - thread % 32 < all; at += threads) {
    const int row = R == 1 ? at >= pieces : quotient(at, pieces), piece = at - row * pieces;
    int input = rank * a.chunks * kChunk + piece * 8;
    if (a.group_size > 0) {
      const int of = quotient(input, a.group_size), in_group = quotient(of, a.groups);
      input += ((of - in_group * a.groups) * a.per_group + in_group - of) * a.group_size;
    }
    constexpr int kWords = 2 * sizeof(T);
    uint32_t words[kWords] = {};
    if (row < a.rows) {
#pragma unroll
      for (int i = 0; i < kWords / 4; ++i) {
        const uint4 raw = ptx::load_after_wait(static_cast<const char *>(a.x) + row * a.x_row + input * static_cast<int>(sizeof(T)) + i * 16);
        words[4 * i] = raw.x;
        words[4 * i + 1] = raw.y;
        words[4 * i + 2] = raw.z;
        words[4 * i + 3] = raw.w;
      }
    }
    const Fixed x = fixed_of<T>(words);
    if (row < a.rows) store_fixed(x, x_shared + row * a.x_shared_row, scales_shared + row * a.scales_row, piece);
  }
}

}  // namespace quantized
}  // namespace gdn
