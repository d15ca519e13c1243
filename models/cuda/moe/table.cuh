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

constexpr int kTableThreads = 512;

// One block: the table of few tokens.
__global__ void __launch_bounds__(kTableThreads) table_kernel(const __grid_constant__ Args a) {
  __shared__ int expert_of[GDN_MOE_FEW_TOKENS * GDN_MOE_TOP_K];
  __shared__ float weight_of[GDN_MOE_FEW_TOKENS * GDN_MOE_TOP_K];
  __shared__ uint32_t begins[GDN_MOE_FEW_TOKENS * GDN_MOE_TOP_K];
  __shared__ int groups_of_warp[kTableThreads / 32];
  const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32, k = a.top_k, pairs = a.tokens * k;
  static_assert(GDN_MOE_FEW_TOKENS * GDN_MOE_TOP_K <= kTableThreads, "a thread a pair");
  Table &table = *a.table;
  ptx::grid_dependency_wait();
  ptx::grid_dependency_launch();

  for (int token = warp; token < a.tokens; token += kTableThreads / 32) {
    const Choice choice = choose(a, token);
    if (lane < k) {
      expert_of[token * k + lane] = choice.expert;
      weight_of[token * k + lane] = choice.weight;
    }
  }
  __syncthreads();
  if (tid < pairs) {
    const int mine = expert_of[tid];
    int less = 0, before = 0, same = 0;
    for (int q = 0; q < pairs; ++q) {
      const int other = expert_of[q];
      less += other < mine;
      same += other == mine;
      before += other == mine && q < tid;
    }
    const int row = less + before, left = same - before;
    table.token[row] = tid / k;
    table.weight[row] = weight_of[tid];
    begins[row] = before % kGroup == 0 ? group_of(mine, row, left < kGroup ? left : kGroup) : 0;
  }
  __syncthreads();
  const uint32_t group = tid < pairs ? begins[tid] : 0, mask = __ballot_sync(0xffffffffu, group != 0);
  if (lane == 0) groups_of_warp[warp] = __popc(mask);
  __syncthreads();
  int before = 0, routed = 0;
  for (int w = 0; w < kTableThreads / 32; ++w) {
    before += w < warp ? groups_of_warp[w] : 0;
    routed += groups_of_warp[w];
  }
  if (group != 0) table.group[before + __popc(mask & ((1u << lane) - 1))] = group;
  const int shared = a.shared_inner > 0 ? (a.tokens + kGroup - 1) / kGroup : 0;
  if (tid < shared) {
    const int left = a.tokens - tid * kGroup;
    table.group[routed + tid] = group_of(a.experts, pairs + tid * kGroup, left < kGroup ? left : kGroup);
  }
  if (shared > 0 && tid < a.tokens) {
    table.token[pairs + tid] = tid;
    table.weight[pairs + tid] = shared_weight(a, tid);
  }
  if (tid == 0) {
    table.routed = routed;
    table.groups = routed + shared;
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
