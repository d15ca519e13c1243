// The chunked kernel for f16 inputs.
#include "kernel.cuh"

int gdn::launch_chunked_f16(const gdn_rule_params &p, cudaStream_t stream) {
  return chunked::choose<__half>(p, stream);
}
