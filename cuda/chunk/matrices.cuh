// The two matrices of a chunk and a value head, by a warpgroup: from the products K K^T and Q K^T, the gates and the norms to
// the images that the scan multiplies with.
#pragma once

#include "../common/math.cuh"
#include "inverse.cuh"
#include "layout.cuh"

namespace gdn {
namespace chunk {

// Of the tokens of a chunk; those past the end of the sequence decay nothing, and have weights and norms of zero.
struct TokenGates {
  float c[kChunk];            // running sum of the log2 decay
  float weight[kChunk];       // beta; then, by norms_of_diagonal(), times the reciprocal norm: the factor of all that k_j writes
  float before[kChunk];       // 2^c: the decay of the state before the chunk, up to the token
  float after[kChunk];        // 2^(c of the last - c): the decay of the token, up to the end of the chunk
  float since[kChunk];        // 2^(c - c of the last before its block of 16)
  float until[3][kChunk];     // 2^(c of token 16 w + 15 - c) up to that token, then 0: its decay up to the end of the block;
                              // then, by norms_of_diagonal(), times the weight
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

// Where those of a chunk are, the same for all lanes, with the bytes to the next token.
struct GatesAt {
  const uint8_t *a, *b;
  int64_t a_step, b_step;
  __device__ __forceinline__ void next() { a += kChunk * a_step, b += kChunk * b_step; }
};
__device__ __forceinline__ GatesAt gates_at(const gdn_rule_params &p, int n, int64_t first, int head) {
  const int shift = p.common.gate_dtype == GDN_F32 ? 2 : 1;
  return {static_cast<const uint8_t *>(p.common.a.ptr) + (heads_offset(p.common.a, n, first, head) << shift),
          static_cast<const uint8_t *>(p.common.b.ptr) + (heads_offset(p.common.b, n, first, head) << shift),
          p.common.a.token_stride << shift, p.common.b.token_stride << shift};
}
__device__ __forceinline__ RawGates load_gates(const gdn_rule_params &p, const GatesAt &at, int count, int lane) {
  RawGates g = {};
  const uint8_t *a = at.a + 2 * lane * at.a_step, *b = at.b + 2 * lane * at.b_step;
#pragma unroll
  for (int i = 0; i < 2; ++i)
    if (2 * lane + i < count) {
      g.a[i] = raw_load_any(a + i * at.a_step, 0, p.common.gate_dtype);
      g.b[i] = raw_load_any(b + i * at.b_step, 0, p.common.gate_dtype);
    }
  return g;
}

// The factor of finish_gates() and dt_bias of a head, which ready gates have not.
__device__ __forceinline__ float2 gate_factors(const gdn_rule_params &p, int head) {
  constexpr float kLog2e = 1.44269504f;
  if (p.gates == GDN_GATES_READY) return make_float2(kLog2e, 0.f);
  return make_float2(-expf(p.common.a_log[head]) * kLog2e, static_cast<const float *>(p.common.dt_bias)[head]);
}

// log(1 + e^x) and 1 / (1 + e^-x) to a few ulp: through e^-|x|, and the logarithm as the series of an inverse tangent.
__device__ __forceinline__ float softplus_fast(float x) {
  const float t = exp2_fast(-1.44269504f * fabsf(x)), s = __fdividef(t, 2.f + t), ss = s * s;
  float y = fmaf(ss, 1.f / 15.f, 1.f / 13.f);
  y = fmaf(ss, y, 1.f / 11.f), y = fmaf(ss, y, 1.f / 9.f), y = fmaf(ss, y, 1.f / 7.f);
  y = fmaf(ss, y, 1.f / 5.f), y = fmaf(ss, y, 1.f / 3.f), y = fmaf(ss, y, 1.f);
  return fmaf(2.f * s, y, x < 0.f ? 0.f : x);    // a NaN stays one
}
__device__ __forceinline__ float sigmoid_fast(float x) {
  const float t = exp2_fast(-1.44269504f * fabsf(x)), r = __fdividef(1.f, 1.f + t);
  return x >= 0.f ? r : t * r;
}

// log2 of a token's decay, and its beta, from raw gates. `rate` is -exp(A_log) log2(e), or log2(e) itself where the gates are ready.
__device__ __forceinline__ float decay_of(const gdn_rule_params &p, uint32_t a, float rate, float dt_bias) {
  const float x = raw_to_float(a, p.common.gate_dtype);
  const float decay = rate * (p.gates == GDN_GATES_READY ? x : softplus_fast(x + dt_bias));
  return decay < kLeastDecay ? kLeastDecay : decay;    // fmaxf would hide a NaN
}
__device__ __forceinline__ float beta_of(const gdn_rule_params &p, uint32_t b) {
  const float y = raw_to_float(b, p.common.gate_dtype);
  return p.gates == GDN_GATES_READY ? y : p.common.beta_scale * sigmoid_fast(y);
}

// taken() may load the next gates.
//
// NOTES: loops are not unrolled, here and in the norms: these warps have time, and the code of all warps of a block must fit the
// instruction cache.
template <typename F>
__device__ __forceinline__ void finish_gates(const gdn_rule_params &p, RawGates raw, float rate, float dt_bias, int count,
                                             int lane, TokenGates &to, const F &taken) {
  float g[2], b[2];
#pragma unroll 1
  for (int i = 0; i < 2; ++i) {
    const bool there = 2 * lane + i < count;
    const float decay = decay_of(p, raw.a[0], rate, dt_bias), beta = beta_of(p, raw.b[0]);
    g[0] = g[1], g[1] = there ? decay : 0.f;
    b[0] = b[1], b[1] = there ? beta : 0.f;
    raw.a[0] = raw.a[1], raw.b[0] = raw.b[1];
  }
  taken();
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
  store(to.weight, b[0], b[1]);
  store(to.before, exp2_fast(c.x), exp2_fast(c.y));
  store(to.after, exp2_fast(last - c.x), exp2_fast(last - c.y));
  store(to.since, exp2_fast(c.x - border), exp2_fast(c.y - border));
#pragma unroll 1
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

// Those of a warp's 32 rows of a tile, times `scale`, a row a lane. Not on tensor cores, where small products wait for wgmma's.
template <typename T, int KK>
__device__ __forceinline__ void norms_of_rows(uint32_t tile, int count, bool l2norm, float eps, float scale, float *to, int first,
                                              int lane) {
  const int row = first + lane;
  float norm = 0.f;
  if (row < count) {    // past the end makers clear meanwhile
    norm = scale;
    if (l2norm) {
      const uint32_t begin = tile + tile_offset(row, 0);
      float squares[4] = {};
#pragma unroll 1
      for (uint32_t at = 0; at < KK / 64 * 2; ++at)
#pragma unroll
        for (uint32_t piece = 0; piece < 4; ++piece) {
          const uint4 x = ptx::load_shared((begin ^ (at % 2 * 64 + piece * 16)) + at / 2 * kTileBytes);
          const uint32_t words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const float2 pair = unpack2<T>(words[i]);
            squares[i] = fmaf(pair.x, pair.x, fmaf(pair.y, pair.y, squares[i]));
          }
        }
      norm *= rsqrt_fast((squares[0] + squares[1]) + (squares[2] + squares[3]) + eps);
    }
  }
  to[row] = norm;
}

// A warp's 16 x 16 block on the diagonal of a product, what is up to the diagonal of it: its left tile, of its right one the lower
// rows.
struct OwnBlock {
  float left[4], right[2];
};
__device__ __forceinline__ OwnBlock own_block(const float (&x)[8][4], int warp) {
  OwnBlock y = {{x[6][0], x[6][1], x[6][2], x[6][3]}, {x[7][2], x[7][3]}};
  if (warp < 3) {    // a branch: warp 3 has most to do
    const auto pick = [&](int tile, int i) { return warp == 0 ? x[tile][i] : warp == 1 ? x[2 + tile][i] : x[4 + tile][i]; };
    y = {{pick(0, 0), pick(0, 1), pick(0, 2), pick(0, 3)}, {pick(1, 2), pick(1, 3)}};
    asm volatile("" : "+f"(y.left[0]), "+f"(y.left[1]), "+f"(y.left[2]), "+f"(y.left[3]), "+f"(y.right[0]), "+f"(y.right[1]));
  }
  return y;
}

// Reciprocal norms of the keys of this warp's rows, from the diagonal of K K^T, their weights, and `until` times these.
__device__ __forceinline__ void norms_of_diagonal(const OwnBlock &kk, int count, bool l2norm, float eps, TokenGates &g, int warp,
                                                  int lane) {
  const int row = lane / 4;
  const float square[2] = {row % 2 ? kk.left[1] : kk.left[0], row % 2 ? kk.right[1] : kk.right[0]};
  if (lane % 4 != row / 2) return;
  const int first = 16 * warp + row;
  float weight[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float norm = l2norm ? rsqrt_fast(square[i] + eps) : 1.f;
    if (first + 8 * i >= count) norm = 0.f;
    g.k_norm[first + 8 * i] = norm;
    weight[i] = g.weight[first + 8 * i] * norm;
    g.weight[first + 8 * i] = weight[i];
  }
  if (warp == 3) return;
#pragma unroll
  for (int w = 0; w < 3; ++w) {    // zero already where w is below
    const float until[2] = {g.until[w][first], g.until[w][first + 8]};
    g.until[w][first] = until[0] * weight[0], g.until[w][first + 8] = until[1] * weight[1];
  }
}

// Where the images of a chunk are made.
struct Matrices {
  union alignas(1024) {
    uint8_t inverse[kImageBytes];
    float blocks[4][kBlockFloats];    // before that L's entries of each warp's diagonal block
  };
  uint8_t attention[kImageBytes];    // before that an f16 tile of blocks of L and of the inverse
  Factors factors;
};

// Decays cannot overflow: left of a warp's diagonal block they are split at its begin into two factors of at most one, and in
// it they are masked where the exponential may have.

// 2^(c_i - c_j) in the diagonal block of a warp: of its left tile rows 0 .. 7 and 8 .. 15, of its right tile the latter.
struct RowDecays {
  float top[2], low[2], end[2];
};
__device__ __forceinline__ RowDecays row_decays(const TokenGates &g, int warp, int lane) {
  const int row = 16 * warp + lane / 4, column = 16 * warp + 2 * (lane % 4);
  const float c[2] = {g.c[row], g.c[row + 8]};
  const float2 cl = *reinterpret_cast<const float2 *>(g.c + column), cr = *reinterpret_cast<const float2 *>(g.c + column + 8);
  return {{exp2_fast(c[0] - cl.x), exp2_fast(c[0] - cl.y)},
          {exp2_fast(c[1] - cl.x), exp2_fast(c[1] - cl.y)},
          {exp2_fast(c[1] - cr.x), exp2_fast(c[1] - cr.y)}};
}

// Those of the diagonal block times beta_j / |k_j|.
__device__ __forceinline__ void scale_by_weights(RowDecays &d, const TokenGates &g, int warp, int lane) {
  const float *weights = g.weight + 16 * warp + 2 * (lane % 4);
  const float2 l = *reinterpret_cast<const float2 *>(weights), r = *reinterpret_cast<const float2 *>(weights + 8);
  d.top[0] *= l.x, d.top[1] *= l.y, d.low[0] *= l.x, d.low[1] *= l.y, d.end[0] *= r.x, d.end[1] *= r.y;
}

// The products of this warp's 16 rows and 16 columns from block `t`, left of the diagonal block, times a factor of each row and the
// decays, packed; `far` is the factor of a row with what it has decayed since the begin of the diagonal block, `until` what is
// left there of this lane's columns.
template <typename T>
__device__ __forceinline__ void decay_left(uint32_t (&packed)[4], const float (&x)[8][4], int t, const float *until,
                                           const float (&far)[2]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int tile = 2 * t + i;
    const float2 f = *reinterpret_cast<const float2 *>(until + 8 * tile);
    packed[2 * i] = pack2_here<T>(x[tile][0] * (far[0] * f.x), x[tile][1] * (far[0] * f.y));
    packed[2 * i + 1] = pack2_here<T>(x[tile][2] * (far[1] * f.x), x[tile][3] * (far[1] * f.y));
  }
}

// L as invert64() wants it; what goes to `block` above the diagonal is anything. The decays are scaled by weights after it.
__device__ __forceinline__ void decay_keys(const float (&kk)[8][4], const OwnBlock &own, const TokenGates &g, RowDecays &d, uint32_t l,
                                           float *block, uint32_t (&left)[2][4], int warp, int lane) {
  const int row = 16 * warp + lane / 4;
  const float norm[2] = {g.k_norm[row], g.k_norm[row + 8]};
  scale_by_weights(d, g, warp, lane);
  float *to = block + lane / 4 * kBlockLd + 2 * (lane % 4);
  *reinterpret_cast<float2 *>(to) = make_float2(own.left[0] * (norm[0] * d.top[0]), own.left[1] * (norm[0] * d.top[1]));
  *reinterpret_cast<float2 *>(to + 8 * kBlockLd) =
      make_float2(own.left[2] * (norm[1] * d.low[0]), own.left[3] * (norm[1] * d.low[1]));
  *reinterpret_cast<float2 *>(to + 8 * kBlockLd + 8) =
      make_float2(own.right[0] * (norm[1] * d.end[0]), own.right[1] * (norm[1] * d.end[1]));
  if (warp > 0) {
    const float *until = g.until[warp - 1] + 2 * (lane % 4);
    const float far[2] = {norm[0] * g.since[row], norm[1] * g.since[row + 8]};
    uint32_t x[4];
    if (warp > 1) {
#pragma unroll
      for (int t = 0; t < 2; ++t) decay_left<__half>(left[t], kk, t, until, far);
      if (warp == 3) {
        decay_left<__half>(x, kk, 2, until, far);
        store_block(tile_at(l, lanes_by_row(lane), 3, 2), x, lane);
      }
    } else {
      decay_left<__half>(x, kk, 0, until, far);
      store_block(tile_at(l, lanes_by_row(lane), 1, 0), x, lane);
      set_to_zero(left[0]), set_to_zero(left[1]);
    }
  } else {
    set_to_zero(left[0]), set_to_zero(left[1]);
  }
  __syncwarp();
}

// This warp's rows of the image of the attention, from decays scaled by weights, and norms of q.
template <typename T>
__device__ __forceinline__ void decay_queries(const float (&qk)[8][4], const TokenGates &g, const RowDecays &d, const float (&p)[2],
                                              uint32_t image, int warp, int lane) {
  const uint32_t by_row = lanes_by_row(lane), rows = image + 2048 * warp;
  const OwnBlock own = own_block(qk, warp);
  const int above = 2 * (lane % 4) - lane / 4;    // the diagonal, by so many columns
  float y[3][2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    y[0][i] = above + i <= 0 ? own.left[i] * (p[0] * d.top[i]) : 0.f;
    y[1][i] = own.left[2 + i] * (p[1] * d.low[i]);
    y[2][i] = above + i <= 0 ? own.right[i] * (p[1] * d.end[i]) : 0.f;
  }
  store_block(tile_at(rows, by_row, 0, warp),
              {pack2<T>(y[0][0], y[0][1]), pack2<T>(y[1][0], y[1][1]), 0, pack2<T>(y[2][0], y[2][1])}, lane);
  const float *since = g.since + 16 * warp + lane / 4, *until = g.until[warp > 0 ? warp - 1 : 0] + 2 * (lane % 4);
  const float far[2] = {p[0] * since[0], p[1] * since[8]};
  const uint32_t zero[4] = {};
  uint32_t x[4];
  if (warp > 1) {
#pragma unroll
    for (int t = 0; t < 2; ++t) {
      decay_left<T>(x, qk, t, until, far);
      store_block(tile_at(rows, by_row, 0, t), x, lane);
    }
    if (warp == 3) {
      decay_left<T>(x, qk, 2, until, far);
      store_block(tile_at(rows, by_row, 0, 2), x, lane);
    } else {
      store_block(tile_at(rows, by_row, 0, 3), zero, lane);
    }
  } else {
    if (warp == 1) {
      decay_left<T>(x, qk, 0, until, far);
      store_block(tile_at(rows, by_row, 0, 0), x, lane);
    } else {
      store_block(tile_at(rows, by_row, 0, 1), zero, lane);
    }
    store_block(tile_at(rows, by_row, 0, 2), zero, lane);
    store_block(tile_at(rows, by_row, 0, 3), zero, lane);
  }
}

// Factors that need the keys alone, and those of the queries, by warps 0 and 1.
__device__ __forceinline__ void key_factors(const TokenGates &g, Factors &to, int warp, int lane) {
  if (warp > 1) return;
  const int token = 32 * warp + lane, at = factor_at(lane) + 8 * warp;    // factor_at(token)
  to.read[at] = g.before[token] * g.k_norm[token];
  to.write[at] = g.after[token] * g.weight[token];
  if (token == 0) to.decay = g.decay;
}

__device__ __forceinline__ void query_factors(const TokenGates &g, Factors &to, int warp, int lane) {
  if (warp > 1) return;
  const int token = 32 * warp + lane;
  to.out[factor_at(lane) + 8 * warp] = g.before[token] * g.q_norm[token];
}

}  // namespace chunk
}  // namespace gdn
