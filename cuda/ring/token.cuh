// One token a sequence: the rule, or the fused step. A block of four warps has a head, or half of one; eight lanes take four or
// eight of its rows. What all rows need of the ring, k_j . k and k_j . q of its entries, is worked out once a block, an entry by
// eight lanes, while the state is on its way; and what is one number for the head (gates, norms, what decays leave) by one warp
// each. The updates of the ring join the sums of S k and S q lane by lane, before their reduction, which therefore costs no more
// than without a ring.
#pragma once

#include "../step/raw.cuh"
#include "flush.cuh"
#include "state.cuh"
#include "conv.cuh"

namespace gdn {
namespace ring {

// Sums of N values, 8 or 16, over the eight lanes of a row. Lane `part` is left with that of value part * N / 8, and with N = 16
// of the one behind it too, in x[0] and x[1].
template <int N> __device__ __forceinline__ void scatter_sums(float (&x)[N], int part) {
  int count = N;
#pragma unroll
  for (int half = kLanes / 2; half > 0; half /= 2) {
    count /= 2;
    const bool upper = part & half;
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
      if (i >= count) break;
      const float other = __shfl_xor_sync(0xffffffffu, upper ? x[i] : x[i + count], half);
      x[i] = (upper ? x[i + count] : x[i]) + other;
    }
  }
}

// Sums of S k and S q of ROWS rows, in this order, row by row: of the one row that this lane is left with.
template <int ROWS> __device__ __forceinline__ float2 row_products(float (&sums)[2 * ROWS], int part) {
  scatter_sums(sums, part);
  if constexpr (ROWS == 8) return {sums[0], sums[1]};
  const float mine = sums[0], other = __shfl_xor_sync(0xffffffffu, mine, 1);
  return part & 1 ? float2{other, mine} : float2{mine, other};
}

constexpr int kTokenWarps = 4;    // of a block

// Rows that eight lanes take: of the step all of the head's, since the norm is over them. Blocks that a multiprocessor must have
// registers for: with a whole head of f32 there is shared memory for three.
template <typename ST, typename GIVEN> constexpr int kTokenRows = sizeof(ST) == 4 && !kStep<GIVEN> ? 4 : 8;
template <typename ST, typename GIVEN> constexpr int kTokenBlocks = !kStep<GIVEN> ? 5 : sizeof(ST) == 4 ? 3 : 4;

// What the warps of a block tell each other.
template <typename T> struct TokenShared {
  float2 products[kWindow];    // of an entry's key with k and q
  Left left[kWindow];          // .entry of each; .state is the same in all
  float log_step, step, beta, q_scale, kq;
  Factor k_scale;
  FoldKeys<T> fold;    // written only to be folded
  uint64_t arrived[kTokenWarps];    // the state, a warp's rows
};

// And of the step.
template <typename T> struct TokenStepShared : TokenShared<T> {
  alignas(16) float q[kDim], k[kDim], v[kDim];
  float squares[kTokenWarps];    // of the rows of each, summed
};

// The rule with Params, the fused step with StepParams.
template <typename T, typename ST, typename GIVEN>
__global__ void __launch_bounds__(32 * kTokenWarps, (kTokenBlocks<ST, GIVEN>))
token_kernel(const __grid_constant__ GIVEN p) {
  constexpr bool STEP = kStep<GIVEN>;
  constexpr int ROWS = kTokenRows<ST, GIVEN>, kWarpRows = kGroups * ROWS;
  static_assert(!STEP || kTokenWarps * kWarpRows == kDim);
  using L = step::Lanes<ST>;
  using Key = step::RawRun<T, L::kVec>;
  using S = std::conditional_t<STEP, TokenStepShared<T>, TokenShared<T>>;
  __shared__ S shared;
  using Rows = StateRows<ST, kWarpRows>;
  extern __shared__ __align__(128) unsigned char state_rows[];    // as the copy engine writes it fastest
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, part = lane % kLanes, group = lane / kLanes;
  const uint32_t head = blockIdx.y, n = blockIdx.z, key_head = p.ratio.of(head);
  const Rows state(reinterpret_cast<typename Rows::Memory *>(state_rows)[warp], shared.arrived[warp]);
  const uint32_t warp_row0 = (blockIdx.x * kTokenWarps + warp) * kWarpRows, row0 = warp_row0 + group * ROWS;
  const uint32_t mine = row0 + part * ROWS / kLanes;    // the row whose o and update are this lane's
  const bool writes = part % (kLanes / ROWS) == 0;
  // Which warp does what; in the step those before the gates' make the convolution.
  constexpr int gates = STEP ? 3 : 0, decays = STEP ? 3 : 1, norms = 2, copies = STEP ? 1 : 3;

  const uint32_t in_slot = p.in.of(n), out_slot = p.out.of(n);
  if (in_slot >= p.in.count || out_slot >= p.out.count) {    // padding
    if constexpr (STEP) ptx::grid_dependency_wait();
    if (writes && p.tokens) p.o.template out<T>(n, 0, head)[mine] = from_float<T>(0.f);
    return;
  }
  const uint32_t cursor = p.cursors[in_slot], within = (head * kDim + warp_row0) * kDim;
  __syncwarp();    // what follows is not to be moved above this

  Key raw_k[L::kChunks] = {}, raw_q[L::kChunks] = {};
  uint32_t raw_a = 0, raw_b = 0;
  float a_log = 0.f, dt_bias = 0.f;
  T raw_v = {}, raw_z = {};
  uint32_t raw_weight = 0;
  std::conditional_t<STEP, TokenConvolution<T>, NoConvolution> convolution(p, n, head, key_head, warp, lane);
  const auto load_gates = [&] {
    raw_a = raw_load_any(p.a.ptr, p.a.index(n, 0, head), p.gate_dtype);
    raw_b = raw_load_any(p.b.ptr, p.b.index(n, 0, head), p.gate_dtype);
  };
  // What the kernel before this one may have written.
  const auto load_inputs = [&] {
    if constexpr (STEP) {
      ptx::grid_dependency_wait();
      ptx::grid_dependency_launch();
      if (p.tokens == 0) return;
      convolution.load_fresh();
      if (warp == gates) load_gates();
      raw_z = p.z.template at<T>(n, 0, head)[mine];
    }
  };
  if constexpr (STEP) {
    convolution.load_weights();
    raw_weight = raw_load_any(p.norm_weight, mine, p.norm_dtype);
    if (warp == gates && p.tokens) a_log = p.a_log[head], dt_bias = p.dt_bias[head];
    if (!p.overlap) load_inputs();    // where there is nothing to wait for, before the wait for the cursor
  } else if (p.tokens) {
    const T *kp = p.k.template at<T>(n, 0, key_head), *qp = p.q.template at<T>(n, 0, key_head);
#pragma unroll
    for (int c = 0; c < L::kChunks; ++c) raw_k[c].load(kp + L::column(part, c)), raw_q[c].load(qp + L::column(part, c));
    if (warp == gates) {
      load_gates();
      a_log = p.a_log[head], dt_bias = p.dt_bias[head];
    }
    raw_v = p.v.template at<T>(n, 0, head)[mine];
  }

  const bool moved = p.apart || in_slot != out_slot;
  const Entries ring(p, n, cursor, moved);
  if (ring.count == 0 && !ring.fold) {
    if constexpr (STEP) {
      ptx::grid_dependency_wait();    // for those that wait for this launch
    }
    return;
  }
  if constexpr (STEP) {
    convolution.load_past(ring, in_slot);
    __syncwarp();    // the first of the ring that is used: entries are not to be asked for above it
  }
  // The entry whose key eight lanes take; of how many a lane takes the updates of its rows.
  const uint32_t entry = warp * kGroups + group;
  static_assert(kTokenWarps * kGroups == kWindow);
  constexpr int kPerLane = kWindow / kLanes, kRun = 4;
  Key raw_key[L::kChunks] = {};
  if (entry < ring.length) {
    const T *key = keys_of<T>(p, in_slot, key_head) + ring.row(entry) * kDim;
#pragma unroll
    for (int c = 0; c < L::kChunks; ++c) raw_key[c].load(key + L::column(part, c));
  }
  float decay = 0.f;
  using Run = Pack<float, kRun>;
  Run raw_update[kPerLane][ROWS / kRun] = {};
  const float *updates = updates_of(p, in_slot, head);
#pragma unroll
  for (int x = 0; x < kPerLane; ++x) {
    const uint32_t j = part + x * kLanes;
    if (j < ring.length) {
#pragma unroll
      for (int r = 0; r < ROWS / kRun; ++r) raw_update[x][r] = reinterpret_cast<const Run *>(updates + ring.row(j) * kDim + row0)[r];
    }
  }
  if (warp == decays && lane < ring.length) decay = decays_of(p, in_slot, head)[ring.row(lane)];
  // The state behind the entries: they are waited for first.
  __syncwarp();
  state.load(static_cast<const ST *>(p.state_in) + (static_cast<uint64_t>(in_slot) * p.in.stride + within));
  if constexpr (STEP)
    if (p.overlap) load_inputs();
  __syncwarp();    // nor are these to be moved below this

  const auto leave = [&] {
    const Left left(decay, lane);
    if (lane < kWindow) shared.left[lane] = left;
  };
  if constexpr (STEP)
    if (warp == decays) leave();
  // What needs no entry first: they were asked for last.
  if (warp == gates) {
    const float log_step = log_decay(raw_to_float(raw_a, p.gate_dtype), dt_bias, -expf(a_log));
    if (lane == 0) {
      shared.log_step = log_step, shared.step = expf(log_step);
      shared.beta = p.beta_scale * sigmoid(raw_to_float(raw_b, p.gate_dtype));
    }
  }
  const bool keeps_key = blockIdx.x == 0 && head == key_head * p.ratio.ratio;
  if constexpr (!STEP) {
    if (warp == copies && lane < kLanes && keeps_key && ring.count) {
      T *to = keys_of<T>(p, out_slot, key_head) + ring.row(ring.length) * kDim;
#pragma unroll
      for (int c = 0; c < L::kChunks; ++c) raw_k[c].store(to + L::column(part, c));
    }
  }
  float k[kEach], q[kEach], both[2 * ROWS];
  if constexpr (STEP) {
    convolution.run(shared);
    __syncthreads();
    L::slice(shared.k, part, k), L::slice(shared.q, part, q);
  } else {
#pragma unroll
    for (int i = 0; i < kEach; ++i) k[i] = raw_k[i / L::kVec].at(i % L::kVec), q[i] = raw_q[i / L::kVec].at(i % L::kVec);
  }
  if (warp == norms) {
    SquareSum kk;
#pragma unroll
    for (int i = 0; i < kEach; ++i) kk.add_square(k[i]);
    float sums[2] = {step::dot(q, q), step::dot(k, q)};
#pragma unroll
    for (int d = kLanes / 2; d > 0; d /= 2) kk.add_lane(d);
    step::row_sums(sums);
    if (lane == 0) {
      shared.k_scale = p.l2norm ? inverse_root(kk, p.l2_eps) : Factor{1.f, 0.f};
      shared.q_scale = p.l2norm ? rsqrtf(sums[0] + p.l2_eps) * p.scale : p.scale;
      shared.kq = sums[1];
    }
  }
  state.wait();
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    float s[kEach];
#pragma unroll
    for (int c = 0; c < L::kChunks; ++c) unpack<ST>(L::load(state.rows[group * ROWS + r], part, c), &s[c * L::kVec]);
    both[2 * r] = step::dot(s, k), both[2 * r + 1] = step::dot(s, q);
    here(both[2 * r]), here(both[2 * r + 1]);    // or they would be worked out behind the barrier
  }

  if constexpr (!STEP)
    if (warp == decays) leave();
  {
    float key[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) key[i] = raw_key[i / L::kVec].at(i % L::kVec);
    float sums[2] = {step::dot(key, k), step::dot(key, q)};
    step::row_sums(sums);
    if (part == 0) shared.products[entry] = entry < ring.length ? float2{sums[0], sums[1]} : float2{0.f, 0.f};
    if (ring.fold) {
#pragma unroll
      for (int i = 0; i < kEach; i += 2)
        shared.fold.put(entry, L::column(part, i / L::kVec) + i % L::kVec, key[i], key[i + 1]);
    }
  }
  __syncthreads();

  float update[kPerLane][ROWS];
#pragma unroll
  for (int x = 0; x < kPerLane; ++x)
#pragma unroll
    for (int r = 0; r < ROWS; ++r) update[x][r] = raw_update[x][r / kRun].x[r % kRun];
  float o = 0.f;
  if (ring.count) {
    const float step = shared.step, state_left = step * shared.left[0].state;
    float2 of[kPerLane];
#pragma unroll
    for (int x = 0; x < kPerLane; ++x) {
      const int j = part + x * kLanes;
      const float left = step * shared.left[j].entry;
      of[x] = {left * shared.products[j].x, left * shared.products[j].y};
    }
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      both[2 * r] *= state_left, both[2 * r + 1] *= state_left;
#pragma unroll
      for (int x = 0; x < kPerLane; ++x) {
        both[2 * r] = fmaf(update[x][r], of[x].x, both[2 * r]);
        both[2 * r + 1] = fmaf(update[x][r], of[x].y, both[2 * r + 1]);
      }
    }
    const float2 product = row_products<ROWS>(both, part);
    const Factor k_scale = shared.k_scale;
    float v;
    if constexpr (STEP) v = shared.v[mine];
    else v = to_float(raw_v);
    const float e = k_scale.times(shared.beta * (v - k_scale.times(product.x)));
    const uint32_t row = ring.row(ring.length);
    if constexpr (STEP) {
      o = shared.q_scale * fmaf(e, shared.kq, product.y);
      float square = o * o;    // of as many rows as are apart
#pragma unroll
      for (int d = 16; d >= kLanes / ROWS; d /= 2) square += __shfl_xor_sync(0xffffffffu, square, d);
      if (lane == 0) shared.squares[warp] = square;
    }
    if (writes) {
      if constexpr (!STEP) p.o.template out<T>(n, 0, head)[mine] = from_float<T>(shared.q_scale * fmaf(e, shared.kq, product.y));
      updates_of(p, out_slot, head)[row * kDim + mine] = e;
    }
    if (blockIdx.x == 0 && threadIdx.x == 0) decays_of(p, out_slot, head)[row] = shared.log_step;
  }
  if constexpr (STEP) {
    convolution.keep(ring, out_slot, moved, keeps_key);
    if (ring.count) {
      if (warp == copies && keeps_key) {
        const float4 x = *reinterpret_cast<const float4 *>(&shared.k[4 * lane]);
        store_pack<T, 4>(keys_of<T>(p, out_slot, key_head) + ring.row(ring.length) * kDim + 4 * lane, {x.x, x.y, x.z, x.w});
      }
      const float gate = to_float(raw_z);
      const float factor = raw_to_float(raw_weight, p.norm_dtype) * (p.sigmoid ? fast_sigmoid(gate) : fast_silu(gate));
      __syncthreads();
      float sum = 0.f;
#pragma unroll
      for (int w = 0; w < kTokenWarps; ++w) sum += shared.squares[w];
      const float scale = rsqrtf(sum * (1.f / kDim) + p.norm_eps);
      if (writes) p.o.template out<T>(n, 0, head)[mine] = from_float<T>(o * scale * factor);
    }
  }
  if (!ring.fold) return;

  ST *out = static_cast<ST *>(p.state_out) + (static_cast<uint64_t>(out_slot) * p.out.stride + within);
#pragma unroll 1
  for (int tile = 0; tile < kWarpRows; tile += 16) {
    const FoldUpdates<sizeof(ST) == 4 ? 3 : 2> decayed([&](int x, int half) {
      const int j = entry_of(x, lane % 4), row = warp_row0 + tile + lane / 4 + 8 * half;
      return j < static_cast<int>(ring.length) ? shared.left[j].entry * updates[ring.row(j) * kDim + row] : 0.f;
    });
    fold_rows<ST, T>(state.rows + tile, out + tile * kDim, shared.left[0].state, shared.fold, decayed, lane);
  }
}

}  // namespace ring
}  // namespace gdn
