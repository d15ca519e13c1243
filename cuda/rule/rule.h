// The launchers of this folder, for the chooser in rule.cu. All for checked parameters that the kernel supports.
#pragma once

#include "../gdn.h"

namespace gdn {

int launch_recurrent(const gdn_rule_params &p, cudaStream_t stream);
int launch_recurrent_128(const gdn_rule_params &p, cudaStream_t stream);
int launch_decode(const gdn_rule_params &p, cudaStream_t stream);

namespace recurrent {
template <typename T> int launch_any(const gdn_rule_params &p, cudaStream_t stream);    // float, Any16
}

}  // namespace gdn
