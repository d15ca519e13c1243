// The backward pass in chunks: how sequences are cut, how much workspace that needs.
#include "../chunk/chunk.h"
#include "../common/launch.cuh"
#include "maps.h"
#include "plan.h"
#include "records.cuh"
#include "rule.h"

namespace gdn {
namespace backward {

// With recompute a sequence is cut into so many sections, whose records, states and updates the workspace holds one at a time.
constexpr int32_t kSections = 8;

int make_schedule(const gdn_rule_backward_params &p, bool wgmma, Schedule *s) {
  const gdn_sequences &seqs = p.common.seqs;
  const int64_t longest = ceil_div(max_tokens(seqs), kChunk), v_tiles = ceil_div(p.common.head_v, kTileRows);
  s->sections = p.recompute && longest > 1 ? static_cast<int32_t>(longest < kSections ? longest : kSections) : 1;
  if (seqs.cu_seqlens) {
    s->places = (seqs.total_tokens / kChunk + seqs.num_seqs) / s->sections + (s->sections > 1 ? seqs.num_seqs : 0) + 1;
  } else {
    s->places = seqs.num_seqs * ceil_div(longest, s->sections);
  }
  if (longest == 0) s->places = 0;
  const auto rounded = [](int64_t bytes) { return ceil_div(bytes, 1024) * 1024; };
  const int64_t heads = s->places * p.common.num_v_heads;
  s->record_bytes = rounded(heads * static_cast<int64_t>(sizeof(Record)));
  s->state_bytes = heads * v_tiles * kStateBytes;
  s->update_bytes = updates_in_place(p) ? 0 : heads * v_tiles * kTileBytes;
  const int64_t row_bytes = static_cast<int64_t>(seqs.num_seqs) * p.common.num_v_heads * p.common.head_k * static_cast<int64_t>(sizeof(float));
  s->carry_bytes = row_bytes * p.common.head_v;
  s->cut = {1, false};
  if (s->sections > 1 || s->places == 0) return GDN_OK;
  int sms = 0;
  if (const int status = sm_count(&sms)) return status;
  s->cut = cut_of(blocks_of(p.common, 1), longest, sms, p.segments, wgmma);
  return GDN_OK;
}

int make_maps(const gdn_rule_backward_params &p, Maps *maps) {
  const gdn_common &c = p.common;
  const bool packed = c.seqs.cu_seqlens != nullptr;
  const int64_t tokens = packed ? c.seqs.total_tokens : c.seqs.tokens_per_seq, seqs = packed ? 1 : c.seqs.num_seqs;
  const auto make = [&](CUtensorMap *map, const gdn_heads &x, int32_t heads, int32_t size) {
    const TensorShape shape = {{size, heads, tokens, seqs}, {x.head_stride, x.token_stride, x.seq_stride}, {64, 1, kChunk, 1}};
    return make_tensor_map(map, c.io_dtype, x.ptr, shape);
  };
  if (const int status = make(&maps->q, p.q, c.num_k_heads, c.head_k)) return status;
  if (const int status = make(&maps->k, p.k, c.num_k_heads, c.head_k)) return status;
  if (const int status = make(&maps->v, p.v, c.num_v_heads, c.head_v)) return status;
  if (const int status = make(&maps->d_o, p.d_o, c.num_v_heads, c.head_v)) return status;
  if (const int status = make(&maps->d_q, p.d_q, c.num_k_heads, c.head_k)) return status;
  if (const int status = make(&maps->d_k, p.d_k, c.num_k_heads, c.head_k)) return status;
  return make(&maps->d_v, p.d_v, c.num_v_heads, c.head_v);
}

}  // namespace backward

int chunked_backward_workspace(const gdn_rule_backward_params &p, bool sm90, int64_t *bytes) {
  backward::Schedule s;
  if (const int status = backward::make_schedule(p, sm90, &s)) return status;
  *bytes = s.bytes();
  return GDN_OK;
}

int launch_chunked_backward(const gdn_rule_backward_params &params, bool sm90, cudaStream_t stream) {
  gdn_rule_backward_params p = params;
  p.common.l2_eps = chunked_eps(p.common.l2_eps);
  backward::Schedule s;
  if (const int status = backward::make_schedule(p, sm90, &s)) return status;
  const int64_t bytes = s.bytes();
  if (bytes > 0 && (!p.workspace || !aligned(p.workspace, 256) || p.workspace_bytes < bytes)) return GDN_BAD_WORKSPACE;
  return p.common.io_dtype == GDN_F16 ? backward::launch_chunks<__half>(p, s, sm90, stream)
                                      : backward::launch_chunks<__nv_bfloat16>(p, s, sm90, stream);
}

}  // namespace gdn
