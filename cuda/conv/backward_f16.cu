// The backward pass of the convolution for f16 inputs.
#include "backward.cuh"

template int gdn::conv::launch_backward<__half>(const gdn_conv_backward_params &, const BackwardPlan &, cudaStream_t);
