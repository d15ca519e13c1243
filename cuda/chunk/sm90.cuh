// The chunk form in one kernel with the instructions of sm_90a.
//
// A block owns 64 value rows of a head for each of its NM warpgroups of arithmetic (narrow.cuh, wide.cuh), and walks through the
// chunks of its stretch with the state in their registers. Beside them
//   - a warpgroup of four single warps: one loads q, k and v and stores o (bulk tensor copies), one makes the gates, two the norms
//     of q,
//   - two warpgroups, the makers, that make the matrices of a chunk, each of every second one.
// They hand over stages (copied tiles, gates and norms of their tokens) and matrices by barriers in shared memory (shape90.cuh).
// Each role is a function `run_<role>`.
#pragma once

#include "narrow.cuh"
#include "wide.cuh"

namespace gdn {
namespace chunk {

// What every thread of a block knows: its stretch, and the addresses of stages and matrices.
template <typename T, typename ST, int KK, int NM, Pass PASS> struct Block90 {
  using S = Shape90<KK, NM>;
  using Shared = typename S::Shared;
  static constexpr int kTileRows = 64 * NM;

  const gdn_rule_params &p;
  const Plan &plan;
  const Maps &maps;
  Shared &shared;
  uint32_t stages;
  Barriers full, gated, normed, used, empty, valued, drained, ready, attended, free;
  Stretch s;
  int group, warp, lane;
  // Of the stretch; token0 counts from the sequence's begin.
  int token0, chunks, tokens, key_head, map_n, map_token;
  bool values;    // false where kTransfer runs the identity
  GDN_PROFILED(profile::LeanStamps stamps;)

  __device__ __forceinline__ Block90(const gdn_rule_params &params, const Plan &made, const Maps &of, Shared &memory)
      : p(params), plan(made), maps(of), shared(memory), stages(ptx::shared_address(memory.stage)), full(memory.full),
        gated(memory.gated), normed(memory.normed), used(memory.used), empty(memory.empty), valued(memory.valued), drained(memory.drained),
        ready(memory.ready), attended(memory.attended), free(memory.free)
        GDN_PROFILED(, stamps(made.profile, role_of(threadIdx.x / 32))) {
    s = stretch_of<PASS>(p, plan, kTileRows, blockIdx.x, 0);
    // Uniform for a warp, and the compiler must see it: in a branch that it considers divergent it waits for each product.
    group = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 128, 0);
    warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32 % 4, 0), lane = ptx::kept_lane();
  }

#ifdef GDN_PROFILE
  static __device__ __forceinline__ profile::Role role_of(int warp) {
    if (warp >= 4 * S::kMath) return profile::kMath;
    if (warp >= 4) return profile::kMaker;
    return warp == kLoadWarp ? profile::kLoader : warp == kGateWarp ? profile::kGateWarp : profile::kNormWarp;
  }
#endif

  // ---- set-up ----

  // By one thread. Every thread arrives by itself, which costs no more than one arrival a warp.
  __device__ __forceinline__ void init_barriers() {
    for (int i = 0; i < S::kStages; ++i) {
      full.init(i, 1);
      gated.init(i, 32);
      normed.init(i, 2 * 32);
      used.init(i, 128);
      empty.init(i, 128 * NM);
    }
    for (int i = 0; i < S::kBuffers; ++i) {
      ready.init(i, 128);
      free.init(i, 128 * NM);
      if (S::kWide || i == 0) attended.init(i, 128);
    }
    if (S::kWide)
      for (int i = 0; i < S::kValues; ++i) {
        valued.init(i, 1);
        drained.init(i, 128 * NM);
      }
    if (S::kWide)
      for (int i = 0; i < NM; ++i) Barriers(shared.stated).init(i, 128);
    ptx::barriers_initialised();
  }

  __device__ __forceinline__ bool is_padding() const { return slot_of(p.common.in_slots, s.n) < 0 || slot_of(p.common.out_slots, s.n) < 0; }

  __device__ __forceinline__ void clear_rows(int thread, int threads) const {
    if (PASS != kTransfer && s.segment == 0) zero_rows<T>(p, s.n, s.seq, s.head, s.row0, kTileRows, thread, threads);
  }

  // Without values no copies come: the tiles are set to zero once.
  __device__ __forceinline__ void clear_values() {
    for (int i = 0; i < (S::kWide ? S::kValues : S::kStages); ++i) {
      uint8_t *tiles;
      if constexpr (S::kWide) tiles = shared.values[i];
      else tiles = shared.stage[i].v;
      for (int at = threadIdx.x; at < NM * kTileBytes / 16; at += S::kThreads)
        reinterpret_cast<uint4 *>(tiles)[at] = make_uint4(0, 0, 0, 0);
    }
  }

  __device__ __forceinline__ void enter_stretch() {
    token0 = s.begin * kChunk;
    chunks = s.end - s.begin, tokens = s.seq.count - token0;
    key_head = s.head / (p.common.num_v_heads / p.common.num_k_heads);
    map_n = p.common.seqs.cu_seqlens ? 0 : s.n, map_token = static_cast<int>(s.seq.first) + token0;
  }

  // Runs a role over each of the block's stretches, the same for all roles. Phases continue from one to the next.
  template <typename F> __device__ __forceinline__ void each_stretch(F &&run) {
    if constexpr (PASS != kSeveral) {
      run(0);
    } else {
      const int rounds = rounds_of(plan.rounds, blockIdx.x);
      for (int round = 0; round < rounds; ++round) {
        s = stretch_of<PASS>(p, plan, kTileRows, blockIdx.x, round);
        if (is_padding()) {
          if (group >= S::kMath) clear_rows(threadIdx.x - 128 * S::kMath, 128 * NM);
          GDN_PROFILED(stamps.lap(profile::kPadding);)
          continue;
        }
        if (is_idle<PASS>(s, plan)) continue;
        enter_stretch();
        GDN_PROFILED(stamps.lap(profile::kSetup);)
        run(round);
      }
    }
  }

  // For the wide form, which has few registers.
  static __device__ __forceinline__ int recompute_lane(int lane, uint32_t address) { return S::kWide ? ptx::recompute_lane(lane, address) : lane; }

  // ---- the loader: a lane ----

  // Copies k and q of chunk i, side by side, and sets the bytes that `barrier` expects.
  __device__ __forceinline__ void copy_keys(int i, uint32_t stage, uint32_t barrier) const {
    constexpr int kWidth = KK / 64, kBoxes = PASS != kTransfer ? 2 * kWidth : kWidth;
    ptx::barrier_expect(barrier, (kBoxes + (!S::kWide && values)) * kTileBytes);
#pragma unroll
    for (int h = 0; h < kBoxes; ++h)
      ptx::copy_box(stage + h * kTileBytes, h < kWidth ? &maps.k : &maps.q, h % kWidth * 64, key_head, map_token + i * kChunk, map_n, barrier);
  }

  // Copies its v, and stores o from the place of v.
  __device__ __forceinline__ void copy_values(int i, uint32_t tiles, uint32_t barrier) const {
    if (S::kWide) ptx::barrier_expect(barrier, NM * kTileBytes);
#pragma unroll 1
    for (int h = 0; h < NM; ++h)
      ptx::copy_box(tiles + h * kTileBytes, &maps.v, s.row0 + 64 * h, s.head, map_token + i * kChunk, map_n, barrier);
  }
  __device__ __forceinline__ void store_out(int tile, uint32_t tiles) const {
    if (PASS == kTransfer) return;
    const int4 to = shared.out[tile];
    if (to.x < 0) return;
#pragma unroll 1
    for (int h = 0; h < NM; ++h) ptx::store_box(tiles + h * kTileBytes, &maps.o, to.x + 64 * h, to.y, to.z, to.w);
    ptx::stores_read();
  }
  __device__ __forceinline__ void note_out(int tile, int i) const {    // the stretch's last chunk is stored by rows
    if (PASS != kTransfer)
      shared.out[tile] = make_int4(i + 1 < chunks ? s.row0 : -1, s.head, map_token + i * kChunk, map_n);
  }

  __device__ __forceinline__ void run_loader(Phase<S::kStages> &at) {
    Phase<S::kValues> value;
    if (lane == 0)
      for (int i = 0; i < S::kOuts; ++i) shared.out[i].x = -1;
    // A tile that has been read holds the output, in the place of v.
    each_stretch([&](int) {
      if (lane == 0)
#pragma unroll 1
        for (int i = 0; i < chunks + (S::kWide && values); ++i) {
          if (i < chunks) {
            const uint32_t stage = stages + at.index * S::kStage, barrier = full[at.index];
            empty.wait_before(at);
            GDN_PROFILED(stamps.lap(profile::kWaitFree, i);)
            copy_keys(i, stage, barrier);
            GDN_PROFILED(stamps.lap(profile::kCopyKeys);)
            if (!S::kWide && values) {
              store_out(at.index, stage + 2 * S::kQ);
              copy_values(i, stage + 2 * S::kQ, barrier);
              note_out(at.index, i);
              GDN_PROFILED(stamps.lap(profile::kCopyValues);)
            }
            at.next();
          }
          if (S::kWide && values && i > 0) {    // after q and k of the next chunk, which are needed first
            const uint32_t tiles = ptx::shared_address(shared.values[value.index]);
            drained.wait_before(value);
            GDN_PROFILED(stamps.lap(profile::kWaitFree, i - 1);)
            store_out(value.index, tiles);
            copy_values(i - 1, tiles, valued[value.index]);
            note_out(value.index, i - 1);
            GDN_PROFILED(stamps.lap(profile::kCopyValues);)
            value.next();
          }
        }
    });
    if (PASS != kTransfer && lane == 0)
#pragma unroll 1
      for (int i = 0; i < S::kOuts; ++i) {
        if constexpr (S::kWide) {
          if (shared.out[value.index].x >= 0) drained.wait_before(value);
          store_out(value.index, ptx::shared_address(shared.values[value.index]));
          value.next();
        } else {
          if (shared.out[at.index].x >= 0) empty.wait_before(at);
          store_out(at.index, stages + at.index * S::kStage + 2 * S::kQ);
          at.next();
        }
      }
    GDN_PROFILED(stamps.lap(profile::kSendOut);)
  }

  // ---- gates: a warp; norms of q: two ----

  __device__ __forceinline__ void run_gates(Phase<S::kStages> &at, int kept) {
    each_stretch([&](int) {
      const float2 factors = gate_factors(p, s.head);
      GatesAt from = gates_at(p, s.n, s.seq.first + token0, s.head);
      RawGates raw = load_gates(p, from, tokens, kept);
      GDN_PROFILED(stamps.lap(profile::kLoadQkv);)
#pragma unroll 1
      for (int i = 0; i < chunks; ++i, at.next()) {
        const int lane = recompute_lane(kept, full[at.index]), count = tokens - i * kChunk;
        used.wait_before(at);
        GDN_PROFILED(stamps.lap(profile::kWaitFree, i);)
        finish_gates(p, raw, factors.x, factors.y, count, lane, shared.gates[at.index], [&] {
          from.next();
          raw = load_gates(p, from, count - kChunk, lane);
        });
        gated.arrive(at.index);
        GDN_PROFILED(stamps.lap(profile::kGates);)
      }
    });
  }

  __device__ __forceinline__ void run_norms(Phase<S::kStages> &at, int kept) {
    each_stretch([&](int) {
#pragma unroll 1
      for (int i = 0; i < chunks; ++i, at.next()) {
        full.wait(at);
        GDN_PROFILED(stamps.lap(profile::kWaitTiles, i);)
        if (PASS != kTransfer)
          norms_of_rows<T, KK>(stages + at.index * S::kStage + S::kQ, tokens - i * kChunk, p.common.l2norm, p.common.l2_eps, p.common.scale,
                               shared.gates[at.index].q_norm, 32 * warp, kept);
        normed.arrive(at.index);
        GDN_PROFILED(stamps.lap(profile::kNormalise);)
      }
    });
  }

  // ---- a maker: a warpgroup ----

  // Sets the rows of tiles side by side from `count` on to zero.
  static __device__ __forceinline__ void clear_tail(uint8_t *tiles, uint32_t bytes, int count) {
#pragma unroll 1
    for (uint32_t piece = threadIdx.x % 128; piece < bytes / 16; piece += 128)
      if (static_cast<int>(piece / 8 % kChunk) >= count) reinterpret_cast<uint4 *>(tiles)[piece] = make_uint4(0, 0, 0, 0);
  }

  // Clears the rows of k and v after a sequence's last `count` tokens, where they belong to other sequences. Such rows of q make only
  // rows of o that are not stored. `chunk` counts over all stretches.
  __device__ __forceinline__ void clear_tails(const Phase<S::kStages> &at, int chunk, int count, int maker) {
    clear_tail(shared.stage[at.index].k, S::kQ, count);
    if constexpr (!S::kWide) clear_tail(shared.stage[at.index].v, kTileBytes, count);
    if (S::kWide && values) {
      // Makers do not follow v chunk by chunk, and a parity does not distinguish this use of the tile from the one before last:
      // they first wait for the end of the last use.
      const int value = chunk % S::kValues, parity = chunk / S::kValues % 2;
      drained.wait(value, parity ^ 1);
      valued.wait(value, parity);
      clear_tail(shared.values[value], NM * kTileBytes, count);
    }
    ptx::fence_async();
    ptx::group_barrier<128>(kMakerBarrier + maker);
  }

  // Whether a chunk's attention has a barrier of its own. In the narrow form the first chunk alone: nothing was made ahead of it.
  static __device__ __forceinline__ bool attention_apart(bool first) {
    return S::kWide ? PASS != kTransfer : attends_apart<PASS>() && first;
  }

  __device__ __forceinline__ void make_matrices(const Phase<S::kStages> &at, const Phase<S::kBuffers> &of, int i, int before, int maker,
                                                int kept) {
    const uint32_t stage = stages + at.index * S::kStage;
    // By an exchange: where ptxas is short of registers it would read the lane's number again, about 50 cycles.
    const int lane = __shfl_sync(0xffffffffu, kept, kept) & 31;
    TokenGates &gates = shared.gates[at.index];
    Matrices &m = shared.matrices[of.index];
    // Wait for k and q; K K^T.
    full.wait(at);
    GDN_PROFILED(stamps.lap(profile::kWaitTiles, i);)
    const int count = tokens - i * kChunk;
    if (s.cut_off && count < kChunk) clear_tails(at, before + i, count, maker);
    float x[8][4];    // K K^T, then Q K^T
    multiply_by_itself<T, KK>(x, stage);
    GDN_PROFILED(stamps.lap(profile::kKeys);)
    // Wait for the gates and a free buffer.
    gated.wait(at);
    GDN_PROFILED(stamps.lap(profile::kWaitGates);)
    free.wait_before(of);
    GDN_PROFILED(stamps.lap(profile::kWaitFree);)
    wgmma::wait<0>();
    wgmma::hold(x);
    GDN_PROFILED(stamps.lap(profile::kWaitKeys);)
    // L: norms, decays.
    const uint32_t inverse = ptx::shared_address(m.inverse), l = inverse + kImageBytes;
    uint32_t left_blocks[2][4];
    RowDecays decays;
    {
      const OwnBlock own = own_block(x, warp);
      norms_of_diagonal(own, count, p.common.l2norm, p.common.l2_eps, gates, warp, lane);
      ptx::group_barrier<128>(kMakerBarrier + maker);
      decays = row_decays(gates, warp, lane);
      decay_keys(x, own, gates, decays, l, m.blocks[warp], left_blocks, warp, lane);
      if (S::kWide && PASS != kTransfer) {
        shared.decays[maker][32 * warp + lane] = make_float4(decays.top[0], decays.top[1], decays.low[0], decays.low[1]);
        shared.more_decays[maker][32 * warp + lane] = make_float2(decays.end[0], decays.end[1]);
      }
    }
    if (PASS != kTransfer && !S::kWide) multiply_tiles<T, KK>(x, stage + S::kQ, stage);    // while L is inverted
    GDN_PROFILED(stamps.lap(profile::kLower);)
    // Invert I + L.
    invert64<T, true>(l, m.blocks[warp], left_blocks, inverse, warp, lane,
                      {kMakerBarrier + maker, kPairBarrier + maker, kHalfBarrier + maker}, [&] { key_factors(gates, m.factors, warp, lane); });
    GDN_PROFILED(stamps.lap(profile::kInvert);)
    const int again = recompute_lane(lane, stage);    // or values that depend on it would be kept, and spilled, while L is inverted
    const bool apart = attention_apart(i == 0);
    if (apart) {    // the inverse is needed first
      ptx::fence_async();
      ready.arrive(of.index);
    }
    if (S::kWide && PASS != kTransfer) {    // there are no registers for both at once
      multiply_tiles<T, KK>(x, stage + S::kQ, stage);
      const float4 d = shared.decays[maker][32 * warp + again];
      const float2 end = shared.more_decays[maker][32 * warp + again];
      decays = {{d.x, d.y}, {d.z, d.w}, {end.x, end.y}};
    }
    GDN_PROFILED(if (S::kWide && PASS != kTransfer) stamps.lap(profile::kAttention);)
    // The attention: Q K^T, norms and decays.
    normed.wait(at);    // kTransfer too, or those warps could lag by two phases
    GDN_PROFILED(stamps.lap(profile::kWaitNorms);)
    if (PASS != kTransfer) {
      query_factors(gates, m.factors, warp, again);
      const float *norms = gates.q_norm + 16 * warp + again / 4;
      const float scales[2] = {norms[0], norms[8]};
      ptx::group_barrier<128>(kMakerBarrier + maker);    // the attention takes the place of L
      wgmma::wait<0>();
      wgmma::hold(x);
      decay_queries<T>(x, gates, decays, scales, l, warp, again);
    }
    ptx::fence_async();
    (apart ? attended : ready).arrive(of.index);
    used.arrive(at.index);
    GDN_PROFILED(stamps.lap(profile::kAttention);)
  }

  __device__ __forceinline__ void run_maker(int maker) {
    const int kept = ptx::lane_here();
    int before = 0;    // chunks of the stretches before
    Phases<S::kStages, S::kBuffers> phases;
    each_stretch([&](int) {
      for (int i = 0; i < chunks; ++i, phases.next())
        if ((before + i) % S::kMakers == maker)
          make_matrices(phases.first, phases.second(), i, before, maker, kept);
      before += chunks;
    });
  }

  // ---- arithmetic: a warpgroup for 64 value rows ----

  __device__ __forceinline__ void run_math() {
    // The state is not needed before the first matrices. Where many blocks load theirs at once k and q go first: 64 tokens of 64
    // heads take 0.2 us less.
    if (PASS == kWhole && gridDim.x > 96 && s.segment == 0 && chunks > 0) full.wait(0, 0);
    GDN_PROFILED(stamps.lap(profile::kWaitTiles);)
    MathPhases<S> phases;
    each_stretch([&](int round) {
      if constexpr (S::kWide)
        wide_scan<T, ST, KK, PASS>(p, plan, shared, s, round, phases, group - S::kMath, warp, ptx::lane_here() GDN_PROFILED(, stamps));
      else
        narrow_scan<T, ST, KK, PASS>(p, plan, shared, s, phases, warp, ptx::lane_here() GDN_PROFILED(, stamps));
    });
  }
};

}  // namespace chunk
}  // namespace gdn
