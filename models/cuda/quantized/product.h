// The launch of a dtype, in product_bf16.cu and product_f16.cu.
#pragma once

#include "common/launch.cuh"
#include "kernel.cuh"

namespace gdn {
namespace quantized {

// The clusters that the current device runs at once.
int clusters_at_once(int optin, int *count);

template <typename T> int run_product(const Args &args, const LaunchConfig &config, int optin);

}  // namespace quantized
}  // namespace gdn
