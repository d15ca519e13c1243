#include "launch.cuh"

namespace gdn {
namespace quantized {
template int run_product<__half>(const Args &, const LaunchConfig &, int);
}  // namespace quantized
}  // namespace gdn
