// Tensor maps of 16-bit elements for the copy engine of sm_90, through the driver's own function: nothing is linked but the runtime.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace gdn {

// Four dimensions, the first with elements side by side; strides of the others in elements, where a dimension of one may have
// any. Boxes have zeros outside of the tensor; rows of 64 elements have the 128-byte swizzle,
// rows of 32 the 64-byte one.
struct TensorShape {
  int64_t sizes[4], strides[3];
  int32_t box[4];
};

// `dtype`: GDN_BF16 or GDN_F16. GDN_OK, GDN_BAD_ALGO where the driver has no such function, or its error.
int make_tensor_map(CUtensorMap *map, int32_t dtype, const void *x, const TensorShape &shape);

}  // namespace gdn
