// gdn_step: the fused step of a layer.
#include "step.h"

#include "launch.cuh"

namespace gdn {
namespace step {
namespace {

constexpr int kMaxTokens = 16;

int check(const gdn_step_params &p) {
  const gdn_layer &layer = p.layer;
  if (const int status = check_common(p.common)) return status;
  if (p.common.state_dtype == GDN_F16 || !valid_dtype(layer.conv_dtype) || !valid_dtype(layer.norm_dtype)) return GDN_BAD_DTYPE;
  if (layer.conv_width < 2 || layer.conv_width > 8) return GDN_BAD_CONV_WIDTH;
  if (p.algo < GDN_STEP_AUTO || p.algo > GDN_STEP_HEADS) return GDN_BAD_ALGO;
  for (const gdn_heads *x : {&layer.x, &layer.z, &layer.out})
    if (!valid_strides(*x)) return GDN_BAD_STRIDE;
  return p.conv_in_stride < 0 || p.conv_out_stride < 0 ? GDN_BAD_STRIDE : GDN_OK;
}

bool any_null(const gdn_step_params &p) {
  const gdn_common &c = p.common;
  const gdn_layer &layer = p.layer;
  for (const void *x : {layer.x.ptr, layer.z.ptr, c.a.ptr, c.b.ptr, layer.out.ptr, layer.conv_weight, layer.norm_weight, p.conv_in,
                        static_cast<const void *>(p.conv_out), c.state_in, static_cast<const void *>(c.state_out), c.dt_bias})
    if (!x) return true;
  return !c.a_log;
}

// What all variants need: sizes, and four neighbouring elements at a time of everything but the states' 16 bytes.
bool supports(const gdn_step_params &p) {
  const gdn_common &c = p.common;
  const gdn_layer &layer = p.layer;
  const int64_t size = dtype_size(c.io_dtype);
  return c.head_k == kDim && c.head_v == kDim && layer.conv_width == kWidth && c.seqs.num_seqs <= 65535 &&
         aligned_state(c, c.state_dtype == GDN_F32 ? 4 : 8) && aligned_tokens(layer.x, 4, c.io_dtype) &&
         aligned_rows(layer.z, 4, c.io_dtype) && aligned_rows(layer.out, 4, c.io_dtype) && aligned(layer.conv_weight, 16) &&
         aligned(p.conv_in, 4 * size) && aligned(p.conv_out, 4 * size) && p.conv_in_stride % 4 == 0 && p.conv_out_stride % 4 == 0 &&
         max_tokens(c.seqs) <= kMaxTokens;
}

// Whether all offsets of GDN_STEP_SPLIT fit in 32 bits.
bool split_offsets_fit(const gdn_step_params &p) {
  const gdn_common &c = p.common;
  return short_offsets(c) && short_offsets(p.layer.x, c.seqs.num_seqs, 1, sizes_of(c).channels) &&
         short_offsets(p.layer.z, c.seqs.num_seqs, c.num_v_heads, kDim) &&
         short_offsets(p.layer.out, c.seqs.num_seqs, c.num_v_heads, kDim) && p.conv_in_stride <= kMaxOffset &&
         p.conv_out_stride <= kMaxOffset;
}

// The best of the variants that support the parameters, by measured bounds (README.md).
int choose(const gdn_step_params &p, Choice *choice) {
  *choice = {};
  if (!supports(p)) return GDN_OK;
  const gdn_common &c = p.common;
  int sms = 0, optin = 0;
  bool clusters = false;
  if (const int status = sm_count(&sms)) return status;
  if (const int status = device_attribute<cudaDevAttrMaxSharedMemoryPerBlockOptin>(&optin)) return status;
  if (const int status = has_sm90_code(&clusters)) return status;
  const int ratio = c.num_v_heads / c.num_k_heads;
  const int64_t heads = static_cast<int64_t>(c.seqs.num_seqs) * c.num_v_heads;

  const bool one = !c.seqs.cu_seqlens && c.seqs.tokens_per_seq == 1;
  choice->rows = ratio <= 2 && heads <= (ratio == 1 ? sms / 4 : sms / 2) ? 2 : 4;
  const bool split = clusters && one && ratio * (8 / choice->rows) <= 8 && split_offsets_fit(p);
  choice->depth = heads <= sms * 3 / 2 ? 4 : 2;
  // Both forms of the kernel need this much shared memory at most.
  const bool whole = whole_bytes<Unit::kKeyHead, StateStream<float, 2, 4>>(c) <= optin;
  const bool in_clusters =
      clusters && ratio > 1 && ratio <= 8 && whole_bytes<Unit::kValueHead, StateStream<float, 2, 4>>(c) <= optin;

  const bool supported[] = {true, whole, split, in_clusters};
  if (p.algo != GDN_STEP_AUTO) choice->algo = supported[p.algo] ? p.algo : GDN_STEP_AUTO;
  else if (split && heads <= (ratio == 1 ? sms * 3 / 4 : sms / 2)) choice->algo = GDN_STEP_SPLIT;
  else if (in_clusters && (heads <= (ratio == 2 ? sms * 5 / 4 : sms * 3) || !whole)) choice->algo = GDN_STEP_HEADS;
  else if (whole) choice->algo = GDN_STEP_WHOLE;
  // Two blocks have enough under way. Where one each is all there is, an overlapping launch must not put several on the
  // multiprocessors that the kernel before it leaves first; but clusters of more than two could not all be placed so.
  const int64_t blocks = choice->algo == GDN_STEP_WHOLE ? heads / ratio : heads;
  const bool in_cluster = choice->algo == GDN_STEP_HEADS;
  choice->blocks = blocks <= sms && !(in_cluster && ratio > 2) ? 1 : in_cluster && blocks > 2 * sms ? 3 : 2;
  return GDN_OK;
}

}  // namespace
}  // namespace step
}  // namespace gdn

extern "C" int gdn_step_choice(const gdn_step_params *params, int32_t *algo) {
  using namespace gdn;
  if (!params || !algo) return GDN_NULL_POINTER;
  if (const int status = step::check(*params)) return status;
  step::Choice choice;
  if (const int status = step::choose(*params, &choice)) return status;
  *algo = choice.algo;
  return GDN_OK;
}

extern "C" int gdn_step(const gdn_step_params *params, cudaStream_t stream) {
  using namespace gdn;
  if (!params) return GDN_NULL_POINTER;
  const gdn_step_params &p = *params;
  if (const int status = step::check(p)) return status;
  const bool in_place = state_in_place(p.common) && p.conv_in == p.conv_out;
  if (p.common.seqs.num_seqs == 0 || (max_tokens(p.common.seqs) == 0 && in_place)) return GDN_OK;
  if (step::any_null(p)) return GDN_NULL_POINTER;
  step::Choice choice;
  if (const int status = step::choose(p, &choice)) return status;
  if (choice.algo == GDN_STEP_AUTO) return GDN_BAD_ALGO;
  return with_dtype(p.common.io_dtype, [&](auto io) { return step::launch_step<typename decltype(io)::type>(p, choice, stream); });
}
