// The rule, one token: every warp by itself, without shared memory or barriers.
//
// With little work the time is the instructions and round trips between the launch and the last store. A lane loads its
// chunks of the state first, then q, k, v and the gates, all before it uses any. With much work a block is one warp: it
// exits as soon as it is done, and the next one's loads begin.
#pragma once

#include "../common/profile.cuh"
#include "../step/lanes.cuh"
#include "../step/raw.cuh"
#include "../step/compact.cuh"

namespace gdn {
namespace step {

#ifdef GDN_PROFILE
template <typename T, int N> __device__ __forceinline__ uint32_t bits_of(const RawRun<T, N> &x) {
  return profile::bits_of(x.word);
}
#endif

// G: the type of the gates.
template <typename T, typename G, typename ST, int ROWS, int WARPS>
__global__ void __launch_bounds__(32 * WARPS) decode_kernel(const __grid_constant__ gdn_rule_params p, const __grid_constant__ Sizes sizes
                                                             GDN_PROFILED(, const __grid_constant__ profile::Target target)) {
  GDN_PROFILED(profile::Stamps stamps(target, profile::kDecode);)
  using L = Lanes<ST>;
  const uint32_t lane = threadIdx.x % 32, part = lane % kLanes;
  const uint32_t head = blockIdx.y, n = blockIdx.z;
  const uint32_t row0 = (blockIdx.x * WARPS + threadIdx.x / 32) * kGroups * ROWS + lane / kLanes * ROWS;
  const uint32_t within = (head * kDim + row0) * kDim;
  const gdn_common &c = p.common;
  const uint32_t in_slot = slot_number(c.in_slots, n), num_in_slots = num_slots_of(c.in_slots);
  const ST *in = state_at<ST>(c.state_in, c.in_slots, in_slot) + within;
  uint4 raw[ROWS][L::kChunks] = {};
  GDN_PROFILED(stamps.lap(profile::kSetup);)
  if (in_slot < num_in_slots) {
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
#pragma unroll
      for (int j = 0; j < L::kChunks; ++j) raw[r][j] = L::load(in + r * kDim, part, j);
  }
  __syncwarp();    // later loads stay after these
  GDN_PROFILED(stamps.lap(profile::kLoadState);)

  const uint32_t key_head = sizes.key_head(head);
  const G raw_a = *row_at<G>(c.a, n, head), raw_b = *row_at<G>(c.b, n, head);
  const float a_log = c.a_log[head], dt_bias = static_cast<const float *>(c.dt_bias)[head];
  const T *kp = row_at<T>(p.k, n, key_head), *qp = row_at<T>(p.q, n, key_head);
  RawRun<T, L::kVec> raw_k[L::kChunks], raw_q[L::kChunks];
#pragma unroll
  for (int j = 0; j < L::kChunks; ++j) {
    raw_k[j].load(kp + L::column(part, j));
    raw_q[j].load(qp + L::column(part, j));
  }
  T raw_v[ROWS];
  const T *vp = row_at<T>(p.v, n, head, row0);
#pragma unroll
  for (int r = 0; r < ROWS; ++r) raw_v[r] = vp[r];
  const uint32_t out_slot = slot_number(c.out_slots, n);
  __syncwarp();    // nor do they move below this
  GDN_PROFILED(stamps.lap(profile::kLoadQkv);)
  T *o = out_row_at<T>(p.o, n, head, row0);
  if (in_slot >= num_in_slots || out_slot >= num_slots_of(c.out_slots)) {    // padding
    if (part < ROWS) o[part] = from_float<T>(0.f);
    GDN_PROFILED(stamps.lap(profile::kPadding);)
    return;
  }

  GDN_PROFILED(stamps.wait(profile::kWaitGates, raw_a, raw_b, a_log, dt_bias);)
  const float decay = expf(log_decay(to_float(raw_a), dt_bias, -expf(a_log)));
  const float beta = c.beta_scale * sigmoid(to_float(raw_b));
  GDN_PROFILED(stamps.lap(profile::kGates); stamps.wait(profile::kWaitQkv, raw_k, raw_q, raw_v);
               stamps.wait(profile::kWaitState, raw);)
  float k[kEach], q[kEach], state[ROWS][kEach], v[ROWS], y[ROWS];
#pragma unroll
  for (int i = 0; i < kEach; ++i) k[i] = raw_k[i / L::kVec].at(i % L::kVec), q[i] = raw_q[i / L::kVec].at(i % L::kVec);
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    v[r] = to_float(raw_v[r]);
#pragma unroll
    for (int j = 0; j < L::kChunks; ++j) L::unpack(raw[r][j], &state[r][j * L::kVec]);
  }
  normalise_and_update(c, state, k, q, v, decay, beta, y);
  GDN_PROFILED(stamps.lap(profile::kUpdate);)

  ST *out = const_cast<ST *>(state_at<ST>(c.state_out, c.out_slots, out_slot)) + within;
  float out_value = 0.f;
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    L::store(out + r * kDim, part, state[r]);
    if (part == r) out_value = y[r];
  }
  if (part < ROWS) o[part] = from_float<T>(out_value);
  GDN_PROFILED(stamps.lap(profile::kStoreState);)
}

}  // namespace step
}  // namespace gdn
