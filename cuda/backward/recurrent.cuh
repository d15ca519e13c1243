// GDN_RECURRENT of gdn_rule_backward, for the chooser in rule.cu: any head size, inputs of any type, all arithmetic in f32.
#pragma once

#include "../gdn.h"

namespace gdn {

// Both for checked parameters.
int launch_recurrent_backward(const gdn_rule_backward_params &p, cudaStream_t stream);
int64_t recurrent_backward_workspace(const gdn_rule_backward_params &p);

}  // namespace gdn
