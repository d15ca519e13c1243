// The chunk form on tensor cores for f16 inputs.
#include "launch.cuh"

int gdn::prefill::launch_f16(const gdn_rule_params &p, const Schedule &s, bool sm90, cudaStream_t stream) {
  return launch_as<__half>(p, s, sm90, stream);
}
