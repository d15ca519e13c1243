// The chunked kernel for bf16 inputs.
#include "kernel.cuh"

int gdn::launch_chunked_bf16(const gdn_rule_params &p, cudaStream_t stream) {
  return chunked::choose<__nv_bfloat16>(p, stream);
}
