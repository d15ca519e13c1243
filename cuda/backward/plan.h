// The host's decisions for the backward pass in chunks, and the kernels' parameters made of them.
#pragma once

#include <cuda_runtime.h>

#include "../common/checks.h"
#include "cut.h"

namespace gdn {
namespace backward {

// A part of every sequence: chunks [N section / sections, N (section + 1) / sections).
struct Span {
  int32_t section, sections;
};

struct Record;    // records.cuh

// Of a section, by place and value head.
struct Buffers {
  Record *records;
  uint8_t *states, *gradients;    // S before the chunk and the gradient of S after it: images of state tiles
  uint32_t *taken;                // items that blocks of the gradients kernel beside the walks have taken
  uint8_t *updates;               // U / beta, in f16 (TokenFactors::updates): images of tiles; null: in d_q and d_k (updates_in_place())
};

// Whether U lies where d_q and d_k will be, a value head in each, as rows of tokens: the gradients kernel reads U of a key head before it
// writes there. Else it is in the workspace.
inline bool updates_in_place(const gdn_rule_backward_params &p) {
  return p.common.head_k == p.common.head_v && p.common.num_v_heads <= 2 * p.common.num_k_heads;
}

// States along the chunks, and gradients of states against them.
enum Direction : int32_t { kForward, kReverse };

// A walk of every sequence. Where it begins and ends: states [sequence, value head, head_v, head_k], or null.
struct Walk {
  const float *from;    // null: zeros
  float *to;            // null: not kept
  int32_t direction;
  int32_t store;        // whether states, U and dV are kept
};

// The walks of one launch.
struct Walks {
  Walk walk[2];
  int32_t walks;
  Span span;    // of the workspace
  Cut cut;      // of sequences that are one span; else {1, false}
};

constexpr int kTileRows = 64;    // value rows of a tile of a walk
__host__ __device__ inline int v_tiles_of(const gdn_common &c) { return (c.head_v + kTileRows - 1) / kTileRows; }
__host__ __device__ inline unsigned blocks_each_head(const gdn_common &c, int tiles) {
  return static_cast<unsigned>((v_tiles_of(c) + tiles - 1) / tiles);
}
// Of one walk of sequences that are not cut.
__host__ __device__ inline int64_t blocks_of(const gdn_common &c, int tiles) {
  return static_cast<int64_t>(c.seqs.num_seqs) * c.num_v_heads * blocks_each_head(c, tiles);
}

// Of the gradients kernel. Each block takes every gridDim.x-th item, by place and key head. Beside the walks blocks take items in turn, about
// as walks finish them: by turn of a sequence's chunk (Taker), sequence, key head.
struct Work {
  uint32_t items;
  int32_t heads;       // value heads a key head
  uint32_t walkers;    // beside the walks: blocks that store something of a chunk and value head
};

constexpr int64_t kTakenBytes = 1024;    // of Buffers::taken, so that what follows keeps its alignment

struct Schedule {
  int32_t sections;
  Cut cut;              // of sequences that are one section
  int64_t places;       // of a section
  int64_t record_bytes, state_bytes, update_bytes;    // of a section
  int64_t carry_bytes;    // of one state of all heads

  // With sections: states before all but the first, and the gradient between two.
  int64_t bytes() const {
    return kTakenBytes + record_bytes + 2 * state_bytes + update_bytes + (sections > 1 ? sections * carry_bytes : 0);
  }
};

int make_schedule(const gdn_rule_backward_params &p, bool wgmma, Schedule *s);

// A translation unit for each type.
template <typename T> int launch_chunks(const gdn_rule_backward_params &p, const Schedule &s, bool wgmma, cudaStream_t stream);

}  // namespace backward
}  // namespace gdn
