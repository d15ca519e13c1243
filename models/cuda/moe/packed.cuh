// The experts of few tokens, packed (../quantized): units of 16 rows of weights stream once through shared memory into the matrix units.
#pragma once

#include "../quantized/kernel.cuh"
#include "table.cuh"

namespace gdn {
namespace moe {

using quantized::kChunkOfX;
using quantized::kMostStages;
using quantized::kScalesOfX;
using quantized::kThreads;
using quantized::kTile;
using quantized::kWarps;

constexpr int kBarriers = kWarps * kMostStages * 8;    // bytes of shared memory, followed by the table
constexpr int kBehindTable = kBarriers + (table_bytes(GDN_MOE_PACKED_TOKENS * (GDN_MOE_TOP_K + 1)) + 127) / 128 * 128;
constexpr int kTurn = 16;          // tiles from one barrier to the next, at most
constexpr int kTileOutputs = 8;    // of a tile of gate and up: 8 rows of each
constexpr int kRowOfUnit = 2 * (kChunkOfX + kScalesOfX);    // bytes of a unit's inputs of h

// Matrices of all experts, or of the shared one.
struct PackedArgs {
  const char *w;
  int32_t type;
  int32_t tiles, units;    // of an expert; of a tile
};

struct FewArgs {
  Args a;
  PackedArgs gate_up, down, shared_gate_up, shared_down;
  // What convert_x() takes.
  const void *x;
  int64_t x_row;
  int32_t rows, chunks, x_shared_row, scales_row;
  static constexpr int group_size = 0, groups = 1, per_group = 1;
  // Of shared memory: bytes.
  int32_t scales_at, partial_at, partial_size, ring_at, stages;
  int32_t sums_at, down_ring_at, down_stages, down_stage;
};

// silu(gate x) * (up x) of some groups' tiles, by `blocks` blocks of which this is number `block`. Tiles are divided evenly over blocks, and a
// block's units over its warps.
template <typename T, int TYPE, int R>
__device__ __forceinline__ void gate_up_part(const FewArgs &q, const Table &table, const PackedArgs &part, bool routed, int first_group, int groups,
                                             int block, int blocks, unsigned char *shared_bytes) {
  using F = quantized::Format<TYPE>;
  using quantized::quotient;
  using quantized::Walk;
  constexpr int kChunks = quantized::kChunksOf<TYPE>;
  const int lane = ptx::kept_lane(), warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x / 32), 0), g = lane >> 2, t = lane & 3;
  const uint32_t shared = ptx::shared_address(shared_bytes);
  const int per = part.tiles, units = part.units, all = groups * per, begin = all * block / blocks, end = all * (block + 1) / blocks;
  const int turns = (end - begin + kTurn - 1) / kTurn, turn = (end - begin + turns - 1) / max(turns, 1);
  const auto group_of_tile = [&](int tile) { return table.entry[first_group + quotient(tile, per)].group; };

  quantized::Ring ring = {shared + q.ring_at + warp * q.stages * F::kBytes, shared + warp * kMostStages * 8, q.stages};
  ring.begin(lane);
  int fetch_first = begin, fetch_left = 0, fetch_tile = 0, fetch_at = 0;
  const char *from = nullptr;
  const auto find = [&] {
    const int group = quotient(fetch_tile, per), in_group = fetch_tile - group * per;
    const int expert = routed ? group_expert(table.entry[first_group + group].group) : 0;
    from = part.w + ((static_cast<int64_t>(expert) * per + in_group) * units + fetch_at) * F::kBytes;
  };
  const auto fetch = [&](int slot) {
    while (fetch_left == 0 && fetch_first < end) {
      const int of_turn = min(turn, end - fetch_first) * units, at = Walk::begin(warp, of_turn);
      fetch_left = Walk::begin(warp + 1, of_turn) - at;
      fetch_tile = quotient(at, units);
      fetch_at = at - fetch_tile * units;
      fetch_tile += fetch_first;
      fetch_first += turn;
      if (fetch_left > 0) find();
    }
    if (fetch_left > 0) {
      ring.fetch(slot, F::kBytes, from, F::kBytes, lane);
      --fetch_left;
      from += F::kBytes;
      if (++fetch_at == units) {
        fetch_at = 0;
        ++fetch_tile;
        if (fetch_left > 0) find();
      }
    }
    ring.commit();
  };
  for (int i = 0; i < q.stages; ++i) fetch(i);

  const bool active = g >> 1 == t;
  const uint32_t x_lane = shared + kBehindTable + t * 32 + (g & 1) * 16, scales_lane = shared + q.scales_at + t * 8;
  uint32_t b[R == 1 ? 2 * kChunks : 2][4] = {};
  int turned = 0;
  for (int first = begin; first < end; first += turn, turned ^= 1) {
    float *partial = reinterpret_cast<float *>(shared_bytes + q.partial_at + turned * q.partial_size);
    const int tiles = min(turn, end - first), of_turn = tiles * units, from_unit = Walk::begin(warp, of_turn);
    int tile = quotient(from_unit, units), at = from_unit - tile * units, rows = 1;
    const TableEntry *entry = nullptr;    // of the first row
    float sum[R][2] = {};
    for (int left = Walk::begin(warp + 1, of_turn) - from_unit; left > 0; --left) {
      if (R > 1 && (at == 0 || !entry)) {
        const uint32_t group = group_of_tile(first + tile);
        rows = group_rows(group);
        entry = table.entry + group_first(group);
      }
      ring.wait();
      quantized::Unit<TYPE> unit;
      unit.load(ring.at + ring.stage * F::kBytes, lane);
      if constexpr (R == 1) {
#pragma unroll
        for (int i = 0; i < 2 * kChunks; ++i) quantized::load_where(active, b[i], x_lane + at * kChunks * kChunkOfX + 128 * i);
      }
      __syncwarp();    // all have read the unit
      fetch(ring.stage);
      ring.next();
      const quantized::Scales<TYPE> scales = quantized::scales_of<TYPE>(unit.record, unit.factors);
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        uint32_t words[16];
        quantized::unpack<TYPE>(c, [&](int j) { return unit.pieces[j]; }, words);
        const int chunk = at * kChunks + c;
#pragma unroll
        for (int r = 0; r < R; ++r) {
          if (R > 1 && r >= rows) break;
          const int row = R == 1 ? 0 : entry[r].token;
          if constexpr (R > 1) {
#pragma unroll
            for (int i = 0; i < 2; ++i) quantized::load_where(active, b[i], x_lane + row * q.x_shared_row + chunk * kChunkOfX + 128 * i);
          }
          const float2 of_x = quantized::load_floats(scales_lane + row * q.scales_row + chunk * kScalesOfX);
          quantized::add_products<TYPE>(sum[r], words, scales, c, b[R == 1 ? 2 * c : 0], b[R == 1 ? 2 * c + 1 : 1], of_x);
        }
      }
      if (++at == units || left == 1) {    // the warp's last of this tile
        float *to = partial + (warp + tile) * (R * kTile) + g;
        at = 0;
        ++tile;
#pragma unroll
        for (int r = 0; r < R; ++r)
#pragma unroll
          for (int row = 0; row < 2; ++row) {
            const float all = group_sum<4>(sum[r][row]);
            if (t == 0) to[r * kTile + 8 * row] = all;
            sum[r][row] = 0.f;
          }
      }
    }
    // The warps' sums meet, in the order of the inputs. One barrier: those of the last turn lie elsewhere.
    __syncthreads();
    for (int i = threadIdx.x; i < tiles * (R * kTileOutputs); i += kThreads) {
      const int tile = i / (R * kTileOutputs), r = i / kTileOutputs % R, j = i % kTileOutputs;
      const uint32_t group = group_of_tile(first + tile);
      if (r >= group_rows(group)) continue;
      const int last = Walk::owner((tile + 1) * units - 1, of_turn);
      float gate = 0.f, up = 0.f;
      for (int w = Walk::owner(tile * units, of_turn); w <= last; ++w) {
        const float *sums = partial + (w + tile) * (R * kTile) + r * kTile + j;
        gate += sums[0];
        up += sums[kTileOutputs];
      }
      const int output = (first + tile - quotient(first + tile, per) * per) * kTileOutputs + j;
      static_cast<T *>(q.a.h)[static_cast<int64_t>(group_first(group) + r) * q.a.h_stride + output] = from_float<T>(fast_silu(gate) * up);
    }
  }
}

// R: rows of a group, at most; 1: of one token, and then there is room for another block beside.
template <typename T, int R> __global__ void __launch_bounds__(kThreads, R == 1 ? 2 : 1) packed_gate_up_kernel(const __grid_constant__ FewArgs q) {
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  Table &table = *reinterpret_cast<Table *>(shared_bytes + kBarriers);
  const uint32_t shared = ptx::shared_address(shared_bytes);
  ptx::grid_dependency_wait();
  ptx::grid_dependency_launch();
  // A single token's choice is the first warp's work.
  constexpr int kFirst = R == 1 ? 32 : 0;
  if (threadIdx.x >= kFirst)
    quantized::convert_x<T, R>(q, 0, shared + kBehindTable, shared + q.scales_at, threadIdx.x - kFirst, kThreads - kFirst);
  read_table(q.a, table);
  share_choice(q.a, table);

  // Blocks for the shared expert's groups, in proportion to its bytes.
  const auto bytes_of = [&](const PackedArgs &part, int groups) {
    const int unit = part.type == GDN_Q8_0 ? 2 * quantized::Format<GDN_Q8_0>::kBytes
                     : part.type == GDN_Q4_K ? quantized::Format<GDN_Q4_K>::kBytes
                                             : quantized::Format<GDN_Q6_K>::kBytes;    // of 256 inputs
    return static_cast<float>(groups * part.tiles) * static_cast<float>(unit);
  };
  const int of_shared = table.groups - table.routed, grid = static_cast<int>(gridDim.x);
  const float routed_weight_bytes = bytes_of(q.gate_up, table.routed), shared_weight_bytes = bytes_of(q.shared_gate_up, of_shared);
  const int share = of_shared == 0 ? 0 : min(grid - 1, 1 + static_cast<int>(static_cast<float>(grid) * __fdividef(shared_weight_bytes, routed_weight_bytes + shared_weight_bytes)));
  const int routed_blocks = grid - share;
  const bool is_shared = static_cast<int>(blockIdx.x) >= routed_blocks;
  const PackedArgs &part = is_shared ? q.shared_gate_up : q.gate_up;
  const int first_group = is_shared ? table.routed : 0, groups = is_shared ? of_shared : table.routed;
  const int block = static_cast<int>(blockIdx.x) - (is_shared ? routed_blocks : 0), blocks = is_shared ? share : routed_blocks;
  if (part.type == GDN_Q8_0) gate_up_part<T, GDN_Q8_0, R>(q, table, part, !is_shared, first_group, groups, block, blocks, shared_bytes);
  else if (part.type == GDN_Q4_K) gate_up_part<T, GDN_Q4_K, R>(q, table, part, !is_shared, first_group, groups, block, blocks, shared_bytes);
  else gate_up_part<T, GDN_Q6_K, R>(q, table, part, !is_shared, first_group, groups, block, blocks, shared_bytes);
}

// A unit of a group: adds weight * product to the warp's sums of each token. `to_x` is the warp's room for two rows of the unit's inputs.
template <typename T, int TYPE, int R, typename F>
__device__ __forceinline__ void down_unit(const FewArgs &q, const Table &table, uint32_t group, const char *h, uint32_t unit_at, uint32_t to_x, float *sums,
                                          const F &fetch_next) {
  constexpr int kChunks = quantized::kChunksOf<TYPE>, kPieces = kChunks * 16;
  const int lane = threadIdx.x % 32, g = lane >> 2, t = lane & 3, first = group_first(group), rows = R == 1 ? 1 : group_rows(group);
  uint4 raw[R] = {};
#pragma unroll
  for (int r = 0; r < R; ++r)
    if (r < rows && lane < kPieces) raw[r] = ptx::load_after_wait(h + (first + r) * (q.a.h_stride * static_cast<int64_t>(sizeof(T))) + lane * 16);
  quantized::Unit<TYPE> unit;
  unit.load(unit_at, lane);
  __syncwarp();    // all have read the unit
  fetch_next();
  const quantized::Scales<TYPE> scales = quantized::scales_of<TYPE>(unit.record, unit.factors);
  uint32_t words[kChunks][16];
#pragma unroll
  for (int c = 0; c < kChunks; ++c) quantized::unpack<TYPE>(c, [&](int j) { return unit.pieces[j]; }, words[c]);
  const bool active = g >> 1 == t;
  uint32_t b[2][4] = {};
#pragma unroll
  for (int r = 0; r < R; ++r) {
    if (R > 1 && r >= rows) break;
    const uint32_t x = to_x + r % 2 * kRowOfUnit, scales_at = x + 2 * kChunkOfX;
    const uint32_t raw_words[] = {raw[r].x, raw[r].y, raw[r].z, raw[r].w};
    const quantized::Fixed fixed = quantized::fixed_of<T>(raw_words);
    if (lane < kPieces) quantized::store_fixed(fixed, x, scales_at, lane);
    __syncwarp();    // and all have read the row before the last one
    float sum[2] = {};
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
#pragma unroll
      for (int i = 0; i < 2; ++i) quantized::load_where(active, b[i], x + c * kChunkOfX + i * 128 + t * 32 + (g & 1) * 16);
      const float2 of_x = quantized::load_floats(scales_at + c * kScalesOfX + t * 8);
      quantized::add_products<TYPE>(sum, words[c], scales, c, b[0], b[1], of_x);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float all = group_sum<4>(sum[i]);
      float *to = sums + table.entry[first + r].token * kTile + g + 8 * i;
      if (t == 0) *to = fmaf(table.entry[first + r].weight, all, *to);
    }
  }
  __syncwarp();    // all have read the last row
}

// y = the weighted sum of down h over a token's rows. A block has 16 outputs of all rows: its warps take units by turns, and add what they find to sums of
// their own.
template <typename T, int R> __global__ void __launch_bounds__(kThreads, R == 1 ? 2 : 1) packed_down_kernel(const __grid_constant__ FewArgs q) {
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  Table &table = *reinterpret_cast<Table *>(shared_bytes + kBarriers);
  const Args &a = q.a;
  const uint32_t shared = ptx::shared_address(shared_bytes);
  const int lane = ptx::kept_lane(), warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x / 32), 0);
  quantized::Ring ring = {shared + q.down_ring_at + warp * q.down_stages * q.down_stage, shared + warp * kMostStages * 8, q.down_stages};
  ring.begin(lane);
  // Of several tokens the table is older than the kernel before this one, and that one has waited for it. So the weights are under way before
  // the wait.
  await_table(a, table);
  const int routed_units = table.routed * q.down.units, units = routed_units + (table.groups - table.routed) * q.shared_down.units;
  struct Place {
    const PackedArgs &part;
    int group, at;    // number in the table; unit of the tile
  };
  const auto place = [&](int unit) {
    const bool is_shared = unit >= routed_units;
    const PackedArgs &part = is_shared ? q.shared_down : q.down;
    const int rest = is_shared ? unit - routed_units : unit, n = quantized::quotient(rest, part.units);
    return Place{part, is_shared ? table.routed + n : n, rest - n * part.units};
  };
  const auto fetch = [&](int unit, int slot) {
    if (unit < units) {
      const Place here = place(unit);
      const int bytes = here.part.type == GDN_Q8_0   ? quantized::Format<GDN_Q8_0>::kBytes
                        : here.part.type == GDN_Q4_K ? quantized::Format<GDN_Q4_K>::kBytes
                                                     : quantized::Format<GDN_Q6_K>::kBytes;
      const int64_t expert = unit < routed_units ? group_expert(table.entry[here.group].group) : 0;
      ring.fetch(slot, q.down_stage, here.part.w + ((expert * here.part.tiles + blockIdx.x) * here.part.units + here.at) * bytes, bytes, lane);
    }
    ring.commit();
  };
  for (int i = 0; i < q.down_stages; ++i) fetch(warp + i * kWarps, i);

  float *all_sums = reinterpret_cast<float *>(shared_bytes + q.sums_at), *sums = all_sums + warp * a.tokens * kTile;
  for (int i = lane; i < a.tokens * kTile; i += 32) sums[i] = 0.f;
  __syncwarp();
  ptx::grid_dependency_wait();
  ptx::grid_dependency_launch();
  const uint32_t to_x = shared + kBehindTable + warp * (2 * kRowOfUnit);
  for (int unit = warp; unit < units; unit += kWarps) {
    const Place here = place(unit);
    const uint32_t group = table.entry[here.group].group;
    const int inputs = here.part.type == GDN_Q8_0 ? 128 : 256;
    const char *h = static_cast<const char *>(a.h) + here.at * inputs * static_cast<int>(sizeof(T));
    const uint32_t at = ring.at + ring.stage * q.down_stage;
    ring.wait();
    const auto fetch_next = [&] {
      fetch(unit + q.down_stages * kWarps, ring.stage);
      ring.next();
    };
    if (here.part.type == GDN_Q8_0) down_unit<T, GDN_Q8_0, R>(q, table, group, h, at, to_x, sums, fetch_next);
    else if (here.part.type == GDN_Q4_K) down_unit<T, GDN_Q4_K, R>(q, table, group, h, at, to_x, sums, fetch_next);
    else down_unit<T, GDN_Q6_K, R>(q, table, group, h, at, to_x, sums, fetch_next);
  }
  __syncthreads();
  for (int i = threadIdx.x; i < a.tokens * kTile; i += kThreads) {
    const int token = i / kTile;
    const int64_t output = static_cast<int64_t>(blockIdx.x) * kTile + i % kTile;
    float y = 0.f;
#pragma unroll
    for (int p = 0; p < kWarps; ++p) y += all_sums[p * a.tokens * kTile + i];
    static_cast<T *>(a.y)[token * a.y_stride + output] = from_float<T>(y);
  }
}

}  // namespace moe
}  // namespace gdn
