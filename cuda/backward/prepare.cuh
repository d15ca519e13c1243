// What needs neither states nor their gradients: a Record for every chunk and value head, from raw q, k and ready gates.
//
// A block owns a chunk of a key head, a warpgroup for every second of its value heads (for all, when there is one).
#pragma once

#include "../chunk/prepare.cuh"
#include "products.cuh"
#include "records.cuh"

namespace gdn {
namespace backward {

template <int GROUPS> struct PrepareShared {
  alignas(1024) uint8_t k[2 * kTileBytes];
  uint8_t q[2 * kTileBytes];
  struct Group {
    chunk::Matrices matrices;
    chunk::TokenGates gates;
    WalkFactors walk;
    TokenFactors tokens;
    float squares[kChunk];    // of the keys, as the rule has them
  } groups[GROUPS];
};

// Log decay and beta of tokens 2 lane and 2 lane + 1 of a chunk.
struct ReadyGates {
  float decay[2], beta[2];
};
__device__ __forceinline__ ReadyGates load_gates(const gdn_rule_backward_params &p, int n, int64_t first, int head, int count, int lane) {
  const float *a = heads_at<float>(p.common.a, n, first, head), *b = heads_at<float>(p.common.b, n, first, head);
  ReadyGates y;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int t = 2 * lane + i;
    y.decay[i] = t < count ? a[t * p.common.a.token_stride] : 0.f, y.beta[i] = t < count ? b[t * p.common.b.token_stride] : 0.f;
  }
  return y;
}

// What follows from them, by a warp. `weight` becomes the column's factor of L, for now one.
template <typename T>
__device__ __forceinline__ void finish_gates(const ReadyGates &from, int lane, chunk::TokenGates &to, TokenFactors &tokens) {
  float g[2], beta[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float decay = from.decay[i] * 1.44269504f;
    g[i] = decay < chunk::kLeastDecay ? chunk::kLeastDecay : decay;
    beta[i] = from.beta[i];
    if (fabsf(beta[i]) < kLeastBeta<T>) beta[i] = copysignf(kLeastBeta<T>, beta[i]);    // a NaN stays one
  }
  float sum = g[0] + g[1];
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const float before = __shfl_up_sync(0xffffffffu, sum, d);
    if (lane >= d) sum += before;
  }
  const float before = __shfl_up_sync(0xffffffffu, sum, 1), last = __shfl_sync(0xffffffffu, sum, 31);
  const float own = __shfl_sync(0xffffffffu, sum, lane / 8 * 8 - 1), border = lane < 8 ? 0.f : own;
  const float c[2] = {(lane == 0 ? 0.f : before) + g[0], sum};
  float end[3];
#pragma unroll
  for (int w = 0; w < 3; ++w) end[w] = __shfl_sync(0xffffffffu, sum, 8 * w + 7);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int t = 2 * lane + i;
    to.c[t] = tokens.c[t] = c[i];
    tokens.beta[t] = beta[i];
    to.before[t] = chunk::exp2_fast(c[i]);
    to.after[t] = chunk::exp2_fast(last - c[i]);
    to.since[t] = chunk::exp2_fast(c[i] - border);
#pragma unroll
    for (int w = 0; w < 3; ++w) to.until[w][t] = lane < 8 * w + 8 ? chunk::exp2_fast(end[w] - c[i]) : 0.f;
  }
  if (lane == 0) to.decay = chunk::exp2_fast(last);
  if (lane < kUpdateScales) tokens.updates[lane] = 0.f;    // where there are value rows the walk writes others
}

// Reciprocal norms of the keys of this warp's rows, from the diagonal of K K^T: of columns alone, of rows times beta.
__device__ __forceinline__ void key_norms(const chunk::OwnBlock &kk, int count, bool l2norm, float eps, chunk::TokenGates &g,
                                          TokenFactors &tokens, float *squares, int warp, int lane) {
  const int row = lane / 4;
  const float square[2] = {row % 2 ? kk.left[1] : kk.left[0], row % 2 ? kk.right[1] : kk.right[0]};
  if (lane % 4 != row / 2) return;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int t = 16 * warp + row + 8 * i;
    const float norm = t >= count ? 0.f : l2norm ? chunk::rsqrt_fast(square[i] + eps) : 1.f;
    tokens.k_norm[t] = g.weight[t] = norm;
    squares[t] = square[i] * norm * norm;
    g.k_norm[t] = norm * tokens.beta[t];
    if (warp < 3)
#pragma unroll
      for (int w = 0; w < 3; ++w) g.until[w][t] *= norm;
  }
}

// A token multiplies a state by e^g (I - beta k k^T), which makes no row longer than by e^g max(1, |1 - beta k k|).
__device__ __forceinline__ void walk_factors(const chunk::TokenGates &g, const TokenFactors &tokens, const float *squares, float scale,
                                             WalkFactors &to, int t) {
  const int at = chunk::factor_at(t);
  const float before = g.before[t], norm = tokens.k_norm[t];
  to.read[at] = before * norm;
  to.beta[at] = tokens.beta[t];
  to.unbeta[at] = 1.f / tokens.beta[t];
  to.write[at] = g.after[t] * norm;
  to.query[at] = before * tokens.q_norm[t] * scale;
  to.key[at] = -before * norm;
  if (t == 0) to.decay = g.decay, to.walked = 0;
  const float size = fabsf(1.f - tokens.beta[t] * squares[t]);
  float longer = 0.f;
  if (__any_sync(0xffffffffu, !(size <= 1.f))) {    // rare; a NaN stays one
    longer = size <= 1.f ? 0.f : log2f(size);
#pragma unroll
    for (int d = 1; d < 32; d *= 2) longer += __shfl_xor_sync(0xffffffffu, longer, d);
  }
  if (t % 32 == 0) to.left[t / 32] = longer + tokens.c[t + 31] - (t == 0 ? 0.f : tokens.c[t - 1]);
}

template <typename T, bool WGMMA, int GROUPS>
__global__ void __launch_bounds__(128 * GROUPS, 4 / GROUPS)
prepare_kernel(const __grid_constant__ gdn_rule_backward_params p, const Span span, Record *records, uint32_t *taken) {
  if constexpr (WGMMA && !ptx::kSm90a) return;
  using Shared = PrepareShared<GROUPS>;
  extern __shared__ __align__(1024) uint8_t raw_shared[];
  Shared &s = *reinterpret_cast<Shared *>(raw_shared);
  ptx::grid_dependency_wait();
  if (blockIdx.x == 0 && threadIdx.x == 0) *taken = 0;

  // The block's chunk.
  const int group = threadIdx.x / 128, thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
  const int key_head = static_cast<int>(blockIdx.x % static_cast<unsigned>(p.common.num_k_heads));
  const int64_t place = blockIdx.x / static_cast<unsigned>(p.common.num_k_heads);
  const Chunk at = chunk_at(p.common.seqs, span, place);
  if (!at.there) return;
  const int count = min(kChunk, at.seq.count - at.index * kChunk);
  const int64_t first = at.seq.first + static_cast<int64_t>(at.index) * kChunk;
  const int each = p.common.num_v_heads / p.common.num_k_heads, barrier = chunk::kGroupBarrier + group;

  // The gates are asked for before the tiles, behind which they would wait.
  const bool has_gates = group < each && warp == 0;
  ReadyGates gates = {};
  if (has_gates) gates = load_gates(p, at.n, first, key_head * each + group, count, lane);
  const uint32_t k_tile = ptx::shared_address(s.k), q_tile = ptx::shared_address(s.q);
  chunk::copy_tile<T, kKeys / 8, 128 * GROUPS>(k_tile, heads_at<T>(p.k, at.n, first, key_head), p.k.token_stride, count, p.common.head_k,
                                               threadIdx.x);
  chunk::copy_tile<T, kKeys / 8, 128 * GROUPS>(q_tile, heads_at<T>(p.q, at.n, first, key_head), p.q.token_stride, count, p.common.head_k,
                                               threadIdx.x);
  ptx::copy_async_commit();
  typename Shared::Group &mine = s.groups[group];
  chunk::Matrices &m = mine.matrices;
  if (has_gates) finish_gates<T>(gates, lane, mine.gates, mine.tokens);
  ptx::copy_async_wait<0>();
  if (WGMMA) ptx::fence_async();
  __syncthreads();

  for (int h = group; h < each; h += GROUPS) {
    const int head = key_head * each + h;
    if (h != group) {
      ptx::group_barrier<128>(barrier);    // the gates before have been read
      if (warp == 0) finish_gates<T>(load_gates(p, at.n, first, head, count, lane), lane, mine.gates, mine.tokens);
    }
    // Products and norms.
    float kk[8][4] = {}, qk[8][4] = {};
    if constexpr (WGMMA) {
      multiply_tiles<T, WGMMA, false, false, 8>(kk, k_tile, k_tile, false, warp, lane);
      multiply_tiles<T, WGMMA, false, false, 8>(qk, q_tile, k_tile, false, warp, lane);
    } else {
      chunk::triangular_products<T, kKeys>(kk, qk, k_tile, q_tile, warp, lane);
    }
    if (thread < kChunk)
      mine.tokens.q_norm[thread] = thread < count ? chunk::row_norm<T, kKeys>(q_tile, thread, p.common.l2norm, p.common.l2_eps, 1.f) : 0.f;
    wait<WGMMA>(kk), wait<WGMMA>(qk);
    if (h != group) ptx::group_barrier<128>(barrier);    // warp 0's gates are there
    const uint32_t inverse = ptx::shared_address(m.inverse), l = ptx::shared_address(m.attention);
    const chunk::OwnBlock own = chunk::own_block(kk, warp);
    key_norms(own, count, p.common.l2norm, p.common.l2_eps, mine.gates, mine.tokens, mine.squares, warp, lane);
    ptx::group_barrier<128>(barrier);
    // L and its inverse.
    chunk::RowDecays decays = chunk::row_decays(mine.gates, warp, lane);
    uint32_t left[2][4];
    chunk::decay_keys(kk, own, mine.gates, decays, l, m.blocks[warp], left, warp, lane);
    chunk::invert64<__half, false>(l, m.blocks[warp], left, inverse, warp, lane, {barrier}, [&] {
      if (warp < 2) walk_factors(mine.gates, mine.tokens, mine.squares, p.common.scale, mine.walk, 32 * warp + lane);
    });
    // The attention.
    const float *norms = mine.tokens.q_norm + 16 * warp + lane / 4;
    const float scales[2] = {norms[0] * p.common.scale, norms[8] * p.common.scale};
    ptx::group_barrier<128>(barrier);    // the attention takes the place of L
    chunk::decay_queries<__half>(qk, mine.gates, decays, scales, l, warp, lane);
    ptx::group_barrier<128>(barrier);
    // The record.
    Record &to = records[place * p.common.num_v_heads + head];
    const auto store = [&](void *there, const void *from, int bytes) {
#pragma unroll
      for (int i = thread; i < bytes / 16; i += 128) static_cast<uint4 *>(there)[i] = static_cast<const uint4 *>(from)[i];
    };
    store(&to.inverse, &m.inverse, 2 * kImageBytes);
    store(&to.walk, &mine.walk, sizeof(WalkFactors) + sizeof(TokenFactors));
  }
}

}  // namespace backward
}  // namespace gdn
