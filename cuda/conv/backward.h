// How the backward pass of the convolution is divided, for backward.cu and the kernels.
#pragma once

#include "../common/host.cuh"

namespace gdn {
namespace conv {

constexpr int kTileChannels = 128;                                           // of a block
constexpr int tile_tokens(int element) { return element == 4 ? 32 : 64; }    // so that six blocks of 16-bit inputs fit a multiprocessor
constexpr int64_t kFewestBlocks = 4096;    // blocks have several tiles where there are more

struct BackwardPlan {
  int64_t rows, tiles;        // of all sequences
  int64_t columns, places;    // blocks over channels, and over tiles
  bool vec;                   // rows are aligned to 16 bytes
};

// One translation unit an input type.
template <typename T> int launch_backward(const gdn_conv_backward_params &p, const BackwardPlan &plan, cudaStream_t stream);

}  // namespace conv
}  // namespace gdn
