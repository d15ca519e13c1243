// What the launchers of both scans share.
#pragma once

#include "../common/launch.cuh"
#include "plan.h"

namespace gdn {
namespace prefill {

// Value rows of a block.
inline int32_t scan_rows(const Schedule &s, Pass pass) { return pass == kFirst ? s.first_rows : s.tile_rows; }

// Blocks of a pass; with kFirst also those of kTransfer.
inline int64_t scan_blocks(const gdn_rule_params &p, const Schedule &s, Pass pass) {
  const int32_t rows = scan_rows(s, pass);
  const int64_t heads = int64_t{p.seqs.num_seqs} * p.num_v_heads, tiles = ceil_div(p.head_v, rows);
  if (pass != kFirst) return heads * tiles * (s.segments > 1 ? s.segments - 1 : 1);
  return heads * (tiles + (s.segments - 2) * (tiles + ceil_div(p.head_k, rows)));
}

inline int scan_grid(int64_t blocks, LaunchConfig *c) {
  if (blocks > kMaxBlocks) return GDN_BAD_LENGTH;
  c->grid = dim3(static_cast<unsigned>(blocks));
  return GDN_OK;
}

}  // namespace prefill
}  // namespace gdn
