#include "launch.cuh"

namespace gdn::attention {

int launch_bf16(const gdn_attention_params &p, const Plan &plan, const Kernel &kernel, int optin, cudaStream_t stream) {
  return launch_mma<__nv_bfloat16>(p, plan, kernel, optin, stream);
}

}  // namespace gdn::attention
