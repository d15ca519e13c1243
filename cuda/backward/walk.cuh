// The two serial parts of the backward pass: states along the chunks, and gradients of states against them.
//
// A block owns 64 or 128 value rows of a head, a warp 16 of them in its registers, and walks through the chunks of a section or of a
// segment of one. The walks of a launch do not need each other.
#pragma once

#include "walker.cuh"

namespace gdn {
namespace backward {

// U^T = A (beta (V^T - read S K^T)), S <- decay S + (write U^T) K. One function: its parts share operands in registers.
template <typename T, bool WGMMA, int STAGES, int QUERIES, int TILES, bool COUNTS>
__device__ __forceinline__ void walk_forward(const Walker<T, WGMMA, STAGES, QUERIES, TILES, COUNTS> &w) {
  float state[16][4] = {};
  w.begin(state);
  const int warp = w.warp, lane = w.lane;
  if (!WGMMA && STAGES == 2) w.load_chain(0, w.s.begin, w.p.v, w.maps.v);
  for (int i = w.s.begin; i < w.s.end; ++i) {
    // Wait for the chunk.
    const int step = i - w.s.begin;
    if (!WGMMA) {
      if (STAGES == 2) w.load_chain(step + 1, i + 1, w.p.v, w.maps.v);
      else w.load_chain(0, i, w.p.v, w.maps.v);
    }
    w.template wait_for_chain<STAGES == 2 ? 1 : 0>(step, i);
    const auto &stage = w.stage(step);
    const uint32_t keys = ptx::shared_address(stage.k), values = ptx::shared_address(stage.values[w.group]);
    const uint32_t out = w.out_tile(step);
    const WalkFactors &f = stage.factors;

    // The updates.
    uint32_t operand[8][4];
    chunk::to_operand<T>(operand, state);
    float x[8][4];
    multiply<T, WGMMA, false>(x, operand, keys, false, lane);
    if (w.keeps(step)) w.store_image(operand, w.buffers.states, step, i);
    wait<WGMMA>(x, operand);
    chunk::subtract_from_values<T>(x, values, f.read, warp, lane);
    chunk::scale_columns(x, f.beta, lane);
    uint32_t half[4][4];
    const RowScales scales = to_scaled_operand(half, x);
    float y[8][4];
    multiply_now<__half, WGMMA, false>(y, half, ptx::shared_address(stage.inverse), false, lane);
    add_rounded(x, half, y, scales.up);

    // The new state.
#pragma unroll
    for (int t = 0; t < 8; ++t)
#pragma unroll
      for (int c = 0; c < 4; ++c) y[t][c] = x[t][c];
    chunk::scale_columns(y, f.write, lane);
    chunk::to_operand<T>(half, y);
    chunk::scale(state, f.decay);
    multiply<T, WGMMA, true>(state, half, keys, true, lane);
    // While its products are under way: U / beta, in f16 and divided by a power of two.
    if (w.keeps(step)) {
      float most = 0.f;
      chunk::scale_columns(x, f.unbeta, lane);
#pragma unroll
      for (int t = 0; t < 8; ++t)
#pragma unroll
        for (int c = 0; c < 4; ++c) most = fmaxf(most, fabsf(x[t][c]));
#pragma unroll
      for (int d = 4; d < 32; d *= 2) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, d));
      const RowScales s = scales_of_rows(most, most);
      chunk::scale(x, s.down[0]);
      chunk::put_out<__half>(x, out, warp, lane);
      if (lane == 0) w.buffers.records[w.index(i)].tokens.updates[4 * w.s.tile + warp] = s.up[0];
      const int row = w.s.tile * kTileRows + 16 * warp;
      if (w.buffers.updates == nullptr) {
        const gdn_heads &to = updates_of(w.p, w.s.head_of_key);
        chunk::take_out<T>(out, warp, lane, out_heads_at<T>(to, w.s.n, w.first(i), w.s.key_head) + row, to.token_stride, w.count(i),
                           w.p.common.head_v - row);
      } else {
        __syncwarp();
        const int piece = 2 * warp + lane % 2;
        uint8_t *to = w.buffers.updates + (w.index(i) * w.v_tiles + w.s.tile) * kTileBytes;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const uint32_t at = chunk::tile_offset(lane / 2 + 16 * j, piece);
          *reinterpret_cast<uint4 *>(to + at) = ptx::load_shared(out + at);
        }
      }
    }
    wait<WGMMA>(state, half);
    w.chunk_is_done(step);
  }
  w.end(state);
}

// A left operand with a factor a column.
template <typename T>
__device__ __forceinline__ void scale_operand(uint32_t (&a)[4][4], const float *factors, int lane) {
#pragma unroll
  for (int m = 0; m < 4; ++m) {
    const float4 f = chunk::column_factors(factors, m, lane);
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const float2 x = chunk::unpack2<T>(a[m][c]);
      a[m][c] = chunk::pack2_finite<T>(x.x * (c < 2 ? f.x : f.z), x.y * (c < 2 ? f.y : f.w));
    }
  }
}

// dU^T = write (dS K^T) + dO^T Att, dV^T = beta (dU^T A), dS <- decay dS + (query dO^T) Q - (read dV^T) K.
template <typename T, bool WGMMA, int STAGES, int QUERIES, int TILES, bool COUNTS>
__device__ __forceinline__ void walk_reverse(const Walker<T, WGMMA, STAGES, QUERIES, TILES, COUNTS> &w) {
  float state[16][4] = {};
  w.begin(state);
  const int warp = w.warp, lane = w.lane;
  if (!WGMMA && STAGES == 2) w.load_chain(0, w.s.end - 1, w.p.d_o, w.maps.d_o);
  for (int i = w.s.end - 1; i >= w.s.begin; --i) {
    // Wait for the chunk.
    const int step = w.s.end - 1 - i;
    if (!WGMMA) {
      if (STAGES == 1) w.load_chain(0, i, w.p.d_o, w.maps.d_o);
      w.load_queries(step, i);
      if (STAGES == 2) w.load_chain(step + 1, i - 1, w.p.d_o, w.maps.d_o);
    }
    w.template wait_for_chain<STAGES == 2 ? 2 : 1>(step, i);
    const auto &stage = w.stage(step);
    const uint32_t keys = ptx::shared_address(stage.k), values = ptx::shared_address(stage.values[w.group]);
    const uint32_t queries = ptx::shared_address(w.queries(step).q), attention = ptx::shared_address(w.queries(step).attention);
    const WalkFactors &f = stage.factors;

    // What does not depend on each other: dS K^T, dO^T Att, dO^T Q.
    float x[8][4], y[8][4];
    uint32_t operand[8][4], half[4][4], out[4][4], scaled[4][4];
    chunk::to_operand<T>(operand, state);
    load_columns(out, values, warp, lane);
    multiply<T, WGMMA, false>(x, operand, keys, false, lane);
    w.template wait_for_queries<STAGES == 2 ? 1 : 0>(step, i);
    const RowScales out_scales = to_scaled_operand<T>(scaled, out);
    multiply<__half, WGMMA, true>(y, scaled, attention, false, lane);
    scale_operand<T>(out, f.query, lane);
    chunk::scale(state, f.decay);
    multiply<T, WGMMA, true>(state, out, queries, true, lane);
    if (w.keeps(step)) w.store_image(operand, w.buffers.gradients, step, i);

    // The gradients of U and v.
    wait<WGMMA, 1>(x, operand, scaled);
    wait<WGMMA, 1>(y);
    chunk::scale_columns(x, f.write, lane);
#pragma unroll
    for (int t = 0; t < 8; ++t)
#pragma unroll
      for (int c = 0; c < 4; ++c) x[t][c] = fmaf(y[t][c], out_scales.up[c / 2], x[t][c]);
    const RowScales scales = to_scaled_operand(half, x);
    multiply<__half, WGMMA, true>(y, half, ptx::shared_address(stage.inverse), false, lane);
    wait<WGMMA>(y, half, out);
    wait<WGMMA>(state);
    w.queries_are_done(step);
    add_rounded(x, half, y, scales.up);
    chunk::scale_columns(x, f.beta, lane);
    chunk::pack_out<T>(out, x);

    // The new gradient of the state.
    chunk::scale_columns(x, f.key, lane);
    chunk::to_operand<T>(half, x);
    multiply<T, WGMMA, true>(state, half, keys, true, lane);
    if (w.keeps(step)) {
      chunk::put_out(out, w.out_tile(step), warp, lane);
      const int row = w.s.tile * kTileRows + 16 * warp;
      chunk::take_out<T>(w.out_tile(step), warp, lane, out_heads_at<T>(w.p.d_v, w.s.n, w.first(i), w.s.head) + row, w.p.d_v.token_stride, w.count(i),
                         w.p.common.head_v - row);
    }
    wait<WGMMA>(state, half);
    w.chunk_is_done(step);
  }
  w.end(state);
}

// Warpgroups that compute, and one of which a warp copies.
template <bool WGMMA, int TILES> constexpr int kWalkThreads = WGMMA ? 128 * (TILES + 1) : 128;

template <typename T, bool WGMMA, int STAGES, int QUERIES, int TILES, bool COUNTS>
__global__ void __launch_bounds__(kWalkThreads<WGMMA, TILES>, QUERIES == 1 ? 2 : 1)
walk_kernel(const __grid_constant__ gdn_rule_backward_params p, const __grid_constant__ Buffers buffers, const __grid_constant__ Maps maps,
            const __grid_constant__ Walks walks) {
  if constexpr (WGMMA && !ptx::kSm90a) return;
  using Shared = WalkShared<STAGES, QUERIES, TILES>;
  extern __shared__ __align__(1024) uint8_t raw_shared[];
  ptx::grid_dependency_wait();
  if (COUNTS) ptx::grid_dependency_launch();    // only now: the gradients kernel does not wait for what was before this launch
  Block block = block_of(p.common, walks, buffers.records, TILES);
  if (block.empty) return;
  const Walk &walk = walks.walk[block.which];
  const int warps = TILES * 4, group = static_cast<int>(threadIdx.x / 128) % TILES, v_tiles = v_tiles_of(p.common);
  block.s.tile += group;
  const int thread = threadIdx.x % 128;
  const Walker<T, WGMMA, STAGES, QUERIES, TILES, COUNTS> w = {
      p, buffers, maps, *reinterpret_cast<Shared *>(raw_shared), walk, block.s, walk.direction, walks.cut.segments == 1,
      walk.store ? block.s.warm_up : 1 << 30, group, thread, thread / 32, thread % 32, v_tiles};
  if constexpr (WGMMA) {
    // The threads behind the warpgroups that compute have the first one's stretch.
    if (threadIdx.x == 32 * warps) {
      for (int i = 0; i < 2 + QUERIES; ++i) ptx::barrier_init(w.full(i), 1), ptx::barrier_init(w.empty(i), 128 * w.tiles_here());
      for (int i = 0; COUNTS && i < kCounted; ++i) {
        ptx::barrier_init(ptx::shared_address(&w.shared.stored[i]), 4 * w.tiles_here());
        ptx::barrier_init(ptx::shared_address(&w.shared.counted[i]), 1);
      }
      ptx::barriers_initialised();
    }
    __syncthreads();
    constexpr bool kSetRegisters = QUERIES == 1 || TILES > 1;    // else each thread may have all
    if (threadIdx.x >= 32 * warps) {
      if (kSetRegisters) fewer_registers<24>();
      if (threadIdx.x == 32 * warps) w.copy_chunks();
      if (COUNTS && threadIdx.x == 32 * (warps + 1)) w.count_chunks();
      return;
    }
    if (kSetRegisters) more_registers<TILES == 1 ? 232 : 240>();
    if (block.s.tile >= v_tiles) return;
  }
  if (walk.direction == kReverse) walk_reverse<T, WGMMA>(w);
  else walk_forward<T, WGMMA>(w);
}

}  // namespace backward
}  // namespace gdn
