// The steps of the gradients kernels: which chunk and value head a block takes when, and where that lies in global memory.
#pragma once

#include "maps.h"
#include "products.cuh"
#include "records.cuh"

namespace gdn {
namespace backward {

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
// The next step of the item of `step`; of its last one, next().
template <int PARTS, typename F> __device__ __forceinline__ Step step_after(const Work &work, const Step &step, F &&next) {
  if (step.part + 1 == PARTS && step.head + 1 == work.heads) return next();
  Step s = step;
  if (++s.part == PARTS) s.part = 0, ++s.head;
  return s;
}

// The items of a block beside the walks; by all lanes of a warp.
struct Taker {
  uint32_t *taken;
  uint32_t item;    // the next one, of lane 0: asked for long before it is needed

  __device__ __forceinline__ void ask() {
    if (threadIdx.x % 32 == 0) item = atomicAdd(taken, 1);
  }
  __device__ __forceinline__ Step next(const gdn_rule_backward_params &p, const Work &work) {
    Step s = {};
    const uint32_t key_heads = static_cast<uint32_t>(p.common.num_k_heads), seqs = static_cast<uint32_t>(p.common.seqs.num_seqs);
    for (;;) {
      s.item = __shfl_sync(0xffffffffu, item, 0);
      if (s.item >= work.items) return s;
      ask();
      const uint32_t at = s.item / key_heads;
      const int turn = static_cast<int>(at / seqs);
      s.key_head = static_cast<int>(s.item - at * key_heads), s.n = static_cast<int>(at % seqs);
      const Tokens seq = tokens_of(p.common.seqs, s.n);
      const int chunks = chunks_of(seq);
      if (turn >= chunks) continue;
      // The walks meet in the middle.
      const int index = turn % 2 ? chunks / 2 - 1 - turn / 2 : chunks / 2 + turn / 2;
      s.place = static_cast<int>(first_place(p.common.seqs, {0, 1}, s.n)) + index;
      s.first = static_cast<int>(seq.first) + index * kChunk, s.count = min(kChunk, seq.count - index * kChunk);
      s.there = true;
      return s;
    }
  }
};

// The thread, its warpgroup, and its warp in that, read at this place: what depends on them is computed in each part again, where ptxas
// would keep all of it through the loop over steps, in registers that it does not have.
struct Here {
  int thread, group, warp, lane, row;
  __device__ __forceinline__ Here() {
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    group = thread / 128, warp = thread % 128 / 32, lane = thread % 32, row = 16 * warp + lane / 4;
  }
  __device__ __forceinline__ uint32_t own_half(const void *x) const { return ptx::shared_address(x) + group * kTileBytes; }
};

// What a warp leaves for the gradients of the log decays: sums of its 16 tokens, and sums over its rows and columns of X
// (StepMatrices::make_rows()).
struct WarpSums {
  float later[16], earlier[16];
  float rows[16], columns[kChunk];
};

// Sums over columns of a warpgroup that log decays get from later and from earlier tokens, of rows lane / 4 and 8 further.
struct RowSums {
  float later[2], earlier[2];
};

// A step of a block with TILES of 64 value rows, PARTS steps a head.
//
// With two parts the second may have one tile. In the place of the other dO, dV and U are zeros, and so that no product is left out,
// which would keep others from being under way together, the states are those of the first tile again.
template <typename T, int TILES, int PARTS> struct StepPlaces {
  using Type = T;
  static constexpr int kParts = PARTS;
  const gdn_rule_backward_params &p;
  const Buffers &buffers;
  const Work &work;
  const Step &step;

  __device__ __forceinline__ static uint32_t tile(const void *x) { return ptx::shared_address(x); }
  __device__ __forceinline__ int v_tiles() const { return PARTS == 1 ? TILES : (p.common.head_v + kTileRows - 1) / kTileRows; }
  __device__ __forceinline__ int first_tile() const { return PARTS == 1 ? 0 : kPartTiles * step.part; }
  __device__ __forceinline__ int tiles_here() const { return PARTS == 1 ? TILES : min(kPartTiles, v_tiles() - first_tile()); }
  __device__ __forceinline__ int columns_before() const { return first_tile() * kTileRows; }
  __device__ __forceinline__ int head() const { return step.key_head * work.heads + step.head; }
  __device__ __forceinline__ int64_t index() const { return static_cast<int64_t>(step.place) * p.common.num_v_heads + head(); }
  __device__ __forceinline__ int count() const { return step.count; }
  __device__ __forceinline__ bool is_last() const { return step.part + 1 == PARTS && step.head + 1 == work.heads; }
  __device__ __forceinline__ const uint8_t *image(const uint8_t *images, int v_tile) const {
    return images + (index() * v_tiles() + first_tile() + v_tile) * kStateBytes;
  }
  __device__ __forceinline__ const uint8_t *update_image(int v_tile) const {
    return buffers.updates + (index() * v_tiles() + first_tile() + v_tile) * kTileBytes;
  }
  __device__ __forceinline__ const TokenFactors *tokens() const { return &buffers.records[index()].tokens; }
};

}  // namespace backward
}  // namespace gdn
