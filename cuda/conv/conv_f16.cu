// The convolution for f16 inputs.
#include "kernel.cuh"

template int gdn::conv::launch_conv<__half>(const gdn_conv_params &, int, cudaStream_t);
