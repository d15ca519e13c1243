// Host side of the kernels that hold whole heads: shared memory and grids.
#pragma once

#include "../common/host.cuh"
#include "../common/launch.cuh"
#include "../common/profile.cuh"
#include "compact.cuh"
#include "whole.cuh"

namespace gdn {
namespace step {

template <Unit UNIT, typename R> int64_t whole_bytes(const gdn_common &p) {
  const int ratio = UNIT == Unit::kKeyHead ? p.num_v_heads / p.num_k_heads : 1;
  const int tokens = max_tokens(p.seqs) > 1 ? max_tokens(p.seqs) : 1;
  return R::kBytes + kHeader + static_cast<int64_t>(tokens) * Record{ratio}.size() * static_cast<int64_t>(sizeof(float));
}

// `blocks`: at most so many a multiprocessor, 0 for as many as fit.
template <typename T, typename ST, Unit UNIT, bool MANY, int DEPTH>
int launch_whole(const ParamsOf<UNIT != Unit::kRule> &p, cudaStream_t stream, bool overlap = false, int blocks = 0) {
  int64_t bytes = whole_bytes<UNIT, StateStream<ST, kRows<UNIT, MANY>, DEPTH>>(p.common);
  int optin = 0;
  if (const int status = device_attribute<cudaDevAttrMaxSharedMemoryPerBlockOptin>(&optin)) return status;
  if (bytes > optin) return GDN_BAD_ALGO;
  // 1 KB a block is the system's.
  if (blocks && optin / blocks - 1024 > bytes) bytes = optin / blocks / 1024 * 1024 - 1024;
  const dim3 grid(static_cast<unsigned>(UNIT == Unit::kKeyHead ? p.common.num_k_heads : p.common.num_v_heads),
                  static_cast<unsigned>(p.common.seqs.num_seqs));
  const int cluster = UNIT == Unit::kValueHead ? p.common.num_v_heads / p.common.num_k_heads : 1;
  GDN_PROFILED(profile::Target target; if (const int status = profile::attach(target, grid, 32 * kWarps)) return status;)
  return launch_allowed<whole_kernel<T, ST, UNIT, MANY, DEPTH>>({grid, dim3(32 * kWarps), bytes, stream, overlap, cluster}, optin,
                                                                p GDN_PROFILED(, target));
}

// ---- kernels of one token, whose offsets have 32 bits ----

// Whether all offsets of a tensor [sequence, head, dim] fit.
inline bool short_offsets(const gdn_heads &x, int64_t seqs, int64_t heads, int64_t dim) {
  return x.seq_stride <= kMaxOffset && x.head_stride <= kMaxOffset &&
         x.seq_stride * (seqs - 1) + x.head_stride * (heads - 1) + dim <= kMaxOffset;
}

// The same for what the rule and the step have in common; gates in the inputs' type or in f32.
inline bool short_offsets(const gdn_common &p) {
  for (const gdn_slots *s : {&p.in_slots, &p.out_slots})
    if (s->slot_stride > kMaxOffset || s->num_slots > kMaxOffset) return false;
  return short_offsets(p.a, p.seqs.num_seqs, p.num_v_heads, 1) && short_offsets(p.b, p.seqs.num_seqs, p.num_v_heads, 1) &&
         p.seqs.num_seqs <= 65535 && p.num_v_heads <= 65535 && (p.gate_dtype == p.io_dtype || p.gate_dtype == GDN_F32);
}

// fn(Type<G>) for the gates' type, where it is T or f32.
template <typename T, typename F> int with_gate(int gate_dtype, F &&fn) {
  if (!std::is_same_v<T, float> && gate_dtype != GDN_F32) return fn(Type<T>{});
  return fn(Type<float>{});
}

}  // namespace step
}  // namespace gdn
