// gdn_step for f16 inputs.
#include "step.cuh"

template int gdn::step::launch_step<__half>(const gdn_step_params &, const plan::Step &, cudaStream_t);
