// What the scans for sm_80 and sm_90a share: a warp's 16 value rows of the state, its elementwise work and its accesses to
// global memory. In both a warp holds its rows as the accumulators of mma16816 and wgmma, side by side:
// x[t] = columns 8 t + 2 (lane % 4), + 1 of row lane / 4, then of row lane / 4 + 8.
//
// With S [V, K], k and q raw, and the factors and matrices of a Record, a chunk is
//   U  = V^T - (S K^T) diag(read)                      [V, token]
//   V' = U inverse^T
//   O^T = (S Q^T) diag(out) + V' attention^T
//   S <- decay S + V' diag(write) K
#pragma once

#include "layout.cuh"

namespace gdn {
namespace prefill {

// What the host decides.
struct Plan {
  int32_t v_tiles;          // blocks a head
  int32_t segments;         // parts of a sequence that run side by side
  int32_t segment_chunks;   // chunks of each but the last
  bool keep_state;          // a sequence without tokens need not copy its state
  const Record *records;
  float *transfers;         // context parallelism: see context.cuh
};

// A operands of the columns of `x`, of which each k step takes 16.
template <typename T, int N> __device__ __forceinline__ void to_operand(uint32_t (&a)[N / 2][4], const float (&x)[N][4]) {
#pragma unroll
  for (int k = 0; k < N / 2; ++k) {
    a[k][0] = pack2<T>(x[2 * k][0], x[2 * k][1]);
    a[k][1] = pack2<T>(x[2 * k][2], x[2 * k][3]);
    a[k][2] = pack2<T>(x[2 * k + 1][0], x[2 * k + 1][1]);
    a[k][3] = pack2<T>(x[2 * k + 1][2], x[2 * k + 1][3]);
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

template <int N> __device__ __forceinline__ void scale_columns(float (&x)[N][4], const float *factors, int lane) {
#pragma unroll
  for (int m = 0; m < N / 2; ++m) {
    const float4 f = column_factors(factors, m, lane);
    float(&a)[4] = x[2 * m], (&b)[4] = x[2 * m + 1];
    a[0] *= f.x, a[1] *= f.y, a[2] *= f.x, a[3] *= f.y;
    b[0] *= f.z, b[1] *= f.w, b[2] *= f.z, b[3] *= f.w;
  }
}

// A operands of x, and of x with a factor a column, pair by pair: volatile, so that x goes as the operands come.
template <typename T> __device__ __forceinline__ uint32_t pack2_in_order(float a, float b) {
  uint32_t y;
  if constexpr (std::is_same_v<T, __half>) asm volatile("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(b), "f"(a));
  else asm volatile("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(b), "f"(a));
  return y;
}
template <typename T>
__device__ __forceinline__ void to_operands(uint32_t (&plain)[4][4], uint32_t (&scaled)[4][4], const float (&x)[8][4],
                                            const float *factors, int lane) {
#pragma unroll
  for (int m = 0; m < 4; ++m) {
    const float4 f = column_factors(factors, m, lane);
    const float pairs[2][2] = {{f.x, f.y}, {f.z, f.w}};
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float(&y)[4] = x[2 * m + h], (&g)[2] = pairs[h];
      plain[m][2 * h] = pack2_in_order<T>(y[0], y[1]);
      plain[m][2 * h + 1] = pack2_in_order<T>(y[2], y[3]);
      scaled[m][2 * h] = pack2_in_order<T>(y[0] * g[0], y[1] * g[1]);
      scaled[m][2 * h + 1] = pack2_in_order<T>(y[2] * g[0], y[3] * g[1]);
    }
  }
}

// Pieces 2 `warp` and the next of a token's row in a V tile belong to one warp: this lane's row address for four matrices
// of tokens 0 .. 15; those of the next 16 lie 2048 bytes further.
__device__ __forceinline__ uint32_t value_rows(uint32_t tile, int warp, int lane) {
  return tile_at(tile, lanes_by_piece(lane), 0, warp % 4);
}

// sk becomes U: V^T - sk diag(read).
template <typename T>
__device__ __forceinline__ void subtract_from_values(float (&sk)[8][4], uint32_t v_tile, const float *read, int warp,
                                                     int lane) {
  const uint32_t rows = value_rows(v_tile, warp, lane);
#pragma unroll
  for (int m = 0; m < 4; ++m) {
    uint32_t v[4];
    ptx::load_matrices_trans(v, rows + 2048 * m);
    const float4 factors = column_factors(read, m, lane);
    const float2 pairs[2] = {make_float2(factors.x, factors.y), make_float2(factors.z, factors.w)};
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int t = 2 * m + h;
      const float2 f = pairs[h], top = unpack2<T>(v[2 * h]), low = unpack2<T>(v[2 * h + 1]);
      sk[t][0] = fmaf(-f.x, sk[t][0], top.x), sk[t][1] = fmaf(-f.y, sk[t][1], top.y);
      sk[t][2] = fmaf(-f.x, sk[t][2], low.x), sk[t][3] = fmaf(-f.y, sk[t][3], low.y);
    }
  }
}

// O^T to this warp's part of the V tile, which nobody else reads.
template <typename T>
__device__ __forceinline__ void put_out(const float (&o)[8][4], uint32_t v_tile, int warp, int lane) {
  const uint32_t rows = value_rows(v_tile, warp, lane);
  __syncwarp();    // all lanes have read their values
#pragma unroll
  for (int m = 0; m < 4; ++m) {
    const uint32_t x[4] = {pack2<T>(o[2 * m][0], o[2 * m][1]), pack2<T>(o[2 * m][2], o[2 * m][3]),
                           pack2<T>(o[2 * m + 1][0], o[2 * m + 1][1]), pack2<T>(o[2 * m + 1][2], o[2 * m + 1][3])};
#if __CUDA_ARCH__ >= 900
    ptx::store_matrices_trans(rows + 2048 * m, x);
#else
#pragma unroll
    for (int i = 0; i < 4; ++i)
      ptx::store_shared(v_tile + tile_offset(lane / 4, 2 * (warp % 4) + i % 2) + 2048 * m + i / 2 * 1024 + 4 * (lane % 4),
                        ptx::transpose_matrix(x[i]));
#endif
  }
}

// From there to the rows of o; `left` runs when it has been read, before the stores to global memory, which a fence would
// wait for.
template <typename T, typename F>
__device__ __forceinline__ void take_out(uint32_t v_tile, int warp, int lane, T *to, int64_t stride, int count, int values,
                                         F &&left) {
  __syncwarp();
  const int piece = lane % 2, token = lane / 2;
  const uint32_t from = v_tile + tile_offset(token, 2 * (warp % 4) + piece);
  uint4 x[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) x[i] = ptx::load_shared(from + 2048 * i);
  left();
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

// The rows of a padding sequence: zero.
template <typename T>
__device__ __forceinline__ void zero_rows(const gdn_rule_params &p, int n, const Tokens &seq, int head, int row0, int rows) {
  const int pieces = min(rows, p.head_v - row0) / kPiece;
  for (int64_t i = threadIdx.x; i < static_cast<int64_t>(seq.count) * pieces; i += blockDim.x)
    *reinterpret_cast<uint4 *>(out_heads_at<T>(p.o, n, seq.first + i / pieces, head) + row0 + i % pieces * kPiece) =
        make_uint4(0, 0, 0, 0);
}

// ---- the stretch of a sequence that a block runs through ----

enum Pass {
  kWhole,      // the scan itself: o, checkpoints and the final state
  kTransfer    // context parallelism: what a segment adds to a state and what it makes of one (context.cuh)
};

struct Stretch {
  Tokens seq;
  int n, head, segment;
  int begin, end;       // chunks of the sequence
  int row0;             // first value row of the block; of the identity's rows, which kTransfer runs through too
  bool identity;        // those
};

// Of `segment`, the state before it, where it is not the first: a matrix [head_v, head_k] that is followed by [head_k, head_k].
__device__ __forceinline__ float *transfer_at(const gdn_rule_params &p, const Plan &plan, int n, int segment, int head) {
  const int64_t item = (static_cast<int64_t>(n) * (plan.segments - 1) + segment) * p.num_v_heads + head;
  return plan.transfers + item * (p.head_v + p.head_k) * p.head_k;
}

// The state before a sequence of more than one segment, behind those: where the state stays in place the last segment may write
// it before the first one has read it.
__device__ __forceinline__ float *first_at(const gdn_rule_params &p, const Plan &plan, int n, int head) {
  const int64_t segments = static_cast<int64_t>(p.seqs.num_seqs) * (plan.segments - 1) * p.num_v_heads;
  const int64_t item = static_cast<int64_t>(n) * p.num_v_heads + head;
  return plan.transfers + (segments * (p.head_v + p.head_k) + item * p.head_v) * p.head_k;
}

// Tiles of a head lie side by side, so that those who read the same keys run together.
template <Pass PASS>
__device__ __forceinline__ Stretch stretch_of(const gdn_rule_params &p, const Plan &plan, int tile_rows, unsigned block) {
  Stretch s;
  const int tiles = PASS == kWhole ? plan.v_tiles : plan.v_tiles + (p.head_k + tile_rows - 1) / tile_rows;
  int tile = static_cast<int>(block % tiles);
  block /= tiles;
  s.head = static_cast<int>(block % p.num_v_heads);
  block /= p.num_v_heads;
  const unsigned segments = PASS == kWhole ? plan.segments : plan.segments - 1;
  s.segment = static_cast<int>(block % segments);
  s.n = static_cast<int>(block / segments);
  s.identity = PASS == kTransfer && tile >= plan.v_tiles;
  s.row0 = (s.identity ? tile - plan.v_tiles : tile) * tile_rows;
  s.seq = tokens_of(p.seqs, s.n);
  const int chunks = (s.seq.count + kChunk - 1) / kChunk;
  s.begin = s.segment * plan.segment_chunks;
  s.end = min(chunks, s.begin + plan.segment_chunks);
  if (PASS == kTransfer && s.end == chunks) s.end = s.begin;    // nothing follows that would need it
  return s;
}

// Whether the sequence has other segments, so that the combination knows the state before this one.
__device__ __forceinline__ bool joined(const Stretch &s) { return s.segment > 0 || s.end * kChunk < s.seq.count; }

// ---- the state of a warp's rows along a stretch, `row0` being the first of them ----

template <typename ST, Pass PASS, int N>
__device__ __forceinline__ void begin_state(float (&state)[N][4], const gdn_rule_params &p, const Plan &plan, const Stretch &s,
                                            int row0, int lane) {
  if (PASS == kTransfer) {
#pragma unroll
    for (int t = 0; t < N; ++t)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        state[t][i] = s.identity && row0 + lane / 4 + i / 2 * 8 == 8 * t + 2 * (lane % 4) + i % 2 ? 1.f : 0.f;
  } else if (joined(s)) {
    ptx::grid_dependency_wait();
    const float *from = s.segment > 0 ? transfer_at(p, plan, s.n, s.segment - 1, s.head) : first_at(p, plan, s.n, s.head);
    load_state(state, from, row0, p.head_v, p.head_k, lane);
  } else {
    const ST *from = static_cast<const ST *>(p.state_in) + slot_of(p.in_slots, s.n) * p.in_slots.slot_stride;
    load_state(state, from + static_cast<int64_t>(s.head) * p.head_v * p.head_k, row0, p.head_v, p.head_k, lane);
  }
}

// After chunk i of the stretch.
template <typename ST, Pass PASS, int N>
__device__ __forceinline__ void checkpoint(const float (&state)[N][4], const gdn_rule_params &p, const Stretch &s, int i, int row0,
                                           int lane) {
  if (PASS == kTransfer || !p.checkpoints) return;
  const int done = (s.begin + i + 1) * kChunk;
  if (done % p.checkpoint_tokens != 0 || done > s.seq.count) return;
  const int64_t first = p.seqs.cu_seqlens ? s.seq.first : static_cast<int64_t>(s.n) * p.seqs.tokens_per_seq;
  const int64_t row = (first / p.checkpoint_tokens + done / p.checkpoint_tokens - 1) * p.num_v_heads + s.head;
  store_state(state, static_cast<ST *>(p.checkpoints) + row * p.head_v * p.head_k, row0, p.head_v, p.head_k, lane);
}

template <typename ST, Pass PASS, int N>
__device__ __forceinline__ void end_state(const float (&state)[N][4], const gdn_rule_params &p, const Plan &plan,
                                          const Stretch &s, int row0, int lane) {
  if (PASS == kTransfer) {
    float *to = transfer_at(p, plan, s.n, s.segment, s.head) + (s.identity ? p.head_v * p.head_k : 0);
    store_state(state, to, row0, s.identity ? p.head_k : p.head_v, p.head_k, lane);
  } else if (s.end * kChunk >= s.seq.count) {
    ST *to = static_cast<ST *>(p.state_out) + slot_of(p.out_slots, s.n) * p.out_slots.slot_stride;
    store_state(state, to + static_cast<int64_t>(s.head) * p.head_v * p.head_k, row0, p.head_v, p.head_k, lane);
  }
}

}  // namespace prefill
}  // namespace gdn
