// GDN_DECODE_128: up to 16 tokens, K = V = 128.
#include "decode.cuh"

#include "../plan.h"
#include "../step/launch.cuh"
#include "rule.h"

namespace gdn {
namespace step {
namespace {

template <typename T, typename ST, int ROWS, int WARPS> int launch_decode(const gdn_rule_params &p, cudaStream_t stream) {
  const gdn_common &c = p.common;
  const dim3 grid(kDim / (kGroups * ROWS * WARPS), static_cast<unsigned>(c.num_v_heads), static_cast<unsigned>(c.seqs.num_seqs));
  return with_gate<T>(c.gate_dtype, [&](auto gate) {
    using G = typename decltype(gate)::type;
    GDN_PROFILED(profile::Target target; if (const int status = profile::attach(target, grid, 32 * WARPS)) return status;)
    return launch(decode_kernel<T, G, ST, ROWS, WARPS>, {grid, dim3(32 * WARPS), 0, stream}, decode_params(p) GDN_PROFILED(, target));
  });
}

}  // namespace
}  // namespace step
}  // namespace gdn

int gdn::launch_decode_128(const gdn_rule_params &p, cudaStream_t stream) {
  using namespace step;
  int sms = 0;
  if (const int status = sm_count(&sms)) return status;
  const plan::DecodeShape shape = plan::decode_shape(plan::heads_of(p.common), p.common.state_dtype, sms);
  return with_dtypes(p.common, [&](auto io, auto state) {
    using T = typename decltype(io)::type;
    using ST = typename decltype(state)::type;
    if (!plan::one_token(p.common.seqs)) return launch_whole<T, ST, Unit::kRule, true, 2>(p, stream);
    if (shape.rows == 1) return launch_decode<T, ST, 1, 4>(p, stream);
    if constexpr (sizeof(ST) == 2) return launch_decode<T, ST, 4, 1>(p, stream);
    else return shape.rows == 4 ? launch_decode<T, ST, 4, 2>(p, stream) : launch_decode<T, ST, 2, 1>(p, stream);
  });
}
