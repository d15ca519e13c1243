// One token a sequence: the rule, or the fused step. A block has 4 rows of a head for each of its WARPS and of the ROWS that
// eight lanes hold. What all rows need of the ring, k_j . k and k_j . q of its entries, is worked out once a block, an entry or
// more by eight lanes, while the state is on its way; and what is one number for the head (gates, norms, what decays leave) by
// one warp each. The updates of the ring join the sums of S k and S q lane by lane, before their reduction, which therefore
// costs no more than without a ring.
//
// In the step a block is a whole head, since the norm is.
#pragma once

#include "../decode/raw.cuh"
#include "ring.cuh"
#include "step.cuh"

namespace gdn {
namespace replay {

// Sums of N values over the eight lanes of a row. Lane `part` is left with that of value part * N / 8, and with N = 16 of the
// one behind it too, in x[0] and x[1].
template <int N> __device__ __forceinline__ void scatter_sums(float (&x)[N], int part) {
  int count = N;
#pragma unroll
  for (int half = kLanes / 2; half > 0; half /= 2) {
    if (count == 1) {
      x[0] += __shfl_xor_sync(0xffffffffu, x[0], half);
      continue;
    }
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
  constexpr int kPartner = 4 / ROWS;
  const float mine = sums[0], other = __shfl_xor_sync(0xffffffffu, mine, kPartner);
  return part & kPartner ? float2{other, mine} : float2{mine, other};
}

// Warps a multiprocessor must have registers for: the more a lane holds, the fewer.
template <typename ST, int ROWS> constexpr int kResident = ROWS * sizeof(ST) > 16 ? 8 : ROWS * sizeof(ST) == 16 ? 12 : 16;

// What the warps of a block tell each other.
struct TokenShared {
  float2 products[kWindow];    // of an entry's key with k and q
  Left left[kWindow];          // .entry of each; .state is the same in all
  float log_step, step, beta, q_scale, kq;
  Factor k_scale;
  alignas(16) float keys[kWindow][kDim];    // written only to be folded
};

// And of the step.
template <int WARPS> struct TokenStepShared : TokenShared {
  alignas(16) float q[kDim], k[kDim], v[kDim];
  float squares[WARPS];    // of the rows of each, summed
};

// A lane's rows of the state, until outputs and a fold are made of them: read again, they would come from memory. Rows for which
// there are no registers that long are put into shared memory by a launch that folds.
template <typename ST, int ROWS, int WARPS> struct StateRows {
  using L = decode::Lanes<ST>;
  static constexpr int kChunks = L::kChunks, kWords = ROWS * kChunks;
  static constexpr bool kPut = sizeof(ST) == 2 && ROWS >= 4;
  using Memory = uint4[kPut ? kWords : 1][kPut ? 32 * WARPS : 1];
  Memory &memory;
  uint4 raw[ROWS][kChunks];

  __device__ __forceinline__ explicit StateRows(Memory &memory) : memory(memory) {}

  __device__ __forceinline__ void load(const ST *in, int part) {
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
#pragma unroll
      for (int c = 0; c < kChunks; ++c) raw[r][c] = L::load(in + r * kDim, part, c);
  }

  __device__ __forceinline__ void put() {
    if constexpr (kPut) {
#pragma unroll
      for (int w = 0; w < kWords; ++w) memory[w][threadIdx.x] = raw[w / kChunks][w % kChunks];
    }
  }

  // FOLD: behind put().
  template <bool FOLD> __device__ __forceinline__ void floats(int r, float (&s)[kEach]) const {
#pragma unroll
    for (int c = 0; c < kChunks; ++c)
      unpack<ST>(FOLD && kPut ? memory[r * kChunks + c][threadIdx.x] : raw[r][c], &s[c * L::kVec]);
  }
};

// Where there is no convolution.
struct NoConvolution {
  __device__ __forceinline__ NoConvolution(const Params &, uint32_t, uint32_t, uint32_t, int, int) {}
};

// The rule with Params, the fused step with StepParams.
template <typename T, typename ST, int ROWS, int WARPS, typename GIVEN>
__global__ void __launch_bounds__(32 * WARPS, (kResident<ST, ROWS> + WARPS / 2) / WARPS)
token_kernel(const __grid_constant__ GIVEN p) {
  constexpr bool STEP = std::is_same_v<GIVEN, StepParams>;
  static_assert(!STEP || (WARPS == 4 && WARPS * kGroups * ROWS == kDim));    // q, k, v, gates
  using L = decode::Lanes<ST>;
  using Key = decode::RawRun<T, L::kVec>;
  using S = std::conditional_t<STEP, TokenStepShared<WARPS>, TokenShared>;
  __shared__ S shared;
  __shared__ typename StateRows<ST, ROWS, WARPS>::Memory put_rows;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, part = lane % kLanes, group = lane / kLanes;
  const uint32_t head = blockIdx.y, n = blockIdx.z, key_head = p.ratio.of(head);
  const uint32_t row0 = ((blockIdx.x * WARPS + warp) * kGroups + group) * ROWS;
  const uint32_t mine = row0 + part * ROWS / kLanes;    // the row whose o and update are this lane's
  const bool writes = part % (kLanes / ROWS) == 0;
  // Which warp does what; in the step those before the gates' make the convolution.
  constexpr int gates = STEP ? 3 : 0, decays = STEP ? 3 : 1 % WARPS, norms = 2 % WARPS;
  constexpr int copies = STEP ? 1 : 3 % WARPS;

  const uint32_t in_slot = p.in.of(n), out_slot = p.out.of(n);
  if (in_slot >= p.in.count || out_slot >= p.out.count) {    // padding
    if constexpr (STEP) ptx::grid_dependency_wait();
    if (writes && p.tokens) p.o.template out<T>(n, 0, head)[mine] = from_float<T>(0.f);
    return;
  }
  const uint32_t cursor = p.cursors[in_slot], within = (head * kDim + row0) * kDim;
  const ST *in = static_cast<const ST *>(p.state_in) + (static_cast<uint64_t>(in_slot) * p.in.stride + within);
  StateRows<ST, ROWS, WARPS> state(put_rows);
  state.load(in, part);
  __syncwarp();    // what follows is not to be moved above these loads

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
  // Entries of the window whose keys eight lanes take; and those whose updates of its rows a lane takes.
  constexpr int kSide = WARPS * kGroups, kTurns = kSide < kWindow ? kWindow / kSide : 1, kPerLane = kWindow / kLanes;
  constexpr int kRun = ROWS < 4 ? ROWS : 4;
  const uint32_t entry = warp * kGroups + group;
  const T *keys = keys_of<T>(p, in_slot, key_head);
  Key raw_key[kTurns][L::kChunks] = {};
#pragma unroll
  for (int x = 0; x < kTurns; ++x)
    if (entry + x * kSide < ring.length) {
      const T *key = keys + ring.row(entry + x * kSide) * kDim;
#pragma unroll
      for (int c = 0; c < L::kChunks; ++c) raw_key[x][c].load(key + L::column(part, c));
    }
  float decay = 0.f;
  using Run = Pack<float, kRun>;
  Run raw_update[kPerLane][ROWS / kRun] = {};
  const float *updates = updates_of(p, in_slot, head) + row0;
#pragma unroll
  for (int x = 0; x < kPerLane; ++x) {
    const uint32_t j = part + x * kLanes;
    if (j < ring.length) {
#pragma unroll
      for (int r = 0; r < ROWS / kRun; ++r) raw_update[x][r] = reinterpret_cast<const Run *>(updates + ring.row(j) * kDim)[r];
    }
  }
  if (warp == decays && lane < ring.length) decay = decays_of(p, in_slot, head)[ring.row(lane)];
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
    float sums[2] = {decode::dot(q, q), decode::dot(k, q)};
#pragma unroll
    for (int d = kLanes / 2; d > 0; d /= 2) kk.add_lane(d);
    decode::row_sums(sums);
    if (lane == 0) {
      shared.k_scale = p.l2norm ? inverse_root(kk, p.l2_eps) : Factor{1.f, 0.f};
      shared.q_scale = p.l2norm ? rsqrtf(sums[0] + p.l2_eps) * p.scale : p.scale;
      shared.kq = sums[1];
    }
  }
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    float s[kEach];
    state.template floats<false>(r, s);
    both[2 * r] = decode::dot(s, k), both[2 * r + 1] = decode::dot(s, q);
    here(both[2 * r]), here(both[2 * r + 1]);    // or they would be worked out behind the barrier
  }
  if (ring.fold) state.put();

  if constexpr (!STEP)
    if (warp == decays) leave();
#pragma unroll
  for (int x = 0; x < kTurns; ++x) {
    const uint32_t j = entry + x * kSide;
    if (j >= kWindow) break;    // a warp more than there are entries for
    float key[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) key[i] = raw_key[x][i / L::kVec].at(i % L::kVec);
    float sums[2] = {decode::dot(key, k), decode::dot(key, q)};
    decode::row_sums(sums);
    if (part == 0) shared.products[j] = j < ring.length ? float2{sums[0], sums[1]} : float2{0.f, 0.f};
    if (ring.fold) {
#pragma unroll
      for (int i = 0; i < kEach; ++i) shared.keys[j][L::column(part, i / L::kVec) + i % L::kVec] = key[i];
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
      for (int w = 0; w < WARPS; ++w) sum += shared.squares[w];
      const float scale = rsqrtf(sum * (1.f / kDim) + p.norm_eps);
      if (writes) p.o.template out<T>(n, 0, head)[mine] = from_float<T>(o * scale * factor);
    }
  }
  if (!ring.fold) return;

  ST *out = static_cast<ST *>(p.state_out) + (static_cast<uint64_t>(out_slot) * p.out.stride + within);
  const float state_left = shared.left[0].state;
#pragma unroll
  for (int x = 0; x < kPerLane; ++x) {
    const float left = shared.left[part + x * kLanes].entry;
#pragma unroll
    for (int r = 0; r < ROWS; ++r) update[x][r] *= left;
  }
#pragma unroll
  for (int r0 = 0; r0 < ROWS; r0 += kRun) {
    float s[kRun][kEach];
#pragma unroll
    for (int r = 0; r < kRun; ++r) {
      state.template floats<true>(r0 + r, s[r]);
#pragma unroll
      for (int i = 0; i < kEach; ++i) s[r][i] *= state_left;
    }
#pragma unroll
    for (int x = 0; x < kPerLane; ++x)
#pragma unroll 1
      for (int y = 0; y < kLanes && x * kLanes + y < static_cast<int>(ring.length); ++y) {
        float key[kEach];
        L::slice(shared.keys[x * kLanes + y], part, key);
#pragma unroll
        for (int r = 0; r < kRun; ++r) {
          const float e = __shfl_sync(0xffffffffu, update[x][r0 + r], y, kLanes);
#pragma unroll
          for (int i = 0; i < kEach; ++i) s[r][i] = fmaf(e, key[i], s[r][i]);
        }
      }
#pragma unroll
    for (int r = 0; r < kRun; ++r) L::store(out + (r0 + r) * kDim, part, s[r]);
  }
}

}  // namespace replay
}  // namespace gdn
