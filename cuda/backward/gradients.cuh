// The parallel part of the backward pass: from states and their gradients to the gradients of q, k, beta and the log decay.
//
// A block owns a chunk of a key head and takes its value heads one after the other, so that the sums over them stay in registers. Of
// its two warpgroups each has 64 columns of what has head_k columns; of matrices of tokens the first makes the attention's, the
// second L's. Accumulators of dQ and dK hold them divided by the norms, so that q and k are raw everywhere.
#pragma once

#include "maps.h"
#include "products.cuh"
#include "records.cuh"

namespace gdn {
namespace backward {

// Of a value head, with all of its state or only 64 value rows.
template <int HALVES> struct HeadTiles {
  alignas(1024) uint8_t d_out[2 * kTileBytes];
  uint8_t update[2 * kTileBytes];
  uint8_t d_v[2 * kTileBytes];
  uint8_t states[HALVES][kStateBytes];    // S; then the two matrices
};
struct StateTiles {
  alignas(1024) uint8_t rows[2][kStateBytes];
};
struct NoTiles {};

// With wgmma the next head comes while one is at work; else every card has room for a block, whose dS takes the place of S.
template <bool WGMMA> struct GradientShared {
  static constexpr int kBuffers = WGMMA ? 2 : 1;
  alignas(1024) uint8_t q[2 * kTileBytes];
  uint8_t k[2 * kTileBytes];
  HeadTiles<kBuffers> heads[kBuffers];
  std::conditional_t<WGMMA, StateTiles, NoTiles> gradients;    // dS
  alignas(16) TokenFactors tokens[kBuffers];
  float states[8];         // S dS, by warp
  uint64_t barriers[4];    // copies that have arrived: of the buffers, of dS, of q and k
};
static_assert(sizeof(GradientShared<false>) <= kLeastShared, "a shape for every card");
static_assert(sizeof(GradientShared<true>) <= 227 * 1024, "a shape for sm_90");

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

// The sum over a row of x times the 16-bit tile, by rows lane / 4 and 8 further of the warp's.
template <typename T>
__device__ __forceinline__ float2 row_products(const float (&x)[8][4], uint32_t tile, int warp, int lane) {
  float2 sum = make_float2(0.f, 0.f);
#pragma unroll
  for (int t = 0; t < 8; ++t) {
    const uint32_t at = tile + 2048 * warp + chunk::tile_offset(lane / 4, t) + 4 * (lane % 4);
    uint32_t top, low;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(top) : "r"(at) : "memory");
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(low) : "r"(at + 1024) : "memory");
    const float2 a = chunk::unpack2<T>(top), b = chunk::unpack2<T>(low);
    sum.x = fmaf(x[t][0], a.x, fmaf(x[t][1], a.y, sum.x));
    sum.y = fmaf(x[t][2], b.x, fmaf(x[t][3], b.y, sum.y));
  }
  return make_float2(group_sum<4>(sum.x), group_sum<4>(sum.y));
}

// to += x with a factor a row.
__device__ __forceinline__ void add_rows(float (&to)[8][4], const float (&x)[8][4], const float (&factor)[2]) {
#pragma unroll
  for (int t = 0; t < 8; ++t)
#pragma unroll
    for (int c = 0; c < 4; ++c) to[t][c] = fmaf(factor[c / 2], x[t][c], to[t][c]);
}

template <typename T> __device__ __forceinline__ float dot8(const uint4 &a, const uint4 &b) {
  const uint32_t x[4] = {a.x, a.y, a.z, a.w}, y[4] = {b.x, b.y, b.z, b.w};
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 u = chunk::unpack2<T>(x[i]), v = chunk::unpack2<T>(y[i]);
    sum = fmaf(u.x, v.x, fmaf(u.y, v.y, sum));
  }
  return sum;
}

// The thread, its warpgroup, and its warp in that, read at this place: what depends on them is computed in each part again, where ptxas
// would keep all of it through the loop over heads, in registers that it does not have.
struct Here {
  int thread, group, warp, lane, row;
  __device__ __forceinline__ Here() {
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    thread &= 255;
    group = thread / 128, warp = thread % 128 / 32, lane = thread % 32, row = 16 * warp + lane / 4;
  }
  __device__ __forceinline__ uint32_t own_half(const void *x) const { return ptx::shared_address(x) + group * kTileBytes; }
};

// A value head of a chunk: one step of a block.
struct Step {
  int64_t item;    // place and key head
  Chunk at;
  int head;        // of those of the key head
  bool there;
};

// A block's work on a step, its parts as functions.
// TILES: of 64 value rows, of a head.
template <typename T, bool WGMMA, int TILES> struct Gradients {
  using Shared = GradientShared<WGMMA>;
  const gdn_rule_backward_params &p;
  const Buffers &buffers;
  const Maps &maps;
  Shared &shared;
  const Step step;
  const int buffer;
  static constexpr int v_tiles = TILES;

  __device__ __forceinline__ static uint32_t tile(const void *x) { return ptx::shared_address(x); }
  __device__ __forceinline__ auto &tiles() const { return shared.heads[buffer]; }
  __device__ __forceinline__ const TokenFactors &factors() const { return shared.tokens[buffer]; }
  __device__ __forceinline__ uint8_t *states(int v_tile) const { return tiles().states[WGMMA ? v_tile : 0]; }
  __device__ __forceinline__ uint8_t *gradients(int v_tile) const {
    if constexpr (WGMMA) return shared.gradients.rows[v_tile];
    else return tiles().states[0];
  }
  __device__ __forceinline__ uint32_t attention() const { return tile(tiles().states[0]); }
  __device__ __forceinline__ uint32_t lower() const { return attention() + kTileBytes; }
  __device__ __forceinline__ uint32_t barrier(int i) const { return tile(&shared.barriers[i]); }

  __device__ __forceinline__ int key_head() const { return static_cast<int>(step.item % p.common.num_k_heads); }
  __device__ __forceinline__ int head() const { return key_head() * (p.common.num_v_heads / p.common.num_k_heads) + step.head; }
  __device__ __forceinline__ int64_t index() const { return step.item / p.common.num_k_heads * p.common.num_v_heads + head(); }
  __device__ __forceinline__ int64_t first() const { return step.at.seq.first + static_cast<int64_t>(step.at.index) * kChunk; }
  __device__ __forceinline__ int count() const { return min(kChunk, step.at.seq.count - step.at.index * kChunk); }
  __device__ __forceinline__ const uint8_t *image(const uint8_t *images, int v_tile) const {
    return images + (index() * v_tiles + v_tile) * kStateBytes;
  }

  // ---- copies with wgmma, by a thread ----

  __device__ __forceinline__ void copy_rows(uint8_t *to, const CUtensorMap &map, int head, int full) const {
#pragma unroll
    for (int h = 0; h < 2; ++h)
      ptx::copy_box(tile(to) + h * kTileBytes, &map, 64 * h, head, static_cast<int>(first()), p.common.seqs.cu_seqlens ? 0 : step.at.n,
                    barrier(full));
  }
  __device__ __forceinline__ void copy_head() const {
    if (!step.there || threadIdx.x != 0) return;
    const uint32_t full = barrier(buffer);
    const bool in_place = buffers.updates == nullptr;
    ptx::barrier_expect(full, (4 + (in_place ? 2 : v_tiles)) * kTileBytes + v_tiles * kStateBytes + sizeof(TokenFactors));
    copy_rows(tiles().d_out, maps.d_o, head(), buffer);
    copy_rows(tiles().d_v, maps.d_v, head(), buffer);
    ptx::copy_bulk(tile(tiles().states), image(buffers.states, 0), v_tiles * kStateBytes, full);
    if (in_place) copy_rows(tiles().update, step.head == 0 ? maps.d_q : maps.d_k, key_head(), buffer);
    else ptx::copy_bulk(tile(tiles().update), buffers.updates + index() * v_tiles * kTileBytes, v_tiles * kTileBytes, full);
    ptx::copy_bulk(tile(&factors()), &buffers.records[index()].tokens, sizeof(TokenFactors), full);
  }
  __device__ __forceinline__ void copy_gradients() const {
    if (!step.there || threadIdx.x != 0) return;
    ptx::barrier_expect(barrier(2), v_tiles * kStateBytes);
    ptx::copy_bulk(tile(gradients(0)), image(buffers.gradients, 0), v_tiles * kStateBytes, barrier(2));
  }
  __device__ __forceinline__ void copy_raw() const {
    if (!step.there || threadIdx.x != 0) return;
    ptx::barrier_expect(barrier(3), 4 * kTileBytes);
    copy_rows(shared.q, maps.q, key_head(), 3);
    copy_rows(shared.k, maps.k, key_head(), 3);
  }
  // Rows of the next sequence in the boxes.
  template <typename... X> __device__ __forceinline__ void clear(X *...x) const {
    if (count() == kChunk) return;
    (clear_rows<2, 256>(x, count(), threadIdx.x), ...);
    ptx::fence_async();
    __syncthreads();
  }

  // ---- the same with mma.sync, by all threads and waited for ----

  __device__ __forceinline__ void load_rows_of(uint8_t *to, const gdn_heads &x, int head, int size) const {
    const Here me;
    chunk::copy_tile<T, kKeys / 8, 256>(tile(to), heads_at<T>(x, step.at.n, first(), head), x.token_stride, count(), size, me.thread);
  }
  __device__ __forceinline__ void load_states(const uint8_t *images, int v_tile) const {
    const Here me;
    chunk::copy_bytes<kStateBytes, 256>(tile(states(0)), image(images, v_tile), me.thread);
    ptx::copy_async_commit();
  }
  __device__ __forceinline__ void loaded() const {
    ptx::copy_async_wait<0>();
    __syncthreads();
  }
  __device__ __forceinline__ void load_head() const {
    const Here me;
    if (step.head == 0) {
      load_rows_of(shared.q, p.q, key_head(), p.common.head_k);
      load_rows_of(shared.k, p.k, key_head(), p.common.head_k);
    }
    load_rows_of(tiles().d_out, p.d_o, head(), p.common.head_v);
    load_rows_of(tiles().d_v, p.d_v, head(), p.common.head_v);
    if (buffers.updates == nullptr) load_rows_of(tiles().update, updates_of(p, head()), key_head(), p.common.head_v);
    else
      for (int t = 0; t < v_tiles; ++t)
        chunk::copy_bytes<kTileBytes, 256>(tile(tiles().update) + t * kTileBytes, buffers.updates + (index() * v_tiles + t) * kTileBytes, me.thread);
    chunk::copy_bytes<sizeof(TokenFactors), 256>(tile(&factors()), &buffers.records[index()].tokens, me.thread);
    load_states(buffers.states, 0);
    loaded();
  }

  // ---- arithmetic ----

  // d beta = dV U / beta^2. `betas` of tokens thread / 16 and every 16th after it.
  __device__ __forceinline__ void load_betas(float (&betas)[4]) const {
    const Here me;
#pragma unroll
    for (int i = 0; i < 4; ++i) betas[i] = ptx::load_float(buffers.records[index()].beta + me.thread / 16 + 16 * i);
  }
  __device__ __forceinline__ void finish_beta(const float (&betas)[4]) const {
    const Here me;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int token = me.thread / 16 + 16 * i;
      const uint32_t offset = chunk::tile_offset(token, me.thread % 16);
      const float sum = group_sum<16>(dot8<T>(ptx::load_shared(tile(tiles().d_v) + offset), ptx::load_shared(tile(tiles().update) + offset)));
      if (me.thread % 16 == 0 && token < count())
        *out_heads_at<float>(p.d_beta, step.at.n, first() + token, head()) = __fdividef(__fdividef(sum, betas[i]), betas[i]);
    }
  }

  // x += rows of a tile times 64 value rows of a state.
  __device__ __forceinline__ void add_product(float (&x)[8][4], const uint8_t *rows, const uint8_t *state, int v_tile) const {
    const Here me;
    multiply_tiles<T, WGMMA, false, true, 4>(x, tile(rows) + v_tile * kTileBytes, me.own_half(state), v_tile > 0, me.warp, me.lane, v_tile > 0);
  }
  __device__ __forceinline__ void add_products(float (&x)[8][4], const uint8_t *rows, const uint8_t *state) const {
    add_product(x, rows, state, 0);
    if (v_tiles > 1) add_product(x, rows, state + kStateBytes, 1);
  }

  // S dS of 64 value rows; without room for both dS comes from the workspace.
  __device__ __forceinline__ float states_product(int v_tile) const {
    const Here me;
    const uint8_t *d = image(buffers.gradients, v_tile);
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < kStateBytes / 16 / 256; ++i) {
      const int offset = 16 * (me.thread + 256 * i);
      const uint4 y = WGMMA ? ptx::load_shared(tile(gradients(v_tile)) + offset) : *reinterpret_cast<const uint4 *>(d + offset);
      sum += dot8<T>(ptx::load_shared(tile(states(v_tile)) + offset), y);
    }
    return sum;
  }

  // to += factor x, a factor a row, and the sums over its rows times raw ones to `sums`.
  __device__ __forceinline__ void add_scaled(float (&to)[8][4], const float (&x)[8][4], const float (&factor)[2], const void *raw,
                                             float (&sums)[2]) const {
    const Here me;
    const float2 y = row_products<T>(x, me.own_half(raw), me.warp, me.lane);
    sums[0] = fmaf(y.x, factor[0], sums[0]), sums[1] = fmaf(y.y, factor[1], sums[1]);
    add_rows(to, x, factor);
  }

  // What reads states: dQ += query dO S, dK += write U dS - read dV S. `gradients_parity`: of the barrier.
  __device__ __forceinline__ RowSums add_states(float (&d_q)[8][4], float (&d_k)[8][4], int gradients_parity) const {
    const Here me;
    const TokenFactors &f = factors();
    RowSums sums = {};
    float x[8][4], factor[2], product = 0.f;
    // Without room for all of S both products with its rows follow each other.
    float y[8][4];
    if (!WGMMA) {
      for (int t = 0; t < v_tiles; ++t) {
        if (t > 0) __syncthreads(), load_states(buffers.states, t), loaded();
        product += states_product(t);
        add_product(y, tiles().d_v, states(t), t);
        add_product(x, tiles().d_out, states(t), t);
      }
      __syncthreads();
      load_states(buffers.gradients, 0);
    } else {
      add_products(x, tiles().d_out, states(0));
      add_products(y, tiles().d_v, states(0));
      wait<WGMMA, TILES>(x);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) factor[i] = chunk::exp2_fast(f.c[me.row + 8 * i]) * f.q_norm[me.row + 8 * i] * p.common.scale;
    add_scaled(d_q, x, factor, shared.q, sums.later);
    // U dS, begun before the sums of dV S
    if (WGMMA) {
      wait<WGMMA>(y);
      ptx::barrier_wait(barrier(2), gradients_parity);
      add_products(x, tiles().update, gradients(0));
      for (int t = 0; t < v_tiles; ++t) product += states_product(t);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) factor[i] = -chunk::exp2_fast(f.c[me.row + 8 * i]) * f.k_norm[me.row + 8 * i];
    add_scaled(d_k, y, factor, shared.k, sums.later);
    if (!WGMMA)
      for (int t = 0; t < v_tiles; ++t) {
        if (t > 0) __syncthreads(), load_states(buffers.gradients, t);
        loaded();
        add_product(x, tiles().update, gradients(t), t);
      }
    wait<WGMMA>(x);
#pragma unroll
    for (int i = 0; i < 2; ++i) factor[i] = chunk::exp2_fast(f.c[kChunk - 1] - f.c[me.row + 8 * i]) * f.k_norm[me.row + 8 * i];
    add_scaled(d_k, x, factor, shared.k, sums.earlier);
    product = group_sum(product);
    if (me.lane == 0) shared.states[4 * me.group + me.warp] = product;
    return sums;
  }

  // This warpgroup's matrix of tokens: P = scale dAtt D / (|q| |k|) in the first, M = -dV U^T D / (|k| |k|) in the second; as a tile,
  // and X, its products with q k or k k below the diagonal, summed.
  __device__ __forceinline__ void make_matrix(const RowSums &rows) const {
    const Here me;
    const TokenFactors &f = factors();
    const uint32_t image = me.group == 0 ? attention() : lower();
    const uint32_t left = tile(me.group == 0 ? tiles().d_out : tiles().d_v), raw = tile(me.group == 0 ? shared.q : shared.k);
    const float *norms = me.group == 0 ? f.q_norm : f.k_norm;
    const int last = me.group == 0 ? 0 : -1;    // the diagonal belongs to P alone
    WarpSums &to = warp_sums(me.group, me.warp);
    if (WGMMA) store_row_sums(to, rows, me);
    float row_sums[2] = {0.f, 0.f};
    float2 inner[2], own[2];    // what goes to WarpSums: of columns of tile 4 half + lane / 8, of the warp's tokens
    float products_x[2][4][4], products_y[2][4][4];
    const auto multiply = [&](int half) {
      multiply_tiles<T, WGMMA, false, false, 8>(products_x[half], left, tile(tiles().update) + half * 4096, false, me.warp, me.lane);
      multiply_tiles<T, WGMMA, false, false, 8>(products_y[half], raw, tile(shared.k) + half * 4096, false, me.warp, me.lane);
    };
    if (WGMMA) multiply(0), multiply(1);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float(&x)[4][4] = products_x[half], (&y)[4][4] = products_y[half], columns[8];
      if (!WGMMA) multiply(half);
      if (half == 0) wait<WGMMA, 2>(x), wait<WGMMA, 2>(y);
      else wait<WGMMA>(x), wait<WGMMA>(y);
      const Here me;
      float c[2], factor[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        c[i] = f.c[me.row + 8 * i];
        factor[i] = norms[me.row + 8 * i] * (me.group == 0 ? p.common.scale : -1.f);
      }
#pragma unroll
      for (int pair = 0; pair < 2; ++pair) {
        const int block = 2 * half + pair;    // of 16 columns
        uint32_t packed[4] = {0, 0, 0, 0};
        float products[2][4] = {};
        if (block <= me.warp) {
#pragma unroll
          for (int t = 0; t < 2; ++t) {
            float(&m)[4] = x[2 * pair + t];
            const int column = 16 * block + 8 * t + 2 * (me.lane % 4);
            const float2 ck = *reinterpret_cast<const float2 *>(f.c + column), nk = *reinterpret_cast<const float2 *>(f.k_norm + column);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              const int distance = column + i % 2 - (me.row + i / 2 * 8);
              const float decay = chunk::exp2_fast(c[i / 2] - (i % 2 ? ck.y : ck.x));
              m[i] = distance <= last ? m[i] * (decay * factor[i / 2] * (i % 2 ? nk.y : nk.x)) : 0.f;
              products[t][i] = distance < 0 ? m[i] * y[2 * pair + t][i] : 0.f;
            }
            packed[2 * t] = chunk::pack2_written<T>(m[0], m[1]), packed[2 * t + 1] = chunk::pack2_written<T>(m[2], m[3]);
          }
          if (block == me.warp) sum_block(own, products, row_sums, me);
#pragma unroll
          for (int t = 0; t < 2; ++t) row_sums[0] += products[t][0] + products[t][1], row_sums[1] += products[t][2] + products[t][3];
        }
#pragma unroll
        for (int t = 0; t < 2; ++t)
#pragma unroll
          for (int i = 0; i < 2; ++i) columns[4 * pair + 2 * t + i] = products[t][i] + products[t][2 + i];
        chunk::store_block(chunk::tile_at(image + 2048 * me.warp, chunk::lanes_by_row(me.lane), 0, block), packed, me.lane);
      }
      // Sums of columns over the lanes with other rows: the first steps halve the columns that a lane has, to those of a tile.
#pragma unroll
      for (int n = 4; n > 1; n /= 2) {
        const bool upper = me.lane & 4 * n;
#pragma unroll
        for (int i = 0; i < n; ++i) {
          const float given = __shfl_xor_sync(0xffffffffu, upper ? columns[i] : columns[n + i], 4 * n);
          columns[i] = (upper ? columns[n + i] : columns[i]) + given;
        }
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) columns[i] += __shfl_xor_sync(0xffffffffu, columns[i], 4);
      const float2 sums = make_float2(columns[0], columns[1]);
      if constexpr (WGMMA) store_inner(to, half, sums, own, me);
      else inner[half] = sums;
    }
    if constexpr (!WGMMA) {
      ptx::group_barrier<128>(1 + me.group);    // no other warp reads the rows any more
      store_row_sums(to, rows, me);
#pragma unroll
      for (int half = 0; half < 2; ++half) store_inner(to, half, inner[half], own, me);
    }
  }
  __device__ __forceinline__ static void store_row_sums(WarpSums &to, const RowSums &rows, const Here &me) {
    if (me.lane % 4 != 0) return;
#pragma unroll
    for (int i = 0; i < 2; ++i) to.later[me.lane / 4 + 8 * i] = rows.later[i], to.earlier[me.lane / 4 + 8 * i] = rows.earlier[i];
  }
  __device__ __forceinline__ static void store_inner(WarpSums &to, int half, float2 sums, const float2 (&own)[2], const Here &me) {
    if (me.lane / 4 % 2 != 0) return;    // two lanes have each
    const int tile = 4 * half + me.lane / 8;
    if (tile / 2 == me.warp) sums = tile % 2 ? own[1] : own[0];
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
    add(d_k, std::true_type(), attention(), shared.q);
    add(d_k, std::false_type(), lower(), shared.k, true);
    add(d_k, std::true_type(), lower(), shared.k, true);
  }

  // The gradient of the log decay, by a warp: for a token t the sums of X in rows from t on and columns before t, of what later tokens
  // read of the state, of what earlier ones write to it, and of the state itself.
  __device__ __forceinline__ void finish_decays() const {
    const Here me;
    if (me.thread >= 32) return;
    const TokenFactors &f = factors();
    const int t0 = 2 * me.lane, block = me.lane / 8;
    float states = 0.f;
#pragma unroll
    for (int w = 0; w < 8; ++w) states += shared.states[w];
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
      const float up_to = sum_before(x[0] + x[1], me.lane);
      if (block < w) inner[0] += up_to, inner[1] += up_to + x[0];
    }
    float from = later[0] + later[1];
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      const float next = __shfl_down_sync(0xffffffffu, from, d);
      if (me.lane + d < 32) from += next;
    }
    float after = __shfl_down_sync(0xffffffffu, from, 1);
    if (me.lane == 31) after = 0.f;
    const float written = sum_before(earlier[0] + earlier[1], me.lane);
    const float decay[2] = {from + written + inner[0] + states, (later[1] + after) + (written + earlier[0]) + inner[1] + states};
#pragma unroll
    for (int i = 0; i < 2; ++i)
      if (t0 + i < count()) *out_heads_at<float>(p.d_log_decay, step.at.n, first() + t0 + i, head()) = decay[i];
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
    uint8_t *to = WGMMA ? tiles().states[Shared::kBuffers - 1] + 8192 * group : group == 0 ? tiles().d_out : tiles().d_v;
    return *reinterpret_cast<WarpSums *>(to + 2048 * warp);
  }

  // From the sums over heads to the gradient of raw rows, in the place of these.
  __device__ __forceinline__ void finish_rows(float (&x)[8][4], uint8_t *raw, const float *norms, float *sums, const gdn_heads &to) const {
    const Here me;
    if (p.common.l2norm) {
      const float2 own = row_products<T>(x, me.own_half(raw), me.warp, me.lane);
      float *to_sums = sums + kChunk * me.group + me.row;
      if (me.lane % 4 == 0) to_sums[0] = own.x, to_sums[8] = own.y;
    }
    __syncthreads();    // all products with raw rows are done
    float factor[2] = {0.f, 0.f};
    if (p.common.l2norm)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float norm = norms[me.row + 8 * i];
        factor[i] = -(sums[me.row + 8 * i] + sums[kChunk + me.row + 8 * i]) * norm * norm;
      }
    const uint32_t rows = me.own_half(raw) + 2048 * me.warp, by_row = chunk::lanes_by_row(me.lane);
    uint32_t y[4][4];
    load_rows(y, me.own_half(raw), 0, me.warp, me.lane);
#pragma unroll
    for (int k = 0; k < 4; ++k)
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const float2 r = chunk::unpack2<T>(y[k][c]);
        const float(&pair)[4] = x[2 * k + c / 2];
        y[k][c] = chunk::pack2<T>(fmaf(factor[c % 2], r.x, pair[c % 2 * 2]), fmaf(factor[c % 2], r.y, pair[c % 2 * 2 + 1]));
      }
    __syncwarp();
#pragma unroll
    for (int k = 0; k < 4; ++k) chunk::store_block(chunk::tile_at(rows, by_row, 0, k), y[k], me.lane);
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int r = me.lane / 8 + 4 * i, piece = me.lane % 8, token = 16 * me.warp + r, column = 64 * me.group + 8 * piece;
      if (token < count() && column < p.common.head_k)
        *reinterpret_cast<uint4 *>(out_heads_at<T>(to, step.at.n, first() + token, key_head()) + column) =
            ptx::load_shared(rows + chunk::tile_offset(r, piece));
    }
  }
};

// The next step of a block after one, all steps of a block being those of every gridDim.x-th item; by all lanes of a warp.
__device__ __forceinline__ Step step_at(const gdn_rule_backward_params &p, const Span &span, int64_t items, int64_t item) {
  Step s = {item, {}, 0, false};
  for (; s.item < items && !s.there; s.item += s.there ? 0 : gridDim.x) {
    s.at = chunk_at(p.common.seqs, span, s.item / p.common.num_k_heads);
    s.there = s.at.there;
  }
  return s;
}
__device__ __forceinline__ Step step_after(const gdn_rule_backward_params &p, const Span &span, int64_t items, const Step &step) {
  if (step.head + 1 == p.common.num_v_heads / p.common.num_k_heads) return step_at(p, span, items, step.item + gridDim.x);
  Step s = step;
  ++s.head;
  return s;
}

// In a kernel function every part has a label.
template <typename T, bool WGMMA, int TILES>
__global__ void __launch_bounds__(256, 1)
gradients_kernel(const __grid_constant__ gdn_rule_backward_params p, const __grid_constant__ Buffers buffers, const __grid_constant__ Maps maps,
                 const Span span, int64_t items) {
  if constexpr (WGMMA && !ptx::kSm90a) return;
  extern __shared__ __align__(1024) uint8_t raw_shared[];
  GradientShared<WGMMA> &s = *reinterpret_cast<GradientShared<WGMMA> *>(raw_shared);
  ptx::grid_dependency_wait();
  Step step = step_at(p, span, items, blockIdx.x);
  if (!step.there) return;
  // Barriers, and zeros where there are no value rows.
  if (TILES == 1)
    for (int b = 0; b < s.kBuffers; ++b)
      for (int i = threadIdx.x; i < kTileBytes / 4; i += 256) reinterpret_cast<uint32_t *>(s.heads[b].update + kTileBytes)[i] = 0;
  if (WGMMA && threadIdx.x == 0) {
    for (int i = 0; i < 4; ++i) ptx::barrier_init(ptx::shared_address(&s.barriers[i]), 1);
    ptx::barriers_initialised();
  }
  ptx::fence_async();
  __syncthreads();
  if (WGMMA) {
    const Gradients<T, WGMMA, TILES> g = {p, buffers, maps, s, step, 0};
    g.copy_head(), g.copy_raw(), g.copy_gradients();
  }
  float d_q[8][4] = {}, d_k[8][4] = {};
  for (int i = 0, n = 0; step.there; ++i) {
    // Wait for the head, start the copies of the next.
    const Step after = step_after(p, span, items, step);
    const int buffer = WGMMA ? i % 2 : 0, next_buffer = WGMMA ? 1 - buffer : 0;
    const Gradients<T, WGMMA, TILES> g = {p, buffers, maps, s, step, buffer}, next = {p, buffers, maps, s, after, next_buffer};
    float betas[4];
    g.load_betas(betas);
    if (WGMMA) {
      next.copy_head();
      ptx::barrier_wait(g.barrier(buffer), i / 2 % 2);
      g.clear(g.tiles().d_out, g.tiles().update, g.tiles().d_v);
      if (step.head == 0) {
        ptx::barrier_wait(g.barrier(3), n % 2);
        g.clear(s.q, s.k);
      }
    } else {
      g.load_head();
    }
    // What reads states, then the matrices in the place of S.
    g.finish_beta(betas);
    const RowSums sums = g.add_states(d_q, d_k, i % 2);
    __syncthreads();
    if (WGMMA) next.copy_gradients();
    g.make_matrix(sums);
    ptx::fence_async();
    __syncthreads();
    g.add_matrices(d_q, d_k);
    g.finish_decays();
    wait<WGMMA>(d_q), wait<WGMMA>(d_k);
    ptx::fence_async();
    __syncthreads();    // the next but one goes where this head was
    // The sums over heads.
    if (after.item != step.item || !after.there) {
      float *own = reinterpret_cast<float *>(g.tiles().update);
      g.finish_rows(d_q, s.q, g.factors().q_norm, own, p.d_q);
      g.finish_rows(d_k, s.k, g.factors().k_norm, own + 2 * kChunk, p.d_k);
      set_to_zero(d_q), set_to_zero(d_k);
      ptx::fence_async();
      __syncthreads();
      if (WGMMA) next.copy_raw();
      ++n;
    }
    step = after;
  }
}

}  // namespace backward
}  // namespace gdn
