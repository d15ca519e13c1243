// How a call is cut up into segments, blocks and rounds.
#pragma once

#include "../gdn.h"

namespace gdn {
namespace prefill {

// How a sequence of `longest` chunks is cut, so that all is done first.
struct Cut {
  int64_t segments = 1, first = 1, others = 1;
  bool wide = false, wide_first = false;    // forms of the scan and of the first pass
  bool rounds = false, cut = false;         // a block goes through several heads; some cut in two
};

// That of sequences of up to `longest` chunks, at least one of them; `has_wide`: there are blocks of 128 value rows.
Cut choose_cut(const gdn_rule_params &p, int64_t longest, bool sm90, int sms, bool has_wide);

}  // namespace prefill
}  // namespace gdn
