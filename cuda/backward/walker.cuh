// The parts of a walk: its shared memory, its stretch, copies of chunks, images of states.
#pragma once

#include "maps.h"
#include "products.cuh"
#include "records.cuh"

namespace gdn {
namespace backward {

// STAGES of what the chain of products needs, QUERIES of what only the reverse walk needs beside it, TILES of 64 value rows.
// With two QUERIES U and dV leave by tiles of their own, where the copy engine does not write: the fence between its writes and a thread's
// took a fifteenth of the time.
constexpr int kCounted = 4;
template <int STAGES, int QUERIES, int TILES> struct WalkShared {
  struct Stage {
    alignas(1024) uint8_t k[2 * kTileBytes];
    uint8_t values[TILES][kTileBytes];    // v or dO; without `out` then U or dV on their way out
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
  uint8_t out[TILES][QUERIES > 1 ? kTileBytes : 16];
  // Of the stages, then of the queries: copies that have arrived, and those that all threads have read.
  uint64_t full[2 + QUERIES], empty[2 + QUERIES];
  // Of chunks in turn: all that is kept is in global memory, and has been counted.
  uint64_t stored[kCounted], counted[kCounted];
};

// The stretch of a warpgroup.
struct Stretch {
  Tokens seq;
  int n, head, tile;
  int key_head, head_of_key;    // the latter counts the value heads of the key head
  int begin, end;    // chunks
  int warm_up;       // the first so many, in the walk's order, are kept by the segment before
  int64_t place;     // of the sequence's first chunk, if it had one
};

// Reduces a stretch to a segment of it, by all lanes of a warp. Segments of a walk do not wait for each other: each but the first begins with
// zeros, so far before the chunks that it keeps that no state from before it would be left there. The first one needs no such warm-up and is
// longer for it; where a head forgets too little it is all there is. Returns whether anything is left to do.
__device__ __forceinline__ bool reduce_to_segment(Stretch &s, const Record *records, int heads, bool reverse, int segment, int segments) {
  const int chunks = s.end - s.begin, lane = static_cast<int>(threadIdx.x % 32);
  const auto left_of = [&](int position) {    // in the walk's order
    const float(&left)[2] = records[(s.place + s.begin + (reverse ? chunks - 1 - position : position)) * heads + s.head].walk.left;
    return left[0] + left[1];
  };
  float sum = 0.f;
#pragma unroll 8
  for (int i = lane; i < chunks; i += 32) sum += left_of(i);
#pragma unroll
  for (int d = 1; d < 32; d *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, d);
  const float usual = chunk::kLeft / sum * static_cast<float>(chunks);
  const int warm_up = usual >= 0.f && usual < static_cast<float>(chunks) ? static_cast<int>(usual) : chunks;
  const auto border = [&](int i) { return i == 0 ? 0 : warm_up + static_cast<int>(static_cast<uint32_t>(chunks - warm_up) * i / segments); };
  const int begin = border(segment), end = border(segment + 1);
  if (segment > 0 && begin == end) return false;
  int from = begin;
  for (float left = 0.f; from > 0;) {
    float x = from > lane ? left_of(from - 1 - lane) : 0.f;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      const float nearer = __shfl_up_sync(0xffffffffu, x, d);
      if (lane >= d) x += nearer;
    }
    const unsigned enough = __ballot_sync(0xffffffffu, left + x < chunk::kLeft);
    if (enough != 0) {
      from = max(from - __ffs(enough), 0);
      break;
    }
    left += __shfl_sync(0xffffffffu, x, 31), from = max(from - 32, 0);
  }
  s.warm_up = begin - from;
  s.end = s.begin + (reverse ? chunks - from : end), s.begin += reverse ? chunks - end : from;
  return true;
}

// Which walk is a block's, and the stretch of the first of its `tiles` tiles.
struct Block {
  int which;
  bool empty;
  Stretch s;
};
__device__ __forceinline__ Block block_of(const gdn_common &c, const Walks &walks, const Record *records, int tiles) {
  unsigned block = blockIdx.x;
  Block y = {};
  Stretch &s = y.s;
  const unsigned each_head = blocks_each_head(c, tiles);
  s.tile = static_cast<int>(block % each_head) * tiles, block /= each_head;
  s.head = static_cast<int>(block % c.num_v_heads), block /= c.num_v_heads;
  s.n = static_cast<int>(block % c.seqs.num_seqs), block /= c.seqs.num_seqs;
  // Segments without work are the last ones: then the others are not neighbours, which would take longer.
  y.which = static_cast<int>(block % walks.walks);
  const int segment = static_cast<int>(block / walks.walks);
  const int each = c.num_v_heads / c.num_k_heads;
  s.key_head = s.head / each, s.head_of_key = s.head - s.key_head * each;
  s.seq = tokens_of(c.seqs, s.n);
  const int chunks = chunks_of(s.seq);
  s.begin = begin_of(walks.span, chunks), s.end = end_of(walks.span, chunks);
  s.place = first_place(c.seqs, walks.span, s.n) - s.begin;
  if (walks.cut.segments > 1)
    y.empty = !reduce_to_segment(s, records, c.num_v_heads, walks.walk[y.which].direction == kReverse, segment, walks.cut.segments);
  // Lanes agree: reductions tell the compiler, which then needs no register of each thread for these.
  const auto uniform = [](int x) { return static_cast<int>(__reduce_max_sync(0xffffffffu, static_cast<unsigned>(x))); };
  s.begin = uniform(s.begin), s.end = uniform(s.end), s.warm_up = uniform(s.warm_up);
  return y;
}

// A walk's parts that both directions have. COUNTS chunks that are stored, for the gradients kernel beside it. With wgmma a warp of its own
// has the copy engine bring chunks.
template <typename T, bool WGMMA, int STAGES, int QUERIES, int TILES, bool COUNTS> struct Walker {
  using Shared = WalkShared<STAGES, QUERIES, TILES>;
  using Stage = typename Shared::Stage;
  const gdn_rule_backward_params &p;
  const Buffers &buffers;
  const Maps &maps;
  Shared &shared;
  const Walk &walk;     // a copy of its direction follows: a load from here takes longer than a product
  const Stretch s;
  int direction;
  bool whole;           // whether there is one segment
  int kept_from;        // the first step whose states, U and dV are kept
  int group, thread, warp, lane, v_tiles;    // thread and warp of its warpgroup

  __device__ __forceinline__ int64_t first(int i) const { return s.seq.first + static_cast<int64_t>(i) * kChunk; }
  __device__ __forceinline__ int count(int i) const { return s.seq.count - i * kChunk; }
  __device__ __forceinline__ int64_t index(int i) const { return (s.place + i) * p.common.num_v_heads + s.head; }
  __device__ __forceinline__ Stage &stage(int step) const { return shared.stage[STAGES == 1 ? 0 : step % 2]; }
  __device__ __forceinline__ uint32_t out_tile(int step) const {
    if constexpr (QUERIES > 1) return ptx::shared_address(shared.out[group]);
    else return ptx::shared_address(stage(step).values[group]);
  }

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
      const int tiles = tiles_here();
      ptx::barrier_expect(full, (2 + tiles) * kTileBytes + kImageBytes + sizeof(WalkFactors));
      for (int h = 0; h < 2; ++h) load_box(to.k + h * kTileBytes, maps.k, 64 * h, s.key_head, i, full);
      for (int t = 0; t < tiles; ++t) load_box(to.values[t], map, row0 + t * kTileRows, s.head, i, full);
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
  // The next copies go where this chunk was: a thread has read what it needs. Each arrives itself: the racecheck tool does not see that
  // one which arrives behind a barrier does so for the others.
  __device__ __forceinline__ void chunk_is_done(int step) const {
    if constexpr (WGMMA) {
      if (QUERIES == 1) ptx::fence_async();
      ptx::barrier_arrive(empty(step % 2));
    } else {
      __syncthreads();
    }
  }
  __device__ __forceinline__ void queries_are_done(int step) const {
    if (WGMMA) ptx::barrier_arrive(empty(2 + step % QUERIES));
  }

  __device__ __forceinline__ bool keeps(int step) const { return step >= kept_from; }
  __device__ __forceinline__ int chunk_of(int step) const { return direction == kReverse ? s.end - 1 - step : s.begin + step; }

  // The copies of a walk, by one thread with the stretch of the first warpgroup.
  __device__ __forceinline__ void copy_chunks() const {
    const bool is_reverse = direction == kReverse;
    for (int step = 0; step < s.end - s.begin; ++step) {
      const int i = chunk_of(step);
      if (step >= 2) ptx::barrier_wait(empty(step % 2), (step / 2 - 1) % 2);
      if (is_reverse) load_chain(step, i, p.d_o, maps.d_o);
      else load_chain(step, i, p.v, maps.v);
      if (!is_reverse) continue;
      if (step >= QUERIES) ptx::barrier_wait(empty(2 + step % QUERIES), (step / QUERIES - 1) % 2);
      load_queries(step, i);
    }
  }

  // The counts of chunks that are stored, by another thread: the one that copies would be late.
  __device__ __forceinline__ void count_chunks() const {
    for (int kept = 0; kept < s.end - s.begin - kept_from; ++kept) {
      ptx::barrier_wait(ptx::shared_address(&shared.stored[kept % kCounted]), kept / kCounted % 2);
      ptx::add_to_count(&buffers.records[index(chunk_of(kept_from + kept))].walk.walked);
      ptx::barrier_arrive(ptx::shared_address(&shared.counted[kept % kCounted]));
    }
  }
  // The warp has stored all that it keeps of the steps before `step`.
  __device__ __forceinline__ void wait_for_stores(int step) const {
    if (lane == 0) COUNTS ? ptx::stores_done() : ptx::stores_read();
    __syncwarp();
    const int kept = step - kept_from - 1;
    if (!COUNTS || lane != 0 || kept < 0) return;
    if (kept >= kCounted) ptx::barrier_wait(ptx::shared_address(&shared.counted[kept % kCounted]), (kept / kCounted - 1) % 2);
    ptx::barrier_arrive(ptx::shared_address(&shared.stored[kept % kCounted]));
  }

  // The warp's rows of a state to its image in the workspace.
  __device__ __forceinline__ void store_image(const uint32_t (&x)[8][4], uint8_t *images, int step, int i) const {
    const uint32_t rows = ptx::shared_address(shared.image[group]) + 2048 * warp;
    uint8_t *to = images + (index(i) * v_tiles + s.tile) * kStateBytes + 2048 * warp + (WGMMA ? 0 : 16 * lane);
    if constexpr (WGMMA) {
      wait_for_stores(step);    // the image before
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

  // ---- the state at both ends ----

  __device__ __forceinline__ int64_t state_place() const {
    return (static_cast<int64_t>(s.n) * p.common.num_v_heads + s.head) * p.common.head_v * p.common.head_k;
  }
  __device__ __forceinline__ void begin(float (&state)[16][4]) const {
    if (walk.from != nullptr && (whole || (direction == kReverse ? s.end == chunks_of(s.seq) : s.begin == 0)))
      return chunk::load_state(state, walk.from + state_place(), s.tile * kTileRows + 16 * warp, p.common.head_v, p.common.head_k, lane);
    chunk::scale(state, 0.f);
  }
  __device__ __forceinline__ void end(const float (&state)[16][4]) const {
    if (WGMMA) wait_for_stores(s.end - s.begin);    // shared memory ends with the block
    if (walk.to != nullptr && (whole || (direction == kReverse ? s.begin == 0 : s.end == chunks_of(s.seq))))
      chunk::store_state(state, walk.to + state_place(), s.tile * kTileRows + 16 * warp, p.common.head_v, p.common.head_k, lane);
  }
};

}  // namespace backward
}  // namespace gdn
