// gdn_linear: checks, and what to launch.
#include "launch.cuh"

namespace gdn {
namespace linear {
namespace {

template <typename T, int NT> int launch_rows(const Plan &plan, const LaunchConfig &config, const Card &card) {
  if constexpr (NT == 1)
    if (plan.x_source == XSource::kRegisters) return launch_linear<T, Dense<T>, StoreSums, NT, XSource::kRegisters>(plan.args, config, card);
  if (plan.x_source == XSource::kShared) return launch_linear<T, Dense<T>, StoreSums, NT, XSource::kShared>(plan.args, config, card);
  return launch_linear<T, Dense<T>, StoreSums, NT, XSource::kGlobal>(plan.args, config, card);
}

int check(const gdn_linear_params &p) {
  if (p.dtype != GDN_BF16 && p.dtype != GDN_F16) return GDN_BAD_DTYPE;
  if (p.rows < 0 || p.rows > GDN_LINEAR_ROWS || !valid_sizes(p.inputs, p.outputs, false)) return GDN_BAD_LENGTH;
  if (p.x_stride < 0 || p.w_stride < 0 || p.y_stride < 0) return GDN_BAD_STRIDE;
  if (p.rows == 0 || p.outputs == 0) return GDN_OK;
  if (!p.x || !p.y || !p.w) return GDN_NULL_POINTER;
  const bool valid = p.inputs % 64 == 0 && aligned(p.x, 16) && aligned(p.w, 16) && p.w_stride % 8 == 0 && (p.rows == 1 || p.x_stride % 8 == 0);
  return valid ? GDN_OK : GDN_BAD_ALGO;
}

int run(const gdn_linear_params *params, const gdn_linear_options *options, cudaStream_t stream) {
  if (!params || !options) return GDN_NULL_POINTER;
  const gdn_linear_params &p = *params;
  if (const int status = check(p)) return status;
  if (p.rows == 0 || p.outputs == 0) return GDN_OK;
  const Problem problem = {p, sizes_of<Dense<__half>>(), false};
  const int nt = problem.columns();
  Card card = {};
  if (const int status = card_of(may_use_clusters(problem, *options), &card)) return status;
  Plan plan;
  if (options->warps > 0) {
    if (const int status = plan_asked(problem, *options, card, &plan)) return status;
  } else {
    plan = nt == 1 ? plan_few(problem, card) : plan_many(problem, card);
  }
  plan.args.lets_in = (p.overlap & GDN_OVERLAP_NEXT) != 0;
  const LaunchConfig config = config_of(plan, p.overlap != 0, card, stream);
  const auto launch_as = [&](auto number) {
    using T = decltype(number);
    return nt == 1 ? launch_rows<T, 1>(plan, config, card) : nt == 2 ? launch_rows<T, 2>(plan, config, card) : launch_rows<T, 4>(plan, config, card);
  };
  return p.dtype == GDN_BF16 ? launch_as(__nv_bfloat16()) : launch_as(__half());
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
