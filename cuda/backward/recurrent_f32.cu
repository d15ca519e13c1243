// The recurrent backward pass for inputs of 32 bits.
#include "recurrent_chunk.cuh"

namespace gdn {
namespace backward {

template int launch_factors<float>(const gdn_rule_backward_params &, const Plan &, cudaStream_t);
template int launch_borders<float>(const gdn_rule_backward_params &, const Plan &, cudaStream_t);
template int launch_section<float>(const gdn_rule_backward_params &, const Plan &, cudaStream_t);

}  // namespace backward
}  // namespace gdn
