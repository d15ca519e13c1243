// The scan over chunks with mma.sync, for every device since sm_80.
//
// A block owns 16 value rows of a head for each of its WARPS, and walks through the chunks of its stretch with the state in
// their registers. k, v and the inverse come one chunk ahead into a second buffer; q and the attention have one buffer, which
// is filled while the chain of products up to the new state runs. So two buffers fit where shared memory is small.
#pragma once

#include "borders.cuh"

namespace gdn {
namespace chunk {

template <int KK, int WARPS> struct Shared80 {
  struct Stage {
    alignas(1024) uint8_t k[KK / 64 * kTileBytes];
    uint8_t v[(WARPS + 3) / 4 * kTileBytes];    // and o on its way out
    uint8_t inverse[kImageBytes];
    Factors factors;
  };
  Stage stage[2];
  alignas(1024) uint8_t q[KK / 64 * kTileBytes];
  uint8_t attention[kImageBytes];
};

// acc[16, 8 N] += a[16, 16] b[16, 8 N], b's columns being rows of the tile, of which it takes elements 16 k .. 16 k + 15.
template <typename T, int N>
__device__ __forceinline__ void product_columns(float (&acc)[N][4], const uint32_t (&a)[4], uint32_t tile, int k, uint32_t lanes) {
#pragma unroll
  for (int n = 0; n < N / 2; ++n) {
    uint32_t b[4];
    ptx::load_matrices(b, tile_at(tile, lanes, n, k));
    ptx::mma16816<T>(acc[2 * n], a[0], a[1], a[2], a[3], b[0], b[1]);
    ptx::mma16816<T>(acc[2 * n + 1], a[0], a[1], a[2], a[3], b[2], b[3]);
  }
}

// The same with b's rows being rows 16 k .. 16 k + 15 of the tile.
template <typename T, int N>
__device__ __forceinline__ void product_rows(float (&acc)[N][4], const uint32_t (&a)[4], uint32_t tile, int k, uint32_t lanes) {
#pragma unroll
  for (int n = 0; n < N / 2; ++n) {
    uint32_t b[4];
    ptx::load_matrices_trans(b, tile_at(tile, lanes, k, n));
    ptx::mma16816<T>(acc[2 * n], a[0], a[1], a[2], a[3], b[0], b[1]);
    ptx::mma16816<T>(acc[2 * n + 1], a[0], a[1], a[2], a[3], b[2], b[3]);
  }
}

// One function: its parts share state and operands in registers.
template <typename T, int KK, int WARPS, Pass PASS>
__device__ __forceinline__ void scan_block(const gdn_rule_params &p, const Plan &plan) {
  GDN_PROFILED(profile::LeanStamps stamps(plan.profile, profile::kScanWarp);)
  using Shared = Shared80<KK, WARPS>;
  extern __shared__ __align__(1024) uint8_t raw_shared[];
  Shared &shared = *reinterpret_cast<Shared *>(raw_shared);
  const uint32_t stages = ptx::shared_address(shared.stage);
  const uint32_t q_tile = ptx::shared_address(shared.q), attention = ptx::shared_address(shared.attention);
  constexpr int kThreads = 32 * WARPS, kTileRows = 16 * WARPS;
  using Stage = typename Shared::Stage;
  constexpr uint32_t kV = offsetof(Stage, v), kInverse = offsetof(Stage, inverse), kFactors = offsetof(Stage, factors);

  // The block's stretch.
  Stretch s = stretch_of<PASS>(p, plan, kTileRows, blockIdx.x, 0);
  const int64_t in_slot = slot_of(p.common.in_slots, s.n), out_slot = slot_of(p.common.out_slots, s.n);
  if (in_slot < 0 || out_slot < 0) {
    ptx::grid_dependency_wait();    // dependent launches rely on all earlier kernels being complete
    if (PASS != kTransfer && s.segment == 0) zero_rows<T>(p, s.n, s.seq, s.head, s.row0, kTileRows, threadIdx.x, kThreads);
    GDN_PROFILED(stamps.lap(profile::kPadding);)
    return;
  }
  if (is_idle<PASS>(s, plan)) {
    ptx::grid_dependency_wait();
    return;
  }
  if (PASS == kTransfer && s.forgetting) s.begin = begin_of_warm_up<T, WARPS>(p, plan, s, shared.stage[0].factors.read);
  const int64_t token0 = s.seq.first + static_cast<int64_t>(s.begin) * kChunk;
  const int chunks = s.end - s.begin, tokens = s.seq.count - s.begin * kChunk;
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const uint32_t by_piece = lanes_by_piece(lane), by_row = lanes_by_row(lane);
  const int row0 = s.row0 + 16 * warp;
  const uint32_t v_offset = kV + warp / 4 * kTileBytes;

  const int key_head = s.head / (p.common.num_v_heads / p.common.num_k_heads);
  const T *k = heads_at<T>(p.k, s.n, token0, key_head), *q = heads_at<T>(p.q, s.n, token0, key_head);
  const T *v = heads_at<T>(p.v, s.n, token0, s.head) + (s.identity ? 0 : s.row0);
  const Record *record = plan.records + (first_chunk(p.common.seqs, s.n) + s.begin) * p.common.num_v_heads + s.head;

  // Copies of chunk i for the chain of states, and for its output: a group of copies each, empty past the last chunk.
  auto load_chain = [&](int i) {
    if (i < chunks) {
      const uint32_t stage = stages + i % 2 * static_cast<uint32_t>(sizeof(Stage));
      const int count = tokens - i * kChunk;
      const Record *r = record + static_cast<int64_t>(i) * p.common.num_v_heads;
      copy_tile<T, KK / 8, kThreads>(stage, k + i * kChunk * p.k.token_stride, p.k.token_stride, count, p.common.head_k, thread);
      copy_tile<T, 8 * ((WARPS + 3) / 4), kThreads>(stage + kV, v + i * kChunk * p.v.token_stride, p.v.token_stride, count,
                                                    s.identity ? 0 : p.common.head_v - s.row0, thread);
      copy_bytes<kImageBytes, kThreads>(stage + kInverse, r->inverse, thread);
      copy_bytes<sizeof(Factors), kThreads>(stage + kFactors, &r->factors, thread);
    }
    ptx::copy_async_commit();
  };
  auto load_out = [&](int i) {
    if (PASS == kTransfer) return;
    if (i < chunks) {
      const Record *r = record + static_cast<int64_t>(i) * p.common.num_v_heads;
      copy_tile<T, KK / 8, kThreads>(q_tile, q + i * kChunk * p.q.token_stride, p.q.token_stride, tokens - i * kChunk, p.common.head_k,
                                     thread);
      copy_bytes<kImageBytes, kThreads>(attention, r->attention, thread);
    }
    ptx::copy_async_commit();
  };

  GDN_PROFILED(stamps.lap(profile::kSetup);)
  // Load the state.
  float state[KK / 8][4];
  begin_state<AnyState, PASS>(state, p, plan, s, kTileRows, row0, lane);
  GDN_PROFILED(stamps.lap(profile::kLoadState);)
  ptx::grid_dependency_wait();
  GDN_PROFILED(stamps.lap(profile::kWaitKernel);)

  T *o = PASS != kTransfer ? out_heads_at<T>(p.o, s.n, token0, s.head) + row0 : nullptr;
  load_chain(0);
  for (int i = 0; i < chunks; ++i) {
    // Start the copies of q and of the next chunk; wait for this one.
    load_out(i);
    load_chain(i + 1);
    GDN_PROFILED(stamps.lap(profile::kLoadQkv, i);)
    const uint32_t stage = stages + i % 2 * static_cast<uint32_t>(sizeof(Stage));
    const Factors &factors = shared.stage[i % 2].factors;
    ptx::copy_async_wait<PASS != kTransfer ? 2 : 1>();
    __syncthreads();
    GDN_PROFILED(stamps.lap(profile::kWaitTiles); if (i == 0) stamps.wait(profile::kWaitState, state);)

    // U = V^T - S K^T, V' = U inverse^T.
    uint32_t operand[KK / 16][4];
    to_operand<T>(operand, state);
    float u[8][4] = {};
#pragma unroll
    for (int j = 0; j < KK / 16; ++j) product_columns<T>(u, operand[j], stage, j, by_piece);
    GDN_PROFILED(stamps.lap(profile::kStateKeys);)
    subtract_from_values<T>(u, stage + v_offset, factors.read, warp, lane);
    uint32_t half[4][4];
    to_operand<T>(half, u);
    float values[8][4] = {};
#pragma unroll
    for (int j = 0; j < 4; ++j) product_columns<T>(values, half[j], stage + kInverse, j, by_piece);
    GDN_PROFILED(stamps.lap(profile::kCorrect);)
    // The new state.
    to_operand<T>(half, values);
    scale_columns(values, factors.write, lane);
    uint32_t written[4][4];
    to_operand<T>(written, values);
    const float decay = factors.decay;
#pragma unroll
    for (int t = 0; t < KK / 8; ++t)
#pragma unroll
      for (int c = 0; c < 4; ++c) state[t][c] *= decay;
#pragma unroll
    for (int j = 0; j < 4; ++j) product_rows<T>(state, written[j], stage, j, by_row);
    GDN_PROFILED(stamps.lap(profile::kUpdate);)

    // The output.
    if (PASS != kTransfer) {
      ptx::copy_async_wait<1>();
      __syncthreads();
      GDN_PROFILED(stamps.lap(profile::kWaitAttention);)
      float out[8][4] = {};
#pragma unroll
      for (int j = 0; j < KK / 16; ++j) product_columns<T>(out, operand[j], q_tile, j, by_piece);
      scale_columns(out, factors.out, lane);
#pragma unroll
      for (int j = 0; j < 4; ++j) product_columns<T>(out, half[j], attention, j, by_piece);
      GDN_PROFILED(stamps.lap(profile::kOut);)
      put_out<T>(out, stage + v_offset, warp, lane);
      take_out<T>(stage + v_offset, warp, lane, o + static_cast<int64_t>(i) * kChunk * p.o.token_stride, p.o.token_stride,
                  tokens - i * kChunk, p.common.head_v - row0);
      GDN_PROFILED(stamps.lap(profile::kSendOut);)
    }
    __syncthreads();    // the next copies go where this chunk was
    GDN_PROFILED(stamps.lap(profile::kBarrier);)
  }
  end_state<AnyState, PASS>(state, p, plan, s, kTileRows, row0, lane);
  GDN_PROFILED(stamps.lap(profile::kStoreState);)
}

// PASS kFirst: its blocks and kTransfer's.
template <typename T, int KK, int WARPS, Pass PASS>
__global__ void __launch_bounds__(32 * WARPS, 1)
sm80_kernel(const __grid_constant__ gdn_rule_params p, const __grid_constant__ Plan plan) {
  if (PASS != kFirst || !is_transfer(p, plan, 16 * WARPS, blockIdx.x)) scan_block<T, KK, WARPS, PASS>(p, plan);
  else scan_block<T, KK, WARPS, kTransfer>(p, plan);
}

}  // namespace chunk
}  // namespace gdn
