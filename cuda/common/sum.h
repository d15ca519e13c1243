// The second half of a sum over tokens: kernels leave partial sums in a workspace, this one adds them.
#pragma once

#include "../gdn.h"

namespace gdn {

// to[c] = the sum of from[r * columns + c] over `rows` rows, which may be none, always in the same order.
int sum_rows(const float *from, int64_t rows, int64_t columns, float *to, cudaStream_t stream);

}  // namespace gdn
