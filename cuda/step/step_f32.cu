// gdn_step for f32 inputs.
#include "step.cuh"

template int gdn::step::launch_step<float>(const gdn_step_params &, const plan::Step &, cudaStream_t);
