// gdn_ring_step, gdn_ring_flush: check the parameters and launch; gdn_ring_advance.
#include "ring.h"

#include "../common/convert.cuh"
#include "../common/launch.cuh"
#include "../plan.h"
#include "entries.cuh"

namespace gdn {
namespace ring {
namespace {

using plan::kMaxOffset;

bool short_strides(const gdn_heads &x) {
  return valid_strides(x) && x.seq_stride <= kMaxOffset && x.token_stride <= kMaxOffset && x.head_stride <= kMaxOffset;
}

bool valid_ring(int32_t capacity, int32_t max_entries, int32_t tokens) {
  return max_entries >= 1 && max_entries <= GDN_RING_ENTRIES && capacity <= GDN_RING_CAPACITY && capacity >= max_entries + tokens &&
         tokens >= 0 && tokens <= max_entries;
}

// The state and the ring.
int check(const gdn_common &p, const gdn_ring &ring) {
  if (const int status = check_common(p)) return status;
  if (p.state_dtype == GDN_F16) return GDN_BAD_DTYPE;
  if (p.seqs.num_seqs > 65535 || p.num_v_heads > 65535) return GDN_BAD_LENGTH;
  if (!valid_ring(ring.capacity, ring.max_entries, max_tokens(p.seqs))) return GDN_BAD_LENGTH;
  for (const gdn_slots *s : {&p.in_slots, &p.out_slots}) {
    if (s->num_slots > kMaxOffset) return GDN_BAD_LENGTH;
    if (s->slot_stride > kMaxOffset) return GDN_BAD_STRIDE;
  }
  for (const int64_t stride : {ring.keys_stride, ring.updates_stride, ring.decays_stride})
    if (stride < 0 || stride > kMaxOffset) return GDN_BAD_STRIDE;
  return GDN_OK;
}

int check(const gdn_ring_step_params &p) {
  const gdn_layer &layer = p.layer;
  if (const int status = check(p.common, p.ring)) return status;
  if (!valid_dtype(layer.conv_dtype) || !valid_dtype(layer.norm_dtype)) return GDN_BAD_DTYPE;
  if (layer.conv_width < 2 || layer.conv_width > 8) return GDN_BAD_CONV_WIDTH;
  if (p.algo < GDN_RING_AUTO || p.algo > GDN_RING_MMA) return GDN_BAD_ALGO;
  if (p.ring.max_entries < 3) return GDN_BAD_LENGTH;
  for (const gdn_heads *x : {&layer.x, &layer.z, &layer.out, &p.common.a, &p.common.b})
    if (!short_strides(*x)) return GDN_BAD_STRIDE;
  return p.inputs_stride < 0 || p.inputs_stride > kMaxOffset ? GDN_BAD_STRIDE : GDN_OK;
}

// A flush reads neither gates nor tokens, whatever they hold.
int check(const gdn_ring_flush_params &p) {
  gdn_common common = p.common;
  common.a = common.b = {};
  common.gate_dtype = GDN_F32;
  common.seqs = {nullptr, p.common.seqs.num_seqs, 0, 0, 0};
  return check(common, p.ring);
}

bool any_null(const gdn_common &p, const gdn_ring &ring) {
  return !p.state_in || !p.state_out || !ring.keys || !ring.updates || !ring.decays || !ring.spans;
}

bool any_null(const gdn_ring_step_params &p) {
  const gdn_layer &layer = p.layer;
  if (any_null(p.common, p.ring) || !layer.conv_weight || !layer.norm_weight || !p.inputs || !p.common.a_log || !p.common.dt_bias)
    return true;
  return max_tokens(p.common.seqs) > 0 && (!layer.x.ptr || !layer.z.ptr || !layer.out.ptr || !p.common.a.ptr || !p.common.b.ptr);
}

__global__ void advance_kernel(const __grid_constant__ gdn_ring_advance_params p) {
  const uint32_t n = blockIdx.x * blockDim.x + threadIdx.x;
  if (n >= static_cast<uint32_t>(p.seqs.num_seqs)) return;
  const uint32_t in = step::slot_number(p.in_slots, n), out = step::slot_number(p.out_slots, n);
  if (in >= p.in_slots.num_slots || out >= p.out_slots.num_slots) return;
  const uint32_t span = p.spans[in], capacity = static_cast<uint32_t>(p.capacity), count = Tokens(p.seqs, n).count;
  uint32_t head = span >> 16, length = span & 0xffffu;
  if (p.flushed || in != out || length + count > static_cast<uint32_t>(p.max_entries)) {
    head += length;
    head = head < capacity ? head : head - capacity;
    length = 0;
  }
  p.spans[out] = head << 16 | (length + (p.accepted ? min(p.accepted[n], count) : count));
}

}  // namespace
}  // namespace ring
}  // namespace gdn

extern "C" int gdn_ring_step(const gdn_ring_step_params *params, cudaStream_t stream) {
  using namespace gdn;
  if (!params) return GDN_NULL_POINTER;
  const gdn_ring_step_params &p = *params;
  if (const int status = ring::check(p)) return status;
  if (p.common.seqs.num_seqs == 0) return GDN_OK;
  if (ring::any_null(p)) return GDN_NULL_POINTER;
  const int32_t algo = plan::ring_algo(p);
  if (algo == GDN_RING_AUTO) return GDN_BAD_ALGO;
  return with_dtype(p.common.io_dtype, [&](auto io) { return ring::launch_step<typename decltype(io)::type>(p, algo, stream); });
}

extern "C" int gdn_ring_flush(const gdn_ring_flush_params *params, cudaStream_t stream) {
  using namespace gdn;
  if (!params) return GDN_NULL_POINTER;
  const gdn_ring_flush_params &p = *params;
  if (const int status = ring::check(p)) return status;
  if (p.common.seqs.num_seqs == 0) return GDN_OK;
  if (ring::any_null(p.common, p.ring)) return GDN_NULL_POINTER;
  if (!plan::ring_supports(p.common, p.ring)) return GDN_BAD_ALGO;
  return with_dtype(p.common.io_dtype, [&](auto io) { return ring::launch_flush<typename decltype(io)::type>(p, stream); });
}

extern "C" int gdn_ring_advance(const gdn_ring_advance_params *params, cudaStream_t stream) {
  using namespace gdn;
  if (!params) return GDN_NULL_POINTER;
  const gdn_ring_advance_params &p = *params;
  if (const int status = check_sequences(p.seqs)) return status;
  if (!ring::valid_ring(p.capacity, p.max_entries, max_tokens(p.seqs))) return GDN_BAD_LENGTH;
  for (const gdn_slots *s : {&p.in_slots, &p.out_slots})
    if (const int status = check_slots(*s)) return status;
  if (p.seqs.num_seqs == 0) return GDN_OK;
  if (!p.spans) return GDN_NULL_POINTER;
  constexpr int kThreads = 128;
  const dim3 grid(static_cast<unsigned>(ceil_div(p.seqs.num_seqs, kThreads)));
  return launch(ring::advance_kernel, {grid, dim3(kThreads), 0, stream}, p);
}
