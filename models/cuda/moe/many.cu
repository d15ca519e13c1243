// Many tokens: launches.
#include "common/launch.cuh"
#include "common/tensor_map.h"
#include "many.cuh"
#include "sort.cuh"
#include "stream.cuh"
#include "wide.cuh"

namespace gdn {
namespace moe {
namespace {

template <typename T, typename W, int ROWS>
int run_tiles(const gdn_moe_params &p, const Args &args, LaunchConfig config, int optin) {
  const int64_t pairs = static_cast<int64_t>(p.tokens) * p.top_k;
  const int64_t tiles = pairs / ROWS + (pairs < p.num_experts ? pairs : p.num_experts) +
                        (p.shared_inner > 0 ? ceil_div(p.tokens, ROWS) : 0);
  const int64_t widest = p.inner > p.shared_inner ? p.inner : p.shared_inner;
  const int64_t gate_up = ceil_div(widest, kTileOutputs / 2), down = ceil_div(p.hidden, kTileOutputs);
  if (tiles * (gate_up > down ? gate_up : down) > kMaxBlocks) return GDN_BAD_LENGTH;
  config.block = dim3(kManyThreads);
  config.shared_bytes = tile_bytes_of(ROWS);
  config.grid = dim3(static_cast<unsigned>(tiles * gate_up));
  if (const int status = launch_allowed<many_kernel<T, W, ROWS, true>>(config, optin, args, static_cast<int>(gate_up)))
    return status;
  config.grid = dim3(static_cast<unsigned>(tiles * down));
  return launch_allowed<many_kernel<T, W, ROWS, false>>(config, optin, args, static_cast<int>(down));
}

template <typename T, typename W>
int run_tiles(const gdn_moe_params &p, const Args &args, const LaunchConfig &config, int rows, int optin) {
  return rows == 32   ? run_tiles<T, W, 32>(p, args, config, optin)
         : rows == 64 ? run_tiles<T, W, 64>(p, args, config, optin)
                      : run_tiles<T, W, 128>(p, args, config, optin);
}

template <typename T, typename W, bool GATED> int run_wide(const gdn_moe_params &p, const Args &args, LaunchConfig config, int optin) {
  int sms = 0;
  if (const int status = sm_count(&sms)) return status;
  WideMaps maps = {};
  const auto make = [&](CUtensorMap *map, const void *weights, int64_t experts, int64_t inner) {
    const int64_t rows = experts * (GATED ? 2 * inner : p.hidden), inputs = GATED ? p.hidden : inner;
    // Two numbers in e4m3 are one element.
    constexpr int kEach = 2 / sizeof(W);
    return make_tensor_map(map, p.io_dtype, weights, {{inputs / kEach, rows, 1, 1}, {inputs / kEach, 0, 0}, {kWideInputs / kEach, WideShared<W>::kHalf, 1, 1}});
  };
  if (const int status = make(&maps.routed, GATED ? p.gate_up : p.down, p.num_experts, p.inner)) return status;
  if (p.shared_inner > 0)
    if (const int status = make(&maps.shared, GATED ? p.shared_gate_up : p.shared_down, 1, p.shared_inner)) return status;
  const int64_t rows = static_cast<int64_t>(p.tokens) * (p.top_k + (p.shared_inner > 0));
  const TensorShape h = {{args.h_stride, rows, 1, 1}, {args.h_stride, 0, 0}, {kWideInputs, kWideHRows, 1, 1}};
  if (const int status = make_tensor_map(&maps.h, p.io_dtype, args.h, h)) return status;
  config.grid = dim3(static_cast<unsigned>(sms));
  config.block = dim3(kWideThreads);
  config.shared_bytes = sizeof(WideShared<W>);
  return launch_allowed<wide_kernel<T, W, GATED>>(config, optin, args, maps);
}

template <typename T, typename W> int run_wide(const gdn_moe_params &p, const Args &args, const LaunchConfig &config, int optin) {
  if (const int status = run_wide<T, W, true>(p, args, config, optin)) return status;
  return run_wide<T, W, false>(p, args, config, optin);
}

// Where both kernels' tiles of rows have place.
bool can_stream(const gdn_moe_params &p, const Args &args, int optin) {
  return stream_gate_up_shared(p.hidden) <= optin && stream_down_shared(args.h_stride) <= optin;
}

template <typename T> int run_stream(const gdn_moe_params &p, const Args &args, LaunchConfig config, int optin) {
  int sms = 0;
  if (const int status = sm_count(&sms)) return status;
  config.grid = dim3(static_cast<unsigned>(sms));
  config.block = dim3(kStreamThreads);
  config.shared_bytes = stream_gate_up_shared(p.hidden);
  if (const int status = launch_allowed<stream_gate_up_kernel<T>>(config, optin, args)) return status;
  config.shared_bytes = stream_down_shared(args.h_stride);
  return launch_allowed<stream_down_kernel<T>>(config, optin, args);
}

}  // namespace

template <typename T> int run_many(const gdn_moe_params &p, const Args &args, cudaStream_t stream) {
  int optin = 0;
  if (const int status = shared_limit(&optin)) return status;
  LaunchConfig config;
  config.stream = stream;
  if (const int status = run_scores<T>(p, args, stream)) return status;
  config.overlap = p.overlap >= 0;
  const int each = choose_tokens(p.tokens);
  config.grid = dim3(static_cast<unsigned>(ceil_div(p.tokens, each)));
  config.block = dim3(kChooseThreads);
  if (const int status = launch(choose_kernel, config, args, each)) return status;

  const bool scaled = p.gate_up_scales.ptr;
  int rows = tile_rows(static_cast<int64_t>(p.tokens) * p.top_k, p.num_experts);
  bool wide = false;    // for experts with few rows many_kernel is as fast
  if (const int status = has_sm90a_code(&wide)) return status;
  wide = wide && rows > 32;
  if (wide) rows = scaled ? WideShared<E4m3>::kRows : WideShared<T>::kRows;
  // Five stages of 32 rows have no room in 99 KB; the tiles of the others have.
  static_assert(tile_bytes_of(64) <= kLeastShared && tile_bytes_of(128) <= kLeastShared, "a shape for every card");
  if (rows == 32 && tile_bytes_of(32) > optin) rows = 64;
  int columns = 32;
  while (columns < p.num_experts) columns *= 2;
  config.overlap = p.overlap >= 0;
  config.block = dim3(kSortThreads);
  if (const int status = launch(place_kernel, config, args, each, columns, rows)) return status;

  const auto run_products = [&](auto weight) {
    using W = decltype(weight);
    if (wide) return run_wide<T, W>(p, args, config, optin);
    if constexpr (std::is_same_v<W, E4m3>)
      if (rows == kStreamRows && can_stream(p, args, optin)) return run_stream<T>(p, args, config, optin);
    return run_tiles<T, W>(p, args, config, rows, optin);
  };
  const int status = scaled ? run_products(E4m3{}) : run_products(T{});
  if (status) return status;
  config.grid = dim3(static_cast<unsigned>(p.tokens));
  config.block = dim3(kSumThreads);
  config.shared_bytes = 0;
  return launch(sum_kernel<T>, config, args);
}

template int run_many<__nv_bfloat16>(const gdn_moe_params &, const Args &, cudaStream_t);
template int run_many<__half>(const gdn_moe_params &, const Args &, cudaStream_t);

}  // namespace moe
}  // namespace gdn
