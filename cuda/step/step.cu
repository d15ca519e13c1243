// gdn_step: the fused step of a layer.
#include "../common/convert.cuh"
#include "../common/launch.cuh"
#include "../plan.h"

namespace gdn {
namespace step {

// One translation unit an input type, so that they compile side by side.
template <typename T> int launch_step(const gdn_step_params &p, const plan::Step &choice, cudaStream_t stream);

namespace {

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

int choose(const gdn_step_params &p, plan::Step *choice) {
  Device device = {};
  if (const int status = current_device(&device)) return status;
  *choice = plan::step(p, device);
  return GDN_OK;
}

}  // namespace
}  // namespace step
}  // namespace gdn

extern "C" int gdn_step_choice(const gdn_step_params *params, int32_t *algo) {
  using namespace gdn;
  if (!params || !algo) return GDN_NULL_POINTER;
  if (const int status = step::check(*params)) return status;
  plan::Step choice;
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
  plan::Step choice;
  if (const int status = step::choose(p, &choice)) return status;
  if (choice.algo == GDN_STEP_AUTO) return GDN_BAD_ALGO;
  return with_dtype(p.common.io_dtype, [&](auto io) { return step::launch_step<typename decltype(io)::type>(p, choice, stream); });
}
