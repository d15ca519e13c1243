// The parallel part of the backward pass with mma.sync: from states and their gradients to the gradients of q, k, beta and the log decay.
//
// A block owns a chunk of a key head and takes its value heads one after the other, so that the sums over them stay in registers. Of
// its two warpgroups each has 64 columns of what has head_k columns; of matrices of tokens the first makes the attention's, the
// second L's. Accumulators of dQ and dK hold them divided by the norms, so that q and k are raw everywhere.
#pragma once

#include "step_matrices.cuh"

namespace gdn {
namespace backward {

// What every card has room for: dS takes the place of S.
struct GradientShared80 {
  static constexpr int kThreads = 256;
  alignas(1024) uint8_t q[2 * kTileBytes];
  uint8_t k[2 * kTileBytes];
  uint8_t d_out[2 * kTileBytes];
  uint8_t update[2 * kTileBytes];
  uint8_t d_v[2 * kTileBytes];
  uint8_t states[kStateBytes];    // S, dS, then the two matrices
  alignas(16) TokenFactors tokens;
  Step step;
  float state_sums[8];    // S dS, by warp
};
static_assert(sizeof(GradientShared80) <= kLeastShared, "a shape for every card");

template <typename T, int TILES, int PARTS> struct Places80 : StepPlaces<T, TILES, PARTS> {
  using StepPlaces<T, TILES, PARTS>::tile;
  GradientShared80 &shared;

  __device__ __forceinline__ const TokenFactors &factors() const { return shared.tokens; }
  __device__ __forceinline__ uint32_t attention() const { return tile(shared.states); }
  __device__ __forceinline__ uint32_t attention_rest() const { return tile(shared.d_out + kTileBytes); }    // what 16 bits lose of it
  __device__ __forceinline__ uint32_t lower() const { return tile(shared.states + kTileBytes); }
  // Where rows of dO or dV were, which only the warpgroup has read since.
  __device__ __forceinline__ WarpSums &warp_sums(int group, int warp) const {
    return *reinterpret_cast<WarpSums *>((group == 0 ? shared.d_out : shared.d_v) + 2048 * warp);
  }
  __device__ __forceinline__ float state_sum() const {
    float sum = 0.f;
#pragma unroll
    for (int w = 0; w < 8; ++w) sum += shared.state_sums[w];
    return sum;
  }
};

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

// A block's work on a step, its parts as functions.
template <typename T, int TILES, int PARTS> struct Gradients80 : StepMatrices<Places80<T, TILES, PARTS>> {
  using Base = StepMatrices<Places80<T, TILES, PARTS>>;
  using Base::buffers, Base::columns_before, Base::count, Base::factors, Base::head, Base::p, Base::shared, Base::step, Base::tile,
      Base::tiles_here;

  // ---- copies, by all threads and waited for ----

  __device__ __forceinline__ void load_rows_of(uint8_t *to, const gdn_heads &x, int head, int size, int columns = 0) const {
    const Here me;
    chunk::copy_tile<T, kKeys / 8, 256>(tile(to), heads_at<T>(x, step.n, step.first, head) + columns, x.token_stride, count(), size - columns,
                                        me.thread);
  }
  __device__ __forceinline__ void load_states(const uint8_t *images, int v_tile) const {
    const Here me;
    chunk::copy_bytes<kStateBytes, 256>(tile(shared.states), this->image(images, v_tile), me.thread);
    ptx::copy_async_commit();
  }
  __device__ __forceinline__ void loaded() const {
    ptx::copy_async_wait<0>();
    __syncthreads();
  }
  __device__ __forceinline__ void load_head() const {
    const Here me;
    if (step.is_first()) {
      load_rows_of(shared.q, p.q, step.key_head, p.common.head_k);
      load_rows_of(shared.k, p.k, step.key_head, p.common.head_k);
    }
    load_rows_of(shared.d_out, p.d_o, head(), p.common.head_v, columns_before());
    load_rows_of(shared.d_v, p.d_v, head(), p.common.head_v, columns_before());
    if (buffers.updates == nullptr) load_rows_of(shared.update, updates_of(p, step.head), step.key_head, p.common.head_v);
    else
      for (int t = 0; t < tiles_here(); ++t)
        chunk::copy_bytes<kTileBytes, 256>(tile(shared.update) + t * kTileBytes, this->update_image(t), me.thread);
    chunk::copy_bytes<sizeof(TokenFactors), 256>(tile(&shared.tokens), this->tokens(), me.thread);
    load_states(buffers.states, 0);
    loaded();
  }

  // ---- what reads states: dQ += query dO S, dK += write U dS - read dV S ----

  // A lane's part of S dS of 64 value rows; dS comes from the workspace.
  __device__ __forceinline__ float states_product(int v_tile) const {
    const Here me;
    const uint8_t *d = this->image(buffers.gradients, v_tile);
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < kStateBytes / 16 / 256; ++i) {
      const int offset = 16 * (me.thread + 256 * i);
      sum += dot8<T>(ptx::load_shared(tile(shared.states) + offset), *reinterpret_cast<const uint4 *>(d + offset));
    }
    return sum;
  }
  // x += rows of a tile times 64 value rows of a state.
  __device__ __forceinline__ void add_product(float (&x)[8][4], const uint8_t *rows, int v_tile) const {
    const Here me;
    multiply_tiles<T, false, false, true, 4>(x, tile(rows) + v_tile * kTileBytes, me.own_half(shared.states), v_tile > 0, me.warp, me.lane);
  }
  __device__ __forceinline__ RowSums add_states(float (&d_q)[8][4], float (&d_k)[8][4]) const {
    const Here me;
    const TokenFactors &f = factors();
    RowSums sums = {};
    float x[8][4], y[8][4], factor[2], product = 0.f;
    for (int t = 0; t < tiles_here(); ++t) {
      if (t > 0) __syncthreads(), load_states(buffers.states, t), loaded();
      product += states_product(t);
      add_product(y, shared.d_v, t);
      add_product(x, shared.d_out, t);
    }
    __syncthreads();
    load_states(buffers.gradients, 0);
#pragma unroll
    for (int i = 0; i < 2; ++i) factor[i] = chunk::exp2_fast(f.c[me.row + 8 * i]) * f.q_norm[me.row + 8 * i] * p.common.scale;
    Base::add_scaled(d_q, x, factor, me.own_half(shared.q), sums.later);
#pragma unroll
    for (int i = 0; i < 2; ++i) factor[i] = -chunk::exp2_fast(f.c[me.row + 8 * i]) * f.k_norm[me.row + 8 * i];
    Base::add_scaled(d_k, y, factor, me.own_half(shared.k), sums.later);
    for (int t = 0; t < tiles_here(); ++t) {
      if (t > 0) __syncthreads(), load_states(buffers.gradients, t);
      loaded();
      uint32_t update[4][4];
      this->load_update(update, shared.update, t);
      multiply<T, false, true>(x, update, me.own_half(shared.states), t > 0, me.lane);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = me.row + 8 * i;
      factor[i] = chunk::exp2_fast(f.c[kChunk - 1] - f.c[row]) * f.k_norm[row] * f.beta[row];
    }
    Base::add_scaled(d_k, x, factor, me.own_half(shared.k), sums.earlier);
    product = group_sum(product);
    if (me.lane == 0) shared.state_sums[4 * me.group + me.warp] = product;
    return sums;
  }

  // ---- what reads matrices of tokens ----

  // This warpgroup's matrix, and the sums over it. Each block of 16 rows has one of columns more than the one before: in the second
  // warpgroup warps have them in reverse, so that all schedulers have as many.
  __device__ __forceinline__ void make_matrix(const RowSums &rows) const {
    const Here me;
    const int block = me.group == 0 ? me.warp : 3 - me.warp;
    this->make_rows(me.group, block, tile(me.group == 0 ? shared.d_out : shared.d_v), tile(shared.update),
                    tile(me.group == 0 ? shared.q : shared.k), tile(shared.k), [] {});
    const uint32_t at = (me.group == 0 ? this->attention() : this->lower()) + 2048 * block;
    for (int column = block + 1; column < 4; ++column) {    // zeros past the diagonal
      const uint32_t zeros[4] = {0, 0, 0, 0}, there = chunk::tile_at(at, chunk::lanes_by_row(me.lane), 0, column);
      chunk::store_block(there, zeros, me.lane);
      if (me.group == 0) chunk::store_block(there - this->attention() + this->attention_rest(), zeros, me.lane);
    }
    ptx::group_barrier<128>(2 + me.group);    // no other warp reads the rows any more, in whose place the sums are
    this->store_row_sums(me.group, rows);
  }

  // dQ += P K, dK += P^T Q + (M + M^T) K.
  __device__ __forceinline__ void add_matrices(float (&d_q)[8][4], float (&d_k)[8][4]) const {
    const Here me;
    const auto add = [&](float(&x)[8][4], auto columns, uint32_t matrix, const void *rows) {
      multiply_tiles<T, false, decltype(columns)::value, true, 4>(x, matrix, me.own_half(rows), true, me.warp, me.lane);
    };
    add(d_q, std::false_type(), this->attention(), shared.k);
    add(d_q, std::false_type(), this->attention_rest(), shared.k);    // sums over keys that repeat are far smaller than what is added
    add(d_k, std::true_type(), this->attention(), shared.q);
    add(d_k, std::false_type(), this->lower(), shared.k);
    add(d_k, std::true_type(), this->lower(), shared.k);
  }

  // ---- the sums over heads ----

  // Sums of rows over this warpgroup's columns, with the norm.
  __device__ __forceinline__ void sum_rows(const float (&x)[8][4], const uint8_t *raw, float *sums) const {
    const Here me;
    const float2 own = Base::row_products(x, me.own_half(raw), me);
    float *to = sums + kChunk * me.group + me.row;
    if (me.lane % 4 == 0) to[0] = own.x, to[8] = own.y;
  }
  __device__ __forceinline__ void put_sums(const float (&d_q)[8][4], const float (&d_k)[8][4]) const {
    const Here me;
    float *own = reinterpret_cast<float *>(shared.update);
    if (p.common.l2norm) sum_rows(d_q, shared.q, own), sum_rows(d_k, shared.k, own + 2 * kChunk);
    __syncthreads();
    const auto put = [&](const float(&x)[8][4], const float *s, const float *norms, const uint8_t *raw, uint8_t *staging, const gdn_heads &to) {
      const float2 sums = make_float2(s[me.row] + s[kChunk + me.row], s[me.row + 8] + s[kChunk + me.row + 8]);
      this->finish_rows(x, sums, norms, me.own_half(raw), me.own_half(staging));
      this->put_rows(me.own_half(staging), to, 64 * me.group);
    };
    put(d_q, own, factors().q_norm, shared.q, shared.d_out, p.d_q);
    put(d_k, own + 2 * kChunk, factors().k_norm, shared.k, shared.d_v, p.d_k);
  }
};

template <typename T, int TILES, int PARTS>
__global__ void __launch_bounds__(GradientShared80::kThreads, 1)
gradients_kernel80(const __grid_constant__ gdn_rule_backward_params p, const __grid_constant__ Buffers buffers, const Span span, const Work work) {
  extern __shared__ __align__(1024) uint8_t raw_shared[];
  GradientShared80 &s = *reinterpret_cast<GradientShared80 *>(raw_shared);
  ptx::grid_dependency_wait();
  if (TILES == 1 || PARTS > 1)    // zeros where there are no value rows
    for (int i = threadIdx.x; i < kTileBytes / 4; i += s.kThreads) reinterpret_cast<uint32_t *>(s.update + kTileBytes)[i] = 0;
  if (threadIdx.x < 32) {
    const Step only = step_at(p, span, work, blockIdx.x);    // a block has one item
    if (threadIdx.x == 0) s.step = only;
  }
  __syncthreads();
  if (!s.step.there) return;
  float d_q[8][4] = {}, d_k[8][4] = {};
  for (;;) {
    const Gradients80<T, TILES, PARTS> g = {{{{p, buffers, work, s.step}, s}}};
    g.load_head();
    const RowSums sums = g.add_states(d_q, d_k);
    __syncthreads();
    g.make_matrix(sums);
    __syncthreads();
    g.add_matrices(d_q, d_k);
    if (threadIdx.x < 32) g.finish_decays();
    const bool is_last = g.is_last();
    __syncthreads();
    if (is_last) return g.put_sums(d_q, d_k);
    if (threadIdx.x == 0) s.step = step_after<PARTS>(work, s.step, [] { return Step{}; });
    __syncthreads();
  }
}

}  // namespace backward
}  // namespace gdn
