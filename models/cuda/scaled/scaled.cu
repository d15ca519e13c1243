// gdn_scaled: checks, and what to launch.
#include "linear/launch.cuh"
#include "many.h"
#include "plan.cuh"

namespace gdn {
namespace scaled {
namespace {

constexpr int kPairRows = 8;

gdn_linear_params linear_params(const gdn_scaled_params &p) {
  return {p.x, p.w, p.y, p.x_stride, p.w_stride, p.y_stride, p.rows, p.inputs, p.outputs, p.dtype, p.overlap};
}

Args args_of(const gdn_scaled_params &p, const Plan &plan) {
  return {plan.args, scale_args(p.scales), static_cast<int32_t>(plan.extra_at), p.swiglu != 0};
}

template <typename T, int NT> int launch_e4m3(const Args &args, XSource x_source, bool half, const LaunchConfig &config, const Card &card) {
  const bool shared = x_source == XSource::kShared;
  if constexpr (NT == 1 && std::is_same_v<T, __nv_bfloat16>)
    if (shared && half) return linear::launch_linear<T, Stored<T, true>, StoreSwiglu, NT, XSource::kShared>(args, config, card);
  if (shared) return linear::launch_linear<T, Stored<T, false>, StoreSwiglu, NT, XSource::kShared>(args, config, card);
  return linear::launch_linear<T, Stored<T, false>, StoreSwiglu, NT, XSource::kGlobal>(args, config, card);
}

// Up to 8 rows, with SwiGLU.
template <typename T> int launch_dense(const Args &args, XSource x_source, const LaunchConfig &config, const Card &card) {
  using linear::Dense;
  if (x_source == XSource::kRegisters) return linear::launch_linear<T, Dense<T>, StoreSwiglu, 1, XSource::kRegisters>(args, config, card);
  if (x_source == XSource::kShared) return linear::launch_linear<T, Dense<T>, StoreSwiglu, 1, XSource::kShared>(args, config, card);
  return linear::launch_linear<T, Dense<T>, StoreSwiglu, 1, XSource::kGlobal>(args, config, card);
}

template <typename T> int launch_pair(bool half, const PairArgs &args, const LaunchConfig &config, const Card &card) {
  const auto with = [&](auto *kernel) {
    if (const int status = allow_shared_memory(kernel, config.shared_bytes, card.optin)) return status;
    return launch(kernel, config, args);
  };
  if constexpr (std::is_same_v<T, __nv_bfloat16>)
    if (half) return with(pair_kernel<T, true>);
  return with(pair_kernel<T, false>);
}

// So many rows at a time.
template <typename P, typename F> int in_parts(const P &p, int rows, const F &f) {
  P part = p;
  for (int first = 0; first < p.rows; first += rows) {
    part.x = static_cast<const char *>(p.x) + first * p.x_stride * 2;
    part.y = static_cast<char *>(p.y) + first * p.y_stride * 2;
    part.rows = p.rows - first < rows ? p.rows - first : rows;
    if (const int status = f(part)) return status;
  }
  return GDN_OK;
}

int check(const gdn_scaled_params &p) {
  if (p.dtype != GDN_BF16 && p.dtype != GDN_F16) return GDN_BAD_DTYPE;
  if (p.rows < 0 || p.rows > (p.swiglu ? GDN_SWIGLU_ROWS : GDN_SCALED_ROWS) || p.outputs < 0 || p.outputs_below < 0 ||
      !linear::valid_sizes(p.inputs, int64_t{p.outputs} + p.outputs_below, p.swiglu != 0))
    return GDN_BAD_LENGTH;
  if (p.x_stride < 0 || p.w_stride < 0 || p.below_stride < 0 || p.y_stride < 0) return GDN_BAD_STRIDE;
  if (const int status = check_scales(p.scales)) return status;
  if (p.rows == 0 || p.outputs + p.outputs_below == 0) return GDN_OK;
  if (!p.x || !p.y || (p.outputs > 0 && !p.w) || (p.outputs_below > 0 && !p.below)) return GDN_NULL_POINTER;
  if ((!p.scales.ptr && !p.swiglu) || p.inputs % 64 || !aligned(p.x, 16) || !aligned(p.w, 16) || p.w_stride % (p.scales.ptr ? 16 : 8) ||
      (p.rows > 1 && p.x_stride % 8))
    return GDN_BAD_ALGO;
  if (p.outputs_below > 0 && (!p.scales.ptr || p.swiglu || !aligned(p.below, 16) || p.below_stride % 8)) return GDN_BAD_ALGO;
  return GDN_OK;
}

int run(const gdn_scaled_params &p, const gdn_linear_options &o, cudaStream_t stream);

// More rows than linear_kernel takes beside weights in e4m3: at once where the device can and x fits; else in two launches, as more would take
// longer than a product with the numbers in 16 bits.
int run_many(const gdn_scaled_params &p, const gdn_linear_options &o, cudaStream_t stream) {
  const int status = launch_many(p, o, stream);
  if (status != GDN_BAD_ALGO || o.warps || o.groups || o.cluster || o.blocks || p.rows > 2 * GDN_SCALED_FEW_ROWS) return status;
  return in_parts(p, GDN_SCALED_FEW_ROWS, [&](const gdn_scaled_params &part) { return run(part, o, stream); });
}

// Without rows below.
int run(const gdn_scaled_params &p, const gdn_linear_options &o, cudaStream_t stream) {
  if (p.rows == 0 || p.outputs == 0) return GDN_OK;
  const bool e4m3 = p.scales.ptr != nullptr;
  if (p.rows > GDN_SCALED_FEW_ROWS) return run_many(p, o, stream);    // e4m3: with SwiGLU there are fewer
  const gdn_linear_params product = linear_params(p);
  const Problem problem = problem_of(p, product);
  Card card = {};
  if (const int status = linear::card_of(e4m3 || linear::may_use_clusters(problem, o), &card)) return status;
  Plan plan;
  if (o.warps > 0) {
    if (const int status = linear::plan_asked(problem, o, card, &plan)) return status;
  } else {
    plan = plan_of(problem, e4m3, card);
  }
  const LaunchConfig config = linear::config_of(plan, p.overlap != 0, card, stream);
  const Args args = args_of(p, plan);
  const auto launch_as = [&](auto number) {
    using T = decltype(number);
    if (!e4m3) return launch_dense<T>(args, plan.x_source, config, card);
    return problem.columns() == 1 ? launch_e4m3<T, 1>(args, plan.x_source, converts_x(p), config, card)
                                  : launch_e4m3<T, 2>(args, plan.x_source, false, config, card);
  };
  return p.dtype == GDN_BF16 ? launch_as(__nv_bfloat16()) : launch_as(__half());
}

// Both at once; `done` is false where they are not of one launch.
int run_pair(const gdn_scaled_params &p, const gdn_linear_params &below, cudaStream_t stream, bool *done) {
  if (p.rows > kPairRows || p.outputs == 0) return GDN_OK;
  const gdn_linear_params product = linear_params(p);
  const Problem problem = problem_of(p, product);
  Card card = {};
  if (const int status = linear::card_of(true, &card)) return status;
  const Plan plan = plan_of(problem, true, card);
  const Plan of_below = linear::make_plan({below, linear::sizes_of<linear::Dense<__half>>(), false}, plan.tiling, card);
  const int64_t tiles = of_below.args.tiles, blocks = plan.blocks(plan.args.tiles + tiles, card);
  *done = plan.x_source != XSource::kGlobal && plan.tiling.cluster == 1 && 4 * tiles <= blocks;    // the others are left enough
  if (!*done) return GDN_OK;
  LaunchConfig config = linear::config_of(plan, p.overlap != 0, card, stream);
  config.grid.y = static_cast<unsigned>(blocks);
  if (of_below.bytes > plan.bytes) config.shared_bytes = of_below.bytes;
  const PairArgs args = {args_of(p, plan), of_below.args};
  return p.dtype == GDN_BF16 ? launch_pair<__nv_bfloat16>(converts_x(p), args, config, card) : launch_pair<__half>(false, args, config, card);
}

int run_with_below(const gdn_scaled_params &p, const gdn_linear_options &o, cudaStream_t stream) {
  gdn_linear_params below = linear_params(p);
  below.w = p.below;
  below.w_stride = p.below_stride;
  below.y = static_cast<char *>(p.y) + int64_t{2} * p.outputs;
  below.outputs = p.outputs_below;
  bool done = false;
  if (p.rows > GDN_SCALED_FEW_ROWS) {
    if (const int status = launch_many(p, o, stream); status != GDN_BAD_ALGO) return status;
  } else if (!o.warps) {
    if (const int status = run_pair(p, below, stream, &done); status || done) return status;
  }
  // The small product first: while it waits for x and runs, the bytes of the large one are being loaded.
  if (p.overlap) below.overlap = GDN_OVERLAP | GDN_OVERLAP_NEXT;
  const auto part_of_below = [&](const gdn_linear_params &part) { return gdn_linear(&part, stream); };
  if (const int status = in_parts(below, GDN_LINEAR_ROWS, part_of_below)) return status;
  gdn_scaled_params above = p;
  above.outputs_below = 0;
  return run(above, o, stream);
}

}  // namespace
}  // namespace scaled
}  // namespace gdn

extern "C" int gdn_scaled(const gdn_scaled_params *params, const gdn_linear_options *options, cudaStream_t stream) {
  using namespace gdn::scaled;
  if (!params) return GDN_NULL_POINTER;
  const gdn_linear_options none = {}, &o = options ? *options : none;
  if (const int status = check(*params)) return status;
  return params->outputs_below ? run_with_below(*params, o, stream) : run(*params, o, stream);
}
