// GDN_RECURRENT_128: K = V = 128, the tile of value rows chosen so that the grid fills the card.
#include "recurrent.cuh"
#include "recurrent.h"

namespace gdn {

bool recurrent_128_takes(const gdn_rule_params &p) {
  return p.head_k == 128 && p.head_v == 128 && recurrent::aligned_states(p) && aligned_rows(p.q, 4, p.io_dtype) &&
         aligned_rows(p.k, 4, p.io_dtype);
}

int launch_recurrent_128(const gdn_rule_params &p, cudaStream_t stream) {
  int sms = 0;
  if (const int status = sm_count(&sms)) return status;
  const int64_t heads = static_cast<int64_t>(p.seqs.num_seqs) * p.num_v_heads;
  return with_dtypes(p, [&](auto io, auto state) {
    using T = typename decltype(io)::type;
    using ST = typename decltype(state)::type;
    // Blocks of 16, 32 or 64 rows: 8, 4 or 2 a head. All stay resident from start to end, so that a second wave would
    // double the time: small ones while they leave no multiprocessor idle. The bounds were measured (README.md).
    if (heads <= sms / 8) return recurrent::launch_as<T, ST, 16, 1, true, true>(p, stream);
    if (heads <= sms / 2) return recurrent::launch_as<T, ST, 16, 2, true, true>(p, stream);
    return recurrent::launch_as<T, ST, 16, 4, true, true>(p, stream);
  });
}

}  // namespace gdn
