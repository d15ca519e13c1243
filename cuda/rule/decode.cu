// GDN_DECODE: one token of many head sizes, or up to 16 tokens of those of the fused step.
#include "decode.cuh"

#include "../plan.h"
#include "../step/launch.cuh"
#include "rule.h"

namespace gdn {
namespace step {
namespace {

template <typename T, typename ST, int K, int ROWS, int WARPS> int launch_shape(const gdn_rule_params &p, cudaStream_t stream) {
  constexpr int kBlockRows = Lanes<ST, K>::kGroups * ROWS * WARPS;
  static_assert(32 % kBlockRows == 0, "V is a multiple of 32");
  const gdn_common &c = p.common;
  const dim3 grid(static_cast<unsigned>(c.head_v / kBlockRows), static_cast<unsigned>(c.num_v_heads), static_cast<unsigned>(c.seqs.num_seqs));
  return with_gate<T>(c.gate_dtype, [&](auto gate) {
    using G = typename decltype(gate)::type;
    GDN_PROFILED(profile::Target target; if (const int status = profile::attach(target, grid, 32 * WARPS)) return status;)
    return launch(decode_kernel<T, G, ST, K, ROWS, WARPS>, {grid, dim3(32 * WARPS), 0, stream}, decode_params(p) GDN_PROFILED(, target));
  });
}

template <typename T, typename ST, int K, plan::Work WORK> int launch_work(const gdn_rule_params &p, cudaStream_t stream) {
  constexpr plan::DecodeShape kShape = plan::decode_shape(WORK, std::is_same_v<ST, float> ? GDN_F32 : GDN_BF16, K);
  return launch_shape<T, ST, K, kShape.rows, kShape.warps>(p, stream);
}

template <typename T, typename ST, int K> int launch_one_token(const gdn_rule_params &p, plan::Work work, cudaStream_t stream) {
  switch (work) {
    case plan::Work::kFew: return launch_work<T, ST, K, plan::Work::kFew>(p, stream);
    case plan::Work::kSome: return launch_work<T, ST, K, plan::Work::kSome>(p, stream);
    default: return launch_work<T, ST, K, plan::Work::kMany>(p, stream);
  }
}

}  // namespace
}  // namespace step
}  // namespace gdn

int gdn::launch_decode(const gdn_rule_params &p, cudaStream_t stream) {
  using namespace step;
  int sms = 0;
  if (const int status = sm_count(&sms)) return status;
  const plan::Work work = plan::decode_work(p.common, sms);
  return with_dtypes(p.common, [&](auto io, auto state) {
    using T = typename decltype(io)::type;
    using ST = typename decltype(state)::type;
    if (!plan::one_token(p.common.seqs))
      return with_step_dims(p.common, [&](auto dims) { return launch_whole<T, ST, decltype(dims), Unit::kRule, true, 2>(p, stream); });
    switch (p.common.head_k) {
      case 64: return launch_one_token<T, ST, 64>(p, work, stream);
      case 96: return launch_one_token<T, ST, 96>(p, work, stream);
      case 128: return launch_one_token<T, ST, 128>(p, work, stream);
      case 192: return launch_one_token<T, ST, 192>(p, work, stream);
      default: return launch_one_token<T, ST, 256>(p, work, stream);
    }
  });
}
