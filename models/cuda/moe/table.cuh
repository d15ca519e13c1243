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

// Tokens that a block of table_kernel chooses for, a warp each. Several blocks of eight warps choose faster than one of 32, but must wait for one
// another, which up to 16 tokens do not pay for.
inline int table_tokens(int tokens) { return tokens <= 16 ? 16 : 8; }

// The table of few tokens. A warp makes the choice of a token. The block that is the last to have chosen makes the table, a thread for each expert.
static __global__ void __launch_bounds__(kSortThreads) table_kernel(const __grid_constant__ Args a, int each) {
  constexpr int kWords = (GDN_MOE_FEW_TOKENS + 31) / 32;
  __shared__ uint32_t takers[kWords][GDN_MOE_EXPERTS];    // a bit a token
  __shared__ int32_t chosen[GDN_MOE_FEW_TOKENS][GDN_MOE_TOP_K];
  __shared__ float weight[GDN_MOE_FEW_TOKENS][GDN_MOE_TOP_K];
  __shared__ int32_t first_row[GDN_MOE_EXPERTS];
  __shared__ int32_t of_warp[kSortThreads / 32];
  __shared__ bool last;
  const int tid = threadIdx.x, lane = tid % 32, k = a.top_k, pairs = a.tokens * k, of_shared = a.shared_inner > 0 ? a.tokens : 0;
  Table &table = *a.table;
#pragma unroll
  for (int word = 0; word < kWords; ++word) takers[word][tid] = 0;
  __syncthreads();
  ptx::grid_dependency_wait();
  ptx::grid_dependency_launch();
  const auto take = [&](int token, int i, const Choice &choice) {
    chosen[token][i] = choice.expert;
    weight[token][i] = choice.weight;
    atomicOr(&takers[token / 32][choice.expert], 1u << token % 32);
  };
  const int token = static_cast<int>(blockIdx.x) * each + tid / 32;
  const bool alone = gridDim.x == 1;
  if (tid / 32 < each && token < a.tokens) {
    const Choice choice = choose(a, token);
    if (lane < k) {
      if (alone)
        take(token, lane, choice);
      else
        table.entry[token * k + lane].group = choice.expert, table.entry[token * k + lane].weight = choice.weight;
    }
    if (lane == 31 && of_shared > 0) {
      TableEntry &entry = table.entry[pairs + token];
      entry.weight = shared_weight(a, token);
      entry.token = token;
      entry.zero = 0;
    }
  }
  __syncthreads();
  if (!alone) {
    if (tid == 0) {
      __threadfence();
      last = atomicAdd(&table.blocks, 1) + 1 == static_cast<int>(gridDim.x);
      __threadfence();
    }
    __syncthreads();
    if (!last) return;
    for (int i = tid; i < pairs; i += kSortThreads) {
      const uint2 entry = __ldcg(reinterpret_cast<const uint2 *>(&table.entry[i]));
      take(i / k, i % k, {static_cast<int>(entry.x), __uint_as_float(entry.y)});
    }
    __syncthreads();
  }

  int rows = 0;
#pragma unroll
  for (int word = 0; word < kWords; ++word) rows += __popc(takers[word][tid]);
  const int groups = (rows + kGroup - 1) / kGroup, shared_groups = (of_shared + kGroup - 1) / kGroup;
  const Before before = sum_before(groups << 16 | rows, of_warp);
  const int first = before.prefix & 0xffff, routed = before.all >> 16;
  first_row[tid] = first;
  for (int i = 0; i < groups; ++i)
    table.entry[(before.prefix >> 16) + i].group = group_of(tid, first + i * kGroup, min(rows - i * kGroup, kGroup));
  // Zeros follow the last group: all entries are read.
  for (int i = tid; routed + i < pairs + of_shared; i += kSortThreads)
    table.entry[routed + i].group = i < shared_groups ? group_of(a.experts, pairs + i * kGroup, min(of_shared - i * kGroup, kGroup)) : 0;
  if (tid == 0) {
    table.routed = routed;
    table.groups = routed + shared_groups;
    table.blocks = table.zero = 0;
  }
  __syncthreads();
  for (int i = tid; i < pairs; i += kSortThreads) {
    const int token = i / k, expert = chosen[token][i - token * k];
    int row = first_row[expert];
#pragma unroll
    for (int word = 0; word < kWords; ++word) {
      const uint32_t tokens_before = word < token / 32 ? 0xffffffffu : word > token / 32 ? 0u : (1u << token % 32) - 1;
      row += __popc(takers[word][expert] & tokens_before);
    }
    TableEntry &entry = table.entry[row];
    entry.weight = weight[token][i - token * k];
    entry.token = token;
    entry.zero = 0;
  }
}

// The block's copy of the table. A single token's is made here, by every block for itself: that takes less than one
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
    } else if (tid == 32) {    // another warp: it reads logits too, and would do so after the choice
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

// Stores one token's choice for the next kernel, which then need not repeat it: the first block writes each entry by one access,
// after read_table(). Until then the entries are zero: the kernel of the logits has cleared them.
__device__ __forceinline__ uint64_t choice_of(const TableEntry &entry) {
  return static_cast<uint64_t>(__float_as_uint(entry.weight)) << 32 | entry.group;
}
__device__ __forceinline__ void share_choice(const Args &a, const Table &table) {
  if (const int i = threadIdx.x; a.tokens == 1 && blockIdx.x == 0 && i < table.groups)
    ptx::store_relaxed(&a.table->entry[i], choice_of(table.entry[i]));
}

// read_table() in the kernel after one that shares its choice. It begins when all blocks of that one run, or have run, so the
// entries will be written.
__device__ __forceinline__ void await_table(const Args &a, Table &table) {
  if (a.tokens > 1) return read_table(a, table);
  const int tid = threadIdx.x, rows = a.top_k + (a.shared_inner > 0);
  if (tid < rows) {
    uint64_t choice;
    do choice = ptx::load_relaxed(&a.table->entry[tid]);
    while (choice == 0);
    table.entry[tid].group = static_cast<uint32_t>(choice);
    table.entry[tid].weight = __uint_as_float(static_cast<uint32_t>(choice >> 32));
    table.entry[tid].token = 0;
  } else if (tid == 32) {
    table.routed = a.top_k;
    table.groups = rows;
  }
  __syncthreads();
}

}  // namespace moe
}  // namespace gdn
