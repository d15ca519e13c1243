// The common part of the scans for sm_80 and sm_90a: a warp's 16 value rows of the state, its elementwise work and its accesses to
// global memory. In both a warp holds its rows as the accumulators of mma16816 and wgmma, side by side:
// x[t] = columns 8 t + 2 (lane % 4), + 1 of row lane / 4, then of row lane / 4 + 8.
// With S [V, K], k and q raw, and the factors and matrices of a Record, a chunk is
//   U  = V^T - (S K^T) diag(read)                      [V, token]
//   V' = U inverse^T
//   O^T = (S Q^T) diag(out) + V' attention^T
//   S <- decay S + V' diag(write) K
#pragma once

#include "layout.cuh"
#include "plan.h"

namespace gdn {
namespace chunk {

// A operands of the columns of `x`, of which each k step takes 16.
template <typename T, int N> __device__ __forceinline__ void to_operand(uint32_t (&a)[N / 2][4], const float (&x)[N][4]) {
#pragma unroll
  for (int k = 0; k < N / 2; ++k) {
    a[k][0] = pack2_finite<T>(x[2 * k][0], x[2 * k][1]);
    a[k][1] = pack2_finite<T>(x[2 * k][2], x[2 * k][3]);
    a[k][2] = pack2_finite<T>(x[2 * k + 1][0], x[2 * k + 1][1]);
    a[k][3] = pack2_finite<T>(x[2 * k + 1][2], x[2 * k + 1][3]);
  }
}

template <int N> __device__ __forceinline__ void scale(float (&x)[N][4], float factor) {
#pragma unroll
  for (int t = 0; t < N; ++t)
#pragma unroll
    for (int c = 0; c < 4; ++c) x[t][c] *= factor;
}

// A factor a column: of the two columns of tiles 2 m and 2 m + 1.
__device__ __forceinline__ float4 column_factors(const float *factors, int m, int lane) {
  const int c = lane % 4;
  return *reinterpret_cast<const float4 *>(factors + c * 16 + 4 * (m ^ c / 2));
}

template <int N> __device__ __forceinline__ void scale_columns(float (&x)[N][4], int m, const float4 &f) {
  float(&a)[4] = x[2 * m], (&b)[4] = x[2 * m + 1];
  a[0] *= f.x, a[1] *= f.y, a[2] *= f.x, a[3] *= f.y;
  b[0] *= f.z, b[1] *= f.w, b[2] *= f.z, b[3] *= f.w;
}
template <int N> __device__ __forceinline__ void scale_columns(float (&x)[N][4], const float *factors, int lane) {
#pragma unroll
  for (int m = 0; m < N / 2; ++m) scale_columns(x, m, column_factors(factors, m, lane));
}

// A operands of x, and of x with a factor a column, pair by pair, so that x's registers are freed as the operands are made.
// `first` are the factors of the first two tiles.
template <typename T>
__device__ __forceinline__ void to_operands(uint32_t (&plain)[4][4], uint32_t (&scaled)[4][4], const float (&x)[8][4],
                                            const float4 &first, const float *factors, int lane) {
#pragma unroll
  for (int m = 0; m < 4; ++m) {
    const float4 f = m > 0 ? column_factors(factors, m, lane) : first;
    const float pairs[2][2] = {{f.x, f.y}, {f.z, f.w}};
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float(&y)[4] = x[2 * m + h], (&g)[2] = pairs[h];
      plain[m][2 * h] = pack2_finite<T, true>(y[0], y[1]);
      plain[m][2 * h + 1] = pack2_finite<T, true>(y[2], y[3]);
      scaled[m][2 * h] = pack2_finite<T, true>(y[0] * g[0], y[1] * g[1]);
      scaled[m][2 * h + 1] = pack2_finite<T, true>(y[2] * g[0], y[3] * g[1]);
    }
  }
}

// 16-byte runs 2 `warp` and the next of a token's row in a V tile belong to one warp: this lane's row address for four matrices
// of tokens 0 .. 15; those of the next 16 are 2048 bytes further.
__device__ __forceinline__ uint32_t value_rows(uint32_t tile, int warp, int lane) {
  return tile_at(tile, lanes_by_piece(lane), 0, warp % 4);
}

// sk becomes U: V^T - sk diag(read). By 16 tokens at a time, so that the first may be loaded before sk is complete.
struct ValuePiece {
  uint32_t v[4];
  float4 factors;
};
__device__ __forceinline__ ValuePiece load_values(uint32_t v_tile, const float *read, int m, int warp, int lane) {
  ValuePiece x;
  ptx::load_matrices_trans(x.v, value_rows(v_tile, warp, lane) + 2048 * m);
  x.factors = column_factors(read, m, lane);
  return x;
}
template <typename T> __device__ __forceinline__ void subtract_from_values(float (&sk)[8][4], const ValuePiece &x, int m) {
  const float2 pairs[2] = {make_float2(x.factors.x, x.factors.y), make_float2(x.factors.z, x.factors.w)};
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int t = 2 * m + h;
    const float2 f = pairs[h], top = unpack2<T>(x.v[2 * h]), low = unpack2<T>(x.v[2 * h + 1]);
    sk[t][0] = fmaf(-f.x, sk[t][0], top.x), sk[t][1] = fmaf(-f.y, sk[t][1], top.y);
    sk[t][2] = fmaf(-f.x, sk[t][2], low.x), sk[t][3] = fmaf(-f.y, sk[t][3], low.y);
  }
}
template <typename T>
__device__ __forceinline__ void subtract_from_values(float (&sk)[8][4], uint32_t v_tile, const float *read, int warp,
                                                     int lane) {
#pragma unroll
  for (int m = 0; m < 4; ++m) subtract_from_values<T>(sk, load_values(v_tile, read, m, warp, lane), m);
}

// O^T in 16 bits, and its store into this warp's part of the V tile, which no other warp reads.
template <typename T> __device__ __forceinline__ void pack_out(uint32_t (&x)[4][4], const float (&o)[8][4]) {
#pragma unroll
  for (int m = 0; m < 4; ++m) {
    x[m][0] = pack2<T>(o[2 * m][0], o[2 * m][1]), x[m][1] = pack2<T>(o[2 * m][2], o[2 * m][3]);
    x[m][2] = pack2<T>(o[2 * m + 1][0], o[2 * m + 1][1]), x[m][3] = pack2<T>(o[2 * m + 1][2], o[2 * m + 1][3]);
  }
}
__device__ __forceinline__ void put_out(const uint32_t (&x)[4][4], uint32_t v_tile, int warp, int lane) {
  const uint32_t rows = value_rows(v_tile, warp, lane);
  __syncwarp();    // all lanes have read their values
#pragma unroll
  for (int m = 0; m < 4; ++m) {
#if __CUDA_ARCH__ >= 900
    ptx::store_matrices_trans(rows + 2048 * m, x[m]);
#else
#pragma unroll
    for (int i = 0; i < 4; ++i)
      ptx::store_shared(v_tile + tile_offset(lane / 4, 2 * (warp % 4) + i % 2) + 2048 * m + i / 2 * 1024 + 4 * (lane % 4),
                        ptx::transpose_matrix(x[m][i]));
#endif
  }
}
template <typename T>
__device__ __forceinline__ void put_out(const float (&o)[8][4], uint32_t v_tile, int warp, int lane) {
  uint32_t x[4][4];
  pack_out<T>(x, o);
  put_out(x, v_tile, warp, lane);
}

// From the V tile to the rows of o.
template <typename T>
__device__ __forceinline__ void take_out(uint32_t v_tile, int warp, int lane, T *to, int64_t stride, int count, int values) {
  __syncwarp();
  const int piece = lane % 2, token = lane / 2;
  const uint32_t from = v_tile + tile_offset(token, 2 * (warp % 4) + piece);
  uint4 x[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) x[i] = ptx::load_shared(from + 2048 * i);
  if (piece * kPiece >= values) return;
  T *row = to + token * stride + piece * kPiece;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (token + 16 * i < count) *reinterpret_cast<uint4 *>(row) = x[i];
    row += 16 * stride;
  }
}

// Rows first_row + lane / 4 and 8 further of a state [head_v, head_k]; zero past its edges.
template <typename ST, int N>
__device__ __forceinline__ void load_state(float (&s)[N][4], const ST *state, int first_row, int head_v, int head_k, int lane) {
  const int column = 2 * (lane % 4);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = first_row + lane / 4 + 8 * i;
    const ST *from = state + static_cast<int64_t>(row) * head_k + column;
#pragma unroll
    for (int t = 0; t < N; ++t) {
      float x[2] = {0.f, 0.f};
      if (row < head_v && 8 * t + column < head_k) load_pack<ST, 2>(from + 8 * t, x);
      s[t][2 * i] = x[0], s[t][2 * i + 1] = x[1];
    }
  }
}

template <typename ST, int N>
__device__ __forceinline__ void store_state(const float (&s)[N][4], ST *state, int first_row, int head_v, int head_k, int lane) {
  const int column = 2 * (lane % 4);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = first_row + lane / 4 + 8 * i;
    if (row >= head_v) return;
    ST *to = state + static_cast<int64_t>(row) * head_k + column;
#pragma unroll
    for (int t = 0; t < N; ++t) {
      const float x[2] = {s[t][2 * i], s[t][2 * i + 1]};
      if (8 * t + column < head_k) store_pack<ST, 2>(to + 8 * t, x);
    }
  }
}

// The rows of a padding sequence: zero, by `threads`.
template <typename T>
__device__ __forceinline__ void zero_rows(const gdn_rule_params &p, int n, const Tokens &seq, int head, int row0, int rows, int thread,
                                          int threads) {
  const int pieces = min(rows, p.common.head_v - row0) / kPiece;
  for (int64_t i = thread; i < static_cast<int64_t>(seq.count) * pieces; i += threads)
    *reinterpret_cast<uint4 *>(out_heads_at<T>(p.o, n, seq.first + i / pieces, head) + row0 + i % pieces * kPiece) =
        make_uint4(0, 0, 0, 0);
}

// ---- the stretch of a sequence that a block runs through ----

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
