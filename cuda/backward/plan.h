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

// States along the chunks; gradients of states against them; what a segment of a sequence makes of the identity where there are no values.
enum Direction : int32_t { kForward, kReverse, kTransfer };

// A walk of some segments of every sequence. Where it begins and ends: [segment, sequence, value head, rows, head_k], or null.
struct Walk {
  const float *from;    // null: zeros, of kTransfer the identity
  float *to;            // null: not kept
  int32_t direction;
  int32_t store;        // whether states, U and dV are kept
  int32_t first, segments;
};

// The chunk where a segment begins. A sequence has fewer than 2^26 of them, as for Span.
__host__ __device__ inline int border_of(const Cut &c, int chunks, int segment) {
  if (segment == 0 || segment == c.segments) return segment == 0 ? 0 : chunks;
  return static_cast<int>(static_cast<uint32_t>(chunks) * (c.ends + segment - 1) / (c.segments - 2 + 2 * c.ends));
}

// The walks of one launch, whose blocks follow each other.
struct Walks {
  Walk walk[5];
  Span span;    // of the workspace
  Cut cut;      // segments only of sequences that are one span
};

constexpr int kTileRows = 64;    // value rows of a tile of a walk
__host__ __device__ inline int tiles_of(const gdn_common &c, const Walk &walk) {
  return ((walk.direction == kTransfer ? c.head_k : c.head_v) + kTileRows - 1) / kTileRows;
}
__host__ __device__ inline unsigned blocks_each_head(const gdn_common &c, const Walk &walk, int tiles) {
  return static_cast<unsigned>((tiles_of(c, walk) + tiles - 1) / tiles);
}
__host__ __device__ inline int64_t blocks_of(const gdn_common &c, const Walk &walk, int tiles) {
  return int64_t{walk.segments} * c.seqs.num_seqs * c.num_v_heads * blocks_each_head(c, walk, tiles);
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
  Cut cut;              // segments only of sequences that are one section
  int64_t places;       // of a section
  int64_t record_bytes, state_bytes, update_bytes;    // of a section
  int64_t carry_bytes, transfer_bytes;                // of one state, one transfer matrix of all heads

  // With sections: states before all but the first, and the gradient between two. With segments: states and gradients at their borders, and
  // the transfer matrices of all but the first and the last.
  int64_t bytes() const {
    const int64_t between = sections > 1 ? sections * carry_bytes : cut.segments > 1 ? 2 * (cut.segments - 1) * carry_bytes + (cut.segments - 2) * transfer_bytes : 0;
    return kTakenBytes + record_bytes + 2 * state_bytes + update_bytes + between;
  }
};

int make_schedule(const gdn_rule_backward_params &p, bool wgmma, Schedule *s);

// Carries states and gradients of states through the segments (combine.cuh).
int launch_combine(const gdn_common &c, float *states, float *gradients, const float *transfers, int32_t segments, cudaStream_t stream);

// A translation unit for each type.
template <typename T> int launch_chunks(const gdn_rule_backward_params &p, const Schedule &s, bool wgmma, cudaStream_t stream);

}  // namespace backward
}  // namespace gdn
