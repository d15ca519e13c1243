// The parallel part of the backward pass with wgmma: from states and their gradients to the gradients of q, k, beta and the log decay.
//
// A block takes a chunk of a key head, its value heads one after the other, so that the sums over them stay in registers, then the next
// chunk. Two warpgroups have 64 columns each of dQ and dK. Of the other warps six make the matrices of tokens, one sums the gradients of
// the log decays and one copies. All go on as soon as what they need is there. Accumulators of dQ and dK hold them divided by the norms,
// so that q and k are raw everywhere.
#pragma once

#include "step_matrices.cuh"

namespace gdn {
namespace backward {

// Copies: U and factors of two steps in turn, dO and dV, S, dS, raw q and k of two items in turn, for which all would wait at the end of
// an item.
enum CopyBarrier { kStepBarrier = 0, kRowsBarrier = 2, kStatesBarrier = 3, kGradientsBarrier = 4, kRawBarrier = 5, kCopyBarriers = 7 };

struct GradientShared90 {
  static constexpr int kThreads = 512;
  struct Raw {
    alignas(1024) uint8_t q[2 * kTileBytes];    // then dQ on its way out
    uint8_t k[2 * kTileBytes];                  // then dK
  };
  Raw raw[2];
  uint8_t d_out[2 * kTileBytes], d_v[2 * kTileBytes], update[2][2 * kTileBytes];
  uint8_t states[2 * kStateBytes], gradients[2 * kStateBytes];                        // S and dS
  uint8_t attention[kImageBytes], attention_rest[kImageBytes], lower[kImageBytes];    // P, what 16 bits lose of it, M
  alignas(16) TokenFactors tokens[2];
  WarpSums sums[2][2][4];      // of a step, by half or matrix and warp
  float rows[2][2][kChunk];    // sums of rows of dQ and dK, by half
  float state_sum;             // S dS
  Step steps[2];
  // Copies that have arrived, and those that all have read; `unclear`: those that have rows of the next sequence.
  uint64_t full[kCopyBarriers], empty[kCopyBarriers], unclear;
  uint64_t matrix_full[2], matrix_empty[2], summed[2];    // of P and M; what the gradients of log decays are sums of
};
static_assert(sizeof(GradientShared90) <= 227 * 1024, "a shape for sm_90");

// Threads that compute dQ and dK, the matrices, and sums for dg; the registers that each of the first and of the others may have.
constexpr int kRowThreads = 256, kMatrixThreads = 192, kSumThreads = 32;
constexpr int kRowRegisters = 144, kWarpRegisters = 112;
static_assert(128 * (2 * kRowRegisters + 2 * kWarpRegisters) <= 65536, "registers of a multiprocessor");

template <typename T, int TILES, int PARTS> struct Places90 : StepPlaces<T, TILES, PARTS> {
  using StepPlaces<T, TILES, PARTS>::tile;
  const Maps &maps;
  GradientShared90 &shared;
  const int number, item;    // of the step and of its item, of the block's

  __device__ __forceinline__ int buffer() const { return number % 2; }
  __device__ __forceinline__ GradientShared90::Raw &raw() const { return shared.raw[item % 2]; }
  __device__ __forceinline__ uint8_t *update() const { return shared.update[buffer()]; }
  __device__ __forceinline__ const TokenFactors &factors() const { return shared.tokens[buffer()]; }
  __device__ __forceinline__ uint32_t attention() const { return tile(shared.attention); }
  __device__ __forceinline__ uint32_t attention_rest() const { return tile(shared.attention_rest); }
  __device__ __forceinline__ uint32_t lower() const { return tile(shared.lower); }
  __device__ __forceinline__ WarpSums &warp_sums(int group, int warp) const { return shared.sums[buffer()][group][warp]; }
  __device__ __forceinline__ float state_sum() const { return shared.state_sum; }
};

// A block's work on a step, its parts as functions.
template <typename T, int TILES, int PARTS> struct Gradients90 : StepMatrices<Places90<T, TILES, PARTS>> {
  using Base = StepMatrices<Places90<T, TILES, PARTS>>;
  using Base::buffer, Base::buffers, Base::columns_before, Base::count, Base::factors, Base::head, Base::item, Base::maps, Base::number,
      Base::p, Base::raw, Base::shared, Base::step, Base::tile, Base::tiles_here, Base::update, Base::work;

  __device__ __forceinline__ uint32_t full(int i) const { return tile(&shared.full[i]); }
  __device__ __forceinline__ uint32_t empty(int i) const { return tile(&shared.empty[i]); }
  __device__ __forceinline__ uint32_t summed() const { return tile(&shared.summed[buffer()]); }

  // ---- copies, by a warp ----

  __device__ __forceinline__ void copy_rows(uint8_t *to, const CUtensorMap &map, int head, uint32_t full, int columns = 0) const {
#pragma unroll
    for (int h = 0; h < 2; ++h)
      ptx::copy_box(tile(to) + h * kTileBytes, &map, columns + 64 * h, head, step.first, p.common.seqs.cu_seqlens ? 0 : step.n, full);
  }
  // f(barrier) copies `bytes` of tokens to `x`. The boxes of the last tokens of a sequence have rows of the next, which are cleared.
  // Each lane arrives itself, as the racecheck tool asks of those who have cleared rows.
  template <typename F, typename... X>
  __device__ __forceinline__ void copy_tokens(uint32_t full, uint32_t bytes, int &unclear, F &&f, X *...x) const {
    const bool is_whole = count() == kChunk, copies = threadIdx.x % 32 == 0;
    const uint32_t barrier = is_whole ? full : tile(&shared.unclear);
    if (copies) ptx::barrier_expect(barrier, bytes), f(barrier);
    if (!is_whole) {
      ptx::barrier_wait(barrier, unclear++ % 2);
      (clear_rows<2, 32>(x, count(), threadIdx.x % 32), ...);
      ptx::fence_async();
    }
    if (!is_whole || !copies) ptx::barrier_arrive(full);
  }
  __device__ __forceinline__ void copy_step(int &unclear) const {
    const bool in_place = buffers.updates == nullptr;
    copy_tokens(full(kStepBarrier + buffer()), (in_place ? 2 : tiles_here()) * kTileBytes + sizeof(TokenFactors), unclear, [&](uint32_t full) {
      if (in_place) copy_rows(update(), step.head == 0 ? maps.d_q : maps.d_k, step.key_head, full);
      else ptx::copy_bulk(tile(update()), this->update_image(0), tiles_here() * kTileBytes, full);
      ptx::copy_bulk(tile(&factors()), this->tokens(), sizeof(TokenFactors), full);
    }, update());
  }
  __device__ __forceinline__ void copy_value_rows(int &unclear) const {
    copy_tokens(full(kRowsBarrier), 4 * kTileBytes, unclear, [&](uint32_t full) {
      copy_rows(shared.d_out, maps.d_o, head(), full, columns_before());
      copy_rows(shared.d_v, maps.d_v, head(), full, columns_before());
    }, shared.d_out, shared.d_v);
  }
  __device__ __forceinline__ void copy_raw(int &unclear) const {
    copy_tokens(full(kRawBarrier + item % 2), 4 * kTileBytes, unclear, [&](uint32_t full) {
      copy_rows(raw().k, maps.k, step.key_head, full);
      copy_rows(raw().q, maps.q, step.key_head, full);
    }, raw().q, raw().k);
  }
  __device__ __forceinline__ void copy_states(uint8_t *to, const uint8_t *images, uint32_t full) const {
    if (threadIdx.x % 32 != 0) return;
    ptx::barrier_expect(full, TILES * kStateBytes);
    if constexpr (PARTS == 1) {
      ptx::copy_bulk(tile(to), this->image(images, 0), TILES * kStateBytes, full);
    } else {
      for (int t = 0; t < TILES; ++t)
        ptx::copy_bulk(tile(to) + t * kStateBytes, this->image(images, min(t, tiles_here() - 1)), kStateBytes, full);
    }
  }

  // ---- waits ----

  __device__ __forceinline__ void wait_until_walked() const {
    if (threadIdx.x % 32 == 0) {
      ptx::wait_for_count(&buffers.records[this->index()].walk.walked, work.walkers);
      ptx::fence_async_global();
    }
    __syncwarp();
  }
  __device__ __forceinline__ void wait_for_step() const { ptx::barrier_wait(full(kStepBarrier + buffer()), number / 2 % 2); }
  __device__ __forceinline__ void wait_for(CopyBarrier i) const { ptx::barrier_wait(full(i), number % 2); }
  __device__ __forceinline__ void is_read(CopyBarrier i) const { ptx::barrier_arrive(empty(i)); }
  __device__ __forceinline__ void wait_for_raw() const {
    if (step.is_first()) ptx::barrier_wait(full(kRawBarrier + item % 2), item / 2 % 2);
  }
  __device__ __forceinline__ void wait_for_matrix(int group) const { ptx::barrier_wait(tile(&shared.matrix_full[group]), number % 2); }
  __device__ __forceinline__ void matrix_is_read(int group) const { ptx::barrier_arrive(tile(&shared.matrix_empty[group])); }

  // ---- dQ and dK, 64 columns a warpgroup ----

  using Half = float[8][4];

  // x = rows of a tile times the value rows of S.
  __device__ __forceinline__ void multiply_states(Half &x, const uint8_t *rows) const {
    const Here me;
#pragma unroll
    for (int t = 0; t < TILES; ++t)
      multiply_tiles<T, true, false, true, 4>(x, tile(rows) + t * kTileBytes, me.own_half(shared.states) + t * kStateBytes, t > 0, me.warp,
                                              me.lane, t > 0);
  }
  template <bool COLUMNS> __device__ __forceinline__ void add_matrix(Half &x, uint32_t matrix, const uint8_t *rows, bool behind) const {
    const Here me;
    multiply_tiles<T, true, COLUMNS, true, 4>(x, matrix, me.own_half(rows), true, me.warp, me.lane, behind);
  }

  // dQ += query dO S + P K, dK += write U dS - read dV S + P^T Q + (M + M^T) K.
  __device__ __forceinline__ void add_step(Half &d_q, Half &d_k) const {
    const Here me;
    const TokenFactors &f = factors();
    float factor[2];
    Half x;
    RowSums sums = {};
    // What reads states.
    wait_for(kRowsBarrier), wait_for(kStatesBarrier);
    multiply_states(x, shared.d_out);
    wait_for_raw();
    wait<true>(x);
#pragma unroll
    for (int i = 0; i < 2; ++i) factor[i] = chunk::exp2_fast(f.c[me.row + 8 * i]) * f.q_norm[me.row + 8 * i] * p.common.scale;
    Base::add_scaled(d_q, x, factor, me.own_half(raw().q), sums.later);
    multiply_states(x, shared.d_v);
    wait<true>(x);
    is_read(kRowsBarrier), is_read(kStatesBarrier);
#pragma unroll
    for (int i = 0; i < 2; ++i) factor[i] = -chunk::exp2_fast(f.c[me.row + 8 * i]) * f.k_norm[me.row + 8 * i];
    Base::add_scaled(d_k, x, factor, me.own_half(raw().k), sums.later);
    wait_for(kGradientsBarrier);
#pragma unroll
    for (int t = 0; t < TILES; ++t) {
      uint32_t a[4][4];
      this->load_update(a, update(), t);
      multiply_now<T, true, true>(x, a, me.own_half(shared.gradients) + t * kStateBytes, t > 0, me.lane);
    }
    is_read(kGradientsBarrier);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = me.row + 8 * i;
      factor[i] = chunk::exp2_fast(f.c[kChunk - 1] - f.c[row]) * f.k_norm[row] * f.beta[row];
    }
    Base::add_scaled(d_k, x, factor, me.own_half(raw().k), sums.earlier);
    this->store_row_sums(me.group, sums);
    ptx::barrier_arrive(summed());
    // What reads matrices of tokens.
    wait_for_matrix(0);
    add_matrix<false>(d_q, this->attention(), raw().k, false);
    add_matrix<false>(d_q, this->attention_rest(), raw().k, true);    // sums over keys that repeat are far smaller than what is added
    add_matrix<true>(d_k, this->attention(), raw().q, false);
    wait<true>(d_q), wait<true>(d_k);
    matrix_is_read(0);
    wait_for_matrix(1);
    add_matrix<false>(d_k, this->lower(), raw().k, false);
    add_matrix<true>(d_k, this->lower(), raw().k, true);
    wait<true>(d_k);
  }

  // The sums over heads, through rows of q and k. M counts as read only when the sums of rows are, so that no warpgroup is an item ahead.
  __device__ __forceinline__ void put_sums(Half &d_q, Half &d_k) const {
    const Here me;
    const auto sum = [&](const Half &x, const uint8_t *raw, float(&to)[2][kChunk]) {
      const float2 own = Base::row_products(x, me.own_half(raw), me);
      if (me.lane % 4 == 0) to[me.group][me.row] = own.x, to[me.group][me.row + 8] = own.y;
    };
    if (p.common.l2norm) sum(d_q, raw().q, shared.rows[0]), sum(d_k, raw().k, shared.rows[1]);
    ptx::group_barrier<kRowThreads>(1);
    float2 sums[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float(&s)[2][kChunk] = shared.rows[i];
      sums[i] = make_float2(s[0][me.row] + s[1][me.row], s[0][me.row + 8] + s[1][me.row + 8]);
    }
    matrix_is_read(1);
    this->finish_rows(d_q, sums[0], factors().q_norm, me.own_half(raw().q), me.own_half(raw().q));
    this->finish_rows(d_k, sums[1], factors().k_norm, me.own_half(raw().k), me.own_half(raw().k));
    backward::set_to_zero(d_q), backward::set_to_zero(d_k);
    this->put_rows(me.own_half(raw().q), p.d_q, 64 * me.group), this->put_rows(me.own_half(raw().k), p.d_k, 64 * me.group);
    ptx::fence_async();
    ptx::barrier_arrive(empty(kRawBarrier + item % 2));
  }

  // ---- by warps ----

  // S dS, the sum of the diagonal of S dS^T.
  __device__ __forceinline__ void multiply_states_with_gradients() const {
    const int lane = threadIdx.x % 32, row = lane / 4, column = 2 * (lane % 4);
    wait_for(kStatesBarrier), wait_for(kGradientsBarrier);
    float sum = 0.f;
#pragma unroll 1
    for (int t = 0; t < TILES; ++t) {
      float top[4] = {}, low[4] = {};
#pragma unroll 1
      for (int r = 0; r < 4; ++r)
#pragma unroll
        for (int k = 0; k < 8; ++k) {
          const int rows = t * kStateBytes + 2048 * r;
          uint32_t a[4], b[4];
          ptx::load_matrices(a, chunk::tile_at(tile(shared.states) + rows, chunk::lanes_by_row(lane), 0, k));
          ptx::load_matrices(b, chunk::tile_at(tile(shared.gradients) + rows, chunk::lanes_by_piece(lane), 0, k));
          ptx::mma16816<T>(top, a[0], a[1], a[2], a[3], b[0], b[1]);
          ptx::mma16816<T>(low, a[0], a[1], a[2], a[3], b[2], b[3]);
        }
      const float own = column == row ? top[0] + low[2] : column + 1 == row ? top[1] + low[3] : 0.f;
      sum += PARTS > 1 && t > 0 ? own * static_cast<float>(tiles_here() - 1) : own;    // not twice that of the first tile
    }
    is_read(kStatesBarrier), is_read(kGradientsBarrier);
    sum = group_sum(sum);
    if (lane == 0) shared.state_sum = sum;
    __syncwarp();
  }

  // Rows of the matrices of tokens: blocks 3 and 2 of each by a warp each, the others by two more.
  __device__ __forceinline__ void make_matrices(int warp) const {
    const int tasks = warp < 4 ? 1 : 2;
    wait_for(kRowsBarrier);
#pragma unroll 1
    for (int i = 0; i < tasks; ++i) {
      const int group = warp < 4 ? warp % 2 : i, block = warp < 4 ? 2 + warp / 2 : warp == 4 ? 1 - i : i;
      const auto loaded = [&] {
        if (i + 1 == tasks) is_read(kRowsBarrier);
        wait_for_raw();
        if (number > 0) ptx::barrier_wait(tile(&shared.matrix_empty[group]), (number - 1) % 2);
      };
      this->make_rows(group, block, tile(group == 0 ? shared.d_out : shared.d_v), tile(update()), tile(group == 0 ? raw().q : raw().k),
                      tile(raw().k), loaded);
      ptx::fence_async();
      ptx::barrier_arrive(tile(&shared.matrix_full[group]));
    }
    if (this->is_last()) ptx::barrier_arrive(empty(kRawBarrier + item % 2));
    ptx::barrier_arrive(summed());
  }
};

// The warp that copies: steps as their buffers become free.
template <typename T, int TILES, int PARTS, bool BESIDE>
__device__ __forceinline__ void copy_steps(const gdn_rule_backward_params &p, const Buffers &buffers, const Maps &maps, const Span &span,
                                           const Work &work, GradientShared90 &s) {
  const bool copies = threadIdx.x % 32 == 0;
  Taker taker = {buffers.taken, 0};
  if (BESIDE) taker.ask();
  const auto next = [&](uint32_t item) {
    if constexpr (BESIDE) return taker.next(p, work);
    else return step_at(p, span, work, item);
  };
  Step step = next(blockIdx.x);
  for (int i = 0, item = 0, unclear = 0;; ++i) {
    const Gradients90<T, TILES, PARTS> g = {{{{p, buffers, work, step}, maps, s, i, item}}};
    const auto wait_until_read = [&](int barrier, int last) {
      if (last >= 0) ptx::barrier_wait(g.empty(barrier), last % 2);
    };
    wait_until_read(kStepBarrier + i % 2, i / 2 - 1);
    if (copies) s.steps[i % 2] = step;
    if (!step.there) return ptx::barrier_arrive(g.full(kStepBarrier + i % 2));
    __syncwarp();
    if (BESIDE) g.wait_until_walked();
    g.copy_step(unclear);
    if (step.is_first()) wait_until_read(kRawBarrier + item % 2, item / 2 - 1), g.copy_raw(unclear);
    wait_until_read(kRowsBarrier, i - 1);
    g.copy_value_rows(unclear);
    wait_until_read(kStatesBarrier, i - 1);
    g.copy_states(s.states, buffers.states, g.full(kStatesBarrier));
    wait_until_read(kGradientsBarrier, i - 1);
    g.copy_states(s.gradients, buffers.gradients, g.full(kGradientsBarrier));
    __syncwarp();
    item += g.is_last();
    step = step_after<PARTS>(work, step, [&] { return next(step.item + gridDim.x); });
  }
}

// The steps of a block as the warps that compute see them: f(step), then its buffer is given back.
template <typename T, int TILES, int PARTS, typename F>
__device__ __forceinline__ void each_step(const gdn_rule_backward_params &p, const Buffers &buffers, const Maps &maps, const Work &work,
                                          GradientShared90 &s, F &&f) {
  for (int i = 0, item = 0;; ++i) {
    const Step &step = s.steps[i % 2];
    const Gradients90<T, TILES, PARTS> g = {{{{p, buffers, work, step}, maps, s, i, item}}};
    g.wait_for_step();
    if (!step.there) return;
    item += g.is_last();
    f(g);
    ptx::barrier_arrive(g.empty(kStepBarrier + i % 2));
  }
}

// In a kernel function every part has a label.
template <typename T, int TILES, int PARTS, bool BESIDE>
__global__ void __launch_bounds__(GradientShared90::kThreads, 1)
gradients_kernel90(const __grid_constant__ gdn_rule_backward_params p, const __grid_constant__ Buffers buffers, const __grid_constant__ Maps maps,
                   const Span span, const Work work) {
  if constexpr (!ptx::kSm90a) return;
  extern __shared__ __align__(1024) uint8_t raw_shared[];
  GradientShared90 &s = *reinterpret_cast<GradientShared90 *>(raw_shared);
  if (!BESIDE) ptx::grid_dependency_wait();
  // Barriers, and zeros past the diagonals and where there are no value rows.
  for (int i = threadIdx.x; i < 3 * kImageBytes / 4; i += s.kThreads) reinterpret_cast<uint32_t *>(s.attention)[i] = 0;
  if (TILES == 1 || PARTS > 1)
    for (auto &x : s.update)
      for (int i = threadIdx.x; i < kTileBytes / 4; i += s.kThreads) reinterpret_cast<uint32_t *>(x + kTileBytes)[i] = 0;
  if (threadIdx.x == 0) {
    const int writers[kCopyBarriers] = {32, 32, 32, 1, 1, 32, 32};
    constexpr int kMost = kRowThreads + kMatrixThreads, kAll = kMost + kSumThreads, kStates = kRowThreads + kSumThreads;
    const int readers[kCopyBarriers] = {kAll, kAll, kMost, kStates, kStates, kMost, kMost};
    for (int i = 0; i < kCopyBarriers; ++i)
      ptx::barrier_init(ptx::shared_address(&s.full[i]), writers[i]), ptx::barrier_init(ptx::shared_address(&s.empty[i]), readers[i]);
    ptx::barrier_init(ptx::shared_address(&s.unclear), 1);
    for (int i = 0; i < 2; ++i) {
      ptx::barrier_init(ptx::shared_address(&s.matrix_full[i]), 128), ptx::barrier_init(ptx::shared_address(&s.matrix_empty[i]), kRowThreads);
      ptx::barrier_init(ptx::shared_address(&s.summed[i]), kMost);
    }
    ptx::barriers_initialised();
  }
  ptx::fence_async();
  __syncthreads();
  const auto each = [&](auto &&f) { each_step<T, TILES, PARTS>(p, buffers, maps, work, s, f); };
  if (threadIdx.x >= kRowThreads) {
    fewer_registers<kWarpRegisters>();
    const int warp = (threadIdx.x - kRowThreads) / 32;
    // The copies.
    if (warp == 6) {
      copy_steps<T, TILES, PARTS, BESIDE>(p, buffers, maps, span, work, s);
      if (BESIDE) ptx::grid_dependency_wait();    // what follows waits for this launch alone, and the walks may still store states
      return;
    }
    // The gradients of log decays.
    if (warp == 7)
      return each([&](const auto &g) {
        g.multiply_states_with_gradients();
        ptx::barrier_wait(g.summed(), g.number / 2 % 2);
        g.finish_decays();
      });
    // The matrices of tokens.
    return each([&](const auto &g) { g.make_matrices(warp); });
  }
  more_registers<kRowRegisters>();
  // dQ and dK.
  float d_q[8][4] = {}, d_k[8][4] = {};
  each([&](const auto &g) {
    g.add_step(d_q, d_k);
    if (g.is_last()) g.put_sums(d_q, d_k);
    else g.matrix_is_read(1);
  });
}

}  // namespace backward
}  // namespace gdn
