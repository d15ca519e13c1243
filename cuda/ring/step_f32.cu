// gdn_replay_step for f32 inputs.
#include "launch.cuh"

template int gdn::ring::launch_step_as<float>(const StepParams &, int, int, int, bool, cudaStream_t);
