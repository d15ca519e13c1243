// Context parallelism: a sequence is cut into segments that run side by side.
//
// A segment maps the state before it to the one after it: S -> S M + N, with N what it makes of no state at all and M what it
// makes of the identity when there are no values. The first segment is run as it is; the transfer pass finds both for the
// others but the last, all at once; this kernel goes through them and puts the state after each in the place of its N. Of a head that
// forgets within a segment N is that already, and needs no M (borders.cuh).
//
// Transposed, S^T <- M^T S^T + N^T, the left operand is M, which comes from memory right into the registers that hold it as an
// operand: they are loaded for the next segment as soon as they are used, a whole step ahead. Only the state is
// in shared memory. A cluster shares the columns of M, so that it leaves L2 less often; blocks then send each other the columns
// that they made, and begin a step with their own.
#pragma once

#include <stddef.h>

#include "stretch.cuh"

namespace gdn {
namespace chunk {

// How a combination is divided. A block has ROWS rows of the state and a CLUSTERth of its columns; a warp 16 TILES of those, all
// rows, and a PARTSth of k. EXACT: head_k is KK, and need not be asked for at each load.
template <int KK, int ROWS, int CLUSTER, int TILES, int PARTS, bool EXACT> struct Combination {
  static constexpr int kK = KK, kRows = ROWS, kCluster = CLUSTER, kTiles = TILES, kParts = PARTS;
  static constexpr bool kExact = EXACT;
  static constexpr int kColumns = KK / CLUSTER;
  static constexpr int kGroups = kColumns / (16 * TILES);    // warps side by side
  static constexpr int kThreads = 32 * kGroups * PARTS;
  static constexpr int kPack = 2 * TILES;                    // columns of a lane, side by side
  static constexpr int kRowTiles = ROWS / 8;
  static constexpr int kDone = kRowTiles / PARTS;            // of which a warp sums up the parts
  static constexpr int kSlice = kColumns / PARTS;            // of k: a warp's, of the columns of one block
  static constexpr int kUnit = kSlice < 16 ? 8 : 16;         // of k: what one load of the state has
  static constexpr int kUnits = kSlice / kUnit;
  // Sums of a tile: six chains of products or more, since a warp may be alone on its tensor core.
  static constexpr int kSums = TILES * kRowTiles < 4 ? 3 : TILES * kRowTiles < 6 ? 2 : 1;
  static_assert(kGroups > 0 && kDone > 0 && kSlice % kUnit == 0 && kColumns % 32 == 0);

  struct Shared {
    float state[2][ROWS * KK];
    float4 partial[PARTS > 1 ? PARTS * (PARTS - 1) * kGroups * kDone * TILES * 32 : 1];
    uint64_t arrived[2];    // what other blocks send of a state
  };
};

namespace detail {

// TF32 in two parts: three products keep f32's precision, as a sum over segments must.
template <int N> __device__ __forceinline__ void split(float (&hi)[N], float (&lo)[N], const float (&x)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    hi[i] = __uint_as_float(__float_as_uint(x[i]) & 0xffffe000u);
    lo[i] = x[i] - hi[i];
  }
}

// Some floats side by side.
template <int N> struct alignas(4 * N) Pack {
  float x[N];
};

// Loads data that the kernel before this one wrote; `x` stays as it is unless `there`. Volatile: a prefetch that must not move.
template <int N> __device__ __forceinline__ void load_floats(float (&x)[N], const float *from, bool there) {
  static_assert(N == 2 || N == 4);
  if constexpr (N == 2)
    asm volatile("{\n.reg .pred there;\nsetp.ne.b32 there, %3, 0;\n"
                 "@there ld.global.L1::no_allocate.v2.f32 {%0, %1}, [%2];\n}"
                 : "+f"(x[0]), "+f"(x[1]) : "l"(from), "r"(static_cast<int>(there)));
  else
    asm volatile("{\n.reg .pred there;\nsetp.ne.b32 there, %5, 0;\n"
                 "@there ld.global.L1::no_allocate.v4.f32 {%0, %1, %2, %3}, [%4];\n}"
                 : "+f"(x[0]), "+f"(x[1]), "+f"(x[2]), "+f"(x[3]) : "l"(from), "r"(static_cast<int>(there)));
}

// ptx::barrier_wait_cluster() for what came by store_async(): acquires shared memory alone, and leaves L1 as it is (CCTL.IVALL).
__device__ __forceinline__ void wait_arrived(uint32_t barrier, uint32_t parity) {
#if __CUDA_ARCH__ >= 900 && __CUDACC_VER_MAJOR__ >= 13
  asm volatile(
      "{\n.reg .pred done;\n"
      "again_%=:\n"
      "mbarrier.try_wait.parity.relaxed.cluster.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again_%=;\n"
      "fence.acquire.sync_restrict::shared::cluster.cluster;\n}" ::"r"(barrier), "r"(parity)
      : "memory");
#else
  ptx::barrier_wait_cluster(barrier, parity);
#endif
}

// Into another block's shared memory, its arrival counted by the barrier there (ptx::store_async() of several words).
template <int N> __device__ __forceinline__ void store_async(uint32_t there, const float (&x)[N], uint32_t barrier_there) {
#if __CUDA_ARCH__ >= 900
  if constexpr (N == 2)
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%0], {%1, %2}, [%3];" ::"r"(there),
                 "r"(__float_as_uint(x[0])), "r"(__float_as_uint(x[1])), "r"(barrier_there)
                 : "memory");
  else
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(there),
                 "r"(__float_as_uint(x[0])), "r"(__float_as_uint(x[1])), "r"(__float_as_uint(x[2])),
                 "r"(__float_as_uint(x[3])), "r"(barrier_there)
                 : "memory");
#endif
}

// Where a column of a row lies among the floats of a state [rows, KK] in shared memory. Pieces of 16 bytes are swizzled so that
// neither reads of eight rows along k meet in a bank nor writes of every second row.
template <int KK> __device__ __forceinline__ int state_place(int row, int column) {
  const int swizzle = ((row ^ row >> 2) & 1) << 2 | (row & 2);
  return row * KK + (column ^ swizzle << 2);
}

}  // namespace detail

// acc[t] += (rows' tile t of the state)(this warp's columns of M), over one unit of k. Lane (g, c) = (lane / 4, lane % 4) holds
// of M the rows c kUnit / 4 and on, its columns kPack g and on; of the state those k in row g of each tile: any order of k and of
// columns that all agree on.
template <typename C>
__device__ __forceinline__ void combine_unit(float (&acc)[C::kSums][C::kRowTiles][C::kTiles][4],
                                             const float (&m)[C::kUnit / 4][C::kPack],
                                             const detail::Pack<C::kUnit / 4> (&state)[C::kRowTiles]) {
  constexpr int kRowTiles = C::kRowTiles, kTiles = C::kTiles, kSums = C::kSums;
#pragma unroll
  for (int k = 0; k < C::kUnit / 8; ++k) {
    float ah[kTiles][4], al[kTiles][4], bh[kRowTiles][2], bl[kRowTiles][2];
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      const float a[4] = {m[2 * k][2 * i], m[2 * k][2 * i + 1], m[2 * k + 1][2 * i], m[2 * k + 1][2 * i + 1]};
      detail::split(ah[i], al[i], a);
    }
#pragma unroll
    for (int t = 0; t < kRowTiles; ++t) {
      const float b[2] = {state[t].x[2 * k], state[t].x[2 * k + 1]};
      detail::split(bh[t], bl[t], b);
    }
#pragma unroll
    for (int product = 0; product < 3; ++product)
#pragma unroll
      for (int t = 0; t < kRowTiles; ++t)
#pragma unroll
        for (int i = 0; i < kTiles; ++i)
          ptx::mma1688_tf32(acc[(product + (kSums == 2 ? k : 0)) % kSums][t][i], product == 1 ? al[i] : ah[i],
                            product == 0 ? bl[t] : bh[t]);
  }
}

// One function: its parts share M, the state and the sums in registers.
template <typename C>
__global__ void __launch_bounds__(C::kThreads)
combine_kernel(const __grid_constant__ gdn_rule_params p, const __grid_constant__ Plan plan) {
  if (C::kCluster > 1 && !ptx::kSm90) return;
  GDN_PROFILED(profile::LeanStamps stamps(plan.profile, profile::kCombineWarp);)
  using Shared = typename C::Shared;
  constexpr int KK = C::kK, kCluster = C::kCluster, kParts = C::kParts, kTiles = C::kTiles, kUnit = C::kUnit, kUnits = C::kUnits,
                kDone = C::kDone, kPack = C::kPack, kColumns = C::kColumns, kRowTiles = C::kRowTiles;
  using Floats = detail::Pack<kPack>;
  extern __shared__ __align__(1024) uint8_t raw_shared[];
  Shared &shared = *reinterpret_cast<Shared *>(raw_shared);
  ptx::grid_dependency_launch();

  // The block's rows, and the sequence of its slot.
  const unsigned rank = blockIdx.x % kCluster;    // in the cluster
  const int tiles = (p.common.head_v + C::kRows - 1) / C::kRows, block = static_cast<int>(blockIdx.x / kCluster);
  const int row0 = block % tiles * C::kRows, head = block / tiles % p.common.num_v_heads, slot = block / tiles / p.common.num_v_heads;
  const int found = plan.mixed ? sequence_of_slot(p.common.seqs, plan, slot) : slot, n = max(found, 0);
  const int last = segments_of(borders_of(plan), (tokens_of(p.common.seqs, n).count + kChunk - 1) / kChunk) - 1;
  if (found < 0 || slot_of(p.common.in_slots, n) < 0 || slot_of(p.common.out_slots, n) < 0 || last < 2 || forgets(p, plan, slot, head)) {
    ptx::grid_dependency_wait();
    return;
  }
  // Barriers of the cluster; wait for the passes.
  const int thread = threadIdx.x, warp = __shfl_sync(0xffffffffu, thread / 32, 0), lane = thread % 32;
  const int part = warp % kParts, group = warp / kParts, g = lane / 4, c = lane % 4;
  if (kCluster > 1) {
    if (thread == 0) {
      ptx::barrier_init(ptx::shared_address(&shared.arrived[0]), 1);
      ptx::barrier_init(ptx::shared_address(&shared.arrived[1]), 1);
      ptx::barriers_initialised();
    }
    ptx::cluster_begin();
  }
  GDN_PROFILED(stamps.lap(profile::kSetup);)
  ptx::grid_dependency_wait();
  GDN_PROFILED(stamps.lap(profile::kWaitKernel);)
  const int head_k = C::kExact ? KK : p.common.head_k;
  const uint32_t arrived = ptx::shared_address(shared.arrived);
  uint32_t peers[kCluster];    // shared memory of the others, the first after this block's
#pragma unroll
  for (int i = 1; i < kCluster; ++i) peers[i] = ptx::cluster_address(ptx::shared_address(raw_shared), (rank + i) % kCluster);

  // Load M: this lane's columns, k in units. The units of this block's own columns come first.
  const int column = static_cast<int>(rank) * kColumns + group * 16 * kTiles + kPack * g;
  const bool inside = C::kExact || column < head_k;    // with the others of the lane, as sizes are multiples of 8
  const int k0 = part * C::kSlice + c * (kUnit / 4);
  float m[kCluster * kUnits][kUnit / 4][kPack] = {};
  const float *lane_m = transfer_at(p, plan, slot, 1, head) + (p.common.head_v + k0) * head_k + column;
  const int64_t one_segment = static_cast<int64_t>(p.common.num_v_heads) * (p.common.head_v + head_k) * head_k;
  const auto load_unit = [&](int i, int u, const float *from, bool there) {
    const int k = static_cast<int>((rank + i) % kCluster) * kColumns;
    from += k * head_k + kUnit * u * head_k;
#pragma unroll
    for (int e = 0; e < kUnit / 4; ++e)
      detail::load_floats(m[i * kUnits + u][e], from + e * head_k, there && inside && (C::kExact || k + kUnit * u + k0 < head_k));
  };
#pragma unroll
  for (int i = 0; i < kCluster; ++i)
#pragma unroll
    for (int u = 0; u < kUnits; ++u) load_unit(i, u, lane_m, true);

  // Load the state after the first segment.
  const float *first = first_at(p, plan, slot, head) + row0 * head_k;
  for (int i = thread; i < C::kRows * KK / 4; i += C::kThreads) {
    const int row = i / (KK / 4), at = i % (KK / 4) * 4;
    float x[4] = {};
    detail::load_floats(x, first + row * head_k + at, row0 + row < p.common.head_v && at < head_k);
    *reinterpret_cast<float4 *>(&shared.state[0][detail::state_place<KK>(row, at)]) = make_float4(x[0], x[1], x[2], x[3]);
  }
  __syncthreads();

  GDN_PROFILED(stamps.lap(profile::kLoadState);)
  // Segment by segment. N: rows 2 c and the next of the tiles that this warp sums up.
  const int row = row0 + 8 * kDone * part + 2 * c;
  float *place = transfer_at(p, plan, slot, 1, head) + row * head_k + column;
  for (int segment = 1; segment < last; ++segment, place += one_segment) {
    const unsigned now = (segment - 1) % 2u;
    lane_m += one_segment;
    // Load N.
    float next[kDone][2][kPack] = {};
#pragma unroll
    for (int t = 0; t < kDone; ++t)
#pragma unroll
      for (int r = 0; r < 2; ++r)
        detail::load_floats(next[t][r], place + (8 * t + r) * head_k, inside && row + 8 * t + r < p.common.head_v);

    if (kCluster > 1 && segment > 1 && thread == 0)
      ptx::barrier_expect(arrived + 8 * now, C::kRows * (KK - kColumns) * 4);
    // Products with the state; M of the next segment is loaded where this one's was used.
    float acc[C::kSums][kRowTiles][kTiles][4] = {};
#pragma unroll
    for (int i = 0; i < kCluster; ++i) {
      if (i == 1 && segment > 1)    // the second and the third state are the first to come to their barrier
        detail::wait_arrived(arrived + 8 * now, ~(segment / 2u) & 1);
      const float *state = shared.state[now] + (rank + i) % kCluster * kColumns;
#pragma unroll
      for (int u = 0; u < kUnits; ++u) {
        detail::Pack<kUnit / 4> s[kRowTiles];
        // Tiles in an order in which the first ones are those that this warp sums up.
#pragma unroll
        for (int t = 0; t < kRowTiles; ++t)
          s[t] = *reinterpret_cast<const detail::Pack<kUnit / 4> *>(
              state + ((detail::state_place<KK>(g + 8 * kDone * part, k0) ^ kUnit * u) ^ 8 * KK * t));
        combine_unit<C>(acc, m[i * kUnits + u], s);
        load_unit(i, u, lane_m, segment + 1 < last);
      }
    }
#pragma unroll
    for (int sum = 1; sum < C::kSums; ++sum)
#pragma unroll
      for (int t = 0; t < kRowTiles; ++t)
#pragma unroll
        for (int i = 0; i < kTiles; ++i)
#pragma unroll
          for (int e = 0; e < 4; ++e) acc[0][t][i][e] += acc[sum][t][i][e];

    // Sum the parts of k, in the warp that owns the tiles.
    if (kParts > 1) {
      const auto partial = [&](int owner, int t, int i) -> float4 & {    // t in the order above
        const int of_owner = ((t / kDone - 1) * C::kGroups + group) * kDone + t % kDone;
        return shared.partial[((owner * (kParts - 1) * C::kGroups * kDone + of_owner) * kTiles + i) * 32 + lane];
      };
#pragma unroll
      for (int t = kDone; t < kRowTiles; ++t)
#pragma unroll
        for (int i = 0; i < kTiles; ++i) {
          const float(&x)[4] = acc[0][t][i];
          partial(part ^ t / kDone, t, i) = make_float4(x[0], x[1], x[2], x[3]);
        }
      __syncthreads();
#pragma unroll
      for (int t = kDone; t < kRowTiles; ++t)
#pragma unroll
        for (int i = 0; i < kTiles; ++i) {
          const float4 y = partial(part, t, i);
          float(&x)[4] = acc[0][t % kDone][i];
          x[0] += y.x, x[1] += y.y, x[2] += y.z, x[3] += y.w;
        }
    }
#pragma unroll
    for (int t = 0; t < kDone; ++t)
#pragma unroll
      for (int r = 0; r < 2; ++r)
#pragma unroll
        for (int e = 0; e < kPack; ++e) next[t][r][e] += acc[0][t][e / 2][2 * (e % 2) + r];

    // Store the new state into the other buffer. No block reads that any more: all that others computed from it has arrived.
    if (segment + 1 < last) {
#pragma unroll
      for (int t = 0; t < kDone; ++t)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          float *to = &shared.state[1 - now][detail::state_place<KK>(8 * (kDone * part + t) + 2 * c + r, column)];
#pragma unroll
          for (int i = 1; i < kCluster; ++i)
            detail::store_async(peers[i] + (ptx::shared_address(to) - ptx::shared_address(raw_shared)), next[t][r],
                                peers[i] + static_cast<uint32_t>(offsetof(Shared, arrived)) + 8 * (1 - now));
          Floats x;
#pragma unroll
          for (int e = 0; e < kPack; ++e) x.x[e] = next[t][r][e];
          *reinterpret_cast<Floats *>(to) = x;
        }
      __syncthreads();
    }
#pragma unroll
    for (int t = 0; t < kDone; ++t)
#pragma unroll
      for (int r = 0; r < 2; ++r)
        if (inside && row + 8 * t + r < p.common.head_v) {
          Floats x;
#pragma unroll
          for (int e = 0; e < kPack; ++e) x.x[e] = next[t][r][e];
          *reinterpret_cast<Floats *>(place + (8 * t + r) * head_k) = x;
        }
    GDN_PROFILED(stamps.lap(profile::kCombine);)
  }
}

}  // namespace chunk
}  // namespace gdn
