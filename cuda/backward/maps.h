// Tensor maps of the inputs, for the copy engine of sm_90.
#pragma once

#include <cuda.h>

#include "../common/tensor_map.h"
#include "../gdn.h"

namespace gdn {
namespace backward {

// As ../chunk/maps.h has them: boxes of 64 elements of a head by 64 tokens. d_v is read where it has been written, d_q and d_k hold U.
struct Maps {
  CUtensorMap q, k, v, d_o, d_v, d_q, d_k;
};

int make_maps(const gdn_rule_backward_params &p, Maps *maps);

}  // namespace backward
}  // namespace gdn
