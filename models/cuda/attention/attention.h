// The kernels of gdn_attention by element type, for the chooser in attention.cu.
#pragma once

#include "../gdn_attention.h"

namespace gdn {
namespace attention {

struct Plan;

// One instantiation: heads of up to `dim`, `rows` rows a block, `slots` tiles of 16 KB in shared memory.
struct Kernel {
  int dim, rows, slots;
  int element;     // bytes

  constexpr int keys() const { return 16384 / (dim * element); }
  // Shared memory of a block.
  constexpr int64_t bytes() const {
    const int64_t scores = element == 2 ? rows * (keys() + 8) : keys() * (rows + 4) + rows;
    return int64_t{slots} * 16384 + int64_t{rows} * dim * element + 4 * scores;
  }
};

int launch_bf16(const gdn_attention_params &p, const Plan &plan, const Kernel &kernel, int optin, cudaStream_t stream);
int launch_f16(const gdn_attention_params &p, const Plan &plan, const Kernel &kernel, int optin, cudaStream_t stream);
int launch_f32(const gdn_attention_params &p, const Plan &plan, const Kernel &kernel, int optin, cudaStream_t stream);

}  // namespace attention
}  // namespace gdn
