// The launches of the kernel for sm_90a, for one input and state type.
#pragma once

#include "../common/launch.cuh"
#include "kernel90.cuh"
#include "launch.cuh"
#include "maps.h"

namespace gdn {
namespace chunk {

template <typename T, typename ST, int KK, int NM, Pass PASS>
int launch_scan90(const gdn_rule_params &p, Plan plan, const Maps &maps, LaunchConfig c, int optin) {
  using S = Shape90<KK, NM>;
  c.block = dim3(S::kThreads);
  c.shared_bytes = sizeof(typename S::Shared);
  GDN_PROFILED(if (const int status = profile::attach(plan.profile, c.grid.x, S::kThreads)) return status;)
  return launch_allowed<sm90_kernel<T, ST, KK, NM, PASS>>(c, optin, p, plan, maps);
}

// The rounds of `jobs`, and their flags as they begin.
inline int begin_rounds(const gdn_rule_params &p, const Schedule &s, int64_t jobs, Rounds *rounds, cudaStream_t stream) {
  *rounds = {static_cast<int32_t>(jobs), s.places, s.split_bytes > 0, nullptr, nullptr};
  if (!rounds->split) return GDN_OK;
  uint8_t *memory = static_cast<uint8_t *>(p.workspace) + s.record_bytes + s.transfer_bytes + s.border_bytes;
  const int64_t flags = s.places * 8 * int64_t{sizeof(uint32_t)};
  rounds->flags = reinterpret_cast<uint32_t *>(memory);
  rounds->states = reinterpret_cast<float *>(memory + flags);
  return cuda_status(cudaMemsetAsync(memory, 0, static_cast<size_t>(flags), stream));
}

template <typename T, typename ST, Pass PASS>
int launch_pass90(const gdn_rule_params &p, const Schedule &s, Plan plan, const Maps &maps, cudaStream_t stream) {
  const int32_t rows = scan_rows(s, PASS);
  int64_t blocks = scan_blocks(p, s, PASS);
  plan.v_tiles = static_cast<int32_t>(ceil_div(p.common.head_v, rows));
  if (PASS == kSeveral) {
    if (const int status = begin_rounds(p, s, blocks, &plan.rounds, stream)) return status;
    blocks = s.places;
  }
  int optin = 0;
  if (const int status = shared_limit(&optin)) return status;
  LaunchConfig c;
  if (const int status = scan_grid(blocks, &c)) return status;
  c.stream = stream;
  // The first pass overlaps the choice of the borders, the last one the combination.
  c.overlap = s.segments > 1 && (PASS == kWhole || s.border_bytes > 0);
  if (p.common.head_k <= 64) return launch_scan90<T, ST, 64, 1, PASS>(p, plan, maps, c, optin);
  return rows == 128 ? launch_scan90<T, ST, 128, 2, PASS>(p, plan, maps, c, optin)
                     : launch_scan90<T, ST, 128, 1, PASS>(p, plan, maps, c, optin);
}

template <typename T, typename ST>
int launch_sm90(const gdn_rule_params &p, const Schedule &s, const Plan &plan, const Maps &maps, Pass pass, cudaStream_t stream) {
  if (pass == kFirst) return launch_pass90<T, ST, kFirst>(p, s, plan, maps, stream);
  return pass == kSeveral ? launch_pass90<T, ST, kSeveral>(p, s, plan, maps, stream) : launch_pass90<T, ST, kWhole>(p, s, plan, maps, stream);
}

}  // namespace chunk
}  // namespace gdn
