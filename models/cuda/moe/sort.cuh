// Many tokens: their experts, and rows sorted by expert. Nothing is asked of the host.
#pragma once

#include "choose.cuh"

namespace gdn {
namespace moe {

// A warp a token. A block has `each` of them in a row, and counts what its experts get.
//
// NOTES: which of an expert's rows a token gets changes from run to run, and no result with it: a row's products depend
// on the row alone, and a token's rows are summed in the order of its choices.
__global__ void __launch_bounds__(kChooseThreads) choose_kernel(const __grid_constant__ Args a, int each) {
  __shared__ int count[GDN_MOE_EXPERTS];
  const int tid = threadIdx.x, lane = tid % 32;
  const int first = static_cast<int>(blockIdx.x) * each, end = min(first + each, a.tokens);
  for (int e = tid; e < a.experts; e += kChooseThreads) count[e] = 0;
  __syncthreads();
  ptx::grid_dependency_wait();
  ptx::grid_dependency_launch();
  for (int token = first + tid / 32; token < end; token += kChooseThreads / 32) {
    const Choice choice = choose(a, token);
    const int64_t to = static_cast<int64_t>(token) * a.top_k, weights = to + token;
    if (lane < a.top_k) {
      a.chosen[to + lane] = choice.expert;
      a.row_of_choice[to + lane] = atomicAdd(&count[choice.expert], 1);    // of this block's, until place_kernel
      a.weights[weights + lane] = choice.weight;
    }
    if (lane == 31 && a.shared_inner > 0) a.weights[weights + a.top_k] = shared_weight(a, token);
  }
  __syncthreads();
  for (int e = tid; e < a.experts; e += kChooseThreads)
    a.counts[static_cast<int64_t>(blockIdx.x) * a.experts + e] = count[e];
}

// The same blocks' rows in the order of the experts, and of the blocks. The first block also cuts each expert's rows into
// tiles of `tile_rows`; only the last may have fewer. `columns`: experts, up to a power of two.
__global__ void __launch_bounds__(kSortThreads)
    place_kernel(const __grid_constant__ Args a, int each, int columns, int tile_rows) {
  __shared__ int rows_of[GDN_MOE_EXPERTS], first_row[GDN_MOE_EXPERTS];
  __shared__ int of_warp[kSortThreads / 32], tiles_of_warp[kSortThreads / 32];
  constexpr int kAtOnce = 8;    // loads under way
  const int tid = threadIdx.x, block = blockIdx.x, blocks = gridDim.x, pairs = a.tokens * a.top_k;
  rows_of[tid] = first_row[tid] = 0;
  __syncthreads();
  ptx::grid_dependency_wait();
  ptx::grid_dependency_launch();

  const int expert = tid % columns;
  int all = 0, before = 0;
  if (expert < a.experts) {
    const int *counts = a.counts + expert;
#pragma unroll kAtOnce
    for (int b = tid / columns; b < blocks; b += kSortThreads / columns) {
      const int count = counts[static_cast<int64_t>(b) * a.experts];
      all += count;
      before += b < block ? count : 0;
    }
    atomicAdd(&rows_of[expert], all);
    atomicAdd(&first_row[expert], before);
  }
  __syncthreads();
  const int count = rows_of[tid];
  const Before rows = sum_before(count, of_warp);
  first_row[tid] += rows.prefix;
  if (block == 0) {
    const int tiles = (count + tile_rows - 1) / tile_rows;
    const Before tiles_before = sum_before(tiles, tiles_of_warp);
    for (int i = 0; i < tiles; ++i)
      a.tiles[tiles_before.prefix + i] = {tid, rows.prefix + i * tile_rows, min(tile_rows, count - i * tile_rows), 0};
    const int shared = a.shared_inner > 0 ? (a.tokens + tile_rows - 1) / tile_rows : 0;
    for (int i = tid; i < shared; i += kSortThreads)
      a.tiles[tiles_before.all + i] = {a.experts, pairs + i * tile_rows, min(tile_rows, a.tokens - i * tile_rows), 0};
    // All tiles, those of routed experts, and twice zero: wide_kernel has taken no item yet.
    if (tid < 4) a.tile_count[tid] = tid < 2 ? tiles_before.all + (tid == 0 ? shared : 0) : 0;
  }
  __syncthreads();

  const int end = min((block + 1) * each, a.tokens) * a.top_k;
  for (int p = block * each * a.top_k + tid; p < end; p += kSortThreads) {
    const int row = first_row[a.chosen[p]] + a.row_of_choice[p];
    a.token_of_row[row] = p / a.top_k;
    a.row_of_choice[p] = row;
  }
}

}  // namespace moe
}  // namespace gdn
