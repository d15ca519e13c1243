#include "launch.cuh"

namespace gdn {
namespace quantized {
int clusters_at_once(int optin, int *count) {
  static PerDevice known;
  return known.get(count, [&](int, int *value) {
    const auto kernel = product_kernel<__nv_bfloat16, 1>;
    if (allow_shared_memory(kernel, optin, optin)) return cudaErrorInvalidValue;
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = kCluster;
    attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(kCluster);
    config.blockDim = dim3(kThreads);
    config.dynamicSmemBytes = static_cast<size_t>(optin);
    config.attrs = &attribute;
    config.numAttrs = 1;
    return cudaOccupancyMaxActiveClusters(value, kernel, &config);
  });
}

template int run_product<__nv_bfloat16>(const Args &, const LaunchConfig &, int);
}  // namespace quantized
}  // namespace gdn
