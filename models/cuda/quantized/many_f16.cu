#include "many.cuh"

namespace gdn {
namespace quantized {
template int run_many<__half>(ManyArgs, int, const LaunchConfig &, int, int, bool);
}  // namespace quantized
}  // namespace gdn
