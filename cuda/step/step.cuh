// The launches of gdn_step for one input type.
#pragma once

#include "plan.cuh"
#include "step.h"

namespace gdn {
namespace step {

template <typename T> int launch_step_as(const FusedParams &p, const Choice &choice, cudaStream_t stream) {
  const bool many = p.seqs.cu_seqlens || p.seqs.tokens_per_seq != 1;
  return with_state_dtype(p.state_dtype, [&](auto state) {
    using ST = typename decltype(state)::type;
    SmallFused small;
    switch (choice.algo) {
      case GDN_STEP_WHOLE:
        return many ? launch_whole<T, ST, Unit::kKeyHead, true, 2>(p, stream, choice.overlap, choice.blocks)
                    : launch_whole<T, ST, Unit::kKeyHead, false, 4>(p, stream, choice.overlap, choice.blocks);
      case GDN_STEP_HEADS:
        return many                ? launch_whole<T, ST, Unit::kValueHead, true, 2>(p, stream, choice.overlap, choice.blocks)
               : choice.depth == 4 ? launch_whole<T, ST, Unit::kValueHead, false, 4>(p, stream, choice.overlap, choice.blocks)
                                   : launch_whole<T, ST, Unit::kValueHead, false, 2>(p, stream, choice.overlap, choice.blocks);
      case GDN_STEP_SPLIT:
        make_small(p, &small);
        return choice.rows == 2 ? launch_split<T, ST, 2>(p, small, stream) : launch_split<T, ST, 4>(p, small, stream);
    }
    return static_cast<int>(GDN_BAD_ALGO);
  });
}

}  // namespace step
}  // namespace gdn
