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
  float c[kChunk];            // running sum of the log2 decay
  float beta[kChunk];
  float before[kChunk];       // 2^c: what is left of the state before the chunk
  float after[kChunk];        // 2^(c of the last - c): what is left of the token after the chunk
  float since[kChunk];        // 2^(c - c of the last before its block of 16)
  float until[3][kChunk];     // 2^(c of token 16 w + 15 - c) up to that token, then 0: what is left of it after the block
  float k_norm[kChunk];       // reciprocal norms
  float q_norm[kChunk];       // times the scale
  float decay;                // 2^(c of the last)
  float unused[3];
};

__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Zero for infinity and infinite for what is subnormal, which sums of squares with an eps are not.
__device__ __forceinline__ float rsqrt_fast(float x) {
  float y;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
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

// log(1 + e^x) and 1 / (1 + e^-x) to a few ulp: through e^-|x|, and the logarithm as the series of an inverse tangent.
__device__ __forceinline__ float softplus_fast(float x) {
  const float t = exp2_fast(-1.44269504f * fabsf(x)), s = __fdividef(t, 2.f + t), ss = s * s;
  float y = fmaf(ss, 1.f / 15.f, 1.f / 13.f);
  y = fmaf(ss, y, 1.f / 11.f), y = fmaf(ss, y, 1.f / 9.f), y = fmaf(ss, y, 1.f / 7.f);
  y = fmaf(ss, y, 1.f / 5.f), y = fmaf(ss, y, 1.f / 3.f), y = fmaf(ss, y, 1.f);
  return fmaf(2.f * s, y, x > 0.f ? x : 0.f * x);    // 0 x: a NaN stays one
}
__device__ __forceinline__ float sigmoid_fast(float x) {
  const float t = exp2_fast(-1.44269504f * fabsf(x)), r = __fdividef(1.f, 1.f + t);
  return x >= 0.f ? r : t * r;
}

// `rate` is -exp(A_log) log2(e).
__device__ __forceinline__ void finish_gates(const gdn_rule_params &p, const RawGates &raw, float rate, float dt_bias, int count,
                                             int lane, TokenGates &to) {
  float g[2], b[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const bool there = 2 * lane + i < count;
    const float decay = rate * softplus_fast(raw_to_float(raw.a[i], p.gate_dtype) + dt_bias);
    g[i] = !there ? 0.f : decay < kLeastDecay ? kLeastDecay : decay;    // fmaxf would hide a NaN
    b[i] = there ? p.beta_scale * sigmoid_fast(raw_to_float(raw.b[i], p.gate_dtype)) : 0.f;
  }
  float sum = g[0] + g[1];
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const float before = __shfl_up_sync(0xffffffffu, sum, d);
    if (lane >= d) sum += before;
  }
  const float before = __shfl_up_sync(0xffffffffu, sum, 1), last = __shfl_sync(0xffffffffu, sum, 31);
  const float own = __shfl_sync(0xffffffffu, sum, lane / 8 * 8 - 1), border = lane < 8 ? 0.f : own;
  const float2 c = make_float2((lane == 0 ? 0.f : before) + g[0], sum);
  const auto store = [&](float *array, float x, float y) { *reinterpret_cast<float2 *>(array + 2 * lane) = make_float2(x, y); };
  store(to.c, c.x, c.y);
  store(to.beta, b[0], b[1]);
  store(to.before, exp2_fast(c.x), exp2_fast(c.y));
  store(to.after, exp2_fast(last - c.x), exp2_fast(last - c.y));
  store(to.since, exp2_fast(c.x - border), exp2_fast(c.y - border));
#pragma unroll
  for (int w = 0; w < 3; ++w) {
    const float end = __shfl_sync(0xffffffffu, sum, 8 * w + 7);
    const bool up_to = lane < 8 * w + 8;
    store(to.until[w], up_to ? exp2_fast(end - c.x) : 0.f, up_to ? exp2_fast(end - c.y) : 0.f);
  }
  if (lane == 0) to.decay = exp2_fast(last);
}

// The reciprocal norm of a row of a tile, times `scale`, by a thread: its pieces, all others being other threads' rows.
template <typename T, int KK>
__device__ __forceinline__ float row_norm(uint32_t tile, int row, bool l2norm, float eps, float scale) {
  float squares[4] = {};
#pragma unroll
  for (int piece = 0; piece < KK / 8; ++piece) {
    const uint4 x = ptx::load_shared(tile + tile_offset(row, piece));
    const uint32_t words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 pair = unpack2<T>(words[i]);
      squares[i] = fmaf(pair.x, pair.x, fmaf(pair.y, pair.y, squares[i]));
    }
  }
  return l2norm ? rsqrt_fast((squares[0] + squares[1]) + (squares[2] + squares[3]) + eps) * scale : scale;
}

// Those of this warp's 16 rows of a tile, times `scale`: on tensor cores, from the diagonal of the rows' products.
template <typename T, int KK>
__device__ __forceinline__ void norms_of_rows(uint32_t tile, int count, bool l2norm, float eps, float scale, float *to, int warp,
                                              int lane) {
  const uint32_t by_row = lanes_by_row(lane);
  float top[4] = {}, low[4] = {};
#pragma unroll
  for (int k = 0; k < KK / 16; ++k) {
    uint32_t a[4];
    ptx::load_matrices(a, tile_at(tile, by_row, 0, k) + 2048 * warp);
    ptx::mma16816<T>(top, a[0], a[1], a[2], a[3], a[0], a[2]);
    ptx::mma16816<T>(low, a[0], a[1], a[2], a[3], a[1], a[3]);
  }
  const int row = lane / 4;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float square = i == 0 ? (row % 2 ? top[1] : top[0]) : (row % 2 ? low[3] : low[2]);
    const int r = 16 * warp + row + 8 * i;
    const float norm = l2norm ? rsqrt_fast(square + eps) * scale : scale;
    if (lane % 4 == row / 2) to[r] = r >= count ? 0.f : norm;
  }
  __syncwarp();
}

// Those of the keys of this warp's rows, from the diagonal of K K^T.
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
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int r = 16 * warp + row + 8 * i;
    const float norm = l2norm ? rsqrt_fast(square[i] + eps) : 1.f;
    if (lane % 4 == row / 2) to[r] = r >= count ? 0.f : norm;
  }
}

// Where the images of a chunk are made.
struct Matrices {
  union alignas(1024) {
    uint8_t inverse[kImageBytes];
    float blocks[4][16 * kBlockLd];    // before that L's entries of each warp's diagonal block
  };
  uint8_t attention[kImageBytes];    // before that the f16 tile of L
  Factors factors;
};

// Decays cannot overflow: left of a warp's diagonal block they are split at its begin into two factors of at most one, and in
// it they are masked where the exponential may have.

// 2^(c_i - c_j) / |k_j| in the diagonal block of a warp: of its left tile rows 0 .. 7 and 8 .. 15, of its right tile the latter.
struct DiagonalDecays {
  float top[2], low[2], end[2];
};
__device__ __forceinline__ DiagonalDecays diagonal_decays(const TokenGates &g, int warp, int lane) {
  const int row = 16 * warp + lane / 4, column = 16 * warp + 2 * (lane % 4);
  const float c[2] = {g.c[row], g.c[row + 8]};
  const float2 cl = *reinterpret_cast<const float2 *>(g.c + column), cr = *reinterpret_cast<const float2 *>(g.c + column + 8);
  const float2 nl = *reinterpret_cast<const float2 *>(g.k_norm + column);
  const float2 nr = *reinterpret_cast<const float2 *>(g.k_norm + column + 8);
  return {{exp2_fast(c[0] - cl.x) * nl.x, exp2_fast(c[0] - cl.y) * nl.y},
          {exp2_fast(c[1] - cl.x) * nl.x, exp2_fast(c[1] - cl.y) * nl.y},
          {exp2_fast(c[1] - cr.x) * nr.x, exp2_fast(c[1] - cr.y) * nr.y}};
}

// The products of this warp's 16 rows, times a factor of each row and the decays, packed; `far` is the factor for columns left
// of the diagonal block, with what the row has decayed since its begin, and 0 where there are none. Tiles right of the
// diagonal are zero. All warps go through what only the last one has: no branch, so that the tiles overlap.
template <typename T>
__device__ __forceinline__ void decay_left(const float (&x)[8][4], const TokenGates &g, const float (&far)[2],
                                           uint32_t (&packed)[6][2], int warp, int lane) {
  const float *until = g.until[warp > 0 ? warp - 1 : 0] + 2 * (lane % 4), *norms = g.k_norm + 2 * (lane % 4);
#pragma unroll
  for (int t = 0; t < 6; ++t) {
    const float2 u = *reinterpret_cast<const float2 *>(until + 8 * t), n = *reinterpret_cast<const float2 *>(norms + 8 * t);
    const float f[2] = {u.x * n.x, u.y * n.y};
    packed[t][0] = pack2<T>(x[t][0] * (far[0] * f[0]), x[t][1] * (far[0] * f[1]));
    packed[t][1] = pack2<T>(x[t][2] * (far[1] * f[0]), x[t][3] * (far[1] * f[1]));
  }
}

// L: left of the diagonal block to the f16 tile `l`, that of the block to `block`.
__device__ __forceinline__ void decay_keys(const float (&kk)[8][4], const TokenGates &g, const DiagonalDecays &d, uint32_t l,
                                           float *block, int warp, int lane) {
  const int row = 16 * warp + lane / 4;
  float b[2], far[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    b[i] = g.beta[row + 8 * i] * g.k_norm[row + 8 * i];
    far[i] = warp > 0 ? b[i] * g.since[row + 8 * i] : 0.f;
  }
  uint32_t packed[6][2];
  decay_left<__half>(kk, g, far, packed, warp, lane);
  const uint32_t by_row = lanes_by_row(lane);
#pragma unroll
  for (int t = 0; t < 3; ++t)
    if (t < warp)
      store_block(tile_at(l, by_row, 0, t) + 2048 * warp,
                  {packed[2 * t][0], packed[2 * t][1], packed[2 * t + 1][0], packed[2 * t + 1][1]}, lane);
  const int pair = 2 * (lane % 4), above = pair - lane / 4;    // the diagonal, by so many columns
  float *to = block + lane / 4 * kBlockLd + pair;
#pragma unroll
  for (int w = 0; w < 4; ++w)
    if (warp == w) {
      const float(&left)[4] = kk[2 * w], (&right)[4] = kk[2 * w + 1];
      float y[3][2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        y[0][i] = above + i < 0 ? left[i] * (b[0] * d.top[i]) : 0.f;
        y[1][i] = left[2 + i] * (b[1] * d.low[i]);
        y[2][i] = above + i < 0 ? right[2 + i] * (b[1] * d.end[i]) : 0.f;
      }
      *reinterpret_cast<float2 *>(to) = make_float2(y[0][0], y[0][1]);
      *reinterpret_cast<float2 *>(to + 8 * kBlockLd) = make_float2(y[1][0], y[1][1]);
      *reinterpret_cast<float2 *>(to + 8 * kBlockLd + 8) = make_float2(y[2][0], y[2][1]);
    }
}

// The image of the attention, by each warp its 16 rows.
template <typename T>
__device__ __forceinline__ void decay_queries(const float (&qk)[8][4], const TokenGates &g, const DiagonalDecays &d,
                                              uint32_t image, int warp, int lane) {
  const int row = 16 * warp + lane / 4;
  float p[2], far[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    p[i] = g.q_norm[row + 8 * i];
    far[i] = warp > 0 ? p[i] * g.since[row + 8 * i] : 0.f;
  }
  uint32_t packed[6][2];
  decay_left<T>(qk, g, far, packed, warp, lane);
  const uint32_t rows = image + 2048 * warp, by_row = lanes_by_row(lane);
#pragma unroll
  for (int t = 0; t < 3; ++t)
    store_block(tile_at(rows, by_row, 0, t),
                {packed[2 * t][0], packed[2 * t][1], packed[2 * t + 1][0], packed[2 * t + 1][1]}, lane);
  if (warp < 3) store_block(tile_at(rows, by_row, 0, 3), {0, 0, 0, 0}, lane);
  __syncwarp();    // the diagonal block takes the place of zeros
  const int above = 2 * (lane % 4) - lane / 4;
#pragma unroll
  for (int w = 0; w < 4; ++w)
    if (warp == w) {
      const float(&left)[4] = qk[2 * w], (&right)[4] = qk[2 * w + 1];
      float x[3][2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        x[0][i] = above + i <= 0 ? left[i] * (p[0] * d.top[i]) : 0.f;
        x[1][i] = left[2 + i] * (p[1] * d.low[i]);
        x[2][i] = above + i <= 0 ? right[2 + i] * (p[1] * d.end[i]) : 0.f;
      }
      store_block(tile_at(rows, by_row, 0, w),
                  {pack2<T>(x[0][0], x[0][1]), pack2<T>(x[1][0], x[1][1]), 0, pack2<T>(x[2][0], x[2][1])}, lane);
    }
}

// Those that need the keys alone, by 65 threads of a warpgroup, and those of the queries, by 64.
__device__ __forceinline__ void key_factors(const TokenGates &g, Factors &to, int thread) {
  if (thread < kChunk) {
    const float k = g.k_norm[thread];
    to.read[factor_at(thread)] = g.before[thread] * k;
    to.write[factor_at(thread)] = g.after[thread] * k;
  }
  if (thread == kChunk) to.decay = g.decay;
}

__device__ __forceinline__ void query_factors(const TokenGates &g, Factors &to, int thread) {
  if (thread < kChunk) to.out[factor_at(thread)] = g.before[thread] * g.q_norm[thread];
}

}  // namespace prefill
}  // namespace gdn
