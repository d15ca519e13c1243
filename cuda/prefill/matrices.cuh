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

// From the raw products of this warp's 16 rows: L to `l`, and the attention, ready to be stored. What is right of a warp's
// diagonal block is zero in the one and left alone in the other. Decays are masked before they could overflow: left of
// the diagonal block they are split at its begin into two factors of at most one.
template <typename T>
__device__ __forceinline__ void decay_matrices(const float (&kk)[8][4], const float (&qk)[8][4], const TokenGates &g, float *l,
                                               uint32_t (&attention)[8][2], int warp, int lane) {
  const int row = 16 * warp + lane / 4, column = 2 * (lane % 4);
  const float border = warp > 0 ? g.c[16 * warp - 1] : 0.f;
  float c[2], p[2], b[2], decay[2];    // of this thread's two rows
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    c[i] = g.c[row + 8 * i];
    p[i] = g.q_norm[row + 8 * i];
    b[i] = g.beta[row + 8 * i] * g.k_norm[row + 8 * i];
    decay[i] = exp2_fast(c[i] - border);
  }
#pragma unroll
  for (int t = 0; t < 8; ++t) {
    attention[t][0] = attention[t][1] = 0;
    if (t > 2 * warp + 1) continue;
    const int j = 8 * t + column;
    const float2 cj = *reinterpret_cast<const float2 *>(g.c + j), kj = *reinterpret_cast<const float2 *>(g.k_norm + j);
    float x[4], y[4];
    if (t < 2 * warp) {
      const float f[2] = {exp2_fast(border - cj.x) * kj.x, exp2_fast(border - cj.y) * kj.y};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float both = decay[i / 2] * f[i % 2];
        x[i] = qk[t][i] * (p[i / 2] * both);
        y[i] = detail::near_tf32(kk[t][i] * (b[i / 2] * both));
      }
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int above = j + i % 2 - row - i / 2 * 8;    // the diagonal, by so many
        const float both = exp2_fast(c[i / 2] - (i % 2 ? cj.y : cj.x)) * (i % 2 ? kj.y : kj.x);
        x[i] = above <= 0 ? qk[t][i] * (p[i / 2] * both) : 0.f;
        y[i] = above < 0 ? kk[t][i] * (b[i / 2] * both) : 0.f;
      }
    }
    attention[t][0] = pack2<T>(x[0], x[1]);
    attention[t][1] = pack2<T>(x[2], x[3]);
    float *to = l + row * kLd + j;
    *reinterpret_cast<float2 *>(to) = make_float2(y[0], y[1]);
    *reinterpret_cast<float2 *>(to + 8 * kLd) = make_float2(y[2], y[3]);
  }
}

// The four pieces of 16 bytes that a thread has of the image of (I + L)^-1 diag(beta), whose first factor stands at `l`.
template <typename T> __device__ __forceinline__ void inverse_pieces(uint4 (&image)[4], const float *l, const float *beta, int thread) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = thread / 8 + 16 * i, piece = thread % 8 ^ row % 8;
    image[i] = make_uint4(0, 0, 0, 0);
    if (piece / 2 > i) continue;    // right of the diagonal blocks
    uint32_t words[4];
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      const float4 x = *reinterpret_cast<const float4 *>(l + row * kLd + 8 * piece + 4 * m);
      const float4 b = *reinterpret_cast<const float4 *>(beta + 8 * piece + 4 * m);
      words[2 * m] = pack2<T>(x.x * b.x, x.y * b.y);
      words[2 * m + 1] = pack2<T>(x.z * b.z, x.w * b.w);
    }
    image[i] = make_uint4(words[0], words[1], words[2], words[3]);
  }
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
