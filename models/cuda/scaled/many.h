// What scaled.cu asks of many.cu.
#pragma once

#include "../gdn_scaled.h"

namespace gdn {
namespace scaled {

// gdn_scaled of weights in e4m3, and the rows below them, by the kernel of many rows, its parameters checked. `options`: warps and groups are here warpgroups, along the
// inputs and the outputs, two in all. GDN_BAD_ALGO where the device has no such code, or x does not fit into shared memory.
int launch_many(const gdn_scaled_params &p, const gdn_linear_options &options, cudaStream_t stream);

}  // namespace scaled
}  // namespace gdn
