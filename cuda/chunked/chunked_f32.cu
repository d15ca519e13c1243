// The chunked kernel for f32 inputs.
#include "kernel.cuh"

int gdn::launch_chunked_f32(const gdn_rule_params &p, cudaStream_t stream) {
  return chunked::choose<float>(p, stream);
}
