// GDN_DECODE_128: up to 16 tokens, K = V = 128.
#include "decode.h"

#include "../step/launch.cuh"
#include "decode.cuh"

namespace gdn {
namespace step {
namespace {

bool offsets_fit(const gdn_rule_params &p) {
  const gdn_common &c = p.common;
  return short_offsets(c) && short_offsets(p.q, c.seqs.num_seqs, c.num_k_heads, kDim) &&
         short_offsets(p.k, c.seqs.num_seqs, c.num_k_heads, kDim) && short_offsets(p.v, c.seqs.num_seqs, c.num_v_heads, kDim) &&
         short_offsets(p.o, c.seqs.num_seqs, c.num_v_heads, kDim);
}

template <typename T, typename ST, int ROWS, int WARPS> int launch_decode(const gdn_rule_params &p, cudaStream_t stream) {
  const gdn_common &c = p.common;
  const dim3 grid(kDim / (kGroups * ROWS * WARPS), static_cast<unsigned>(c.num_v_heads), static_cast<unsigned>(c.seqs.num_seqs));
  return with_gate<T>(c.gate_dtype, [&](auto gate) {
    using G = typename decltype(gate)::type;
    GDN_PROFILED(profile::Target target; if (const int status = profile::attach(target, grid, 32 * WARPS)) return status;)
    return launch(decode_kernel<T, G, ST, ROWS, WARPS>, {grid, dim3(32 * WARPS), 0, stream}, p, sizes_of(c) GDN_PROFILED(, target));
  });
}

}  // namespace
}  // namespace step

bool decode_128_supports(const gdn_rule_params &p) {
  const gdn_common &c = p.common;
  return c.head_k == 128 && c.head_v == 128 && max_tokens(c.seqs) <= kDecode128Tokens && c.seqs.num_seqs <= 65535 &&
         aligned_state(c, c.state_dtype == GDN_F32 ? 4 : 8) && aligned_rows(p.q, 8, c.io_dtype) && aligned_rows(p.k, 8, c.io_dtype) &&
         aligned_rows(p.v, 4, c.io_dtype);
}

int launch_decode_128(const gdn_rule_params &p, cudaStream_t stream) {
  using namespace step;
  int sms = 0;
  if (const int status = sm_count(&sms)) return status;
  const int64_t heads = static_cast<int64_t>(p.common.seqs.num_seqs) * p.common.num_v_heads;
  return with_dtypes(p.common, [&](auto io, auto state) {
    using T = typename decltype(io)::type;
    using ST = typename decltype(state)::type;
    // All bounds were measured (README.md).
    if (p.common.seqs.cu_seqlens || p.common.seqs.tokens_per_seq != 1) return launch_whole<T, ST, Unit::kRule, true, 2>(p, stream);
    if (!offsets_fit(p)) return launch_whole<T, ST, Unit::kRule, false, 2>(p, stream, false, 2);
    if (heads <= sms * 5 / 4) return launch_decode<T, ST, 1, 4>(p, stream);
    if constexpr (sizeof(ST) == 2) return launch_decode<T, ST, 4, 1>(p, stream);
    else if (heads <= sms * 5 / 2) return launch_decode<T, ST, 4, 2>(p, stream);
    else return launch_decode<T, ST, 2, 1>(p, stream);
  });
}

}  // namespace gdn
