// The host's decisions for the backward pass in chunks, and the kernels' parameters made of them.
#pragma once

#include <cuda_runtime.h>

#include "../common/checks.h"

namespace gdn {
namespace backward {

// A part of every sequence: chunks [N segment / segments, N (segment + 1) / segments).
struct Span {
  int32_t segment, segments;
};

struct Record;    // records.cuh

// Of a segment, by place and value head.
struct Buffers {
  Record *records;
  uint8_t *states, *gradients;    // S before the chunk and the gradient of S after it: images of state tiles
  uint8_t *updates;               // U / beta, in f16 (TokenFactors::updates): images of tiles; null: in d_q and d_k (updates_in_place())
};

// Whether U lies where d_q and d_k will be, a value head in each, as rows of tokens: the gradients kernel reads U of a key head before it
// writes there. Else it is in the workspace.
inline bool updates_in_place(const gdn_rule_backward_params &p) {
  return p.common.head_k == p.common.head_v && p.common.num_v_heads <= 2 * p.common.num_k_heads;
}

// Where a walk begins and ends: [sequence, value head, head_v, head_k] or null.
struct Walk {
  const float *from;    // null: zeros
  float *to;            // null: not kept
  bool on, store;       // `on`: walk at all
};

struct Walks {
  Walk forward, reverse;
  int32_t v_tiles;      // blocks a head
};

// Of the gradients kernel.
struct Work {
  uint32_t items;     // places and key heads
  int32_t heads;      // value heads a key head
};

struct Schedule {
  int32_t segments;
  int64_t places;       // of a segment
  int64_t record_bytes, state_bytes, update_bytes, carry_bytes;    // of a segment; of one state of all heads

  // States before all segments but the first, and the gradient between segments.
  int64_t bytes() const { return record_bytes + 2 * state_bytes + update_bytes + (segments > 1 ? segments * carry_bytes : 0); }
};

int make_schedule(const gdn_rule_backward_params &p, Schedule *s);

// A translation unit for each type.
template <typename T> int launch_chunks(const gdn_rule_backward_params &p, const Schedule &s, bool wgmma, cudaStream_t stream);

}  // namespace backward
}  // namespace gdn
