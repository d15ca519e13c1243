// The matrices of tokens of the gradients kernel, and the sums over them that are gradients of the log decay.
#pragma once

#include "step_tiles.cuh"

namespace gdn {
namespace backward {

// Sums over the columns of a warpgroup that log decays get from later and from earlier tokens, of rows lane / 4 and 8 further.
struct RowSums {
  float later[2], earlier[2];
};

// What a warp leaves for the gradients of the log decays: row sums of its 16 tokens, and sums over its rows of X (make_matrix()). Of
// tokens before its own these are sums of columns, of its own the sums of what is left of the column in rows from the token on.
struct WarpSums {
  float inner[kChunk];
  float later[16], earlier[16];
};

template <typename T, bool WGMMA, int TILES, int PARTS> struct StepMatrices : StepTiles<T, WGMMA, TILES, PARTS> {
  using Base = StepTiles<T, WGMMA, TILES, PARTS>;
  using Base::attention, Base::attention_rest, Base::count, Base::factors, Base::head, Base::lower, Base::p,
      Base::scale_of_update, Base::shared, Base::step, Base::tile, Base::tiles;

  // The 16 rows that a warp has of its warpgroup's matrix. Each block of rows has one of columns more than the one before: in the second
  // warpgroup warps have them in reverse, so that all schedulers have as many.
  __device__ __forceinline__ static int block_of(const Here &me) { return me.group == 0 ? me.warp : 3 - me.warp; }

  // The warp's rows of dO or dV for the product with U in f16: divided by a power of two a row, times that of U / beta; `up` takes both back.
  __device__ __forceinline__ void to_operand(uint32_t (&a)[8][4], float (&up)[2], uint32_t rows) const {
    const Here me;
    load_rows(a, rows, 0, block_of(me), me.lane);
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
    up[0] = s.up[0] * largest, up[1] = s.up[1] * largest;
  }

  // This warpgroup's matrix of tokens: P = scale dAtt D / (|q| |k|) in the first, M = -dV U^T D / (|k| |k|) in the second; as a tile,
  // and X, its products with q k or k k below the diagonal, summed. The diagonal of dV (U / beta)^T is beta d beta.
  __device__ __forceinline__ void make_matrix(const RowSums &rows) const {
    const Here me;
    const TokenFactors &f = factors();
    const uint32_t image = me.group == 0 ? attention() : lower();
    const uint32_t left = tile(me.group == 0 ? tiles().d_out : tiles().d_v), raw = tile(me.group == 0 ? shared.q : shared.k);
    const float *norms = me.group == 0 ? f.q_norm : f.k_norm;
    const int last = me.group == 0 ? 0 : -1;    // the diagonal belongs to P alone
    WarpSums &to = warp_sums(me.group, block_of(me)), &of_rows = warp_sums(me.group, me.warp);
    if (WGMMA) store_row_sums(of_rows, rows, me);
    float row_sums[2] = {0.f, 0.f};
    float2 inner[2], own[2];    // of columns of tile 4 half + lane / 8, of the warp's tokens
    float products_x[2][4][4], products_y[2][4][4];
    uint32_t operand[8][4];
    float up[2];
    const auto multiply = [&](int half) {
      backward::multiply<__half, WGMMA, false>(products_x[half], operand, tile(tiles().update) + half * 4096, false, me.lane);
    };
    if constexpr (WGMMA) {    // with raw rows first, while the others are converted
      uint32_t raw_rows[8][4];
      load_rows(raw_rows, raw, 0, block_of(me), me.lane);
      for (int half = 0; half < 2; ++half)
        backward::multiply<T, WGMMA, false>(products_y[half], raw_rows, tile(shared.k) + half * 4096, false, me.lane);
      to_operand(operand, up, left);
      wait<WGMMA>(products_y[0], raw_rows), wait<WGMMA>(products_y[1]);
      multiply(0), multiply(1);
    } else {
      to_operand(operand, up, left);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float(&x)[4][4] = products_x[half], (&y)[4][4] = products_y[half], columns[8];
      if (!WGMMA) {
        multiply(half);
        multiply_tiles<T, WGMMA, false, false, 8>(y, raw, tile(shared.k) + half * 4096, false, block_of(me), me.lane);
      }
      if (half == 0) wait<WGMMA, 1>(x);
      else wait<WGMMA>(x, operand);
      const Here me;
      const int own_block = block_of(me), first_row = 16 * own_block + me.lane / 4;
      float c[2], factor[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        c[i] = f.c[first_row + 8 * i];
        factor[i] = norms[first_row + 8 * i] * (me.group == 0 ? p.common.scale : -1.f) * up[i];
      }
#pragma unroll
      for (int pair = 0; pair < 2; ++pair) {
        const int block = 2 * half + pair;    // of 16 columns
        uint32_t packed[4] = {0, 0, 0, 0}, rest[4] = {0, 0, 0, 0};
        float products[2][4] = {};
        if (block <= own_block) {
          if (block == own_block && me.group == 1) store_diagonal(x[2 * pair], x[2 * pair + 1], up, me);
#pragma unroll
          for (int t = 0; t < 2; ++t) {
            float(&m)[4] = x[2 * pair + t];
            const int column = 16 * block + 8 * t + 2 * (me.lane % 4);
            const float2 ck = *reinterpret_cast<const float2 *>(f.c + column), nk = *reinterpret_cast<const float2 *>(f.k_norm + column);
            const float2 bk = *reinterpret_cast<const float2 *>(f.beta + column);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              const int distance = column + i % 2 - (first_row + i / 2 * 8);
              const float decay = chunk::exp2_fast(c[i / 2] - (i % 2 ? ck.y : ck.x));
              m[i] = distance <= last ? m[i] * (decay * factor[i / 2] * (i % 2 ? nk.y * bk.y : nk.x * bk.x)) : 0.f;
              products[t][i] = distance < 0 ? m[i] * y[2 * pair + t][i] : 0.f;
            }
#pragma unroll
            for (int i = 0; i < 2; ++i) {
              packed[2 * t + i] = chunk::pack2_written<T>(m[2 * i], m[2 * i + 1]);
              if (me.group != 0) continue;
              const float2 near = chunk::unpack2<T>(packed[2 * t + i]);
              rest[2 * t + i] = chunk::pack2_written<T>(m[2 * i] - near.x, m[2 * i + 1] - near.y);
            }
          }
          if (block == own_block) sum_block(own, products, row_sums, me);
#pragma unroll
          for (int t = 0; t < 2; ++t) row_sums[0] += products[t][0] + products[t][1], row_sums[1] += products[t][2] + products[t][3];
        }
#pragma unroll
        for (int t = 0; t < 2; ++t)
#pragma unroll
          for (int i = 0; i < 2; ++i) columns[4 * pair + 2 * t + i] = products[t][i] + products[t][2 + i];
        const uint32_t by_row = chunk::lanes_by_row(me.lane), rows = 2048 * own_block;
        chunk::store_block(chunk::tile_at(image + rows, by_row, 0, block), packed, me.lane);
        if (me.group == 0) chunk::store_block(chunk::tile_at(attention_rest() + rows, by_row, 0, block), rest, me.lane);
      }
      const float2 sums = sum_columns(columns, me.lane);
      if constexpr (WGMMA) store_inner(to, half, sums, own, me);
      else inner[half] = sums;
    }
    if constexpr (!WGMMA) {
      ptx::group_barrier<128>(2 + me.group);    // no other warp reads the rows any more
      store_row_sums(of_rows, rows, me);
#pragma unroll
      for (int half = 0; half < 2; ++half) store_inner(to, half, inner[half], own, me);
    }
  }
  // d beta, by the lanes that have the diagonal of a block of 16 tokens, whose halves are x and y.
  __device__ __forceinline__ void store_diagonal(const float (&x)[4], const float (&y)[4], const float (&up)[2], const Here &me) const {
    const int row = me.lane / 4, column = 2 * (me.lane % 4);
    if (column != row && column + 1 != row) return;
    const float own[2] = {column == row ? x[0] : x[1], column == row ? y[2] : y[3]};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int token = 16 * block_of(me) + row + 8 * i;
      if (token < count()) add_part(p.d_beta, token, __fdividef(own[i] * up[i], factors().beta[token]));
    }
  }
  // Sums of columns over the lanes with other rows: the first steps halve the columns that a lane has, to those of tile lane / 8.
  __device__ __forceinline__ static float2 sum_columns(float (&columns)[8], int lane) {
#pragma unroll
    for (int n = 4; n > 1; n /= 2) {
      const bool upper = lane & 4 * n;
#pragma unroll
      for (int i = 0; i < n; ++i) {
        const float given = __shfl_xor_sync(0xffffffffu, upper ? columns[i] : columns[n + i], 4 * n);
        columns[i] = (upper ? columns[n + i] : columns[i]) + given;
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) columns[i] += __shfl_xor_sync(0xffffffffu, columns[i], 4);
    return make_float2(columns[0], columns[1]);
  }
  __device__ __forceinline__ static void store_row_sums(WarpSums &to, const RowSums &rows, const Here &me) {
    if (me.lane % 4 != 0) return;
#pragma unroll
    for (int i = 0; i < 2; ++i) to.later[me.lane / 4 + 8 * i] = rows.later[i], to.earlier[me.lane / 4 + 8 * i] = rows.earlier[i];
  }
  __device__ __forceinline__ static void store_inner(WarpSums &to, int half, float2 sums, const float2 (&own)[2], const Here &me) {
    if (me.lane / 4 % 2 != 0) return;    // two lanes have each
    const int tile = 4 * half + me.lane / 8;
    if (tile / 2 == block_of(me)) sums = tile % 2 ? own[1] : own[0];
    *reinterpret_cast<float2 *>(to.inner + 8 * tile + me.lane % 4 * 2) = sums;
  }

  // For each token t of a warp the sum over its rows from t on of X left of t, `row_sums` a lane's of what is left of the block.
  __device__ __forceinline__ static void sum_block(float2 (&own)[2], const float (&x)[2][4], const float (&row_sums)[2], const Here &me) {
    float left[2] = {group_sum<4>(row_sums[0]), group_sum<4>(row_sums[1])};
#pragma unroll
    for (int t = 0; t < 2; ++t) {
      const int column = 8 * t + 2 * (me.lane % 4);    // of the block
      float sums[2] = {0.f, 0.f};
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float sum = x[t][2 * i] + x[t][2 * i + 1];
#pragma unroll
        for (int d = 1; d < 4; d *= 2) {
          const float before = __shfl_up_sync(0xffffffffu, sum, d, 4);
          if (me.lane % 4 >= d) sum += before;
        }
        const float before = __shfl_up_sync(0xffffffffu, sum, 1, 4), up_to = left[i] + (me.lane % 4 == 0 ? 0.f : before);
        left[i] += __shfl_sync(0xffffffffu, sum, 3, 4);
        const int row = me.lane / 4 + 8 * i;
        if (column <= row) sums[0] += up_to;
        if (column + 1 <= row) sums[1] += up_to + x[t][2 * i];
      }
#pragma unroll
      for (int d = 4; d < 32; d *= 2)
#pragma unroll
        for (int i = 0; i < 2; ++i) sums[i] += __shfl_xor_sync(0xffffffffu, sums[i], d);
      own[t] = make_float2(sums[0], sums[1]);
    }
  }

  // dQ += P K, dK += P^T Q + (M + M^T) K.
  __device__ __forceinline__ void add_matrices(float (&d_q)[8][4], float (&d_k)[8][4]) const {
    const Here me;
    const auto add = [&](float(&x)[8][4], auto columns, uint32_t matrix, const void *rows, bool behind = false) {
      multiply_tiles<T, WGMMA, decltype(columns)::value, true, 4>(x, matrix, me.own_half(rows), true, me.warp, me.lane, behind);
    };
    add(d_q, std::false_type(), attention(), shared.k);
    add(d_q, std::false_type(), attention_rest(), shared.k, true);    // sums over keys that repeat are far smaller than what is added
    add(d_k, std::true_type(), attention(), shared.q);
    add(d_k, std::false_type(), lower(), shared.k, true);
    add(d_k, std::true_type(), lower(), shared.k, true);
  }

  // The gradient of the log decay, by a warp: for a token t the sums of X in rows from t on and columns before t, of what later tokens
  // read of the state, of what earlier ones write to it, and of the state itself.
  __device__ __forceinline__ void finish_decays() const {
    const TokenFactors &f = factors();
    const int lane = threadIdx.x % 32, t0 = 2 * lane, block = lane / 8;
    float states = 0.f;
#pragma unroll
    for (int w = 0; w < 8; ++w) states += shared.states[this->buffer][w];
    states *= chunk::exp2_fast(f.c[kChunk - 1]);
    // By token: x of itself, and sums that it gets from tokens up to the one before.
    float later[2] = {0.f, 0.f}, earlier[2] = {0.f, 0.f}, inner[2] = {0.f, 0.f};
#pragma unroll
    for (int g = 0; g < 2; ++g) {
      const WarpSums &own = warp_sums(g, block);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        later[i] += own.later[t0 % 16 + i], earlier[i] += own.earlier[t0 % 16 + i], inner[i] += own.inner[t0 + i];
      }
    }
    // Blocks w of rows after the token's see all columns before it: of each w a sum up to the token.
#pragma unroll
    for (int w = 1; w < 4; ++w) {
      float x[2] = {0.f, 0.f};
#pragma unroll
      for (int g = 0; g < 2; ++g)
#pragma unroll
        for (int i = 0; i < 2; ++i)
          if (block < w) x[i] += warp_sums(g, w).inner[t0 + i];
      const float up_to = sum_before(x[0] + x[1], lane);
      if (block < w) inner[0] += up_to, inner[1] += up_to + x[0];
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
    const float decay[2] = {from + written + inner[0] + states, (later[1] + after) + (written + earlier[0]) + inner[1] + states};
#pragma unroll
    for (int i = 0; i < 2; ++i)
      if (t0 + i < count()) add_part(p.d_log_decay, t0 + i, decay[i]);
  }

  // A token's gradient of a gate: of the first part written, of others added by the same thread.
  __device__ __forceinline__ void add_part(const gdn_heads &to, int token, float x) const {
    float *there = out_heads_at<float>(to, step.n, step.first + token, head());
    if (PARTS > 1 && step.part > 0) x += *there;
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

  // Of a warp: behind the matrices, or where rows of dO or dV were, which only its warpgroup has read since.
  __device__ __forceinline__ WarpSums &warp_sums(int group, int warp) const {
    uint8_t *to = WGMMA ? tiles().states[GradientShared<WGMMA>::kBuffers - 1] + 8192 * group : group == 0 ? tiles().d_out : tiles().d_v;
    return *reinterpret_cast<WarpSums *>(to + 2048 * warp);
  }
};

}  // namespace backward
}  // namespace gdn
