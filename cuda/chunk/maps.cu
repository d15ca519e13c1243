#include "maps.h"

#include "../common/tensor_map.h"

namespace gdn {
namespace chunk {

int make_maps(const gdn_rule_params &p, Maps *maps) {
  const bool packed = p.seqs.cu_seqlens != nullptr;
  const int64_t tokens = packed ? p.seqs.total_tokens : p.seqs.tokens_per_seq, seqs = packed ? 1 : p.seqs.num_seqs;
  const auto make = [&](CUtensorMap *map, const gdn_heads &x, int32_t heads, int32_t size) {
    const TensorShape shape = {{size, heads, tokens, seqs}, {x.head_stride, x.token_stride, x.seq_stride}, {64, 1, GDN_CHUNK, 1}};
    return make_tensor_map(map, p.io_dtype, x.ptr, shape);
  };
  if (const int status = make(&maps->q, p.q, p.num_k_heads, p.head_k)) return status;
  if (const int status = make(&maps->k, p.k, p.num_k_heads, p.head_k)) return status;
  if (const int status = make(&maps->v, p.v, p.num_v_heads, p.head_v)) return status;
  return make(&maps->o, p.o, p.num_v_heads, p.head_v);
}

}  // namespace chunk
}  // namespace gdn
