// A round of weights in the registers of a warp, and its products with rows of x.
#pragma once

#include "common/convert.cuh"
#include "table.cuh"

namespace gdn {
namespace moe {

constexpr int kChunkBytes = 128;          // of a row of weights
constexpr int kChunks = 4;                // chunks of a round, which is under way in registers

// How weights of type W stand: T, or E4m3.
template <typename W> struct Stored {
  static constexpr bool kScaled = std::is_same_v<W, E4m3>;
  static constexpr int kChunk = kChunkBytes / sizeof(W);    // inputs
  static constexpr int kXBytes = 2 * kChunk;                // of a row of x beside a chunk
  static constexpr int kUnits = kScaled ? 2 : 1;            // what chunks are counted in: of 64 inputs, so that the last
                                                            // one in e4m3 may be a half
  // Of gate_up_kernel, along the inputs: 2048 of them are a round, or half of one.
  static constexpr int kWarps = kScaled ? 4 : 8;
};

// A round of 16 rows of weights, as ../linear has it: a lane holds, of rows g and g + 8 of the tile, 8 inputs in a row
// of every 32, by one load each; in e4m3 16 of 64. x is held alike, so that the order of the inputs is the same in both.
template <typename W> struct Weights {
  uint4 w[kChunks][4];    // of row g, the first and the second half of a chunk; of row g + 8
  const char *row0;
  int32_t to_row8;        // bytes
  int live;               // units from row0 on; < 1: none

  __device__ __forceinline__ void fetch(int d) {
    const char *from0 = row0 + d * kChunkBytes, *from8 = from0 + to_row8;
    if (d < live) {
      w[d][0] = ptx::load_stream(from0);
      w[d][1] = ptx::load_stream(from0 + 64);
      w[d][2] = ptx::load_stream(from8);
      w[d][3] = ptx::load_stream(from8 + 64);
    }
  }
};

template <> struct Weights<E4m3> {
  uint4 w[kChunks][4];
  float scale[kChunks][2];    // of row g, of row g + 8
  const char *row0;
  const float *scale0, *scale8;
  int32_t to_row8;
  int live;

  __device__ __forceinline__ void fetch(int d) {
    const char *from0 = row0 + d * kChunkBytes, *from8 = from0 + to_row8;
    if (2 * d < live) {
      w[d][0] = ptx::load_stream(from0);
      w[d][2] = ptx::load_stream(from8);
      scale[d][0] = ptx::load_float(scale0 + d);
      scale[d][1] = ptx::load_float(scale8 + d);
    }
    if (2 * d + 1 < live) {
      w[d][1] = ptx::load_stream(from0 + 64);
      w[d][3] = ptx::load_stream(from8 + 64);
    }
  }
};

// A chunk of a row of x.
struct Piece {
  uint4 x[2];

  __device__ __forceinline__ void load(const char *at) {
    x[0] = ptx::load_after_wait(at);
    x[1] = ptx::load_after_wait(at + 64);
  }
};

// Uses up chunk d in e4m3, of which `live` units are there, with x at this address, in shared memory or not; x is in T, divided by
// `factor`.
template <typename T>
__device__ __forceinline__ void multiply(float (&sum)[2][4], const Weights<E4m3> &weights, const char *x, int d, int live,
                                         float factor = 1.f) {
  float block[2][4] = {};
#pragma unroll
  for (int half = 0; half < 2; ++half)
    if (half < live) {
      const uint4 w0 = weights.w[d][half], w8 = weights.w[d][2 + half];
      const uint32_t words0[] = {w0.x, w0.y, w0.z, w0.w}, words8[] = {w8.x, w8.y, w8.z, w8.w};
      const uint4 pieces[] = {*reinterpret_cast<const uint4 *>(x + half * 128), *reinterpret_cast<const uint4 *>(x + half * 128 + 16)};
      const uint32_t b[] = {pieces[0].x, pieces[0].y, pieces[0].z, pieces[0].w,
                            pieces[1].x, pieces[1].y, pieces[1].z, pieces[1].w};
#pragma unroll
      for (int word = 0; word < 4; ++word) {
        uint32_t pairs0[2], pairs8[2];
        e4m3_pairs<T>(words0[word], pairs0);
        e4m3_pairs<T>(words8[word], pairs8);
        ptx::mma16816<T>(block[word % 2], pairs0[0], pairs8[0], pairs0[1], pairs8[1], b[2 * word], b[2 * word + 1]);
      }
    }
#pragma unroll
  for (int i = 0; i < 4; ++i) sum[0][i] = fmaf(weights.scale[d][i / 2], (block[0][i] + block[1][i]) * factor, sum[0][i]);
}

// Uses up chunk d. Two sums: one alone would be bound by the products' latency.
template <typename T>
__device__ __forceinline__ void multiply(float (&sum)[2][4], const Weights<T> &weights, const Piece &piece, int d) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint4 w0 = weights.w[d][half], w8 = weights.w[d][2 + half], x = piece.x[half];
    ptx::mma16816<T>(sum[0], w0.x, w8.x, w0.y, w8.y, x.x, x.y);
    ptx::mma16816<T>(sum[1], w0.z, w8.z, w0.w, w8.w, x.z, x.w);
  }
}

// One token's inputs into shared memory as products beside e4m3 take them, in f16, and the factors of their chunks.
template <typename T> __device__ __forceinline__ void read_row(const void *from, char *to, float *factors, int inputs, int tid, int threads) {
  const auto load = [&](int piece) { return ptx::load_after_wait(static_cast<const uint4 *>(from) + piece); };
  uint4 *pieces = reinterpret_cast<uint4 *>(to);
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    half_of_row(load, pieces, factors, inputs / 8, tid, threads);
  } else {
    for (int i = tid; i < inputs / 8; i += threads) pieces[i] = load(i);
    for (int i = tid; i * Stored<E4m3>::kChunk < inputs; i += threads) factors[i] = 1.f;
  }
}

}  // namespace moe
}  // namespace gdn
