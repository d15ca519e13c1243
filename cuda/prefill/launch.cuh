// The launches of a call, for one input type.
#pragma once

#include "../common/launch.cuh"
#include "context.cuh"
#include "plan.h"
#include "prepare.cuh"
#include "scan_sm80.cuh"
#include "scan_sm90.cuh"

namespace gdn {
namespace prefill {

constexpr int kStages90 = 3;

inline int64_t scan_blocks(const gdn_rule_params &p, const Schedule &s, Pass pass) {
  const int32_t rows = pass == kWhole ? s.tile_rows : s.transfer_rows;
  const int64_t tiles = ceil_div(p.head_v, rows) + (pass == kWhole ? 0 : ceil_div(p.head_k, rows));
  return tiles * p.num_v_heads * p.seqs.num_seqs * (pass == kWhole ? s.segments : s.segments - 1);
}

template <typename T, typename ST, int KK, Pass PASS>
int launch_scan(const gdn_rule_params &p, const Schedule &s, Plan plan, bool sm90, int optin, cudaStream_t stream) {
  const int32_t rows = PASS == kWhole ? s.tile_rows : s.transfer_rows;
  plan.v_tiles = static_cast<int32_t>(ceil_div(p.head_v, rows));
  LaunchConfig c;
  c.stream = stream;
  c.overlap = true;
  const int64_t blocks = scan_blocks(p, s, PASS);
  if (blocks > kMaxBlocks) return GDN_BAD_LENGTH;
  c.grid = dim3(static_cast<unsigned>(blocks));
  if (sm90) {
    c.block = dim3(2 * rows + 128);
    if (KK == 128 && rows == 128) {
      c.shared_bytes = sizeof(Shared90<KK, 2, kStages90>);
      return launch_allowed<scan_sm90_kernel<T, ST, KK, KK == 128 ? 2 : 1, kStages90, PASS>>(c, optin, p, plan);
    }
    c.shared_bytes = sizeof(Shared90<KK, 1, kStages90>);
    return launch_allowed<scan_sm90_kernel<T, ST, KK, 1, kStages90, PASS>>(c, optin, p, plan);
  }
  c.block = dim3(2 * rows);
  if (KK == 128 && rows == 128) {
    c.shared_bytes = sizeof(Shared80<KK, 8>);
    return launch_allowed<scan_sm80_kernel<T, ST, KK, KK == 128 ? 8 : 4, PASS>>(c, optin, p, plan);
  }
  c.shared_bytes = sizeof(Shared80<KK, 4>);
  return launch_allowed<scan_sm80_kernel<T, ST, KK, 4, PASS>>(c, optin, p, plan);
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

  if (s.chunks > 0) {
    LaunchConfig c;
    c.stream = stream;
    const int64_t blocks = s.chunks * p.num_k_heads;
    if (blocks > kMaxBlocks) return GDN_BAD_LENGTH;
    c.grid = dim3(static_cast<unsigned>(blocks));
    c.block = dim3(kPrepareThreads);
    c.shared_bytes = sizeof(PrepareShared<KK>);
    if (const int status = launch_allowed<prepare_kernel<T, KK>>(c, optin, p, records)) return status;
  }
  if (s.segments > 1) {
    if (const int status = launch_scan<T, float, KK, kTransfer>(p, s, plan, sm90, optin, stream)) return status;
    LaunchConfig c;
    c.stream = stream;
    c.overlap = true;
    const int64_t blocks = ceil_div(p.head_v, kCombineRows) * p.num_v_heads * p.seqs.num_seqs;
    if (blocks > kMaxBlocks) return GDN_BAD_LENGTH;
    c.grid = dim3(static_cast<unsigned>(blocks));
    c.block = dim3(kCombineThreads);
    c.shared_bytes = sizeof(CombineShared<KK>);
    if (const int status = launch_allowed<combine_kernel<ST, KK>>(c, optin, p, plan)) return status;
  }
  return launch_scan<T, ST, KK, kWhole>(p, s, plan, sm90, optin, stream);
}

template <typename T> int launch_as(const gdn_rule_params &p, const Schedule &s, bool sm90, cudaStream_t stream) {
  return with_state_dtype(p.state_dtype, [&](auto state) {
    using ST = typename decltype(state)::type;
    return p.head_k > 64 ? launch_all<T, ST, 128>(p, s, sm90, stream) : launch_all<T, ST, 64>(p, s, sm90, stream);
  });
}

}  // namespace prefill
}  // namespace gdn
