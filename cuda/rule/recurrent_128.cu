// GDN_RECURRENT_128: K = V = 128, the tile of value rows chosen so that the grid fills the card.
#include "../plan.h"
#include "recurrent.cuh"
#include "rule.h"

int gdn::launch_recurrent_128(const gdn_rule_params &p, cudaStream_t stream) {
  int sms = 0;
  if (const int status = sm_count(&sms)) return status;
  const int rows = plan::recurrent_rows(plan::heads_of(p.common), sms);
  return with_dtypes(p.common, [&](auto io, auto state) {
    using T = typename decltype(io)::type;
    using ST = typename decltype(state)::type;
    return rows == 1   ? recurrent::launch_as<T, ST, 16, 1, true, true>(p, stream)
           : rows == 2 ? recurrent::launch_as<T, ST, 16, 2, true, true>(p, stream)
                       : recurrent::launch_as<T, ST, 16, 4, true, true>(p, stream);
  });
}
