// The recurrent kernels' launchers, for the chooser in ../rule.
#pragma once

#include "../gdn.h"

namespace gdn {

// K = V = 128, q and k aligned to four elements, the state to 16 bytes.
bool recurrent_128_takes(const gdn_rule_params &p);

// Both take checked parameters.
int launch_recurrent_128(const gdn_rule_params &p, cudaStream_t stream);
int launch_recurrent(const gdn_rule_params &p, cudaStream_t stream);

namespace recurrent {
template <typename T> int launch_any(const gdn_rule_params &p, cudaStream_t stream);    // float, Any16
}

}  // namespace gdn
