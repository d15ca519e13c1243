// gdn_linear: checks, and what to launch.
#include "../common/launch.cuh"
#include "many.h"
#include "plan.cuh"

namespace gdn {
namespace linear {
namespace {

template <typename T, typename W, int NT, XSource SOURCE>
int launch_kernel(const Plan &plan, const LaunchConfig &config, int optin) {
  if (const int status = allow_shared_memory(linear_kernel<T, W, NT, SOURCE>, config.shared_bytes, optin)) return status;
  return launch(linear_kernel<T, W, NT, SOURCE>, config, plan.args);
}

constexpr int kPairRows = 8;

template <typename T> int launch_pair(XSource source, const PairArgs &args, const LaunchConfig &config, int optin) {
  const auto with = [&](auto *kernel) {
    if (const int status = allow_shared_memory(kernel, config.shared_bytes, optin)) return status;
    return launch(kernel, config, args);
  };
  if constexpr (std::is_same_v<T, __nv_bfloat16>)
    if (source == XSource::kHalf) return with(pair_kernel<T, XSource::kHalf>);
  return with(pair_kernel<T, XSource::kShared>);
}

template <typename T, typename W, int NT> int launch_rows(const Plan &plan, const LaunchConfig &config, int optin) {
  if constexpr (NT == 1 && !WeightLayout<W>::kScaled)
    if (plan.x_source == XSource::kRegisters) return launch_kernel<T, W, NT, XSource::kRegisters>(plan, config, optin);
  if constexpr (NT == 1 && WeightLayout<W>::kScaled && std::is_same_v<T, __nv_bfloat16>)
    if (plan.x_source == XSource::kHalf) return launch_kernel<T, W, NT, XSource::kHalf>(plan, config, optin);
  if (plan.x_source == XSource::kShared) return launch_kernel<T, W, NT, XSource::kShared>(plan, config, optin);
  return launch_kernel<T, W, NT, XSource::kGlobal>(plan, config, optin);
}

template <typename T, typename W> int launch_any(const Plan &plan, const LaunchConfig &config, int nt, int optin) {
  if (nt == 1) return launch_rows<T, W, 1>(plan, config, optin);
  if constexpr (!WeightLayout<W>::kScaled)
    if (nt == 4) return launch_rows<T, W, 4>(plan, config, optin);
  return launch_rows<T, W, 2>(plan, config, optin);
}

// A tiling that a caller asks for.
int check_options(const gdn_linear_options &o, const Card &card) {
  const bool groups = o.groups == 0 || o.groups == 1 || o.groups == 2 || o.groups == 4;
  const bool cluster = o.cluster == 0 || o.cluster == 1 || o.cluster == 2 || o.cluster == 4 || o.cluster == 8;
  if (!groups || !cluster || o.blocks < 0 || o.warps * (o.groups ? o.groups : 1) > kMaxWarps) return GDN_BAD_ALGO;
  if (o.cluster > 1 && !card.clusters) return GDN_BAD_ALGO;
  // Gate and up meet in one block.
  if (o.swiglu && (o.groups == 1 || o.groups == 4 || o.cluster > 1 || 2 * o.warps > kMaxWarps)) return GDN_BAD_ALGO;
  return GDN_OK;
}

// So many rows at a time.
template <typename F> int in_parts(const gdn_linear_params &p, int rows, const F &f) {
  gdn_linear_params part = p;
  for (int first = 0; first < p.rows; first += rows) {
    part.x = static_cast<const char *>(p.x) + first * p.x_stride * 2;
    part.y = static_cast<char *>(p.y) + first * p.y_stride * 2;
    part.rows = p.rows - first < rows ? p.rows - first : rows;
    if (const int status = f(part)) return status;
  }
  return GDN_OK;
}

int check(const gdn_linear_params &p, const gdn_linear_options &o) {
  if (p.dtype != GDN_BF16 && p.dtype != GDN_F16) return GDN_BAD_DTYPE;
  // Inputs are addressed by 32-bit offsets in bytes, rows of w by 32-bit numbers up to a grid past the last.
  const int rows = o.swiglu ? GDN_LINEAR_SWIGLU_ROWS : (p.scales.ptr ? 2 : 1) * GDN_LINEAR_ROWS, outputs = 1 << (o.swiglu ? 29 : 30);
  if (p.rows < 0 || p.rows > rows || p.inputs < 1 || p.inputs > (1 << 29) || p.outputs < 0 || p.outputs > outputs || p.outputs_below < 0 ||
      p.outputs_below > outputs - p.outputs)
    return GDN_BAD_LENGTH;
  if (p.x_stride < 0 || p.w_stride < 0 || p.below_stride < 0 || p.y_stride < 0) return GDN_BAD_STRIDE;
  if (const int status = check_scales(p.scales)) return status;
  if (p.rows == 0 || p.outputs + p.outputs_below == 0) return GDN_OK;
  if (!p.x || !p.y || (p.outputs > 0 && !p.w) || (p.outputs_below > 0 && !p.below)) return GDN_NULL_POINTER;
  if (p.inputs % 64 || !aligned(p.x, 16) || !aligned(p.w, 16) || p.w_stride % (p.scales.ptr ? 16 : 8) ||
      (p.rows > 1 && p.x_stride % 8))
    return GDN_BAD_ALGO;
  if (p.outputs_below > 0 && (!p.scales.ptr || o.swiglu || !aligned(p.below, 16) || p.below_stride % 8)) return GDN_BAD_ALGO;
  return GDN_OK;
}

int card_of(const Problem &problem, const gdn_linear_options &o, Card *card) {
  int major = 0;
  if (const int status = sm_count(&card->sms)) return status;
  if (const int status = device_attribute<cudaDevAttrMaxSharedMemoryPerBlockOptin>(&card->optin)) return status;
  if (const int status = device_attribute<cudaDevAttrMaxSharedMemoryPerMultiprocessor>(&card->per_sm)) return status;
  if (const int status = device_attribute<cudaDevAttrComputeCapabilityMajor>(&major)) return status;
  // NOTES: clusters are not a question of the device alone, since the kernels of sm_80 may be what a newer one runs.
  card->clusters = major >= 9 && (problem.columns() > 1 || o.cluster > 1 || problem.scaled() || problem.chunks() >= kManyChunks);
  return card->clusters ? has_sm90_code(&card->clusters) : GDN_OK;
}

LaunchConfig config_of(const Plan &plan, const gdn_linear_params &p, const Card &card, cudaStream_t stream) {
  LaunchConfig config;
  config.grid = dim3(plan.tiling.cluster, static_cast<unsigned>(plan.blocks(plan.args.tiles, card)));
  config.block = dim3(32, plan.tiling.warps, plan.tiling.groups);
  config.shared_bytes = plan.bytes;
  config.stream = stream;
  config.overlap = p.overlap != 0;
  config.cluster = plan.tiling.cluster;
  return config;
}

int run(const gdn_linear_params &p, const gdn_linear_options &o, bool lets_in, cudaStream_t stream);

// More rows beside weights in e4m3 than linear_kernel takes: at once where the device can and x fits; else in two launches, as more would take
// longer than a product with the numbers in 16 bits.
int run_many(const gdn_linear_params &p, const gdn_linear_options &o, cudaStream_t stream) {
  const int status = launch_many(p, o, stream);
  if (status != GDN_BAD_ALGO || o.warps || o.groups || o.cluster || o.blocks || p.rows > 2 * GDN_LINEAR_E4M3_ROWS) return status;
  return in_parts(p, GDN_LINEAR_E4M3_ROWS, [&](const gdn_linear_params &part) { return run(part, o, false, stream); });
}

int run(const gdn_linear_params &p, const gdn_linear_options &o, bool lets_in, cudaStream_t stream) {
  if (p.rows == 0 || p.outputs == 0) return GDN_OK;
  if (p.scales.ptr && !o.swiglu && p.rows > GDN_LINEAR_E4M3_ROWS) return run_many(p, o, stream);
  const Problem problem = {p, o.swiglu != 0};
  const int nt = problem.columns();
  Card card = {};
  if (const int status = card_of(problem, o, &card)) return status;
  Plan plan;
  if (o.warps > 0) {
    if (const int status = check_options(o, card)) return status;
    const int groups = o.groups ? o.groups : o.swiglu ? 2 : 1, resident = kMaxWarps / (o.warps * groups);
    plan = make_plan(problem, {o.warps, groups, o.cluster ? o.cluster : 1, o.blocks ? o.blocks : resident}, card);
    if (plan.tiling.cluster > 1 && plan.x_source == XSource::kGlobal) return GDN_BAD_ALGO;
  } else {
    plan = nt == 1 ? plan_few(problem, card) : plan_many(problem, card);
  }
  plan.args.lets_in = lets_in;
  const LaunchConfig config = config_of(plan, p, card, stream);
  return with_dtype(p.dtype, [&](auto type) -> int {
    using T = typename decltype(type)::type;
    if constexpr (sizeof(T) == 2) {
      return problem.scaled() ? launch_any<T, E4m3>(plan, config, nt, card.optin) : launch_any<T, T>(plan, config, nt, card.optin);
    }
    return GDN_BAD_DTYPE;
  });
}

// Both at once; `done` is false where they are not of one launch.
int run_pair(const gdn_linear_params &p, const gdn_linear_params &below, cudaStream_t stream, bool *done) {
  if (p.rows > kPairRows || p.outputs == 0) return GDN_OK;
  const Problem problem = {p, false};
  Card card = {};
  if (const int status = card_of(problem, {}, &card)) return status;
  const Plan plan = plan_few(problem, card), of_below = make_plan({below, false}, plan.tiling, card);
  const int64_t tiles = of_below.args.tiles, blocks = plan.blocks(plan.args.tiles + tiles, card);
  *done = plan.x_source != XSource::kGlobal && plan.tiling.cluster == 1 && 4 * tiles <= blocks;    // the others are left enough
  if (!*done) return GDN_OK;
  LaunchConfig config = config_of(plan, p, card, stream);
  config.grid.y = static_cast<unsigned>(blocks);
  if (of_below.bytes > plan.bytes) config.shared_bytes = of_below.bytes;
  const PairArgs args = {plan.args, of_below.args};
  return p.dtype == GDN_BF16 ? launch_pair<__nv_bfloat16>(plan.x_source, args, config, card.optin)
                             : launch_pair<__half>(plan.x_source, args, config, card.optin);
}

int run(const gdn_linear_params *params, const gdn_linear_options *options, cudaStream_t stream) {
  if (!params || !options) return GDN_NULL_POINTER;
  const gdn_linear_params &p = *params;
  const gdn_linear_options &o = *options;
  if (const int status = check(p, o)) return status;
  if (p.outputs_below == 0) return run(p, o, false, stream);

  gdn_linear_params below = p;
  below.w = p.below;
  below.w_stride = p.below_stride;
  below.scales = {};
  below.y = static_cast<char *>(p.y) + int64_t{2} * p.outputs;
  below.outputs = p.outputs_below;
  bool done = false;
  if (!o.warps)
    if (const int status = run_pair(p, below, stream, &done); status || done) return status;
  // The small product first: while it waits for x and runs, the bytes of the large one are being loaded.
  const auto part_of_below = [&](const gdn_linear_params &part) { return run(part, {}, p.overlap != 0, stream); };
  if (const int status = in_parts(below, GDN_LINEAR_ROWS, part_of_below)) return status;
  return run(p, o, false, stream);
}

}  // namespace
}  // namespace linear
}  // namespace gdn

extern "C" int gdn_linear(const gdn_linear_params *params, cudaStream_t stream) {
  const gdn_linear_options none = {};
  return gdn::linear::run(params, &none, stream);
}

extern "C" int gdn_linear_with(const gdn_linear_params *params, const gdn_linear_options *options,
                               cudaStream_t stream) {
  return gdn::linear::run(params, options, stream);
}
