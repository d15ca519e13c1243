// gdn_step for f32 inputs.
#include "step.cuh"

template int gdn::step::launch_step_as<float>(const FusedParams &, const Choice &, cudaStream_t);
