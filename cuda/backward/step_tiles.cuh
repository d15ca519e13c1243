// The gradients kernel's shared memory, its steps, and the copies of a step.
#pragma once

#include "maps.h"
#include "products.cuh"
#include "records.cuh"

namespace gdn {
namespace backward {

// Of a value head, with all of its state or only 64 value rows.
template <int HALVES> struct HeadTiles {
  alignas(1024) uint8_t d_out[2 * kTileBytes];
  uint8_t update[2 * kTileBytes];
  uint8_t d_v[2 * kTileBytes];
  uint8_t states[HALVES][kStateBytes];    // S; then the two matrices
};
struct StateTiles {
  alignas(1024) uint8_t rows[2][kStateBytes];
};
struct NoTiles {};

// With wgmma the next head comes while one is at work; else every card has room for a block, whose dS takes the place of S.
template <bool WGMMA> struct GradientShared {
  static constexpr int kBuffers = WGMMA ? 2 : 1;
  alignas(1024) uint8_t q[2 * kTileBytes];
  uint8_t k[2 * kTileBytes];
  HeadTiles<kBuffers> heads[kBuffers];
  std::conditional_t<WGMMA, StateTiles, NoTiles> gradients;    // dS
  alignas(16) TokenFactors tokens[kBuffers];
  float states[8];         // S dS, by warp
  uint64_t barriers[4];    // copies that have arrived: of the buffers, of dS, of q and k
};
static_assert(sizeof(GradientShared<false>) <= kLeastShared, "a shape for every card");
static_assert(sizeof(GradientShared<true>) <= 227 * 1024, "a shape for sm_90");

// The thread, its warpgroup, and its warp in that, read at this place: what depends on them is computed in each part again, where ptxas
// would keep all of it through the loop over heads, in registers that it does not have.
struct Here {
  int thread, group, warp, lane, row;
  __device__ __forceinline__ Here() {
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    thread &= 255;
    group = thread / 128, warp = thread % 128 / 32, lane = thread % 32, row = 16 * warp + lane / 4;
  }
  __device__ __forceinline__ uint32_t own_half(const void *x) const { return ptx::shared_address(x) + group * kTileBytes; }
};

// A value head of a chunk: one step of a block.
struct Step {
  int64_t item;    // place and key head
  Chunk at;
  int head;        // of those of the key head
  bool there;
};

// The next step of a block after one, all steps of a block being those of every gridDim.x-th item; by all lanes of a warp.
__device__ __forceinline__ Step step_at(const gdn_rule_backward_params &p, const Span &span, int64_t items, int64_t item) {
  Step s = {item, {}, 0, false};
  for (; s.item < items && !s.there; s.item += s.there ? 0 : gridDim.x) {
    s.at = chunk_at(p.common.seqs, span, s.item / p.common.num_k_heads);
    s.there = s.at.there;
  }
  return s;
}
__device__ __forceinline__ Step step_after(const gdn_rule_backward_params &p, const Span &span, int64_t items, const Step &step) {
  if (step.head + 1 == p.common.num_v_heads / p.common.num_k_heads) return step_at(p, span, items, step.item + gridDim.x);
  Step s = step;
  ++s.head;
  return s;
}

// TILES of 64 value rows a head.
//
// A step of a block: where its tiles are, and the copies to them.
template <typename T, bool WGMMA, int TILES> struct StepTiles {
  using Shared = GradientShared<WGMMA>;
  const gdn_rule_backward_params &p;
  const Buffers &buffers;
  const Maps &maps;
  Shared &shared;
  const Step step;
  const int buffer;

  __device__ __forceinline__ static uint32_t tile(const void *x) { return ptx::shared_address(x); }
  __device__ __forceinline__ auto &tiles() const { return shared.heads[buffer]; }
  __device__ __forceinline__ const TokenFactors &factors() const { return shared.tokens[buffer]; }
  __device__ __forceinline__ uint8_t *states(int v_tile) const { return tiles().states[WGMMA ? v_tile : 0]; }
  __device__ __forceinline__ uint8_t *gradients(int v_tile) const {
    if constexpr (WGMMA) return shared.gradients.rows[v_tile];
    else return tiles().states[0];
  }
  __device__ __forceinline__ uint32_t attention() const { return tile(tiles().states[0]); }
  __device__ __forceinline__ uint32_t attention_rest() const { return tile(tiles().d_out + kTileBytes); }    // what 16 bits lose of it
  __device__ __forceinline__ uint32_t lower() const { return attention() + kTileBytes; }
  __device__ __forceinline__ float scale_of_update(int column_16) const { return column_16 < 4 * TILES ? factors().updates[column_16] : 0.f; }
  __device__ __forceinline__ uint32_t barrier(int i) const { return tile(&shared.barriers[i]); }

  __device__ __forceinline__ int key_head() const { return static_cast<int>(step.item % p.common.num_k_heads); }
  __device__ __forceinline__ int head() const { return key_head() * (p.common.num_v_heads / p.common.num_k_heads) + step.head; }
  __device__ __forceinline__ int64_t index() const { return step.item / p.common.num_k_heads * p.common.num_v_heads + head(); }
  __device__ __forceinline__ int64_t first() const { return step.at.seq.first + static_cast<int64_t>(step.at.index) * kChunk; }
  __device__ __forceinline__ int count() const { return min(kChunk, step.at.seq.count - step.at.index * kChunk); }
  __device__ __forceinline__ const uint8_t *image(const uint8_t *images, int v_tile) const {
    return images + (index() * TILES + v_tile) * kStateBytes;
  }

  // ---- copies with wgmma, by a thread ----

  __device__ __forceinline__ void copy_rows(uint8_t *to, const CUtensorMap &map, int head, int full) const {
#pragma unroll
    for (int h = 0; h < 2; ++h)
      ptx::copy_box(tile(to) + h * kTileBytes, &map, 64 * h, head, static_cast<int>(first()), p.common.seqs.cu_seqlens ? 0 : step.at.n,
                    barrier(full));
  }
  __device__ __forceinline__ void copy_head() const {
    if (!step.there || threadIdx.x != 0) return;
    const uint32_t full = barrier(buffer);
    const bool in_place = buffers.updates == nullptr;
    ptx::barrier_expect(full, (4 + (in_place ? 2 : TILES)) * kTileBytes + TILES * kStateBytes + sizeof(TokenFactors));
    copy_rows(tiles().d_out, maps.d_o, head(), buffer);
    copy_rows(tiles().d_v, maps.d_v, head(), buffer);
    ptx::copy_bulk(tile(tiles().states), image(buffers.states, 0), TILES * kStateBytes, full);
    if (in_place) copy_rows(tiles().update, step.head == 0 ? maps.d_q : maps.d_k, key_head(), buffer);
    else ptx::copy_bulk(tile(tiles().update), buffers.updates + index() * TILES * kTileBytes, TILES * kTileBytes, full);
    ptx::copy_bulk(tile(&factors()), &buffers.records[index()].tokens, sizeof(TokenFactors), full);
  }
  __device__ __forceinline__ void copy_gradients() const {
    if (!step.there || threadIdx.x != 0) return;
    ptx::barrier_expect(barrier(2), TILES * kStateBytes);
    ptx::copy_bulk(tile(gradients(0)), image(buffers.gradients, 0), TILES * kStateBytes, barrier(2));
  }
  __device__ __forceinline__ void copy_raw() const {
    if (!step.there || threadIdx.x != 0) return;
    ptx::barrier_expect(barrier(3), 4 * kTileBytes);
    copy_rows(shared.q, maps.q, key_head(), 3);
    copy_rows(shared.k, maps.k, key_head(), 3);
  }
  // Rows of the next sequence in the boxes.
  template <typename... X> __device__ __forceinline__ void clear(X *...x) const {
    if (count() == kChunk) return;
    (clear_rows<2, 256>(x, count(), threadIdx.x), ...);
    ptx::fence_async();
    __syncthreads();
  }

  // ---- the same with mma.sync, by all threads and waited for ----

  __device__ __forceinline__ void load_rows_of(uint8_t *to, const gdn_heads &x, int head, int size) const {
    const Here me;
    chunk::copy_tile<T, kKeys / 8, 256>(tile(to), heads_at<T>(x, step.at.n, first(), head), x.token_stride, count(), size, me.thread);
  }
  __device__ __forceinline__ void load_states(const uint8_t *images, int v_tile) const {
    const Here me;
    chunk::copy_bytes<kStateBytes, 256>(tile(states(0)), image(images, v_tile), me.thread);
    ptx::copy_async_commit();
  }
  __device__ __forceinline__ void loaded() const {
    ptx::copy_async_wait<0>();
    __syncthreads();
  }
  __device__ __forceinline__ void load_head() const {
    const Here me;
    if (step.head == 0) {
      load_rows_of(shared.q, p.q, key_head(), p.common.head_k);
      load_rows_of(shared.k, p.k, key_head(), p.common.head_k);
    }
    load_rows_of(tiles().d_out, p.d_o, head(), p.common.head_v);
    load_rows_of(tiles().d_v, p.d_v, head(), p.common.head_v);
    if (buffers.updates == nullptr) load_rows_of(tiles().update, updates_of(p, head()), key_head(), p.common.head_v);
    else
      for (int t = 0; t < TILES; ++t)
        chunk::copy_bytes<kTileBytes, 256>(tile(tiles().update) + t * kTileBytes, buffers.updates + (index() * TILES + t) * kTileBytes, me.thread);
    chunk::copy_bytes<sizeof(TokenFactors), 256>(tile(&factors()), &buffers.records[index()].tokens, me.thread);
    load_states(buffers.states, 0);
    loaded();
  }
};

}  // namespace backward
}  // namespace gdn
