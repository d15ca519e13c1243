// The product of many rows, between product.cu and its launches.
#pragma once

#include "common/launch.cuh"

namespace gdn {
namespace quantized {

constexpr int kMostBlocks = 8;    // of a cluster

struct ManyArgs {
  const char *w;
  const void *x;
  void *y;
  int64_t x_row, y_stride;     // bytes; elements
  int32_t outputs, column;     // of y: how many, and the first
  int32_t tiles, units;        // of 16 outputs; of a tile's inputs
  int32_t up;                  // with swiglu: tiles from a gate's to up's of the same outputs, else 0
  int32_t rows, cluster;
};

// Of bf16 and f16, any number of rows. `clusters`: whether blocks may form some.
template <typename T> int run_many(ManyArgs args, int type, const LaunchConfig &config, int sms, int optin, bool clusters);

}  // namespace quantized
}  // namespace gdn
