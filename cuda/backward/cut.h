// Into how many pieces sequences are cut that are walked side by side (combine.cuh): plain C++, without CUDA's headers.
#pragma once

#include <stdint.h>

#include "../common/checks.h"

namespace gdn {
namespace backward {

// The first and the last piece are `ends` times as long as the others.
struct Cut {
  int32_t pieces;    // 1: none
  int32_t ends;
};

// Rounds of the length of a middle piece that blocks take, those of the ends first.
inline int64_t rounds_of(int64_t of_ends, int64_t of_middle, int32_t ends, int64_t sms) {
  const int64_t rounds = ceil_div(of_ends, sms), left = of_middle - ends * (rounds * sms - of_ends);
  return ends * rounds + (left > 0 ? ceil_div(left, sms) : 0);
}

// The cut of sequences of `longest` chunks that takes the least time, none where both walks have blocks for all multiprocessors. `blocks`: of
// one walk of whole sequences. A piece is walked twice, the first time with `transfer_blocks` beside it for each middle piece. Time is
// counted in chunks of a block that has a multiprocessor to itself.
inline Cut cut_of(int64_t blocks, int64_t transfer_blocks, int64_t longest, int64_t sms) {
  constexpr int64_t kCombineChunks = 16;    // measured: two launches more, one of which combines pieces
  constexpr int32_t kMostPieces = 8, kMostEnds = 4;
  Cut best = {1, 1};
  if (2 * blocks > sms) return best;
  int64_t least = longest;
  for (int32_t pieces = 3; pieces <= kMostPieces; ++pieces)
    for (int32_t ends = 1; ends <= kMostEnds; ++ends) {
      const int64_t middle = pieces - 2, first = rounds_of(2 * blocks, middle * (2 * blocks + transfer_blocks), ends, sms);
      const int64_t second = rounds_of(2 * blocks, middle * 2 * blocks, ends, sms);
      const int64_t chunks = (first + second) * ceil_div(longest, middle + 2 * ends) + kCombineChunks;
      if (chunks < least) least = chunks, best = {pieces, ends};
    }
  return best;
}

}  // namespace backward
}  // namespace gdn
