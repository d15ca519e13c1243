// The part of the chunk form for sm_80 that does not need the state: a Record for every chunk and value head, from raw q, k
// and gates.
//
// A block owns a chunk of a key head, a warpgroup for every second of its value heads (for all, when there is one).
#pragma once

#include "matrices.cuh"

namespace gdn {
namespace chunk {

// The first warpgroup's barrier by number, beside __syncthreads()'s 0; the second one has the next.
constexpr int kGroupBarrier = 1;

template <int KK, int GROUPS> struct PrepareShared {
  alignas(1024) uint8_t k[KK / 64 * kTileBytes];
  uint8_t q[KK / 64 * kTileBytes];
  Matrices matrices[GROUPS];
  TokenGates gates[GROUPS];
};

// kk, qk [16, 64] = this warp's 16 rows of k and q times those of k, as far as the diagonal.
template <typename T, int KK>
__device__ __forceinline__ void triangular_products(float (&kk)[8][4], float (&qk)[8][4], uint32_t k_tile, uint32_t q_tile,
                                                    int warp, int lane) {
  const uint32_t by_row = lanes_by_row(lane), by_piece = lanes_by_piece(lane);
#pragma unroll
  for (int k = 0; k < KK / 16; ++k) {
    uint32_t a[4], b[4];
    ptx::load_matrices(a, tile_at(k_tile + 2048 * warp, by_row, 0, k));
    ptx::load_matrices(b, tile_at(q_tile + 2048 * warp, by_row, 0, k));
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      if (n > warp) continue;
      uint32_t y[4];
      ptx::load_matrices(y, tile_at(k_tile, by_piece, n, k));
      ptx::mma16816<T>(kk[2 * n], a[0], a[1], a[2], a[3], y[0], y[1]);
      ptx::mma16816<T>(kk[2 * n + 1], a[0], a[1], a[2], a[3], y[2], y[3]);
      ptx::mma16816<T>(qk[2 * n], b[0], b[1], b[2], b[3], y[0], y[1]);
      ptx::mma16816<T>(qk[2 * n + 1], b[0], b[1], b[2], b[3], y[2], y[3]);
    }
  }
}

template <typename T, int KK, int GROUPS>
__global__ void __launch_bounds__(128 * GROUPS, 4 / GROUPS)
prepare_kernel(const __grid_constant__ gdn_rule_params p, Record *records
               GDN_PROFILED(, const __grid_constant__ profile::Target target)) {
  GDN_PROFILED(profile::LeanStamps stamps(target, profile::kPrepareWarp);)
  using Shared = PrepareShared<KK, GROUPS>;
  extern __shared__ __align__(1024) uint8_t raw_shared[];
  Shared &s = *reinterpret_cast<Shared *>(raw_shared);
  ptx::grid_dependency_launch();

  const int group = threadIdx.x / 128, thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
  const int key_head = static_cast<int>(blockIdx.x % static_cast<unsigned>(p.common.num_k_heads));
  const unsigned chunk = blockIdx.x / static_cast<unsigned>(p.common.num_k_heads);
  const int n = sequence_of_chunk(p.common.seqs, chunk);
  const Tokens seq = tokens_of(p.common.seqs, n);
  const int64_t t0 = (chunk - first_chunk(p.common.seqs, n)) * kChunk;
  if (t0 >= seq.count) return;
  const int count = static_cast<int>(min(static_cast<int64_t>(kChunk), seq.count - t0));
  const int64_t first = seq.first + t0;
  const int each = p.common.num_v_heads / p.common.num_k_heads;

  GDN_PROFILED(stamps.lap(profile::kSetup);)
  const uint32_t k_tile = ptx::shared_address(s.k), q_tile = ptx::shared_address(s.q);
  copy_tile<T, KK / 8, 128 * GROUPS>(k_tile, heads_at<T>(p.k, n, first, key_head), p.k.token_stride, count, p.common.head_k, threadIdx.x);
  copy_tile<T, KK / 8, 128 * GROUPS>(q_tile, heads_at<T>(p.q, n, first, key_head), p.q.token_stride, count, p.common.head_k, threadIdx.x);
  ptx::copy_async_commit();
  GDN_PROFILED(stamps.lap(profile::kLoadQkv);)
  TokenGates &gates = s.gates[group];
  Matrices &m = s.matrices[group];
  auto make_gates = [&](int head) {
    if (warp != 0) return;
    const RawGates raw = load_gates(p, gates_at(p, n, first, head), count, lane);
    const float2 factors = gate_factors(p, head);
    finish_gates(p, raw, factors.x, factors.y, count, lane, gates, [] {});
  };
  if (group < each) make_gates(key_head * each + group);
  GDN_PROFILED(stamps.lap(profile::kGates);)
  ptx::copy_async_wait<0>();
  __syncthreads();
  GDN_PROFILED(stamps.lap(profile::kWaitTiles);)

  for (int h = group; h < each; h += GROUPS) {
    const int head = key_head * each + h;
    if (h != group) {
      ptx::group_barrier<128>(kGroupBarrier + group);    // the gates before have been read
      make_gates(head);
      GDN_PROFILED(stamps.lap(profile::kGates);)
    }
    float kk[8][4] = {}, qk[8][4] = {};
    triangular_products<T, KK>(kk, qk, k_tile, q_tile, warp, lane);
    if (thread < kChunk)
      gates.q_norm[thread] = thread < count ? row_norm<T, KK>(q_tile, thread, p.common.l2norm, p.common.l2_eps, p.common.scale) : 0.f;
    if (h != group) ptx::group_barrier<128>(kGroupBarrier + group);    // warp 0's gates are there
    GDN_PROFILED(stamps.lap(profile::kProducts);)
    const uint32_t inverse = ptx::shared_address(m.inverse), l = ptx::shared_address(m.attention);
    const OwnBlock own = own_block(kk, warp);
    norms_of_diagonal(own, count, p.common.l2norm, p.common.l2_eps, gates, warp, lane);
    ptx::group_barrier<128>(kGroupBarrier + group);
    RowDecays decays = row_decays(gates, warp, lane);
    uint32_t left[2][4];
    decay_keys(kk, own, gates, decays, l, m.blocks[warp], left, warp, lane);
    GDN_PROFILED(stamps.lap(profile::kLower);)
    invert64<T, false>(l, m.blocks[warp], left, inverse, warp, lane, {kGroupBarrier + group},
                       [&] { key_factors(gates, m.factors, warp, lane), query_factors(gates, m.factors, warp, lane); });
    GDN_PROFILED(stamps.lap(profile::kInvert);)
    const float *norms = gates.q_norm + 16 * warp + lane / 4;
    const float scales[2] = {norms[0], norms[8]};
    ptx::group_barrier<128>(kGroupBarrier + group);    // the attention takes the place of L
    decay_queries<T>(qk, gates, decays, scales, l, warp, lane);
    ptx::group_barrier<128>(kGroupBarrier + group);
    GDN_PROFILED(stamps.lap(profile::kAttention);)
    const uint4 *from = reinterpret_cast<const uint4 *>(&m);
    uint4 *to = reinterpret_cast<uint4 *>(records + static_cast<int64_t>(chunk) * p.common.num_v_heads + head);
#pragma unroll
    for (int i = 0; i < 2 * kImageBytes / 16 / 128; ++i) to[thread + 128 * i] = from[thread + 128 * i];
    if (thread < static_cast<int>(sizeof(Factors) / 16))
      to[2 * kImageBytes / 16 + thread] = reinterpret_cast<const uint4 *>(&m.factors)[thread];
    GDN_PROFILED(stamps.lap(profile::kStoreRecord);)
  }
}

}  // namespace chunk
}  // namespace gdn
