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
static_assert(kTableRows <= 0x1000, "a group's first row has 12 bits");

// What few tokens have chosen, in shared memory.
struct Choices {
  int32_t expert[GDN_MOE_FEW_TOKENS][GDN_MOE_TOP_K];
  float weight[GDN_MOE_FEW_TOKENS][GDN_MOE_TOP_K];
  float shared_weight[GDN_MOE_FEW_TOKENS];
};

struct Sorting {
  static constexpr int kWords = (GDN_MOE_FEW_TOKENS + 31) / 32;
  uint32_t takers[kWords][GDN_MOE_EXPERTS];    // a bit a token; zero before
  int32_t first_row[GDN_MOE_EXPERTS];
  int32_t of_warp[32];
};

// The table of these choices, by a block of THREADS, which has a barrier between those and this.
template <int THREADS> __device__ __forceinline__ void write_table(const Args &a, const Choices &choices, Sorting &sorting) {
  constexpr int kEach = GDN_MOE_EXPERTS / THREADS, kWords = Sorting::kWords;
  const int tid = threadIdx.x, k = a.top_k, pairs = a.tokens * k;
  Table &table = *a.table;
  const auto each_choice = [&](auto go) {
    for (int i = tid; i < a.tokens * GDN_MOE_TOP_K; i += THREADS)
      if (const int token = i / GDN_MOE_TOP_K, j = i % GDN_MOE_TOP_K; j < k) go(token, choices.expert[token][j], choices.weight[token][j]);
  };
  each_choice([&](int token, int expert, float) { atomicOr(&sorting.takers[token / 32][expert], 1u << token % 32); });
  __syncthreads();

  int rows[kEach], sum = 0;    // of this thread's experts; groups << 16 | rows
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    rows[i] = 0;
#pragma unroll
    for (int word = 0; word < kWords; ++word) rows[i] += __popc(sorting.takers[word][tid * kEach + i]);
    sum += (rows[i] + kGroup - 1) / kGroup << 16 | rows[i];
  }
  const Before before = sum_before<THREADS>(sum, sorting.of_warp);
  const int routed = before.all >> 16, shared = a.shared_inner > 0 ? (a.tokens + kGroup - 1) / kGroup : 0;
  int row = before.mine & 0xffff, group = before.mine >> 16;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    sorting.first_row[tid * kEach + i] = row;
    for (int first = 0; first < rows[i]; first += kGroup)
      table.entry[group++].group = group_of(tid * kEach + i, row + first, min(rows[i] - first, kGroup));
    row += rows[i];
  }
  // Behind the last group zeros: all entries are read.
  for (int i = tid; routed + i < pairs + (a.shared_inner > 0 ? a.tokens : 0); i += THREADS)
    table.entry[routed + i].group = i < shared ? group_of(a.experts, pairs + i * kGroup, min(a.tokens - i * kGroup, kGroup)) : 0;
  for (int i = tid; i < a.tokens && shared > 0; i += THREADS) {
    table.entry[pairs + i].token = i;
    table.entry[pairs + i].zero = 0;
    table.entry[pairs + i].weight = choices.shared_weight[i];
  }
  if (tid == 0) {
    table.routed = routed;
    table.groups = routed + shared;
    table.zero[0] = table.zero[1] = 0;
  }
  __syncthreads();
  each_choice([&](int token, int expert, float weight) {
    int to = sorting.first_row[expert];
#pragma unroll
    for (int word = 0; word < kWords; ++word) {
      const uint32_t before_it = word < token / 32 ? 0xffffffffu : word > token / 32 ? 0u : (1u << token % 32) - 1;
      to += __popc(sorting.takers[word][expert] & before_it);
    }
    table.entry[to].token = token;
    table.entry[to].zero = 0;
    table.entry[to].weight = weight;
  });
}

// One block: the table of few tokens. A warp has a token or two.
static __global__ void __launch_bounds__(kSortThreads) table_kernel(const __grid_constant__ Args a) {
  __shared__ Choices choices;
  __shared__ Sorting sorting;
  const int tid = threadIdx.x, lane = tid % 32;
#pragma unroll
  for (int word = 0; word < Sorting::kWords; ++word) sorting.takers[word][tid] = 0;
  ptx::grid_dependency_wait();
  ptx::grid_dependency_launch();
  for (int token = tid / 32; token < a.tokens; token += kSortThreads / 32) {
    const Choice choice = choose(a, token);
    if (lane < a.top_k) {
      choices.expert[token][lane] = choice.expert;
      choices.weight[token][lane] = choice.weight;
    }
    if (lane == 31 && a.shared_inner > 0) choices.shared_weight[token] = shared_weight(a, token);
  }
  __syncthreads();
  write_table<kSortThreads>(a, choices, sorting);
}

// The block's copy of the table. A single token's is made here and now, by every block anew: that takes less than one
// more kernel between the router and the experts.
__device__ __forceinline__ void read_table(const Args &a, Table &table) {
  const int tid = threadIdx.x, lane = tid % 32;
  if (a.tokens == 1) {
    if (tid < 32) {
      const Choice choice = choose(a, 0);
      if (lane < a.top_k) {
        table.entry[lane].group = group_of(choice.expert, lane, 1);
        table.entry[lane].weight = choice.weight;
        table.entry[lane].token = 0;
      }
    } else if (tid == 32) {    // another warp: it reads logits too, and would do so behind the choice
      const bool shared = a.shared_inner > 0;
      table.routed = a.top_k;
      table.groups = a.top_k + shared;
      if (shared) {
        table.entry[a.top_k].group = group_of(a.experts, a.top_k, 1);
        table.entry[a.top_k].weight = shared_weight(a, 0);
        table.entry[a.top_k].token = 0;
      }
    }
  } else {
    // All of it is under way at once: by way of registers each turn of a thread's would be waited for.
    const int pieces = table_bytes(a) / 16;
    const uint32_t to = ptx::shared_address(&table);
    for (int i = tid; i < pieces; i += blockDim.x) ptx::copy_async(to + i * 16, reinterpret_cast<const uint4 *>(a.table) + i);
    ptx::copy_async_commit();
    ptx::copy_async_wait<0>();
  }
  __syncthreads();
}

}  // namespace moe
}  // namespace gdn
