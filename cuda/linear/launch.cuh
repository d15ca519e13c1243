// What gdn_linear and products with other layouts of weights do between their checks and a launch of the kernel.
#pragma once

#include "../common/launch.cuh"
#include "plan.cuh"

namespace gdn {
namespace linear {

// `clusters`: whether some might be used.
inline int card_of(bool clusters, Card *card) {
  int major = 0;
  if (const int status = sm_count(&card->sms)) return status;
  if (const int status = shared_limit(&card->optin)) return status;
  if (const int status = shared_of_sm(&card->per_sm)) return status;
  if (const int status = device_attribute<cudaDevAttrComputeCapabilityMajor>(&major)) return status;
  // NOTES: clusters are not a question of the device alone, since the kernels of sm_80 may be what a newer one runs.
  card->clusters = major >= 9 && clusters;
  return card->clusters ? has_sm90_code(&card->clusters) : GDN_OK;
}

inline bool may_use_clusters(const Problem &problem, const gdn_linear_options &o) {
  return problem.columns() > 1 || o.cluster > 1 || problem.chunks() >= kManyChunks;
}

// A tiling that a caller asks for.
inline int plan_asked(const Problem &problem, const gdn_linear_options &o, const Card &card, Plan *plan) {
  const bool valid_groups = o.groups == 0 || o.groups == 1 || o.groups == 2 || o.groups == 4;
  const bool valid_cluster = o.cluster == 0 || o.cluster == 1 || o.cluster == 2 || o.cluster == 4 || o.cluster == 8;
  if (!valid_groups || !valid_cluster || o.blocks < 0 || o.warps * (o.groups ? o.groups : 1) > kMaxWarps) return GDN_BAD_ALGO;
  if (o.cluster > 1 && !card.clusters) return GDN_BAD_ALGO;
  // The two rows of an output meet in one block.
  if (problem.paired && (o.groups == 1 || o.groups == 4 || o.cluster > 1 || 2 * o.warps > kMaxWarps)) return GDN_BAD_ALGO;
  const int groups = o.groups ? o.groups : problem.paired ? 2 : 1, resident = kMaxWarps / (o.warps * groups);
  *plan = make_plan(problem, {o.warps, groups, o.cluster ? o.cluster : 1, o.blocks ? o.blocks : resident}, card);
  return plan->tiling.cluster > 1 && plan->x_source == XSource::kGlobal ? GDN_BAD_ALGO : GDN_OK;
}

inline LaunchConfig config_of(const Plan &plan, bool overlap, const Card &card, cudaStream_t stream) {
  LaunchConfig config;
  config.grid = dim3(plan.tiling.cluster, static_cast<unsigned>(plan.blocks(plan.args.tiles, card)));
  config.block = dim3(32, plan.tiling.warps, plan.tiling.groups);
  config.shared_bytes = plan.bytes;
  config.stream = stream;
  config.overlap = overlap;
  config.cluster = plan.tiling.cluster;
  return config;
}

// `args`: the plan's, or more for a layout or an epilogue of another package.
template <typename T, typename WEIGHTS, typename EPILOGUE, int NT, XSource SOURCE, typename A>
int launch_linear(const A &args, const LaunchConfig &config, const Card &card) {
  const auto kernel = linear_kernel<A, T, WEIGHTS, EPILOGUE, NT, SOURCE>;
  if (const int status = allow_shared_memory(kernel, config.shared_bytes, card.optin)) return status;
  return launch(kernel, config, args);
}

// Inputs are addressed by 32-bit offsets in bytes, rows of w by 32-bit numbers up to a grid past the last.
inline bool valid_sizes(int64_t inputs, int64_t outputs, bool paired) {
  return inputs >= 1 && inputs <= (1 << 29) && outputs >= 0 && outputs <= (1 << (paired ? 29 : 30));
}

}  // namespace linear
}  // namespace gdn
