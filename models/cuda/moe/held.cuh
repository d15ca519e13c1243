// A round of weights in the registers of a warp, and its products with rows of x.
#pragma once

#include "common/convert.cuh"
#include "table.cuh"

namespace gdn {
namespace moe {

constexpr int kChunkBytes = 128;          // of a row of weights
constexpr int kChunks = 4;                // chunks of a round, which is under way in registers, unless said otherwise

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
template <typename W, int CHUNKS = kChunks> struct Weights {
  uint4 w[CHUNKS][4];    // of row g, the first and the second half of a chunk; of row g + 8
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

template <int CHUNKS> struct Weights<E4m3, CHUNKS> {
  uint4 w[CHUNKS][4];
  float scale[CHUNKS][2];    // of row g, of row g + 8
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

// Where a lane's 16 of 64 inputs lie in a row of x beside e4m3: two pieces of 16 bytes of each half of a chunk.
constexpr int scaled_piece(int half, int i) { return half * 128 + i * 16; }

// Uses up chunk d in e4m3, of which `live` units are there. x_of(half, i) is that piece of x in T, divided by `factors`: those of the rows of x whose
// sums the lane has.
template <typename T, int CHUNKS, typename X>
__device__ __forceinline__ void multiply(float (&sum)[2][4], const Weights<E4m3, CHUNKS> &weights, const X &x_of, int d, int live,
                                         float2 factors = {1.f, 1.f}) {
  float block[2][4] = {};
#pragma unroll
  for (int half = 0; half < 2; ++half)
    if (half < live) {
      const uint4 w0 = weights.w[d][half], w8 = weights.w[d][2 + half];
      const uint32_t words0[] = {w0.x, w0.y, w0.z, w0.w}, words8[] = {w8.x, w8.y, w8.z, w8.w};
      const uint4 pieces[] = {x_of(half, 0), x_of(half, 1)};
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
  for (int i = 0; i < 4; ++i)
    sum[0][i] = fmaf(weights.scale[d][i / 2], (block[0][i] + block[1][i]) * (i % 2 ? factors.y : factors.x), sum[0][i]);
}

// Uses up chunk d. Two sums: one alone would be bound by the products' latency.
template <typename T, int CHUNKS>
__device__ __forceinline__ void multiply(float (&sum)[2][4], const Weights<T, CHUNKS> &weights, const Piece &piece, int d) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint4 w0 = weights.w[d][half], w8 = weights.w[d][2 + half], x = piece.x[half];
    ptx::mma16816<T>(sum[0], w0.x, w8.x, w0.y, w8.y, x.x, x.y);
    ptx::mma16816<T>(sum[1], w0.z, w8.z, w0.w, w8.w, x.z, x.w);
  }
}

// A chunk of a row of x beside e4m3, of which `live` units are there.
struct ScaledPiece {
  uint4 x[2][2];

  __device__ __forceinline__ void load(const char *at, int live) {
#pragma unroll
    for (int half = 0; half < 2; ++half)
      if (half < live) {
        x[half][0] = ptx::load_after_wait(at + scaled_piece(half, 0));
        x[half][1] = ptx::load_after_wait(at + scaled_piece(half, 1));
      }
  }
};

// 16 bytes from global to shared memory, through L1: blocks of one multiprocessor may want the same rows.
__device__ __forceinline__ void copy_through_l1(uint32_t to, const void *from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

// A warp's part of rows of x in shared memory, as products beside e4m3 take them: in f16, each chunk divided by its factor (half_of_block). 16 bytes
// lie between rows, since the lanes of a quad read every second piece of 16.
struct HeldRows {
  char *rows;
  float *factors;           // [chunks, kGroup]
  int row_bytes, pieces;    // of a row; of 16 bytes

  static constexpr __host__ __device__ int row_bytes_of(int chunks) { return chunks * Stored<E4m3>::kXBytes + 16; }
  static constexpr __host__ __device__ int bytes(int chunks, int rows) { return rows * row_bytes_of(chunks) + chunks * kGroup * 4; }

  // Of up to so many rows, which begin with `units` times 64 inputs.
  __device__ __forceinline__ HeldRows(unsigned char *room, int chunks, int most, int units)
      : rows(reinterpret_cast<char *>(room)), factors(reinterpret_cast<float *>(room + most * row_bytes_of(chunks))), row_bytes(row_bytes_of(chunks)),
        pieces(8 * units) {}

  // Row r begins at from(r).
  template <typename From> __device__ __forceinline__ void request(int count, int lane, const From &from) const {
    __syncwarp();    // all lanes have read the rows before these
    for (int r = 0; r < count; ++r) {
      const char *row = from(r);
      const uint32_t to = ptx::shared_address(rows + r * row_bytes);
      for (int i = lane; i < pieces; i += 32) copy_through_l1(to + i * 16, row + i * 16);
    }
    ptx::copy_async_commit();
  }

  // Once requested; a lane converts what it has copied.
  template <typename T> __device__ __forceinline__ void convert(int count, int lane) const {
    ptx::copy_async_wait<0>();
    for (int r = 0; r < count; ++r) {
      uint4 *row = reinterpret_cast<uint4 *>(rows + r * row_bytes);
      if constexpr (std::is_same_v<T, __nv_bfloat16>)
        half_of_row([&](int i) { return row[i]; }, row, factors + r, kGroup, pieces, lane, 32);
      else
        for (int i = lane; i * 16 < pieces; i += 32) factors[i * kGroup + r] = 1.f;
    }
    __syncwarp();
  }
};

// A row of h of one token into shared memory, and the factors of its chunks.
template <typename T> __device__ __forceinline__ void read_row(const void *from, char *to, float *factors, int inputs, int lane) {
  const auto load = [&](int piece) { return ptx::load_after_wait(static_cast<const uint4 *>(from) + piece); };
  uint4 *pieces = reinterpret_cast<uint4 *>(to);
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    half_of_row(load, pieces, factors, 1, inputs / 8, lane, 32);
  } else {
    for (int i = lane; i < inputs / 8; i += 32) pieces[i] = load(i);
    for (int i = lane; i * Stored<E4m3>::kChunk < inputs; i += 32) factors[i] = 1.f;
  }
}

}  // namespace moe
}  // namespace gdn
