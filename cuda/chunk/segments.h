// How sequences are cut into segments.
#pragma once

#include <stdint.h>

#include "../gdn.h"

namespace gdn {
namespace chunk {

// How a sequence of the longest length is cut.
struct Segments {
  int64_t count = 1, first_chunks = 1, chunks = 1;    // chunks of the first segment, and of each of the others
  bool wide = false, wide_first = false;              // blocks of 128 value rows in the scan, and in the first pass
  bool rounds = false, split = false;                 // a block processes several heads; some are split in two
  int64_t slots = 0, long_tokens = 0;                 // of Schedule, if it is mixed; 0 slots: it is not
};

// What blocks of the passes cost, in microseconds, for what the device decides of the borders of segments (borders.cuh).
struct PassCosts {
  float first_chunk, first_begin;          // of the first segment: a chunk; begin and end
  float transfer_chunk, transfer_begin;    // of a transfer
  float chunk;                             // of the segments after the first
};
PassCosts pass_costs(const Segments &s, bool sm90);

// For sequences of up to `longest` chunks; `has_wide`: there are blocks of 128 value rows.
Segments choose_segments(const gdn_rule_params &p, int64_t longest, bool sm90, int sms, bool has_wide);

}  // namespace chunk
}  // namespace gdn
