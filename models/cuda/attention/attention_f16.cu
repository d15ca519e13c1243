#include "launch.cuh"

namespace gdn::attention {

int launch_f16(const gdn_attention_params &p, const Plan &plan, const Kernel &kernel, int optin, cudaStream_t stream) {
  return launch_mma<__half>(p, plan, kernel, optin, stream);
}

}  // namespace gdn::attention
