// The convolution for f32 inputs.
#include "kernel.cuh"

int gdn::launch_conv_f32(const gdn_conv_params &p, int sms, cudaStream_t stream) {
  return conv::with_dtype_of_io<float>(p, sms, stream);
}
