// What both gradients kernels compute of a step: the matrices of tokens, the sums over them that are gradients of the log decay, and rows
// of dQ and dK.
#pragma once

#include "steps.cuh"

namespace gdn {
namespace backward {

// PLACES are StepPlaces with the kernel's shared memory: factors(), warp_sums(), state_sum(), and the addresses of the matrices
// attention(), attention_rest() and lower().
template <typename PLACES> struct StepMatrices : PLACES {
  using T = typename PLACES::Type;
  using PLACES::count, PLACES::factors, PLACES::head, PLACES::p, PLACES::step, PLACES::warp_sums;

  __device__ __forceinline__ float scale_of_update(int column_16) const {
    return factors().updates[4 * this->first_tile() + column_16];
  }

  // ---- the matrices of tokens ----

  // 16 rows of a matrix: of P = scale dAtt D / (|q| |k|) in group 0, of M = -dV U^T D / (|k| |k|) in group 1.
  struct MatrixRows {
    int group, block;
    float up[2];    // of to_operand()
  };

  // The rows of dO or dV for the product with U in f16: divided by a power of two a row, times that of U / beta; `up` takes both back.
  __device__ __forceinline__ void to_operand(uint32_t (&a)[8][4], MatrixRows &r, uint32_t tiles, int lane) const {
    load_rows(a, tiles, 0, r.block, lane);
    float scale[8], largest = 0.f;
#pragma unroll
    for (int k = 0; k < 8; ++k) scale[k] = scale_of_update(k), largest = fmaxf(largest, scale[k]);
    const RowScales s = scales_of_operand<T>(a);
    const float one = largest > 0.f ? __fdividef(1.f, largest) : 0.f;
#pragma unroll
    for (int k = 0; k < 8; ++k)
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const float2 x = chunk::unpack2<T>(a[k][c]);
        const float down = s.down[c % 2] * (scale[k] * one);
        a[k][c] = chunk::pack2<__half>(x.x * down, x.y * down);
      }
    r.up[0] = s.up[0] * largest, r.up[1] = s.up[1] * largest;
  }

  // 16 rows of P or M as tiles, by a warp, and the sums over X, their products with q k or k k below the diagonal. `left` has dO or dV,
  // `rows` q or k; loaded() after the last use of `left` and before the first of q and k. Blocks of columns past the diagonal stay as they are.
  //
  // NOTES: with mma.sync, so that warps need not wait for each other and have only blocks up to the diagonal. The loop is not unrolled:
  // with four times the code the wgmma kernel waited half of the time for instructions.
  template <typename F>
  __device__ __forceinline__ void make_rows(int group, int block, uint32_t left, uint32_t update, uint32_t rows, uint32_t keys,
                                            F &&loaded) const {
    const Here me;
    const TokenFactors &f = factors();
    MatrixRows r = {group, block, {}};
    uint32_t operand[8][4];
    to_operand(operand, r, left, me.lane);
    loaded();
    const float *norms = group == 0 ? f.q_norm : f.k_norm;
    float c[2], factor[2], row_sums[2] = {0.f, 0.f};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = 16 * block + me.lane / 4 + 8 * i;
      c[i] = f.c[row];
      factor[i] = norms[row] * (group == 0 ? p.common.scale : -1.f) * r.up[i];
    }
#pragma unroll 1
    for (int column = 0; column <= block; ++column) {    // of 16
      float x[2][4] = {}, y[2][4] = {};
      const uint32_t by_piece = chunk::lanes_by_piece(me.lane);
#pragma unroll
      for (int k = 0; k < 8; ++k) {
        uint32_t a[4], b[4];
        ptx::load_matrices(b, chunk::tile_at(update + 2048 * column, by_piece, 0, k));
        ptx::mma16816<__half>(x[0], operand[k][0], operand[k][1], operand[k][2], operand[k][3], b[0], b[1]);
        ptx::mma16816<__half>(x[1], operand[k][0], operand[k][1], operand[k][2], operand[k][3], b[2], b[3]);
        ptx::load_matrices(a, chunk::tile_at(rows + 2048 * block, chunk::lanes_by_row(me.lane), 0, k));
        ptx::load_matrices(b, chunk::tile_at(keys + 2048 * column, by_piece, 0, k));
        ptx::mma16816<T>(y[0], a[0], a[1], a[2], a[3], b[0], b[1]);
        ptx::mma16816<T>(y[1], a[0], a[1], a[2], a[3], b[2], b[3]);
      }
      if (column == block && group == 1) store_diagonal(x[0], x[1], r, me);
      form_block(x, y, c, factor, column, r, me);
      row_sums[0] += (y[0][0] + y[0][1]) + (y[1][0] + y[1][1]), row_sums[1] += (y[0][2] + y[0][3]) + (y[1][2] + y[1][3]);
      const float sum = sum_columns(y, me.lane);
      if (me.lane % 8 < 4) warp_sums(group, block).columns[16 * column + 8 * (me.lane / 16) + 2 * (me.lane % 4) + me.lane / 8 % 2] = sum;
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float sum = group_sum<4>(row_sums[i]);
      if (me.lane % 4 == 0) warp_sums(group, block).rows[me.lane / 4 + 8 * i] = sum;
    }
  }

  // A block of 16 columns from the products x of the operand and U: as a tile, and in y its products with what y was.
  __device__ __forceinline__ void form_block(const float (&x)[2][4], float (&y)[2][4], const float (&c)[2], const float (&factor)[2],
                                             int column_16, const MatrixRows &r, const Here &me) const {
    const TokenFactors &f = factors();
    const int last = r.group == 0 ? 0 : -1, first_row = 16 * r.block + me.lane / 4;    // the diagonal belongs to P alone
    uint32_t packed[4], rest[4];
#pragma unroll
    for (int t = 0; t < 2; ++t) {
      const int column = 16 * column_16 + 8 * t + 2 * (me.lane % 4);
      const float2 ck = *reinterpret_cast<const float2 *>(f.c + column), nk = *reinterpret_cast<const float2 *>(f.k_norm + column);
      const float2 bk = *reinterpret_cast<const float2 *>(f.beta + column);
      float m[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int distance = column + i % 2 - (first_row + i / 2 * 8);
        const float decay = chunk::exp2_fast(c[i / 2] - (i % 2 ? ck.y : ck.x));
        m[i] = distance <= last ? x[t][i] * (decay * factor[i / 2] * (i % 2 ? nk.y * bk.y : nk.x * bk.x)) : 0.f;
        y[t][i] = distance < 0 ? m[i] * y[t][i] : 0.f;
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        packed[2 * t + i] = chunk::pack2_finite<T>(m[2 * i], m[2 * i + 1]);
        const float2 near = chunk::unpack2<T>(packed[2 * t + i]);
        rest[2 * t + i] = chunk::pack2_finite<T>(m[2 * i] - near.x, m[2 * i + 1] - near.y);
      }
    }
    const uint32_t at = chunk::tile_at(2048 * r.block, chunk::lanes_by_row(me.lane), 0, column_16);
    chunk::store_block((r.group == 0 ? this->attention() : this->lower()) + at, packed, me.lane);
    if (r.group == 0) chunk::store_block(this->attention_rest() + at, rest, me.lane);
  }

  // d beta, by the lanes that have the diagonal of dV (U / beta)^T in a block of 16 tokens, whose halves are x and y.
  __device__ __forceinline__ void store_diagonal(const float (&x)[4], const float (&y)[4], const MatrixRows &r, const Here &me) const {
    const int row = me.lane / 4, column = 2 * (me.lane % 4);
    if (column != row && column + 1 != row) return;
    const float own[2] = {column == row ? x[0] : x[1], column == row ? y[2] : y[3]};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int token = 16 * r.block + row + 8 * i;
      if (token < count()) add_part(p.d_beta, token, __fdividef(own[i] * r.up[i], factors().beta[token]));
    }
  }

  // ---- sums for the log decays ----

  // Sums over the columns of a block, of a lane that of column 8 (lane / 16) + 2 (lane % 4) + lane / 8 % 2: each step halves those it has.
  __device__ __forceinline__ static float sum_columns(const float (&x)[2][4], int lane) {
    const bool right = lane & 16, odd = lane & 8;
    float pair[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float left_sum = x[0][i] + x[0][2 + i], right_sum = x[1][i] + x[1][2 + i];
      pair[i] = (right ? right_sum : left_sum) + __shfl_xor_sync(0xffffffffu, right ? left_sum : right_sum, 16);
    }
    float sum = (odd ? pair[1] : pair[0]) + __shfl_xor_sync(0xffffffffu, odd ? pair[0] : pair[1], 8);
    return sum + __shfl_xor_sync(0xffffffffu, sum, 4);
  }
  __device__ __forceinline__ void store_row_sums(int group, const RowSums &rows) const {
    const Here me;
    WarpSums &to = warp_sums(group, me.warp);
    if (me.lane % 4 != 0) return;
#pragma unroll
    for (int i = 0; i < 2; ++i) to.later[me.lane / 4 + 8 * i] = rows.later[i], to.earlier[me.lane / 4 + 8 * i] = rows.earlier[i];
  }
  // The gradient of the log decay, by a warp: for a token t the sum of X in rows from t on and columns before t, as those of rows less
  // those of columns from t on, of what later tokens read of the state, of what earlier ones write to it, and of the state itself.
  __device__ __forceinline__ void finish_decays() const {
    const TokenFactors &f = factors();
    const int lane = threadIdx.x % 32, t0 = 2 * lane, block = lane / 8;
    const float states = this->state_sum() * chunk::exp2_fast(f.c[kChunk - 1]);
    float later[2] = {0.f, 0.f}, earlier[2] = {0.f, 0.f};    // of tokens t0 and t0 + 1
#pragma unroll
    for (int g = 0; g < 2; ++g) {
      const WarpSums &own = warp_sums(g, block);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        later[i] += own.later[t0 % 16 + i] + own.rows[t0 % 16 + i], earlier[i] += own.earlier[t0 % 16 + i];
#pragma unroll
        for (int w = 0; w < 4; ++w)
          if (block <= w) later[i] -= warp_sums(g, w).columns[t0 + i];
      }
    }
    float from = later[0] + later[1];
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      const float next = __shfl_down_sync(0xffffffffu, from, d);
      if (lane + d < 32) from += next;
    }
    float after = __shfl_down_sync(0xffffffffu, from, 1);
    if (lane == 31) after = 0.f;
    const float written = sum_before(earlier[0] + earlier[1], lane);
    const float decay[2] = {from + written + states, (later[1] + after) + (written + earlier[0]) + states};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      // A decay of zero has no gradient: what rounding left of the sums would be multiplied by its logarithm.
      const float own = f.c[t0 + i] - (t0 + i > 0 ? f.c[t0 + i - 1] : 0.f);
      if (t0 + i < count()) add_part(p.d_log_decay, t0 + i, own < chunk::kLeastDecay + 1.f ? 0.f : decay[i]);
    }
  }

  // A token's gradient of a gate: of the first part written, of others added by the same thread.
  __device__ __forceinline__ void add_part(const gdn_heads &to, int token, float x) const {
    float *there = out_heads_at<float>(to, step.n, step.first + token, head());
    if (PLACES::kParts > 1 && step.part > 0) x += *there;
    *there = x;
  }

  // The sum over the lanes before.
  __device__ __forceinline__ static float sum_before(float x, int lane) {
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      const float before = __shfl_up_sync(0xffffffffu, x, d);
      if (lane >= d) x += before;
    }
    const float before = __shfl_up_sync(0xffffffffu, x, 1);
    return lane == 0 ? 0.f : before;
  }

  // ---- rows of dQ and dK, of 8 N columns ----

  // The sum over a row of x times the 16-bit tiles, by rows lane / 4 and 8 further of the warp's.
  template <int N> __device__ __forceinline__ static float2 row_products(const float (&x)[N][4], uint32_t tiles, const Here &me) {
    const uint32_t by_row = chunk::lanes_by_row(me.lane);
    float sum[2] = {0.f, 0.f};
#pragma unroll
    for (int k = 0; k < N / 2; ++k) {
      uint32_t a[4];    // as x has them: two tiles of rows and of rows 8 further
      ptx::load_matrices(a, chunk::tile_at(tiles + 2048 * me.warp, by_row, 0, k));
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const float2 y = chunk::unpack2<T>(a[c]);
        const float(&pair)[4] = x[2 * k + c / 2];
        sum[c % 2] = fmaf(pair[c % 2 * 2], y.x, fmaf(pair[c % 2 * 2 + 1], y.y, sum[c % 2]));
      }
    }
    return make_float2(group_sum<4>(sum[0]), group_sum<4>(sum[1]));
  }

  // to += factor x, a factor a row, and the sums over its rows times raw ones to `sums`.
  template <int N>
  __device__ __forceinline__ static void add_scaled(float (&to)[N][4], const float (&x)[N][4], const float (&factor)[2], uint32_t raw,
                                                    float (&sums)[2]) {
    const Here me;
    const float2 y = row_products(x, raw, me);
    sums[0] = fmaf(y.x, factor[0], sums[0]), sums[1] = fmaf(y.y, factor[1], sums[1]);
#pragma unroll
    for (int t = 0; t < N; ++t)
#pragma unroll
      for (int c = 0; c < 4; ++c) to[t][c] = fmaf(factor[c / 2], x[t][c], to[t][c]);
  }

  // 64 columns of U / beta, from f16 to the inputs' type.
  __device__ __forceinline__ void load_update(uint32_t (&a)[4][4], const uint8_t *update, int v_tile) const {
    const Here me;
    load_rows(a, PLACES::tile(update) + v_tile * kTileBytes, 0, me.warp, me.lane);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const float scale = scale_of_update(4 * v_tile + k);
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const float2 u = chunk::unpack2<__half>(a[k][c]);
        a[k][c] = chunk::pack2_finite<T>(u.x * scale, u.y * scale);
      }
    }
  }

  // Gradients of raw rows, `sums` being those of x times them, into the warp's rows of `staging`.
  template <int N>
  __device__ __forceinline__ void finish_rows(const float (&x)[N][4], float2 sums, const float *norms, uint32_t raw, uint32_t staging) const {
    const Here me;
    float factor[2] = {0.f, 0.f};
    if (p.common.l2norm) {
      const float norm[2] = {norms[me.row], norms[me.row + 8]};
      factor[0] = -sums.x * norm[0] * norm[0], factor[1] = -sums.y * norm[1] * norm[1];
    }
    const uint32_t by_row = chunk::lanes_by_row(me.lane);
#pragma unroll
    for (int k = 0; k < N / 2; ++k) {
      uint32_t y[4];
      ptx::load_matrices(y, chunk::tile_at(raw + 2048 * me.warp, by_row, 0, k));
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const float2 r = chunk::unpack2<T>(y[c]);
        const float(&pair)[4] = x[2 * k + c / 2];
        y[c] = chunk::pack2<T>(fmaf(factor[c % 2], r.x, pair[c % 2 * 2]), fmaf(factor[c % 2], r.y, pair[c % 2 * 2 + 1]));
      }
      chunk::store_block(chunk::tile_at(staging + 2048 * me.warp, by_row, 0, k), y, me.lane);
    }
  }
  // From there 64 columns to `to`.
  __device__ __forceinline__ void put_rows(uint32_t staging, const gdn_heads &to, int first_column) const {
    const Here me;
    __syncwarp();
    const int piece = me.lane % 8, column = first_column + 8 * piece;
    T *row = out_heads_at<T>(to, step.n, step.first, step.key_head) + column;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int r = me.lane / 8 + 4 * i, token = 16 * me.warp + r;
      if (token < count() && column < p.common.head_k)
        *reinterpret_cast<uint4 *>(row + token * to.token_stride) = ptx::load_shared(staging + 2048 * me.warp + chunk::tile_offset(r, piece));
    }
  }
};

}  // namespace backward
}  // namespace gdn
