// The convolution for bf16 inputs.
#include "kernel.cuh"

template int gdn::conv::launch_conv<__nv_bfloat16>(const gdn_conv_params &, int, cudaStream_t);
