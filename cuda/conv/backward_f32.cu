// The backward pass of the convolution for f32 inputs.
#include "backward.cuh"

template int gdn::conv::launch_backward<float>(const gdn_conv_backward_params &, const BackwardPlan &, cudaStream_t);
