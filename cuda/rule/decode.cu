// GDN_DECODE_128: up to 16 tokens, K = V = 128.
#include "decode.h"

#include "../step/plan.cuh"

namespace gdn {

bool decode_128_takes(const gdn_rule_params &p) {
  return p.head_k == 128 && p.head_v == 128 && max_tokens(p.seqs) <= kDecode128Tokens && p.seqs.num_seqs <= 65535 &&
         aligned_state(p, p.state_dtype == GDN_F32 ? 4 : 8) && aligned_rows(p.q, 8, p.io_dtype) &&
         aligned_rows(p.k, 8, p.io_dtype) && aligned_rows(p.v, 4, p.io_dtype);
}

int launch_decode_128(const gdn_rule_params &p, cudaStream_t stream) {
  using namespace step;
  int sms = 0;
  if (const int status = sm_count(&sms)) return status;
  const int64_t heads = static_cast<int64_t>(p.seqs.num_seqs) * p.num_v_heads;
  const bool many = p.seqs.cu_seqlens || p.seqs.tokens_per_seq != 1;
  return with_dtypes(p, [&](auto io, auto state) {
    using T = typename decltype(io)::type;
    using ST = typename decltype(state)::type;
    // All bounds were measured (README.md).
    if (many) return launch_whole<T, ST, Unit::kRule, true, 2>(p, stream);
    SmallParams small;
    if (make_small(p, &small)) {
      if (heads <= sms * 5 / 4) return launch_warp<T, ST, 1, 4>(p, small, stream);
      if constexpr (sizeof(ST) == 2) return launch_warp<T, ST, 4, 1>(p, small, stream);
      else if (heads <= sms * 5 / 2) return launch_warp<T, ST, 4, 2>(p, small, stream);
      else return launch_warp<T, ST, 2, 1>(p, small, stream);
    }
    return launch_whole<T, ST, Unit::kRule, false, 2>(p, stream, false, 2);
  });
}

}  // namespace gdn
