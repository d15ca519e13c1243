// How packed matrices lie, and how a warp makes operands of them. See README.md.
#pragma once

#include <cuda_fp16.h>
#include <stdint.h>

#include "../gdn_quantized.h"

namespace gdn {
namespace quantized {

constexpr int kTile = 16;      // rows of a unit
constexpr int kChunk = 128;    // inputs of a chunk: 32 for each lane t of a quad, which are a block with a scale of its own

// A unit is 16 rows of kInputs inputs, one piece of memory; those of a tile of rows follow each other. Lane (g, t) has rows g and g + 8, and inputs
// 32 t .. 32 t + 31 of each chunk. Four products take 8 of the 32 in turn: word k of product i has, of row g + 8 (k % 2), inputs
// 8 i + 4 (k / 2) .. + 3.
//
// First come pieces of 16 bytes for each lane, then its scales.
template <int TYPE> struct Format;

// A chunk: four pieces, the words of a product each; and f16 scales of both rows.
template <> struct Format<GDN_Q8_0> {
  static constexpr int kInputs = 128, kPieces = 4, kGroups = 1;
  static constexpr int kScalesAt = kPieces * 512, kBytes = kScalesAt + 128;
  static constexpr bool kMinima = false;
};

// Two chunks of two pieces: words of two products, in the lower and in the upper nibbles. Of scales 8 bytes for each lane: word c is of chunk c, six bits
// each: scale and minimum of row g, the same of row g + 8. Its upper byte is byte c of an f16: lane t has d and dmin of row g, and
// those of row g + 8.
template <> struct Format<GDN_Q4_K> {
  static constexpr int kInputs = 256, kPieces = 4, kGroups = 1;
  static constexpr int kScalesAt = kPieces * 512, kBytes = kScalesAt + 256;
  static constexpr bool kMinima = true;
};

// The same nibbles, of the numbers in two's complement; then for each chunk a piece with their upper two bits: bits 2 i, 2 i + 1 of each byte are of
// product i. Of scales 8 bytes for each lane: word c is of chunk c, a byte each for 16 inputs: two of row g, two of row g + 8.
// Last the f16 d of rows g and g + 8, for each g.
template <> struct Format<GDN_Q6_K> {
  static constexpr int kInputs = 256, kPieces = 6, kGroups = 2;
  static constexpr int kScalesAt = kPieces * 512, kFactorsAt = kScalesAt + 256, kBytes = kFactorsAt + 32;
  static constexpr bool kMinima = false;
};

template <int TYPE> constexpr int kChunksOf = Format<TYPE>::kInputs / kChunk;

// The operands of a chunk's four products, words[4 i + k], out of its pieces: numbers of 8 bits, in Q6_K 4 times those meant. `piece(j)` is piece j of the
// unit.
template <int TYPE, typename Piece>
__device__ __forceinline__ void unpack(int chunk, const Piece &piece, uint32_t (&words)[16]) {
  if constexpr (TYPE == GDN_Q8_0) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint4 p = piece(i);
      words[4 * i] = p.x;
      words[4 * i + 1] = p.y;
      words[4 * i + 2] = p.z;
      words[4 * i + 3] = p.w;
    }
  } else {
    uint4 upper = {};
    if constexpr (TYPE == GDN_Q6_K) upper = piece(4 + chunk);
    const uint32_t h[4] = {upper.x, upper.y, upper.z, upper.w};
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const uint4 p = piece(2 * chunk + j);
      const uint32_t w[4] = {p.x, p.y, p.z, p.w};
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        if constexpr (TYPE == GDN_Q4_K) {
          words[8 * j + k] = w[k] & 0x0f0f0f0fu;
          words[8 * j + 4 + k] = w[k] >> 4 & 0x0f0f0f0fu;
        } else {
          const uint32_t even = j == 0 ? h[k] << 6 : h[k] << 2, odd = j == 0 ? h[k] << 4 : h[k];
          words[8 * j + k] = (w[k] << 2 & 0x3c3c3c3cu) | (even & 0xc0c0c0c0u);
          words[8 * j + 4 + k] = (w[k] >> 2 & 0x3c3c3c3cu) | (odd & 0xc0c0c0c0u);
        }
      }
    }
  }
}

// Of a lane's blocks: a number is scale * (what unpack() gives) - minimum. [chunk][row g, row g + 8][16 or 32 inputs]
template <int TYPE> struct Scales {
  float scale[kChunksOf<TYPE>][2][Format<TYPE>::kGroups];
  float minimum[Format<TYPE>::kMinima ? kChunksOf<TYPE> : 1][2];
};

__device__ __forceinline__ float half_bits(uint32_t bits) { return __half2float(__ushort_as_half(static_cast<uint16_t>(bits))); }

// By all lanes. `record` are the lane's scales as they lie, `factors` in Q6_K the d of both rows.
template <int TYPE> __device__ __forceinline__ Scales<TYPE> scales_of(uint2 record, uint32_t factors) {
  Scales<TYPE> made;
  if constexpr (TYPE == GDN_Q8_0) {
    made.scale[0][0][0] = half_bits(record.x & 0xffff);
    made.scale[0][1][0] = half_bits(record.x >> 16);
  } else if constexpr (TYPE == GDN_Q4_K) {
    const float lane_factor = half_bits(__byte_perm(record.x, record.y, 0x0073));
    float d[4];    // of row g, its dmin, of row g + 8, its dmin
#pragma unroll
    for (int i = 0; i < 4; ++i) d[i] = __shfl_sync(0xffffffffu, lane_factor, i, 4);
    const uint32_t words[2] = {record.x, record.y};
#pragma unroll
    for (int c = 0; c < 2; ++c)
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        made.scale[c][row][0] = d[2 * row] * static_cast<float>(words[c] >> (12 * row) & 63);
        made.minimum[c][row] = d[2 * row + 1] * static_cast<float>(words[c] >> (12 * row + 6) & 63);
      }
  } else {
    const uint32_t words[2] = {record.x, record.y};
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const float d = 0.25f * half_bits(row ? factors >> 16 : factors & 0xffff);
#pragma unroll
      for (int c = 0; c < 2; ++c)
#pragma unroll
        for (int i = 0; i < 2; ++i)
          made.scale[c][row][i] = d * static_cast<float>(static_cast<int8_t>(words[c] >> (16 * row + 8 * i)));
    }
  }
  return made;
}

// The row that packed row `row` is of: with `paired` 8 of a gate and 8 of up alternate.
__host__ __device__ inline int32_t unpaired(int32_t row, int32_t paired) {
  if (paired == 0) return row;
  const int32_t in_pair = row % (2 * paired);
  return row - in_pair + in_pair / 16 * 8 + in_pair % 8 + in_pair / 8 % 2 * paired;
}

// The bytes of a matrix, and of its tiles.
struct Extent {
  int32_t unit_inputs, unit_bytes;
};
inline Extent extent(int type) {
  if (type == GDN_Q8_0) return {Format<GDN_Q8_0>::kInputs, Format<GDN_Q8_0>::kBytes};
  if (type == GDN_Q4_K) return {Format<GDN_Q4_K>::kInputs, Format<GDN_Q4_K>::kBytes};
  return {Format<GDN_Q6_K>::kInputs, Format<GDN_Q6_K>::kBytes};
}
inline bool valid_type(int type) { return type >= GDN_Q8_0 && type <= GDN_Q6_K; }

// fn(std::integral_constant<int, TYPE>)
template <typename F> int with_type(int type, F &&fn) {
  if (type == GDN_Q8_0) return fn(std::integral_constant<int, GDN_Q8_0>{});
  if (type == GDN_Q4_K) return fn(std::integral_constant<int, GDN_Q4_K>{});
  return fn(std::integral_constant<int, GDN_Q6_K>{});
}

}  // namespace quantized
}  // namespace gdn
