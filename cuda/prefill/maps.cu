// Encodes tensor maps, through the driver's own function: nothing is linked but the runtime.
#include "maps.h"

#include <atomic>

#include "../common/host.cuh"

namespace gdn {
namespace prefill {
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

int make_maps(const gdn_rule_params &p, MapsOut *maps) {
  Encode encode = nullptr;
  if (const int status = encode_function(&encode)) return status;
  const bool packed = p.seqs.cu_seqlens != nullptr;
  const auto at_least_one = [](int64_t x) { return static_cast<cuuint64_t>(x < 1 ? 1 : x); };
  const cuuint64_t tokens = at_least_one(packed ? p.seqs.total_tokens : p.seqs.tokens_per_seq);
  const auto make = [&](CUtensorMap *map, const gdn_heads &x, int32_t heads, int32_t size) {
    const cuuint64_t dims[4] = {static_cast<cuuint64_t>(size), static_cast<cuuint64_t>(heads), tokens,
                                at_least_one(packed ? 1 : p.seqs.num_seqs)};
    // A dimension of one has any stride, and so have those of a tensor without tokens; only multiples of 16 bytes are taken.
    const auto bytes = [](int64_t stride, cuuint64_t count) { return static_cast<cuuint64_t>(count == 1 || stride == 0 ? 16 : 2 * stride); };
    const cuuint64_t strides[3] = {bytes(x.head_stride, dims[1]), bytes(x.token_stride, dims[2]), bytes(x.seq_stride, dims[3])};
    const cuuint32_t box[4] = {64, 1, GDN_CHUNK, 1}, steps[4] = {1, 1, 1, 1};
    return encode(map, p.io_dtype == GDN_F16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4,
                  const_cast<void *>(x.ptr), dims, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                  CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  };
  const CUresult made[4] = {make(&maps->q, p.q, p.num_k_heads, p.head_k), make(&maps->k, p.k, p.num_k_heads, p.head_k),
                            make(&maps->v, p.v, p.num_v_heads, p.head_v), make(&maps->o, p.o, p.num_v_heads, p.head_v)};
  for (const CUresult r : made)
    if (r != CUDA_SUCCESS) return GDN_CUDA_ERROR + static_cast<int>(r);    // numbered as the runtime's errors are
  return GDN_OK;
}

}  // namespace prefill
}  // namespace gdn
