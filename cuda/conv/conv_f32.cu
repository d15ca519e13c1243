// The convolution for f32 inputs.
#include "kernel.cuh"

template int gdn::conv::launch_conv<float>(const gdn_conv_params &, int, cudaStream_t);
