// The launches of gdn_step for one input type.
#pragma once

#include "launch.cuh"
#include "split.cuh"

namespace gdn {
namespace step {

template <typename T, typename ST, typename D, int ROWS> int launch_split(const gdn_step_params &p, cudaStream_t stream) {
  const gdn_common &c = p.common;
  const int blocks = plan::ratio_of(c) * (D::kV / (16 * ROWS));
  const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(c.num_k_heads), static_cast<unsigned>(c.seqs.num_seqs));
  return with_gate<T>(c.gate_dtype, [&](auto gate) {
    using G = typename decltype(gate)::type;
    GDN_PROFILED(profile::Target target; if (const int status = profile::attach(target, grid, 32 * kSplitWarps)) return status;)
    return launch(split_kernel<T, G, ST, D::kK, D::kV, ROWS>, {grid, dim3(32 * kSplitWarps), 0, stream, p.layer.overlap != 0, blocks}, p,
                  sizes_of(c) GDN_PROFILED(, target));
  });
}

template <typename T, typename ST, typename D> int launch_dims(const gdn_step_params &p, const plan::Step &choice, cudaStream_t stream) {
  const bool many = !plan::one_token(p.common.seqs), overlap = p.layer.overlap != 0, heads = choice.algo == GDN_STEP_HEADS;
  if (choice.algo == GDN_STEP_SPLIT)
    return choice.rows == 2 ? launch_split<T, ST, D, 2>(p, stream) : launch_split<T, ST, D, 4>(p, stream);
  if (many)
    return heads ? launch_whole<T, ST, D, Unit::kValueHead, true, 2>(p, stream, overlap, choice.blocks)
                 : launch_whole<T, ST, D, Unit::kKeyHead, true, 2>(p, stream, overlap, choice.blocks);
  if (!heads) return launch_whole<T, ST, D, Unit::kKeyHead, false, 4>(p, stream, overlap, choice.blocks);
  return choice.depth == 4 ? launch_whole<T, ST, D, Unit::kValueHead, false, 4>(p, stream, overlap, choice.blocks)
                           : launch_whole<T, ST, D, Unit::kValueHead, false, 2>(p, stream, overlap, choice.blocks);
}

template <typename T> int launch_step(const gdn_step_params &p, const plan::Step &choice, cudaStream_t stream) {
  return with_state_dtype(p.common.state_dtype, [&](auto state) {
    using ST = typename decltype(state)::type;
    return with_step_dims(p.common, [&](auto dims) { return launch_dims<T, ST, decltype(dims)>(p, choice, stream); });
  });
}

}  // namespace step
}  // namespace gdn
