// gdn_step for bf16 inputs.
#include "step.cuh"

template int gdn::step::launch_step_as<__nv_bfloat16>(const FusedParams &, const Choice &, cudaStream_t);
