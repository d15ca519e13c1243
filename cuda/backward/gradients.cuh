// The parallel part of the backward pass: from states and their gradients to the gradients of q, k, beta and the log decay.
//
// A block owns a chunk of a key head and takes its value heads one after the other, so that the sums over them stay in registers. Of
// its two warpgroups each has 64 columns of what has head_k columns; of matrices of tokens the first makes the attention's, the
// second L's. Accumulators of dQ and dK hold them divided by the norms, so that q and k are raw everywhere.
#pragma once

#include "step_matrices.cuh"

namespace gdn {
namespace backward {

// The sum over a row of x times the 16-bit tile, by rows lane / 4 and 8 further of the warp's.
template <typename T>
__device__ __forceinline__ float2 row_products(const float (&x)[8][4], uint32_t tile, int warp, int lane) {
  const uint32_t by_row = chunk::lanes_by_row(lane);
  float sum[2] = {0.f, 0.f};
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    uint32_t a[4];    // as x has them: two tiles of rows and of rows 8 further
    ptx::load_matrices(a, chunk::tile_at(tile + 2048 * warp, by_row, 0, k));
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const float2 y = chunk::unpack2<T>(a[c]);
      const float(&pair)[4] = x[2 * k + c / 2];
      sum[c % 2] = fmaf(pair[c % 2 * 2], y.x, fmaf(pair[c % 2 * 2 + 1], y.y, sum[c % 2]));
    }
  }
  return make_float2(group_sum<4>(sum[0]), group_sum<4>(sum[1]));
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

// A block's work on a step, its parts as functions.
template <typename T, bool WGMMA, int TILES, int PARTS> struct Gradients : StepMatrices<T, WGMMA, TILES, PARTS> {
  using Base = StepMatrices<T, WGMMA, TILES, PARTS>;
  using Base::buffers, Base::count, Base::empty, Base::factors, Base::full, Base::gradients, Base::image,
      Base::load_states, Base::loaded, Base::p, Base::scale_of_update, Base::shared, Base::states, Base::step, Base::sync, Base::tile,
      Base::tiles, Base::tiles_here;

  // x += U / beta times 64 value rows of dS, from f16 in the inputs' type in `a`.
  __device__ __forceinline__ void add_updates(float (&x)[8][4], uint32_t (&a)[4][4], int v_tile) const {
    const Here me;
    load_rows(a, tile(tiles().update) + v_tile * kTileBytes, 0, me.warp, me.lane);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const float scale = scale_of_update(4 * v_tile + k);
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const float2 u = chunk::unpack2<__half>(a[k][c]);
        a[k][c] = chunk::pack2_written<T>(u.x * scale, u.y * scale);
      }
    }
    multiply<T, WGMMA, true>(x, a, me.own_half(gradients(v_tile)), v_tile > 0, me.lane, v_tile > 0);
  }

  // x += rows of a tile times 64 value rows of a state.
  __device__ __forceinline__ void add_product(float (&x)[8][4], const uint8_t *rows, const uint8_t *state, int v_tile) const {
    const Here me;
    multiply_tiles<T, WGMMA, false, true, 4>(x, tile(rows) + v_tile * kTileBytes, me.own_half(state), v_tile > 0, me.warp, me.lane, v_tile > 0);
  }
  __device__ __forceinline__ void add_products(float (&x)[8][4], const uint8_t *rows, const uint8_t *state) const {
    add_product(x, rows, state, 0);
    if (TILES > 1) add_product(x, rows, state + kStateBytes, 1);
  }

  // A lane's part of S dS of 64 value rows. With wgmma the diagonal of S dS^T, of a warp's rows and its warpgroup's columns.
  __device__ __forceinline__ float states_product(int v_tile) const {
    const Here me;
    if constexpr (WGMMA) {
      const uint32_t rows = me.own_half(states(v_tile)) + 2048 * me.warp, d_rows = me.own_half(gradients(v_tile)) + 2048 * me.warp;
      float top[4] = {}, low[4] = {};
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        uint32_t a[4], b[4];
        ptx::load_matrices(a, chunk::tile_at(rows, chunk::lanes_by_row(me.lane), 0, k));
        ptx::load_matrices(b, chunk::tile_at(d_rows, chunk::lanes_by_piece(me.lane), 0, k));
        ptx::mma16816<T>(top, a[0], a[1], a[2], a[3], b[0], b[1]);
        ptx::mma16816<T>(low, a[0], a[1], a[2], a[3], b[2], b[3]);
      }
      const int row = me.lane / 4, column = 2 * (me.lane % 4);
      const float sum = column == row ? top[0] + low[2] : column + 1 == row ? top[1] + low[3] : 0.f;
      return PARTS > 1 && v_tile > 0 ? sum * static_cast<float>(tiles_here() - 1) : sum;    // not twice that of the first tile
    }
    // Without room for both dS comes from the workspace.
    const uint8_t *d = image(buffers.gradients, v_tile);
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < kStateBytes / 16 / 256; ++i) {
      const int offset = 16 * (me.thread + 256 * i);
      sum += dot8<T>(ptx::load_shared(tile(states(v_tile)) + offset), *reinterpret_cast<const uint4 *>(d + offset));
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

  // What reads states: dQ += query dO S, dK += write U dS - read dV S. `gradients_parity`: of the barrier; wait_for_raw() for raw q and k.
  template <typename F>
  __device__ __forceinline__ RowSums add_states(float (&d_q)[8][4], float (&d_k)[8][4], int gradients_parity, F &&wait_for_raw) const {
    const Here me;
    const TokenFactors &f = factors();
    RowSums sums = {};
    float x[8][4], factor[2], product = 0.f;
    // Without room for all of S both products with its rows follow each other.
    float y[8][4];
    uint32_t updates[2][4][4] = {};
    if (!WGMMA) {
      for (int t = 0; t < tiles_here(); ++t) {
        if (t > 0) __syncthreads(), load_states(buffers.states, t), loaded();
        product += states_product(t);
        add_product(y, tiles().d_v, states(t), t);
        add_product(x, tiles().d_out, states(t), t);
      }
      __syncthreads();
      load_states(buffers.gradients, 0);
    } else {
      if (TILES == 1) wait_for_raw();    // beside products ptxas would keep these from being under way together
      add_products(x, tiles().d_out, states(0));
      add_products(y, tiles().d_v, states(0));
      if (TILES > 1) wait_for_raw();
      wait<WGMMA, TILES>(x);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) factor[i] = chunk::exp2_fast(f.c[me.row + 8 * i]) * f.q_norm[me.row + 8 * i] * p.common.scale;
    add_scaled(d_q, x, factor, shared.q, sums.later);
    // U dS, begun before the sums of dV S
    if (WGMMA) {
      wait<WGMMA>(y);
      ptx::barrier_wait(full(kGradientsBarrier), gradients_parity);
      add_updates(x, updates[0], 0);
      if (TILES > 1) add_updates(x, updates[1], 1);
      for (int t = 0; t < TILES; ++t) product += states_product(t);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) factor[i] = -chunk::exp2_fast(f.c[me.row + 8 * i]) * f.k_norm[me.row + 8 * i];
    add_scaled(d_k, y, factor, shared.k, sums.later);
    if (!WGMMA)
      for (int t = 0; t < tiles_here(); ++t) {
        if (t > 0) __syncthreads(), load_states(buffers.gradients, t);
        loaded();
        add_updates(x, updates[0], t);
      }
    wait<WGMMA>(x, updates[0], updates[1]);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = me.row + 8 * i;
      factor[i] = chunk::exp2_fast(f.c[kChunk - 1] - f.c[row]) * f.k_norm[row] * f.beta[row];
    }
    add_scaled(d_k, x, factor, shared.k, sums.earlier);
    product = group_sum(product);
    if (me.lane == 0) shared.states[this->buffer][4 * me.group + me.warp] = product;
    return sums;
  }

  // Sums of rows over this warpgroup's columns, with the norm.
  __device__ __forceinline__ void sum_rows(const float (&x)[8][4], const uint8_t *raw, float *sums) const {
    const Here me;
    if (!p.common.l2norm) return;
    const float2 own = row_products<T>(x, me.own_half(raw), me.warp, me.lane);
    float *to = sums + kChunk * me.group + me.row;
    if (me.lane % 4 == 0) to[0] = own.x, to[8] = own.y;
  }
  // From the sums over heads to the gradient of raw rows.
  __device__ __forceinline__ void finish_rows(uint32_t (&y)[4][4], const float (&x)[8][4], const uint8_t *raw, const float *norms,
                                              const float *sums) const {
    const Here me;
    float factor[2] = {0.f, 0.f};
    if (p.common.l2norm)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float norm = norms[me.row + 8 * i];
        factor[i] = -(sums[me.row + 8 * i] + sums[kChunk + me.row + 8 * i]) * norm * norm;
      }
    load_rows(y, me.own_half(raw), 0, me.warp, me.lane);
#pragma unroll
    for (int k = 0; k < 4; ++k)
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const float2 r = chunk::unpack2<T>(y[k][c]);
        const float(&pair)[4] = x[2 * k + c / 2];
        y[k][c] = chunk::pack2<T>(fmaf(factor[c % 2], r.x, pair[c % 2 * 2]), fmaf(factor[c % 2], r.y, pair[c % 2 * 2 + 1]));
      }
  }
  // Through rows of a tile that nobody reads any more.
  __device__ __forceinline__ void put_rows(const uint32_t (&y)[4][4], const uint8_t *tiles, const gdn_heads &to) const {
    const Here me;
    const uint32_t rows = me.own_half(tiles) + 2048 * me.warp;
    store_rows(y, rows, me.lane);
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int r = me.lane / 8 + 4 * i, piece = me.lane % 8, token = 16 * me.warp + r, column = 64 * me.group + 8 * piece;
      if (token < count() && column < p.common.head_k)
        *reinterpret_cast<uint4 *>(out_heads_at<T>(to, step.n, step.first + token, step.key_head) + column) =
            ptx::load_shared(rows + chunk::tile_offset(r, piece));
    }
  }
};

// The warp that copies, with wgmma: steps as their buffers become free.
template <typename T, int TILES, int PARTS>
__device__ __forceinline__ void copy_steps(const gdn_rule_backward_params &p, const Buffers &buffers, const Maps &maps, const Span &span,
                                           const Work &work, GradientShared<true> &s) {
  const bool copies = threadIdx.x % 32 == 0;
  Step step = step_at(p, span, work, blockIdx.x);
  for (int i = 0, n = 0;; ++i) {
    const int buffer = i % 2;
    const Gradients<T, true, TILES, PARTS> g = {p, buffers, maps, s, work, step, buffer};
    if (i >= 2) ptx::barrier_wait(g.empty(buffer), (i / 2 - 1) % 2);
    if (copies) s.steps[buffer] = step;
    if (!step.there) {
      if (copies) ptx::barrier_arrive(g.full(buffer));
      return;
    }
    if (copies) g.copy_head();
    if (i > 0) ptx::barrier_wait(g.empty(kGradientsBarrier), (i - 1) % 2);
    if (copies) g.copy_gradients();
    if (step.is_first()) {
      if (n > 0) ptx::barrier_wait(g.empty(kRawBarrier), (n - 1) % 2);
      if (copies) g.copy_raw();
      ++n;
    }
    __syncwarp();
    step = step_after<PARTS>(p, span, work, step);
  }
}

// The warp that sums gradients of log decays, with wgmma.
template <typename T, int TILES, int PARTS>
__device__ __forceinline__ void sum_decays(const gdn_rule_backward_params &p, const Buffers &buffers, const Maps &maps, const Work &work,
                                           GradientShared<true> &s) {
  for (int i = 0;; ++i) {
    const int buffer = i % 2;
    const Step &step = s.steps[buffer];
    const Gradients<T, true, TILES, PARTS> g = {p, buffers, maps, s, work, step, buffer};
    ptx::barrier_wait(g.full(buffer), i / 2 % 2);
    if (!step.there) return;
    ptx::barrier_wait(g.summed(buffer), i / 2 % 2);
    g.finish_decays();
    ptx::barrier_arrive(g.empty(buffer));
  }
}

// In a kernel function every part has a label.
template <typename T, bool WGMMA, int TILES, int PARTS>
__global__ void __launch_bounds__(GradientShared<WGMMA>::kThreads, 1)
gradients_kernel(const __grid_constant__ gdn_rule_backward_params p, const __grid_constant__ Buffers buffers, const __grid_constant__ Maps maps,
                 const Span span, const Work work) {
  if constexpr (WGMMA && !ptx::kSm90a) return;
  using Shared = GradientShared<WGMMA>;
  extern __shared__ __align__(1024) uint8_t raw_shared[];
  Shared &s = *reinterpret_cast<Shared *>(raw_shared);
  ptx::grid_dependency_wait();
  // Barriers, and zeros where there are no value rows. With mma.sync a block has one item.
  if (TILES == 1 || PARTS > 1)
    for (int b = 0; b < s.kBuffers; ++b)
      for (int i = threadIdx.x; i < kTileBytes / 4; i += s.kThreads) reinterpret_cast<uint32_t *>(s.heads[b].update + kTileBytes)[i] = 0;
  if (!WGMMA && threadIdx.x < 32) {
    const Step only = step_at(p, span, work, blockIdx.x);
    if (threadIdx.x == 0) s.steps[0] = only;
  }
  if (WGMMA && threadIdx.x == 0) {
    for (int i = 0; i < kStepBarriers; ++i)
      ptx::barrier_init(ptx::shared_address(&s.full[i]), 1), ptx::barrier_init(ptx::shared_address(&s.empty[i]), i < 2 ? 256 + 32 : 256);
    for (int i = 0; i < 2; ++i) ptx::barrier_init(ptx::shared_address(&s.summed[i]), 256);
    ptx::barriers_initialised();
  }
  ptx::fence_async();
  __syncthreads();
  if constexpr (WGMMA) {
    if (threadIdx.x >= 256) {
      fewer_registers<40>();
      if (threadIdx.x < 256 + 32) copy_steps<T, TILES, PARTS>(p, buffers, maps, span, work, s);
      else if (threadIdx.x < 256 + 64) sum_decays<T, TILES, PARTS>(p, buffers, maps, work, s);
      return;
    }
    more_registers<232>();
  }
  float d_q[8][4] = {}, d_k[8][4] = {};
  for (int i = 0, n = 0;; ++i) {
    // Wait for the step.
    const int buffer = WGMMA ? i % 2 : 0;
    const Step &step = s.steps[buffer];
    const Gradients<T, WGMMA, TILES, PARTS> g = {p, buffers, maps, s, work, step, buffer};
    if (WGMMA) ptx::barrier_wait(g.full(buffer), i / 2 % 2);
    if (!step.there) break;
    if (WGMMA) g.clear(g.tiles().d_out, g.tiles().update, g.tiles().d_v);
    else g.load_head();
    // What reads states, then the matrices in the place of S.
    const RowSums sums = g.add_states(d_q, d_k, i % 2, [&] {
      if (!step.is_first()) return;
      ptx::barrier_wait(g.full(kRawBarrier), n % 2);
      g.clear(s.q, s.k);
    });
    g.sync();
    if (WGMMA) ptx::barrier_arrive(g.empty(kGradientsBarrier));
    g.make_matrix(sums);
    ptx::fence_async();
    g.sync();
    if (WGMMA) ptx::barrier_arrive(g.summed(buffer));
    g.add_matrices(d_q, d_k);
    if (!WGMMA && threadIdx.x < 32) g.finish_decays();
    wait<WGMMA>(d_q), wait<WGMMA>(d_k);
    const bool is_last = step.part + 1 == PARTS && step.head + 1 == work.heads;
    ptx::fence_async();
    g.sync();
    // The sums over heads.
    if (is_last) {
      float *own = reinterpret_cast<float *>(g.tiles().update);
      g.sum_rows(d_q, s.q, own), g.sum_rows(d_k, s.k, own + 2 * kChunk);
      g.sync();
      uint32_t q_rows[4][4], k_rows[4][4];
      g.finish_rows(q_rows, d_q, s.q, g.factors().q_norm, own);
      g.finish_rows(k_rows, d_k, s.k, g.factors().k_norm, own + 2 * kChunk);
      if (WGMMA) ptx::barrier_arrive(g.empty(kRawBarrier));
      g.put_rows(q_rows, g.tiles().d_out, p.d_q), g.put_rows(k_rows, g.tiles().d_v, p.d_k);
      set_to_zero(d_q), set_to_zero(d_k);
      ptx::fence_async();
      g.sync();
      ++n;
    }
    if (WGMMA) {
      ptx::barrier_arrive(g.empty(buffer));
    } else {
      if (is_last) break;
      if (threadIdx.x == 0) s.steps[0] = step_after<PARTS>(p, span, work, step);
      g.sync();
    }
  }
}

}  // namespace backward
}  // namespace gdn
