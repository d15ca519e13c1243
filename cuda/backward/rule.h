// What gdn_rule_backward chooses from.
#pragma once

#include "../gdn.h"

namespace gdn {

// All for checked parameters. The backward pass token by token: every size and type.
int launch_recurrent_backward(const gdn_rule_backward_params &p, cudaStream_t stream);
int64_t recurrent_backward_workspace(const gdn_rule_backward_params &p);

// In chunks, on tensor cores: `sm90` with wgmma.
int launch_chunked_backward(const gdn_rule_backward_params &p, bool sm90, cudaStream_t stream);
int chunked_backward_workspace(const gdn_rule_backward_params &p, bool sm90, int64_t *bytes);

}  // namespace gdn
