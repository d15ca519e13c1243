// The experts of few tokens: the weights stream once through registers into the matrix units, as in ../linear.
#pragma once

#include "common/convert.cuh"
#include "table.cuh"

namespace gdn {
namespace moe {

constexpr int kChunk = 64;                // inputs: 128 bytes of a row
constexpr int kChunkBytes = 2 * kChunk;
constexpr int kChunks = 4;                // chunks of a round, which is under way in registers
constexpr int kColumn = 20;               // floats from column to column of sums: 16, without conflicts

constexpr int kGateUpWarps = 8;           // along the inputs
constexpr int kGateUpThreads = 32 * kGateUpWarps;
constexpr int kOutputs = 8;               // of a tile: as many rows of gate and of up
constexpr int kDownWarps = 16;
constexpr int kDownThreads = 32 * kDownWarps;
constexpr int kDownOutputs = 16;          // of a block

// A round of 16 rows of weights, as ../linear has it: a lane holds, of rows g and g + 8 of the tile, 8 inputs in a row
// of every 32, by one load each. x is held alike, so that the order of the inputs is the same in both.
struct Weights {
  uint4 w[kChunks][4];    // of row g, inputs 0..31 and 32..63 of a chunk; of row g + 8
  const char *row0;
  int32_t to_row8;        // bytes
  int live;               // chunks from row0 on; < 1: none

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

// A chunk of a row of x.
struct Piece {
  uint4 x[2];

  __device__ __forceinline__ void load(const char *at) {
    x[0] = ptx::load_after_wait(at);
    x[1] = ptx::load_after_wait(at + 64);
  }
};

// Uses up chunk d. Two sums: one alone would be bound by the products' latency.
template <typename T>
__device__ __forceinline__ void multiply(float (&sum)[2][4], const Weights &weights, const Piece &piece, int d) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint4 w0 = weights.w[d][half], w8 = weights.w[d][2 + half], x = piece.x[half];
    ptx::mma16816<T>(sum[0], w0.x, w8.x, w0.y, w8.y, x.x, x.y);
    ptx::mma16816<T>(sum[1], w0.z, w8.z, w0.w, w8.w, x.z, x.w);
  }
}

// h = silu(gate x) * (up x). A tile is 8 outputs of one group: 8 rows of gate and the same 8 of up, so that a lane has
// both sums of an output. The warps of a block divide the inputs; blocks stay for several tiles. ONE_ROUND: a warp's
// part is one, and x stays in registers while the group is the same.
// One function: weights are under way from its first lines to its last, in registers that no part of it could hand on.
template <typename T, bool ONE_ROUND>
__global__ void __launch_bounds__(kGateUpThreads, 2) gate_up_kernel(const __grid_constant__ Args a) {
  __shared__ Table table;
  __shared__ float partial[2][kGateUpWarps][kGroup * kColumn];    // of this tile and the last one
  const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32, g = lane >> 2, t = lane & 3;
  ptx::grid_dependency_wait();
  ptx::grid_dependency_launch();
  read_table(a, table);

  const int chunks = a.hidden / kChunk, slice = (chunks + kGateUpWarps - 1) / kGateUpWarps;
  const int first = warp * slice, live = min(slice, chunks - first);
  const int row_bytes = a.hidden * static_cast<int>(sizeof(T)), part = first * kChunkBytes + t * 16;
  const int each = a.inner / kOutputs, shared_each = a.shared_inner / kOutputs;
  const int routed_tiles = table.routed * each, tiles = routed_tiles + (table.groups - table.routed) * shared_each;

  // The stream of weights runs a round in front of their use, over the ends of tiles.
  Weights weights;
  uint32_t group = 0;
  int tile = blockIdx.x, round = 0, output = 0;
  const auto seek = [&] {
    weights.live = 0;
    if (tile >= tiles) return;
    const bool shared = tile >= routed_tiles;
    const int rest = shared ? tile - routed_tiles : tile, per = shared ? shared_each : each, n = rest / per;
    group = table.group[shared ? table.routed + n : n];
    output = (rest - n * per) * kOutputs;
    const char *w = static_cast<const char *>(shared ? a.shared_gate_up : a.gate_up);
    if (!shared) w += group_expert(group) * (static_cast<int64_t>(2 * a.inner) * row_bytes);
    weights.row0 = w + static_cast<int64_t>(output + g) * row_bytes + part;
    weights.to_row8 = (shared ? a.shared_inner : a.inner) * row_bytes;
    weights.live = live;
  };
  const auto advance = [&] {
    if (!ONE_ROUND && (round + 1) * kChunks < slice) {
      ++round;
      weights.row0 += kChunks * kChunkBytes;
      weights.live -= kChunks;
    } else {
      round = 0;
      tile += gridDim.x;
      seek();
    }
  };
  seek();
#pragma unroll
  for (int d = 0; d < kChunks; ++d) weights.fetch(d);

  Piece x[ONE_ROUND ? kChunks : 1];
  uint32_t held = 0;    // whose rows they are; no group is 0
  int turn = 0;
  while (tile < tiles) {
    const uint32_t now = group;
    const int row = group_first(now), rows = group_rows(now), to = output;
    // Rows past the end are the last one again: their sums are not stored, and they cost no traffic.
    const char *from = static_cast<const char *>(a.x) + part +
                       table.token[row + min(g, rows - 1)] * (a.x_stride * static_cast<int64_t>(sizeof(T)));
    float sum[2][4] = {};
    if constexpr (ONE_ROUND) {
      if (const uint32_t whose = a.tokens == 1 ? 1 : now; whose != held) {
#pragma unroll
        for (int d = 0; d < kChunks; ++d)
          if (d < live) x[d].load(from + d * kChunkBytes);
        held = whose;
      }
      advance();
#pragma unroll
      for (int d = 0; d < kChunks; ++d) {
        if (d < live) multiply<T>(sum, weights, x[d], d);
        weights.fetch(d);
      }
    } else {
      for (int left = live; left > live - slice; left -= kChunks) {    // as often in every warp
        advance();
#pragma unroll
        for (int d = 0; d < kChunks; ++d) {
          if (d < left) {
            x[0].load(from + d * kChunkBytes);
            multiply<T>(sum, weights, x[0], d);
          }
          weights.fetch(d);
        }
        from += kChunks * kChunkBytes;
      }
    }

    // The sums of all parts meet, in the order of the inputs. One barrier: those of the last tile lie elsewhere.
    float *mine = partial[turn][warp];
#pragma unroll
    for (int i = 0; i < 4; ++i) mine[(2 * t + i % 2) * kColumn + g + i / 2 * 8] = sum[0][i] + sum[1][i];
    __syncthreads();
    if (tid < rows * kOutputs) {
      const int n = tid / kOutputs, j = tid % kOutputs;
      float gate = 0.f, up = 0.f;
#pragma unroll
      for (int p = 0; p < kGateUpWarps; ++p) {
        gate += partial[turn][p][n * kColumn + j];
        up += partial[turn][p][n * kColumn + j + 8];
      }
      T *h = static_cast<T *>(a.h) + static_cast<int64_t>(row + n) * a.h_stride + to;
      h[j] = from_float<T>(fast_silu(gate) * up);
    }
    turn ^= 1;
  }
}

// y = the weighted sum of down h over a token's rows. A block has 16 outputs of all rows: its warps divide the groups,
// and rounds of their inputs, and add what they find to sums of their own.
template <typename T>
__global__ void __launch_bounds__(kDownThreads, 1) down_kernel(const __grid_constant__ Args a) {
  __shared__ Table table;
  extern __shared__ __align__(16) float sums[];    // [warps][tokens][kColumn]
  const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32, g = lane >> 2, t = lane & 3;
  // NOTES: the choice is older than the kernel before this one, and that one has waited for it. So the weights are
  // under way before the wait.
  read_table(a, table);

  constexpr int kRound = kChunks * kChunk;    // inputs
  const int each = (a.inner + kRound - 1) / kRound, shared_each = (a.shared_inner + kRound - 1) / kRound;
  const int routed_units = table.routed * each, units = routed_units + (table.groups - table.routed) * shared_each;

  Weights weights;
  uint32_t group = 0;
  int unit = warp, part = 0;    // part: bytes of a row before this round
  const auto seek = [&] {
    weights.live = 0;
    if (unit >= units) return;
    const bool shared = unit >= routed_units;
    const int rest = shared ? unit - routed_units : unit, per = shared ? shared_each : each, n = rest / per;
    const int width = shared ? a.shared_inner : a.inner, row_bytes = width * static_cast<int>(sizeof(T));
    const int round = rest - n * per;
    group = table.group[shared ? table.routed + n : n];
    part = round * kChunks * kChunkBytes + t * 16;
    const char *w = static_cast<const char *>(shared ? a.shared_down : a.down);
    if (!shared) w += group_expert(group) * (static_cast<int64_t>(a.hidden) * row_bytes);
    weights.row0 = w + static_cast<int64_t>(static_cast<int>(blockIdx.x) * kDownOutputs + g) * row_bytes + part;
    weights.to_row8 = 8 * row_bytes;
    weights.live = width / kChunk - round * kChunks;
  };
  seek();
#pragma unroll
  for (int d = 0; d < kChunks; ++d) weights.fetch(d);
  float *mine = sums + warp * a.tokens * kColumn;
  for (int i = lane; i < a.tokens * kColumn; i += 32) mine[i] = 0.f;
  ptx::grid_dependency_wait();
  ptx::grid_dependency_launch();

  while (unit < units) {
    const int row = group_first(group), rows = group_rows(group), live = weights.live;
    const char *from = static_cast<const char *>(a.h) + part +
                       (row + min(g, rows - 1)) * (a.h_stride * static_cast<int64_t>(sizeof(T)));
    Piece h[kChunks];
#pragma unroll
    for (int d = 0; d < kChunks; ++d)
      if (d < live) h[d].load(from + d * kChunkBytes);
    unit += kDownWarps;
    seek();
    float sum[2][4] = {};
#pragma unroll
    for (int d = 0; d < kChunks; ++d) {
      if (d < live) multiply<T>(sum, weights, h[d], d);
      weights.fetch(d);
    }
    __syncwarp();    // another lane may have added to the same token last time
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int n = 2 * t + i % 2;
      if (n < rows) {
        float *to = mine + table.token[row + n] * kColumn + g + i / 2 * 8;
        *to = fmaf(table.weight[row + n], sum[0][i] + sum[1][i], *to);
      }
    }
  }
  __syncthreads();
  for (int i = tid; i < a.tokens * kDownOutputs; i += kDownThreads) {
    const int token = i / kDownOutputs, j = i % kDownOutputs;
    const int64_t output = static_cast<int64_t>(blockIdx.x) * kDownOutputs + j;
    float y = a.residual ? to_float(static_cast<const T *>(a.residual)[token * a.residual_stride + output]) : 0.f;
#pragma unroll
    for (int p = 0; p < kDownWarps; ++p) y += sums[(p * a.tokens + token) * kColumn + j];
    static_cast<T *>(a.y)[token * a.y_stride + output] = from_float<T>(y);
  }
}

}  // namespace moe
}  // namespace gdn
