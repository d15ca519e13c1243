// gdn_replay_step for f16 inputs.
#include "launch.cuh"

template int gdn::ring::launch_step_as<__half>(const StepParams &, int, int, int, bool, cudaStream_t);
