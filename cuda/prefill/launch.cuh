// The launches of a call, for one input type.
#pragma once

#include "../common/launch.cuh"
#include "context.cuh"
#include "maps.h"
#include "plan.h"
#include "prepare.cuh"
#include "sm80.cuh"
#include "sm90.cuh"

namespace gdn {
namespace prefill {

inline int64_t scan_blocks(const gdn_rule_params &p, const Schedule &s, Pass pass) {
  const int32_t rows = pass == kWhole ? s.tile_rows : s.transfer_rows;
  const int64_t tiles = ceil_div(p.head_v, rows) + (pass == kWhole ? 0 : ceil_div(p.head_k, rows));
  return tiles * p.num_v_heads * p.seqs.num_seqs * (pass == kWhole ? s.segments : s.segments - 1);
}

template <typename T, typename ST, int KK, Pass PASS>
int launch_scan(const gdn_rule_params &p, const Schedule &s, Plan plan, const MapsOut *maps, bool overlap, int optin, cudaStream_t stream) {
  constexpr int kWide = KK == 128 ? 2 : 1;    // warpgroups of the wide form, where there is one
  const int32_t rows = PASS == kWhole ? s.tile_rows : s.transfer_rows;
  plan.v_tiles = static_cast<int32_t>(ceil_div(p.head_v, rows));
  LaunchConfig c;
  c.stream = stream;
  c.overlap = overlap;
  const int64_t blocks = scan_blocks(p, s, PASS);
  if (blocks > kMaxBlocks) return GDN_BAD_LENGTH;
  c.grid = dim3(static_cast<unsigned>(blocks));
  if (maps) {
    if (rows == 128) {
      using S = Shape90<KK, kWide>;
      c.block = dim3(S::kThreads);
      c.shared_bytes = sizeof(typename S::Shared);
      return launch_allowed<sm90_kernel<T, ST, KK, kWide, PASS>>(c, optin, p, plan, *maps);
    }
    using S = Shape90<KK, 1>;
    c.block = dim3(S::kThreads);
    c.shared_bytes = sizeof(typename S::Shared);
    return launch_allowed<sm90_kernel<T, ST, KK, 1, PASS>>(c, optin, p, plan, static_cast<const Maps &>(*maps));
  }
  c.block = dim3(2 * rows);
  if (rows == 128) {
    constexpr int kWarps = PASS == kWhole ? 4 * kWide : 4;
    c.shared_bytes = sizeof(Shared80<KK, kWarps>);
    return launch_allowed<sm80_kernel<T, ST, KK, kWarps, PASS>>(c, optin, p, plan);
  }
  c.shared_bytes = sizeof(Shared80<KK, 4>);
  return launch_allowed<sm80_kernel<T, ST, KK, 4, PASS>>(c, optin, p, plan);
}

template <typename T, int KK, int GROUPS>
int launch_prepare(const gdn_rule_params &p, const Schedule &s, Record *records, int optin, cudaStream_t stream) {
  LaunchConfig c;
  c.stream = stream;
  const int64_t blocks = s.chunks * p.num_k_heads;
  if (blocks > kMaxBlocks) return GDN_BAD_LENGTH;
  c.grid = dim3(static_cast<unsigned>(blocks));
  c.block = dim3(128 * GROUPS);
  c.shared_bytes = sizeof(PrepareShared<KK, GROUPS>);
  return launch_allowed<prepare_kernel<T, KK, GROUPS>>(c, optin, p, records);
}

template <typename ST, int KK>
int launch_combine(const gdn_rule_params &p, const Plan &plan, int optin, cudaStream_t stream) {
  LaunchConfig c;
  c.stream = stream;
  c.overlap = true;
  const int64_t blocks = ceil_div(p.head_v, kCombineRows) * p.num_v_heads * p.seqs.num_seqs;
  if (blocks > kMaxBlocks) return GDN_BAD_LENGTH;
  c.grid = dim3(static_cast<unsigned>(blocks));
  c.block = dim3(kCombineThreads<KK>);
  c.shared_bytes = sizeof(CombineShared<KK>);
  return launch_allowed<combine_kernel<ST, KK>>(c, optin, p, plan);
}

template <typename T, typename ST, int KK>
int launch_all(const gdn_rule_params &p, const Schedule &s, bool sm90, cudaStream_t stream) {
  int optin = 0;
  if (const int status = device_attribute<cudaDevAttrMaxSharedMemoryPerBlockOptin>(&optin)) return status;
  Plan plan = {};
  plan.segments = s.segments;
  plan.segment_chunks = s.segment_chunks;
  plan.keep_state = state_in_place(p.state_in, p.state_out, p.in_slots, p.out_slots);
  Record *records = static_cast<Record *>(p.workspace);
  plan.records = records;
  plan.transfers = reinterpret_cast<float *>(static_cast<uint8_t *>(p.workspace) + s.record_bytes);

  MapsOut made;
  const MapsOut *maps = nullptr;
  if (sm90) {
    if (const int status = make_maps(p, &made)) return status;
    maps = &made;
  } else if (s.chunks > 0) {
    const int status = p.num_v_heads > p.num_k_heads ? launch_prepare<T, KK, 2>(p, s, records, optin, stream)
                                                     : launch_prepare<T, KK, 1>(p, s, records, optin, stream);
    if (status) return status;
  }
  if (s.segments > 1) {
    if (const int status = launch_scan<T, float, KK, kTransfer>(p, s, plan, maps, !sm90, optin, stream)) return status;
    if (const int status = launch_combine<ST, KK>(p, plan, optin, stream)) return status;
  }
  return launch_scan<T, ST, KK, kWhole>(p, s, plan, maps, !sm90 || s.segments > 1, optin, stream);
}

template <typename T> int launch_as(const gdn_rule_params &p, const Schedule &s, bool sm90, cudaStream_t stream) {
  return with_state_dtype(p.state_dtype, [&](auto state) {
    using ST = typename decltype(state)::type;
    return p.head_k > 64 ? launch_all<T, ST, 128>(p, s, sm90, stream) : launch_all<T, ST, 64>(p, s, sm90, stream);
  });
}

}  // namespace prefill
}  // namespace gdn
