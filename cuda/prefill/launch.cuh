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

// With PASS kFirst also those of kTransfer.
template <Pass PASS> int64_t scan_blocks(const gdn_rule_params &p, const Schedule &s, int32_t rows) {
  const int64_t heads = int64_t{p.seqs.num_seqs} * p.num_v_heads, tiles = ceil_div(p.head_v, rows);
  if (PASS != kFirst) return heads * tiles * (s.segments > 1 ? s.segments - 1 : 1);
  return heads * (tiles + (s.segments - 2) * (tiles + ceil_div(p.head_k, rows)));
}

// The rounds of `jobs`, and their flags as they begin.
inline int begin_rounds(const gdn_rule_params &p, const Schedule &s, int64_t jobs, Rounds *rounds, cudaStream_t stream) {
  *rounds = {static_cast<int32_t>(jobs), s.places, s.cut_bytes > 0, nullptr, nullptr};
  if (!rounds->cut) return GDN_OK;
  uint8_t *memory = static_cast<uint8_t *>(p.workspace) + s.record_bytes + s.transfer_bytes;
  const int64_t flags = s.places * 8 * int64_t{sizeof(uint32_t)};
  rounds->flags = reinterpret_cast<uint32_t *>(memory);
  rounds->states = reinterpret_cast<float *>(memory + flags);
  return cuda_status(cudaMemsetAsync(memory, 0, static_cast<size_t>(flags), stream));
}

template <typename T, typename ST, int KK, Pass PASS>
int launch_scan(const gdn_rule_params &p, const Schedule &s, Plan plan, const Maps *maps, bool overlap, int optin, cudaStream_t stream) {
  constexpr int kWide = KK == 128 ? 2 : 1;    // warpgroups of the wide form, where there is one
  const int32_t rows = PASS == kFirst ? s.first_rows : s.tile_rows;
  plan.v_tiles = static_cast<int32_t>(ceil_div(p.head_v, rows));
  LaunchConfig c;
  c.stream = stream;
  c.overlap = overlap;
  int64_t blocks = scan_blocks<PASS>(p, s, rows);
  if (PASS == kRounds) {
    if (const int status = begin_rounds(p, s, blocks, &plan.rounds, stream)) return status;
    blocks = s.places;
  }
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
    return launch_allowed<sm90_kernel<T, ST, KK, 1, PASS>>(c, optin, p, plan, *maps);
  }
  if constexpr (PASS == kRounds) {
    return GDN_BAD_ALGO;    // of the kernel above alone
  } else {
    c.block = dim3(2 * rows);
    if (rows == 128) {
      constexpr int kWarps = PASS == kWhole ? 4 * kWide : 4;
      c.shared_bytes = sizeof(Shared80<KK, kWarps>);
      return launch_allowed<sm80_kernel<T, ST, KK, kWarps, PASS>>(c, optin, p, plan);
    }
    c.shared_bytes = sizeof(Shared80<KK, 4>);
    return launch_allowed<sm80_kernel<T, ST, KK, 4, PASS>>(c, optin, p, plan);
  }
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

template <int KK, int ROWS, int CLUSTER, int PARTS, bool EXACT>
int launch_combination(const gdn_rule_params &p, const Plan &plan, int optin, cudaStream_t stream) {
  using C = Combination<KK, ROWS, CLUSTER, 1, PARTS, EXACT>;
  LaunchConfig c;
  c.stream = stream;
  c.overlap = true;
  c.cluster = CLUSTER;
  const int64_t blocks = ceil_div(p.head_v, ROWS) * p.num_v_heads * p.seqs.num_seqs * CLUSTER;
  if (blocks > kMaxBlocks) return GDN_BAD_LENGTH;
  c.grid = dim3(static_cast<unsigned>(blocks));
  c.block = dim3(C::kThreads);
  c.shared_bytes = sizeof(typename C::Shared);
  return launch_allowed<combine_kernel<C>>(c, optin, p, plan);
}

// The fewer heads, the more blocks each; which share the columns of M in a cluster. By times on an H200 (README.md).
template <int KK> int launch_combine(const gdn_rule_params &p, const Plan &plan, int optin, cudaStream_t stream) {
  int sms = 0;
  if (const int status = sm_count(&sms)) return status;
  const int64_t heads = static_cast<int64_t>(p.num_v_heads) * p.seqs.num_seqs;
  const auto blocks = [&](int rows, int cluster) { return ceil_div(p.head_v, rows) * heads * cluster; };
  if constexpr (KK == 128) {
    bool clusters = false;
    if (const int status = has_sm90_code(&clusters)) return status;
    if (clusters && p.head_k == KK) {
      if (blocks(16, 2) <= sms) return launch_combination<KK, 16, 2, 2, true>(p, plan, optin, stream);
      if (blocks(32, 2) <= 2 * sms) return launch_combination<KK, 32, 2, 2, true>(p, plan, optin, stream);
      return launch_combination<KK, 64, 2, 1, true>(p, plan, optin, stream);
    }
  }
  return blocks(16, 1) <= sms ? launch_combination<KK, 16, 1, 1, false>(p, plan, optin, stream)
                              : launch_combination<KK, 64, 1, 1, false>(p, plan, optin, stream);
}

template <typename T, typename ST, int KK>
int launch_all(const gdn_rule_params &p, const Schedule &s, bool sm90, cudaStream_t stream) {
  int optin = 0;
  if (const int status = device_attribute<cudaDevAttrMaxSharedMemoryPerBlockOptin>(&optin)) return status;
  Plan plan = {};
  plan.segments = s.segments;
  plan.first_chunks = s.first_chunks;
  plan.segment_chunks = s.segment_chunks;
  plan.keep_state = state_in_place(p.state_in, p.state_out, p.in_slots, p.out_slots);
  Record *records = static_cast<Record *>(p.workspace);
  plan.records = records;
  plan.transfers = reinterpret_cast<float *>(static_cast<uint8_t *>(p.workspace) + s.record_bytes);

  Maps made;
  const Maps *maps = nullptr;
  if (sm90) {
    if (const int status = make_maps(p, &made)) return status;
    maps = &made;
  } else if (s.chunks > 0) {
    const int status = p.num_v_heads > p.num_k_heads ? launch_prepare<T, KK, 2>(p, s, records, optin, stream)
                                                     : launch_prepare<T, KK, 1>(p, s, records, optin, stream);
    if (status) return status;
  }
  if (s.segments > 1) {
    if (const int status = launch_scan<T, ST, KK, kFirst>(p, s, plan, maps, !sm90, optin, stream)) return status;
  }
  if (s.segments > 2) {
    if (const int status = launch_combine<KK>(p, plan, optin, stream)) return status;
  }
  if (s.places > 0) return launch_scan<T, ST, KK, kRounds>(p, s, plan, maps, false, optin, stream);
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
