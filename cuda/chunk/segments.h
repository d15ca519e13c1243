// How sequences are cut into segments, and blocks go through them.
#pragma once

#include <stdint.h>

#include "../gdn.h"

namespace gdn {
namespace chunk {

// How a sequence of the longest length is cut, so that all is done first.
struct Segments {
  int64_t count = 1, first_chunks = 1, chunks = 1;    // chunks of the first segment, and of each of the others
  bool wide = false, wide_first = false;              // blocks of 128 value rows in the scan, and in the first pass
  bool rounds = false, split = false;                 // a block goes through several heads; some are split in two
  int64_t slots = 0, long_tokens = 0;                 // of Schedule, if it is mixed; 0 slots: it is not
};

// For sequences of up to `longest` chunks, at least one of them; `has_wide`: there are blocks of 128 value rows.
Segments choose_segments(const gdn_rule_params &p, int64_t longest, bool sm90, int sms, bool has_wide);

}  // namespace chunk
}  // namespace gdn
