// GDN_RECURRENT: any K and V up to 256, any alignment; K is padded to 32, 64, 96, 128 or 256 in registers.
#include "kernel.cuh"
#include "recurrent.h"

namespace gdn {

int launch_recurrent(const gdn_rule_params &p, cudaStream_t stream) {
  return with_dtype(p.io_dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    if (p.head_k <= 32) return recurrent::launch<T, 4, 2>(p, stream);
    if (p.head_k <= 64) return recurrent::launch<T, 8, 2>(p, stream);
    if (p.head_k <= 96) return recurrent::launch<T, 12, 2>(p, stream);
    if (p.head_k <= 128) return recurrent::launch<T, 16, 2>(p, stream);
    return recurrent::launch<T, 32, 2>(p, stream);
  });
}

}  // namespace gdn
