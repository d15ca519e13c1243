// GDN_RECURRENT: any K and V up to 256, any alignment. One translation unit an input type, so that they compile side by side.
#include "recurrent.h"

#include "../common/convert.cuh"

int gdn::launch_recurrent(const gdn_rule_params &p, cudaStream_t stream) {
  return with_dtype(p.io_dtype, [&](auto type) { return recurrent::launch_any<typename decltype(type)::type>(p, stream); });
}
