// The gradients kernel's shared memory, its steps, and the copies of a step.
#pragma once

#include "maps.h"
#include "products.cuh"
#include "records.cuh"

namespace gdn {
namespace backward {

// Of a step, with all of its state or only 64 value rows.
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

// A value head of a chunk, or 128 of its value rows: one step of a block.
//
// NOTES: found once an item. Divisions where a copy needs a number took a warp, and all who waited for it, thousands of cycles a step.
struct Step {
  uint32_t item;          // place and key head
  int place, key_head;
  int n, first, count;    // sequence, first token, tokens
  int head, part;         // of those of the key head, and of the head
  bool there;

  __device__ __forceinline__ bool is_first() const { return head == 0 && part == 0; }
};

// What a copy waits for, and who waits for it: the buffers of steps in turn, dS, and raw q and k.
enum StepBarrier { kGradientsBarrier = 2, kRawBarrier = 3, kStepBarriers = 4 };

// With wgmma a warp of its own copies the next step while one is at work, and another sums the gradients of log decays; else every card
// has room for a block, whose dS takes the place of S.
template <bool WGMMA> struct GradientShared {
  static constexpr int kBuffers = WGMMA ? 2 : 1;
  static constexpr int kThreads = WGMMA ? 384 : 256;
  alignas(1024) uint8_t q[2 * kTileBytes];
  uint8_t k[2 * kTileBytes];
  HeadTiles<kBuffers> heads[kBuffers];
  std::conditional_t<WGMMA, StateTiles, NoTiles> gradients;    // dS
  alignas(16) TokenFactors tokens[kBuffers];
  Step steps[kBuffers];
  float states[kBuffers][8];    // S dS, by warp
  uint64_t full[kStepBarriers], empty[kStepBarriers], summed[2];    // `summed`: what the gradients of log decays are sums of
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

// The next step of a block after one, all steps of a block being those of every gridDim.x-th item; by all lanes of a warp.
__device__ __forceinline__ Step step_at(const gdn_rule_backward_params &p, const Span &span, const Work &work, uint32_t item) {
  Step s = {};
  for (s.item = item; s.item < work.items; s.item += gridDim.x) {
    s.place = static_cast<int>(s.item / static_cast<uint32_t>(p.common.num_k_heads));
    s.key_head = static_cast<int>(s.item) - s.place * p.common.num_k_heads;
    const Chunk at = chunk_at(p.common.seqs, span, s.place);
    if (!at.there) continue;
    s.n = at.n, s.first = static_cast<int>(at.seq.first) + at.index * kChunk, s.count = min(kChunk, at.seq.count - at.index * kChunk);
    s.there = true;
    break;
  }
  return s;
}
template <int PARTS>
__device__ __forceinline__ Step step_after(const gdn_rule_backward_params &p, const Span &span, const Work &work, const Step &step) {
  if (step.part + 1 < PARTS) {
    Step s = step;
    ++s.part;
    return s;
  }
  if (step.head + 1 == work.heads) return step_at(p, span, work, step.item + gridDim.x);
  Step s = step;
  ++s.head, s.part = 0;
  return s;
}

// A step of a block: where its tiles are, and the copies to them. TILES of 64 value rows a step, PARTS steps a head.
//
// With two parts the second may have one tile. In the place of the other dO, dV and U are zeros, and so that no product is left out,
// which would keep others from being under way together, the states are those of the first tile again.
template <typename T, bool WGMMA, int TILES, int PARTS> struct StepTiles {
  using Shared = GradientShared<WGMMA>;
  const gdn_rule_backward_params &p;
  const Buffers &buffers;
  const Maps &maps;
  Shared &shared;
  const Work &work;
  const Step &step;
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
  __device__ __forceinline__ int v_tiles() const { return PARTS == 1 ? TILES : (p.common.head_v + kTileRows - 1) / kTileRows; }
  __device__ __forceinline__ int first_tile() const { return PARTS == 1 ? 0 : kPartTiles * step.part; }
  __device__ __forceinline__ int tiles_here() const { return PARTS == 1 ? TILES : min(kPartTiles, v_tiles() - first_tile()); }
  __device__ __forceinline__ int columns_before() const { return first_tile() * kTileRows; }
  __device__ __forceinline__ float scale_of_update(int column_16) const { return factors().updates[4 * first_tile() + column_16]; }
  __device__ __forceinline__ uint32_t full(int i) const { return tile(&shared.full[i]); }
  __device__ __forceinline__ uint32_t empty(int i) const { return tile(&shared.empty[i]); }

  __device__ __forceinline__ uint32_t summed(int i) const { return tile(&shared.summed[i]); }

  // Of the threads that compute.
  __device__ __forceinline__ static void sync() {
    if constexpr (WGMMA) ptx::group_barrier<256>(1);
    else __syncthreads();
  }

  __device__ __forceinline__ int head() const { return step.key_head * work.heads + step.head; }
  __device__ __forceinline__ int64_t index() const { return static_cast<int64_t>(step.place) * p.common.num_v_heads + head(); }
  __device__ __forceinline__ int count() const { return step.count; }
  __device__ __forceinline__ const uint8_t *image(const uint8_t *images, int v_tile) const {
    return images + (index() * v_tiles() + first_tile() + v_tile) * kStateBytes;
  }

  __device__ __forceinline__ const uint8_t *update_image(int v_tile) const {
    return buffers.updates + (index() * v_tiles() + first_tile() + v_tile) * kTileBytes;
  }

  // ---- copies with wgmma, by a lane of a warp ----

  __device__ __forceinline__ void copy_rows(uint8_t *to, const CUtensorMap &map, int head, uint32_t full, int columns = 0) const {
#pragma unroll
    for (int h = 0; h < 2; ++h)
      ptx::copy_box(tile(to) + h * kTileBytes, &map, columns + 64 * h, head, step.first, p.common.seqs.cu_seqlens ? 0 : step.n, full);
  }
  __device__ __forceinline__ void copy_states(uint8_t *to, const uint8_t *images, uint32_t full) const {
    if constexpr (PARTS == 1) {
      ptx::copy_bulk(tile(to), image(images, 0), TILES * kStateBytes, full);
    } else {
      for (int t = 0; t < TILES; ++t) ptx::copy_bulk(tile(to) + t * kStateBytes, image(images, min(t, tiles_here() - 1)), kStateBytes, full);
    }
  }
  __device__ __forceinline__ void copy_head() const {
    const uint32_t full = this->full(buffer);
    const bool in_place = buffers.updates == nullptr;
    ptx::barrier_expect(full, (4 + (in_place ? 2 : tiles_here())) * kTileBytes + TILES * kStateBytes + sizeof(TokenFactors));
    copy_rows(tiles().d_out, maps.d_o, head(), full, columns_before());
    copy_rows(tiles().d_v, maps.d_v, head(), full, columns_before());
    copy_states(tiles().states[0], buffers.states, full);
    if (in_place) copy_rows(tiles().update, step.head == 0 ? maps.d_q : maps.d_k, step.key_head, full);
    else ptx::copy_bulk(tile(tiles().update), update_image(0), tiles_here() * kTileBytes, full);
    ptx::copy_bulk(tile(&factors()), &buffers.records[index()].tokens, sizeof(TokenFactors), full);
  }
  __device__ __forceinline__ void copy_gradients() const {
    ptx::barrier_expect(full(kGradientsBarrier), TILES * kStateBytes);
    copy_states(gradients(0), buffers.gradients, full(kGradientsBarrier));
  }
  __device__ __forceinline__ void copy_raw() const {
    ptx::barrier_expect(full(kRawBarrier), 4 * kTileBytes);
    copy_rows(shared.q, maps.q, step.key_head, full(kRawBarrier));
    copy_rows(shared.k, maps.k, step.key_head, full(kRawBarrier));
  }
  // Rows of the next sequence in the boxes.
  template <typename... X> __device__ __forceinline__ void clear(X *...x) const {
    if (count() == kChunk) return;
    (clear_rows<2, 256>(x, count(), threadIdx.x), ...);
    ptx::fence_async();
    sync();
  }

  // ---- the same with mma.sync, by all threads and waited for ----

  __device__ __forceinline__ void load_rows_of(uint8_t *to, const gdn_heads &x, int head, int size, int columns = 0) const {
    const Here me;
    chunk::copy_tile<T, kKeys / 8, 256>(tile(to), heads_at<T>(x, step.n, step.first, head) + columns, x.token_stride, count(), size - columns,
                                        me.thread);
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
    if (step.is_first()) {
      load_rows_of(shared.q, p.q, step.key_head, p.common.head_k);
      load_rows_of(shared.k, p.k, step.key_head, p.common.head_k);
    }
    load_rows_of(tiles().d_out, p.d_o, head(), p.common.head_v, columns_before());
    load_rows_of(tiles().d_v, p.d_v, head(), p.common.head_v, columns_before());
    if (buffers.updates == nullptr) load_rows_of(tiles().update, updates_of(p, step.head), step.key_head, p.common.head_v);
    else
      for (int t = 0; t < tiles_here(); ++t)
        chunk::copy_bytes<kTileBytes, 256>(tile(tiles().update) + t * kTileBytes, update_image(t), me.thread);
    chunk::copy_bytes<sizeof(TokenFactors), 256>(tile(&factors()), &buffers.records[index()].tokens, me.thread);
    load_states(buffers.states, 0);
    loaded();
  }
};

}  // namespace backward
}  // namespace gdn
