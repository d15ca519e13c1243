// The convolution's launchers, one an input type.
#pragma once

#include "../gdn.h"

namespace gdn {

int launch_conv_f32(const gdn_conv_params &p, int sms, cudaStream_t stream);
int launch_conv_bf16(const gdn_conv_params &p, int sms, cudaStream_t stream);
int launch_conv_f16(const gdn_conv_params &p, int sms, cudaStream_t stream);

}  // namespace gdn
