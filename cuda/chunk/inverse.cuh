// (I + L)^-1 for a strictly lower triangular 64 x 64 matrix, by a warpgroup.
//
// Blocks of 8 by substitution in f32; then [[A, 0], [C, B]]^-1 = [[A', 0], [-B' C A', B']] on tensor cores: blocks of 8 in TF32,
// of 16 and 32 in f16, which has as many bits, and registers and shared memory for half as many words. Nothing but entries of
// inverses and of L is ever formed: powers of L, which a series would need, reach 2^63 for repeated keys. While no token makes
// the state longer (beta |k|^2 <= 2) entries of the inverse are at most beta_j |k_i| |k_j|, far from where f16 ends.
//
// Each warp has 16 rows. What is uneven between them is not done for nothing, and they wait for each other only where one needs
// what another has made; what they have in common is the same code, since the instruction cache is small.
#pragma once

#include "layout.cuh"

namespace gdn {
namespace chunk {

constexpr int kBlockLd = 20;    // floats a row of a 16 x 16 block: rows 2c and lanes n of a B operand fall on 32 banks
constexpr int kBlockFloats = 512;    // from one block to the next, so that each lies where its warp's rows of the image will

// To TF32, half away from zero; the hardware cuts off the lower bits.
__device__ __forceinline__ float near_tf32(float x) { return __uint_as_float(__float_as_uint(x) + 0x1000u); }

// 1 or 0, in one instruction.
__device__ __forceinline__ float one_if_equal(float a, float b) {
  float y;
  asm("set.eq.f32.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}

// acc[16, 8] += a[16, 8] b[8, 8] in f16: the left half of mma16816's a, the upper one of its b.
__device__ __forceinline__ void mma1688_half(float (&acc)[4], uint32_t a0, uint32_t a1, uint32_t b) {
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
               : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
               : "r"(a0), "r"(a1), "r"(b));
}

// What a lane has of a 16 x 16 lower triangular block: of rows lane / 4 and 8 further columns 2 (lane % 4), + 1, and of the
// lower row 8 further.
struct Triangle {
  float top[2], low[2], end[2];
};

// The same, packed.
struct PackedTriangle {
  uint32_t top, low, end;
};
__device__ __forceinline__ PackedTriangle minus(const PackedTriangle &x) {
  return {x.top ^ 0x80008000u, x.low ^ 0x80008000u, x.end ^ 0x80008000u};
}

// The inverse of a block on the diagonal, L's entries of it being at `d`, by a warp; what is above the diagonal there is not
// looked at. Two blocks of 8, of each of which lane % 8 solves for a row, then their merge, on half of the rows that a product
// has.
__device__ __forceinline__ Triangle invert16(float *d, int lane) {
  float *block = d + lane / 8 % 2 * 8 * (kBlockLd + 1);
  const float own = static_cast<float>(lane % 8);
  float x[8], rows[8][8];
#pragma unroll
  for (int i = 7; i > 0; --i)
#pragma unroll
    for (int m = (i + 3) / 4 - 1; m >= 0; --m)
      *reinterpret_cast<float4 *>(&rows[i][4 * m]) = *reinterpret_cast<const float4 *>(block + i * kBlockLd + 4 * m);
  // x (I + L) = the row of I, from its end.
#pragma unroll
  for (int j = 7; j >= 0; --j) {
    float sum = one_if_equal(own, static_cast<float>(j));
#pragma unroll
    for (int m = 7; m > j; --m) sum = fmaf(-rows[m][j], x[m], sum);
    x[j] = sum;
  }
  __syncwarp();
  if (lane < 16)
#pragma unroll
    for (int m = 0; m < 2; ++m)
      *reinterpret_cast<float4 *>(block + lane % 8 * kBlockLd + 4 * m) = make_float4(x[4 * m], x[4 * m + 1], x[4 * m + 2], x[4 * m + 3]);
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

template <typename T> __device__ __forceinline__ void pack_product(uint32_t (&x)[4], const float (&left)[4], const float (&right)[4]) {
  x[0] = pack2<T>(left[0], left[1]), x[1] = pack2<T>(left[2], left[3]);
  x[2] = pack2<T>(right[0], right[1]), x[3] = pack2<T>(right[2], right[3]);
}

template <typename T> __device__ __forceinline__ void pack_minus(uint32_t (&x)[4], const float (&left)[4], const float (&right)[4]) {
  x[0] = pack2<T>(-left[0], -left[1]), x[1] = pack2<T>(-left[2], -left[3]);
  x[2] = pack2<T>(-right[0], -right[1]), x[3] = pack2<T>(-right[2], -right[3]);
}

// acc[16, 16] += a b, b being the 16 x 16 block whose load_matrices_trans() is `b`.
__device__ __forceinline__ void multiply_block(float (&left)[4], float (&right)[4], const uint32_t (&a)[4], const uint32_t (&b)[4]) {
  ptx::mma16816<__half>(left, a[0], a[1], a[2], a[3], b[0], b[1]);
  ptx::mma16816<__half>(right, a[0], a[1], a[2], a[3], b[2], b[3]);
}

// acc[16, 16] += a b^T: b as an A operand holds it.
__device__ __forceinline__ void multiply_by_transpose(float (&left)[4], float (&right)[4], const uint32_t (&a)[4],
                                                      const uint32_t (&b)[4]) {
  ptx::mma16816<__half>(left, a[0], a[1], a[2], a[3], b[0], b[2]);
  ptx::mma16816<__half>(right, a[0], a[1], a[2], a[3], b[1], b[3]);
}
__device__ __forceinline__ void multiply_by_transpose(float (&left)[4], float (&right)[4], const uint32_t (&a)[4],
                                                      const PackedTriangle &b) {
  mma1688_half(left, a[0], a[1], b.top);
  ptx::mma16816<__half>(right, a[0], a[1], a[2], a[3], b.low, b.end);
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

// NOTES: what is set on one way alone lives through all of the loop for ptxas; volatile, or it is a select on all ways.
__device__ __forceinline__ void set_to_zero(uint32_t (&x)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) asm volatile("mov.b32 %0, 0;" : "=r"(x[i]));
}

// Of the transpose.
__device__ __forceinline__ void store_transpose(uint32_t at, const uint32_t (&x)[4], int lane) {
#if __CUDA_ARCH__ >= 900
  ptx::store_matrices_trans(at, {x[0], x[2], x[1], x[3]});
#else
  store_block(at, {ptx::transpose_matrix(x[0]), ptx::transpose_matrix(x[2]), ptx::transpose_matrix(x[1]), ptx::transpose_matrix(x[3])},
              lane);
#endif
}

// The half of group_barrier() of those that wait for nothing: what they wrote before is seen by those that wait.
template <int THREADS> __device__ __forceinline__ void group_arrive(int id) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "n"(THREADS) : "memory");
}

// Barriers of the block that a warpgroup needs: all its threads at `all`, and two between some warps. Nobody else uses them.
struct InverseBarriers {
  int all, pair, half;
};

// The image of the inverse. Before it each warp has put what L has in its diagonal block to `block`, which may lie
// where the warp's rows of the image will, and what is left of it by blocks of 16: the last one of warps 1 and 3 into the f16
// tile `l`, others of warps 2 and 3 packed in `left`. `l` ends with blocks that are not L's. The caller's next barrier of all
// warps ends all reads of it. `meanwhile` is called where warps 0 and 1 have nothing to do. Not SPLIT: by barriers of all alone.
//
// With X the inverse, by blocks of 16: X10 and X32 are a merge of blocks of 16 by warps 1 and 3, from the left: what a warp can
// multiply before it knows of others it does. The merge of 32 goes by transposes, so that a warp has its rows of L and of X as
// right operands in registers as they are: T = C A', of which warp 2 hands its rows to warp 3, then X = -B' T.
// One function: blocks of L and of the inverse are registers of all its parts, which are the lambdas.
template <typename T, bool SPLIT, typename Meanwhile>
__device__ __forceinline__ void invert64(uint32_t l, float *block, const uint32_t (&left)[2][4], uint32_t image, int warp, int lane,
                                         const InverseBarriers &barriers, const Meanwhile &meanwhile) {
  const uint32_t by_row = lanes_by_row(lane), l_rows = l + 2048 * warp, rows = image + 2048 * warp;
  const Triangle t = invert16(block, lane);
  const PackedTriangle own = {pack2<__half>(t.top[0], t.top[1]), pack2<__half>(t.low[0], t.low[1]), pack2<__half>(t.end[0], t.end[1])};
  store_block(tile_at(l_rows, by_row, 0, warp), {own.top, own.low, 0, own.end}, lane);
  uint32_t low[4], last[4];    // of warps 1 and 3: X11 L10, X33 L32; of warp 3: -X32
  if (warp % 2) {
    float w[2][4] = {};
    uint32_t b[4];
    ptx::load_matrices_trans(b, tile_at(l_rows, by_row, 0, warp - 1));
    multiply_block(w[0], w[1], {own.top, own.low, 0, own.end}, b);
    pack_product<__half>(low, w[0], w[1]);
  } else {
    set_to_zero(low);
  }
  ptx::group_barrier<128>(barriers.all);    // the diagonal blocks are there
  if (warp % 2) {
    float y[2][4] = {};
    uint32_t b[4];
    ptx::load_matrices_trans(b, tile_at(l_rows - 2048, by_row, 0, warp - 1));
    multiply_block(y[0], y[1], low, b);
    uint32_t x[4];
    if (warp == 1) {
      pack_minus<__half>(x, y[0], y[1]);
      store_block(tile_at(l, by_row, 1, 0), x, lane);
      if (SPLIT) group_arrive<96>(barriers.pair);
      set_to_zero(last);
    } else {
      pack_product<__half>(last, y[0], y[1]);
    }
    pack_minus<T>(x, y[0], y[1]);
    store_block(tile_at(rows, by_row, 0, warp - 1), x, lane);
  } else {
    set_to_zero(last);
  }
  store_block(tile_at(rows, by_row, 0, warp),
              {pack2<T>(t.top[0], t.top[1]), pack2<T>(t.low[0], t.low[1]), 0, pack2<T>(t.end[0], t.end[1])}, lane);

  float x[4][4];    // T^T of the blocks of columns 1 and 0, then the same of X
  uint32_t a[4], c[2][4];
  const uint32_t zero[4] = {}, by_piece = lanes_by_piece(lane);
  const auto load_transpose = [&](int i, int j) { ptx::load_matrices_trans(a, tile_at(l, by_piece, i, j)); };
  const auto begin_t = [&] {
#pragma unroll
    for (int j = 0; j < 4; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i) x[j][i] = 0.f;
    load_transpose(1, 1);
    multiply_by_transpose(x[0], x[1], a, left[1]);
    load_transpose(0, 0);
    multiply_by_transpose(x[2], x[3], a, left[0]);
    pack_product<__half>(c[0], x[0], x[1]);
    if (warp == 2) {
      store_block(tile_at(l, by_row, 2, 1), c[0], lane);
      store_block(tile_at(image, by_row, 2, 3), zero, lane);
    }
  };
  const auto finish_t = [&] {
    load_transpose(1, 0);
    multiply_by_transpose(x[2], x[3], a, left[1]);
    pack_product<__half>(c[1], x[2], x[3]);
    if (warp == 2) {
      store_block(tile_at(l, by_row, 2, 0), c[1], lane);
      if (SPLIT) group_arrive<64>(barriers.half);
    }
  };
  const auto finish_x = [&] {
    const PackedTriangle m = minus(own);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) x[2 * j][i] = x[2 * j + 1][i] = 0.f;
      multiply_by_transpose(x[2 * j], x[2 * j + 1], c[j], m);
    }
    if (warp == 3) {
      if (SPLIT) ptx::group_barrier<64>(barriers.half);    // so is what warp 2 has of T
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        ptx::load_matrices(a, tile_at(l, by_row, 2, 1 - j));
        multiply_by_transpose(x[2 * j], x[2 * j + 1], a, last);
      }
    }
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      pack_product<T>(a, x[2 * j], x[2 * j + 1]);
      store_transpose(tile_at(rows, by_row, 0, 1 - j), a, lane);
    }
  };
  const auto rest = [&] {    // of warps 0 and 1
    store_block(tile_at(rows, by_row, 0, 2), zero, lane);
    store_block(tile_at(rows, by_row, 0, 3), zero, lane);
    if (warp == 0) store_block(tile_at(image, by_row, 0, 1), zero, lane);
    meanwhile();
  };
  if constexpr (SPLIT) {
    if (warp > 1) {
      begin_t();
      ptx::group_barrier<96>(barriers.pair);    // X10 is there
      finish_t();
      finish_x();
    } else {
      rest();
    }
  } else {
    ptx::group_barrier<128>(barriers.all);
    if (warp > 1) begin_t(), finish_t();
    else rest();
    ptx::group_barrier<128>(barriers.all);
    if (warp > 1) finish_x();
  }
}

}  // namespace chunk
}  // namespace gdn
