// The products of the kernel for sm_90a, asked for by a warpgroup and committed as a group: under way when these return. The
// accumulators are not to be touched before the group has been waited for.
#pragma once

#include "../common/wgmma.cuh"
#include "layout.cuh"

namespace gdn {
namespace chunk {

namespace detail {

template <typename T, int KK> __device__ __forceinline__ void multiply_tiles(float (&x)[8][4], uint64_t a, uint64_t b) {
  wgmma::hold(x);
  wgmma::fence();
#pragma unroll
  for (int k = 0; k < KK / 16; ++k) {
    const uint64_t step = wgmma::bytes(k / 4 * kTileBytes + k % 4 * 32);
    wgmma::product_of_tiles<T>(x, a + step, b + step, k > 0);
  }
  wgmma::commit();
}

}  // namespace detail

// x[64, 64] = rows a [64, KK] times rows b [64, KK], both tiles side by side in shared memory.
template <typename T, int KK> __device__ __forceinline__ void multiply_tiles(float (&x)[8][4], uint32_t a_rows, uint32_t b_rows) {
  detail::multiply_tiles<T, KK>(x, wgmma::tile_of_columns(a_rows), wgmma::tile_of_columns(b_rows));
}

// The same of rows with themselves.
template <typename T, int KK> __device__ __forceinline__ void multiply_by_itself(float (&x)[8][4], uint32_t rows) {
  asm volatile("" : "+r"(rows));
  uint64_t a = wgmma::tile_of_columns(rows), b = a;
  asm volatile("" : "+l"(a), "+l"(b));    // else they are added to by halves
  detail::multiply_tiles<T, KK>(x, a, b);
}

// x[64, 64] = a [64, 16 N] times rows [64, 16 N] of a tile, or of tiles side by side; added to x where `add` is.
template <typename T, int N>
__device__ __forceinline__ void multiply_rows(float (&x)[8][4], const uint32_t (&a)[N][4], uint32_t rows, bool add) {
  const uint64_t b = wgmma::tile_of_columns(rows);
  wgmma::hold(x);
  wgmma::fence();
#pragma unroll
  for (int k = 0; k < N; ++k)
    wgmma::product<T, false>(x, a[k], b + wgmma::bytes(k / 4 * kTileBytes + k % 4 * 32), add || k > 0);
  wgmma::commit();
}

// state[64, KK] += a [64, 64] times the keys of 64 tokens.
template <typename T, int N>
__device__ __forceinline__ void add_keys(float (&state)[N][4], const uint32_t (&a)[4][4], uint32_t keys) {
  const uint64_t b = wgmma::tile_of_rows(keys, kTileBytes);
  wgmma::hold(state);
  wgmma::fence();
#pragma unroll
  for (int k = 0; k < 4; ++k) wgmma::product<T, true>(state, a[k], b + wgmma::bytes(k * 2048), true);
  wgmma::commit();
}

}  // namespace chunk
}  // namespace gdn
