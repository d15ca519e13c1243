#include "prompt_launch.cuh"

namespace gdn::attention {

int launch_prompt_bf16(const gdn_attention_params &p, const Plan &plan, const PromptMaps &maps, int optin, cudaStream_t stream) {
  return launch_prompt_as<__nv_bfloat16>(p, plan, maps, optin, stream);
}

}  // namespace gdn::attention
