// Host side of the kernels of this folder: types, shared memory and grids.
#pragma once

#include "../common/host.cuh"
#include "../common/launch.cuh"
#include "../common/profile.cuh"
#include "split.cuh"
#include "../rule/decode.cuh"
#include "whole.cuh"

namespace gdn {
namespace step {

#ifdef GDN_PROFILE
inline int attach(profile::Target &target, dim3 grid, int threads) {
  return profile::attach(target, static_cast<int64_t>(grid.x) * grid.y * grid.z, threads);
}
#endif

template <Unit UNIT, typename R> int64_t whole_bytes(const ParamsOf<UNIT != Unit::kRule> &p) {
  const int ratio = UNIT == Unit::kKeyHead ? p.num_v_heads / p.num_k_heads : 1;
  const int tokens = max_tokens(p.seqs) > 1 ? max_tokens(p.seqs) : 1;
  return R::kBytes + kHeader + static_cast<int64_t>(tokens) * Record{ratio}.size() * static_cast<int64_t>(sizeof(float));
}

// `blocks`: no more of them a multiprocessor, 0 for as many as fit.
template <typename T, typename ST, Unit UNIT, bool MANY, int DEPTH>
int launch_whole(const ParamsOf<UNIT != Unit::kRule> &p, cudaStream_t stream, bool overlap = false, int blocks = 0) {
  int64_t bytes = whole_bytes<UNIT, Ring<ST, kRows<UNIT, MANY>, DEPTH>>(p);
  int optin = 0;
  if (const int status = device_attribute<cudaDevAttrMaxSharedMemoryPerBlockOptin>(&optin)) return status;
  if (bytes > optin) return GDN_BAD_ALGO;
  // 1 KB a block is the system's.
  if (blocks && optin / blocks - 1024 > bytes) bytes = optin / blocks / 1024 * 1024 - 1024;
  const dim3 grid(static_cast<unsigned>(UNIT == Unit::kKeyHead ? p.num_k_heads : p.num_v_heads),
                  static_cast<unsigned>(p.seqs.num_seqs));
  const int cluster = UNIT == Unit::kValueHead ? p.num_v_heads / p.num_k_heads : 1;
  GDN_PROFILED(profile::Target target; if (const int status = attach(target, grid, 32 * kWarps)) return status;)
  return launch_allowed<whole_kernel<T, ST, UNIT, MANY, DEPTH>>({grid, dim3(32 * kWarps), bytes, stream, overlap, cluster},
                                                                  optin, p GDN_PROFILED(, target));
}

// ---- one token, offsets of 32 bits ----

// Whether all offsets fit in 32 bits; then `small` holds p.
inline bool make_small(const gdn_rule_params &p, SmallParams *small) {
  bool fits = true;
  const int64_t most = 0xffffffffLL;
  auto rows = [&](const gdn_heads &x, int64_t heads, int64_t dim) {
    fits = fits && x.seq_stride <= most && x.head_stride <= most &&
           x.seq_stride * (p.seqs.num_seqs - 1) + x.head_stride * (heads - 1) + dim <= most;
    return Rows{x.ptr, static_cast<uint32_t>(x.seq_stride), static_cast<uint32_t>(x.head_stride)};
  };
  auto pool = [&](const gdn_slots &s) {
    fits = fits && s.slot_stride <= most;
    return Pool{s.slots, static_cast<uint32_t>(s.num_slots < most ? s.num_slots : most),
                static_cast<uint32_t>(s.slot_stride)};
  };
  const uint32_t ratio = static_cast<uint32_t>(p.num_v_heads / p.num_k_heads);
  *small = {p.state_in, p.state_out, pool(p.in_slots), pool(p.out_slots),
            rows(p.q, p.num_k_heads, kDim), rows(p.k, p.num_k_heads, kDim), rows(p.v, p.num_v_heads, kDim),
            rows(p.a, p.num_v_heads, 1), rows(p.b, p.num_v_heads, 1), rows(p.o, p.num_v_heads, kDim),
            p.a_log, static_cast<const float *>(p.dt_bias), p.token_states,
            {ratio, static_cast<uint32_t>(((1ull << 32) + ratio - 1) / ratio)}, static_cast<uint32_t>(p.num_v_heads),
            p.l2norm, p.l2_eps, p.scale, p.beta_scale};
  return fits && p.seqs.num_seqs <= 65535 && p.num_v_heads <= 65535 &&
         (p.gate_dtype == p.io_dtype || p.gate_dtype == GDN_F32);
}

inline bool make_small(const FusedParams &p, SmallFused *small) {
  const int64_t most = 0xffffffffLL;
  bool fits = make_small(p, static_cast<SmallParams *>(small));
  // split_kernel takes all channels of a token from q on.
  fits = fits && p.conv_in_stride <= most && p.conv_out_stride <= most && p.z.seq_stride <= most &&
         p.z.head_stride <= most && p.q.seq_stride * (p.seqs.num_seqs - 1) + p.channels <= most &&
         p.z.seq_stride * p.seqs.num_seqs + p.z.head_stride * p.num_v_heads <= most;
  small->z = {p.z.ptr, static_cast<uint32_t>(p.z.seq_stride), static_cast<uint32_t>(p.z.head_stride)};
  small->conv_weight = p.conv_weight, small->norm_weight = p.norm_weight;
  small->conv_in = p.conv_in, small->conv_out = p.conv_out;
  small->conv_in_stride = static_cast<uint32_t>(p.conv_in_stride);
  small->conv_out_stride = static_cast<uint32_t>(p.conv_out_stride);
  small->channels = static_cast<uint32_t>(p.channels), small->keys = static_cast<uint32_t>(p.num_k_heads * kDim);
  small->conv_dtype = p.conv_dtype, small->norm_dtype = p.norm_dtype;
  small->sigmoid = p.sigmoid, small->overlap = p.overlap, small->norm_eps = p.norm_eps;
  return fits;
}

// fn(Type<G>) for the gates' type, where it is T or f32.
template <typename T, typename F> int with_gate(int gate_dtype, F &&fn) {
  if (!std::is_same_v<T, float> && gate_dtype != GDN_F32) return fn(Type<T>{});
  return fn(Type<float>{});
}

template <typename T, typename ST, int ROWS, int WARPS>
int launch_warp(const gdn_rule_params &p, const SmallParams &small, cudaStream_t stream) {
  const dim3 grid(kDim / (kGroups * ROWS * WARPS), small.heads, static_cast<unsigned>(p.seqs.num_seqs));
  return with_gate<T>(p.gate_dtype, [&](auto gate) {
    using G = typename decltype(gate)::type;
    GDN_PROFILED(profile::Target target; if (const int status = attach(target, grid, 32 * WARPS)) return status;)
    return gdn::launch(warp_kernel<T, G, ST, ROWS, WARPS>, {grid, dim3(32 * WARPS), 0, stream}, small GDN_PROFILED(, target));
  });
}

template <typename T, typename ST, int ROWS>
int launch_split(const FusedParams &p, const SmallFused &small, cudaStream_t stream) {
  const int blocks = p.num_v_heads / p.num_k_heads * (kDim / (kSplitWarps * kGroups * ROWS));
  const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(p.num_k_heads),
                  static_cast<unsigned>(p.seqs.num_seqs));
  return with_gate<T>(p.gate_dtype, [&](auto gate) {
    using G = typename decltype(gate)::type;
    GDN_PROFILED(profile::Target target; if (const int status = attach(target, grid, 32 * kSplitWarps)) return status;)
    return gdn::launch(split_kernel<T, G, ST, ROWS>, {grid, dim3(32 * kSplitWarps), 0, stream, p.overlap != 0, blocks},
                       small GDN_PROFILED(, target));
  });
}

}  // namespace step
}  // namespace gdn
