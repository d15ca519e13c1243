// The step of one token a sequence. A block has a head, a warp 32 of its rows; eight lanes have eight of them. What all rows need of
// the ring, k_j . k and k_j . q of its entries, is computed once a block, an entry by eight lanes, while the state is under way; and
// what is one number a head (gates, norms, products of decays) by one warp each. The updates of the ring are added to the sums of
// S k and S q lane by lane, before their reduction, which therefore costs no more than without a ring.
#pragma once

#include "conv.cuh"
#include "flush.cuh"
#include "state.cuh"

namespace gdn {
namespace ring {

// Sums of 16 values over the eight lanes of a row: lane `part` ends with the sums of values 2 part and 2 part + 1.
__device__ __forceinline__ float2 scatter_sums(float (&x)[16], int part) {
#pragma unroll
  for (int half = kLanes / 2, count = 8; half > 0; half /= 2, count /= 2) {
    const bool upper = part & half;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (i >= count) break;
      const float other = __shfl_xor_sync(0xffffffffu, upper ? x[i] : x[i + count], half);
      x[i] = (upper ? x[i + count] : x[i]) + other;
    }
  }
  return {x[0], x[1]};
}

// Chunk j of a row of the state in shared memory, in floats.
template <typename L, typename ST> __device__ __forceinline__ void load_run(const ST *row, int part, int j, float *x) {
  if constexpr (L::kVec * sizeof(ST) == 16) {
    step::Lanes<ST>::unpack(L::load(row, part, j), x);
  } else {
    step::RawRun<ST, L::kVec> run;
    run.load(row + L::column(part, j));
#pragma unroll
    for (int i = 0; i < L::kVec; ++i) x[i] = run.at(i);
  }
}

constexpr int kTokenRows = 8;    // of eight lanes, and kLanes: a row's output belongs to one lane
static_assert(kTokenRows == kLanes);
template <int V> constexpr int kTokenWarps = V / (kGroups * kTokenRows);    // a block: the norm is over all rows of a head

// Blocks that a multiprocessor must have registers for: with f32 states it has shared memory for three of 128 rows, for two of 192.
template <typename ST, int V> constexpr int kTokenBlocks = (sizeof(ST) == 4 ? 3 : 4) - (V > 128);

// What the warps of a block share.
template <typename T, int K, int V> struct TokenShared {
  float2 products[kEntries];    // of an entry's key with k and q
  DecayProducts decays[kEntries];    // .entry of each; .state is the same in all
  float log_step, step, beta, q_scale, kq;
  Factor k_scale;
  FlushKeys<T, K> flush;    // written only for a flush
  uint64_t arrived[kTokenWarps<V>];    // the state, a warp's rows
  alignas(16) float q[K], k[K], v[V];
  float squares[kTokenWarps<V>];    // sums over the rows of a warp
};

// One function: loads are under way from its first lines to its last, in registers that its parts could not pass on.
template <typename T, typename ST, int K, int V>
__global__ void __launch_bounds__(32 * kTokenWarps<V>, (kTokenBlocks<ST, V>))
token_kernel(const __grid_constant__ gdn_ring_step_params p, const __grid_constant__ Sizes sizes) {
  constexpr int WARPS = kTokenWarps<V>, ROWS = kTokenRows, kWarpRows = kGroups * ROWS;
  // Eight lanes a row, also where their chunks are then shorter than 16 bytes: four would need twice the registers for k and q.
  using L = step::Lanes<std::conditional_t<step::Lanes<ST, K>::kLanes == kLanes, ST, float>, K>;
  constexpr int kEach = L::kEach;
  using Key = step::RawRun<T, L::kVec>;
  __shared__ TokenShared<T, K, V> shared;
  using Rows = StateRows<ST, kWarpRows, K>;
  using Convolution = TokenConvolution<T, K, V>;
  extern __shared__ __align__(128) unsigned char state_rows[];    // the copy engine writes fastest at this alignment
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, part = lane % kLanes, group = lane / kLanes;
  const uint32_t head = blockIdx.y, n = blockIdx.z, key_head = sizes.key_head(head);
  const Rows state(reinterpret_cast<typename Rows::Memory *>(state_rows)[warp], shared.arrived[warp]);
  const uint32_t warp_row0 = warp * kWarpRows, row0 = warp_row0 + group * ROWS;
  const uint32_t out_row = row0 + part;    // this lane writes the output and the update of this row
  // Which warp does what; those before the gates' run the convolution.
  constexpr int kGates = Convolution::kWarps, kDecays = WARPS - 1, kNorms = 2, kStoresKey = 1;

  // Slots and spans.
  const gdn_common &c = p.common;
  const uint32_t tokens = c.seqs.tokens_per_seq;
  const uint32_t in_slot = step::slot_number(c.in_slots, n), out_slot = step::slot_number(c.out_slots, n);
  if (in_slot >= step::num_slots_of(c.in_slots) || out_slot >= step::num_slots_of(c.out_slots)) {    // padding
    ptx::grid_dependency_wait();
    if (tokens) (static_cast<T *>(const_cast<void *>(p.layer.out.ptr)) + row_index(p.layer.out, n, 0, head))[out_row] = from_float<T>(0.f);
    return;
  }
  const uint32_t span = p.ring.spans[in_slot], within = (head * V + warp_row0) * K;
  __syncwarp();    // later loads stay after this

  // Load the weights, then the inputs, unless these come from a kernel that may still run.
  uint32_t raw_a = 0, raw_b = 0;
  float a_log = 0.f, dt_bias = 0.f;
  T raw_z = {};
  Convolution convolution(p, sizes, n, head, key_head, warp, lane);
  const auto load_inputs = [&] {
    ptx::grid_dependency_wait();
    ptx::grid_dependency_launch();
    if (tokens == 0) return;
    convolution.load_input();
    if (warp == kGates) {
      raw_a = raw_load_any(c.a.ptr, row_index(c.a, n, 0, head), c.gate_dtype);
      raw_b = raw_load_any(c.b.ptr, row_index(c.b, n, 0, head), c.gate_dtype);
    }
    raw_z = (static_cast<const T *>(p.layer.z.ptr) + row_index(p.layer.z, n, 0, head))[out_row];
  };
  convolution.load_weights();
  const uint32_t raw_weight = raw_load_any(p.layer.norm_weight, out_row, p.layer.norm_dtype);
  if (warp == kGates) a_log = c.a_log[head], dt_bias = static_cast<const float *>(c.dt_bias)[head];
  if (!p.layer.overlap) load_inputs();

  const bool moved = in_slot != out_slot;
  const Entries ring(p.ring, span, tokens, moved);
  if (ring.count == 0 && !ring.flush) {
    ptx::grid_dependency_wait();    // dependent launches rely on all earlier kernels being complete
    return;
  }

  // Load the entries: eight lanes the key of one, a lane the updates of kPerLane of them in its rows.
  convolution.load_window(ring, in_slot);
  __syncwarp();    // the span is used first here: entries are not requested before this
  const uint32_t entry = warp * kGroups + group;
  static_assert(WARPS * kGroups >= kEntries);
  const bool has_entry = WARPS * kGroups == kEntries || warp * kGroups < kEntries;    // this warp
  constexpr int kPerLane = kEntries / kLanes, kRun = 4;
  Key raw_key[L::kChunks] = {};
  if (entry < ring.length) {
    const T *key = keys_of<T, K>(p.ring, in_slot, key_head) + ring.row(entry) * K;
#pragma unroll
    for (int i = 0; i < L::kChunks; ++i) raw_key[i].load(key + L::column(part, i));
  }
  float decay = 0.f;
  using Run = Pack<float, kRun>;
  Run raw_update[kPerLane][ROWS / kRun] = {};
  const float *updates = updates_of<V>(p.ring, in_slot, head);
#pragma unroll
  for (int x = 0; x < kPerLane; ++x) {
    const uint32_t j = part + x * kLanes;
    if (j < ring.length) {
#pragma unroll
      for (int r = 0; r < ROWS / kRun; ++r) raw_update[x][r] = reinterpret_cast<const Run *>(updates + ring.row(j) * V + row0)[r];
    }
  }
  if (warp == kDecays && lane < ring.length) decay = decays_of(p.ring, in_slot, head)[ring.row(lane)];

  // Load the state, after the entries, which are waited for first.
  __syncwarp();
  state.load(step::state_at<ST>(c.state_in, c.in_slots, in_slot) + within);
  if (p.layer.overlap) load_inputs();
  __syncwarp();    // nor are these loads to move below this

  // Gates and decays.
  if (warp == kDecays) {
    const DecayProducts products(decay, lane);
    if (lane < kEntries) shared.decays[lane] = products;
  }
  if (warp == kGates) {
    const float log_step = log_decay(raw_to_float(raw_a, c.gate_dtype), dt_bias, -expf(a_log));
    if (lane == 0) {
      shared.log_step = log_step, shared.step = expf(log_step);
      shared.beta = c.beta_scale * sigmoid(raw_to_float(raw_b, c.gate_dtype));
    }
  }

  // Convolution.
  const bool stores_key = head == key_head * sizes.ratio;
  float k[kEach], q[kEach], sums[2 * ROWS];
  convolution.run(shared);
  __syncthreads();
  L::slice(shared.k, part, k), L::slice(shared.q, part, q);

  // Norms of k and q.
  if (warp == kNorms) {
    SquareSum kk;
#pragma unroll
    for (int i = 0; i < kEach; ++i) kk.add_square(k[i]);
    float dots[2] = {step::dot(q, q), step::dot(k, q)};
#pragma unroll
    for (int d = kLanes / 2; d > 0; d /= 2) kk.add_lane(d);
    step::row_sums(dots);
    if (lane == 0) {
      shared.k_scale = c.l2norm ? inverse_root(kk, c.l2_eps) : Factor{1.f, 0.f};
      shared.q_scale = c.l2norm ? rsqrtf(dots[0] + c.l2_eps) * c.scale : c.scale;
      shared.kq = dots[1];
    }
  }

  // Products of the state with k and q.
  state.wait();
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    float s[kEach];
#pragma unroll
    for (int i = 0; i < L::kChunks; ++i) load_run<L>(state.rows[group * ROWS + r], part, i, &s[i * L::kVec]);
    sums[2 * r] = step::dot(s, k), sums[2 * r + 1] = step::dot(s, q);
    compute_now(sums[2 * r]), compute_now(sums[2 * r + 1]);    // or they would be computed after the barrier
  }

  // Products of the ring's keys with k and q.
  if (has_entry) {
    float key[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) key[i] = raw_key[i / L::kVec].at(i % L::kVec);
    float dots[2] = {step::dot(key, k), step::dot(key, q)};
    step::row_sums(dots);
    if (part == 0) shared.products[entry] = entry < ring.length ? float2{dots[0], dots[1]} : float2{0.f, 0.f};
    if (ring.flush) {
#pragma unroll
      for (int i = 0; i < kEach; i += 2)
        shared.flush.put(entry, L::column(part, i / L::kVec) + i % L::kVec, key[i], key[i + 1]);
    }
  }
  __syncthreads();

  // The update and the output: state and ring together.
  float update[kPerLane][ROWS];
#pragma unroll
  for (int x = 0; x < kPerLane; ++x)
#pragma unroll
    for (int r = 0; r < ROWS; ++r) update[x][r] = raw_update[x][r / kRun].x[r % kRun];
  float o = 0.f;
  if (ring.count) {
    const float step = shared.step, state_decay = step * shared.decays[0].state;
    float2 factors[kPerLane];
#pragma unroll
    for (int x = 0; x < kPerLane; ++x) {
      const int j = part + x * kLanes;
      const float entry_decay = step * shared.decays[j].entry;
      factors[x] = {entry_decay * shared.products[j].x, entry_decay * shared.products[j].y};
    }
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      sums[2 * r] *= state_decay, sums[2 * r + 1] *= state_decay;
#pragma unroll
      for (int x = 0; x < kPerLane; ++x) {
        sums[2 * r] = fmaf(update[x][r], factors[x].x, sums[2 * r]);
        sums[2 * r + 1] = fmaf(update[x][r], factors[x].y, sums[2 * r + 1]);
      }
    }
    const float2 product = scatter_sums(sums, part);
    const Factor k_scale = shared.k_scale;
    const float e = k_scale.times(shared.beta * (shared.v[out_row] - k_scale.times(product.x)));
    const uint32_t row = ring.row(ring.length);
    o = shared.q_scale * fmaf(e, shared.kq, product.y);
    float square = o * o;
#pragma unroll
    for (int d = 16; d > 0; d /= 2) square += __shfl_xor_sync(0xffffffffu, square, d);
    if (lane == 0) shared.squares[warp] = square;
    updates_of<V>(p.ring, out_slot, head)[row * V + out_row] = e;
    if (threadIdx.x == 0) decays_of(p.ring, out_slot, head)[row] = shared.log_step;
  }

  // Append to the ring; norm and store.
  convolution.append(ring, out_slot, moved, stores_key);
  if (ring.count) {
    if (warp == kStoresKey && stores_key && 4 * lane < K) {
      const float4 x = *reinterpret_cast<const float4 *>(&shared.k[4 * lane]);
      store_pack<T, 4>(keys_of<T, K>(p.ring, out_slot, key_head) + ring.row(ring.length) * K + 4 * lane, {x.x, x.y, x.z, x.w});
    }
    const float gate = to_float(raw_z);
    const float factor = raw_to_float(raw_weight, p.layer.norm_dtype) * (p.layer.sigmoid ? fast_sigmoid(gate) : fast_silu(gate));
    __syncthreads();
    float sum = 0.f;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) sum += shared.squares[w];
    const float scale = rsqrtf(sum * (1.f / V) + p.layer.norm_eps);
    (static_cast<T *>(const_cast<void *>(p.layer.out.ptr)) + row_index(p.layer.out, n, 0, head))[out_row] = from_float<T>(o * scale * factor);
  }

  // Flush.
  if (!ring.flush) return;
  ST *out = const_cast<ST *>(step::state_at<ST>(c.state_out, c.out_slots, out_slot)) + within;
#pragma unroll 1
  for (int tile = 0; tile < kWarpRows; tile += 16) {
    const FlushUpdates<sizeof(ST) == 4 ? 3 : 2> decayed([&](int x, int half) {
      const int j = entry_of(x, lane % 4), row = warp_row0 + tile + lane / 4 + 8 * half;
      return j < static_cast<int>(ring.length) ? shared.decays[j].entry * updates[ring.row(j) * V + row] : 0.f;
    });
    flush_rows(state.rows + tile, out + tile * K, shared.decays[0].state, shared.flush, decayed, lane);
  }
}

}  // namespace ring
}  // namespace gdn
