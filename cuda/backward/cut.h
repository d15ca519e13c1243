// Into how many segments sequences are cut, which are walked side by side (combine.cuh): plain C++, without CUDA's headers.
#pragma once

#include <stdint.h>

#include "../common/checks.h"

namespace gdn {
namespace backward {

constexpr int32_t kMostSegments = 64;    // that a caller may ask for

// The first and the last segment are `ends` times as long as the others.
struct Cut {
  int32_t segments;    // 1: none
  int32_t ends;
};

// The time of a launch, a middle segment of one block being 1: blocks of the first and the last segment begin first, those of the others
// fill the multiprocessors that are idle.
inline int64_t rounds_of(int64_t of_ends, int64_t of_middle, int32_t ends, int64_t sms) {
  const int64_t rounds = ceil_div(of_ends, sms), left = of_middle - ends * (rounds * sms - of_ends);
  return ends * rounds + (left > 0 ? ceil_div(left, sms) : 0);
}

// The cut of sequences of `longest` chunks that takes the least time, none where the two walks have more blocks than there are
// multiprocessors. `blocks`: of one walk of whole sequences. Middle segments are walked in both launches, in the first one with
// `transfer_blocks` each beside them. Time is counted in chunks of a block that has a multiprocessor to itself.
inline Cut cut_of(int64_t blocks, int64_t transfer_blocks, int64_t longest, int64_t sms) {
  constexpr int64_t kCombineChunks = 16;    // measured: two launches more, one of which combines segments
  constexpr int32_t kMostChosen = 8, kMostEnds = 4;
  Cut best = {1, 1};
  if (2 * blocks > sms) return best;
  int64_t least = longest;
  for (int32_t segments = 3; segments <= kMostChosen; ++segments)
    for (int32_t ends = 1; ends <= kMostEnds; ++ends) {
      const int64_t middle = segments - 2, first = rounds_of(2 * blocks, middle * (2 * blocks + transfer_blocks), ends, sms);
      const int64_t second = rounds_of(2 * blocks, middle * 2 * blocks, ends, sms);
      const int64_t chunks = (first + second) * ceil_div(longest, middle + 2 * ends) + kCombineChunks;
      if (chunks < least) least = chunks, best = {segments, ends};
    }
  return best;
}

}  // namespace backward
}  // namespace gdn
