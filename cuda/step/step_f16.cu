// gdn_step for f16 inputs.
#include "step.cuh"

template int gdn::step::launch_step_as<__half>(const FusedParams &, const Choice &, cudaStream_t);
