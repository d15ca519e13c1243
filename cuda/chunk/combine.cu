// The launch of the kernel between the passes over segments (context.cuh).
#include "../common/launch.cuh"
#include "../plan.h"
#include "context.cuh"

namespace gdn {
namespace chunk {
namespace {

template <int KK, int ROWS, int CLUSTER, int PARTS, bool EXACT>
int launch_combination(const gdn_rule_params &p, Plan plan, int optin, cudaStream_t stream) {
  using C = Combination<KK, ROWS, CLUSTER, 1, PARTS, EXACT>;
  static_assert(sizeof(typename C::Shared) <= kLeastShared, "a shape for every card");
  LaunchConfig c;
  c.stream = stream;
  c.overlap = true;
  c.cluster = CLUSTER;
  const int64_t blocks = ceil_div(p.common.head_v, ROWS) * p.common.num_v_heads * plan.slots * CLUSTER;
  if (blocks > kMaxBlocks) return GDN_BAD_LENGTH;
  c.grid = dim3(static_cast<unsigned>(blocks));
  c.block = dim3(C::kThreads);
  c.shared_bytes = sizeof(typename C::Shared);
  GDN_PROFILED(if (const int status = profile::attach(plan.profile, blocks, C::kThreads)) return status;)
  return launch_allowed<combine_kernel<C>>(c, optin, p, plan);
}

template <int KK> int launch_combine_as(const gdn_rule_params &p, const Plan &plan, cudaStream_t stream) {
  Device device = {};
  if (const int status = current_device(&device)) return status;
  const int optin = device.shared_bytes;
  const gdn::plan::Combine c = gdn::plan::combine(p.common, plan.slots, device);
  if constexpr (KK == 128) {
    if (c.cluster == 2 && c.rows == 16) return launch_combination<KK, 16, 2, 2, true>(p, plan, optin, stream);
    if (c.cluster == 2 && c.rows == 32) return launch_combination<KK, 32, 2, 2, true>(p, plan, optin, stream);
    if (c.cluster == 2) return launch_combination<KK, 64, 2, 1, true>(p, plan, optin, stream);
  }
  return c.rows == 16 ? launch_combination<KK, 16, 1, 1, false>(p, plan, optin, stream)
                      : launch_combination<KK, 64, 1, 1, false>(p, plan, optin, stream);
}

}  // namespace

int launch_combine(const gdn_rule_params &p, const Plan &plan, cudaStream_t stream) {
  return p.common.head_k > 64 ? launch_combine_as<128>(p, plan, stream) : launch_combine_as<64>(p, plan, stream);
}

}  // namespace chunk
}  // namespace gdn
