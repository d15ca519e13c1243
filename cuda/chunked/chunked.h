// The chunked kernel's launcher, for the chooser in ../rule.
#pragma once

#include <cuda_runtime_api.h>

#include "../gdn.h"

namespace gdn {

// Takes checked parameters; any K and V up to 256.
int launch_chunked(const gdn_rule_params &p, cudaStream_t stream);

int launch_chunked_f32(const gdn_rule_params &p, cudaStream_t stream);
int launch_chunked_bf16(const gdn_rule_params &p, cudaStream_t stream);
int launch_chunked_f16(const gdn_rule_params &p, cudaStream_t stream);

}  // namespace gdn
