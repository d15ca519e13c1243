// Host side: the grid of the kernel for prompts.
#pragma once

#include "common/launch.cuh"
#include "prompt.cuh"

namespace gdn {
namespace attention {

template <typename T, int DIM>
int launch_prompt(const gdn_attention_params &p, const Plan &plan, const PromptMaps &maps, int optin, cudaStream_t stream) {
  using S = Prompt<DIM>;
  const int64_t blocks = prompt_tiles(p, int64_t{plan.max_tokens} * plan.group.value, kPromptRows);
  const LaunchConfig how = {dim3(static_cast<unsigned>(blocks)), dim3(S::kThreads), sizeof(typename S::Shared), stream,
                            plan.overlap};
  return p.cache.window > 0 ? launch_allowed<prompt_kernel<T, DIM, true>>(how, optin, p, plan, maps)
                            : launch_allowed<prompt_kernel<T, DIM, false>>(how, optin, p, plan, maps);
}

template <typename T>
int launch_prompt_as(const gdn_attention_params &p, const Plan &plan, const PromptMaps &maps, int optin, cudaStream_t stream) {
  if (p.head_dim <= 64) return launch_prompt<T, 64>(p, plan, maps, optin, stream);
  if (p.head_dim <= 128) return launch_prompt<T, 128>(p, plan, maps, optin, stream);
  return launch_prompt<T, 256>(p, plan, maps, optin, stream);
}

}  // namespace attention
}  // namespace gdn
