// The chunk form, for the chooser in ../rule.
#pragma once

#include "../gdn.h"

namespace gdn {

// Bytes of workspace of either.
int chunked_workspace(const gdn_rule_params &p, int32_t algo, int64_t *bytes);

// `algo` is one of the two, and supports the parameters.
int launch_chunked(const gdn_rule_params &p, int32_t algo, cudaStream_t stream);

}  // namespace gdn
