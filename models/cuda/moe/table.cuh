// Few tokens' rows sorted by expert.
#pragma once

#include "choose.cuh"

namespace gdn {
namespace moe {

__device__ __forceinline__ uint32_t group_of(int expert, int first, int rows) {
  return expert << 16 | first << 4 | rows;
}
__device__ __forceinline__ int group_expert(uint32_t group) { return group >> 16; }
__device__ __forceinline__ int group_first(uint32_t group) { return group >> 4 & 0xfff; }
__device__ __forceinline__ int group_rows(uint32_t group) { return group & 15; }

// One block: the table of few tokens. A warp has a token or two, and then a thread an expert.
static __global__ void __launch_bounds__(kSortThreads) table_kernel(const __grid_constant__ Args a) {
  constexpr int kWarps = kSortThreads / 32, kTurns = (GDN_MOE_FEW_TOKENS + kWarps - 1) / kWarps;
  __shared__ uint32_t takers[kTurns][GDN_MOE_EXPERTS];    // a bit a token
  __shared__ int first_row[GDN_MOE_EXPERTS];
  __shared__ int of_warp[kSortThreads / 32];
  static_assert(kWarps == 32, "a bit a warp");
  const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32, k = a.top_k, pairs = a.tokens * k;
  Table &table = *a.table;
#pragma unroll
  for (int turn = 0; turn < kTurns; ++turn) takers[turn][tid] = 0;
  __syncthreads();
  ptx::grid_dependency_wait();
  ptx::grid_dependency_launch();

  // Token warp + 32 * turn.
  Choice choice[kTurns] = {};
#pragma unroll
  for (int turn = 0; turn < kTurns; ++turn)
    if (const int token = warp + turn * kWarps; token < a.tokens) {
      choice[turn] = choose(a, token);
      if (lane < k) atomicOr(&takers[turn][choice[turn].expert], 1u << warp);
    }
  __syncthreads();
  int rows = 0;
#pragma unroll
  for (int turn = 0; turn < kTurns; ++turn) rows += __popc(takers[turn][tid]);
  const int groups = (rows + kGroup - 1) / kGroup;
  const Before before = sum_before(groups << 16 | rows, of_warp);
  const int first = before.mine & 0xffff, routed = before.all >> 16;
  first_row[tid] = first;
  for (int i = 0; i < groups; ++i)
    table.group[(before.mine >> 16) + i] = group_of(tid, first + i * kGroup, min(rows - i * kGroup, kGroup));
  const int shared = a.shared_inner > 0 ? (a.tokens + kGroup - 1) / kGroup : 0;
  if (tid < shared)
    table.group[routed + tid] = group_of(a.experts, pairs + tid * kGroup, min(a.tokens - tid * kGroup, kGroup));
  if (tid == 0) {
    table.routed = routed;
    table.groups = routed + shared;
  }
  if (shared > 0 && tid < a.tokens) {
    table.token[pairs + tid] = tid;
    table.weight[pairs + tid] = shared_weight(a, tid);
  }
  __syncthreads();
#pragma unroll
  for (int turn = 0; turn < kTurns; ++turn)
    if (const int token = warp + turn * kWarps; token < a.tokens && lane < k) {
      const int expert = choice[turn].expert;
      int row = first_row[expert] + __popc(takers[turn][expert] & ((1u << warp) - 1));
#pragma unroll
      for (int earlier = 0; earlier < turn; ++earlier) row += __popc(takers[earlier][expert]);
      table.token[row] = token;
      table.weight[row] = choice[turn].weight;
    }
}

// The block's copy of the table. A single token's is made here and now, by every block anew: that takes less than one
// more kernel between the router and the experts.
__device__ __forceinline__ void read_table(const Args &a, Table &table) {
  const int tid = threadIdx.x, lane = tid % 32;
  if (a.tokens == 1) {
    if (tid < 32) {
      const Choice choice = choose(a, 0);
      const bool shared = a.shared_inner > 0;
      if (lane < a.top_k) {
        table.group[lane] = group_of(choice.expert, lane, 1);
        table.weight[lane] = choice.weight;
        table.token[lane] = 0;
      }
      if (lane == 0) {
        table.routed = a.top_k;
        table.groups = a.top_k + shared;
        if (shared) {
          table.group[a.top_k] = group_of(a.experts, a.top_k, 1);
          table.weight[a.top_k] = shared_weight(a, 0);
          table.token[a.top_k] = 0;
        }
      }
    }
  } else {
    const Table &from = *a.table;
    const int routed = from.routed, groups = from.groups, rows = a.tokens * (a.top_k + (a.shared_inner > 0));
    for (int i = tid; i < rows; i += blockDim.x) {
      if (i < groups) table.group[i] = from.group[i];
      table.weight[i] = from.weight[i];
      table.token[i] = from.token[i];
    }
    if (tid == 0) {
      table.routed = routed;
      table.groups = groups;
    }
  }
  __syncthreads();
}

}  // namespace moe
}  // namespace gdn
