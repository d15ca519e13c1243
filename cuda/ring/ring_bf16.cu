// gdn_ring_step and gdn_ring_flush for bf16 inputs.
#include "launch.cuh"

template int gdn::ring::launch_step<__nv_bfloat16>(const gdn_ring_step_params &, int, cudaStream_t);
template int gdn::ring::launch_flush<__nv_bfloat16>(const gdn_ring_flush_params &, cudaStream_t);
