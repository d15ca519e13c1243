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

// A factor a column, of the two columns of each t.
__device__ __forceinline__ float2 column_pair(const float *factors, int t, int lane) {
  return *reinterpret_cast<const float2 *>(factors + 8 * t + 2 * (lane % 4));
}

template <int N> __device__ __forceinline__ void scale_columns(float (&x)[N][4], const float *factors, int lane) {
#pragma unroll
  for (int t = 0; t < N; ++t) {
    const float2 f = column_pair(factors, t, lane);
    x[t][0] *= f.x, x[t][1] *= f.y, x[t][2] *= f.x, x[t][3] *= f.y;
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
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int t = 2 * m + h;
      const float2 f = column_pair(read, t, lane), top = unpack2<T>(v[2 * h]), low = unpack2<T>(v[2 * h + 1]);
      sk[t][0] = fmaf(-f.x, sk[t][0], top.x), sk[t][1] = fmaf(-f.y, sk[t][1], top.y);
      sk[t][2] = fmaf(-f.x, sk[t][2], low.x), sk[t][3] = fmaf(-f.y, sk[t][3], low.y);
    }
  }
}

// Writes O^T to the rows of o, by way of this warp's part of the V tile, which nobody else reads; `left` runs when it has been
// read again, before the stores to global memory, which a fence would wait for.
template <typename T, typename F>
__device__ __forceinline__ void store_out(const float (&o)[8][4], uint32_t v_tile, int warp, int lane, T *to, int64_t stride,
                                          int count, int values, F &&left) {
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
#pragma unroll
  for (int t = 0; t < N; ++t)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = first_row + lane / 4 + 8 * i, column = 8 * t + 2 * (lane % 4);
      float x[2] = {0.f, 0.f};
      if (row < head_v && column < head_k) load_pack<ST, 2>(state + row * head_k + column, x);
      s[t][2 * i] = x[0], s[t][2 * i + 1] = x[1];
    }
}

template <typename ST, int N>
__device__ __forceinline__ void store_state(const float (&s)[N][4], ST *state, int first_row, int head_v, int head_k, int lane) {
#pragma unroll
  for (int t = 0; t < N; ++t)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = first_row + lane / 4 + 8 * i, column = 8 * t + 2 * (lane % 4);
      const float x[2] = {s[t][2 * i], s[t][2 * i + 1]};
      if (row < head_v && column < head_k) store_pack<ST, 2>(state + row * head_k + column, x);
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

// Tiles of a head lie side by side, so that those who read the same keys run together.
template <Pass PASS> __device__ __forceinline__ Stretch stretch_of(const gdn_rule_params &p, const Plan &plan, int tile_rows) {
  Stretch s;
  const int tiles = PASS == kWhole ? plan.v_tiles : plan.v_tiles + (p.head_k + tile_rows - 1) / tile_rows;
  unsigned block = blockIdx.x;
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

}  // namespace prefill
}  // namespace gdn
