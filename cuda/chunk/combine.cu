// The launch of the kernel between the passes over segments (context.cuh).
#include "../common/launch.cuh"
#include "context.cuh"

namespace gdn {
namespace chunk {
namespace {

template <int KK, int ROWS, int CLUSTER, int PARTS, bool EXACT>
int launch_combination(const gdn_rule_params &p, Plan plan, int optin, cudaStream_t stream) {
  using C = Combination<KK, ROWS, CLUSTER, 1, PARTS, EXACT>;
  LaunchConfig c;
  c.stream = stream;
  c.overlap = true;
  c.cluster = CLUSTER;
  const int64_t blocks = ceil_div(p.head_v, ROWS) * p.num_v_heads * plan.slots * CLUSTER;
  if (blocks > kMaxBlocks) return GDN_BAD_LENGTH;
  c.grid = dim3(static_cast<unsigned>(blocks));
  c.block = dim3(C::kThreads);
  c.shared_bytes = sizeof(typename C::Shared);
  GDN_PROFILED(if (const int status = profile::attach(plan.profile, blocks, C::kThreads)) return status;)
  return launch_allowed<combine_kernel<C>>(c, optin, p, plan);
}

// The fewer heads, the more blocks each; which share the columns of M in a cluster. By times on an H200 (README.md).
template <int KK> int launch_combine_as(const gdn_rule_params &p, const Plan &plan, int optin, cudaStream_t stream) {
  int sms = 0;
  if (const int status = sm_count(&sms)) return status;
  const int64_t heads = static_cast<int64_t>(p.num_v_heads) * plan.slots;
  const auto blocks = [&](int rows, int cluster) { return ceil_div(p.head_v, rows) * heads * cluster; };
  if constexpr (KK == 128) {
    bool clusters = false;
    if (const int status = has_sm90_code(&clusters)) return status;
    if (clusters && p.head_k == KK) {
      if (blocks(16, 2) <= sms) return launch_combination<KK, 16, 2, 2, true>(p, plan, optin, stream);
      if (blocks(32, 2) <= 2 * sms) return launch_combination<KK, 32, 2, 2, true>(p, plan, optin, stream);
      return launch_combination<KK, 64, 2, 1, true>(p, plan, optin, stream);
    }
  }
  return blocks(16, 1) <= sms ? launch_combination<KK, 16, 1, 1, false>(p, plan, optin, stream)
                              : launch_combination<KK, 64, 1, 1, false>(p, plan, optin, stream);
}

}  // namespace

int launch_combine(const gdn_rule_params &p, const Plan &plan, cudaStream_t stream) {
  int optin = 0;
  if (const int status = device_attribute<cudaDevAttrMaxSharedMemoryPerBlockOptin>(&optin)) return status;
  return p.head_k > 64 ? launch_combine_as<128>(p, plan, optin, stream) : launch_combine_as<64>(p, plan, optin, stream);
}

}  // namespace chunk
}  // namespace gdn
