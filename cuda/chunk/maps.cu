#include "maps.h"

#include "../common/tensor_map.h"

namespace gdn {
namespace chunk {

int make_maps(const gdn_rule_params &p, Maps *maps) {
  const bool packed = p.common.seqs.cu_seqlens != nullptr;
  const int64_t tokens = packed ? p.common.seqs.total_tokens : p.common.seqs.tokens_per_seq, seqs = packed ? 1 : p.common.seqs.num_seqs;
  const auto make = [&](CUtensorMap *map, const gdn_heads &x, int32_t heads, int32_t size) {
    const TensorShape shape = {{size, heads, tokens, seqs}, {x.head_stride, x.token_stride, x.seq_stride}, {64, 1, GDN_CHUNK, 1}};
    return make_tensor_map(map, p.common.io_dtype, x.ptr, shape);
  };
  if (const int status = make(&maps->q, p.q, p.common.num_k_heads, p.common.head_k)) return status;
  if (const int status = make(&maps->k, p.k, p.common.num_k_heads, p.common.head_k)) return status;
  if (const int status = make(&maps->v, p.v, p.common.num_v_heads, p.common.head_v)) return status;
  return make(&maps->o, p.o, p.common.num_v_heads, p.common.head_v);
}

}  // namespace chunk
}  // namespace gdn
