// The parallel part of the backward pass: from states and their gradients to the gradients of q, k, beta and the log decay.
//
// A block owns a chunk of a key head and takes its value heads one after the other, so that the sums over them stay in registers. Of
// its two warpgroups each has 64 columns of what has head_k columns; of matrices of tokens the first makes the attention's, the
// second L's. Accumulators of dQ and dK hold them divided by the norms, so that q and k are raw everywhere.
#pragma once

#include "products.cuh"
#include "records.cuh"

namespace gdn {
namespace backward {

struct GradientShared {
  alignas(1024) uint8_t q[2 * kTileBytes];
  uint8_t k[2 * kTileBytes];
  uint8_t d_out[2 * kTileBytes];
  uint8_t update[2 * kTileBytes];
  uint8_t d_v[2 * kTileBytes];
  uint8_t stage[2 * kTileBytes];       // 64 value rows of S or dS; then the two matrices
  TokenFactors tokens;
  float later[2][kChunk], earlier[2][kChunk];    // sums that log decays get from later and from earlier tokens, by warpgroup
  float states[8];                     // S dS, by warp
};
static_assert(sizeof(GradientShared) <= kLeastShared, "a shape for every card");

// The sum over a row of x times the 16-bit tile, by rows lane / 4 and 8 further of the warp's.
template <typename T>
__device__ __forceinline__ float2 row_products(const float (&x)[8][4], uint32_t tile, int warp, int lane) {
  float2 sum = make_float2(0.f, 0.f);
#pragma unroll
  for (int t = 0; t < 8; ++t) {
    const uint32_t at = tile + 2048 * warp + chunk::tile_offset(lane / 4, t) + 4 * (lane % 4);
    uint32_t top, low;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(top) : "r"(at) : "memory");
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(low) : "r"(at + 1024) : "memory");
    const float2 a = chunk::unpack2<T>(top), b = chunk::unpack2<T>(low);
    sum.x = fmaf(x[t][0], a.x, fmaf(x[t][1], a.y, sum.x));
    sum.y = fmaf(x[t][2], b.x, fmaf(x[t][3], b.y, sum.y));
  }
  return make_float2(group_sum<4>(sum.x), group_sum<4>(sum.y));
}

// to += x with a factor a row.
__device__ __forceinline__ void add_rows(float (&to)[8][4], const float (&x)[8][4], const float (&factor)[2]) {
#pragma unroll
  for (int t = 0; t < 8; ++t)
#pragma unroll
    for (int c = 0; c < 4; ++c) to[t][c] = fmaf(factor[c / 2], x[t][c], to[t][c]);
}

template <typename T> __device__ __forceinline__ float dot8(const uint4 &a, const uint4 &b) {
  const uint32_t x[4] = {a.x, a.y, a.z, a.w}, y[4] = {b.x, b.y, b.z, b.w};
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 u = chunk::unpack2<T>(x[i]), v = chunk::unpack2<T>(y[i]);
    sum = fmaf(u.x, v.x, fmaf(u.y, v.y, sum));
  }
  return sum;
}

// The thread, its warpgroup, and its warp in that, read at this place: what depends on them is computed in each part again, where ptxas
// would keep all of it through the loop over heads, in registers that it does not have.
struct Here {
  int thread, group, warp, lane, row;
  __device__ __forceinline__ Here() {
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    thread &= 255;
    group = thread / 128, warp = thread % 128 / 32, lane = thread % 32, row = 16 * warp + lane / 4;
  }
  __device__ __forceinline__ uint32_t own_half(const void *x) const { return ptx::shared_address(x) + group * kTileBytes; }
};

// A block's work, its parts as functions.
template <typename T, bool WGMMA> struct Gradients {
  const gdn_rule_backward_params &p;
  const Buffers &buffers;
  GradientShared &shared;
  const Chunk at;
  const int64_t place, first;
  const int count, key_head, v_tiles;

  __device__ __forceinline__ static uint32_t tile(const void *x) { return ptx::shared_address(x); }

  __device__ __forceinline__ void load_rows_of(void *to, const gdn_heads &x, int head, int size) const {
    const Here me;
    chunk::copy_tile<T, kKeys / 8, 256>(tile(to), heads_at<T>(x, at.n, first, head), x.token_stride, count, size, me.thread);
  }
  __device__ __forceinline__ const uint8_t *image(const uint8_t *images, int head, int v_tile) const {
    return images + ((place * p.common.num_v_heads + head) * v_tiles + v_tile) * kStateBytes;
  }
  __device__ __forceinline__ void load_stage(const uint8_t *images, int head, int v_tile) const {
    const Here me;
    chunk::copy_bytes<kStateBytes, 256>(tile(shared.stage), image(images, head, v_tile), me.thread);
    ptx::copy_async_commit();
  }
  __device__ __forceinline__ void loaded() const {
    ptx::copy_async_wait<0>();
    ptx::fence_async();
    __syncthreads();
  }

  // All of a value head but the states.
  __device__ __forceinline__ void load_head(int head) const {
    const Here me;
    const int64_t index = place * p.common.num_v_heads + head;
    load_rows_of(shared.d_out, p.d_o, head, p.common.head_v);
    load_rows_of(shared.d_v, p.d_v, head, p.common.head_v);
    for (int t = 0; t < v_tiles; ++t)
      chunk::copy_bytes<kTileBytes, 256>(tile(shared.update) + t * kTileBytes, buffers.updates + (index * v_tiles + t) * kTileBytes, me.thread);
    chunk::copy_bytes<sizeof(TokenFactors), 256>(tile(&shared.tokens), &buffers.records[index].tokens, me.thread);
  }

  // d beta = dV U / beta^2.
  __device__ __forceinline__ void finish_beta(int head) const {
    const Here me;
#pragma unroll 2
    for (int i = 0; i < 4; ++i) {
      const int token = me.thread / 16 + 16 * i;
      const uint32_t offset = chunk::tile_offset(token, me.thread % 16);
      const float sum = group_sum<16>(dot8<T>(ptx::load_shared(tile(shared.d_v) + offset), ptx::load_shared(tile(shared.update) + offset)));
      const float beta = shared.tokens.beta[token];
      if (me.thread % 16 == 0 && token < count)
        *out_heads_at<float>(p.d_beta, at.n, first + token, head) = __fdividef(__fdividef(sum, beta), beta);
    }
  }

  // x += rows of a tile times 64 value rows in the stage.
  __device__ __forceinline__ void add_product(float (&x)[8][4], const void *rows, int v_tile, bool add) const {
    const Here me;
    multiply_tiles<T, WGMMA, false, true, 4>(x, tile(rows) + v_tile * kTileBytes, me.own_half(shared.stage), add, me.warp, me.lane);
  }

  // S dS of the 64 value rows of S in the stage.
  __device__ __forceinline__ float states_product(int head, int v_tile) const {
    const Here me;
    const uint8_t *d = image(buffers.gradients, head, v_tile);
    float sum = 0.f;
#pragma unroll 1
    for (int i = 0; i < kStateBytes / 16 / 256; ++i) {
      const int offset = 16 * (me.thread + 256 * i);
      sum += dot8<T>(ptx::load_shared(tile(shared.stage) + offset), *reinterpret_cast<const uint4 *>(d + offset));
    }
    return sum;
  }

  // What reads states: dQ += query dO S, dK += write U dS - read dV S.
  __device__ __forceinline__ void add_states(float (&d_q)[8][4], float (&d_k)[8][4], int head) const {
    const Here me;
    const TokenFactors &f = shared.tokens;
    float before[2], after[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      before[i] = chunk::exp2_fast(f.c[me.row + 8 * i]);
      after[i] = chunk::exp2_fast(f.c[kChunk - 1] - f.c[me.row + 8 * i]);
    }
    const auto both = [&](const float2 &x, const float (&factor)[2], float *to, bool add) {
      if (me.lane % 4 != 0) return;
      to[me.row] = (add ? to[me.row] : 0.f) + x.x * factor[0];
      to[me.row + 8] = (add ? to[me.row + 8] : 0.f) + x.y * factor[1];
    };
    float x[8][4], factor[2], product = 0.f;
    // dO S
    for (int t = 0; t < v_tiles; ++t) {
      if (t > 0) __syncthreads(), load_stage(buffers.states, head, t), loaded();
      product += states_product(head, t);
      add_product(x, shared.d_out, t, t > 0);
    }
    product = group_sum(product);
    if (me.lane == 0) shared.states[4 * me.group + me.warp] = product;
#pragma unroll
    for (int i = 0; i < 2; ++i) factor[i] = before[i] * f.q_norm[me.row + 8 * i] * p.common.scale;
    both(row_products<T>(x, me.own_half(shared.q), me.warp, me.lane), factor, shared.later[me.group], false);
    add_rows(d_q, x, factor);
    // dV S, the last rows first: they are in the stage
    for (int t = v_tiles - 1; t >= 0; --t) {
      if (t < v_tiles - 1) __syncthreads(), load_stage(buffers.states, head, t), loaded();
      add_product(x, shared.d_v, t, t < v_tiles - 1);
    }
    __syncthreads();
    load_stage(buffers.gradients, head, 0);
    const float2 keys = row_products<T>(x, me.own_half(shared.k), me.warp, me.lane);
#pragma unroll
    for (int i = 0; i < 2; ++i) factor[i] = -before[i] * f.k_norm[me.row + 8 * i];
    both(keys, factor, shared.later[me.group], true);
    add_rows(d_k, x, factor);
    // U dS
    for (int t = 0; t < v_tiles; ++t) {
      if (t > 0) __syncthreads(), load_stage(buffers.gradients, head, t);
      loaded();
      add_product(x, shared.update, t, t > 0);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) factor[i] = after[i] * f.k_norm[me.row + 8 * i];
    both(row_products<T>(x, me.own_half(shared.k), me.warp, me.lane), factor, shared.earlier[me.group], false);
    add_rows(d_k, x, factor);
  }

  // This warpgroup's matrix of tokens: scale dAtt D / (|q| |k|), or M / (|k| |k|), to `image`; and for each token t the sum of what
  // rows from t on have left of t, times the products of q and k or of k with itself: to `to`, the warp's.
  __device__ __forceinline__ void make_matrix(uint32_t attention, uint32_t lower) const {
    const Here me;
    const uint32_t image = me.group == 0 ? attention : lower;
    const TokenFactors &f = shared.tokens;
    const uint32_t rows = tile(me.group == 0 ? shared.d_out : shared.d_v), raw = tile(me.group == 0 ? shared.q : shared.k);
    const float *norms = me.group == 0 ? f.q_norm : f.k_norm;
    const uint32_t by_row = chunk::lanes_by_row(me.lane);
    float c[2], factor[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      c[i] = f.c[me.row + 8 * i];
      factor[i] = norms[me.row + 8 * i] * (me.group == 0 ? p.common.scale : -1.f);
    }
    float left[2] = {0.f, 0.f};    // sums of what is left of a column
    float2 kept;
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
      float x[4][4], y[4][4];
      multiply_tiles<T, WGMMA, false, false, 8>(x, rows, tile(shared.update) + half * 4096, false, me.warp, me.lane);
      multiply_tiles<T, WGMMA, false, false, 8>(y, raw, tile(shared.k) + half * 4096, false, me.warp, me.lane);
#pragma unroll
      for (int t = 0; t < 4; ++t) {
        const int column = 32 * half + 8 * t + 2 * (me.lane % 4);
        const float2 ck = *reinterpret_cast<const float2 *>(f.c + column), nk = *reinterpret_cast<const float2 *>(f.k_norm + column);
        float products[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int r = me.row + i / 2 * 8, j = column + i % 2;
          const float norm = i % 2 ? nk.y : nk.x, distance = c[i / 2] - (i % 2 ? ck.y : ck.x);
          const bool inside = me.group == 0 ? j <= r : j < r;
          x[t][i] = inside ? x[t][i] * (chunk::exp2_fast(distance) * factor[i / 2] * norm) : 0.f;
          products[i] = j < r ? x[t][i] * y[t][i] : 0.f;
        }
        // Sums left of both columns, in the rows from them on, over the warp's rows.
        float sums[2] = {0.f, 0.f};
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float pair = products[2 * i] + products[2 * i + 1];
          float sum = pair;
#pragma unroll
          for (int d = 1; d < 4; d *= 2) {
            const float before = __shfl_up_sync(0xffffffffu, sum, d, 4);
            if (me.lane % 4 >= d) sum += before;
          }
          float before = __shfl_up_sync(0xffffffffu, sum, 1, 4);
          before = left[i] + (me.lane % 4 == 0 ? 0.f : before);
          left[i] += __shfl_sync(0xffffffffu, sum, 3, 4);
          const int r = me.row + 8 * i;
          if (column <= r) sums[0] += before;
          if (column + 1 <= r) sums[1] += before + products[2 * i];
        }
#pragma unroll
        for (int d = 4; d < 32; d *= 2)
#pragma unroll
          for (int i = 0; i < 2; ++i) sums[i] += __shfl_xor_sync(0xffffffffu, sums[i], d);
        if (me.lane / 4 == 4 * half + t) kept = make_float2(sums[0], sums[1]);
      }
      uint32_t packed[2][4];
      chunk::to_operand<T, true>(packed, x);
#pragma unroll
      for (int k = 0; k < 2; ++k) chunk::store_block(chunk::tile_at(image + 2048 * me.warp, by_row, 0, 2 * half + k), packed[k], me.lane);
    }
    ptx::group_barrier<128>(1 + me.group);    // no other warp reads the rows any more
    *reinterpret_cast<float2 *>(inner_sums(me.group, me.warp) + 2 * me.lane) = kept;
  }

  // dQ += P K, dK += P^T Q + (M + M^T) K.
  __device__ __forceinline__ void add_matrices(float (&d_q)[8][4], float (&d_k)[8][4], uint32_t attention, uint32_t lower) const {
    const Here me;
    const auto add = [&](float(&x)[8][4], auto columns, uint32_t matrix, const void *rows) {
      multiply_tiles<T, WGMMA, decltype(columns)::value, true, 4>(x, matrix, me.own_half(rows), true, me.warp, me.lane);
    };
    add(d_q, std::false_type(), attention, shared.k);
    add(d_k, std::true_type(), attention, shared.q);
    add(d_k, std::false_type(), lower, shared.k);
    add(d_k, std::true_type(), lower, shared.k);
  }

  // The gradient of the log decay, by a warp.
  __device__ __forceinline__ void finish_decays(int head) const {
    const Here me;
    if (me.thread >= 32) return;
    const TokenFactors &f = shared.tokens;
    float states = 0.f;
#pragma unroll
    for (int w = 0; w < 8; ++w) states += shared.states[w];
    states *= chunk::exp2_fast(f.c[kChunk - 1]);
    float later[2], earlier[2], inner[2] = {0.f, 0.f};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int t = 2 * me.lane + i;
      later[i] = shared.later[0][t] + shared.later[1][t], earlier[i] = shared.earlier[0][t] + shared.earlier[1][t];
#pragma unroll
      for (int w = 0; w < 4; ++w) inner[i] += inner_sums(0, w)[t] + inner_sums(1, w)[t];
    }
    // From the last token on, and up to the token before.
    float from = later[0] + later[1], up_to = earlier[0] + earlier[1];
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      const float next = __shfl_down_sync(0xffffffffu, from, d), before = __shfl_up_sync(0xffffffffu, up_to, d);
      if (me.lane + d < 32) from += next;
      if (me.lane >= d) up_to += before;
    }
    float after = __shfl_down_sync(0xffffffffu, from, 1), before = __shfl_up_sync(0xffffffffu, up_to, 1);
    if (me.lane == 31) after = 0.f;
    if (me.lane == 0) before = 0.f;
    const float decay[2] = {from + before + inner[0] + states, (later[1] + after) + (before + earlier[0]) + inner[1] + states};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int t = 2 * me.lane + i;
      if (t < count) *out_heads_at<float>(p.d_log_decay, at.n, first + t, head) = decay[i];
    }
  }

  // Of a warp, where rows of dO or dV were, which only its warpgroup has read since.
  __device__ __forceinline__ float *inner_sums(int group, int warp) const {
    return reinterpret_cast<float *>((group == 0 ? shared.d_out : shared.d_v) + 2048 * warp);
  }

  // From the sums over heads to the gradient of raw rows, in the place of these.
  __device__ __forceinline__ void finish_rows(float (&x)[8][4], uint8_t *raw, const float *norms, float (&sums)[2][kChunk],
                                              const gdn_heads &to) const {
    const Here me;
    if (p.common.l2norm) {
      const float2 own = row_products<T>(x, me.own_half(raw), me.warp, me.lane);
      if (me.lane % 4 == 0) sums[me.group][me.row] = own.x, sums[me.group][me.row + 8] = own.y;
    }
    __syncthreads();    // all products with raw rows are done
    float factor[2] = {0.f, 0.f};
    if (p.common.l2norm)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float norm = norms[me.row + 8 * i];
        factor[i] = -(sums[0][me.row + 8 * i] + sums[1][me.row + 8 * i]) * norm * norm;
      }
    const uint32_t rows = me.own_half(raw) + 2048 * me.warp, by_row = chunk::lanes_by_row(me.lane);
    uint32_t y[4][4];
    load_rows(y, me.own_half(raw), 0, me.warp, me.lane);
#pragma unroll
    for (int k = 0; k < 4; ++k)
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const float2 r = chunk::unpack2<T>(y[k][c]);
        const float(&pair)[4] = x[2 * k + c / 2];
        y[k][c] = chunk::pack2<T>(fmaf(factor[c % 2], r.x, pair[c % 2 * 2]), fmaf(factor[c % 2], r.y, pair[c % 2 * 2 + 1]));
      }
    __syncwarp();
#pragma unroll
    for (int k = 0; k < 4; ++k) chunk::store_block(chunk::tile_at(rows, by_row, 0, k), y[k], me.lane);
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int r = me.lane / 8 + 4 * i, piece = me.lane % 8, token = 16 * me.warp + r, column = 64 * me.group + 8 * piece;
      if (token < count && column < p.common.head_k)
        *reinterpret_cast<uint4 *>(out_heads_at<T>(to, at.n, first + token, key_head) + column) =
            ptx::load_shared(rows + chunk::tile_offset(r, piece));
    }
  }
};

template <typename T, bool WGMMA>
__global__ void __launch_bounds__(256, WGMMA ? 2 : 1)
gradients_kernel(const __grid_constant__ gdn_rule_backward_params p, const __grid_constant__ Buffers buffers, const Span span, int v_tiles) {
  if constexpr (WGMMA && !ptx::kSm90a) return;
  extern __shared__ __align__(1024) uint8_t raw_shared[];
  GradientShared &s = *reinterpret_cast<GradientShared *>(raw_shared);
  ptx::grid_dependency_wait();
  const int key_head = static_cast<int>(blockIdx.x % static_cast<unsigned>(p.common.num_k_heads));
  const int64_t place = blockIdx.x / static_cast<unsigned>(p.common.num_k_heads);
  const Chunk at = chunk_at(p.common.seqs, span, place);
  if (!at.there) return;
  const Gradients<T, WGMMA> g = {p, buffers, s, at, place, at.seq.first + static_cast<int64_t>(at.index) * kChunk,
                                 min(kChunk, at.seq.count - at.index * kChunk), key_head, v_tiles};
  g.load_rows_of(s.q, p.q, key_head, p.common.head_k);
  g.load_rows_of(s.k, p.k, key_head, p.common.head_k);
  if (v_tiles == 1)    // what has no value rows is zero in products over them
    for (int i = threadIdx.x; i < kTileBytes / 4; i += 256) reinterpret_cast<uint32_t *>(s.update + kTileBytes)[i] = 0;
  const uint32_t attention = ptx::shared_address(s.stage), lower = attention + kTileBytes;
  const int each = p.common.num_v_heads / p.common.num_k_heads;
  float d_q[8][4] = {}, d_k[8][4] = {};
  for (int h = 0; h < each; ++h) {
    const int head = key_head * each + h;
    g.load_head(head);
    g.load_stage(buffers.states, head, 0);
    g.loaded();
    g.finish_beta(head);
    g.add_states(d_q, d_k, head);
    __syncthreads();    // the matrices take the place of dS
    g.make_matrix(attention, lower);
    ptx::fence_async();
    __syncthreads();
    g.finish_decays(head);
    g.add_matrices(d_q, d_k, attention, lower);
    __syncthreads();    // the next head goes where this one was
  }
  g.finish_rows(d_q, s.q, s.tokens.q_norm, s.later, p.d_q);
  g.finish_rows(d_k, s.k, s.tokens.k_norm, s.earlier, p.d_k);
}

}  // namespace backward
}  // namespace gdn
