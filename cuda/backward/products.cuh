// Products of a warpgroup, with wgmma or with mma.sync: accumulators and left operands lie in the same registers for both.
//
// The left operand is in registers, the right one in tiles of shared memory (../common/wgmma.cuh).
#pragma once

#include "../chunk/matrices.cuh"
#include "../chunk/scan.cuh"
#include "../common/wgmma.cuh"

namespace gdn {
namespace backward {

template <int N> __device__ __forceinline__ void set_to_zero(float (&x)[N][4]) {
#pragma unroll
  for (int t = 0; t < N; ++t)
#pragma unroll
    for (int c = 0; c < 4; ++c) x[t][c] = 0.f;
}

namespace detail {
// x += a[64, 16] times step k of b.
template <typename T, bool ROWS, int N>
__device__ __forceinline__ void multiply_sm80(float (&x)[N][4], const uint32_t (&a)[4], uint32_t tile, int k, int lane) {
  const uint32_t lanes = ROWS ? chunk::lanes_by_row(lane) : chunk::lanes_by_piece(lane);
#pragma unroll
  for (int n = 0; n < N / 2; ++n) {
    uint32_t b[4];
    if constexpr (ROWS) ptx::load_matrices_trans(b, chunk::tile_at(tile, lanes, k, n));
    else ptx::load_matrices(b, chunk::tile_at(tile, lanes, n, k));
    ptx::mma16816<T>(x[2 * n], a[0], a[1], a[2], a[3], b[0], b[1]);
    ptx::mma16816<T>(x[2 * n + 1], a[0], a[1], a[2], a[3], b[2], b[3]);
  }
}
}  // namespace detail

// x[64, 8 N] (+)= a[64, 16 KS] b. ROWS: b's rows are rows of the tile, else its columns are. With wgmma under way until wait();
// `behind`: behind products to x that are under way.
template <typename T, bool WGMMA, bool ROWS, int N, int KS>
__device__ __forceinline__ void multiply(float (&x)[N][4], const uint32_t (&a)[KS][4], uint32_t tile, bool add, int lane,
                                         bool behind = false) {
  if constexpr (WGMMA) {
    const uint64_t b = ROWS ? wgmma::tile_of_rows(tile, chunk::kTileBytes) : wgmma::tile_of_columns(tile);
    if (!behind) wgmma::hold(x);
    wgmma::fence();
#pragma unroll
    for (int k = 0; k < KS; ++k)
      wgmma::product<T, ROWS>(x, a[k], b + wgmma::bytes(ROWS ? k * 2048 : k / 4 * chunk::kTileBytes + k % 4 * 32), add || k > 0);
    wgmma::commit();
  } else {
    if (!add) set_to_zero(x);
#pragma unroll
    for (int k = 0; k < KS; ++k) detail::multiply_sm80<T, ROWS>(x, a[k], tile, k, lane);
  }
}

// Until the products but for the last LATER are there: `x` one of their results, `a` left operands, which they read until then.
template <bool WGMMA, int LATER = 0, int N, int... KS> __device__ __forceinline__ void wait(float (&x)[N][4], uint32_t (&...a)[KS][4]) {
  if constexpr (WGMMA) {
    wgmma::wait<LATER>();
    wgmma::hold(x);
    (wgmma::hold(a), ...);
  }
}

template <typename T, bool WGMMA, bool ROWS, int N, int KS>
__device__ __forceinline__ void multiply_now(float (&x)[N][4], uint32_t (&a)[KS][4], uint32_t tile, bool add, int lane) {
  multiply<T, WGMMA, ROWS>(x, a, tile, add, lane);
  wait<WGMMA>(x, a);
}

// The same with a's rows being 64 rows of a tile, or its columns (COLUMNS_A).
template <typename T, bool WGMMA, bool COLUMNS_A, bool ROWS, int KS, int N>
__device__ __forceinline__ void multiply_tiles(float (&x)[N][4], uint32_t a_tile, uint32_t tile, bool add, int warp, int lane,
                                               bool behind = false) {
  if constexpr (WGMMA) {
    const uint64_t a = COLUMNS_A ? wgmma::tile_of_rows(a_tile, chunk::kTileBytes) : wgmma::tile_of_columns(a_tile);
    const uint64_t b = ROWS ? wgmma::tile_of_rows(tile, chunk::kTileBytes) : wgmma::tile_of_columns(tile);
    const auto step = [](bool rows, int k) { return wgmma::bytes(rows ? k * 2048 : k / 4 * chunk::kTileBytes + k % 4 * 32); };
    if (!behind) wgmma::hold(x);
    wgmma::fence();
#pragma unroll
    for (int k = 0; k < KS; ++k) wgmma::product_of_tiles<T, COLUMNS_A, ROWS>(x, a + step(COLUMNS_A, k), b + step(ROWS, k), add || k > 0);
    wgmma::commit();
  } else {
    const uint32_t lanes = COLUMNS_A ? chunk::tile_at(a_tile, chunk::lanes_by_piece(lane), 0, warp) : chunk::lanes_by_row(lane);
    if (!add) set_to_zero(x);
#pragma unroll
    for (int k = 0; k < KS; ++k) {
      uint32_t a[4];
      if constexpr (COLUMNS_A) ptx::load_matrices_trans(a, lanes + 2048 * k);
      else ptx::load_matrices(a, chunk::tile_at(a_tile + 2048 * warp, lanes, 0, k));
      detail::multiply_sm80<T, ROWS>(x, a, tile, k, lane);
    }
  }
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

// Left operands in f16 of rows that may have any size: rows lane / 4 and 8 further times powers of two, which `up` takes back.
struct RowScales {
  float down[2], up[2];
};
__device__ __forceinline__ RowScales scales_of_rows(float top, float low) {
  const float most[2] = {top, low};
  RowScales s;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float m = most[i];
#pragma unroll
    for (int d = 1; d < 4; d *= 2) m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, d));
    const uint32_t exponent = __float_as_uint(m) & 0x7f800000u;
    s.up[i] = __uint_as_float(exponent), s.down[i] = __uint_as_float(0x7f000000u - exponent);
  }
  return s;
}
template <int N> __device__ __forceinline__ RowScales to_scaled_operand(uint32_t (&a)[N / 2][4], const float (&x)[N][4]) {
  float most[2] = {0.f, 0.f};
#pragma unroll
  for (int t = 0; t < N; ++t)
#pragma unroll
    for (int c = 0; c < 4; ++c) most[c / 2] = fmaxf(most[c / 2], fabsf(x[t][c]));
  const RowScales s = scales_of_rows(most[0], most[1]);
#pragma unroll
  for (int k = 0; k < N / 2; ++k)
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const float(&y)[4] = x[2 * k + c / 2];
      a[k][c] = chunk::pack2<__half>(y[c % 2 * 2] * s.down[c % 2], y[c % 2 * 2 + 1] * s.down[c % 2]);
    }
  return s;
}
// x = up y + what rounding took from x to the operand a.
template <int N>
__device__ __forceinline__ void add_rounded(float (&x)[N][4], const uint32_t (&a)[N / 2][4], const float (&y)[N][4], const float (&up)[2]) {
#pragma unroll
  for (int t = 0; t < N; ++t)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float2 near = chunk::unpack2<__half>(a[t / 2][t % 2 * 2 + i]);
      x[t][2 * i] = fmaf(y[t][2 * i] - near.x, up[i], x[t][2 * i]);
      x[t][2 * i + 1] = fmaf(y[t][2 * i + 1] - near.y, up[i], x[t][2 * i + 1]);
    }
}
// Of each half the larger one of m and |x|.
template <typename T> __device__ __forceinline__ uint32_t max_abs2(uint32_t m, uint32_t x) {
  uint32_t y;
  if constexpr (std::is_same_v<T, __half>) asm("{\n.reg .b32 a;\nabs.f16x2 a, %2;\nmax.f16x2 %0, %1, a;\n}" : "=r"(y) : "r"(m), "r"(x));
  else asm("{\n.reg .b32 a;\nabs.bf16x2 a, %2;\nmax.bf16x2 %0, %1, a;\n}" : "=r"(y) : "r"(m), "r"(x));
  return y;
}
template <typename T, int KS> __device__ __forceinline__ RowScales scales_of_operand(const uint32_t (&a)[KS][4]) {
  uint32_t most[2] = {0, 0};
#pragma unroll
  for (int k = 0; k < KS; ++k)
#pragma unroll
    for (int c = 0; c < 4; ++c) most[c % 2] = max_abs2<T>(most[c % 2], a[k][c]);
  const float2 top = chunk::unpack2<T>(most[0]), low = chunk::unpack2<T>(most[1]);
  return scales_of_rows(fmaxf(top.x, top.y), fmaxf(low.x, low.y));
}
// to_scaled_operand() of an operand.
template <typename T, int KS> __device__ __forceinline__ RowScales to_scaled_operand(uint32_t (&to)[KS][4], const uint32_t (&a)[KS][4]) {
  const RowScales s = scales_of_operand<T>(a);
#pragma unroll
  for (int k = 0; k < KS; ++k)
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const float2 x = chunk::unpack2<T>(a[k][c]);
      to[k][c] = chunk::pack2<__half>(x.x * s.down[c % 2], x.y * s.down[c % 2]);
    }
  return s;
}

// x in 16 bits into a warp's 16 rows of a tile, whose first row is at `rows`.
template <int KS> __device__ __forceinline__ void store_rows(const uint32_t (&x)[KS][4], uint32_t rows, int lane) {
  const uint32_t by_row = chunk::lanes_by_row(lane);
#pragma unroll
  for (int k = 0; k < KS; ++k) chunk::store_block(chunk::tile_at(rows, by_row, 0, k), x[k], lane);
}

}  // namespace backward
}  // namespace gdn
