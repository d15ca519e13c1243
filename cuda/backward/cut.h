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
  bool beside;    // whether the gradients kernel begins beside the walks, which have one segment then
};

// The time of a launch, a middle segment of one block being 1: blocks of the first and the last segment begin first, those of the others
// fill the multiprocessors that are idle.
inline int64_t rounds_of(int64_t of_ends, int64_t of_middle, int32_t ends, int64_t sms) {
  const int64_t rounds = ceil_div(of_ends, sms), left = of_middle - ends * (rounds * sms - of_ends);
  return ends * rounds + (left > 0 ? ceil_div(left, sms) : 0);
}

// The cut of sequences of `longest` chunks that takes the least time. They stay whole where the two walks have more blocks than there are
// multiprocessors, or where `segments` is 1 and not 0. `blocks`: of one walk of whole sequences. Middle segments are
// walked in both launches, in the first one with `transfer_blocks` each beside them. Time is counted in chunks of a block that has a
// multiprocessor to itself. `wgmma`: the gradients kernel can begin beside the walks.
inline Cut cut_of(int64_t blocks, int64_t transfer_blocks, int64_t longest, int64_t sms, int32_t segments, bool wgmma) {
  constexpr int64_t kCombineChunks = 16, kBesideChunks = 4, kLeastBeside = 32;    // measured; segments take two launches more
  constexpr int32_t kMostChosen = 8, kMostEnds = 4;
  Cut best = {1, 1, false};
  if (2 * blocks > sms) return best;
  // What the gradients kernel takes in all, a multiprocessor each. It can begin when the walks have met in the middle.
  const int64_t gradients = 7 * 2 * blocks * longest / 8;
  int64_t least = longest + gradients / sms;
  if (wgmma && longest >= kLeastBeside && 6 * blocks > sms && 8 * blocks <= 3 * sms) {
    const int64_t left = gradients - (sms - 2 * blocks) * longest / 2, chunks = longest + longest / 32 + kBesideChunks + (left > 0 ? left / sms : 0);
    if (chunks < least) least = chunks, best.beside = true;
  }
  if (segments == 1) return best;
  for (int32_t n = 3; n <= kMostChosen; ++n)
    for (int32_t ends = 1; ends <= kMostEnds; ++ends) {
      const int64_t middle = n - 2, first = rounds_of(2 * blocks, middle * (2 * blocks + transfer_blocks), ends, sms);
      const int64_t second = rounds_of(2 * blocks, middle * 2 * blocks, ends, sms);
      const int64_t chunks = (first + second) * ceil_div(longest, middle + 2 * ends) + kCombineChunks + gradients / sms;
      if (chunks < least) least = chunks, best = {n, ends, false};
    }
  return best;
}

}  // namespace backward
}  // namespace gdn
