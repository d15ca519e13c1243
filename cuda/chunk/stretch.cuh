// The stretch of a sequence that a block runs through, and the state at both its ends.
#pragma once

#include "scan.cuh"

namespace gdn {
namespace chunk {

struct Stretch {
  Tokens seq;
  int n, slot, head, segment;
  int begin, end;       // chunks of the sequence
  int row0;             // first value row of the block; of the identity's rows, which kTransfer runs through too
  bool identity;        // those
  bool cut_off;         // the last chunk's last rows are other sequences'; past the tensor's end the copies bring zeros (maps.h)
  bool forgetting;      // kTransfer of a head that forgets: begin_of_warm_up() says where it begins
  int split;            // the place that runs the head's first part; -1: the head is whole
};

__device__ __forceinline__ Borders borders_of(const Plan &plan) { return plan.borders ? *plan.borders : plan.planned; }

__device__ __forceinline__ int begin_of_segment(const Borders &borders, int segment) {
  return segment == 0 ? 0 : borders.first_chunks + (segment - 1) * borders.segment_chunks;
}

// The number of segments of a sequence of `chunks` chunks.
__device__ __forceinline__ int segments_of(const Borders &borders, int chunks) {
  const int later_chunks = chunks - borders.first_chunks;
  return later_chunks <= 0 ? 1 : 1 + (later_chunks + borders.segment_chunks - 1) / borders.segment_chunks;
}

// Whether a head forgets so much that what a segment makes of zeros is the state after the segment (borders.cuh).
__device__ __forceinline__ bool forgets(const gdn_rule_params &p, const Plan &plan, int slot, int head) {
  return plan.warm_ups && plan.warm_ups[slot * p.common.num_v_heads + head] > 0;
}

// The long sequence that has a slot (plan.mixed), by a warp; -1: there are fewer.
__device__ __forceinline__ int sequence_of_slot(const gdn_sequences &s, const Plan &plan, int slot) {
#pragma unroll 1
  for (int first = 0; first < s.num_seqs; first += 32) {
    const int n = first + static_cast<int>(threadIdx.x) % 32;
    unsigned found = __ballot_sync(0xffffffffu, n < s.num_seqs && tokens_of(s, n).count > plan.long_tokens);
    const int count = __popc(found);
    if (slot < count) {
      for (; slot > 0; --slot) found &= found - 1;
      return first + __ffs(static_cast<int>(found)) - 1;
    }
    slot -= count;
  }
  return -1;
}

// The state after the first segment: a matrix [head_v, head_k].
__device__ __forceinline__ float *first_at(const gdn_rule_params &p, const Plan &plan, int slot, int head) {
  return plan.transfers + (static_cast<int64_t>(slot) * p.common.num_v_heads + head) * p.common.head_v * p.common.head_k;
}

// For a `segment` between the first and the last: its N [head_v, head_k], later the state after it; then its M [head_k, head_k].
__device__ __forceinline__ float *transfer_at(const gdn_rule_params &p, const Plan &plan, int slot, int segment, int head) {
  const int64_t item = (static_cast<int64_t>(slot) * (plan.segments - 2) + segment - 1) * p.common.num_v_heads + head;
  return first_at(p, plan, plan.slots, 0) + item * (p.common.head_v + p.common.head_k) * p.common.head_k;
}

// The launch of kFirst, with blocks of `rows` value rows: first segments, then kTransfer's blocks, then sequences that are not cut.
__device__ __forceinline__ unsigned first_blocks(const gdn_rule_params &p, const Plan &plan) {
  return static_cast<unsigned>(plan.v_tiles) * p.common.num_v_heads * plan.slots;
}
__device__ __forceinline__ int transfer_tiles(const gdn_rule_params &p, const Plan &plan, int rows) {
  return plan.v_tiles + (p.common.head_k + rows - 1) / rows;
}
__device__ __forceinline__ unsigned transfer_blocks(const gdn_rule_params &p, const Plan &plan, int rows) {
  return static_cast<unsigned>(transfer_tiles(p, plan, rows)) * p.common.num_v_heads * plan.slots * (plan.segments - 2);
}
__device__ __forceinline__ bool is_transfer(const gdn_rule_params &p, const Plan &plan, int rows, unsigned block) {
  const unsigned begin = first_blocks(p, plan);
  return block >= begin && block - begin < transfer_blocks(p, plan, rows);
}

// What a place runs `round`-th: a job, and how many of its rounds.places-ths come before the split.
struct Part {
  unsigned job;
  int split, share;    // split as in Stretch
  bool second;
};
__device__ __forceinline__ int rounds_of(const Rounds &r, int place) {
  if (!r.split) return (r.jobs - place + r.places - 1) / r.places;
  const int begin = place * r.jobs / r.places, end = ((place + 1) * r.jobs + r.places - 1) / r.places;
  return end - begin;
}
__device__ __forceinline__ Part part_of(const Rounds &r, int place, int round) {
  if (!r.split) return {static_cast<unsigned>(place + round * r.places), -1, 0, false};
  const int job = place * r.jobs / r.places + round, begin = place * r.jobs % r.places;
  if (round == 0 && begin > 0) return {static_cast<unsigned>(job), place, r.places - begin, false};
  const int end = (place + 1) * r.jobs;
  if (job == end / r.places) return {static_cast<unsigned>(job), place + 1, r.places - end % r.places, true};
  return {static_cast<unsigned>(job), -1, 0, false};
}

// Tiles of a head lie side by side, so that those who read the same keys run together.
template <Pass PASS>
__device__ __forceinline__ Stretch stretch_of(const gdn_rule_params &p, const Plan &plan, int tile_rows, unsigned block, int round) {
  Stretch s;
  Part part = {block, -1, 0, false};
  if (PASS == kSeveral) part = part_of(plan.rounds, static_cast<int>(block), round), block = part.job;
  if (PASS == kTransfer) block -= first_blocks(p, plan);
  if (PASS == kFirst && block >= first_blocks(p, plan)) block -= transfer_blocks(p, plan, tile_rows);
  const int tiles = PASS == kTransfer ? transfer_tiles(p, plan, tile_rows) : plan.v_tiles;
  int tile = static_cast<int>(block % tiles);
  block /= tiles;
  s.head = static_cast<int>(block % p.common.num_v_heads);
  block /= p.common.num_v_heads;
  if (PASS == kFirst || PASS == kSeveral || plan.segments == 1) {
    s.segment = 0;
    s.slot = static_cast<int>(block);
  } else {
    const unsigned segments = PASS == kTransfer ? plan.segments - 2 : plan.segments - 1;
    s.segment = 1 + static_cast<int>(block % segments);
    s.slot = static_cast<int>(block / segments);
  }
  s.identity = PASS == kTransfer && tile >= plan.v_tiles;
  s.row0 = (s.identity ? tile - plan.v_tiles : tile) * tile_rows;
  const bool mixed = PASS != kSeveral && plan.mixed;
  const bool whole = mixed && s.slot >= plan.slots;    // after the slots come all sequences that are not long
  const int found = whole ? s.slot - plan.slots : mixed ? sequence_of_slot(p.common.seqs, plan, s.slot) : s.slot;
  s.n = max(found, 0);
  s.seq = tokens_of(p.common.seqs, s.n);
  const int chunks = (s.seq.count + kChunk - 1) / kChunk;
  s.begin = 0, s.end = chunks;
  s.cut_off = p.common.seqs.cu_seqlens && s.seq.count % kChunk > 0 && s.seq.first + s.seq.count < p.common.seqs.total_tokens;
  if (plan.segments > 1 && !whole) {
    const Borders borders = borders_of(plan);
    s.begin = begin_of_segment(borders, s.segment), s.end = min(chunks, begin_of_segment(borders, s.segment + 1));
  }
  s.split = -1, s.forgetting = false;
  if (PASS == kTransfer) {
    s.forgetting = forgets(p, plan, s.slot, s.head);
    // Idle: after the last segment comes none that needs its transfer, and a forgetting head needs no M.
    if (s.end == chunks || (s.forgetting && s.identity)) s.end = s.begin;
  }
  if (found < 0 || (whole && s.seq.count > plan.long_tokens)) s.segment = 1, s.begin = s.end = 0;    // idle
  if (PASS == kSeveral && part.split >= 0) {
    const int first = (chunks * part.share + plan.rounds.places / 2) / plan.rounds.places;
    if (part.second) s.segment = 1, s.begin = first;
    else s.end = first;
    if (0 < first && first < chunks) s.split = part.split;
  }
  return s;
}

// Whether a block of a stretch without tokens has nothing to do: the first one of an empty sequence copies the state.
template <Pass PASS> __device__ __forceinline__ bool is_idle(const Stretch &s, const Plan &plan) {
  return s.begin >= s.end && (PASS == kTransfer || s.segment > 0 || s.seq.count > 0 || plan.keep_state);
}

// ---- the state of a warp's rows along a stretch, `row0` being the first of them ----

// Between the two parts of a head, by a block of `tile_rows`.
__device__ __forceinline__ float *split_at(const gdn_rule_params &p, const Plan &plan, const Stretch &s, int tile_rows) {
  return plan.rounds.states + static_cast<int64_t>(s.split) * tile_rows * p.common.head_k;
}

template <typename ST, Pass PASS, int N>
__device__ __forceinline__ void begin_state(float (&state)[N][4], const gdn_rule_params &p, const Plan &plan, const Stretch &s,
                                            int tile_rows, int row0, int lane) {
  if (PASS == kTransfer && s.begin > 0) {    // else the head has not forgotten the sequence's own state
#pragma unroll
    for (int t = 0; t < N; ++t)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        state[t][i] = s.identity && row0 + lane / 4 + i / 2 * 8 == 8 * t + 2 * (lane % 4) + i % 2 ? 1.f : 0.f;
  } else if (PASS == kSeveral && s.segment > 0 && s.split >= 0) {
    const int row = row0 - s.row0;
    ptx::wait_for_flag(plan.rounds.flags + 8 * s.split + row / 16, lane);
    load_state(state, split_at(p, plan, s, tile_rows), row, min(tile_rows, p.common.head_v - s.row0), p.common.head_k, lane);
  } else if (PASS == kWhole && s.segment > 0) {
    ptx::grid_dependency_wait();
    const float *from = s.segment > 1 ? transfer_at(p, plan, s.slot, s.segment - 1, s.head) : first_at(p, plan, s.slot, s.head);
    load_state(state, from, row0, p.common.head_v, p.common.head_k, lane);
  } else {
    with_state_type<ST>(p.common.state_dtype, [&](auto type) {
      using S = typename decltype(type)::type;
      const S *from = static_cast<const S *>(p.common.state_in) + slot_of(p.common.in_slots, s.n) * p.common.in_slots.slot_stride;
      const int rows = p.common.state_in ? p.common.head_v : 0;    // none is read: zeros
      load_state(state, from + static_cast<int64_t>(s.head) * p.common.head_v * p.common.head_k, row0, rows, p.common.head_k, lane);
    });
  }
}

template <typename ST, Pass PASS, int N>
__device__ __forceinline__ void end_state(const float (&state)[N][4], const gdn_rule_params &p, const Plan &plan,
                                          const Stretch &s, int tile_rows, int row0, int lane) {
  if (PASS == kTransfer) {
    float *to = transfer_at(p, plan, s.slot, s.segment, s.head) + (s.identity ? p.common.head_v * p.common.head_k : 0);
    store_state(state, to, row0, s.identity ? p.common.head_k : p.common.head_v, p.common.head_k, lane);
  } else if (s.end * kChunk >= s.seq.count) {
    with_state_type<ST>(p.common.state_dtype, [&](auto type) {
      using S = typename decltype(type)::type;
      S *to = static_cast<S *>(p.common.state_out) + slot_of(p.common.out_slots, s.n) * p.common.out_slots.slot_stride;
      store_state(state, to + static_cast<int64_t>(s.head) * p.common.head_v * p.common.head_k, row0, p.common.head_v, p.common.head_k, lane);
    });
  } else if (PASS == kFirst) {
    store_state(state, first_at(p, plan, s.slot, s.head), row0, p.common.head_v, p.common.head_k, lane);
  } else if (PASS == kSeveral) {
    const int row = row0 - s.row0;
    store_state(state, split_at(p, plan, s, tile_rows), row, min(tile_rows, p.common.head_v - s.row0), p.common.head_k, lane);
    ptx::set_flag(plan.rounds.flags + 8 * s.split + row / 16, lane);
  }
}

}  // namespace chunk
}  // namespace gdn
