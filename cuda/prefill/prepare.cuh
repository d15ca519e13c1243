// Everything of the chunk form that does not need the state: for every chunk and value head the inverse, the attention
// within the chunk and the factors of its tokens, from raw q, k and gates (layout.cuh).
//
// A block owns a chunk of a key head and all its value heads. Two warpgroups: one forms K K^T, the other Q K^T, a warp 16
// rows of it; then L and the attention of two value heads at a time, and each inverts one of them.
#pragma once

#include "../common/math.cuh"
#include "inverse.cuh"
#include "layout.cuh"

namespace gdn {
namespace prefill {

constexpr int kPrepareThreads = 256;

template <int KK> struct PrepareShared {
  union {
    struct {
      uint8_t k[KK / 64 * kTileBytes], q[KK / 64 * kTileBytes];
    } tiles;
    float l[2][kSquareFloats];
  };
  uint8_t attention[kImageBytes];
  float c[2][kChunk], beta[2][kChunk];      // of two value heads
  float k_norm[kChunk], q_norm[kChunk];     // reciprocal norms; that of q times the scale
};

// acc[16, 64] = rows of `a` times those of `b`, as far as the diagonal, for the 16 rows of this warp; `squares` of its rows.
template <typename T, int KK>
__device__ __forceinline__ void gram(float (&acc)[8][4], float (&squares)[2], uint32_t a, uint32_t b, int warp, int lane) {
  a += 2048 * warp;
  const uint32_t a_lanes = lanes_by_row(lane), b_lanes = lanes_by_piece(lane);
#pragma unroll
  for (int k = 0; k < KK / 16; ++k) {
    uint32_t x[4];
    ptx::load_matrices(x, tile_at(a, a_lanes, 0, k));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 pair = unpack2<T>(x[i]);
      squares[i % 2] = fmaf(pair.x, pair.x, fmaf(pair.y, pair.y, squares[i % 2]));
    }
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      if (n > warp) continue;
      uint32_t y[4];
      ptx::load_matrices(y, tile_at(b, b_lanes, n, k));
      ptx::mma16816<T>(acc[2 * n], x[0], x[1], x[2], x[3], y[0], y[1]);
      ptx::mma16816<T>(acc[2 * n + 1], x[0], x[1], x[2], x[3], y[2], y[3]);
    }
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    squares[i] += __shfl_xor_sync(0xffffffffu, squares[i], 1);
    squares[i] += __shfl_xor_sync(0xffffffffu, squares[i], 2);
  }
}

// The running sum of the log decay and beta of a chunk's tokens, by a warp: a lane has tokens 2 lane and 2 lane + 1.
// Tokens past the end decay nothing and add nothing.
// NOTES: e^-110 is zero in f32, as all that is less; the bound keeps the sum small, whose rounding is an error of the decays
// that are differences of it, and finite.
constexpr float kLeastDecay = -110.f;
struct Gates {
  uint32_t a[2], b[2];
  float a_log, dt_bias;
};
__device__ __forceinline__ Gates load_gates(const gdn_rule_params &p, int n, int64_t first, int count, int head, int lane) {
  Gates g = {};
  g.a_log = p.a_log[head], g.dt_bias = p.dt_bias[head];
#pragma unroll
  for (int i = 0; i < 2; ++i)
    if (2 * lane + i < count) {
      g.a[i] = raw_load_any(p.a.ptr, heads_offset(p.a, n, first + 2 * lane + i, head), p.gate_dtype);
      g.b[i] = raw_load_any(p.b.ptr, heads_offset(p.b, n, first + 2 * lane + i, head), p.gate_dtype);
    }
  return g;
}
__device__ __forceinline__ void finish_gates(const gdn_rule_params &p, const Gates &raw, int count, int lane, float *c, float *beta) {
  float g[2], b[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const bool there = 2 * lane + i < count;
    g[i] = there ? log_decay(raw_to_float(raw.a[i], p.gate_dtype), raw.dt_bias, -expf(raw.a_log)) : 0.f;
    g[i] = g[i] < kLeastDecay ? kLeastDecay : g[i];
    b[i] = there ? p.beta_scale * sigmoid(raw_to_float(raw.b[i], p.gate_dtype)) : 0.f;
  }
  float sum = g[0] + g[1];
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const float before = __shfl_up_sync(0xffffffffu, sum, d);
    if (lane >= d) sum += before;
  }
  // Through the lane before and not sum - g: an infinite decay is none of the tokens before it.
  float before = __shfl_up_sync(0xffffffffu, sum, 1);
  before = lane == 0 ? 0.f : before;
  *reinterpret_cast<float2 *>(c + 2 * lane) = make_float2(before + g[0], sum);
  *reinterpret_cast<float2 *>(beta + 2 * lane) = make_float2(b[0], b[1]);
}

// e^(c_i - c_j) for j <= i, else 0: the difference is masked before the exponential, which would overflow above the diagonal.
__device__ __forceinline__ float decay_between(float ci, float cj, bool keep) { return keep ? __expf(ci - cj) : 0.f; }

template <typename T, int KK>
__global__ void __launch_bounds__(kPrepareThreads, 2)
prepare_kernel(const __grid_constant__ gdn_rule_params p, Record *records) {
  extern __shared__ __align__(1024) uint8_t raw_shared[];
  PrepareShared<KK> &s = *reinterpret_cast<PrepareShared<KK> *>(raw_shared);
  ptx::grid_dependency_launch();

  const int thread = threadIdx.x, group = thread / 128, warp = thread / 32 % 4, lane = thread % 32;
  const int key_head = static_cast<int>(blockIdx.x % static_cast<unsigned>(p.num_k_heads));
  const int64_t chunk = blockIdx.x / static_cast<unsigned>(p.num_k_heads);
  const int n = sequence_of_chunk(p.seqs, chunk);
  const Tokens seq = tokens_of(p.seqs, n);
  const int64_t t0 = (chunk - first_chunk(p.seqs, n)) * kChunk;
  if (t0 >= seq.count) return;
  const int count = static_cast<int>(min(static_cast<int64_t>(kChunk), seq.count - t0));
  const int64_t first = seq.first + t0;

  const uint32_t k_tile = ptx::shared_address(s.tiles.k), q_tile = ptx::shared_address(s.tiles.q);
  copy_tile<T, KK / 8, 256>(k_tile, heads_at<T>(p.k, n, first, key_head), p.k.token_stride, count, p.head_k, thread);
  copy_tile<T, KK / 8, 256>(q_tile, heads_at<T>(p.q, n, first, key_head), p.q.token_stride, count, p.head_k, thread);
  ptx::copy_async_commit();
  const int each = p.num_v_heads / p.num_k_heads;
  if (warp == 0 && group < each) {
    const Gates g = load_gates(p, n, first, count, key_head * each + group, lane);
    finish_gates(p, g, count, lane, s.c[group], s.beta[group]);
  }
  ptx::copy_async_wait<0>();
  __syncthreads();

  float acc[8][4] = {}, squares[2] = {};
  gram<T, KK>(acc, squares, group == 0 ? k_tile : q_tile, k_tile, warp, lane);
  const int row = 16 * warp + lane / 4, column = 2 * (lane % 4);
  float inverse_norm[2];    // of this thread's two rows
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    // Zero past the end, where with eps 0 the root would be infinite.
    inverse_norm[i] = row + 8 * i >= count ? 0.f : (p.l2norm ? rsqrtf(squares[i] + p.l2_eps) : 1.f) * (group == 0 ? 1.f : p.scale);
    if (lane % 4 == 0) (group == 0 ? s.k_norm : s.q_norm)[row + 8 * i] = inverse_norm[i];
  }
  __syncthreads();    // the tiles have been read, and the norms are there
#pragma unroll
  for (int t = 0; t < 8; ++t) {
    const float2 k = *reinterpret_cast<const float2 *>(s.k_norm + 8 * t + column);
#pragma unroll
    for (int i = 0; i < 4; ++i) acc[t][i] *= inverse_norm[i / 2] * (i % 2 ? k.y : k.x);
  }

  for (int pair = 0; pair < each; pair += 2) {
    if (pair > 0) {
      __syncthreads();
      if (warp == 0 && pair + group < each) {
        const Gates g = load_gates(p, n, first, count, key_head * each + pair + group, lane);
        finish_gates(p, g, count, lane, s.c[group], s.beta[group]);
      }
      __syncthreads();
    }
    const int heads = min(2, each - pair);
    Record *record = records + chunk * p.num_v_heads + key_head * each + pair;
    for (int h = 0; h < heads; ++h) {
      float ci[2], scale[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        ci[i] = s.c[h][row + 8 * i];
        scale[i] = group == 0 ? s.beta[h][row + 8 * i] : 1.f;
      }
      float x[8][4];
#pragma unroll
      for (int t = 0; t < 8; ++t) {
        if (t > 2 * warp + 1) continue;
        const int j = 8 * t + column;
        const float2 cj = *reinterpret_cast<const float2 *>(s.c[h] + j);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          // Below the diagonal of L, on it too for the attention.
          const bool keep = group == 0 ? row + i / 2 * 8 > j + i % 2 : row + i / 2 * 8 >= j + i % 2;
          const float decay = decay_between(ci[i / 2], i % 2 ? cj.y : cj.x, keep);
          x[t][i] = keep ? acc[t][i] * scale[i / 2] * decay : 0.f;
        }
      }
      if (group == 0) {
#pragma unroll
        for (int t = 0; t < 8; ++t) {
          if (t > 2 * warp + 1) continue;
          float *to = s.l[h] + row * kLd + 8 * t + column;
          *reinterpret_cast<float2 *>(to) = make_float2(x[t][0], x[t][1]);
          *reinterpret_cast<float2 *>(to + 8 * kLd) = make_float2(x[t][2], x[t][3]);
        }
      } else {
        const uint32_t image = ptx::shared_address(s.attention);
#pragma unroll
        for (int t = 0; t < 8; ++t) {
          const bool zero = t > 2 * warp + 1;
          const uint32_t to = image + tile_offset(row, t) + 2 * column;    // row and row + 8 have the same swizzle
          ptx::store_shared(to, zero ? 0u : pack2<T>(x[t][0], x[t][1]));
          ptx::store_shared(to + 8 * 128, zero ? 0u : pack2<T>(x[t][2], x[t][3]));
        }
        __syncwarp();
        // A warp's 16 rows are its own, one after the other.
        const uint4 *from = reinterpret_cast<const uint4 *>(s.attention) + 128 * warp;
        uint4 *to = reinterpret_cast<uint4 *>(record[h].attention) + 128 * warp;
#pragma unroll
        for (int i = 0; i < 4; ++i) to[lane + 32 * i] = from[lane + 32 * i];
        __syncwarp();
      }
    }
    __syncthreads();    // both L are there
    if (group < heads) {
      const float *c = s.c[group], *beta = s.beta[group];
      Record &to = record[group];
      const int t = thread % 128;
      if (t < kChunk) {
        const float last = c[kChunk - 1], decay = __expf(c[t]);
        to.factors.read[t] = decay * s.k_norm[t];
        to.factors.out[t] = decay * s.q_norm[t];
        to.factors.write[t] = __expf(last - c[t]) * s.k_norm[t];
        if (t == 0) to.factors.decay = __expf(last);
      }
      float *l = s.l[group];
      invert64(l, warp, lane, 1 + group);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int at = t + 128 * i, image_row = at / 8, piece = (at % 8) ^ (image_row % 8);
        float x[8];
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          const float4 v = *reinterpret_cast<const float4 *>(l + image_row * kLd + 8 * piece + 4 * m);
          const float4 b = *reinterpret_cast<const float4 *>(beta + 8 * piece + 4 * m);
          x[4 * m] = v.x * b.x, x[4 * m + 1] = v.y * b.y, x[4 * m + 2] = v.z * b.z, x[4 * m + 3] = v.w * b.w;
        }
        uint32_t words[4];
#pragma unroll
        for (int m = 0; m < 4; ++m)
          words[m] = pack2<T>(8 * piece + 2 * m <= image_row ? x[2 * m] : 0.f,
                              8 * piece + 2 * m + 1 <= image_row ? x[2 * m + 1] : 0.f);
        reinterpret_cast<uint4 *>(to.inverse)[at] = make_uint4(words[0], words[1], words[2], words[3]);
      }
    }
  }
}

}  // namespace prefill
}  // namespace gdn
