// gdn_replay, gdn_replay_step: check the parameters and choose the kernel, from sizes the host knows; gdn_replay_advance.
#include "ring.h"

#include "../common/host.cuh"
#include "../common/launch.cuh"
#include "entries.cuh"

namespace gdn {
namespace ring {
namespace {

constexpr int64_t kMost = 0xffffffffLL;    // of a stride

bool valid_ring(int32_t capacity, int32_t window, int32_t tokens) {
  return window >= 1 && window <= GDN_RING_WINDOW && capacity <= GDN_RING_CAPACITY && capacity >= window + tokens &&
         tokens >= 0 && tokens <= GDN_REPLAY_TOKENS && tokens <= window;
}

int check(const gdn_replay_params &p) {
  if (!valid_dtype(p.io_dtype) || !valid_dtype(p.gate_dtype) || !valid_dtype(p.state_dtype)) return GDN_BAD_DTYPE;
  if (p.num_k_heads < 1 || p.num_v_heads < 1 || p.num_v_heads % p.num_k_heads != 0) return GDN_BAD_HEADS;
  if (p.head_k < 1 || p.head_k > 256 || p.head_v < 1 || p.head_v > 256) return GDN_BAD_HEAD_DIM;
  if (p.algo < GDN_REPLAY_AUTO || p.algo > GDN_REPLAY_MMA) return GDN_BAD_ALGO;
  if (p.num_seqs < 0 || p.num_seqs > 65535 || p.num_v_heads > 65535) return GDN_BAD_LENGTH;
  if (!valid_ring(p.ring.capacity, p.ring.window, p.tokens_per_seq)) return GDN_BAD_LENGTH;
  for (const gdn_slots *s : {&p.in_slots, &p.out_slots}) {
    if (const int status = check_slots(*s)) return status;
    if (s->slot_stride > kMost) return GDN_BAD_STRIDE;
  }
  for (const gdn_heads *x : {&p.q, &p.k, &p.v, &p.a, &p.b, &p.o})
    if (!valid_strides(*x) || x->seq_stride > kMost || x->token_stride > kMost || x->head_stride > kMost) return GDN_BAD_STRIDE;
  for (const int64_t stride : {p.ring.keys_stride, p.ring.updates_stride, p.ring.decays_stride})
    if (stride < 0 || stride > kMost) return GDN_BAD_STRIDE;
  return GDN_OK;
}

bool any_null(const gdn_replay_params &p) {
  if (!p.state_in || !p.state_out || !p.ring.keys || !p.ring.updates || !p.ring.decays || !p.ring.cursors) return true;
  return p.tokens_per_seq > 0 &&
         (!p.q.ptr || !p.k.ptr || !p.v.ptr || !p.a.ptr || !p.b.ptr || !p.o.ptr || !p.a_log || !p.dt_bias);
}

bool takes(const gdn_replay_params &p) {
  const int64_t io = 16 / dtype_size(p.io_dtype), state = 16 / dtype_size(p.state_dtype);
  for (const gdn_heads *x : {&p.q, &p.k, &p.v})
    if (!aligned_rows(*x, io, p.io_dtype)) return false;
  for (const void *x : {p.state_in, static_cast<const void *>(p.state_out), static_cast<const void *>(p.ring.keys),
                        static_cast<const void *>(p.ring.updates)})
    if (!aligned(x, 16)) return false;
  return p.head_k == kDim && p.head_v == kDim && p.in_slots.slot_stride % state == 0 && p.out_slots.slot_stride % state == 0 &&
         p.ring.keys_stride % io == 0 && p.ring.updates_stride % 4 == 0 && (p.state_in == p.state_out || p.fold);
}

Field field(const gdn_heads &x) {
  return {x.ptr, static_cast<uint32_t>(x.seq_stride), static_cast<uint32_t>(x.token_stride), static_cast<uint32_t>(x.head_stride)};
}

Pool pool(const gdn_slots &s) {
  return {s.slots, static_cast<uint32_t>(s.num_slots < kMost ? s.num_slots : kMost), static_cast<uint32_t>(s.slot_stride)};
}

void set_params(const gdn_replay_params &p, Params &d) {
  const uint32_t ratio = static_cast<uint32_t>(p.num_v_heads / p.num_k_heads);
  d.state_in = p.state_in, d.state_out = p.state_out;
  d.in = pool(p.in_slots), d.out = pool(p.out_slots);
  d.q = field(p.q), d.k = field(p.k), d.v = field(p.v), d.a = field(p.a), d.b = field(p.b), d.o = field(p.o);
  d.a_log = p.a_log, d.dt_bias = p.dt_bias;
  d.keys = p.ring.keys, d.updates = p.ring.updates, d.decays = p.ring.decays;
  d.cursors = p.ring.cursors, d.counts = p.counts, d.cu_seqlens = p.cu_seqlens;
  d.keys_stride = static_cast<uint32_t>(p.ring.keys_stride), d.updates_stride = static_cast<uint32_t>(p.ring.updates_stride);
  d.decays_stride = static_cast<uint32_t>(p.ring.decays_stride);
  d.capacity = static_cast<uint32_t>(p.ring.capacity), d.window = static_cast<uint32_t>(p.ring.window);
  d.tokens = static_cast<uint32_t>(p.tokens_per_seq);
  d.ratio = {ratio, static_cast<uint32_t>(((1ull << 32) + ratio - 1) / ratio)};
  d.key_heads = static_cast<uint32_t>(p.num_k_heads), d.heads = static_cast<uint32_t>(p.num_v_heads);
  d.gate_dtype = p.gate_dtype, d.l2norm = p.l2norm, d.fold = p.fold, d.apart = p.state_in != p.state_out;
  d.l2_eps = p.l2_eps, d.scale = p.scale, d.beta_scale = p.beta_scale;
}

// The rule within a step.
gdn_replay_params rule_of(const gdn_replay_step_params &p) {
  const int64_t size = dtype_size(p.io_dtype), keys = static_cast<int64_t>(p.num_k_heads) * p.head_k;
  const auto columns = [&](int64_t first, int64_t head) {
    return gdn_heads{static_cast<const char *>(p.x.ptr) + first * size, p.x.seq_stride, p.x.token_stride, head};
  };
  gdn_replay_params r = {};
  r.q = columns(0, p.head_k), r.k = columns(keys, p.head_k), r.v = columns(2 * keys, p.head_v);
  r.a = p.a, r.b = p.b, r.o = p.out;
  r.a_log = p.a_log, r.dt_bias = p.dt_bias;
  r.state_in = p.state_in, r.state_out = p.state_out;
  r.counts = p.counts, r.cu_seqlens = p.cu_seqlens, r.ring = p.ring, r.in_slots = p.in_slots, r.out_slots = p.out_slots;
  r.num_seqs = p.num_seqs, r.tokens_per_seq = p.tokens_per_seq;
  r.num_k_heads = p.num_k_heads, r.num_v_heads = p.num_v_heads, r.head_k = p.head_k, r.head_v = p.head_v;
  r.io_dtype = p.io_dtype, r.gate_dtype = p.gate_dtype, r.state_dtype = p.state_dtype;
  r.l2norm = p.l2norm, r.fold = p.fold, r.algo = p.algo;
  r.l2_eps = p.l2_eps, r.scale = p.scale, r.beta_scale = p.beta_scale;
  return r;
}

int check_step(const gdn_replay_step_params &p) {
  if (!valid_dtype(p.conv_dtype) || !valid_dtype(p.norm_dtype)) return GDN_BAD_DTYPE;
  if (p.conv_width < 2 || p.conv_width > 8) return GDN_BAD_CONV_WIDTH;
  if (!valid_strides(p.z) || p.z.seq_stride > kMost || p.z.token_stride > kMost || p.z.head_stride > kMost) return GDN_BAD_STRIDE;
  if (p.inputs_stride < 0 || p.inputs_stride > kMost) return GDN_BAD_STRIDE;
  if (p.tokens_per_seq > GDN_REPLAY_STEP_TOKENS || p.ring.window < 3) return GDN_BAD_LENGTH;
  return GDN_OK;
}

int choose(const gdn_replay_params &p, int *algo) {
  *algo = p.algo;
  const bool several = p.tokens_per_seq > 1 || p.cu_seqlens;
  if (p.algo != GDN_REPLAY_AUTO) return several && p.algo != GDN_REPLAY_MMA ? GDN_BAD_ALGO : GDN_OK;
  *algo = several ? GDN_REPLAY_MMA : GDN_REPLAY_FMA;
  return GDN_OK;
}

// The form of one token takes four channels at a time, and whole heads.
int choose_step(const gdn_replay_step_params &p, int *algo) {
  *algo = p.algo;
  if (p.algo == GDN_REPLAY_MMA) return GDN_OK;
  const bool one = p.tokens_per_seq <= 1 && !p.cu_seqlens && aligned(p.conv_weight, 16) &&
                   aligned(p.inputs, 4 * dtype_size(p.io_dtype)) && p.inputs_stride % 4 == 0;
  if (p.algo != GDN_REPLAY_AUTO) return one && p.algo == GDN_REPLAY_FMA ? GDN_OK : GDN_BAD_ALGO;
  *algo = one ? GDN_REPLAY_FMA : GDN_REPLAY_MMA;
  return GDN_OK;
}

__global__ void advance_kernel(const __grid_constant__ gdn_replay_advance_params p) {
  const uint32_t n = blockIdx.x * blockDim.x + threadIdx.x;
  if (n >= static_cast<uint32_t>(p.num_seqs)) return;
  const uint32_t in = p.in_slots.slots ? p.in_slots.slots[n] : n, out = p.out_slots.slots ? p.out_slots.slots[n] : n;
  if (in >= p.in_slots.num_slots || out >= p.out_slots.num_slots) return;
  const uint32_t cursor = p.cursors[in], tokens = static_cast<uint32_t>(p.tokens_per_seq);
  const uint32_t capacity = static_cast<uint32_t>(p.capacity);
  const uint32_t count = p.cu_seqlens ? min(p.cu_seqlens[n + 1] - p.cu_seqlens[n], tokens)
                         : p.counts   ? min(p.counts[n], tokens)
                                      : tokens;
  uint32_t first = cursor >> 16, length = cursor & 0xffffu;
  if (p.fold || in != out || length + count > static_cast<uint32_t>(p.window)) {
    first += length;
    first = first < capacity ? first : first - capacity;
    length = 0;
  }
  p.cursors[out] = first << 16 | (length + (p.accepted ? min(p.accepted[n], count) : count));
}

}  // namespace
}  // namespace ring
}  // namespace gdn

extern "C" int gdn_replay(const gdn_replay_params *params, cudaStream_t stream) {
  using namespace gdn;
  if (!params) return GDN_NULL_POINTER;
  const gdn_replay_params &p = *params;
  if (const int status = ring::check(p)) return status;
  if (p.num_seqs == 0) return GDN_OK;
  if (ring::any_null(p)) return GDN_NULL_POINTER;
  if (!ring::takes(p)) return GDN_BAD_ALGO;
  int algo = GDN_REPLAY_AUTO;
  if (const int status = ring::choose(p, &algo)) return status;
  ring::Params device;
  ring::set_params(p, device);
  const int seqs = p.num_seqs, state = p.state_dtype;
  switch (p.io_dtype) {
    case GDN_F32: return ring::launch_as<float>(device, seqs, state, algo, stream);
    case GDN_BF16: return ring::launch_as<__nv_bfloat16>(device, seqs, state, algo, stream);
  }
  return ring::launch_as<__half>(device, seqs, state, algo, stream);
}

extern "C" int gdn_replay_step(const gdn_replay_step_params *params, cudaStream_t stream) {
  using namespace gdn;
  if (!params) return GDN_NULL_POINTER;
  const gdn_replay_step_params &p = *params;
  const gdn_replay_params rule = ring::rule_of(p);
  if (const int status = ring::check(rule)) return status;
  if (const int status = ring::check_step(p)) return status;
  if (p.num_seqs == 0) return GDN_OK;
  if (ring::any_null(rule) || !p.x.ptr || !p.z.ptr || !p.conv_weight || !p.norm_weight || !p.inputs) return GDN_NULL_POINTER;
  if (!ring::takes(rule) || !aligned_rows(p.z, 16 / dtype_size(p.io_dtype), p.io_dtype) || p.conv_width != 4)
    return GDN_BAD_ALGO;
  ring::StepParams device;
  ring::set_params(rule, device);
  device.z = ring::field(p.z);
  device.conv_weight = p.conv_weight, device.norm_weight = p.norm_weight, device.inputs = p.inputs;
  device.inputs_stride = static_cast<uint32_t>(p.inputs_stride);
  device.channels = static_cast<uint32_t>((2 * p.num_k_heads + p.num_v_heads) * ring::kDim);
  device.conv_dtype = p.conv_dtype, device.norm_dtype = p.norm_dtype, device.sigmoid = p.sigmoid, device.norm_eps = p.norm_eps;
  device.overlap = p.overlap;
  const int seqs = p.num_seqs, state = p.state_dtype;
  const bool overlap = p.overlap != 0;
  int algo = GDN_REPLAY_AUTO;
  if (const int status = ring::choose_step(p, &algo)) return status;
  switch (p.io_dtype) {
    case GDN_F32: return ring::launch_step_as<float>(device, seqs, state, algo, overlap, stream);
    case GDN_BF16: return ring::launch_step_as<__nv_bfloat16>(device, seqs, state, algo, overlap, stream);
  }
  return ring::launch_step_as<__half>(device, seqs, state, algo, overlap, stream);
}

extern "C" int gdn_replay_advance(const gdn_replay_advance_params *params, cudaStream_t stream) {
  using namespace gdn;
  if (!params) return GDN_NULL_POINTER;
  const gdn_replay_advance_params &p = *params;
  if (p.num_seqs < 0 || !ring::valid_ring(p.capacity, p.window, p.tokens_per_seq)) return GDN_BAD_LENGTH;
  for (const gdn_slots *s : {&p.in_slots, &p.out_slots})
    if (const int status = check_slots(*s)) return status;
  if (p.num_seqs == 0) return GDN_OK;
  if (!p.cursors) return GDN_NULL_POINTER;
  constexpr int kThreads = 128;
  const dim3 grid(static_cast<unsigned>(ceil_div(p.num_seqs, kThreads)));
  return launch(ring::advance_kernel, {grid, dim3(kThreads), 0, stream}, p);
}
