// Into how many segments sequences are cut, which are walked side by side (walker.cuh): plain C++, without CUDA's headers.
#pragma once

#include <stdint.h>

#include "../common/checks.h"

namespace gdn {
namespace backward {

constexpr int32_t kMostSegments = 64;    // that a caller may ask for

struct Cut {
  int32_t segments;    // 1: none
  bool beside;         // whether the gradients kernel begins beside the walks
};

// As many segments, or as `segments` asks for if it is not 0, as give each block of both walks a multiprocessor, while that takes less time
// where most heads forget a state within kWarmUp chunks. Gradients begin beside the walks where these leave a quarter of the multiprocessors
// idle, if only because heads forget nothing. `blocks`: of one walk of whole sequences; `longest`: chunks; `wgmma`: gradients can begin so.
inline Cut cut_of(int64_t blocks, int64_t longest, int64_t sms, int32_t segments, bool wgmma) {
  constexpr int64_t kWarmUp = 8, kCost = 3, kLeastBeside = 32;    // chunks; measured
  constexpr int64_t kMostChosen = 8;
  int64_t n = segments;
  if (n == 0) {
    n = blocks == 0 ? 1 : sms / (2 * blocks) < kMostChosen ? sms / (2 * blocks) : kMostChosen;
    // kWarmUp + (longest - kWarmUp) / n chunks, each of which takes a fifth longer where all multiprocessors are busy.
    if (n < 1 || 6 * ((n - 1) * kWarmUp + longest) + 5 * n * kCost >= 5 * n * longest) n = 1;
  }
  return {static_cast<int32_t>(n), wgmma && longest >= n * kLeastBeside && 8 * blocks <= 3 * sms && 2 * blocks * n <= sms};
}

}  // namespace backward
}  // namespace gdn
