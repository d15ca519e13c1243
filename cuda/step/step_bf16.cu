// gdn_step for bf16 inputs.
#include "step.cuh"

template int gdn::step::launch_step<__nv_bfloat16>(const gdn_step_params &, const plan::Step &, cudaStream_t);
