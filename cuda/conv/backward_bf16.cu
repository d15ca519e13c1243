// The backward pass of the convolution for bf16 inputs.
#include "backward.cuh"

template int gdn::conv::launch_backward<__nv_bfloat16>(const gdn_conv_backward_params &, const BackwardPlan &, cudaStream_t);
