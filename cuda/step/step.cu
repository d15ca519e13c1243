// gdn_step: the fused step of a layer.
#include "plan.cuh"
#include "step.h"

namespace gdn {
namespace step {
namespace {

constexpr int kMaxTokens = 16;

int check(const gdn_step_params &p) {
  for (const int dtype : {p.io_dtype, p.gate_dtype, p.conv_dtype, p.norm_dtype})
    if (!valid_dtype(dtype)) return GDN_BAD_DTYPE;
  if (p.state_dtype != GDN_F32 && p.state_dtype != GDN_BF16) return GDN_BAD_DTYPE;
  if (p.num_k_heads < 1 || p.num_v_heads < 1 || p.num_v_heads % p.num_k_heads != 0) return GDN_BAD_HEADS;
  if (p.head_k < 1 || p.head_k > 256 || p.head_v < 1 || p.head_v > 256) return GDN_BAD_HEAD_DIM;
  if (p.conv_width < 2 || p.conv_width > 8) return GDN_BAD_CONV_WIDTH;
  if (p.algo < GDN_STEP_AUTO || p.algo > GDN_STEP_HEADS) return GDN_BAD_ALGO;
  if (const int status = check_sequences(p.seqs)) return status;
  if (const int status = check_slots(p.in_slots)) return status;
  if (const int status = check_slots(p.out_slots)) return status;
  for (const gdn_heads *x : {&p.x, &p.z, &p.a, &p.b, &p.out})
    if (!valid_strides(*x)) return GDN_BAD_STRIDE;
  return p.conv_in_stride < 0 || p.conv_out_stride < 0 ? GDN_BAD_STRIDE : GDN_OK;
}

bool any_null(const gdn_step_params &p) {
  for (const void *x : {p.x.ptr, p.z.ptr, p.a.ptr, p.b.ptr, p.out.ptr, p.conv_weight, p.norm_weight, p.conv_in,
                        static_cast<const void *>(p.conv_out), p.state_in, static_cast<const void *>(p.state_out)})
    if (!x) return true;
  return !p.a_log || !p.dt_bias;
}

FusedParams fused(const gdn_step_params &p) {
  const int64_t size = dtype_size(p.io_dtype), keys = static_cast<int64_t>(p.num_k_heads) * p.head_k;
  auto columns = [&](int64_t first, int64_t head) {
    return gdn_heads{static_cast<const char *>(p.x.ptr) + first * size, p.x.seq_stride, p.x.token_stride, head};
  };
  FusedParams f{};
  f.q = columns(0, p.head_k);
  f.k = columns(keys, p.head_k);
  f.v = columns(2 * keys, p.head_v);
  f.a = p.a, f.b = p.b, f.o = p.out;
  f.a_log = p.a_log, f.dt_bias = p.dt_bias;
  f.state_in = p.state_in, f.state_out = p.state_out, f.token_states = p.token_states;
  f.in_slots = p.in_slots, f.out_slots = p.out_slots, f.seqs = p.seqs;
  f.num_k_heads = p.num_k_heads, f.num_v_heads = p.num_v_heads, f.head_k = p.head_k, f.head_v = p.head_v;
  f.io_dtype = p.io_dtype, f.gate_dtype = p.gate_dtype, f.state_dtype = p.state_dtype;
  f.l2norm = p.l2norm, f.l2_eps = p.l2_eps, f.scale = p.scale, f.beta_scale = p.beta_scale;
  f.z = p.z;
  f.conv_weight = p.conv_weight, f.norm_weight = p.norm_weight;
  f.conv_in = p.conv_in, f.conv_out = p.conv_out;
  f.conv_in_stride = p.conv_in_stride, f.conv_out_stride = p.conv_out_stride;
  f.channels = static_cast<int32_t>(2 * keys + static_cast<int64_t>(p.num_v_heads) * p.head_v);
  f.conv_dtype = p.conv_dtype, f.norm_dtype = p.norm_dtype;
  f.sigmoid = p.sigmoid, f.norm_eps = p.norm_eps;
  return f;
}

// What both variants need: sizes, and four neighbouring elements at a time of everything but the states' 16 bytes.
bool takes(const gdn_step_params &p, const FusedParams &f) {
  const int64_t size = dtype_size(p.io_dtype);
  return p.head_k == kDim && p.head_v == kDim && p.conv_width == kWidth && p.seqs.num_seqs <= 65535 &&
         aligned_state(f, f.state_dtype == GDN_F32 ? 4 : 8) &&
         aligned_tokens(p.x, 4, p.io_dtype) && aligned_rows(p.z, 4, p.io_dtype) && aligned_rows(p.out, 4, p.io_dtype) &&
         aligned(p.conv_weight, 16) && aligned(p.conv_in, 4 * size) && aligned(p.conv_out, 4 * size) &&
         p.conv_in_stride % 4 == 0 && p.conv_out_stride % 4 == 0 && max_tokens(p.seqs) <= kMaxTokens;
}

// The best of those that take the parameters, by measured bounds (README.md).
int choose(const gdn_step_params &p, Choice *choice) {
  *choice = {};
  const FusedParams f = fused(p);
  if (!takes(p, f)) return GDN_OK;
  int sms = 0, optin = 0;
  bool clusters = false;
  if (const int status = sm_count(&sms)) return status;
  if (const int status = device_attribute<cudaDevAttrMaxSharedMemoryPerBlockOptin>(&optin)) return status;
  if (const int status = has_sm90_code(&clusters)) return status;
  const int ratio = p.num_v_heads / p.num_k_heads;
  const int64_t heads = static_cast<int64_t>(p.seqs.num_seqs) * p.num_v_heads;
  choice->overlap = p.overlap && clusters;

  const bool one = !p.seqs.cu_seqlens && p.seqs.tokens_per_seq == 1;
  choice->rows = ratio <= 2 && heads <= (ratio == 1 ? sms / 4 : sms / 2) ? 2 : 4;
  SmallFused small;
  const bool split = clusters && one && ratio * (8 / choice->rows) <= 8 && make_small(f, &small);
  choice->depth = heads <= sms * 3 / 2 ? 4 : 2;
  // Both forms of the kernel need this much shared memory at most.
  const bool whole = whole_bytes<Unit::kKeyHead, Ring<float, 2, 4>>(f) <= optin;
  const bool in_clusters =
      clusters && ratio > 1 && ratio <= 8 && whole_bytes<Unit::kValueHead, Ring<float, 2, 4>>(f) <= optin;

  const bool taken[] = {true, whole, split, in_clusters};
  if (p.algo != GDN_STEP_AUTO) choice->algo = taken[p.algo] ? p.algo : GDN_STEP_AUTO;
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

int launch_step(const gdn_step_params &p, const Choice &choice, cudaStream_t stream) {
  FusedParams f = fused(p);
  f.overlap = choice.overlap;
  return with_dtype(f.io_dtype, [&](auto io) { return launch_step_as<typename decltype(io)::type>(f, choice, stream); });
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
  const bool in_place = state_in_place(p.state_in, p.state_out, p.in_slots, p.out_slots) && p.conv_in == p.conv_out;
  if (p.seqs.num_seqs == 0 || (max_tokens(p.seqs) == 0 && in_place)) return GDN_OK;
  if (step::any_null(p)) return GDN_NULL_POINTER;
  step::Choice choice;
  if (const int status = step::choose(p, &choice)) return status;
  if (choice.algo == GDN_STEP_AUTO) return GDN_BAD_ALGO;
  return step::launch_step(p, choice, stream);
}
