// gdn_ring_flush. A block has 64 rows of a head, a warp 16.
#pragma once

#include "flush.cuh"
#include "state.cuh"

namespace gdn {
namespace ring {

constexpr int kFlushWarps = 4, kFlushRows = 16 * kFlushWarps;    // of a block

template <typename T, typename ST, int K, int V>
__global__ void __launch_bounds__(32 * kFlushWarps)
flush_kernel(const __grid_constant__ gdn_ring_flush_params p, const __grid_constant__ Sizes sizes) {
  using Rows = StateRows<ST, 16, K>;
  __shared__ __align__(128) typename Rows::Memory state_rows[kFlushWarps];
  __shared__ FlushKeys<T, K> keys;
  __shared__ DecayProducts decays[kEntries];
  __shared__ uint64_t arrived[kFlushWarps];
  const gdn_common &c = p.common;
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const uint32_t head = blockIdx.y, n = blockIdx.z;
  const Rows state(state_rows[warp], arrived[warp]);
  const uint32_t in_slot = step::slot_number(c.in_slots, n), out_slot = step::slot_number(c.out_slots, n);
  if (in_slot >= step::num_slots_of(c.in_slots) || out_slot >= step::num_slots_of(c.out_slots)) return;    // padding
  const uint32_t span = p.ring.spans[in_slot];
  const Entries ring(p.ring, span, 0, true);
  const int length = static_cast<int>(ring.length);
  if (length == 0 && in_slot == out_slot && c.state_in == c.state_out) return;

  // Load the state; decays and keys of the entries meanwhile.
  const uint32_t row0 = blockIdx.x * kFlushRows + 16 * warp, within = (head * V + row0) * K;
  state.load(step::state_at<ST>(c.state_in, c.in_slots, in_slot) + within);
  if (warp == 0) {
    const DecayProducts products(lane < length ? decays_of(p.ring, in_slot, head)[ring.row(lane)] : 0.f, lane);
    if (lane < kEntries) decays[lane] = products;
  }
  keys.fill([&](int j) { return keys_of<T, K>(p.ring, in_slot, sizes.key_head(head)) + ring.row(j) * K; }, length, thread, 32 * kFlushWarps);
  __syncthreads();

  // Flush and store.
  const float *updates = updates_of<V>(p.ring, in_slot, head) + row0 + lane / 4;
  const FlushUpdates<sizeof(ST) == 4 ? 3 : 2> decayed([&](int x, int half) {
    const int j = entry_of(x, lane % 4);
    return j < length ? decays[j].entry * updates[ring.row(j) * V + 8 * half] : 0.f;
  });
  state.wait();
  ST *out = const_cast<ST *>(step::state_at<ST>(c.state_out, c.out_slots, out_slot)) + within;
  flush_rows(state.rows, out, decays[0].state, keys, decayed, lane);
}

}  // namespace ring
}  // namespace gdn
