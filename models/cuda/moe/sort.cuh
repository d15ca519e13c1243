// Many tokens: their experts, and rows sorted by expert. Nothing is asked of the host.
#pragma once

#include "choose.cuh"

namespace gdn {
namespace moe {

constexpr int kChooseThreads = 256;

// A warp a token.
__global__ void __launch_bounds__(kChooseThreads) choose_kernel(const __grid_constant__ Args a) {
  const int lane = threadIdx.x % 32;
  const int token = static_cast<int>(blockIdx.x) * (kChooseThreads / 32) + static_cast<int>(threadIdx.x) / 32;
  ptx::grid_dependency_wait();
  ptx::grid_dependency_launch();
  if (token >= a.tokens) return;
  const Choice choice = choose(a, token);
  const int64_t to = static_cast<int64_t>(token) * a.top_k, weights = to + token;
  if (lane < a.top_k) {
    a.chosen[to + lane] = choice.expert;
    a.weights[weights + lane] = choice.weight;
  }
  if (lane == 0 && a.shared_inner > 0) a.weights[weights + a.top_k] = shared_weight(a, token);
}

constexpr int kSortThreads = GDN_MOE_EXPERTS;

// The sum of what the threads before this one have, and of all.
struct Before {
  int mine, all;
};
__device__ __forceinline__ Before sum_before(int x, int *of_warp) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int sum = x;
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const int other = __shfl_up_sync(0xffffffffu, sum, d);
    if (lane >= d) sum += other;
  }
  __syncthreads();
  if (lane == 31) of_warp[warp] = sum;
  __syncthreads();
  int before = 0, all = 0;
#pragma unroll 4
  for (int w = 0; w < kSortThreads / 32; ++w) {
    before += w < warp ? of_warp[w] : 0;
    all += of_warp[w];
  }
  return {before + sum - x, all};
}

// One block: counts, and deals out, the rows of the routed experts, and cuts them into tiles of `tile_rows`.
//
// NOTES: which of an expert's rows a token gets changes from run to run, and no result with it: a row's products depend
// on the row alone, and a token's rows are summed in the order of its choices.
__global__ void __launch_bounds__(kSortThreads) sort_kernel(const __grid_constant__ Args a, int tile_rows) {
  __shared__ int next[GDN_MOE_EXPERTS];
  __shared__ int of_warp[kSortThreads / 32];
  constexpr int kAtOnce = 8;    // loads under way
  const int tid = threadIdx.x, pairs = a.tokens * a.top_k;
  next[tid] = 0;
  __syncthreads();
  ptx::grid_dependency_wait();
  ptx::grid_dependency_launch();

  const auto each_pair = [&](auto &&use) {
    for (int first = 0; first < pairs; first += kAtOnce * kSortThreads) {
      int expert[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int p = first + i * kSortThreads + tid;
        expert[i] = p < pairs ? a.chosen[p] : -1;
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i)
        if (expert[i] >= 0) use(first + i * kSortThreads + tid, expert[i]);
    }
  };
  each_pair([&](int, int expert) { atomicAdd(&next[expert], 1); });
  __syncthreads();

  const int count = next[tid], tiles = (count + tile_rows - 1) / tile_rows;
  const Before rows = sum_before(count, of_warp), before = sum_before(tiles, of_warp);
  next[tid] = rows.mine;
  for (int i = 0; i < tiles; ++i)
    a.tiles[before.mine + i] = {tid, rows.mine + i * tile_rows, min(tile_rows, count - i * tile_rows), 0};
  const int shared = a.shared_inner > 0 ? (a.tokens + tile_rows - 1) / tile_rows : 0;
  for (int i = tid; i < shared; i += kSortThreads)
    a.tiles[before.all + i] = {a.experts, pairs + i * tile_rows, min(tile_rows, a.tokens - i * tile_rows), 0};
  if (tid == 0) *a.tile_count = before.all + shared;
  __syncthreads();

  each_pair([&](int p, int expert) {
    const int row = atomicAdd(&next[expert], 1);
    a.token_of_row[row] = p / a.top_k;
    a.row_of_choice[p] = row;
  });
}

}  // namespace moe
}  // namespace gdn
