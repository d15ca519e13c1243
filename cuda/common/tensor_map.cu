#include "tensor_map.h"

#include <atomic>

#include "host.cuh"

namespace gdn {
namespace {

using Encode = CUresult (*)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *, const cuuint64_t *, const cuuint64_t *,
                            const cuuint32_t *, const cuuint32_t *, CUtensorMapInterleave, CUtensorMapSwizzle,
                            CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

int encode_function(Encode *encode) {
  static std::atomic<void *> known{nullptr};    // races write the same value
  void *f = known.load(std::memory_order_relaxed);
  if (!f) {
    cudaDriverEntryPointQueryResult found;
    const cudaError_t e = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &f, 12000, cudaEnableDefault, &found);
    if (e != cudaSuccess) return cuda_status(e);
    if (found != cudaDriverEntryPointSuccess || !f) return GDN_BAD_ALGO;
    known.store(f, std::memory_order_relaxed);
  }
  *encode = reinterpret_cast<Encode>(f);
  return GDN_OK;
}

}  // namespace

int make_tensor_map(CUtensorMap *map, int32_t dtype, const void *x, const TensorShape &shape) {
  Encode encode = nullptr;
  if (const int status = encode_function(&encode)) return status;
  cuuint64_t dims[4], bytes[3];
  cuuint32_t box[4], steps[4];
  for (int i = 0; i < 4; ++i) {
    dims[i] = static_cast<cuuint64_t>(shape.sizes[i] < 1 ? 1 : shape.sizes[i]);
    box[i] = static_cast<cuuint32_t>(shape.box[i]);
    steps[i] = 1;
  }
  // Only multiples of 16 bytes but zero are taken, also where a dimension of one makes no use of it.
  for (int i = 0; i < 3; ++i) bytes[i] = static_cast<cuuint64_t>(dims[i + 1] == 1 || shape.strides[i] == 0 ? 16 : 2 * shape.strides[i]);
  const CUresult made = encode(map, dtype == GDN_F16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4,
                               const_cast<void *>(x), dims, bytes, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                               shape.box[0] == 64 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B,
                               CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return made == CUDA_SUCCESS ? GDN_OK : GDN_CUDA_ERROR + static_cast<int>(made);    // numbered as the runtime's errors are
}

}  // namespace gdn
