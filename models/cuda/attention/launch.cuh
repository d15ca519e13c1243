// Host side: the grid of the attention kernel, and the combination after it.
#pragma once

#include "attention.h"
#include "combine.cuh"
#include "mma.cuh"
#include "scalar.cuh"

namespace gdn {
namespace attention {

template <typename T, bool WINDOW, auto *KERNEL>
int launch_both(const gdn_attention_params &p, const Plan &plan, int64_t bytes, int optin, cudaStream_t stream) {
  const int64_t x = int64_t{plan.splits} * plan.row_tiles;
  if (x > kMaxBlocks) return GDN_BAD_LENGTH;
  const dim3 grid(static_cast<unsigned>(x), static_cast<unsigned>(p.num_kv_heads),
                  static_cast<unsigned>(p.seqs.num_seqs));
  if (const int status = launch_allowed<KERNEL>({grid, dim3(kThreads), bytes, stream, plan.overlap}, optin, p, plan))
    return status;
  return plan.splits > 1 ? launch_combine<T, WINDOW>(p, plan, stream) : GDN_OK;
}

template <typename T, int DIM, int MT, int SLOTS>
int launch_mma(const gdn_attention_params &p, const Plan &plan, int optin, cudaStream_t stream) {
  constexpr Kernel kernel = {DIM, 16 * MT, SLOTS, 2};
  using M = Mma<T, DIM, MT, SLOTS, false>;
  static_assert(MT > 1 || SLOTS > 4 || M::kBytes <= kLeastShared, "a shape for every card");
  static_assert(kernel.bytes() == M::kBytes && kernel.keys() == M::kKeys, "the chooser's sizes are the kernel's");
  return p.cache.window > 0 ? launch_both<T, true, mma_kernel<T, DIM, MT, SLOTS, true>>(p, plan, M::kBytes, optin, stream)
                            : launch_both<T, false, mma_kernel<T, DIM, MT, SLOTS, false>>(p, plan, M::kBytes, optin, stream);
}

template <typename T, int DIM>
int launch_mma(const gdn_attention_params &p, const Plan &plan, const Kernel &kernel, int optin, cudaStream_t stream) {
  if (kernel.rows == 64) return launch_mma<T, DIM, 4, 4>(p, plan, optin, stream);
  if (kernel.rows == 32) return launch_mma<T, DIM, 2, 4>(p, plan, optin, stream);
  if (kernel.slots == 6) return launch_mma<T, DIM, 1, 6>(p, plan, optin, stream);
  return launch_mma<T, DIM, 1, 4>(p, plan, optin, stream);
}

template <typename T>
int launch_mma(const gdn_attention_params &p, const Plan &plan, const Kernel &kernel, int optin, cudaStream_t stream) {
  switch (kernel.dim) {
    case 64: return launch_mma<T, 64>(p, plan, kernel, optin, stream);
    case 128: return launch_mma<T, 128>(p, plan, kernel, optin, stream);
    default: return launch_mma<T, 256>(p, plan, kernel, optin, stream);
  }
}

template <int DIM> int launch_scalar(const gdn_attention_params &p, const Plan &plan, int optin, cudaStream_t stream) {
  using S = Scalar<DIM, false>;
  constexpr Kernel kernel = {DIM, S::kRows, S::kSlots, 4};
  static_assert(S::kBytes <= kLeastShared, "a shape for every card");
  static_assert(kernel.bytes() == S::kBytes && kernel.keys() == S::kKeys, "the chooser's sizes are the kernel's");
  return p.cache.window > 0 ? launch_both<float, true, scalar_kernel<DIM, true>>(p, plan, S::kBytes, optin, stream)
                            : launch_both<float, false, scalar_kernel<DIM, false>>(p, plan, S::kBytes, optin, stream);
}

}  // namespace attention
}  // namespace gdn
