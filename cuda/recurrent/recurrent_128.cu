// GDN_RECURRENT_128: K = V = 128, the tile of value rows chosen so that the grid fills the card.
#include "kernel.cuh"
#include "recurrent.h"

namespace gdn {

bool recurrent_128_takes(const gdn_rule_params &p) {
  return p.head_k == 128 && p.head_v == 128 && aligned_state(p, 4) && aligned_rows(p.q, 4, p.io_dtype) &&
         aligned_rows(p.k, 4, p.io_dtype);
}

int launch_recurrent_128(const gdn_rule_params &p, cudaStream_t stream) {
  int sms = 0;
  if (const int status = sm_count(&sms)) return status;
  const int64_t heads = static_cast<int64_t>(p.seqs.num_seqs) * p.num_v_heads;
  return with_dtype(p.io_dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    // Blocks of 16, 32 or 64 rows: 8, 4 or 2 a head. Small ones while they leave no multiprocessor idle; many tokens a
    // sequence keep all blocks resident from start to end, so that a second wave would double the time.
    const bool long_run = max_tokens(p.seqs) > recurrent::kDecodeTokens;
    const int64_t rows1 = long_run ? sms / 8 : sms / 2, rows2 = long_run ? sms / 2 : sms * 3 / 2;
    if (heads <= rows1) return recurrent::launch<T, 16, 1, true>(p, stream);
    if (heads <= rows2) return recurrent::launch<T, 16, 2, true>(p, stream);
    return recurrent::launch<T, 16, 4, true>(p, stream);
  });
}

}  // namespace gdn
