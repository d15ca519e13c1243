// The kernel for prompts: the arguments that it supports, and tensor maps of keys and values.
#include "prompt.h"

#include "common/launch.cuh"
#include "common/tensor_map.h"

namespace gdn {
namespace attention {
namespace {

int make_maps(const gdn_attention_params &p, PromptMaps *maps) {
  const gdn_kv_cache &c = p.cache;
  const int dim = p.head_dim <= 64 ? 64 : p.head_dim <= 128 ? 128 : 256;
  const TensorShape shape = {{p.head_dim, c.capacity, p.num_kv_heads, c.slots.num_slots},
                             {c.token_stride, c.head_stride, c.slots.slot_stride},
                             {64, prompt_keys(dim), 1, 1}};
  if (const int status = make_tensor_map(&maps->keys, p.io_dtype, c.k, shape)) return status;
  return make_tensor_map(&maps->values, p.io_dtype, c.v, shape);
}

}  // namespace

int64_t prompt_tiles(const gdn_attention_params &p, int64_t rows, int64_t rows_a_tile) {
  const int64_t seqs = p.seqs.num_seqs, each = seqs * ceil_div(rows, rows_a_tile);
  if (!p.seqs.cu_seqlens || p.seqs.total_tokens <= 0) return each * p.num_kv_heads;
  const int64_t all = int64_t{p.seqs.total_tokens} * (p.num_heads / p.num_kv_heads) / rows_a_tile + seqs;
  return (all < each ? all : each) * p.num_kv_heads;
}

bool prompt_supports(const gdn_attention_params &p) {
  const gdn_kv_cache &c = p.cache;
  constexpr int64_t kFar = int64_t{1} << 39;    // elements: a stride of a map is less than 2^40 bytes
  const bool map = (c.capacity <= 1 || c.token_stride > 0) && (p.num_kv_heads == 1 || c.head_stride > 0) &&
                   (c.slots.num_slots <= 1 || c.slots.slot_stride > 0) && c.token_stride < kFar && c.head_stride < kFar &&
                   c.slots.slot_stride < kFar && c.slots.num_slots <= 0x7fffffff;
  const bool rows = aligned_rows(p.o, 8, p.io_dtype) && (!p.gate.ptr || aligned_rows(p.gate, 8, p.io_dtype));
  bool found = false;
  // A positive scale: the kernel finds the largest score before it scales.
  return p.io_dtype != GDN_F32 && p.scale > 0.f && map && rows && has_sm90a_code(&found) == GDN_OK && found;
}

int launch_prompt(const gdn_attention_params &p, const Plan &plan, int optin, cudaStream_t stream) {
  PromptMaps maps;
  if (const int status = make_maps(p, &maps)) return status;
  return p.io_dtype == GDN_F16 ? launch_prompt_f16(p, plan, maps, optin, stream)
                               : launch_prompt_bf16(p, plan, maps, optin, stream);
}

}  // namespace attention
}  // namespace gdn
