// Grids of this folder's kernels.
#pragma once

#include "../common/convert.cuh"
#include "../common/launch.cuh"
#include "ring.h"
#include "token.cuh"
#include "tokens.cuh"

namespace gdn {
namespace ring {

template <typename T, typename ST, typename GIVEN>
int launch_token(const GIVEN &p, int num_seqs, cudaStream_t stream, bool overlap = false) {
  constexpr int kWarpRows = kGroups * kTokenRows<ST, GIVEN>;
  const dim3 grid(kDim / (kTokenWarps * kWarpRows), p.heads, static_cast<unsigned>(num_seqs));
  constexpr int kBytes = kTokenWarps * sizeof(typename StateRows<ST, kWarpRows>::Memory);
  const LaunchConfig config = {grid, dim3(32 * kTokenWarps), kBytes, stream, overlap};
  return launch_allowed<token_kernel<T, ST, GIVEN>>(config, kBytes, p);
}

template <typename T, typename ST, int MAX, typename GIVEN>
int launch_tokens(const GIVEN &p, int num_seqs, cudaStream_t stream, bool overlap = false) {
  using S = TokensSharedOf<T, ST, MAX, GIVEN>;
  const dim3 grid(kDim / S::kRows, p.heads, static_cast<unsigned>(num_seqs));
  int optin = 0;
  if (const int status = device_attribute<cudaDevAttrMaxSharedMemoryPerBlockOptin>(&optin)) return status;
  const LaunchConfig config = {grid, dim3(32 * kTokensWarps<ST, MAX, GIVEN>), sizeof(S), stream, overlap};
  if (config.shared_bytes > optin) return GDN_BAD_ALGO;
  return launch_allowed<tokens_kernel<T, ST, MAX, GIVEN>>(config, optin, p);
}

template <typename T, typename ST> int launch_with(const Params &p, int num_seqs, int algo, cudaStream_t stream) {
  switch (algo) {
    case GDN_REPLAY_FMA: return launch_token<T, ST>(p, num_seqs, stream);
    case GDN_REPLAY_MMA:
      return p.tokens <= 4   ? launch_tokens<T, ST, 4>(p, num_seqs, stream)
             : p.tokens <= 8 ? launch_tokens<T, ST, 8>(p, num_seqs, stream)
                             : launch_tokens<T, ST, 16>(p, num_seqs, stream);
  }
  return GDN_BAD_ALGO;
}

template <typename T>
int launch_as(const Params &p, int num_seqs, int state_dtype, int algo, cudaStream_t stream) {
  return with_dtype(state_dtype, [&](auto state) {
    using ST = typename decltype(state)::type;
    return launch_with<T, ST>(p, num_seqs, algo, stream);
  });
}

template <typename T, typename ST>
int launch_step_with(const StepParams &p, int num_seqs, int algo, bool overlap, cudaStream_t stream) {
  switch (algo) {
    case GDN_REPLAY_FMA: return launch_token<T, ST>(p, num_seqs, stream, overlap);
    case GDN_REPLAY_MMA:
      return p.tokens <= 4   ? launch_tokens<T, ST, 4>(p, num_seqs, stream, overlap)
             : p.tokens <= 8 ? launch_tokens<T, ST, 8>(p, num_seqs, stream, overlap)
                             : launch_tokens<T, ST, 16>(p, num_seqs, stream, overlap);
  }
  return GDN_BAD_ALGO;
}

template <typename T>
int launch_step_as(const StepParams &p, int num_seqs, int state_dtype, int algo, bool overlap,
                   cudaStream_t stream) {
  return with_dtype(state_dtype, [&](auto state) {
    using ST = typename decltype(state)::type;
    return launch_step_with<T, ST>(p, num_seqs, algo, overlap, stream);
  });
}

}  // namespace ring
}  // namespace gdn
