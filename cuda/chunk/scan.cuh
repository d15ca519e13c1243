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

// Two lanes exchange halves of two tiles, so that each stores four columns at once: half as many stores.
template <typename ST, int N>
__device__ __forceinline__ void store_state(const float (&s)[N][4], ST *state, int first_row, int head_v, int head_k, int lane) {
  const bool odd = lane % 2;    // has the columns of the second tile
  const int column = (odd ? 8 : 0) + 4 * (lane % 4 / 2);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = first_row + lane / 4 + 8 * i;
    ST *to = state + static_cast<int64_t>(row) * head_k + column;
#pragma unroll
    for (int t = 0; t < N; t += 2) {
      const float *a = s[t] + 2 * i, *b = s[t + 1] + 2 * i;
      const float c = __shfl_xor_sync(0xffffffffu, odd ? a[0] : b[0], 1), d = __shfl_xor_sync(0xffffffffu, odd ? a[1] : b[1], 1);
      const float x[4] = {odd ? c : a[0], odd ? d : a[1], odd ? b[0] : c, odd ? b[1] : d};
      if (row < head_v && 8 * t + column < head_k) store_pack<ST, 4>(to + 8 * t, x);
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

}  // namespace chunk
}  // namespace gdn
