// The rule, one token: every warp by itself, nothing shared and no barrier.
//
// With little work it counts how many instructions and round trips stand between the launch and the last store. A lane
// asks for its pieces of the state first, then for q, k, v and the gates, all before it uses any. With much work a block is
// one warp: it goes as soon as it is done, and the next one's loads begin.
#pragma once

#include "../common/profile.cuh"
#include "../step/lanes.cuh"
#include "../step/raw.cuh"
#include "../step/small.h"

namespace gdn {
namespace step {

#ifdef GDN_PROFILE
template <typename T, int N> __device__ __forceinline__ uint32_t bits_of(const RawRun<T, N> &x) {
  return profile::bits_of(x.word);
}
#endif

// G: the type of the gates.
template <typename T, typename G, typename ST, int ROWS, int WARPS>
__global__ void __launch_bounds__(32 * WARPS) warp_kernel(const __grid_constant__ SmallParams p
                                                           GDN_PROFILED(, const __grid_constant__ profile::Target target)) {
  GDN_PROFILED(profile::Stamps stamps(target, profile::kDecode);)
  using L = Lanes<ST>;
  const uint32_t lane = threadIdx.x % 32, part = lane % kLanes;
  const uint32_t head = blockIdx.y, n = blockIdx.z;
  const uint32_t row0 = (blockIdx.x * WARPS + threadIdx.x / 32) * kGroups * ROWS + lane / kLanes * ROWS;
  const uint32_t within = (head * kDim + row0) * kDim;
  const uint32_t in_slot = p.in.of(n);
  const ST *in = static_cast<const ST *>(p.state_in) + (static_cast<uint64_t>(in_slot) * p.in.stride + within);
  uint4 raw[ROWS][L::kChunks] = {};
  GDN_PROFILED(stamps.lap(profile::kSetup);)
  if (in_slot < p.in.count) {
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
#pragma unroll
      for (int j = 0; j < L::kChunks; ++j) raw[r][j] = L::load(in + r * kDim, part, j);
  }
  __syncwarp();    // what follows is not to be moved above these loads
  GDN_PROFILED(stamps.lap(profile::kLoadState);)

  const uint32_t key_head = p.ratio.of(head);
  const G raw_a = *p.a.at<G>(n, head), raw_b = *p.b.at<G>(n, head);
  const float a_log = p.a_log[head], dt_bias = p.dt_bias[head];
  const T *kp = p.k.at<T>(n, key_head), *qp = p.q.at<T>(n, key_head);
  RawRun<T, L::kVec> raw_k[L::kChunks], raw_q[L::kChunks];
#pragma unroll
  for (int j = 0; j < L::kChunks; ++j) {
    raw_k[j].load(kp + L::column(part, j));
    raw_q[j].load(qp + L::column(part, j));
  }
  T raw_v[ROWS];
  const T *vp = p.v.at<T>(n, head, row0);
#pragma unroll
  for (int r = 0; r < ROWS; ++r) raw_v[r] = vp[r];
  const uint32_t out_slot = p.out.of(n);
  __syncwarp();    // nor are they to be moved below this
  GDN_PROFILED(stamps.lap(profile::kLoadQkv);)
  T *o = p.o.out<T>(n, head, row0);
  if (in_slot >= p.in.count || out_slot >= p.out.count) {    // padding
    if (part < ROWS) o[part] = from_float<T>(0.f);
    GDN_PROFILED(stamps.lap(profile::kPadding);)
    return;
  }

  GDN_PROFILED(stamps.wait(profile::kWaitGates, raw_a, raw_b, a_log, dt_bias);)
  const float decay = expf(log_decay(to_float(raw_a), dt_bias, -expf(a_log)));
  const float beta = p.beta_scale * sigmoid(to_float(raw_b));
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
  normalise_and_update(p, state, k, q, v, decay, beta, y);
  GDN_PROFILED(stamps.lap(profile::kUpdate);)

  ST *out = static_cast<ST *>(p.state_out) + (static_cast<uint64_t>(out_slot) * p.out.stride + within);
  float mine = 0.f;
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    L::store(out + r * kDim, part, state[r]);
    if (part == r) mine = y[r];
  }
  if (part < ROWS) o[part] = from_float<T>(mine);
  if (p.token_states) {
    ST *copy = static_cast<ST *>(p.token_states) + (static_cast<uint64_t>(n) * p.heads * kDim * kDim + within);
#pragma unroll
    for (int r = 0; r < ROWS; ++r) L::store(copy + r * kDim, part, state[r]);
  }
  GDN_PROFILED(stamps.lap(profile::kStoreState);)
}

}  // namespace step
}  // namespace gdn
