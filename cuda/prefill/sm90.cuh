// The chunk form in one kernel with the instructions of sm_90a.
//
// A block owns 64 value rows of a head for each of its NM warpgroups of arithmetic, and walks through the chunks of its
// stretch with the state in their registers. Beside them
//   - a warpgroup of four single warps: one copies q, k and v (bulk tensor copies), one makes the gates, two the norms of q,
//   - one or two warpgroups that make the matrices of a chunk, those of different chunks at once.
// They pass on, by barriers in shared memory: stages (copied tiles and what belongs to their tokens) and matrices.
//
// NOTES: with one warpgroup of arithmetic the order of products hides what can be hidden behind the one chain that cannot:
// state -> S K^T -> U -> V' -> state. The output of a chunk is finished and stored while the next chunk's S K^T runs. With two
// they fill each other's gaps, and the order is one that needs fewer registers.
#pragma once

#include "../common/wgmma.cuh"
#include "maps.h"
#include "matrices.cuh"
#include "scan.cuh"

namespace gdn {
namespace prefill {

// An index that goes round, and the parity of its barrier's phase.
template <int N> struct Turn {
  int index = 0, parity = 0;
  __device__ __forceinline__ void next() {
    if (++index == N) index = 0, parity ^= 1;
  }
};

template <int KK, int NM> struct Stage90 {
  alignas(1024) uint8_t k[KK / 64 * kTileBytes];
  uint8_t q[KK / 64 * kTileBytes];
  uint8_t v[NM * kTileBytes];
};

// Registers of a thread in each kind of warpgroup: of 65536 for all.
template <int KK, int NM> struct Shape90 {
  static constexpr int kMakers = NM == 1 ? 2 : 1;      // warpgroups that make matrices
  static constexpr int kBuffers = kMakers + 1;
  static constexpr int kStages = NM == 1 ? 4 : 3;
  static constexpr int kThreads = 128 * (1 + kMakers + NM);
  static constexpr int kCopyRegisters = NM == 1 ? 40 : 32, kMakerRegisters = NM == 1 ? 112 : 96;
  static constexpr int kMathRegisters = NM == 1 ? 240 : 192;
  static_assert(128 * (kCopyRegisters + kMakers * kMakerRegisters + NM * kMathRegisters) <= 65536, "registers");
  struct Shared {
    Stage90<KK, NM> stage[kStages];
    Matrices matrices[kBuffers];
    TokenGates gates[kStages];
    alignas(1024) uint8_t out[NM == 1 ? 16 : NM * kTileBytes];    // on its way, see leave_chunk
    uint64_t full[kStages], normed[kStages], empty[kStages], ready[kBuffers], free[kBuffers];
  };
  static_assert(sizeof(Shared) <= 227 * 1024, "shared memory");
};

template <typename T, typename ST, int KK, int NM, Pass PASS>
__global__ void __launch_bounds__(Shape90<KK, NM>::kThreads, 1)
sm90_kernel(const __grid_constant__ gdn_rule_params p, const __grid_constant__ Plan plan, const __grid_constant__ Maps maps) {
  using S = Shape90<KK, NM>;
  using Stage = Stage90<KK, NM>;
  extern __shared__ __align__(1024) uint8_t raw_shared[];
  typename S::Shared &shared = *reinterpret_cast<typename S::Shared *>(raw_shared);
  const uint32_t stages = ptx::shared_address(shared.stage), buffers = ptx::shared_address(shared.matrices);
  const uint32_t full = ptx::shared_address(shared.full), normed = ptx::shared_address(shared.normed);
  const uint32_t empty = ptx::shared_address(shared.empty), ready = ptx::shared_address(shared.ready);
  const uint32_t free = ptx::shared_address(shared.free);
  constexpr int kTileRows = 64 * NM;
  constexpr uint32_t kQ = offsetof(Stage, q), kV = offsetof(Stage, v);

  const Stretch s = stretch_of<PASS>(p, plan, kTileRows);
  // The same for a warp, which the compiler must see: products in a branch it takes for divergent are waited for one by one.
  const int group = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 128, 0);
  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32 % 4, 0), lane = ptx::kept_lane(), thread = 32 * warp + lane;
  if (threadIdx.x == 0) {
    // Every thread arrives for itself, which costs no more than one for its warp would.
    for (int i = 0; i < S::kStages; ++i) {
      ptx::barrier_init(full + 8 * i, 1 + 32);
      ptx::barrier_init(normed + 8 * i, 2 * 32);
      ptx::barrier_init(empty + 8 * i, 128 * NM);
    }
    for (int i = 0; i < S::kBuffers; ++i) {
      ptx::barrier_init(ready + 8 * i, 128);
      ptx::barrier_init(free + 8 * i, 128 * NM);
    }
  }
  const int64_t in_slot = slot_of(p.in_slots, s.n), out_slot = slot_of(p.out_slots, s.n);
  if (in_slot < 0 || out_slot < 0) {
    ptx::grid_dependency_wait();    // also where nothing is done: what follows relies on all before being complete
    if (PASS == kWhole && s.segment == 0) zero_rows<T>(p, s.n, s.seq, s.head, s.row0, kTileRows);
    return;
  }
  if (s.begin >= s.end && (PASS == kTransfer || s.segment > 0 || s.seq.count > 0 || plan.keep_state)) {
    ptx::grid_dependency_wait();
    return;
  }
  if (PASS == kTransfer && s.identity) {    // no values: nothing is copied there
    for (int i = 0; i < S::kStages; ++i)
      for (int at = threadIdx.x; at < NM * kTileBytes / 16; at += S::kThreads)
        reinterpret_cast<uint4 *>(shared.stage[i].v)[at] = make_uint4(0, 0, 0, 0);
  }
  __syncthreads();
  const int token0 = s.begin * kChunk;    // of the sequence
  const int chunks = s.end - s.begin, tokens = s.seq.count - token0;
  const int key_head = s.head / (p.num_v_heads / p.num_k_heads);

  if (group == 0) {
    fewer_registers<S::kCopyRegisters>();
    Turn<S::kStages> at;
    if (warp == 0) {
      if (lane == 0) {
        const int n = p.seqs.cu_seqlens ? 0 : s.n;
        int token = static_cast<int>(s.seq.first) + token0;
        for (int i = 0; i < chunks; ++i, at.next(), token += kChunk) {
          const uint32_t stage = stages + at.index * static_cast<uint32_t>(sizeof(Stage)), barrier = full + 8 * at.index;
          ptx::barrier_wait(empty + 8 * at.index, at.parity ^ 1);    // the first time round there is nothing to wait for
          const bool values = PASS == kWhole || !s.identity;
          ptx::barrier_expect(barrier, (KK / 64 * (PASS == kWhole ? 2 : 1) + (values ? NM : 0)) * kTileBytes);
#pragma unroll
          for (int h = 0; h < KK / 64; ++h) ptx::copy_box(stage + h * kTileBytes, &maps.k, 64 * h, key_head, token, n, barrier);
          if (values)
#pragma unroll
            for (int h = 0; h < NM; ++h)
              ptx::copy_box(stage + kV + h * kTileBytes, &maps.v, s.row0 + 64 * h, s.head, token, n, barrier);
          if (PASS == kWhole)
#pragma unroll
            for (int h = 0; h < KK / 64; ++h)
              ptx::copy_box(stage + kQ + h * kTileBytes, &maps.q, 64 * h, key_head, token, n, barrier);
        }
      }
    } else if (warp == 1) {
      const float rate = -expf(p.a_log[s.head]) * 1.44269504f, dt_bias = p.dt_bias[s.head];
      RawGates raw = load_gates(p, s.n, s.seq.first + token0, tokens, s.head, lane);
      for (int i = 0; i < chunks; ++i, at.next()) {
        const RawGates now = raw;
        const int count = tokens - i * kChunk;
        if (i + 1 < chunks) raw = load_gates(p, s.n, s.seq.first + token0 + (i + 1) * kChunk, count - kChunk, s.head, lane);
        ptx::barrier_wait(empty + 8 * at.index, at.parity ^ 1);
        finish_gates(p, now, rate, dt_bias, count, lane, shared.gates[at.index]);
        ptx::barrier_arrive(full + 8 * at.index);
      }
    } else {
      for (int i = 0; i < chunks; ++i, at.next()) {
        const int row = (warp - 2) * 32 + lane;
        const uint32_t tile = stages + at.index * static_cast<uint32_t>(sizeof(Stage)) + kQ;
        ptx::barrier_wait(full + 8 * at.index, at.parity);
        // Past the end zero, where with eps 0 the root would be infinite.
        if (PASS == kWhole)
          shared.gates[at.index].q_norm[row] =
              row < tokens - i * kChunk ? row_norm<T, KK>(tile, row, p.l2norm, p.l2_eps, p.scale) : 0.f;
        ptx::barrier_arrive(normed + 8 * at.index);
      }
    }
    return;
  }

  if (group <= S::kMakers) {
    fewer_registers<S::kMakerRegisters>();
    const int maker = group - 1;
    Turn<S::kStages> at;
    Turn<S::kBuffers> of;
    for (int i = 0; i < chunks; ++i, at.next(), of.next()) {
      if (i % S::kMakers != maker) continue;
      const uint32_t stage = stages + at.index * static_cast<uint32_t>(sizeof(Stage));
      TokenGates &gates = shared.gates[at.index];
      Matrices &m = shared.matrices[of.index];
      ptx::barrier_wait(full + 8 * at.index, at.parity);
      const int count = tokens - i * kChunk;
      if (count < kChunk) {    // what follows the sequence is not its own, and may be anything
#pragma unroll 1
        for (int piece = thread; piece < static_cast<int>(sizeof(Stage)) / 16; piece += 128)
          if (piece / 8 % kChunk >= count) reinterpret_cast<uint4 *>(&shared.stage[at.index])[piece] = make_uint4(0, 0, 0, 0);
        ptx::fence_async();
        ptx::group_barrier<128>(group);
      }
      float x[8][4];    // K K^T, then Q K^T
      const uint64_t k_rows = wgmma::tile_of_columns(stage);
      const auto multiply = [&](uint64_t rows) {
        wgmma::hold(x);
        wgmma::fence();
#pragma unroll
        for (int k = 0; k < KK / 16; ++k) {
          const uint64_t step = wgmma::bytes(k / 4 * kTileBytes + k % 4 * 32);
          wgmma::product_of_tiles<T>(x, rows + step, k_rows + step, k > 0);
        }
        wgmma::commit();
      };
      multiply(k_rows);
      ptx::barrier_wait(free + 8 * of.index, of.parity ^ 1);
      wgmma::wait<0>();
      wgmma::hold(x);
      norms_of_diagonal(x, count, p.l2norm, p.l2_eps, gates.k_norm, warp, lane);
      ptx::group_barrier<128>(group);
      const uint32_t l = ptx::shared_address(m.attention);
      decay_keys(x, gates, diagonal_decays(gates, warp, lane), l, m.blocks[warp], warp, lane);
      if (PASS == kWhole) multiply(k_rows + wgmma::bytes(kQ));    // while L is inverted
      __syncwarp();
      invert64<T>(l, m.blocks[warp], gates.beta, ptx::shared_address(m.inverse), warp, lane, group);
      ptx::barrier_wait(normed + 8 * at.index, at.parity);
      token_factors(gates, m.factors, thread);
      if (PASS == kWhole) {
        wgmma::wait<0>();
        wgmma::hold(x);
        ptx::group_barrier<128>(group);    // the attention takes the place of L
        decay_queries<T>(x, gates, diagonal_decays(gates, warp, lane), l, warp, lane);
      }
      ptx::fence_async();
      ptx::barrier_arrive(ready + 8 * of.index);
    }
    return;
  }

  more_registers<S::kMathRegisters>();
  const int row0 = s.row0 + 64 * (group - 1 - S::kMakers) + 16 * warp;
  const int64_t within = static_cast<int64_t>(s.head) * p.head_v * p.head_k;
  const uint32_t v_offset = kV + (group - 1 - S::kMakers) * kTileBytes;

  float state[KK / 8][4];
  if (PASS == kTransfer) {
#pragma unroll
    for (int t = 0; t < KK / 8; ++t)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        state[t][i] = s.identity && row0 + lane / 4 + i / 2 * 8 == 8 * t + 2 * (lane % 4) + i % 2 ? 1.f : 0.f;
  } else if (s.segment > 0) {
    ptx::grid_dependency_wait();
    load_state(state, static_cast<const float *>(transfer_at(p, plan, s.n, s.segment - 1, s.head)), row0, p.head_v, p.head_k, lane);
  } else {
    load_state(state, static_cast<const ST *>(p.state_in) + in_slot * p.in_slots.slot_stride + within, row0, p.head_v, p.head_k,
               lane);
  }

  uint32_t stage = 0;                   // of the chunk at hand
  const Factors *factors = nullptr;     // its
  uint32_t matrices = 0;                // its
  Turn<S::kStages> at;
  Turn<S::kBuffers> of;
  float out[8][4], values[8][4];        // O^T and V' of the chunk
  uint32_t operand[KK / 16][4];         // the state before it

  // S K^T and S Q^T, of which the first is waited for.
  auto begin_chunk = [&] {
    stage = stages + at.index * static_cast<uint32_t>(sizeof(Stage));
    matrices = buffers + of.index * static_cast<uint32_t>(sizeof(Matrices));
    factors = &shared.matrices[of.index].factors;
    ptx::barrier_wait(full + 8 * at.index, at.parity);
    ptx::barrier_wait(ready + 8 * of.index, of.parity);
    to_operand<T>(operand, state);
    const uint64_t keys = wgmma::tile_of_columns(stage);
    wgmma::fence();
#pragma unroll
    for (int k = 0; k < KK / 16; ++k)
      wgmma::product<T, false>(values, operand[k], keys + wgmma::bytes(k / 4 * kTileBytes + k % 4 * 32), k > 0);
    wgmma::commit();
  };
  auto multiply_queries = [&] {
    const uint64_t queries = wgmma::tile_of_columns(stage + kQ);
    wgmma::hold(out);
    wgmma::fence();
#pragma unroll
    for (int k = 0; k < KK / 16; ++k)
      wgmma::product<T, false>(out, operand[k], queries + wgmma::bytes(k / 4 * kTileBytes + k % 4 * 32), k > 0);
    wgmma::commit();
  };
  // S Q^T, and from S K^T to V'.
  auto middle_of_chunk = [&] {
    if (PASS == kWhole && NM > 1) {
      multiply_queries();
      wgmma::wait<0>();
      wgmma::hold(out);
      scale_columns(out, factors->out, lane);
    } else if (PASS == kWhole) {
      multiply_queries();
      wgmma::wait<1>();
    } else {
      wgmma::wait<0>();
    }
    wgmma::hold(values);
    subtract_from_values<T>(values, stage + v_offset, factors->read, warp, lane);
    uint32_t u[4][4];
    to_operand<T>(u, values);
    const uint64_t inverse = wgmma::tile_of_columns(matrices);
    wgmma::hold(values);
    wgmma::fence();
#pragma unroll
    for (int k = 0; k < 4; ++k) wgmma::product<T, false>(values, u[k], inverse + wgmma::bytes(k * 32), k > 0);
    wgmma::commit();
    if (PASS == kWhole && NM == 1) {
      wgmma::wait<1>();
      wgmma::hold(out);
      scale_columns(out, factors->out, lane);
    }
    const float decay = factors->decay;
#pragma unroll
    for (int t = 0; t < KK / 8; ++t)
#pragma unroll
      for (int c = 0; c < 4; ++c) state[t][c] *= decay;
    wgmma::wait<0>();
    wgmma::hold(values);
  };
  // The new state, and the rest of O, of which the first is waited for.
  auto end_chunk = [&] {
    uint32_t plain[4][4], written[4][4];
    if (PASS == kWhole) to_operand<T>(plain, values);
    scale_columns(values, factors->write, lane);
    to_operand<T>(written, values);
    const uint64_t keys = wgmma::tile_of_rows(stage, kTileBytes);
    wgmma::hold(state);
    wgmma::fence();
#pragma unroll
    for (int k = 0; k < 4; ++k) wgmma::product<T, true>(state, written[k], keys + wgmma::bytes(k * 2048), true);
    wgmma::commit();
    if (PASS == kWhole) {
      const uint64_t attention = wgmma::tile_of_columns(matrices + kImageBytes);
      wgmma::hold(out);
      wgmma::fence();
#pragma unroll
      for (int k = 0; k < 4; ++k) wgmma::product<T, false>(out, plain[k], attention + wgmma::bytes(k * 32), true);
      wgmma::commit();
      wgmma::wait<1>();
    } else {
      wgmma::wait<0>();
    }
    wgmma::hold(state);
  };
  auto checkpoint = [&](int i) {
    if (PASS == kTransfer || !p.checkpoints) return;
    const int done = (s.begin + i + 1) * kChunk;
    if (done % p.checkpoint_tokens != 0 || done > s.seq.count) return;
    const int64_t first = p.seqs.cu_seqlens ? s.seq.first : static_cast<int64_t>(s.n) * p.seqs.tokens_per_seq;
    const int64_t row = first / p.checkpoint_tokens + done / p.checkpoint_tokens - 1;
    store_state(state, static_cast<ST *>(p.checkpoints) + row * p.num_v_heads * p.head_v * p.head_k + within, row0, p.head_v,
                p.head_k, lane);
  };
  // The output leaves, and the stage is free.
  T *row = PASS == kWhole ? out_heads_at<T>(p.o, s.n, s.seq.first + token0, s.head) + row0 : nullptr;
  auto leave_chunk = [&](int i, uint32_t matrices, int at, int of) {
    ptx::barrier_arrive(empty + 8 * at);
    const auto release = [&] {
      ptx::barrier_arrive(free + 8 * of);
    };
    if (PASS == kTransfer) return release();
    wgmma::hold(out);
    // With one warpgroup of arithmetic by way of where the inverse was, of which nobody has need any more.
    const uint32_t tile = NM == 1 ? matrices : ptx::shared_address(shared.out) + (group - 1 - S::kMakers) * kTileBytes;
    store_out<T>(out, tile, warp, lane, row, p.o.token_stride, tokens - i * kChunk, p.head_v - row0, release);
    row += kChunk * p.o.token_stride;
  };

  if (chunks > 0) {
    begin_chunk();
    middle_of_chunk();
    // NOTES: a turn of the loop begins and ends with no product under way, and not with a chunk: ptxas does not follow products
    // from one turn to the next, and would wait for each of them.
    for (int i = 0; i < chunks - 1; ++i) {
      end_chunk();
      const uint32_t before = matrices;
      const int before_at = at.index, before_of = of.index;
      at.next();
      of.next();
      if (NM == 1) {
        begin_chunk();
        if (PASS == kWhole) wgmma::wait<1>();
        leave_chunk(i, before, before_at, before_of);
      } else {    // the other warpgroup's products fill the gap, and registers are short
        if (PASS == kWhole) wgmma::wait<0>();
        leave_chunk(i, before, before_at, before_of);
        begin_chunk();
      }
      checkpoint(i);
      middle_of_chunk();
    }
    end_chunk();
    wgmma::wait<0>();
    leave_chunk(chunks - 1, matrices, at.index, of.index);
    checkpoint(chunks - 1);
  }
  ptx::grid_dependency_wait();
  if (PASS == kTransfer) {
    float *to = transfer_at(p, plan, s.n, s.segment, s.head) + (s.identity ? p.head_v * p.head_k : 0);
    store_state(state, to, row0, s.identity ? p.head_k : p.head_v, p.head_k, lane);
    return;
  }
  if (s.end * kChunk >= s.seq.count)
    store_state(state, static_cast<ST *>(p.state_out) + out_slot * p.out_slots.slot_stride + within, row0, p.head_v, p.head_k,
                lane);
}

}  // namespace prefill
}  // namespace gdn
