// The launchers of this folder by input type, each in a translation unit of its own.
#pragma once

#include "../step/compact.cuh"

namespace gdn {
namespace ring {

// Both for checked parameters; `algo` is GDN_RING_FMA or GDN_RING_MMA.
template <typename T> int launch_step(const gdn_ring_step_params &p, int algo, cudaStream_t stream);
template <typename T> int launch_flush(const gdn_ring_flush_params &p, cudaStream_t stream);

}  // namespace ring
}  // namespace gdn
