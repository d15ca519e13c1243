// The chunk form, for the chooser in ../rule.
#pragma once

#include "../gdn.h"

namespace gdn {

// The eps of the norms in the chunk forms, here and in ../backward. It is never less than this: the reciprocal root of a subnormal sum
// is infinite in the kernels, and the matrices have products of two of them, which must be finite beside a key of zeros.
inline float chunked_eps(float eps) { return eps < 0x1p-100f ? 0x1p-100f : eps; }

// Bytes of workspace of either.
int chunked_workspace(const gdn_rule_params &p, int32_t algo, int64_t *bytes);

// `algo` is one of the two, and supports the parameters.
int launch_chunked(const gdn_rule_params &p, int32_t algo, cudaStream_t stream);

}  // namespace gdn
