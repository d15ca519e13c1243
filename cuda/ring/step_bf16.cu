// gdn_replay_step for bf16 inputs.
#include "launch.cuh"

template int gdn::ring::launch_step_as<__nv_bfloat16>(const StepParams &, int, int, int, bool, cudaStream_t);
