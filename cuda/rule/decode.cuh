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

// The parameters of the kernel, as few and as short as they can be. NOTES: the ABI's struct has three times their bytes, and each
// multiprocessor reads its parameters from memory first: with it 1 and 8 sequences took 2 to 4 % longer.
struct DecodeParams {
  // A tensor [sequence, head, dim] of one token a sequence; strides in elements.
  struct Rows {
    const void *ptr;
    uint32_t seq_stride, head_stride;

    template <typename T> __device__ __forceinline__ const T *row(uint32_t n, uint32_t h, uint32_t i = 0) const {
      return static_cast<const T *>(ptr) + (n * seq_stride + h * head_stride + i);
    }
  };
  struct Slots {
    const uint32_t *slots;
    uint32_t count, stride;

    __device__ __forceinline__ uint32_t number(uint32_t n) const { return slots ? slots[n] : n; }
    __device__ __forceinline__ uint64_t offset(uint32_t slot) const { return static_cast<uint64_t>(slot) * stride; }
  };
  const void *state_in;
  void *state_out;
  Slots in_slots, out_slots;
  Rows q, k, v, a, b, o;
  const float *a_log, *dt_bias;
  uint32_t ratio, inverse_ratio;    // as in Sizes
  uint32_t head_v;
  int32_t l2norm;
  float l2_eps, scale, beta_scale;
};

inline DecodeParams decode_params(const gdn_rule_params &p) {
  const gdn_common &c = p.common;
  const Sizes sizes = sizes_of(c);
  const auto low = [](int64_t stride) { return static_cast<uint32_t>(stride); };
  const auto slots = [&](const gdn_slots &s) { return DecodeParams::Slots{s.slots, low(s.num_slots), low(s.slot_stride)}; };
  const auto rows = [&](const gdn_heads &x) { return DecodeParams::Rows{x.ptr, low(x.seq_stride), low(x.head_stride)}; };
  return {c.state_in, c.state_out, slots(c.in_slots), slots(c.out_slots), rows(p.q), rows(p.k), rows(p.v), rows(c.a), rows(c.b),
          rows(p.o), c.a_log, static_cast<const float *>(c.dt_bias), sizes.ratio, sizes.inverse_ratio,
          static_cast<uint32_t>(c.head_v), c.l2norm, c.l2_eps, c.scale, c.beta_scale};
}

// G: the type of the gates. V is a multiple of a block's rows.
template <typename T, typename G, typename ST, int K, int ROWS, int WARPS>
__global__ void __launch_bounds__(32 * WARPS) decode_kernel(const __grid_constant__ DecodeParams p
                                                             GDN_PROFILED(, const __grid_constant__ profile::Target target)) {
  GDN_PROFILED(profile::Stamps stamps(target, profile::kDecode);)
  using L = Lanes<ST, K>;
  const uint32_t lane = threadIdx.x % 32, part = lane % L::kLanes;
  const uint32_t head = blockIdx.y, n = blockIdx.z;
  const uint32_t row0 = (blockIdx.x * WARPS + threadIdx.x / 32) * L::kGroups * ROWS + lane / L::kLanes * ROWS;
  const uint32_t within = (head * p.head_v + row0) * K;
  const uint32_t in_slot = p.in_slots.number(n);
  const ST *in = static_cast<const ST *>(p.state_in) + (p.in_slots.offset(in_slot) + within);
  uint4 raw[ROWS][L::kChunks] = {};
  GDN_PROFILED(stamps.lap(profile::kSetup);)
  if (in_slot < p.in_slots.count) {
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
#pragma unroll
      for (int j = 0; j < L::kChunks; ++j) raw[r][j] = L::load(in + r * K, part, j);
  }
  __syncwarp();    // later loads stay after these
  GDN_PROFILED(stamps.lap(profile::kLoadState);)

  const uint32_t key_head = p.ratio == 1 ? head : __umulhi(head, p.inverse_ratio);
  const G raw_a = *p.a.row<G>(n, head), raw_b = *p.b.row<G>(n, head);
  const float a_log = p.a_log[head], dt_bias = p.dt_bias[head];
  const T *kp = p.k.row<T>(n, key_head), *qp = p.q.row<T>(n, key_head);
  RawRun<T, L::kVec> raw_k[L::kChunks], raw_q[L::kChunks];
#pragma unroll
  for (int j = 0; j < L::kChunks; ++j) {
    raw_k[j].load(kp + L::column(part, j));
    raw_q[j].load(qp + L::column(part, j));
  }
  T raw_v[ROWS];
  const T *vp = p.v.row<T>(n, head, row0);
#pragma unroll
  for (int r = 0; r < ROWS; ++r) raw_v[r] = vp[r];
  const uint32_t out_slot = p.out_slots.number(n);
  __syncwarp();    // nor do they move below this
  GDN_PROFILED(stamps.lap(profile::kLoadQkv);)
  T *o = const_cast<T *>(p.o.row<T>(n, head, row0));
  if (in_slot >= p.in_slots.count || out_slot >= p.out_slots.count) {    // padding
    if (part < ROWS) o[part] = from_float<T>(0.f);
    GDN_PROFILED(stamps.lap(profile::kPadding);)
    return;
  }

  GDN_PROFILED(stamps.wait(profile::kWaitGates, raw_a, raw_b, a_log, dt_bias);)
  const float decay = expf(log_decay(to_float(raw_a), dt_bias, -expf(a_log)));
  const float beta = p.beta_scale * sigmoid(to_float(raw_b));
  GDN_PROFILED(stamps.lap(profile::kGates); stamps.wait(profile::kWaitQkv, raw_k, raw_q, raw_v);
               stamps.wait(profile::kWaitState, raw);)
  float k[L::kEach], q[L::kEach], state[ROWS][L::kEach], v[ROWS], y[ROWS];
#pragma unroll
  for (int i = 0; i < L::kEach; ++i) k[i] = raw_k[i / L::kVec].at(i % L::kVec), q[i] = raw_q[i / L::kVec].at(i % L::kVec);
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    v[r] = to_float(raw_v[r]);
#pragma unroll
    for (int j = 0; j < L::kChunks; ++j) L::unpack(raw[r][j], &state[r][j * L::kVec]);
  }
  gdn_common norms = {};
  norms.l2norm = p.l2norm, norms.l2_eps = p.l2_eps, norms.scale = p.scale;
  normalise_and_update<L::kLanes>(norms, state, k, q, v, decay, beta, y);
  GDN_PROFILED(stamps.lap(profile::kUpdate);)

  ST *out = static_cast<ST *>(p.state_out) + (p.out_slots.offset(out_slot) + within);
  float out_value = 0.f;
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    L::store(out + r * K, part, state[r]);
    if (part == r) out_value = y[r];
  }
  if (part < ROWS) o[part] = from_float<T>(out_value);
  GDN_PROFILED(stamps.lap(profile::kStoreState);)
}

}  // namespace step
}  // namespace gdn
