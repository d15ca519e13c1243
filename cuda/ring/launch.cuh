// Grids of this folder's kernels.
#pragma once

#include "../common/convert.cuh"
#include "../common/launch.cuh"
#include "../step/launch.cuh"
#include "flush_kernel.cuh"
#include "ring.h"
#include "token.cuh"
#include "tokens.cuh"

namespace gdn {
namespace ring {

// Blocks of `rows` rows of a head.
inline dim3 grid_of(const gdn_common &p, int rows) {
  return dim3(static_cast<unsigned>(p.head_v / rows), static_cast<unsigned>(p.num_v_heads), static_cast<unsigned>(p.seqs.num_seqs));
}

template <typename T, typename ST, int MAX, int K, int V>
int launch_tokens(const gdn_ring_step_params &p, const Sizes &sizes, cudaStream_t stream) {
  using S = TokensShared<T, ST, MAX, K, V>;
  static_assert(sizeof(S) <= kLeastShared, "a shape for every card");
  int optin = 0;
  if (const int status = shared_limit(&optin)) return status;
  return launch_allowed<tokens_kernel<T, ST, MAX, K, V>>(
      {grid_of(p.common, V), dim3(32 * S::kWarps), sizeof(S), stream, p.layer.overlap != 0}, optin, p, sizes);
}

template <typename T> int launch_step(const gdn_ring_step_params &p, int algo, cudaStream_t stream) {
  const Sizes sizes = step::sizes_of(p.common);
  return with_state_dtype(p.common.state_dtype, [&](auto state) {
    using ST = typename decltype(state)::type;
    return step::with_step_dims(p.common, [&](auto dims) {
      constexpr int K = decltype(dims)::kK, V = decltype(dims)::kV;
      static_assert(kSizes<K, V>);
      if (algo == GDN_RING_FMA) {
        constexpr int kBytes = V * K * sizeof(ST);
        return launch_allowed<token_kernel<T, ST, K, V>>(
            {grid_of(p.common, V), dim3(32 * kTokenWarps<V>), kBytes, stream, p.layer.overlap != 0}, kBytes, p, sizes);
      }
      const int32_t tokens = max_tokens(p.common.seqs);
      return tokens <= 4   ? launch_tokens<T, ST, 4, K, V>(p, sizes, stream)
             : tokens <= 8 ? launch_tokens<T, ST, 8, K, V>(p, sizes, stream)
                           : launch_tokens<T, ST, 16, K, V>(p, sizes, stream);
    });
  });
}

template <typename T> int launch_flush(const gdn_ring_flush_params &p, cudaStream_t stream) {
  return with_state_dtype(p.common.state_dtype, [&](auto state) {
    using ST = typename decltype(state)::type;
    return step::with_step_dims(p.common, [&](auto dims) {
      constexpr int K = decltype(dims)::kK, V = decltype(dims)::kV;
      return launch(flush_kernel<T, ST, K, V>, {grid_of(p.common, kFlushRows), dim3(32 * kFlushWarps), 0, stream}, p,
                    step::sizes_of(p.common));
    });
  });
}

}  // namespace ring
}  // namespace gdn
