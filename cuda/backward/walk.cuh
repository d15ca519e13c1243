// The two serial parts of the backward pass: states along the chunks, and gradients of states against them.
//
// A block owns 64 or 128 value rows of a head, a warp 16 of them in its registers, and walks through the chunks of its segment. Both
// walks are in one launch, since neither needs the other.
#pragma once

#include "maps.h"
#include "products.cuh"
#include "records.cuh"

namespace gdn {
namespace backward {

// STAGES of what the chain of products needs, QUERIES of what only the reverse walk needs beside it, TILES of 64 value rows.
template <int STAGES, int QUERIES, int TILES> struct WalkShared {
  struct Stage {
    alignas(1024) uint8_t k[2 * kTileBytes];
    uint8_t values[TILES][kTileBytes];    // v or dO, then U or dV on their way out
    uint8_t inverse[kImageBytes];
    WalkFactors factors;
  };
  struct Queries {
    alignas(1024) uint8_t q[2 * kTileBytes];
    uint8_t attention[kImageBytes];
  };
  Stage stage[STAGES];
  Queries queries[QUERIES];
  uint8_t image[TILES][kStateBytes];    // of the state
  // Of the stages, then of the queries: copies that have arrived, and those that all warps have read.
  uint64_t full[2 + QUERIES], empty[2 + QUERIES];
};

// The stretch of a warpgroup.
struct Stretch {
  Tokens seq;
  int n, head, tile;
  int key_head, head_of_key;    // of the key head, the so manieth value head
  int begin, end;    // chunks
  int64_t place;     // of `begin`
};

// A walk's pieces that both directions have. With wgmma a warp of its own has the copy engine bring chunks.
template <typename T, bool WGMMA, int STAGES, int QUERIES, int TILES> struct Walker {
  using Shared = WalkShared<STAGES, QUERIES, TILES>;
  using Stage = typename Shared::Stage;
  const gdn_rule_backward_params &p;
  const Buffers &buffers;
  const Maps &maps;
  Shared &shared;
  const Stretch s;
  const int group, thread, warp, lane, v_tiles;    // thread and warp of its warpgroup

  __device__ __forceinline__ int64_t first(int i) const { return s.seq.first + static_cast<int64_t>(i) * kChunk; }
  __device__ __forceinline__ int count(int i) const { return s.seq.count - i * kChunk; }
  __device__ __forceinline__ int64_t index(int i) const { return (s.place + i - s.begin) * p.common.num_v_heads + s.head; }
  __device__ __forceinline__ Stage &stage(int step) const { return shared.stage[STAGES == 1 ? 0 : step % 2]; }

  __device__ __forceinline__ void load_box(uint8_t *to, const CUtensorMap &map, int column, int head, int i, uint32_t barrier) const {
    ptx::copy_box(ptx::shared_address(to), &map, column, head, static_cast<int>(first(i)), p.common.seqs.cu_seqlens ? 0 : s.n, barrier);
  }
  __device__ __forceinline__ uint32_t full(int i) const { return ptx::shared_address(&shared.full[i]); }
  __device__ __forceinline__ uint32_t empty(int i) const { return ptx::shared_address(&shared.empty[i]); }
  __device__ __forceinline__ void sync() const {
    if constexpr (WGMMA) ptx::group_barrier<128>(1 + group);
    else __syncthreads();
  }
  __device__ __forceinline__ int tiles_here() const { return min(TILES, v_tiles - s.tile); }    // of the block, by its first warpgroup

  // Copies for the chain of chunk i; `values` is v or dO. A group, empty past the end.
  __device__ __forceinline__ void load_chain(int step, int i, const gdn_heads &values, const CUtensorMap &map) const {
    const bool there = i >= s.begin && i < s.end;
    const int row0 = s.tile * kTileRows;
    if constexpr (WGMMA) {
      Stage &to = stage(step);
      const uint32_t full = this->full(step % 2);
      const Record &r = buffers.records[index(i)];
      ptx::barrier_expect(full, (2 + tiles_here()) * kTileBytes + kImageBytes + sizeof(WalkFactors));
      for (int h = 0; h < 2; ++h) load_box(to.k + h * kTileBytes, maps.k, 64 * h, s.key_head, i, full);
      for (int t = 0; t < tiles_here(); ++t) load_box(to.values[t], map, row0 + t * kTileRows, s.head, i, full);
      ptx::copy_bulk(ptx::shared_address(to.inverse), r.inverse, kImageBytes, full);
      ptx::copy_bulk(ptx::shared_address(&to.factors), &r.walk, sizeof(WalkFactors), full);
      return;
    }
    if (there) {
      Stage &to = stage(step);
      chunk::copy_tile<T, kKeys / 8, 128>(ptx::shared_address(to.k), heads_at<T>(p.k, s.n, first(i), s.key_head), p.k.token_stride, count(i),
                                          p.common.head_k, thread);
      chunk::copy_tile<T, 8, 128>(ptx::shared_address(to.values[0]), heads_at<T>(values, s.n, first(i), s.head) + row0, values.token_stride,
                                  count(i), p.common.head_v - row0, thread);
      const Record &r = buffers.records[index(i)];
      chunk::copy_bytes<kImageBytes, 128>(ptx::shared_address(to.inverse), r.inverse, thread);
      chunk::copy_bytes<sizeof(WalkFactors), 128>(ptx::shared_address(&to.factors), &r.walk, thread);
    }
    ptx::copy_async_commit();
  }
  // The same for what only the reverse walk needs.
  __device__ __forceinline__ auto &queries(int step) const { return shared.queries[step % QUERIES]; }
  __device__ __forceinline__ void load_queries(int step, int i) const {
    auto &to = queries(step);
    if constexpr (WGMMA) {
      const uint32_t full = this->full(2 + step % QUERIES);
      ptx::barrier_expect(full, 2 * kTileBytes + kImageBytes);
      for (int h = 0; h < 2; ++h) load_box(to.q + h * kTileBytes, maps.q, 64 * h, s.key_head, i, full);
      ptx::copy_bulk(ptx::shared_address(to.attention), buffers.records[index(i)].attention, kImageBytes, full);
      return;
    }
    chunk::copy_tile<T, kKeys / 8, 128>(ptx::shared_address(to.q), heads_at<T>(p.q, s.n, first(i), s.key_head), p.q.token_stride, count(i),
                                        p.common.head_k, thread);
    chunk::copy_bytes<kImageBytes, 128>(ptx::shared_address(to.attention), buffers.records[index(i)].attention, thread);
    ptx::copy_async_commit();
  }

  // Until the chunk of a step is there, NEXT groups of copies being behind it.
  template <int NEXT> __device__ __forceinline__ void wait_for_chain(int step, int i) const {
    if constexpr (WGMMA) {
      ptx::barrier_wait(full(step % 2), step / 2 % 2);
      if (count(i) < kChunk) {
        clear_rows<2, 128>(stage(step).k, count(i), thread), clear_rows<1, 128>(stage(step).values[group], count(i), thread);
        ptx::fence_async();
        sync();
      }
    } else {
      ptx::copy_async_wait<NEXT>();
      __syncthreads();
    }
  }
  template <int NEXT> __device__ __forceinline__ void wait_for_queries(int step, int i) const {
    if constexpr (WGMMA) {
      ptx::barrier_wait(full(2 + step % QUERIES), step / QUERIES % 2);
      if (count(i) < kChunk) {
        clear_rows<2, 128>(queries(step).q, count(i), thread);
        ptx::fence_async();
        sync();
      }
    } else {
      ptx::copy_async_wait<NEXT>();
      __syncthreads();
    }
  }
  // The next copies go where this chunk was: a warp has read what it needs.
  __device__ __forceinline__ void chunk_is_done(int step) const {
    ptx::fence_async();
    if constexpr (WGMMA) {
      __syncwarp();
      if (lane == 0) ptx::barrier_arrive(empty(step % 2));
    } else {
      __syncthreads();
    }
  }
  __device__ __forceinline__ void queries_are_done(int step) const {
    __syncwarp();
    if (WGMMA && lane == 0) ptx::barrier_arrive(empty(2 + step % QUERIES));
  }

  // The copies of a walk, by one thread with the stretch of the first warpgroup.
  __device__ __forceinline__ void copy_chunks(bool is_reverse) const {
    for (int step = 0; step < s.end - s.begin; ++step) {
      const int i = is_reverse ? s.end - 1 - step : s.begin + step;
      if (step >= 2) ptx::barrier_wait(empty(step % 2), (step / 2 - 1) % 2);
      if (is_reverse) load_chain(step, i, p.d_o, maps.d_o);
      else load_chain(step, i, p.v, maps.v);
      if (!is_reverse) continue;
      if (step >= QUERIES) ptx::barrier_wait(empty(2 + step % QUERIES), (step / QUERIES - 1) % 2);
      load_queries(step, i);
    }
  }

  // The warp's rows of a state to its image in the workspace.
  __device__ __forceinline__ void store_image(const uint32_t (&x)[8][4], uint8_t *images, int i) const {
    const uint32_t rows = ptx::shared_address(shared.image[group]) + 2048 * warp;
    uint8_t *to = images + (index(i) * v_tiles + s.tile) * kStateBytes + 2048 * warp + (WGMMA ? 0 : 16 * lane);
    if constexpr (WGMMA) {
      if (lane == 0) ptx::stores_read();    // the image before
      __syncwarp();
      store_rows(x, rows, lane);
      ptx::fence_async();
      __syncwarp();
      if (lane == 0)
        for (int t = 0; t < 2; ++t) ptx::store_bulk(to + t * kTileBytes, rows + t * kTileBytes, 2048);
      return;
    }
    store_rows(x, rows, lane);
    __syncwarp();
#pragma unroll
    for (int t = 0; t < 2; ++t)
#pragma unroll
      for (int j = 0; j < 4; ++j)
        *reinterpret_cast<uint4 *>(to + t * kTileBytes + 512 * j) = ptx::load_shared(rows + t * kTileBytes + 512 * j + 16 * lane);
    __syncwarp();
  }

  __device__ __forceinline__ const float *state_at(const float *x) const {
    return x + (static_cast<int64_t>(s.n) * p.common.num_v_heads + s.head) * p.common.head_v * p.common.head_k;
  }
  __device__ __forceinline__ void begin(float (&state)[16][4], const float *from) const {
    if (from != nullptr)
      chunk::load_state(state, state_at(from), s.tile * kTileRows + 16 * warp, p.common.head_v, p.common.head_k, lane);
    else
      chunk::scale(state, 0.f);
  }
  __device__ __forceinline__ void end(const float (&state)[16][4], float *to) const {
    if (WGMMA && lane == 0) ptx::stores_read();    // shared memory ends with the block
    if (to != nullptr)
      chunk::store_state(state, const_cast<float *>(state_at(to)), s.tile * kTileRows + 16 * warp, p.common.head_v, p.common.head_k, lane);
  }
};

// U^T = A (beta (V^T - read S K^T)), S <- decay S + (write U^T) K. One function: its parts share operands in registers.
template <typename T, bool WGMMA, int STAGES, int QUERIES, int TILES>
__device__ __forceinline__ void walk_forward(const Walker<T, WGMMA, STAGES, QUERIES, TILES> &w, const Walk &walk) {
  float state[16][4] = {};
  w.begin(state, walk.from);
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
    const WalkFactors &f = stage.factors;

    // The updates.
    uint32_t operand[8][4];
    chunk::to_operand<T, true>(operand, state);
    float x[8][4];
    multiply<T, WGMMA, false>(x, operand, keys, false, lane);
    if (walk.store) w.store_image(operand, w.buffers.states, i);
    wait<WGMMA>(x, operand);
    chunk::subtract_from_values<T>(x, values, f.read, warp, lane);
    chunk::scale_columns(x, f.beta, lane);
    uint32_t half[4][4];
    const RowScales scales = to_scaled_operand(half, x);
    float y[8][4];    // also U / beta, in f16 and divided by a power of two
    multiply_now<__half, WGMMA, false>(y, half, ptx::shared_address(stage.inverse), false, lane);
    add_rounded(x, half, y, scales.up);
    if (walk.store) {
      float most = 0.f;
#pragma unroll
      for (int t = 0; t < 8; ++t)
#pragma unroll
        for (int c = 0; c < 4; ++c) y[t][c] = x[t][c];
      chunk::scale_columns(y, f.unbeta, lane);
#pragma unroll
      for (int t = 0; t < 8; ++t)
#pragma unroll
        for (int c = 0; c < 4; ++c) most = fmaxf(most, fabsf(y[t][c]));
#pragma unroll
      for (int d = 4; d < 32; d *= 2) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, d));
      const RowScales s = scales_of_rows(most, most);
      chunk::scale(y, s.down[0]);
      chunk::put_out<__half>(y, values, warp, lane);
      if (lane == 0) w.buffers.records[w.index(i)].tokens.updates[4 * w.s.tile + warp] = s.up[0];
    }

    // The new state.
    chunk::scale_columns(x, f.write, lane);
    chunk::to_operand<T, true>(half, x);
    chunk::scale(state, f.decay);
    multiply<T, WGMMA, true>(state, half, keys, true, lane);
    if (walk.store) {
      const int row = w.s.tile * kTileRows + 16 * warp;
      if (w.buffers.updates == nullptr) {
        const gdn_heads &to = updates_of(w.p, w.s.head_of_key);
        chunk::take_out<T>(values, warp, lane, out_heads_at<T>(to, w.s.n, w.first(i), w.s.key_head) + row, to.token_stride, w.count(i),
                           w.p.common.head_v - row);
      } else {
        __syncwarp();
        const int piece = 2 * warp + lane % 2;
        uint8_t *to = w.buffers.updates + (w.index(i) * w.v_tiles + w.s.tile) * kTileBytes;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const uint32_t at = chunk::tile_offset(lane / 2 + 16 * j, piece);
          *reinterpret_cast<uint4 *>(to + at) = ptx::load_shared(values + at);
        }
      }
    }
    wait<WGMMA>(state, half);
    w.chunk_is_done(step);
  }
  w.end(state, walk.to);
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
      a[m][c] = chunk::pack2_written<T>(x.x * (c < 2 ? f.x : f.z), x.y * (c < 2 ? f.y : f.w));
    }
  }
}

// dU^T = write (dS K^T) + dO^T Att, dV^T = beta (dU^T A), dS <- decay dS + (query dO^T) Q - (read dV^T) K.
template <typename T, bool WGMMA, int STAGES, int QUERIES, int TILES>
__device__ __forceinline__ void walk_reverse(const Walker<T, WGMMA, STAGES, QUERIES, TILES> &w, const Walk &walk) {
  float state[16][4] = {};
  w.begin(state, walk.from);
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
    chunk::to_operand<T, true>(operand, state);
    load_columns(out, values, warp, lane);
    multiply<T, WGMMA, false>(x, operand, keys, false, lane);
    w.template wait_for_queries<STAGES == 2 ? 1 : 0>(step, i);
    const RowScales out_scales = to_scaled_operand<T>(scaled, out);
    multiply<__half, WGMMA, true>(y, scaled, attention, false, lane);
    scale_operand<T>(out, f.query, lane);
    chunk::scale(state, f.decay);
    multiply<T, WGMMA, true>(state, out, queries, true, lane);
    w.store_image(operand, w.buffers.gradients, i);

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
    chunk::to_operand<T, true>(half, x);
    multiply<T, WGMMA, true>(state, half, keys, true, lane);
    chunk::put_out(out, values, warp, lane);
    const int row = w.s.tile * kTileRows + 16 * warp;
    chunk::take_out<T>(values, warp, lane, out_heads_at<T>(w.p.d_v, w.s.n, w.first(i), w.s.head) + row, w.p.d_v.token_stride, w.count(i),
                       w.p.common.head_v - row);
    wait<WGMMA>(state, half);
    w.chunk_is_done(step);
  }
  w.end(state, walk.to);
}

// Warpgroups that compute, and one of which a warp copies.
template <bool WGMMA, int TILES> constexpr int kWalkThreads = WGMMA ? 128 * (TILES + 1) : 128;

template <typename T, bool WGMMA, int STAGES, int QUERIES, int TILES>
__global__ void __launch_bounds__(kWalkThreads<WGMMA, TILES>, QUERIES == 1 ? 2 : 1)
walk_kernel(const __grid_constant__ gdn_rule_backward_params p, const __grid_constant__ Buffers buffers, const __grid_constant__ Maps maps,
            const __grid_constant__ Walks walks, const Span forward, const Span reverse) {
  if constexpr (WGMMA && !ptx::kSm90a) return;
  using Shared = WalkShared<STAGES, QUERIES, TILES>;
  extern __shared__ __align__(1024) uint8_t raw_shared[];
  ptx::grid_dependency_wait();
  // The longer walk first.
  const unsigned each_head = (walks.v_tiles + TILES - 1) / TILES;
  const unsigned blocks = static_cast<unsigned>(p.common.seqs.num_seqs) * p.common.num_v_heads * each_head;
  const bool is_reverse = walks.reverse.on && blockIdx.x < blocks;
  unsigned block = is_reverse || !walks.reverse.on ? blockIdx.x : blockIdx.x - blocks;
  const Span &span = is_reverse ? reverse : forward;
  Stretch s;
  const int warps = TILES * 4, group = static_cast<int>(threadIdx.x / 128) % TILES;
  s.tile = static_cast<int>(block % each_head) * TILES + group;
  block /= each_head;
  s.head = static_cast<int>(block % p.common.num_v_heads);
  s.n = static_cast<int>(block / p.common.num_v_heads);
  const int each = p.common.num_v_heads / p.common.num_k_heads;
  s.key_head = s.head / each, s.head_of_key = s.head - s.key_head * each;
  s.seq = tokens_of(p.common.seqs, s.n);
  s.begin = begin_of(span, chunks_of(s.seq)), s.end = end_of(span, chunks_of(s.seq));
  s.place = first_place(p.common.seqs, span, s.n);
  const int thread = threadIdx.x % 128;
  const Walker<T, WGMMA, STAGES, QUERIES, TILES> w = {p, buffers, maps, *reinterpret_cast<Shared *>(raw_shared), s, group, thread, thread / 32,
                                                      thread % 32, walks.v_tiles};
  if constexpr (WGMMA) {
    // The first thread behind the warpgroups that compute has the first one's stretch.
    if (threadIdx.x == 32 * warps) {
      for (int i = 0; i < 2 + QUERIES; ++i) ptx::barrier_init(w.full(i), 1), ptx::barrier_init(w.empty(i), 4 * w.tiles_here());
      ptx::barriers_initialised();
    }
    __syncthreads();
    constexpr bool kSetRegisters = QUERIES == 1 || TILES > 1;    // else each thread may have all
    if (threadIdx.x >= 32 * warps) {
      if (kSetRegisters) fewer_registers<24>();
      if (threadIdx.x == 32 * warps) w.copy_chunks(is_reverse);
      return;
    }
    if (kSetRegisters) more_registers<TILES == 1 ? 232 : 240>();
    if (s.tile >= walks.v_tiles) return;
  }
  if (is_reverse) walk_reverse<T, WGMMA>(w, walks.reverse);
  else walk_forward<T, WGMMA>(w, walks.forward);
}

}  // namespace backward
}  // namespace gdn
