// gdn_replay for bf16 inputs.
#include "launch.cuh"

template int gdn::ring::launch_as<__nv_bfloat16>(const Params &, int, int, int, cudaStream_t);
