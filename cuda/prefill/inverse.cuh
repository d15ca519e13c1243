// (I + L)^-1 for a strictly lower triangular 64 x 64 matrix, by a warpgroup.
//
// Blocks of 8 by substitution in f32; then [[A, 0], [C, B]]^-1 = [[A', 0], [-B' C A', B']] on tensor cores: blocks of 8 in TF32,
// of 16 and 32 in f16, which has as many bits, and registers and shared memory for half as many words. Nothing but entries of
// inverses and of L is ever formed: powers of L, which a series would need, reach 2^63 for repeated keys. While no token makes
// the state longer (beta |k|^2 <= 2) entries of the inverse are at most beta_i |k_i| |k_j|, far from where f16 ends.
#pragma once

#include "layout.cuh"

namespace gdn {
namespace prefill {

constexpr int kBlockLd = 20;    // floats a row of a 16 x 16 block: rows 2c and lanes n of a B operand fall on 32 banks

// To TF32, half away from zero; the hardware cuts off the lower bits.
__device__ __forceinline__ float near_tf32(float x) { return __uint_as_float(__float_as_uint(x) + 0x1000u); }

// What a lane has of a 16 x 16 lower triangular block: of rows lane / 4 and 8 further columns 2 (lane % 4), + 1, and of the
// lower row 8 further.
struct Triangle {
  float top[2], low[2], end[2];
};

template <typename T> __device__ __forceinline__ void pack_block(uint32_t (&x)[4], const Triangle &t) {
  x[0] = pack2<T>(t.top[0], t.top[1]);
  x[1] = pack2<T>(t.low[0], t.low[1]);
  x[2] = 0;
  x[3] = pack2<T>(t.end[0], t.end[1]);
}

// The inverse of a block on the diagonal, L's entries of it being at `d`, by a warp. Two blocks of 8, of each of which
// lane % 8 solves for a column, then their merge, on half of the rows that a product has.
__device__ __forceinline__ Triangle invert16(float *d, int lane) {
  const int column = lane % 8;
  float *block = d + lane / 8 % 2 * 8 * (kBlockLd + 1);
  float x[8], rows[8][8];
#pragma unroll
  for (int i = 1; i < 8; ++i)
#pragma unroll
    for (int m = 0; m < (i + 3) / 4; ++m)
      *reinterpret_cast<float4 *>(&rows[i][4 * m]) = *reinterpret_cast<const float4 *>(block + i * kBlockLd + 4 * m);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    float sum = i == column ? 1.f : 0.f;
#pragma unroll
    for (int m = 0; m < i; ++m) sum = fmaf(-rows[i][m], x[m], sum);
    x[i] = sum;
  }
  __syncwarp();
  if (lane < 16)
#pragma unroll
    for (int i = 0; i < 8; ++i) block[i * kBlockLd + column] = x[i];
  __syncwarp();
  const int row = lane / 4, pair = 2 * (lane % 4);
  const float2 top = *reinterpret_cast<const float2 *>(d + row * kBlockLd + pair);
  const float2 end = *reinterpret_cast<const float2 *>(d + (8 + row) * kBlockLd + 8 + pair);
  // As B operands, with k in the order of an accumulator's columns: rows 2 (lane % 4) and the next of column lane / 4.
  const float *c = d + (8 + pair) * kBlockLd + row, *a = d + pair * kBlockLd + row;
  float w[4] = {}, z[4] = {};
  ptx::mma1688_tf32(w, {near_tf32(end.x), 0.f, near_tf32(end.y), 0.f}, {near_tf32(c[0]), near_tf32(c[kBlockLd])});
  ptx::mma1688_tf32(z, {near_tf32(w[0]), 0.f, near_tf32(w[1]), 0.f}, {near_tf32(a[0]), near_tf32(a[kBlockLd])});
  return {{top.x, top.y}, {-z[0], -z[1]}, {end.x, end.y}};
}

// acc[16, 16] += a b, b being the 16 x 16 block at row block i and column block j of an f16 tile.
__device__ __forceinline__ void multiply_block(float (&left)[4], float (&right)[4], const uint32_t (&a)[4], uint32_t tile, int i,
                                               int j, uint32_t by_row) {
  uint32_t b[4];
  ptx::load_matrices_trans(b, tile_at(tile, by_row, i, j));
  ptx::mma16816<__half>(left, a[0], a[1], a[2], a[3], b[0], b[1]);
  ptx::mma16816<__half>(right, a[0], a[1], a[2], a[3], b[2], b[3]);
}

template <typename T> __device__ __forceinline__ void pack_product(uint32_t (&x)[4], const float (&left)[4], const float (&right)[4]) {
  x[0] = pack2<T>(left[0], left[1]), x[1] = pack2<T>(left[2], left[3]);
  x[2] = pack2<T>(right[0], right[1]), x[3] = pack2<T>(right[2], right[3]);
}

// -x diag(beta) of the columns from `j`, packed.
template <typename T>
__device__ __forceinline__ void pack_minus(uint32_t (&x)[4], const float (&left)[4], const float (&right)[4], const float *beta,
                                           int j, int lane) {
  const float2 l = *reinterpret_cast<const float2 *>(beta + j + 2 * (lane % 4));
  const float2 r = *reinterpret_cast<const float2 *>(beta + j + 8 + 2 * (lane % 4));
  x[0] = pack2<T>(-left[0] * l.x, -left[1] * l.y), x[1] = pack2<T>(-left[2] * l.x, -left[3] * l.y);
  x[2] = pack2<T>(-right[0] * r.x, -right[1] * r.y), x[3] = pack2<T>(-right[2] * r.x, -right[3] * r.y);
}

// A 16 x 16 block of a tile: the registers of an A operand, `at` the address of tile_at() by lanes_by_row().
__device__ __forceinline__ void store_block(uint32_t at, const uint32_t (&x)[4], int lane) {
#if __CUDA_ARCH__ >= 900
  ptx::store_matrices(at, x);
#else
#pragma unroll
  for (int i = 0; i < 4; ++i) ptx::store_shared(__shfl_sync(0xffffffffu, at, 8 * i + lane / 4) + 4 * (lane % 4), x[i]);
#endif
}

// The image of the inverse times diag(beta). Before it each warp has put L's blocks left of its diagonal block into the f16
// tile `l`, and those of the block itself to `block`, which may lie in the image; `l` ends with some blocks of the inverse.
// `barrier` is one of the block's barriers that nobody else uses meanwhile. The caller's next barrier ends all reads of `l`.
template <typename T>
__device__ __forceinline__ void invert64(uint32_t l, float *block, const float *beta, uint32_t image, int warp, int lane,
                                         int barrier) {
  const uint32_t by_row = lanes_by_row(lane);
  const auto at = [&](uint32_t tile, int i, int j) { return tile_at(tile, by_row, 0, j) + 2048 * i; };
  const Triangle t = invert16(block, lane);
  uint32_t diagonal[4], x[4];
  pack_block<__half>(diagonal, t);
  store_block(tile_at(l, by_row, warp, warp), diagonal, lane);
  // B' C of the pair of 16 whose lower half this warp has, and of the pair of 32: from its own rows.
  const int pair = warp - 1;
  float w[4][4] = {};
  uint32_t low[4];    // B' C of the pair of 16, then of the pair -B' C A'
  if (warp % 2) {
    multiply_block(w[0], w[1], diagonal, l + 2048 * warp, 0, pair, by_row);
    pack_product<__half>(low, w[0], w[1]);
  }
  ptx::group_barrier<128>(barrier);    // the diagonal blocks are there, and what they were made from is not needed any more
  const float2 bl = *reinterpret_cast<const float2 *>(beta + 16 * warp + 2 * (lane % 4));
  const float2 br = *reinterpret_cast<const float2 *>(beta + 16 * warp + 8 + 2 * (lane % 4));
  pack_block<T>(x, {{t.top[0] * bl.x, t.top[1] * bl.y}, {t.low[0] * bl.x, t.low[1] * bl.y}, {t.end[0] * br.x, t.end[1] * br.y}});
  store_block(tile_at(image, by_row, warp, warp), x, lane);
  const uint32_t zero[4] = {};
#pragma unroll
  for (int j = 1; j < 4; ++j)
    if (j > warp) store_block(at(image, warp, j), zero, lane);

  if (warp % 2) {
    float z[2][4] = {};
    multiply_block(z[0], z[1], low, l + 2048 * pair, 0, pair, by_row);
    pack_minus<T>(x, z[0], z[1], beta, 16 * pair, lane);
    store_block(at(image, warp, pair), x, lane);
#pragma unroll
    for (int i = 0; i < 4; ++i) z[0][i] = -z[0][i], z[1][i] = -z[1][i];
    pack_product<__half>(low, z[0], z[1]);
    if (warp == 1) store_block(at(l, 1, 0), low, lane);
  }
  ptx::group_barrier<128>(barrier);    // so is what warp 1 made
  if (warp < 2) return;
#pragma unroll
  for (int j = 0; j < 2; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) w[2 * j][i] = w[2 * j + 1][i] = 0.f;
    if (warp == 3) multiply_block(w[2 * j], w[2 * j + 1], low, l + 2048 * 2, 0, j, by_row);
    multiply_block(w[2 * j], w[2 * j + 1], diagonal, l + 2048 * warp, 0, j, by_row);
  }
  uint32_t c[2][4];
  pack_product<__half>(c[0], w[0], w[1]);
  pack_product<__half>(c[1], w[2], w[3]);
  float z[4][4] = {};
  multiply_block(z[0], z[1], c[0], l, 0, 0, by_row);
  multiply_block(z[0], z[1], c[1], l, 1, 0, by_row);
  multiply_block(z[2], z[3], c[1], l, 1, 1, by_row);
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    pack_minus<T>(x, z[2 * j], z[2 * j + 1], beta, 16 * j, lane);
    store_block(at(image, warp, j), x, lane);
  }
}

}  // namespace prefill
}  // namespace gdn
