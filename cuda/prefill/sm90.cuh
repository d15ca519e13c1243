// The chunk form in one kernel with the instructions of sm_90a.
//
// A block owns 64 value rows of a head for each of its NM warpgroups of arithmetic (narrow.cuh, wide.cuh), and walks through the
// chunks of its stretch with the state in their registers. Beside them
//   - a warpgroup of four single warps: one copies q, k, v and o (bulk tensor copies), one makes the gates, two the norms of q,
//   - two warpgroups, the makers, that make the matrices of a chunk, each of every second one.
// They pass on, by barriers in shared memory (shape90.cuh): stages (copied tiles and what belongs to their tokens) and matrices.
#pragma once

#include "narrow.cuh"
#include "wide.cuh"

namespace gdn {
namespace prefill {

template <typename T, typename ST, int KK, int NM, Pass PASS>
__device__ __forceinline__ void run_block(const gdn_rule_params &p, const Plan &plan, const Maps &maps) {
  using S = Shape90<KK, NM>;
  extern __shared__ __align__(1024) uint8_t raw_shared[];
  typename S::Shared &shared = *reinterpret_cast<typename S::Shared *>(raw_shared);
  const uint32_t stages = ptx::shared_address(shared.stage);
  const uint32_t full = ptx::shared_address(shared.full), gated = ptx::shared_address(shared.gated);
  const uint32_t normed = ptx::shared_address(shared.normed), used = ptx::shared_address(shared.used);
  const uint32_t empty = ptx::shared_address(shared.empty);
  const uint32_t valued = ptx::shared_address(shared.valued), left = ptx::shared_address(shared.left);
  const uint32_t ready = ptx::shared_address(shared.ready), attended = ptx::shared_address(shared.attended);
  const uint32_t free = ptx::shared_address(shared.free);
  constexpr int kTileRows = 64 * NM;

  Stretch s = stretch_of<PASS>(p, plan, kTileRows, blockIdx.x, 0);
  // The same for a warp, which the compiler must see: products in a branch it takes for divergent are waited for one by one.
  const int group = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 128, 0);
  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32 % 4, 0), lane = ptx::kept_lane();
  if (threadIdx.x == 0) {
    // Every thread arrives for itself, which costs no more than one for its warp would.
    for (int i = 0; i < S::kStages; ++i) {
      ptx::barrier_init(full + 8 * i, 1);
      ptx::barrier_init(gated + 8 * i, 32);
      ptx::barrier_init(normed + 8 * i, 2 * 32);
      ptx::barrier_init(used + 8 * i, 128);
      ptx::barrier_init(empty + 8 * i, 128 * NM);
    }
    for (int i = 0; i < S::kBuffers; ++i) {
      ptx::barrier_init(ready + 8 * i, 128);
      ptx::barrier_init(free + 8 * i, 128 * NM);
      if (S::kWide) ptx::barrier_init(attended + 8 * i, 128);
    }
    if (S::kWide)
      for (int i = 0; i < S::kValues; ++i) {
        ptx::barrier_init(valued + 8 * i, 1);
        ptx::barrier_init(left + 8 * i, 128 * NM);
      }
    if (S::kWide)
      for (int i = 0; i < NM; ++i) ptx::barrier_init(ptx::shared_address(shared.stated) + 8 * i, 128);
    ptx::barriers_initialised();
  }
  const auto is_padding = [&] { return slot_of(p.in_slots, s.n) < 0 || slot_of(p.out_slots, s.n) < 0; };
  const auto clear_rows = [&](int thread, int threads) {
    if (PASS != kTransfer && s.segment == 0) zero_rows<T>(p, s.n, s.seq, s.head, s.row0, kTileRows, thread, threads);
  };
  if constexpr (PASS != kRounds) {
    if (is_padding()) {
      ptx::grid_dependency_wait();    // also where nothing is done: what follows relies on all before being complete
      clear_rows(threadIdx.x, S::kThreads);
      return;
    }
    if (is_idle<PASS>(s, plan)) {
      ptx::grid_dependency_wait();
      return;
    }
  }
  if constexpr (PASS == kTransfer) {
    if (s.identity)    // no values: nothing is copied there
      for (int i = 0; i < (S::kWide ? S::kValues : S::kStages); ++i) {
        uint8_t *tiles;
        if constexpr (S::kWide) tiles = shared.values[i];
        else tiles = shared.stage[i].v;
        for (int at = threadIdx.x; at < NM * kTileBytes / 16; at += S::kThreads)
          reinterpret_cast<uint4 *>(tiles)[at] = make_uint4(0, 0, 0, 0);
      }
  }
  __syncthreads();
  // Of the stretch; token0 counts from the sequence's begin.
  int token0, chunks, tokens, key_head, map_n, map_token;
  const auto enter = [&] {
    token0 = s.begin * kChunk;
    chunks = s.end - s.begin, tokens = s.seq.count - token0;
    key_head = s.head / (p.num_v_heads / p.num_k_heads);
    map_n = p.seqs.cu_seqlens ? 0 : s.n, map_token = static_cast<int>(s.seq.first) + token0;
  };
  enter();
  // What a role does with each of the block's stretches, the same for all roles. Turns go on from one to the next.
  const auto each_stretch = [&](auto &&run) {
    if constexpr (PASS != kRounds) {
      run(0);
    } else {
      const int rounds = rounds_of(plan.rounds, blockIdx.x);
      for (int round = 0; round < rounds; ++round) {
        s = stretch_of<PASS>(p, plan, kTileRows, blockIdx.x, round);
        if (is_padding()) {
          if (group >= S::kMath) clear_rows(threadIdx.x - 128 * S::kMath, 128 * NM);
          continue;
        }
        if (is_idle<PASS>(s, plan)) continue;
        enter();
        run(round);
      }
    }
  };

  // Wide, where registers are short.
  const auto anew = [&](int lane, uint32_t address) { return S::kWide ? ptx::anew(lane, address) : lane; };
  const bool values = PASS != kTransfer || !s.identity;
  // By a lane: k and q of chunk i, side by side, and all that `barrier` waits for; v, and o, which leaves by where v was.
  const auto copy_keys = [&](int i, uint32_t stage, uint32_t barrier) {
    constexpr int kWidth = KK / 64, kBoxes = PASS != kTransfer ? 2 * kWidth : kWidth;
    ptx::barrier_expect(barrier, (kBoxes + (!S::kWide && values)) * kTileBytes);
#pragma unroll 1
    for (int h = 0; h < kBoxes; ++h)
      ptx::copy_box(stage + h * kTileBytes, h < kWidth ? &maps.k : &maps.q, h % kWidth * 64, key_head, map_token + i * kChunk, map_n, barrier);
  };
  const auto copy_values = [&](int i, uint32_t tiles, uint32_t barrier) {
    if (S::kWide) ptx::barrier_expect(barrier, NM * kTileBytes);
#pragma unroll 1
    for (int h = 0; h < NM; ++h)
      ptx::copy_box(tiles + h * kTileBytes, &maps.v, s.row0 + 64 * h, s.head, map_token + i * kChunk, map_n, barrier);
  };
  const auto store_out = [&](int tile, uint32_t tiles) {
    if (PASS == kTransfer) return;
    const int4 to = shared.out[tile];
    if (to.x < 0) return;
#pragma unroll 1
    for (int h = 0; h < NM; ++h) ptx::store_box(tiles + h * kTileBytes, &maps.o, to.x + 64 * h, to.y, to.z, to.w);
    ptx::stores_read();
  };
  const auto note_out = [&](int tile, int i) {    // the stretch's last chunk leaves by rows
    if (PASS != kTransfer)
      shared.out[tile] = make_int4(i + 1 < chunks ? s.row0 : -1, s.head, map_token + i * kChunk, map_n);
  };
  // What follows the sequence is not its own, and may be anything: zero, in tiles side by side, by a warpgroup.
  const auto clear_tail = [&](uint8_t *tiles, uint32_t bytes, int count) {
#pragma unroll 1
    for (uint32_t piece = threadIdx.x % 128; piece < bytes / 16; piece += 128)
      if (static_cast<int>(piece / 8 % kChunk) >= count) reinterpret_cast<uint4 *>(tiles)[piece] = make_uint4(0, 0, 0, 0);
  };

  if (group == 0) {    // four warps that go their own ways, those with most to do beside the makers' warps with least
    fewer_registers<S::kSingleRegisters>();
    const int kept = ptx::lane_here();
    Turn<S::kStages> at;
    if (warp == 3) {
      Turn<S::kValues> value;
      if (lane == 0)
        for (int i = 0; i < S::kOuts; ++i) shared.out[i].x = -1;
      // When nobody reads a tile any more, the output is where v was. The first time round there is nothing to wait for.
      const auto stage_left = [&] { ptx::barrier_wait(empty + 8 * at.index, at.parity ^ 1); };
      const auto values_left = [&] { ptx::barrier_wait(left + 8 * value.index, value.parity ^ 1); };
      each_stretch([&](int) {
        if (lane == 0)
#pragma unroll 1
          for (int i = 0; i < chunks + (S::kWide && values); ++i) {
            if (i < chunks) {
              const uint32_t stage = stages + at.index * S::kStage, barrier = full + 8 * at.index;
              stage_left();
              copy_keys(i, stage, barrier);
              if (!S::kWide && values) {
                store_out(at.index, stage + 2 * S::kQ);
                copy_values(i, stage + 2 * S::kQ, barrier);
                note_out(at.index, i);
              }
              at.next();
            }
            if (S::kWide && values && i > 0) {    // behind q and k of the next chunk, which are wanted before
              const uint32_t tiles = ptx::shared_address(shared.values[value.index]);
              values_left();
              store_out(value.index, tiles);
              copy_values(i - 1, tiles, valued + 8 * value.index);
              note_out(value.index, i - 1);
              value.next();
            }
          }
      });
      if (PASS != kTransfer && lane == 0)
#pragma unroll 1
        for (int i = 0; i < S::kOuts; ++i) {
          if constexpr (S::kWide) {
            if (shared.out[value.index].x >= 0) values_left();
            store_out(value.index, ptx::shared_address(shared.values[value.index]));
            value.next();
          } else {
            if (shared.out[at.index].x >= 0) stage_left();
            store_out(at.index, stages + at.index * S::kStage + 2 * S::kQ);
            at.next();
          }
        }
    } else if (warp == 2) {
      each_stretch([&](int) {
        const float rate = -expf(p.a_log[s.head]) * 1.44269504f, dt_bias = p.dt_bias[s.head];
        GatesAt from = gates_at(p, s.n, s.seq.first + token0, s.head);
        RawGates raw = load_gates(p, from, tokens, kept);
#pragma unroll 1
        for (int i = 0; i < chunks; ++i, at.next()) {
          const int lane = anew(kept, full + 8 * at.index), count = tokens - i * kChunk;
          ptx::barrier_wait(used + 8 * at.index, at.parity ^ 1);
          finish_gates(p, raw, rate, dt_bias, count, lane, shared.gates[at.index], [&] {
            from.next();
            raw = load_gates(p, from, count - kChunk, lane);
          });
          ptx::barrier_arrive(gated + 8 * at.index);
        }
      });
    } else {
      each_stretch([&](int) {
#pragma unroll 1
        for (int i = 0; i < chunks; ++i, at.next()) {
          ptx::barrier_wait(full + 8 * at.index, at.parity);
          if (PASS != kTransfer)
            norms_of_rows<T, KK>(stages + at.index * S::kStage + S::kQ, tokens - i * kChunk, p.l2norm, p.l2_eps, p.scale,
                                 shared.gates[at.index].q_norm, 32 * warp, kept);
          ptx::barrier_arrive(normed + 8 * at.index);
        }
      });
    }
    return;
  }

  if (group < S::kMath) {    // makers
    fewer_registers<S::kMakerRegisters>();
    const int maker = group - 1, kept = ptx::lane_here();
    int before = 0;    // chunks of the stretches before
    Turns<S::kStages, S::kBuffers> turns;
    each_stretch([&](int) {
      for (int i = 0; i < chunks; ++i, turns.next()) {
        if ((before + i) % S::kMakers != maker) continue;
        const Turn<S::kStages> &at = turns.first;
        const Turn<S::kBuffers> &of = turns.second();
        const uint32_t stage = stages + at.index * S::kStage;
        // By an exchange: wherever ptxas is short of registers it would read the lane's number anew, some 50 cycles.
        const int lane = __shfl_sync(0xffffffffu, kept, kept) & 31;
        TokenGates &gates = shared.gates[at.index];
        Matrices &m = shared.matrices[of.index];
        ptx::barrier_wait(full + 8 * at.index, at.parity);
        const int count = tokens - i * kChunk;
        if (count < kChunk) {
          clear_tail(shared.stage[at.index].k, S::kStage, count);
          if (S::kWide && values) {
            // Makers do not follow v chunk by chunk, and a parity does not tell this use of the tile from the one before last: they
            // wait for the end of the last one first.
            const int value = (before + i) % S::kValues, parity = (before + i) / S::kValues % 2;
            ptx::barrier_wait(left + 8 * value, parity ^ 1);
            ptx::barrier_wait(valued + 8 * value, parity);
            clear_tail(shared.values[value], NM * kTileBytes, count);
          }
          ptx::fence_async();
          ptx::group_barrier<128>(group);
        }
        float x[8][4];    // K K^T, then Q K^T
        multiply_by_itself<T, KK>(x, stage);
        ptx::barrier_wait(gated + 8 * at.index, at.parity);
        ptx::barrier_wait(free + 8 * of.index, of.parity ^ 1);
        wgmma::wait<0>();
        wgmma::hold(x);
        const uint32_t inverse = ptx::shared_address(m.inverse), l = inverse + kImageBytes;
        uint32_t left[2][4];
        RowDecays decays;
        {
          const OwnBlock own = own_block(x, warp);
          norms_of_diagonal(own, count, p.l2norm, p.l2_eps, gates, warp, lane);
          ptx::group_barrier<128>(group);
          decays = row_decays(gates, warp, lane);
          decay_keys(x, own, gates, decays, l, m.blocks[warp], left, warp, lane);
          if (S::kWide && PASS != kTransfer) {
            shared.decays[maker][32 * warp + lane] = make_float4(decays.top[0], decays.top[1], decays.low[0], decays.low[1]);
            shared.more_decays[maker][32 * warp + lane] = make_float2(decays.end[0], decays.end[1]);
          }
        }
        if (PASS != kTransfer && !S::kWide) multiply_tiles<T, KK>(x, stage + S::kQ, stage);    // while L is inverted
        invert64<T, true>(l, m.blocks[warp], left, gates.beta, inverse, warp, lane, {group, group + 5, group + 7},
                          [&] { key_factors(gates, m.factors, warp, lane); });
        const int again = anew(lane, stage);    // or what follows from it would be kept, and spilled, while L is inverted
        if (S::kWide && PASS != kTransfer) {    // has no registers for two things at once, but the inverse is wanted first
          ptx::fence_async();
          ptx::barrier_arrive(ready + 8 * of.index);
          multiply_tiles<T, KK>(x, stage + S::kQ, stage);
          const float4 d = shared.decays[maker][32 * warp + again];
          const float2 end = shared.more_decays[maker][32 * warp + again];
          decays = {{d.x, d.y}, {d.z, d.w}, {end.x, end.y}};
        }
        ptx::barrier_wait(normed + 8 * at.index, at.parity);    // kTransfer too, or those warps could fall two turns behind
        if (PASS != kTransfer) {
          query_factors(gates, m.factors, warp, again);
          const float *norms = gates.q_norm + 16 * warp + again / 4;
          const float scales[2] = {norms[0], norms[8]};
          ptx::group_barrier<128>(group);    // the attention takes the place of L
          wgmma::wait<0>();
          wgmma::hold(x);
          decay_queries<T>(x, gates, decays, scales, l, warp, again);
        }
        ptx::fence_async();
        ptx::barrier_arrive((S::kWide && PASS != kTransfer ? attended : ready) + 8 * of.index);
        ptx::barrier_arrive(used + 8 * at.index);
      }
      before += chunks;
    });
    return;
  }

  more_registers<S::kMathRegisters>();
  // The state has time until the first matrices are there. Where many ask for theirs at once it lets k and q go first: 64 tokens of
  // 64 heads take 0.2 us less.
  if (PASS == kWhole && gridDim.x > 96 && s.segment == 0 && chunks > 0) ptx::barrier_wait(full, 0);
  MathTurns<S> turns;
  each_stretch([&](int round) {
    if constexpr (S::kWide) wide_scan<T, ST, KK, PASS>(p, plan, shared, s, round, turns, group - S::kMath, warp, ptx::lane_here());
    else narrow_scan<T, ST, KK, PASS>(p, plan, shared, s, turns, warp, ptx::lane_here());
  });
}

// PASS kFirst: its blocks and kTransfer's. The former take longer and begin first.
template <typename T, typename ST, int KK, int NM, Pass PASS>
__global__ void __launch_bounds__(Shape90<KK, NM>::kThreads, 1)
sm90_kernel(const __grid_constant__ gdn_rule_params p, const __grid_constant__ Plan plan, const __grid_constant__ Maps maps) {
  if (PASS != kFirst || blockIdx.x < first_blocks(p, plan)) run_block<T, ST, KK, NM, PASS>(p, plan, maps);
  else run_block<T, ST, KK, NM, kTransfer>(p, plan, maps);
}

}  // namespace prefill
}  // namespace gdn
