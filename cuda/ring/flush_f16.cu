// gdn_replay for f16 inputs.
#include "launch.cuh"

template int gdn::ring::launch_as<__half>(const Params &, int, int, int, cudaStream_t);
