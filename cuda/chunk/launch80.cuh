// The launches of the kernels with mma.sync, for one input type.
#pragma once

#include "../common/launch.cuh"
#include "launch.cuh"
#include "prepare.cuh"
#include "sm80.cuh"

namespace gdn {
namespace chunk {

template <typename T, int KK, int WARPS, Pass PASS>
int launch_scan80(const gdn_rule_params &p, Plan plan, LaunchConfig c, int optin) {
  static_assert(WARPS == 8 || sizeof(Shared80<KK, WARPS>) <= kLeastShared, "a shape for every card");
  c.block = dim3(32 * WARPS);
  c.shared_bytes = sizeof(Shared80<KK, WARPS>);
  GDN_PROFILED(if (const int status = profile::attach(plan.profile, c.grid.x, 32 * WARPS)) return status;)
  return launch_allowed<sm80_kernel<T, KK, WARPS, PASS>>(c, optin, p, plan);
}

template <typename T> int launch_sm80(const gdn_rule_params &p, const Schedule &s, const Plan &schedule, Pass pass, cudaStream_t stream) {
  Plan plan = schedule;
  plan.v_tiles = static_cast<int32_t>(ceil_div(p.common.head_v, scan_rows(s, pass)));
  int optin = 0;
  if (const int status = shared_limit(&optin)) return status;
  LaunchConfig c;
  if (const int status = scan_grid(scan_blocks(p, s, pass), &c)) return status;
  c.stream = stream;
  // The scan reads states before it waits: only the launch of prepare, which waits for all before it, lets it begin early. Without
  // a token there is none.
  c.overlap = s.chunks > 0;
  const bool first = pass == kFirst;
  if (p.common.head_k <= 64)
    return first ? launch_scan80<T, 64, 4, kFirst>(p, plan, c, optin) : launch_scan80<T, 64, 4, kWhole>(p, plan, c, optin);
  if (first) return launch_scan80<T, 128, 4, kFirst>(p, plan, c, optin);
  return s.tile_rows == 128 ? launch_scan80<T, 128, 8, kWhole>(p, plan, c, optin) : launch_scan80<T, 128, 4, kWhole>(p, plan, c, optin);
}

template <typename T, int KK, int GROUPS>
int launch_prepare_as(const gdn_rule_params &p, Record *records, LaunchConfig c) {
  int optin = 0;
  if (const int status = shared_limit(&optin)) return status;
  static_assert(sizeof(PrepareShared<KK, GROUPS>) <= kLeastShared, "a shape for every card");
  c.block = dim3(128 * GROUPS);
  c.shared_bytes = sizeof(PrepareShared<KK, GROUPS>);
  GDN_PROFILED(profile::Target target;
               if (const int status = profile::attach(target, c.grid.x, 128 * GROUPS)) return status;)
  return launch_allowed<prepare_kernel<T, KK, GROUPS>>(c, optin, p, records GDN_PROFILED(, target));
}

template <typename T> int launch_prepare(const gdn_rule_params &p, const Schedule &s, Record *records, cudaStream_t stream) {
  LaunchConfig c;
  if (const int status = scan_grid(s.chunks * p.common.num_k_heads, &c)) return status;
  c.stream = stream;
  const bool several = p.common.num_v_heads > p.common.num_k_heads;
  if (p.common.head_k <= 64)
    return several ? launch_prepare_as<T, 64, 2>(p, records, c) : launch_prepare_as<T, 64, 1>(p, records, c);
  return several ? launch_prepare_as<T, 128, 2>(p, records, c) : launch_prepare_as<T, 128, 1>(p, records, c);
}

}  // namespace chunk
}  // namespace gdn
