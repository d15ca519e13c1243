// The recurrent backward pass for inputs of 16 bits.
#include "recurrent_chunk.cuh"

namespace gdn {
namespace backward {

template int launch_factors<Any16>(const gdn_rule_backward_params &, const Plan &, cudaStream_t);
template int launch_borders<Any16>(const gdn_rule_backward_params &, const Plan &, cudaStream_t);
template int launch_section<Any16>(const gdn_rule_backward_params &, const Plan &, cudaStream_t);

}  // namespace backward
}  // namespace gdn
