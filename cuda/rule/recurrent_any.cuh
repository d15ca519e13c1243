// The launches of GDN_RECURRENT for inputs of 32 or of 16 bits; K is padded to 32, 64, 96, 128 or 256 in registers.
#pragma once

#include "recurrent.cuh"
#include "rule.h"

namespace gdn {
namespace recurrent {

template <typename T, int E> int launch_width(const gdn_rule_params &p, cudaStream_t stream) {
  return max_tokens(p.common.seqs) > kDecodeTokens ? launch_as<T, AnyState, E, 2, false, true>(p, stream)
                                            : launch_as<T, AnyState, E, 2, false, false>(p, stream);
}

template <typename T> int launch_any(const gdn_rule_params &p, cudaStream_t stream) {
  if (p.common.head_k <= 32) return launch_width<T, 4>(p, stream);
  if (p.common.head_k <= 64) return launch_width<T, 8>(p, stream);
  if (p.common.head_k <= 96) return launch_width<T, 12>(p, stream);
  if (p.common.head_k <= 128) return launch_width<T, 16>(p, stream);
  return launch_width<T, 32>(p, stream);
}

}  // namespace recurrent
}  // namespace gdn
