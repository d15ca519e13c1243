// Few tokens: launches.
#include "common/launch.cuh"
#include "few.cuh"

namespace gdn {
namespace moe {

// Kernels of ours wait for one another, so that all but the first overlap whatever the caller says.
template <typename T, typename W> int run_experts(const gdn_moe_params &p, const Args &args, cudaStream_t stream) {
  int sms = 0, optin = 0;
  if (const int status = sm_count(&sms)) return status;
  if (const int status = shared_limit(&optin)) return status;
  LaunchConfig config;
  config.stream = stream;
  if (const int status = run_scores<T>(p, args, stream)) return status;
  config.overlap = p.overlap >= 0;
  if (p.tokens > 1) {
    const int each = table_tokens(p.tokens);
    config.grid = dim3(static_cast<unsigned>(ceil_div(p.tokens, each)));
    config.block = dim3(kSortThreads);
    if (const int status = launch(table_kernel, config, args, each)) return status;
    config.overlap = p.overlap >= 0;
  }

  if (p.quantized) return run_packed<T>(p, args, config.overlap, stream);
  // As many groups as there may be.
  const int64_t tiles = static_cast<int64_t>(p.tokens) * p.top_k * (p.inner / kOutputs) +
                        ceil_div(p.tokens, kGroup) * (p.shared_inner / kOutputs);
  constexpr int kWarps = Stored<W>::kWarps;
  constexpr bool kScaled = Stored<W>::kScaled;
  const bool one = kScaled && p.tokens == 1;
  config.block = dim3(32 * kWarps);
  config.shared_bytes = kGateUpSums<W> + table_bytes(args);
  int64_t resident = 16 / kWarps;    // blocks of a multiprocessor
  bool kept = p.hidden <= kWarps * kChunks * Stored<W>::kChunk;
  if constexpr (kScaled) {
    const int64_t bytes = config.shared_bytes + int64_t{kWarps} * HeldRows::bytes(gate_up_slice<W>(p.hidden), p.tokens < kGroup ? p.tokens : kGroup);
    int of_sm = 0;
    if (const int status = shared_of_sm(&of_sm)) return status;
    const int64_t fit = of_sm / (bytes + 1024);    // the device keeps 1 KB for each block
    kept = fit > 1;                                // with one block there would be too few warps
    if (kept) config.shared_bytes = bytes;
    if (kept && fit < resident) resident = fit;
  }
  resident *= sms;
  config.grid = dim3(static_cast<unsigned>(tiles < resident ? tiles : resident));
  const auto gate_up = kept ? gate_up_kernel<T, W, true> : gate_up_kernel<T, W, false>;
  if (const int status = allow_shared_memory(gate_up, config.shared_bytes, optin)) return status;
  if (const int status = launch(gate_up, config, args)) return status;

  config.overlap = p.overlap >= 0;
  config.grid = dim3(static_cast<unsigned>(p.hidden / kDownOutputs));
  config.block = dim3(kDownThreads);
  config.shared_bytes = down_shared_bytes(p.tokens, p.top_k + (p.shared_inner > 0));
  if constexpr (kScaled) {
    const int64_t of_h = static_cast<int64_t>(p.top_k + 1) * h_shared_bytes(args);
    if (one && config.shared_bytes + of_h <= optin) {
      config.shared_bytes += of_h;
      return launch_allowed<down_kernel<T, W, true>>(config, optin, args);
    }
  }
  return launch_allowed<down_kernel<T, W, false>>(config, optin, args);
}

template <typename T> int run_few(const gdn_moe_params &p, const Args &args, cudaStream_t stream) {
  return p.gate_up_scales.ptr ? run_experts<T, E4m3>(p, args, stream) : run_experts<T, T>(p, args, stream);
}

template int run_few<__nv_bfloat16>(const gdn_moe_params &, const Args &, cudaStream_t);
template int run_few<__half>(const gdn_moe_params &, const Args &, cudaStream_t);

}  // namespace moe
}  // namespace gdn
