// The convolution for f16 inputs.
#include "kernel.cuh"

int gdn::launch_conv_f16(const gdn_conv_params &p, int sms, cudaStream_t stream) {
  return conv::with_dtype_of_io<__half>(p, sms, stream);
}
