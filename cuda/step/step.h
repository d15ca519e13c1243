// The choice of gdn_step, and its launches. One translation unit an input type, so that they compile side by side.
#pragma once

#include "fused.h"

namespace gdn {
namespace step {

struct Choice {
  int algo = GDN_STEP_AUTO;    // none
  int rows = 1;                // of GDN_STEP_SPLIT, a lane group
  int depth = 4;               // of GDN_STEP_HEADS
  int blocks = 0;              // a multiprocessor at most, but for GDN_STEP_SPLIT
  bool overlap = false;
};

template <typename T> int launch_step_as(const FusedParams &p, const Choice &choice, cudaStream_t stream);

}  // namespace step
}  // namespace gdn
