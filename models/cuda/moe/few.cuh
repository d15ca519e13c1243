// The experts of few tokens: the weights stream once through registers into the matrix units, as in ../linear.
#pragma once

#include "held.cuh"
#include "table.cuh"

namespace gdn {
namespace moe {

constexpr int kOutputs = 8;               // of a tile: as many rows of gate and of up
constexpr int kDownThreads = 32 * kDownWarps;
constexpr int kDownOutputs = 16;          // of a block

// Of gate_up_kernel: bytes of the sums of two tiles, and chunks of a warp.
template <typename W> constexpr int kGateUpSums = 2 * Stored<W>::kWarps * kGroup * kColumn * 4;
template <typename W> constexpr __host__ __device__ int gate_up_slice(int hidden) {
  constexpr int kAll = Stored<W>::kUnits * Stored<W>::kWarps;
  return (hidden / 64 + kAll - 1) / kAll;
}

// h = silu(gate x) * (up x). A tile is 8 outputs of one group: 8 rows of gate and the same 8 of up, so that a lane has
// both sums of an output. The warps of a block divide the inputs; a block has tiles in a row, most of them of one group. KEPT: x stays where it
// was read while the group is the same: in registers, where a warp's part is one round; in e4m3 in shared memory. Loads return in order, so a
// piece of x that is read for a product would wait for weights of the next round.
// One function: weights are under way from its first lines to its last, in registers that no part of it could hand on.
template <typename T, typename W, bool KEPT>
__global__ void __launch_bounds__(32 * Stored<W>::kWarps, 16 / Stored<W>::kWarps)
    gate_up_kernel(const __grid_constant__ Args a) {
  constexpr int kGateUpWarps = Stored<W>::kWarps, kUnits = Stored<W>::kUnits;
  constexpr int kXBytes = Stored<W>::kXBytes;
  constexpr bool kScaled = Stored<W>::kScaled, kInRegisters = KEPT && !kScaled, kHeld = KEPT && kScaled;
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  // Of this tile and the last one.
  float(*partial)[kGateUpWarps][kGroup * kColumn] = reinterpret_cast<float(*)[kGateUpWarps][kGroup * kColumn]>(shared_bytes);
  unsigned char *room = shared_bytes + kGateUpSums<W>;
  Table &table = *reinterpret_cast<Table *>(room);
  const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32, g = lane >> 2, t = lane & 3;
  // Wait for x and the table of groups.
  ptx::grid_dependency_wait();
  ptx::grid_dependency_launch();
  read_table(a, table);
  share_choice(a, table);

  // Divide the inputs over the warps, and the groups into tiles.
  const int slice = gate_up_slice<W>(a.hidden);
  const int first = warp * slice;
  const int live = min(kUnits * slice, a.hidden / 64 - kUnits * first);
  const int row_bytes = a.hidden * static_cast<int>(sizeof(W)), part = first * kChunkBytes + t * 16;
  const int x_part = first * kXBytes + t * (kXBytes / 8);
  const int each = a.inner / kOutputs, shared_each = a.shared_inner / kOutputs;
  const int routed_tiles = table.routed * each, tiles = routed_tiles + (table.groups - table.routed) * shared_each;
  // With several tokens a block takes neighbouring tiles. With one token all groups have the same x, and a block's second tile is one of the last: those are of the
  // shared expert, whose weights may be in L2.
  const bool one = a.tokens == 1;
  const int blocks = gridDim.x, block = blockIdx.x, begin = one ? block : tiles / blocks * block + min(tiles % blocks, block);
  const int end = one ? tiles : begin + tiles / blocks + (block < tiles % blocks), next_tile = one ? blocks : 1;

  // The stream of weights runs a round in front of their use, over the ends of tiles.
  Weights<W> weights;
  uint32_t group = 0;
  int tile = begin, round = 0, output = 0;
  const auto start_group = [&] {
    weights.live = 0;
    if (tile >= end) return;
    const bool shared = tile >= routed_tiles;
    const int rest = shared ? tile - routed_tiles : tile, per = shared ? shared_each : each, n = rest / per;
    group = table.entry[shared ? table.routed + n : n].group;
    output = (rest - n * per) * kOutputs;
    const char *w = static_cast<const char *>(shared ? a.shared_gate_up : a.gate_up);
    if (!shared) w += group_expert(group) * (static_cast<int64_t>(2 * a.inner) * row_bytes);
    weights.row0 = w + static_cast<int64_t>(output + g) * row_bytes + part;
    weights.to_row8 = (shared ? a.shared_inner : a.inner) * row_bytes;
    weights.live = live;
    if constexpr (Stored<W>::kScaled) {
      const ScaleArgs &scales = shared ? a.shared_gate_up_scales : a.gate_up_scales;
      const int64_t row = output + g + (shared ? 0 : group_expert(group) * static_cast<int64_t>(2 * a.inner));
      weights.scale0 = scales.row(row) + first;
      weights.scale8 = scales.row(row + (shared ? a.shared_inner : a.inner)) + first;
    }
  };
  const auto advance = [&] {
    if (!kInRegisters && (round + 1) * kChunks < slice) {
      ++round;
      weights.row0 += kChunks * kChunkBytes;
      weights.live -= kUnits * kChunks;
      if constexpr (Stored<W>::kScaled) {
        weights.scale0 += kChunks;
        weights.scale8 += kChunks;
      }
    } else {
      round = 0;
      tile += next_tile;
      start_group();
    }
  };
  // Start the first rows of x, and the first round of weights.
  const auto row_of_x = [&](int row) { return static_cast<const char *>(a.x) + table.entry[row].token * (a.x_stride * static_cast<int64_t>(sizeof(T))); };
  const int most_rows = min(a.tokens, kGroup), units = max(live, 0);
  const HeldRows held_rows(room + table_bytes(a) + warp * HeldRows::bytes(slice, most_rows), slice, most_rows, units);
  const auto request_rows = [&] {
    held_rows.request(group_rows(group), lane, [&](int r) { return row_of_x(group_first(group) + r) + first * kXBytes; });
  };
  start_group();
  if constexpr (kHeld)
    if (tile < end) request_rows();
#pragma unroll
  for (int d = 0; d < kChunks; ++d) weights.fetch(d);

  Piece x[kInRegisters ? kChunks : 1];
  uint32_t held = 0;    // whose rows they are; no group is 0
  int turn = 0;
  while (tile < end) {
    const uint32_t now = group, whose = one ? 1 : now;
    const int row = group_first(now), rows = group_rows(now), to = output;
    // Rows past the end are the last one again: their sums are not stored, and they cost no traffic.
    const char *from = kHeld ? held_rows.rows + min(g, rows - 1) * held_rows.row_bytes + t * (kXBytes / 8) : row_of_x(row + min(g, rows - 1)) + x_part;
    if constexpr (kHeld) {
      if (whose != held) {
        if (held != 0) request_rows();
        held_rows.convert<T>(rows, lane);
        held = whose;
      }
    }
    // Multiply, with x in registers, beside e4m3 in shared memory, or else from global memory.
    float sum[2][4] = {};
    if constexpr (kInRegisters) {
      if (whose != held) {
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
    } else if constexpr (Stored<W>::kScaled) {
      const float2 *factors = reinterpret_cast<const float2 *>(held_rows.factors) + t;
      for (int left = live; left > live - 2 * slice; left -= 2 * kChunks) {
        advance();
#pragma unroll
        for (int d = 0; d < kChunks; ++d) {
          const auto piece = [&](int half, int i) { return *reinterpret_cast<const uint4 *>(from + d * kXBytes + scaled_piece(half, i)); };
          if (2 * d < left) {
            if constexpr (kHeld)
              multiply<__half>(sum, weights, piece, d, left - 2 * d, factors[d * (kGroup / 2)]);
            else
              multiply<T>(sum, weights, piece, d, left - 2 * d);
          }
          weights.fetch(d);
        }
        from += kChunks * kXBytes;
        factors += kChunks * (kGroup / 2);
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
    float *warp_sums = partial[turn][warp];
#pragma unroll
    for (int i = 0; i < 4; ++i) warp_sums[(2 * t + i % 2) * kColumn + g + i / 2 * 8] = sum[0][i] + sum[1][i];
    __syncthreads();
    // Store silu(gate) * up.
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

// Bytes of a row of h in shared memory, followed by its chunks' factors.
constexpr __host__ __device__ int h_shared_bytes(const Args &a) { return 2 * a.h_stride + (a.h_stride + 511) / 512 * 16; }

// y = the weighted sum of down h over a token's rows. A block has 16 outputs of all rows: its warps divide the groups,
// and rounds of their inputs, and add what they find to sums of their own. In e4m3 h of one token is in shared memory (KEPT); of several tokens it
// comes in registers as weights do, and before them, in rounds of half the length.
template <typename T, typename W, bool KEPT>
__global__ void __launch_bounds__(kDownThreads, 1) down_kernel(const __grid_constant__ Args a) {
  constexpr int kUnits = Stored<W>::kUnits, kXBytes = Stored<W>::kXBytes;
  constexpr bool kScaled = Stored<W>::kScaled, kAhead = kScaled && !KEPT;
  constexpr int kChunks = kAhead ? moe::kChunks / 2 : moe::kChunks;
  extern __shared__ __align__(16) unsigned char room[];
  Table &table = *reinterpret_cast<Table *>(room);
  float *sums = reinterpret_cast<float *>(room + table_bytes(a));    // [warps][tokens][kColumn]
  char *h_shared = reinterpret_cast<char *>(sums + kDownWarps * a.tokens * kColumn);
  const int h_row_bytes = h_shared_bytes(a);
  const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32, g = lane >> 2, t = lane & 3;
  // NOTES: of several tokens the table is older than the kernel before this one, and that one has waited for it. So the weights are
  // under way before the wait.
  await_table(a, table);

  constexpr int kRound = kChunks * Stored<W>::kChunk;    // inputs
  const int each = (a.inner + kRound - 1) / kRound, shared_each = (a.shared_inner + kRound - 1) / kRound;
  const int routed_units = table.routed * each, units = routed_units + (table.groups - table.routed) * shared_each;

  // The stream of weights: a unit is a round of a group's inputs.
  Weights<W, kChunks> weights;
  uint32_t group = 0;
  int unit = warp, x_part = 0;    // bytes of a row of h before this round
  const char *h_from = nullptr;
  const auto start_group = [&] {
    weights.live = 0;
    if (unit >= units) return;
    const bool shared = unit >= routed_units;
    const int rest = shared ? unit - routed_units : unit, per = shared ? shared_each : each, n = rest / per;
    const int width = shared ? a.shared_inner : a.inner, row_bytes = width * static_cast<int>(sizeof(W));
    const int round = rest - n * per;
    group = table.entry[shared ? table.routed + n : n].group;
    x_part = round * kChunks * kXBytes + t * (kXBytes / 8);
    const int part = x_part / kUnits;
    // Rows past the end are the last one again.
    h_from = static_cast<const char *>(a.h) + x_part +
             (group_first(group) + min(g, group_rows(group) - 1)) * (a.h_stride * static_cast<int64_t>(sizeof(T)));
    const char *w = static_cast<const char *>(shared ? a.shared_down : a.down);
    if (!shared) w += group_expert(group) * (static_cast<int64_t>(a.hidden) * row_bytes);
    weights.row0 = w + static_cast<int64_t>(static_cast<int>(blockIdx.x) * kDownOutputs + g) * row_bytes + part;
    weights.to_row8 = 8 * row_bytes;
    weights.live = width / 64 - round * kUnits * kChunks;
    if constexpr (kScaled) {
      const ScaleArgs &scales = shared ? a.shared_down_scales : a.down_scales;
      const int64_t row = static_cast<int>(blockIdx.x) * kDownOutputs + g +
                          (shared ? 0 : group_expert(group) * static_cast<int64_t>(a.hidden));
      weights.scale0 = scales.row(row) + round * kChunks;
      weights.scale8 = scales.row(row + 8) + round * kChunks;
    }
  };
  // Start the first unit, and clear the warp's sums.
  start_group();
#pragma unroll
  for (int d = 0; d < kChunks; ++d) weights.fetch(d);
  float *warp_sums = sums + warp * a.tokens * kColumn;
  for (int i = lane; i < a.tokens * kColumn; i += 32) warp_sums[i] = 0.f;
  // Wait for h.
  ptx::grid_dependency_wait();
  ptx::grid_dependency_launch();
  if constexpr (KEPT) {
    for (int row = warp; row < table.groups; row += kDownWarps) {
      char *to = h_shared + row * h_row_bytes;
      read_row<T>(static_cast<const T *>(a.h) + row * int64_t{a.h_stride}, to, reinterpret_cast<float *>(to + 2 * a.h_stride),
                  row < table.routed ? a.inner : a.shared_inner, lane);
    }
    __syncthreads();
  }
  std::conditional_t<kScaled, ScaledPiece, Piece> h[kScaled && KEPT ? 1 : kChunks];
  if constexpr (kAhead) {
#pragma unroll
    for (int d = 0; d < kChunks; ++d) h[d].load(h_from + d * kXBytes, weights.live - 2 * d);
  }

  while (unit < units) {
    const int row = group_first(group), rows = group_rows(group), live = weights.live;
    const char *kept = h_shared + row * h_row_bytes;
    [[maybe_unused]] const float *factors = reinterpret_cast<const float *>(kept + 2 * a.h_stride) + x_part / kXBytes;
    kept += x_part;
    // Load h of the unit where that is not done, start the next one, and multiply.
    if constexpr (!kScaled) {
#pragma unroll
      for (int d = 0; d < kChunks; ++d)
        if (d < live) h[d].load(h_from + d * kChunkBytes);
    }
    unit += kDownWarps;
    start_group();
    float sum[2][4] = {};
#pragma unroll
    for (int d = 0; d < kChunks; ++d) {
      if constexpr (kAhead) {
        if (2 * d < live) multiply<T>(sum, weights, [&](int half, int i) { return h[d].x[half][i]; }, d, live - 2 * d);
        h[d].load(h_from + d * kXBytes, weights.live - 2 * d);
      } else if constexpr (kScaled) {
        const auto piece = [&](int half, int i) { return *reinterpret_cast<const uint4 *>(kept + d * kXBytes + scaled_piece(half, i)); };
        if (2 * d < live) multiply<__half>(sum, weights, piece, d, live - 2 * d, make_float2(factors[d], factors[d]));
      } else {
        if (d < live) multiply<T>(sum, weights, h[d], d);
      }
      weights.fetch(d);
    }
    __syncwarp();    // another lane may have added to the same token last time
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int n = 2 * t + i % 2;
      if (n < rows) {
        float *to = warp_sums + table.entry[row + n].token * kColumn + g + i / 2 * 8;
        *to = fmaf(table.entry[row + n].weight, sum[0][i] + sum[1][i], *to);
      }
    }
  }
  // Add the sums of all warps, and store.
  __syncthreads();
  for (int i = tid; i < a.tokens * kDownOutputs; i += kDownThreads) {
    const int token = i / kDownOutputs, j = i % kDownOutputs;
    const int64_t output = static_cast<int64_t>(blockIdx.x) * kDownOutputs + j;
    float y = 0.f;
#pragma unroll
    for (int p = 0; p < kDownWarps; ++p) y += sums[(p * a.tokens + token) * kColumn + j];
    static_cast<T *>(a.y)[token * a.y_stride + output] = from_float<T>(y);
  }
}

}  // namespace moe
}  // namespace gdn
