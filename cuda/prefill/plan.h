// The host's decisions for a call of the chunk form on tensor cores, and its kernels' launchers.
#pragma once

#include "../gdn.h"

namespace gdn {
namespace prefill {

struct Schedule {
  int32_t segments;
  int32_t first_chunks, segment_chunks;    // of the first segment, and of the others
  int32_t tile_rows;            // value rows of a block of the scan
  int32_t first_rows;           // and of the first pass, where there is more than one segment
  int32_t places;               // blocks that go through several heads each (scan.cuh); 0: one a block
  int64_t chunks;               // records of a value head
  int64_t record_bytes, transfer_bytes;
  int64_t cut_bytes;            // places: of heads cut in two, if there are

  int64_t bytes() const { return record_bytes + transfer_bytes + cut_bytes; }
};

int make_schedule(const gdn_rule_params &p, bool sm90, Schedule *s);

// The kernels in order. One translation unit an input type, so that they compile side by side.
int launch_bf16(const gdn_rule_params &p, const Schedule &s, bool sm90, cudaStream_t stream);
int launch_f16(const gdn_rule_params &p, const Schedule &s, bool sm90, cudaStream_t stream);

}  // namespace prefill
}  // namespace gdn
