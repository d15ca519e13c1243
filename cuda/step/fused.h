// What the fused step knows beyond the rule: gdn_step_params, brought into the form of gdn_rule_params so that both share
// their kernels.
#pragma once

#include "../gdn.h"

namespace gdn {
namespace step {

// q, k and v of the base are the columns of x; o is the normalised output.
struct FusedParams : gdn_rule_params {
  gdn_heads z;
  const void *conv_weight, *norm_weight;
  const void *conv_in;
  void *conv_out;
  int64_t conv_in_stride, conv_out_stride;    // from slot to slot
  int32_t channels;
  int32_t conv_dtype, norm_dtype;
  int32_t sigmoid;
  int32_t overlap;
  float norm_eps;
};

}  // namespace step
}  // namespace gdn
