// The convolution for bf16 inputs.
#include "kernel.cuh"

int gdn::launch_conv_bf16(const gdn_conv_params &p, int sms, cudaStream_t stream) {
  return conv::with_dtype_of_io<__nv_bfloat16>(p, sms, stream);
}
