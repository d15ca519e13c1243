// Experts in e4m3 with a few rows each, of many tokens: the weights stream once through registers, as in few.cuh, beside tiles of up to 32 rows.
#pragma once

#include "../common.cuh"
#include "held.cuh"

namespace gdn {
namespace moe {

constexpr int kStreamRows = 32;       // of a tile
constexpr int kStreamWarps = 16;
constexpr int kStreamThreads = 32 * kStreamWarps;
constexpr int kStreamChunks = 2;      // of a round
constexpr int kTeams = 4;             // of gate_up: each has 8 outputs, and its warps divide the inputs
constexpr int kTeamWarps = kStreamWarps / kTeams;
constexpr int kStreamOutputs = 16 * kStreamWarps;    // of down, of an item

// Bytes of a row in shared memory: see HeldRows.
constexpr __host__ __device__ int stream_row_bytes(int inputs) { return 2 * inputs + 16; }
constexpr int kStreamSums = 2 * kStreamWarps * kStreamRows * kColumn * 4;    // of two items
constexpr __host__ __device__ int64_t stream_gate_up_shared(int hidden) { return int64_t{kStreamRows} * stream_row_bytes(hidden) + kStreamSums; }
constexpr __host__ __device__ int64_t stream_down_shared(int widest) { return int64_t{kStreamRows} * stream_row_bytes(widest); }

// The items of all tiles, one after the other. A block takes neighbouring items, so it reads the rows of a tile once for many of them.
struct StreamItems {
  int routed, each, shared_each;    // tiles of routed experts; items of a tile
  int item, end;

  __device__ __forceinline__ StreamItems(const Args &a, int each, int shared_each) : routed(a.tile_count[1]), each(each), shared_each(shared_each) {
    const int items = routed * each + (a.tile_count[0] - routed) * shared_each, blocks = gridDim.x, block = blockIdx.x;
    item = items / blocks * block + min(items % blocks, block);
    end = item + items / blocks + (block < items % blocks);
  }

  // The tile of this item, and which of its items it is.
  __device__ __forceinline__ int tile(int &part) const {
    const bool shared = item >= routed * each;
    const int rest = shared ? item - routed * each : item, per = shared ? shared_each : each, n = rest / per;
    part = rest - n * per;
    return shared ? routed + n : n;
  }
};

// Uses up chunk d, of which `live` units are there, beside `rows` rows of x in shared memory. Each chunk has sums of its own, which its scale multiplies.
template <typename T>
__device__ __forceinline__ void multiply_rows(float (&sum)[kStreamRows / 8][4], const Weights<E4m3, kStreamChunks> &weights, const char *x, int row_bytes, int rows,
                                              int d, int live) {
  constexpr int kTiles = kStreamRows / 8;
  float block[kTiles][4] = {};
#pragma unroll
  for (int half = 0; half < 2; ++half)
    if (half < live) {
      const uint4 w0 = weights.w[d][half], w8 = weights.w[d][2 + half];
      const uint32_t words0[] = {w0.x, w0.y, w0.z, w0.w}, words8[] = {w8.x, w8.y, w8.z, w8.w};
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        uint32_t pairs0[2][2], pairs8[2][2];
#pragma unroll
        for (int word = 0; word < 2; ++word) {
          e4m3_pairs<T>(words0[2 * i + word], pairs0[word]);
          e4m3_pairs<T>(words8[2 * i + word], pairs8[word]);
        }
#pragma unroll
        for (int n = 0; n < kTiles; ++n)
          if (8 * n < rows) {
            const uint4 b = *reinterpret_cast<const uint4 *>(x + 8 * n * row_bytes + d * Stored<E4m3>::kXBytes + scaled_piece(half, i));
            ptx::mma16816<T>(block[n], pairs0[0][0], pairs8[0][0], pairs0[0][1], pairs8[0][1], b.x, b.y);
            ptx::mma16816<T>(block[n], pairs0[1][0], pairs8[1][0], pairs0[1][1], pairs8[1][1], b.z, b.w);
          }
      }
    }
#pragma unroll
  for (int n = 0; n < kTiles; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) sum[n][i] = fmaf(weights.scale[d][i / 2], block[n][i], sum[n][i]);
}

// A tile's rows into shared memory, by all threads; row r begins at from(r).
template <typename From> __device__ __forceinline__ void read_rows(unsigned char *shared, int row_bytes, int rows, int pieces, const From &from) {
  __syncthreads();    // all have read the rows before these
  for (int r = threadIdx.x / 32; r < rows; r += kStreamWarps) {
    const char *row = from(r);
    const uint32_t to = ptx::shared_address(shared + r * row_bytes);
    for (int i = threadIdx.x % 32; i < pieces; i += 32) ptx::copy_async(to + i * 16, row + i * 16);
  }
  ptx::copy_async_commit();
  ptx::copy_async_wait<0>();
  __syncthreads();
}

// h = silu(gate x) * (up x). An item is 32 outputs of a tile, 8 of each team.
template <typename T> __global__ void __launch_bounds__(kStreamThreads, 1) stream_gate_up_kernel(const __grid_constant__ Args a) {
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  const int tid = threadIdx.x, lane = tid % 32, g = lane >> 2, t = lane & 3, team = tid / (32 * kTeamWarps), warp = tid / 32 % kTeamWarps;
  const int x_row = stream_row_bytes(a.hidden);
  float(*partial)[kTeams][kTeamWarps][kStreamRows * kColumn] =
      reinterpret_cast<float(*)[kTeams][kTeamWarps][kStreamRows * kColumn]>(shared_bytes + kStreamRows * x_row);
  ptx::grid_dependency_wait();
  ptx::grid_dependency_launch();

  // Warps of a team divide the inputs into parts of `slice` chunks.
  const int slice = (a.hidden / 64 + 2 * kTeamWarps - 1) / (2 * kTeamWarps), first = warp * slice, live = min(2 * slice, a.hidden / 64 - 2 * first);
  StreamItems items(a, a.inner / 32, a.shared_inner / 32);
  Weights<E4m3, kStreamChunks> weights;
  Tile tile = {};
  int at = -1, round = 0, output = 0;    // of the weights that are requested: the tile, the round, the first output
  const auto start_item = [&] {
    weights.live = 0;
    if (items.item >= items.end) return;
    int part;
    if (const int here = items.tile(part); here != at) tile = a.tiles[at = here];
    const bool shared = tile.expert == a.experts;
    output = part * 32 + team * 8;
    const int inner = shared ? a.shared_inner : a.inner;
    const int64_t row = output + g + (shared ? 0 : tile.expert * int64_t{2} * inner);
    weights.row0 = static_cast<const char *>(shared ? a.shared_gate_up : a.gate_up) + row * a.hidden + first * kChunkBytes + t * 16;
    weights.to_row8 = inner * a.hidden;
    weights.live = live;
    const ScaleArgs &scales = shared ? a.shared_gate_up_scales : a.gate_up_scales;
    weights.scale0 = scales.row(row) + first;
    weights.scale8 = scales.row(row + inner) + first;
  };
  const auto advance = [&] {
    if ((round + 1) * kStreamChunks < slice) {
      ++round;
      weights.row0 += kStreamChunks * kChunkBytes;
      weights.live -= 2 * kStreamChunks;
      weights.scale0 += kStreamChunks;
      weights.scale8 += kStreamChunks;
    } else {
      round = 0;
      ++items.item;
      start_item();
    }
  };
  start_item();
#pragma unroll
  for (int d = 0; d < kStreamChunks; ++d) weights.fetch(d);

  int held = -1, turn = 0;
  while (items.item < items.end) {
    const int row = tile.first, rows = tile.rows, to = output;
    if (at != held) {
      held = at;
      const bool shared = tile.expert == a.experts;
      read_rows(shared_bytes, x_row, rows, a.hidden / 8, [&](int r) {
        const int token = shared ? row + r - a.tokens * a.top_k : a.token_of_row[row + r];
        return static_cast<const char *>(a.x) + token * (a.x_stride * static_cast<int64_t>(sizeof(T)));
      });
    }
    float sum[kStreamRows / 8][4] = {};
    const char *x = reinterpret_cast<const char *>(shared_bytes) + g * x_row + first * Stored<E4m3>::kXBytes + t * (Stored<E4m3>::kXBytes / 8);
    for (int left = live; left > live - 2 * slice; left -= 2 * kStreamChunks) {    // as often in every warp
      advance();
#pragma unroll
      for (int d = 0; d < kStreamChunks; ++d) {
        if (2 * d < left) multiply_rows<T>(sum, weights, x, x_row, rows, d, left - 2 * d);
        weights.fetch(d);
      }
      x += kStreamChunks * Stored<E4m3>::kXBytes;
    }

    // The sums of the team's warps meet, in the order of the inputs. One barrier: those of the last item lie elsewhere.
    float *warp_sums = partial[turn][team][warp];
#pragma unroll
    for (int n = 0; n < kStreamRows / 8; ++n)
      if (8 * n < rows)
#pragma unroll
        for (int i = 0; i < 4; ++i) warp_sums[(8 * n + 2 * t + i % 2) * kColumn + g + i / 2 * 8] = sum[n][i];
    ptx::group_barrier<32 * kTeamWarps>(1 + team);
    for (int i = tid % (32 * kTeamWarps); i < rows * 8; i += 32 * kTeamWarps) {
      const int n = i / 8, j = i % 8;
      float gate = 0.f, up = 0.f;
#pragma unroll
      for (int p = 0; p < kTeamWarps; ++p) {
        gate += partial[turn][team][p][n * kColumn + j];
        up += partial[turn][team][p][n * kColumn + j + 8];
      }
      static_cast<T *>(a.h)[static_cast<int64_t>(row + n) * a.h_stride + to + j] = from_float<T>(fast_silu(gate) * up);
    }
    turn ^= 1;
  }
}

// mlp(x) = down h. An item is 16 outputs of each warp of a tile; a warp has all inputs.
template <typename T> __global__ void __launch_bounds__(kStreamThreads, 1) stream_down_kernel(const __grid_constant__ Args a) {
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  const int tid = threadIdx.x, lane = tid % 32, g = lane >> 2, t = lane & 3, warp = tid / 32, h_row = stream_row_bytes(a.h_stride);
  // NOTES: the tiles are older than the kernel before this one, and that one has waited for them. So the weights are under way before the wait.
  const int each = (a.hidden + kStreamOutputs - 1) / kStreamOutputs;
  StreamItems items(a, each, each);
  Weights<E4m3, kStreamChunks> weights;
  Tile tile = {};
  int at = -1, output = 0, left = 0;    // units that are left of the row, from the round that is requested
  const auto start_item = [&] {
    weights.live = left = 0;
    if (items.item >= items.end) return;
    int part;
    if (const int here = items.tile(part); here != at) tile = a.tiles[at = here];
    const bool shared = tile.expert == a.experts;
    const int inner = shared ? a.shared_inner : a.inner;
    output = part * kStreamOutputs + warp * 16;
    left = inner / 64;
    const int64_t row = min(output, a.hidden - 16) + g + (shared ? 0 : tile.expert * static_cast<int64_t>(a.hidden));
    weights.row0 = static_cast<const char *>(shared ? a.shared_down : a.down) + row * inner + t * 16;
    weights.to_row8 = 8 * inner;
    weights.live = left;
    const ScaleArgs &scales = shared ? a.shared_down_scales : a.down_scales;
    weights.scale0 = scales.row(row);
    weights.scale8 = scales.row(row + 8);
  };
  const auto advance = [&] {
    left -= 2 * kStreamChunks;
    if (left > 0) {
      weights.row0 += kStreamChunks * kChunkBytes;
      weights.live = left;
      weights.scale0 += kStreamChunks;
      weights.scale8 += kStreamChunks;
    } else {
      ++items.item;
      start_item();
    }
  };
  start_item();
#pragma unroll
  for (int d = 0; d < kStreamChunks; ++d) weights.fetch(d);
  ptx::grid_dependency_wait();
  ptx::grid_dependency_launch();

  int held = -1;
  while (items.item < items.end) {
    const int row = tile.first, rows = tile.rows, to = output, units = left;
    if (at != held) {
      held = at;
      read_rows(shared_bytes, h_row, rows, units * 8, [&](int r) { return static_cast<const char *>(a.h) + (row + r) * (a.h_stride * static_cast<int64_t>(sizeof(T))); });
    }
    float sum[kStreamRows / 8][4] = {};
    const char *h = reinterpret_cast<const char *>(shared_bytes) + g * h_row + t * (Stored<E4m3>::kXBytes / 8);
    for (int here = units; here > 0; here -= 2 * kStreamChunks) {
      advance();
#pragma unroll
      for (int d = 0; d < kStreamChunks; ++d) {
        if (2 * d < here) multiply_rows<T>(sum, weights, h, h_row, rows, d, here - 2 * d);
        weights.fetch(d);
      }
      h += kStreamChunks * Stored<E4m3>::kXBytes;
    }
    if (to >= a.hidden) continue;
    // Turned, so that a lane has two outputs of one row.
#pragma unroll
    for (int n = 0; n < kStreamRows / 8; ++n)
      if (8 * n < rows) {
        const uint32_t words[] = {ptx::transpose_matrix(pack2<T>(sum[n][0], sum[n][1])), ptx::transpose_matrix(pack2<T>(sum[n][2], sum[n][3]))};
        T *y = static_cast<T *>(a.rows) + static_cast<int64_t>(row + 8 * n + g) * a.hidden + to + 2 * t;
        if (8 * n + g < rows) {
          *reinterpret_cast<uint32_t *>(y) = words[0];
          *reinterpret_cast<uint32_t *>(y + 8) = words[1];
        }
      }
  }
}

}  // namespace moe
}  // namespace gdn
