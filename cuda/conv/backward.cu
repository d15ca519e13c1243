// gdn_conv_backward: checks the parameters, divides the work and calls the launcher of the input type.
#include "backward.h"

#include "../common/convert.cuh"
#include "../common/sum.h"

namespace gdn {
namespace conv {
namespace {

int check(const gdn_conv_backward_params &p) {
  if (!valid_dtype(p.io_dtype) || !valid_dtype(p.weight_dtype)) return GDN_BAD_DTYPE;
  if (p.width < 2 || p.width > 8) return GDN_BAD_CONV_WIDTH;
  if (p.channels < 0 || (p.seqs.cu_seqlens && p.seqs.total_tokens < 0)) return GDN_BAD_LENGTH;
  if (const int status = check_sequences(p.seqs)) return status;
  for (const gdn_heads *x : {&p.x, &p.d_y, &p.d_x})
    if (x->seq_stride < 0 || x->token_stride < 0) return GDN_BAD_STRIDE;
  return GDN_OK;
}

int make_plan(const gdn_conv_backward_params &p, BackwardPlan *plan) {
  plan->rows = p.seqs.cu_seqlens ? p.seqs.total_tokens : static_cast<int64_t>(p.seqs.num_seqs) * p.seqs.tokens_per_seq;
  if (plan->rows > 0x7fffffff) return GDN_BAD_LENGTH;
  plan->tiles = p.seqs.num_seqs > 0 && p.channels > 0 ? ceil_div(plan->rows, tile_tokens(dtype_size(p.io_dtype))) : 0;
  plan->columns = ceil_div(p.channels, kTileChannels);
  const int64_t each = ceil_div(plan->tiles * plan->columns, kFewestBlocks);
  plan->places = plan->tiles > 0 ? ceil_div(plan->tiles, each) : 0;
  const int64_t piece = 16 / dtype_size(p.io_dtype);
  plan->vec = p.channels % piece == 0;
  for (const gdn_heads *x : {&p.x, &p.d_y, &p.d_x}) plan->vec = plan->vec && aligned_tokens(*x, piece, p.io_dtype);
  return GDN_OK;
}

int64_t workspace_of(const gdn_conv_backward_params &p, const BackwardPlan &plan) {
  return plan.places * p.channels * p.width * static_cast<int64_t>(sizeof(float));
}

}  // namespace
}  // namespace conv
}  // namespace gdn

extern "C" int gdn_conv_backward_workspace(const gdn_conv_backward_params *params, int64_t *bytes) {
  using namespace gdn;
  if (!params || !bytes) return GDN_NULL_POINTER;
  if (const int status = conv::check(*params)) return status;
  conv::BackwardPlan plan;
  if (const int status = conv::make_plan(*params, &plan)) return status;
  *bytes = conv::workspace_of(*params, plan);
  return GDN_OK;
}

extern "C" int gdn_conv_backward(const gdn_conv_backward_params *params, cudaStream_t stream) {
  using namespace gdn;
  if (!params) return GDN_NULL_POINTER;
  const gdn_conv_backward_params &p = *params;
  if (const int status = conv::check(p)) return status;
  conv::BackwardPlan plan;
  if (const int status = conv::make_plan(p, &plan)) return status;
  if (p.channels == 0) return GDN_OK;
  if (!p.weight || !p.d_weight || (plan.tiles > 0 && (!p.x.ptr || !p.d_y.ptr || !p.d_x.ptr))) return GDN_NULL_POINTER;
  if (const int status = check_workspace(p.workspace, p.workspace_bytes, conv::workspace_of(p, plan))) return status;
  if (p.seqs.num_seqs > 0)
    if (const int status = with_dtype(p.io_dtype, [&](auto io) { return conv::launch_backward<typename decltype(io)::type>(p, plan, stream); }))
      return status;
  return sum_rows(static_cast<const float *>(p.workspace), plan.places, static_cast<int64_t>(p.channels) * p.width, p.d_weight, stream);
}
