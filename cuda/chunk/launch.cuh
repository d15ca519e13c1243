// What the launchers of both scans share.
#pragma once

#include "../common/launch.cuh"
#include "plan.h"

namespace gdn {
namespace chunk {

// Value rows of a block.
inline int32_t scan_rows(const Schedule &s, Pass pass) { return pass == kFirst ? s.first_rows : s.tile_rows; }

// Blocks of a pass; with kFirst also those of kTransfer.
inline int64_t scan_blocks(const gdn_rule_params &p, const Schedule &s, Pass pass) {
  const int32_t rows = scan_rows(s, pass);
  const int64_t tiles = ceil_div(p.common.head_v, rows), others = s.mixed ? p.common.seqs.num_seqs * tiles : 0;
  int64_t blocks = s.slots;    // of a head
  if (pass == kFirst) blocks = s.slots * (tiles + (s.segments - 2) * (tiles + ceil_div(p.common.head_k, rows))) + others;
  else if (s.segments > 1) blocks = s.slots * tiles * (s.segments - 1);
  else blocks = s.slots * tiles + others;
  return blocks * p.common.num_v_heads;
}

inline int scan_grid(int64_t blocks, LaunchConfig *c) {
  if (blocks > kMaxBlocks) return GDN_BAD_LENGTH;
  c->grid = dim3(static_cast<unsigned>(blocks));
  return GDN_OK;
}

}  // namespace chunk
}  // namespace gdn
