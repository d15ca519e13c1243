// The scan over chunks with the instructions of sm_90a.
//
// A block owns 64 value rows of a head for each of its WGS warpgroups of arithmetic, and walks through the chunks of its
// stretch with the state in their registers. One more warpgroup copies: q, k and v piece by piece (any row stride, and what
// is past the end of a sequence is zero), the chunk's record in bulk.
//
// NOTES: the order of products hides what can be hidden behind the one chain that cannot: state -> S K^T -> U -> V' -> state.
// The output of a chunk is finished and stored while the next chunk's S K^T runs.
#pragma once

#include "../common/wgmma.cuh"
#include "scan.cuh"

namespace gdn {
namespace prefill {

template <int KK, int WGS> struct Stage90 {
  alignas(1024) uint8_t k[KK / 64 * kTileBytes];
  uint8_t q[KK / 64 * kTileBytes];
  uint8_t v[WGS * kTileBytes];    // and o on its way out
  Record record;
};

template <int KK, int WGS, int STAGES> struct Shared90 {
  Stage90<KK, WGS> stage[STAGES];
  uint64_t full[STAGES], empty[STAGES];
};

// Registers of a thread that copies, and of one that computes, out of 168 for each of the three warpgroups.
constexpr int kCopyRegisters = 40, kMathRegisters = 232;

template <typename T, typename ST, int KK, int WGS, int STAGES, Pass PASS>
__global__ void __launch_bounds__(128 * (WGS + 1), 1)
scan_sm90_kernel(const __grid_constant__ gdn_rule_params p, const __grid_constant__ Plan plan) {
  using Stage = Stage90<KK, WGS>;
  extern __shared__ __align__(1024) uint8_t raw_shared[];
  Shared90<KK, WGS, STAGES> &shared = *reinterpret_cast<Shared90<KK, WGS, STAGES> *>(raw_shared);
  const uint32_t stages = ptx::shared_address(shared.stage);
  const uint32_t full = ptx::shared_address(shared.full), empty = ptx::shared_address(shared.empty);
  constexpr int kTileRows = 64 * WGS;
  constexpr uint32_t kQ = offsetof(Stage, q), kV = offsetof(Stage, v), kRecord = offsetof(Stage, record);
  constexpr uint32_t kInverse = kRecord + offsetof(Record, inverse), kAttention = kRecord + offsetof(Record, attention);

  const Stretch s = stretch_of<PASS>(p, plan, kTileRows);
  const int thread = threadIdx.x, group = __shfl_sync(0xffffffffu, thread / 128, 0);    // the same for a warp, the compiler sees
  if (thread == 0) {
    for (int i = 0; i < STAGES; ++i) {
      ptx::barrier_init(full + 8 * i, 128 + 1);
      ptx::barrier_init(empty + 8 * i, 4 * WGS);
    }
  }
  const int64_t in_slot = slot_of(p.in_slots, s.n), out_slot = slot_of(p.out_slots, s.n);
  if (in_slot < 0 || out_slot < 0) {
    if (PASS == kWhole && s.segment == 0) zero_rows<T>(p, s.n, s.seq, s.head, s.row0, kTileRows);
    return;
  }
  if (s.begin >= s.end && (PASS == kTransfer || s.segment > 0 || s.seq.count > 0 || plan.keep_state)) return;
  __syncthreads();
  const int64_t token0 = s.seq.first + static_cast<int64_t>(s.begin) * kChunk;
  const int chunks = s.end - s.begin, tokens = s.seq.count - s.begin * kChunk;

  if (group == 0) {
    if (WGS > 1) fewer_registers<kCopyRegisters>();
    const int key_head = s.head / (p.num_v_heads / p.num_k_heads);
    const T *k = heads_at<T>(p.k, s.n, token0, key_head), *q = heads_at<T>(p.q, s.n, token0, key_head);
    const T *v = heads_at<T>(p.v, s.n, token0, s.head) + (s.identity ? 0 : s.row0);
    const int values = s.identity ? 0 : p.head_v - s.row0;
    const Record *record = plan.records + (first_chunk(p.seqs, s.n) + s.begin) * p.num_v_heads + s.head;
    for (int i = 0, at = 0, parity = 1; i < chunks; ++i) {
      const uint32_t stage = stages + at * static_cast<uint32_t>(sizeof(Stage)), barrier = full + 8 * at;
      ptx::barrier_wait(empty + 8 * at, parity);    // the first time round there is nothing to wait for
      const int count = tokens - i * kChunk;
      copy_tile<T, KK / 8, 128>(stage, k, p.k.token_stride, count, p.head_k, thread);
      copy_tile<T, 8 * WGS, 128>(stage + kV, v, p.v.token_stride, count, values, thread);
      if (PASS == kWhole) copy_tile<T, KK / 8, 128>(stage + kQ, q, p.q.token_stride, count, p.head_k, thread);
      ptx::barrier_arrive_after_copies(barrier);
      if (thread == 0) {
        if (i == 0) ptx::grid_dependency_wait();
        ptx::barrier_expect(barrier, sizeof(Record));
        ptx::copy_bulk(stage + kRecord, record, sizeof(Record), barrier);
      }
      k += kChunk * p.k.token_stride, q += kChunk * p.q.token_stride, v += kChunk * p.v.token_stride;
      record += p.num_v_heads;
      if (++at == STAGES) at = 0, parity ^= 1;
    }
    return;
  }

  if (WGS > 1) more_registers<kMathRegisters>();
  const int warp = thread / 32 % 4, lane = thread % 32;
  const int row0 = s.row0 + 64 * (group - 1) + 16 * warp;
  const int64_t within = static_cast<int64_t>(s.head) * p.head_v * p.head_k;
  const uint32_t v_offset = kV + (group - 1) * kTileBytes;

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

  T *o = PASS == kWhole ? out_heads_at<T>(p.o, s.n, token0, s.head) + row0 : nullptr;
  uint32_t stage = 0;                   // of the chunk at hand
  const Factors *factors = nullptr;     // its
  int at = 0, parity = 0;               // the stage's number, and the parity of its barrier
  float out[8][4], values[8][4];        // O^T and V' of the chunk
  uint32_t operand[KK / 16][4];         // the state before it

  // S K^T and S Q^T, of which the first is waited for.
  auto begin_chunk = [&] {
    stage = stages + at * static_cast<uint32_t>(sizeof(Stage));
    factors = &shared.stage[at].record.factors;
    ptx::barrier_wait(full + 8 * at, parity);
    ptx::fence_async();    // the copies were ordinary writes, and wgmma reads them
    to_operand<T>(operand, state);
    wgmma::fence();
#pragma unroll
    for (int k = 0; k < KK / 16; ++k)
      wgmma::product<T, false>(values, operand[k], wgmma::tile_of_columns(stage + k / 4 * kTileBytes + k % 4 * 32), k > 0);
    wgmma::commit();
  };
  // S Q^T, and from S K^T to V'.
  auto middle_of_chunk = [&] {
    if (PASS == kWhole) {
      wgmma::hold(out);
      wgmma::fence();
#pragma unroll
      for (int k = 0; k < KK / 16; ++k)
        wgmma::product<T, false>(out, operand[k], wgmma::tile_of_columns(stage + kQ + k / 4 * kTileBytes + k % 4 * 32), k > 0);
      wgmma::commit();
      wgmma::wait<1>();
    } else {
      wgmma::wait<0>();
    }
    wgmma::hold(values);
    subtract_from_values<T>(values, stage + v_offset, factors->read, warp, lane);
    uint32_t u[4][4];
    to_operand<T>(u, values);
    wgmma::hold(values);
    wgmma::fence();
#pragma unroll
    for (int k = 0; k < 4; ++k)
      wgmma::product<T, false>(values, u[k], wgmma::tile_of_columns(stage + kInverse + k * 32), k > 0);
    wgmma::commit();
    if (PASS == kWhole) {
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
    wgmma::hold(state);
    wgmma::fence();
#pragma unroll
    for (int k = 0; k < 4; ++k)
      wgmma::product<T, true>(state, written[k], wgmma::tile_of_rows(stage + k * 2048, kTileBytes), true);
    wgmma::commit();
    if (PASS == kWhole) {
      wgmma::hold(out);
      wgmma::fence();
#pragma unroll
      for (int k = 0; k < 4; ++k)
        wgmma::product<T, false>(out, plain[k], wgmma::tile_of_columns(stage + kAttention + k * 32), true);
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
  auto leave_chunk = [&](int i, uint32_t stage, int at) {
    if (PASS == kWhole) {
      wgmma::hold(out);
      store_out<T>(out, stage + v_offset, warp, lane, o + static_cast<int64_t>(i) * kChunk * p.o.token_stride, p.o.token_stride,
                   tokens - i * kChunk, p.head_v - row0);
    }
    __syncwarp();
    if (lane == 0) ptx::barrier_arrive(empty + 8 * at);
  };

  if (chunks > 0) {
    begin_chunk();
    middle_of_chunk();
    // NOTES: a turn of the loop begins and ends with no product under way, and not with a chunk: ptxas does not follow products
    // from one turn to the next, and would wait for each of them.
    for (int i = 0; i < chunks - 1; ++i) {
      end_chunk();
      const uint32_t before = stage;
      const int before_at = at;
      if (++at == STAGES) at = 0, parity ^= 1;
      begin_chunk();
      if (PASS == kWhole) wgmma::wait<1>();
      leave_chunk(i, before, before_at);
      checkpoint(i);
      middle_of_chunk();
    }
    end_chunk();
    wgmma::wait<0>();
    leave_chunk(chunks - 1, stage, at);
    checkpoint(chunks - 1);
  }
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
