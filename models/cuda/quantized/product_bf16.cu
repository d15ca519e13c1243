#include "launch.cuh"

namespace gdn {
namespace quantized {
template int run_product<__nv_bfloat16>(const Args &, const LaunchConfig &, int);
}  // namespace quantized
}  // namespace gdn
