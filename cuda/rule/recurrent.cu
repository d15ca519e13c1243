// GDN_RECURRENT: any K and V up to 256, any alignment.
#include "rule.h"

#include "../common/convert.cuh"

int gdn::launch_recurrent(const gdn_rule_params &p, cudaStream_t stream) {
  return p.common.io_dtype == GDN_F32 ? recurrent::launch_any<float>(p, stream) : recurrent::launch_any<Any16>(p, stream);
}
