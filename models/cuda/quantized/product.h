// The launch of a dtype, in product_bf16.cu and product_f16.cu.
#pragma once

#include "common/launch.cuh"
#include "kernel.cuh"

namespace gdn {
namespace quantized {

// The shared memory of a block beside which another one of as much fits.
inline int half_shared_memory(int *bytes) {
  if (const int status = device_attribute<cudaDevAttrMaxSharedMemoryPerMultiprocessor>(bytes)) return status;
  *bytes = *bytes / 2 - 1024;    // each block takes 1 KB more
  return GDN_OK;
}

// The clusters that the current device runs at once.
int clusters_at_once(int optin, int *count);

template <typename T> int run_product(const Args &args, const LaunchConfig &config, int optin);

}  // namespace quantized
}  // namespace gdn
