#include "launch.cuh"

namespace gdn::attention {

int launch_f32(const gdn_attention_params &p, const Plan &plan, const Kernel &kernel, int optin, cudaStream_t stream) {
  switch (kernel.dim) {
    case 64: return launch_scalar<64>(p, plan, optin, stream);
    case 128: return launch_scalar<128>(p, plan, optin, stream);
    default: return launch_scalar<256>(p, plan, optin, stream);
  }
}

}  // namespace gdn::attention
