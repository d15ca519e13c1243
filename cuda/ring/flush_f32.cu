// gdn_replay for f32 inputs.
#include "launch.cuh"

template int gdn::ring::launch_as<float>(const Params &, int, int, int, cudaStream_t);
