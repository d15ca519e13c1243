// Products of tiles of rows with their expert's weights, and the sum of a token's rows: many tokens.
#pragma once

#include "common/convert.cuh"
#include "common/math.cuh"
#include "common/ptx.cuh"
#include "args.h"

namespace gdn {
namespace moe {

constexpr int kManyThreads = 256;
constexpr int kTileOutputs = 128;          // of a block: rows of weights
constexpr int kTileInputs = 64;            // at a time: 128 bytes of a row
constexpr int kTileRowBytes = 128;

// Tiles of inputs under way, so that two blocks fit a multiprocessor.
constexpr int stages_of(int rows) { return rows == 128 ? 3 : rows == 64 ? 4 : 5; }
constexpr int stage_bytes_of(int rows) { return (rows + kTileOutputs) * kTileRowBytes; }
constexpr int tile_bytes_of(int rows) { return stages_of(rows) * stage_bytes_of(rows); }

// ROWS rows of x times 128 rows of weights. GATED: of gate and up 64 each, eight by turns, so that a lane has both sums
// of an output, and h = silu(gate) * up is written; else mlp(x).
//
// Eight warps, two along the rows and four along the weights; tiles lie in shared memory with the 16-byte piece p of
// row r at p ^ r % 8.
// Weights in e4m3 (W) go through registers, where they become numbers of T, as those of the dequantised matrix.
// One function: the loads of the next tiles are under way beside the products of the last.
template <typename T, typename W, int ROWS, bool GATED>
__global__ void __launch_bounds__(kManyThreads, 2)
    many_kernel(const __grid_constant__ Args a, int blocks_per_tile) {
  extern __shared__ __align__(128) unsigned char tile_bytes[];
  constexpr int kStages = stages_of(ROWS), kStageBytes = stage_bytes_of(ROWS);
  constexpr int kMatrices = ROWS / 32;    // of 16 rows, a warp
  ptx::grid_dependency_wait();
  ptx::grid_dependency_launch();
  const int block = blockIdx.x, index = block / blocks_per_tile, part = block % blocks_per_tile;
  if (index >= *a.tile_count) return;
  const Tile tile = a.tiles[index];
  const bool shared_expert = tile.expert == a.experts;
  const int inner = shared_expert ? a.shared_inner : a.inner, inputs = GATED ? a.hidden : inner;
  const int outputs = GATED ? inner : a.hidden, first_output = part * (GATED ? kTileOutputs / 2 : kTileOutputs);
  if (first_output >= outputs) return;

  const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32, warp_m = warp % 2, warp_n = warp / 2;
  const uint32_t shared = ptx::shared_address(tile_bytes);

  // A thread copies one 16-byte piece of every 32nd row.
  const int piece = tid % 8, copy_row = tid / 8;
  const uint32_t copy_to = shared + copy_row * kTileRowBytes + ((piece ^ copy_row % 8) << 4);
  constexpr bool kScaled = std::is_same_v<W, E4m3>;
  constexpr int kCopies = kTileOutputs * kTileInputs * sizeof(W) / (16 * kManyThreads);    // of weights, a thread
  constexpr int kRowPieces = kTileInputs * sizeof(W) / 16;
  const int64_t row_bytes = static_cast<int64_t>(inputs) * sizeof(W);
  const char *x[kMatrices], *w[kCopies];
  uint32_t x_bytes[kMatrices];
#pragma unroll
  for (int i = 0; i < kMatrices; ++i) {
    const int r = copy_row + 32 * i;
    x_bytes[i] = r < tile.rows ? 16 : 0;
    const int row = tile.first + min(r, tile.rows - 1);
    if constexpr (GATED) {
      const int token = shared_expert ? row - a.tokens * a.top_k : a.token_of_row[row];
      x[i] = static_cast<const char *>(a.x) + token * (a.x_stride * static_cast<int64_t>(sizeof(T))) + piece * 16;
    } else {
      x[i] = static_cast<const char *>(a.h) + row * (a.h_stride * static_cast<int64_t>(sizeof(T))) + piece * 16;
    }
  }
  const char *weights = static_cast<const char *>(GATED ? (shared_expert ? a.shared_gate_up : a.gate_up)
                                                        : (shared_expert ? a.shared_down : a.down));
  if (!shared_expert) weights += tile.expert * ((GATED ? 2 * inner : a.hidden) * row_bytes);
  [[maybe_unused]] const float *scale_of[kScaled ? kCopies : 1];
  const int w_piece_of = tid % kRowPieces, w_copy_row = tid / kRowPieces;
#pragma unroll
  for (int i = 0; i < kCopies; ++i) {
    const int n = w_copy_row + kManyThreads / kRowPieces * i;
    // Of eight rows of gate and eight of up; else past the end the last row, whose products are not stored.
    const int row = GATED ? n % 16 / 8 * inner + first_output + n / 16 * 8 + n % 8
                          : min(first_output + n, outputs - 1);
    w[i] = weights + row * row_bytes + w_piece_of * 16;
    if constexpr (kScaled) {
      const ScaleArgs &scales = GATED ? (shared_expert ? a.shared_gate_up_scales : a.gate_up_scales)
                                      : (shared_expert ? a.shared_down_scales : a.down_scales);
      scale_of[i] = scales.row(row + (shared_expert ? 0 : tile.expert * static_cast<int64_t>(GATED ? 2 * inner : a.hidden)));
    }
  }
  // In e4m3: those of a turn, on their way, and into a stage.
  struct Ahead {
    uint4 w[kCopies];
    float scale[kCopies];
  };
  [[maybe_unused]] const auto load_weights = [&](Ahead &ahead, int turn) {
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      ahead.w[i] = ptx::load_stream(w[i] + turn * (kTileInputs * static_cast<int>(sizeof(W))));
      ahead.scale[i] = ptx::load_float(scale_of[kScaled ? i : 0] + turn * kTileInputs / GDN_SCALE_COLUMNS);
    }
  };
  [[maybe_unused]] const auto store_weights = [&](const Ahead &ahead, int stage) {
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      const int n = w_copy_row + kManyThreads / kRowPieces * i;
      const uint32_t words[] = {ahead.w[i].x, ahead.w[i].y, ahead.w[i].z, ahead.w[i].w};
      unsigned char *to = tile_bytes + stage * kStageBytes + (ROWS + n) * kTileRowBytes;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32_t low[2], high[2];
        e4m3_scaled<T>(words[2 * half], ahead.scale[i], low);
        e4m3_scaled<T>(words[2 * half + 1], ahead.scale[i], high);
        *reinterpret_cast<uint4 *>(to + (((2 * w_piece_of + half) ^ n % 8) << 4)) = {low[0], low[1], high[0], high[1]};
      }
    }
  };
  const auto copy = [&](int stage) {
    const uint32_t to = copy_to + stage * kStageBytes;
#pragma unroll
    for (int i = 0; i < kMatrices; ++i) {
      ptx::copy_async_or_zero(to + i * 32 * kTileRowBytes, x[i], x_bytes[i]);
      x[i] += kTileRowBytes;
    }
    if constexpr (!kScaled) {
#pragma unroll
      for (int i = 0; i < kCopies; ++i) {
        ptx::copy_async(to + (ROWS + i * 32) * kTileRowBytes, w[i]);
        w[i] += kTileRowBytes;
      }
    }
  };

  const int turns = inputs / kTileInputs;
#pragma unroll
  for (int s = 0; s < kStages - 1; ++s) {
    if (s < turns) copy(s);
    ptx::copy_async_commit();
  }
  [[maybe_unused]] Ahead ahead;
  if constexpr (kScaled) {
    Ahead begin[kStages - 1];
#pragma unroll
    for (int s = 0; s < kStages - 1; ++s)
      if (s < turns) load_weights(begin[s], s);
#pragma unroll
    for (int s = 0; s < kStages - 1; ++s)
      if (s < turns) store_weights(begin[s], s);
  }

  // Where ldmatrix finds this lane's row of the 16 x 16 matrices.
  const int x_row = warp_m * (ROWS / 2) + lane % 16, w_row = ROWS + warp_n * 32 + lane % 8 + lane / 16 * 8;
  const uint32_t x_at = shared + x_row * kTileRowBytes, w_at = shared + w_row * kTileRowBytes;
  const int x_piece = lane / 16, w_piece = lane / 8 % 2, swizzle = lane % 8;
  float acc[kMatrices][4][4] = {};
  int stage = 0, next = kStages - 1;
  for (int turn = 0; turn < turns; ++turn) {
    ptx::copy_async_wait<kStages - 2>();
    __syncthreads();    // all see this stage, and have used up the one before it
    if constexpr (kScaled) {
      // What the last turn loaded: there are two stages or more between its barrier and its own turn.
      if (turn > 0 && turn + kStages - 2 < turns) store_weights(ahead, next == 0 ? kStages - 1 : next - 1);
      if (turn + kStages - 1 < turns) load_weights(ahead, turn + kStages - 1);
    }
    if (turn + kStages - 1 < turns) copy(next);
    ptx::copy_async_commit();
#pragma unroll
    for (int k = 0; k < kTileInputs / 16; ++k) {
      uint32_t m[kMatrices][4], n[2][4];
#pragma unroll
      for (int i = 0; i < kMatrices; ++i)
        ptx::load_matrices(
            m[i], x_at + stage * kStageBytes + i * 16 * kTileRowBytes + (((2 * k + x_piece) ^ swizzle) << 4));
#pragma unroll
      for (int j = 0; j < 2; ++j)
        ptx::load_matrices(
            n[j], w_at + stage * kStageBytes + j * 16 * kTileRowBytes + (((2 * k + w_piece) ^ swizzle) << 4));
#pragma unroll
      for (int i = 0; i < kMatrices; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j)
          ptx::mma16816<T>(acc[i][j], m[i][0], m[i][1], m[i][2], m[i][3], n[j / 2][j % 2 * 2], n[j / 2][j % 2 * 2 + 1]);
    }
    stage = stage == kStages - 1 ? 0 : stage + 1;
    next = next == kStages - 1 ? 0 : next + 1;
  }
  ptx::copy_async_wait<0>();

  const int g = lane >> 2, t = lane & 3;
#pragma unroll
  for (int i = 0; i < kMatrices; ++i)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = warp_m * (ROWS / 2) + i * 16 + half * 8 + g;
      if (r < tile.rows) {
        if constexpr (GATED) {
          const int output = first_output + warp_n * 16 + 2 * t;
          T *to = static_cast<T *>(a.h) + (tile.first + r) * static_cast<int64_t>(a.h_stride) + output;
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            const float *gate = &acc[i][2 * j][2 * half], *up = &acc[i][2 * j + 1][2 * half];
            store_pack<T, 2>(to + 8 * j, {fast_silu(gate[0]) * up[0], fast_silu(gate[1]) * up[1]});
          }
        } else {
          const int output = first_output + warp_n * 32 + 2 * t;
          T *to = static_cast<T *>(a.rows) + (tile.first + r) * static_cast<int64_t>(a.hidden) + output;
#pragma unroll
          for (int j = 0; j < 4; ++j)
            if (output + 8 * j < outputs)
              store_pack<T, 2>(to + 8 * j, {acc[i][j][2 * half], acc[i][j][2 * half + 1]});
        }
      }
    }
}

constexpr int kSumThreads = 256;
constexpr int kSumColumns = 8;    // of a thread: 16 bytes

// A token a block: its rows in the order of its choices, the shared expert's last.
template <typename T> __global__ void __launch_bounds__(kSumThreads) sum_kernel(const __grid_constant__ Args a) {
  ptx::grid_dependency_wait();
  ptx::grid_dependency_launch();
  const int64_t token = blockIdx.x;
  const int32_t *row_of = a.row_of_choice + token * a.top_k;
  const float *weights = a.weights + token * (a.top_k + 1);
  for (int i = static_cast<int>(threadIdx.x) * kSumColumns; i < a.hidden; i += kSumThreads * kSumColumns) {
    float y[kSumColumns] = {};
    const auto add = [&](int64_t row, float weight) {
      float x[kSumColumns];
      load_pack<T, kSumColumns>(static_cast<const T *>(a.rows) + row * a.hidden + i, x);
#pragma unroll
      for (int c = 0; c < kSumColumns; ++c) y[c] = fmaf(weight, x[c], y[c]);
    };
#pragma unroll 4
    for (int j = 0; j < a.top_k; ++j) add(row_of[j], weights[j]);
    if (a.shared_inner > 0) add(static_cast<int64_t>(a.tokens) * a.top_k + token, weights[a.top_k]);
    T *to = static_cast<T *>(a.y) + token * a.y_stride + i;
    if (reinterpret_cast<uintptr_t>(to) % 16 == 0)
      store_pack<T, kSumColumns>(to, y);
    else
      for (int c = 0; c < kSumColumns; ++c) to[c] = from_float<T>(y[c]);
  }
}

}  // namespace moe
}  // namespace gdn
