// The chunk form on tensor cores for bf16 inputs.
#include "launch.cuh"

int gdn::prefill::launch_bf16(const gdn_rule_params &p, const Schedule &s, bool sm90, cudaStream_t stream) {
  return launch_as<__nv_bfloat16>(p, s, sm90, stream);
}
