// gdn_linear: checks, and what to launch.
#include "../common/launch.cuh"
#include "many.h"
#include "plan.cuh"

namespace gdn {
namespace linear {
namespace {

template <typename T, typename W, int NT, From FROM>
int launch_kernel(const Plan &plan, const LaunchConfig &config, int optin) {
  if (const int status = allow_shared_memory(linear_kernel<T, W, NT, FROM>, config.shared_bytes, optin)) return status;
  return launch(linear_kernel<T, W, NT, FROM>, config, plan.args);
}

template <typename T, typename W, int NT> int launch_rows(const Plan &plan, const LaunchConfig &config, int optin) {
  if constexpr (NT == 1 && !Beside<W>::kScaled)
    if (plan.from == From::kRegisters) return launch_kernel<T, W, NT, From::kRegisters>(plan, config, optin);
  if constexpr (NT == 1 && Beside<W>::kScaled && std::is_same_v<T, __nv_bfloat16>)
    if (plan.from == From::kHalf) return launch_kernel<T, W, NT, From::kHalf>(plan, config, optin);
  if (plan.from == From::kShared) return launch_kernel<T, W, NT, From::kShared>(plan, config, optin);
  return launch_kernel<T, W, NT, From::kGlobal>(plan, config, optin);
}

template <typename T, typename W> int launch_any(const Plan &plan, const LaunchConfig &config, int nt, int optin) {
  if (nt == 1) return launch_rows<T, W, 1>(plan, config, optin);
  if constexpr (!Beside<W>::kScaled)
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

int run(const gdn_linear_params *params, const gdn_linear_options *options, cudaStream_t stream);

// More rows beside weights in e4m3 than linear_kernel takes: at once where the device can and x fits; else in two launches, as more would take
// longer than a product with the numbers in 16 bits.
int run_many(const gdn_linear_params &p, const gdn_linear_options &o, cudaStream_t stream) {
  const int status = launch_many(p, o, stream);
  if (status != GDN_BAD_ALGO || o.warps || o.groups || o.cluster || o.blocks || p.rows > 2 * GDN_LINEAR_E4M3_ROWS) return status;
  gdn_linear_params part = p;
  for (int first = 0; first < p.rows; first += GDN_LINEAR_E4M3_ROWS) {
    part.x = static_cast<const char *>(p.x) + first * p.x_stride * 2;
    part.y = static_cast<char *>(p.y) + first * p.y_stride * 2;
    part.rows = p.rows - first < GDN_LINEAR_E4M3_ROWS ? p.rows - first : GDN_LINEAR_E4M3_ROWS;
    if (const int failed = run(&part, &o, stream)) return failed;
  }
  return GDN_OK;
}

int run(const gdn_linear_params *params, const gdn_linear_options *options, cudaStream_t stream) {
  if (!params || !options) return GDN_NULL_POINTER;
  const gdn_linear_params &p = *params;
  const gdn_linear_options &o = *options;
  if (p.dtype != GDN_BF16 && p.dtype != GDN_F16) return GDN_BAD_DTYPE;
  // Inputs are addressed by 32-bit offsets in bytes, rows of w by 32-bit numbers up to a grid past the last.
  const int most = o.swiglu ? GDN_LINEAR_SWIGLU_ROWS : (p.scales.ptr ? 2 : 1) * GDN_LINEAR_ROWS;
  if (p.rows < 0 || p.rows > most || p.inputs < 1 ||
      p.inputs > (1 << 29) || p.outputs < 0 || p.outputs > (1 << (o.swiglu ? 29 : 30)))
    return GDN_BAD_LENGTH;
  if (p.x_stride < 0 || p.w_stride < 0 || p.y_stride < 0) return GDN_BAD_STRIDE;
  if (const int status = check_scales(p.scales)) return status;
  if (p.rows == 0 || p.outputs == 0) return GDN_OK;
  if (!p.x || !p.w || !p.y) return GDN_NULL_POINTER;
  if (p.inputs % 64 || !aligned(p.x, 16) || !aligned(p.w, 16) || p.w_stride % (p.scales.ptr ? 16 : 8) ||
      (p.rows > 1 && p.x_stride % 8))
    return GDN_BAD_ALGO;
  if (p.scales.ptr && !o.swiglu && p.rows > GDN_LINEAR_E4M3_ROWS) return run_many(p, o, stream);

  Card card = {};
  int major = 0;
  if (const int status = sm_count(&card.sms)) return status;
  if (const int status = device_attribute<cudaDevAttrMaxSharedMemoryPerBlockOptin>(&card.optin)) return status;
  if (const int status = device_attribute<cudaDevAttrMaxSharedMemoryPerMultiprocessor>(&card.per_sm)) return status;
  if (const int status = device_attribute<cudaDevAttrComputeCapabilityMajor>(&major)) return status;
  const Problem problem = {p, o.swiglu != 0};
  const int nt = problem.columns(), optin = card.optin;
  // NOTES: clusters are not a question of the device alone, since the kernels of sm_80 may be what a newer one runs.
  card.clusters = major >= 9 && (nt > 1 || o.cluster > 1 || problem.scaled() || problem.chunks() >= kManyChunks);
  if (card.clusters)
    if (const int status = has_sm90_code(&card.clusters)) return status;

  Plan plan;
  if (o.warps > 0) {
    if (const int status = check_options(o, card)) return status;
    const int groups = o.groups ? o.groups : o.swiglu ? 2 : 1, resident = kMaxWarps / (o.warps * groups);
    plan = make_plan(problem, {o.warps, groups, o.cluster ? o.cluster : 1, o.blocks ? o.blocks : resident}, card);
    if (plan.tiling.cluster > 1 && plan.from == From::kGlobal) return GDN_BAD_ALGO;
  } else {
    plan = nt == 1 ? plan_few(problem, card) : plan_many(problem, card);
  }

  const Tiling &tiling = plan.tiling;
  LaunchConfig config;
  const int64_t tiles = plan.args.tiles;
  const int64_t wave = ceil_div(static_cast<int64_t>(card.sms) * tiling.blocks_per_sm, tiling.cluster);
  const int64_t grid = tiles < wave ? tiles : wave;
  config.grid = dim3(tiling.cluster, static_cast<unsigned>(grid < 65535 ? grid : 65535));
  config.block = dim3(32, tiling.warps, tiling.groups);
  config.shared_bytes = plan.bytes;
  config.stream = stream;
  config.overlap = p.overlap != 0;
  config.cluster = tiling.cluster;
  return with_dtype(p.dtype, [&](auto type) -> int {
    using T = typename decltype(type)::type;
    if constexpr (sizeof(T) == 2) {
      return problem.scaled() ? launch_any<T, E4m3>(plan, config, nt, optin) : launch_any<T, T>(plan, config, nt, optin);
    }
    return GDN_BAD_DTYPE;
  });
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
