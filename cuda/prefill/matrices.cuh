// The two matrices of a chunk and a value head, by a warpgroup: from the products K K^T and Q K^T, the gates and the norms to
// the images that the scan multiplies with.
#pragma once

#include "../common/math.cuh"
#include "inverse.cuh"
#include "layout.cuh"

namespace gdn {
namespace prefill {

// Of the tokens of a chunk; those past the end of the sequence decay nothing, and have beta and norms of zero.
struct TokenGates {
  float c[kChunk];          // running sum of the log2 decay
  float beta[kChunk];
  float before[kChunk];     // 2^c: what is left of the state before the chunk
  float after[kChunk];      // 2^(c of the last - c): what is left of the token after the chunk
  float k_norm[kChunk];     // reciprocal norms
  float q_norm[kChunk];     // times the scale
  float decay;              // 2^(c of the last)
  float unused[3];
};

__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// NOTES: 2^-160 is zero in f32, as all that is less. The bound keeps the sum small, whose rounding is an error of the decays
// that are differences of it, and finite.
constexpr float kLeastDecay = -160.f;

// Raw gates of tokens 2 lane and 2 lane + 1, loaded by a warp ahead of their use.
struct RawGates {
  uint32_t a[2], b[2];
};
__device__ __forceinline__ RawGates load_gates(const gdn_rule_params &p, int n, int64_t first, int count, int head, int lane) {
  RawGates g = {};
#pragma unroll
  for (int i = 0; i < 2; ++i)
    if (2 * lane + i < count) {
      g.a[i] = raw_load_any(p.a.ptr, heads_offset(p.a, n, first + 2 * lane + i, head), p.gate_dtype);
      g.b[i] = raw_load_any(p.b.ptr, heads_offset(p.b, n, first + 2 * lane + i, head), p.gate_dtype);
    }
  return g;
}

// `rate` is -exp(A_log) log2(e).
__device__ __forceinline__ void finish_gates(const gdn_rule_params &p, const RawGates &raw, float rate, float dt_bias, int count,
                                             int lane, TokenGates &to) {
  float g[2], b[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const bool there = 2 * lane + i < count;
    const float decay = rate * softplus(raw_to_float(raw.a[i], p.gate_dtype) + dt_bias);
    g[i] = !there ? 0.f : decay < kLeastDecay ? kLeastDecay : decay;    // fmaxf would hide a NaN
    b[i] = there ? p.beta_scale * sigmoid(raw_to_float(raw.b[i], p.gate_dtype)) : 0.f;
  }
  float sum = g[0] + g[1];
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const float before = __shfl_up_sync(0xffffffffu, sum, d);
    if (lane >= d) sum += before;
  }
  const float before = __shfl_up_sync(0xffffffffu, sum, 1), last = __shfl_sync(0xffffffffu, sum, 31);
  const float2 c = make_float2((lane == 0 ? 0.f : before) + g[0], sum);
  *reinterpret_cast<float2 *>(to.c + 2 * lane) = c;
  *reinterpret_cast<float2 *>(to.beta + 2 * lane) = make_float2(b[0], b[1]);
  *reinterpret_cast<float2 *>(to.before + 2 * lane) = make_float2(exp2_fast(c.x), exp2_fast(c.y));
  *reinterpret_cast<float2 *>(to.after + 2 * lane) = make_float2(exp2_fast(last - c.x), exp2_fast(last - c.y));
  if (lane == 0) to.decay = exp2_fast(last);
}

// The reciprocal norms of 16 rows of a tile, times `scale`, by a warp, each in one lane: the diagonal of the rows' product with
// themselves, whose two operands are the same registers.
template <typename T, int KK>
__device__ __forceinline__ void norms16(uint32_t rows, int count, bool l2norm, float eps, float scale, float *to, int lane) {
  float top[4] = {}, low[4] = {};
  const uint32_t lanes = lanes_by_row(lane);
#pragma unroll
  for (int k = 0; k < KK / 16; ++k) {
    uint32_t x[4];
    ptx::load_matrices(x, tile_at(rows, lanes, 0, k));
    ptx::mma16816<T>(top, x[0], x[1], x[2], x[3], x[0], x[2]);
    ptx::mma16816<T>(low, x[0], x[1], x[2], x[3], x[1], x[3]);
  }
  const int row = lane / 4;
  if (lane % 4 != row / 2) return;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float square = i == 0 ? (row % 2 ? top[1] : top[0]) : (row % 2 ? low[3] : low[2]);
    // Past the end zero, where with eps 0 the root would be infinite.
    to[row + 8 * i] = row + 8 * i >= count ? 0.f : l2norm ? rsqrtf(square + eps) * scale : scale;
  }
}

// The same for the keys of this warp's rows, from the diagonal of K K^T.
__device__ __forceinline__ void norms_of_diagonal(const float (&kk)[8][4], int count, bool l2norm, float eps, float *to, int warp,
                                                  int lane) {
  const int row = lane / 4;
  float square[2] = {};
#pragma unroll
  for (int w = 0; w < 4; ++w)
    if (warp == w) {
      square[0] = row % 2 ? kk[2 * w][1] : kk[2 * w][0];
      square[1] = row % 2 ? kk[2 * w + 1][3] : kk[2 * w + 1][2];
    }
  if (lane % 4 != row / 2) return;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int r = 16 * warp + row + 8 * i;
    to[r] = r >= count ? 0.f : l2norm ? rsqrtf(square[i] + eps) : 1.f;
  }
}

// Where the matrices of a chunk are made, and what is made there.
struct Matrices {
  union alignas(1024) {
    float l[kSquareFloats];
    uint8_t images[2 * kImageBytes];    // the inverse, the attention
  };
  Factors factors;
};

// A 16 x 16 block of an image: the registers of an A operand, at tile_at().
__device__ __forceinline__ void store_block(uint32_t at, const uint32_t (&x)[4], int lane) {
#if __CUDA_ARCH__ >= 900
  ptx::store_matrices(at, x);
#else
  // `at` is the address of a row for one of four matrices, as stmatrix has it: this thread's words lie in row lane / 4.
#pragma unroll
  for (int i = 0; i < 4; ++i) ptx::store_shared(__shfl_sync(0xffffffffu, at, 8 * i + lane / 4) + 4 * (lane % 4), x[i]);
#endif
}

// Rows and columns of the diagonal block of a warp: kk and qk of its left and right tiles.
template <typename T>
__device__ __forceinline__ void decay_diagonal(const float (&kl)[4], const float (&kr)[4], const float (&ql)[4],
                                               const float (&qr)[4], const TokenGates &g, const float (&c)[2],
                                               const float (&p)[2], const float (&b)[2], float *l, uint32_t (&left)[2],
                                               uint32_t (&right)[2], int first, int lane) {
  const int j = first + 2 * (lane % 4), above = 2 * (lane % 4) - lane / 4;    // the diagonal, by so many columns
  const float2 cl = *reinterpret_cast<const float2 *>(g.c + j), cr = *reinterpret_cast<const float2 *>(g.c + j + 8);
  const float2 nl = *reinterpret_cast<const float2 *>(g.k_norm + j), nr = *reinterpret_cast<const float2 *>(g.k_norm + j + 8);
  const float top[2] = {exp2_fast(c[0] - cl.x) * nl.x, exp2_fast(c[0] - cl.y) * nl.y};
  const float low[2] = {exp2_fast(c[1] - cl.x) * nl.x, exp2_fast(c[1] - cl.y) * nl.y};
  const float end[2] = {exp2_fast(c[1] - cr.x) * nr.x, exp2_fast(c[1] - cr.y) * nr.y};
  // Masked where the exponential may have overflowed.
  float x[3][2], y[3][2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    x[0][i] = above + i <= 0 ? ql[i] * (p[0] * top[i]) : 0.f;
    y[0][i] = above + i < 0 ? kl[i] * (b[0] * top[i]) : 0.f;
    x[1][i] = ql[2 + i] * (p[1] * low[i]);
    y[1][i] = detail::near_tf32(kl[2 + i] * (b[1] * low[i]));
    x[2][i] = above + i <= 0 ? qr[2 + i] * (p[1] * end[i]) : 0.f;
    y[2][i] = above + i < 0 ? kr[2 + i] * (b[1] * end[i]) : 0.f;
  }
  left[0] = pack2<T>(x[0][0], x[0][1]), left[1] = pack2<T>(x[1][0], x[1][1]);
  right[0] = 0, right[1] = pack2<T>(x[2][0], x[2][1]);
  float *to = l + (first + lane / 4) * kLd + j;
  *reinterpret_cast<float2 *>(to) = make_float2(y[0][0], y[0][1]);
  *reinterpret_cast<float2 *>(to + 8 * kLd) = make_float2(y[1][0], y[1][1]);
  *reinterpret_cast<float2 *>(to + 8 * kLd + 8) = make_float2(y[2][0], y[2][1]);
}

// From the raw products of this warp's 16 rows: L to `l`, and the attention, ready to be stored, zero right of the diagonal.
// Decays cannot overflow: left of the diagonal block they are split at its begin into two factors of at most one.
template <typename T>
__device__ __forceinline__ void decay_matrices(const float (&kk)[8][4], const float (&qk)[8][4], const TokenGates &g, float *l,
                                               uint32_t (&attention)[8][2], int warp, int lane) {
  const int row = 16 * warp + lane / 4, column = 2 * (lane % 4);
  const float border = warp > 0 ? g.c[16 * warp - 1] : 0.f;
  float c[2], p[2], b[2], far_p[2], far_b[2];    // of this thread's two rows
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    c[i] = g.c[row + 8 * i];
    p[i] = g.q_norm[row + 8 * i];
    b[i] = g.beta[row + 8 * i] * g.k_norm[row + 8 * i];
    const float decay = exp2_fast(c[i] - border);
    far_p[i] = p[i] * decay, far_b[i] = b[i] * decay;
  }
  // All warps go through what only the last one has: no branch, so that the tiles overlap.
#pragma unroll
  for (int t = 0; t < 6; ++t) {
    const bool there = t < 2 * warp;
    const float2 cj = *reinterpret_cast<const float2 *>(g.c + 8 * t + column);
    const float2 nj = *reinterpret_cast<const float2 *>(g.k_norm + 8 * t + column);
    const float f[2] = {there ? exp2_fast(border - cj.x) * nj.x : 0.f, there ? exp2_fast(border - cj.y) * nj.y : 0.f};
    float x[4], y[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      x[i] = qk[t][i] * (far_p[i / 2] * f[i % 2]);
      y[i] = detail::near_tf32(kk[t][i] * (far_b[i / 2] * f[i % 2]));
    }
    attention[t][0] = pack2<T>(x[0], x[1]);
    attention[t][1] = pack2<T>(x[2], x[3]);
    float *to = l + row * kLd + 8 * t + column;
    if (there) {
      *reinterpret_cast<float2 *>(to) = make_float2(y[0], y[1]);
      *reinterpret_cast<float2 *>(to + 8 * kLd) = make_float2(y[2], y[3]);
    }
  }
  attention[6][0] = attention[6][1] = attention[7][0] = attention[7][1] = 0;
#pragma unroll
  for (int w = 0; w < 4; ++w)
    if (warp == w)
      decay_diagonal<T>(kk[2 * w], kk[2 * w + 1], qk[2 * w], qk[2 * w + 1], g, c, p, b, l, attention[2 * w],
                        attention[2 * w + 1], 16 * w, lane);
}

// From the raw products of each warp's 16 rows to the images, by a warpgroup; `barrier` is one of the block's that nobody else
// uses meanwhile. Another warp may read the images after a barrier that follows.
template <typename T, bool ATTENTION>
__device__ __forceinline__ void make_images(const float (&kk)[8][4], const float (&qk)[8][4], const TokenGates &g, Matrices &m,
                                            int warp, int lane, int barrier) {
  uint32_t attention[8][2];
  decay_matrices<T>(kk, qk, g, m.l, attention, warp, lane);
  __syncwarp();
  InverseParts<T> parts;
  invert64<T>(m.l, g.beta, parts, warp, lane, barrier);
  ptx::group_barrier<128>(barrier);    // the images take the place of what they were made from
  const uint32_t inverse = ptx::shared_address(m.images), by_row = lanes_by_row(lane);
  store_block(tile_at(inverse, by_row, warp, warp), parts.diagonal, lane);
  const uint32_t zero[4] = {};
#pragma unroll
  for (int n = 1; n < 4; ++n)
    if (n > warp) store_block(tile_at(inverse, by_row, 0, n) + 2048 * warp, zero, lane);
  // Of a pair of 16 a warp has eight columns; of the pair of 32, 16 rows and 16 columns.
  const int half_row = warp / 2 * 32 + 16 + lane / 4;
  const uint32_t half = inverse + tile_offset(half_row, warp / 2 * 4 + warp % 2) + 4 * (lane % 4);
  ptx::store_shared(half, parts.half[0]);
  ptx::store_shared(half + 1024, parts.half[1]);
  store_block(tile_at(inverse, by_row, 0, warp % 2) + 2048 * (2 + warp / 2), parts.quarter, lane);
  if (ATTENTION)
#pragma unroll
    for (int t = 0; t < 4; ++t)
      store_block(tile_at(inverse + kImageBytes, by_row, 0, t) + 2048 * warp,
                  {attention[2 * t][0], attention[2 * t][1], attention[2 * t + 1][0], attention[2 * t + 1][1]}, lane);
}

__device__ __forceinline__ void token_factors(const TokenGates &g, Factors &to, int thread) {
  if (thread < kChunk) {
    to.read[thread] = g.before[thread] * g.k_norm[thread];
    to.out[thread] = g.before[thread] * g.q_norm[thread];
    to.write[thread] = g.after[thread] * g.k_norm[thread];
  }
  if (thread == kChunk) to.decay = g.decay;
}

}  // namespace prefill
}  // namespace gdn
