// The kernel for prompts: what it takes, and tensor maps of keys and values, through the driver's own function.
#include "prompt.h"

#include <atomic>

#include "../common/launch.cuh"

namespace gdn {
namespace attention {
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

int make_maps(const gdn_attention_params &p, PromptMaps *maps) {
  Encode encode = nullptr;
  if (const int status = encode_function(&encode)) return status;
  const gdn_kv_cache &c = p.cache;
  const auto at_least_one = [](int64_t x) { return static_cast<cuuint64_t>(x < 1 ? 1 : x); };
  const cuuint64_t dims[4] = {static_cast<cuuint64_t>(p.head_dim), at_least_one(c.capacity),
                              static_cast<cuuint64_t>(p.num_kv_heads), at_least_one(c.slots.num_slots)};
  // A dimension of one has any stride; zero is not taken.
  const auto bytes = [](int64_t stride) { return static_cast<cuuint64_t>(stride == 0 ? 16 : 2 * stride); };
  const cuuint64_t strides[3] = {bytes(c.token_stride), bytes(c.head_stride), bytes(c.slots.slot_stride)};
  const int dim = p.head_dim <= 64 ? 64 : p.head_dim <= 128 ? 128 : 256;
  const cuuint32_t box[4] = {64, static_cast<cuuint32_t>(prompt_keys(dim)), 1, 1}, steps[4] = {1, 1, 1, 1};
  const auto make = [&](CUtensorMap *map, void *x) {
    return encode(map, p.io_dtype == GDN_F16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4, x, dims,
                  strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                  CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  };
  for (const CUresult r : {make(&maps->keys, c.k), make(&maps->values, c.v)})
    if (r != CUDA_SUCCESS) return GDN_CUDA_ERROR + static_cast<int>(r);    // numbered as the runtime's errors are
  return GDN_OK;
}

}  // namespace

int64_t prompt_tiles(const gdn_attention_params &p, int64_t rows, int64_t rows_a_tile) {
  const int64_t seqs = p.seqs.num_seqs, each = seqs * ceil_div(rows, rows_a_tile);
  if (!p.seqs.cu_seqlens || p.seqs.total_tokens <= 0) return each * p.num_kv_heads;
  const int64_t all = int64_t{p.seqs.total_tokens} * (p.num_heads / p.num_kv_heads) / rows_a_tile + seqs;
  return (all < each ? all : each) * p.num_kv_heads;
}

bool prompt_takes(const gdn_attention_params &p) {
  const gdn_kv_cache &c = p.cache;
  constexpr int64_t kFar = int64_t{1} << 39;    // elements: a stride of a map is less than 2^40 bytes
  const bool map = (c.capacity <= 1 || c.token_stride > 0) && (p.num_kv_heads == 1 || c.head_stride > 0) &&
                   (c.slots.num_slots <= 1 || c.slots.slot_stride > 0) && c.token_stride < kFar && c.head_stride < kFar &&
                   c.slots.slot_stride < kFar && c.slots.num_slots <= 0x7fffffff;
  const bool rows = aligned_rows(p.o, 8, p.io_dtype) && (!p.gate.ptr || aligned_rows(p.gate, 8, p.io_dtype));
  bool yes = false;
  // The largest score is looked for before it is scaled.
  return p.io_dtype != GDN_F32 && p.scale > 0.f && map && rows && has_sm90a_code(&yes) == GDN_OK && yes;
}

int launch_prompt(const gdn_attention_params &p, const Plan &plan, int optin, cudaStream_t stream) {
  PromptMaps maps;
  if (const int status = make_maps(p, &maps)) return status;
  return p.io_dtype == GDN_F16 ? launch_prompt_f16(p, plan, maps, optin, stream)
                               : launch_prompt_bf16(p, plan, maps, optin, stream);
}

}  // namespace attention
}  // namespace gdn
