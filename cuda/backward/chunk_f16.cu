#include "launch.cuh"

namespace gdn {
namespace backward {
template int launch_chunks<__half>(const gdn_rule_backward_params &, const Schedule &, bool, cudaStream_t);
}  // namespace backward
}  // namespace gdn
