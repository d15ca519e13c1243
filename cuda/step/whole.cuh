// A block holds whole heads: one value head (the rule alone), or all value heads of a key head (the fused step, where
// they share the convolution of q and k and its state). 1 to 16 tokens.
//
// A warp owns a quarter of the value rows. It streams them through shared memory, eight rows a tile, each lane copying what it
// will use itself, so that no warp waits for another: registers could not hold the loads of a whole head in flight. What all
// warps need (q and k normalised, v, gates) is prepared once, while the state is under way. Its loads come first: after the
// state's they would arrive last.
#pragma once

#include "../common/host.cuh"
#include "../common/profile.cuh"
#include "../common/sequences.cuh"
#include "lanes.cuh"
#include "prepare.cuh"
#include "stream.cuh"

namespace gdn {
namespace step {

// What a block holds: one value head of the rule alone; all value heads of a key head in the fused step; or one of them,
// with the others in the other blocks of its cluster, where there are too few key heads to fill the card.
enum class Unit { kRule, kKeyHead, kValueHead };

// Rows a lane group of LANES holds of a tile, so that a warp holds 16 or 8: more have more arithmetic in work at once, fewer leave room
// for more blocks. Measured.
template <Unit UNIT, bool MANY, int LANES> constexpr int kRows = (MANY && UNIT != Unit::kRule ? 4 : 2) * LANES / 8;

constexpr int kHeader = 16;    // bytes between the tiles and the records; a barrier has eight of them

// One function: its parts share the tiles, the barriers and the registers of every value row.
template <typename T, typename ST, int K, int V, Unit UNIT, bool MANY, int DEPTH>
__global__ void __launch_bounds__(32 * kWarps, 4)
whole_kernel(const __grid_constant__ ParamsOf<UNIT != Unit::kRule> p
             GDN_PROFILED(, const __grid_constant__ profile::Target target)) {
  constexpr bool FUSED = UNIT != Unit::kRule, CLUSTER = UNIT == Unit::kValueHead;
  if (CLUSTER && !ptx::kSm90) return;
  GDN_PROFILED(profile::Stamps stamps(target, FUSED ? profile::kStep : profile::kDecode);)
  using L = Lanes<ST, K>;
  constexpr int ROWS = kRows<UNIT, MANY, L::kLanes>;
  using R = StateStream<ST, K, V, ROWS, DEPTH>;
  extern __shared__ __align__(128) uint8_t smem[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, part = lane % L::kLanes;
  const int unit = blockIdx.x, n = blockIdx.y;    // neighbours in memory run side by side
  const int shared_by = p.common.num_v_heads / p.common.num_k_heads;
  const int ratio = UNIT == Unit::kKeyHead ? shared_by : 1;    // value heads of this block
  const int head0 = unit * ratio, key_head = UNIT == Unit::kKeyHead ? unit : unit / shared_by;

  // At the first block of a cluster: all blocks arrive when they have read the convolution's state.
  const uint32_t all_read = ptx::shared_address(smem + R::kBytes);
  if constexpr (CLUSTER) {
    if (threadIdx.x == 0) {
      ptx::barrier_init(all_read, shared_by);
      ptx::barriers_initialised();
    }
    __syncwarp();
    ptx::cluster_begin_arrive();    // all blocks must run before one writes into another
  }

  const Tokens seq = MANY ? tokens_of(p.common.seqs, n) : Tokens{0, 1};
  const int64_t in_slot = slot_of(p.common.in_slots, n), out_slot = slot_of(p.common.out_slots, n);
  const gdn_heads &o_heads = output_of(p);
  if (in_slot < 0 || out_slot < 0) {    // padding
    if constexpr (FUSED) ptx::grid_dependency_wait();
    for (int i = threadIdx.x; i < seq.count * ratio * V; i += 32 * kWarps)
      out_heads_at<T>(o_heads, n, seq.first + i / (ratio * V), head0)[i / V % ratio * o_heads.head_stride + i % V] = from_float<T>(0.f);
    if constexpr (CLUSTER) ptx::cluster_begin_wait();
    GDN_PROFILED(stamps.lap(profile::kPadding);)
    return;
  }

  // Prepare the tokens, the state's loads under way.
  float *const records = reinterpret_cast<float *>(smem + R::kBytes + kHeader);
  const Record<K, V> layout{ratio};
  const int64_t within = (static_cast<int64_t>(head0) * V + warp * R::kTileRows) * K;
  const int tiles = ratio * R::kTiles;
  R stream(smem, static_cast<const ST *>(p.common.state_in) + in_slot * p.common.in_slots.slot_stride + within,
            static_cast<ST *>(p.common.state_out) + out_slot * p.common.out_slots.slot_stride + within, tiles, warp, lane);
  Prepare<T, K, V, FUSED, CLUSTER, MANY> prepare{p, layout, records, n, seq, in_slot,
                                                 out_slot, key_head, head0, warp, lane GDN_PROFILED(, stamps)};
  GDN_PROFILED(stamps.lap(profile::kSetup);)
  prepare([&] {
    GDN_PROFILED(stamps.lap(profile::kLoadQkv);)
    stream.start();
    GDN_PROFILED(stamps.lap(profile::kLoadState);)
  });
  __syncthreads();
  if constexpr (CLUSTER) {
    ptx::cluster_begin_wait();
    if (threadIdx.x == 0) ptx::barrier_arrive_at(all_read, 0);
  }
  if constexpr (MANY) {
    prepare.products();
    __syncthreads();
  }

  GDN_PROFILED(stamps.lap(profile::kBarrier);)

  // The rule, tile by tile.
  float k[L::kEach], q[L::kEach], kq[1] = {0.f};
  if constexpr (!MANY) {
    L::slice(records + layout.k, part, k);
    L::slice(records + layout.q, part, q);
    kq[0] = dot(k, q);
    row_sums<L::kLanes>(kq);
  }
  for (int i = 0; i < tiles; ++i) {
    float state[ROWS][L::kEach];
    stream.read(i, state);
    GDN_PROFILED(stamps.wait(profile::kWaitState, state);)
    const int h = i / R::kTiles, row = (i % R::kTiles * kWarps + warp) * R::kTileRows + lane / L::kLanes * ROWS;
    for (int t = 0; t < (MANY ? seq.count : 1); ++t) {
      float *record = records + t * layout.size();
      if constexpr (MANY) {
        L::slice(record + layout.k, part, k);
        L::slice(record + layout.q, part, q);
        kq[0] = record[layout.kq()];
      }
      const float2 gates = *reinterpret_cast<const float2 *>(record + layout.gates(h));
      // This lane computes o of row out_row, if has_row.
      constexpr bool kScattered = 2 * ROWS == L::kLanes;
      const int out_row = kScattered ? part / 2 : part;
      const bool has_row = kScattered ? part % 2 == 1 : part < ROWS;
      float *const values = record + layout.v(h) + row;
      float o;
      if constexpr (kScattered) {
        o = update_scattered(state, k, q, values[out_row], gates.x, gates.y, kq[0], part);
      } else {
        float v[ROWS], all[ROWS];
#pragma unroll
        for (int r = 0; r < ROWS; ++r) v[r] = values[r];
        update<L::kLanes>(state, k, q, v, gates.x, gates.y, kq[0], all);
        o = part == 0 ? all[0] : all[ROWS - 1];
      }
      if constexpr (FUSED) {
        __syncwarp();    // all lanes have read v, which o replaces
        if (has_row) values[out_row] = o;
      } else {
        if (has_row) out_heads_at<T>(o_heads, n, seq.first + t, head0)[row + out_row] = from_float<T>(o);
      }
    }
    GDN_PROFILED(stamps.lap(profile::kUpdate);)
    stream.write(i, state);
    GDN_PROFILED(stamps.lap(profile::kStoreState);)
  }
  // Norm.
  if constexpr (FUSED) {
    __syncthreads();
    GDN_PROFILED(stamps.lap(profile::kBarrier);)
    prepare.norm();
    GDN_PROFILED(stamps.lap(profile::kOutput);)
  }
  // The convolution's state of q and k.
  if constexpr (CLUSTER) {
    if (unit % shared_by == 0 && warp < 2) {
      ptx::barrier_wait_cluster(all_read, 0);
      prepare.store_window(warp);
    }
    GDN_PROFILED(stamps.lap(profile::kStoreConv);)
  }
}

}  // namespace step
}  // namespace gdn
