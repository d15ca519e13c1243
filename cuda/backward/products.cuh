// Products of a warpgroup, with wgmma or with mma.sync: accumulators and left operands lie in the same registers for both.
//
// The left operand is in registers, the right one in tiles of shared memory (../common/wgmma.cuh).
#pragma once

#include "../chunk/matrices.cuh"
#include "../chunk/scan.cuh"
#include "../common/wgmma.cuh"

namespace gdn {
namespace backward {

namespace detail {
template <typename T, bool ROWS, int N, int KS>
__device__ __forceinline__ void multiply_sm80(float (&x)[N][4], const uint32_t (&a)[KS][4], uint32_t tile, bool add, int lane) {
  const uint32_t lanes = ROWS ? chunk::lanes_by_row(lane) : chunk::lanes_by_piece(lane);
  if (!add)
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int c = 0; c < 4; ++c) x[n][c] = 0.f;
#pragma unroll
  for (int k = 0; k < KS; ++k)
#pragma unroll
    for (int n = 0; n < N / 2; ++n) {
      uint32_t b[4];
      if constexpr (ROWS) ptx::load_matrices_trans(b, chunk::tile_at(tile, lanes, k, n));
      else ptx::load_matrices(b, chunk::tile_at(tile, lanes, n, k));
      ptx::mma16816<T>(x[2 * n], a[k][0], a[k][1], a[k][2], a[k][3], b[0], b[1]);
      ptx::mma16816<T>(x[2 * n + 1], a[k][0], a[k][1], a[k][2], a[k][3], b[2], b[3]);
    }
}
}  // namespace detail

// x[64, 8 N] (+)= a[64, 16 KS] b. ROWS: b's rows are rows of the tile, else its columns are. With wgmma under way until wait().
template <typename T, bool WGMMA, bool ROWS, int N, int KS>
__device__ __forceinline__ void multiply(float (&x)[N][4], const uint32_t (&a)[KS][4], uint32_t tile, bool add, int lane) {
  if constexpr (WGMMA) {
    const uint64_t b = ROWS ? wgmma::tile_of_rows(tile, chunk::kTileBytes) : wgmma::tile_of_columns(tile);
    wgmma::hold(x);
    wgmma::fence();
#pragma unroll
    for (int k = 0; k < KS; ++k)
      wgmma::product<T, ROWS>(x, a[k], b + wgmma::bytes(ROWS ? k * 2048 : k / 4 * chunk::kTileBytes + k % 4 * 32), add || k > 0);
    wgmma::commit();
  } else {
    detail::multiply_sm80<T, ROWS>(x, a, tile, add, lane);
  }
}

// Until the products are there: `x` one of their results, `a` their left operands, which the products still read until then.
template <bool WGMMA, int N, int... KS> __device__ __forceinline__ void wait(float (&x)[N][4], uint32_t (&...a)[KS][4]) {
  if constexpr (WGMMA) {
    wgmma::wait<0>();
    wgmma::hold(x);
    (wgmma::hold(a), ...);
  }
}

template <typename T, bool WGMMA, bool ROWS, int N, int KS>
__device__ __forceinline__ void multiply_now(float (&x)[N][4], uint32_t (&a)[KS][4], uint32_t tile, bool add, int lane) {
  multiply<T, WGMMA, ROWS>(x, a, tile, add, lane);
  wait<WGMMA>(x, a);
}

// Left operands: a warp's 16 rows of a tile, columns 16 first .. 16 (first + KS); or its 16 columns as rows.
template <int KS> __device__ __forceinline__ void load_rows(uint32_t (&a)[KS][4], uint32_t tile, int first, int warp, int lane) {
  const uint32_t by_row = chunk::lanes_by_row(lane);
#pragma unroll
  for (int k = 0; k < KS; ++k) ptx::load_matrices(a[k], chunk::tile_at(tile + 2048 * warp, by_row, 0, first + k));
}
template <int KS> __device__ __forceinline__ void load_columns(uint32_t (&a)[KS][4], uint32_t tile, int warp, int lane) {
  const uint32_t at = chunk::tile_at(tile, chunk::lanes_by_piece(lane), 0, warp);
#pragma unroll
  for (int k = 0; k < KS; ++k) ptx::load_matrices_trans(a[k], at + 2048 * k);
}

// x in 16 bits into a warp's 16 rows of a tile, whose first row is at `rows`.
template <int KS> __device__ __forceinline__ void store_rows(const uint32_t (&x)[KS][4], uint32_t rows, int lane) {
  const uint32_t by_row = chunk::lanes_by_row(lane);
#pragma unroll
  for (int k = 0; k < KS; ++k) chunk::store_block(chunk::tile_at(rows, by_row, 0, k), x[k], lane);
}

}  // namespace backward
}  // namespace gdn
