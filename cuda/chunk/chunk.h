// The chunk form, for the chooser in ../rule.
#pragma once

#include "../gdn.h"

namespace gdn {

// Whether GDN_CHUNKED_SM80 takes checked parameters, and whether GDN_CHUNKED_SM90 does, on the current device.
bool chunked_sm80_takes(const gdn_rule_params &p);
bool chunked_sm90_takes(const gdn_rule_params &p);

// Bytes of workspace of either.
int chunked_workspace(const gdn_rule_params &p, int32_t algo, int64_t *bytes);

// `algo` is one of the two, and takes the parameters.
int launch_chunked(const gdn_rule_params &p, int32_t algo, cudaStream_t stream);

}  // namespace gdn
