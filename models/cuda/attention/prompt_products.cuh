// The products of the kernel for prompts: whole tiles by wgmma.
#pragma once

#include "common/wgmma.cuh"

namespace gdn {
namespace attention {

// The address of the 16-byte piece `piece` of row `row` in a tile of `rows` rows: blocks of 64 columns one after another, each
// with the 128-byte swizzle.
__device__ __forceinline__ uint32_t piece_in(uint32_t tile, int rows, int row, int piece) {
  return tile + piece / 8 * (rows * 128) + row * 128 + (piece % 8 ^ row % 8) * 16;
}

// Starts x[64, 8 N] = q k^T of a tile of 64 queries and one of 8 N keys, committed as a group.
template <typename T, int DIM, int N> __device__ __forceinline__ void start_scores(float (&x)[N][4], uint32_t queries, uint32_t keys) {
  const uint64_t a = wgmma::tile_of_columns(queries), b = wgmma::tile_of_columns(keys);
  wgmma::hold(x);
  wgmma::fence();
#pragma unroll
  for (int i = 0; i < DIM / 16; ++i) {
    const uint64_t step = b + wgmma::bytes(i / 4 * (8 * N * 128) + i % 4 * 32);
    wgmma::product_of_tiles<T>(x, a + wgmma::bytes(i / 4 * (64 * 128) + i % 4 * 32), step, i > 0);
  }
  wgmma::commit();
}

// Starts x[64, DIM] += the weights of 16 N keys times their values; likewise.
template <typename T, int N, int M>
__device__ __forceinline__ void start_values(float (&x)[M][4], const uint32_t (&weight)[N][4], uint32_t values) {
  const uint64_t b = wgmma::tile_of_rows(values, 16 * N * 128);
  wgmma::hold(x);
  wgmma::fence();
#pragma unroll
  for (int i = 0; i < N; ++i) wgmma::product<T, true>(x, weight[i], b + wgmma::bytes(i * 2048), true);
  wgmma::commit();
}

}  // namespace attention
}  // namespace gdn
