// The router's logits: launches.
#include "common/launch.cuh"
#include "scores.cuh"

namespace gdn {
namespace moe {

// A call of more tokens is slower when it overlaps the kernel before it: 8192 tokens need 1725 us, and 1603 us in a graph where
// the call begins after it (README.md).
constexpr int kBrief = 1024;

template <typename T> int run_scores(const gdn_moe_params &p, const Args &args, cudaStream_t stream) {
  LaunchConfig config;
  config.stream = stream;
  config.overlap = p.overlap > 0 && p.tokens <= kBrief;
  const unsigned splits = static_cast<unsigned>(score_splits(p));
  if (p.tokens <= kFewScored) {
    config.grid = dim3(static_cast<unsigned>(ceil_div(args.scored, kScoreRows)), splits);
    config.block = dim3(kScoreThreads);
    const auto kernel = p.tokens <= 8    ? few_scores_kernel<T, 1>
                        : p.tokens <= 16 ? few_scores_kernel<T, 2>
                        : p.tokens <= 32 ? few_scores_kernel<T, 4>
                                         : few_scores_kernel<T, 8>;
    return launch(kernel, config, args);
  }
  int optin = 0;
  if (const int status = shared_limit(&optin)) return status;
  static_assert(kGemmLeastStages * kGemmStageBytes <= kLeastShared, "a shape for every card");
  config.grid = dim3(static_cast<unsigned>(ceil_div(p.tokens, kGemmTokens) * ceil_div(args.scored, kGemmRows)), splits);
  config.block = dim3(kGemmThreads);
  config.shared_bytes = kGemmStages * kGemmStageBytes;
  if (config.shared_bytes <= optin) return launch_allowed<scores_kernel<T, kGemmStages>>(config, optin, args);
  config.shared_bytes = kGemmLeastStages * kGemmStageBytes;
  return launch_allowed<scores_kernel<T, kGemmLeastStages>>(config, optin, args);
}

template int run_scores<__nv_bfloat16>(const gdn_moe_params &, const Args &, cudaStream_t);
template int run_scores<__half>(const gdn_moe_params &, const Args &, cudaStream_t);

}  // namespace moe
}  // namespace gdn
