// gdn_linear: checks, and what to launch.
#include <stdlib.h>

#include "../common/host.cuh"
#include "../common/launch.cuh"
#include "kernel.cuh"

namespace gdn {
namespace linear {
namespace {

// How a product is cut. A tile is 16 * groups outputs; `warps` times `cluster` warps share its inputs.
struct Cut {
  int warps;           // along the inputs, in a block
  int groups;          // of 16 outputs, in a block: 1, 2 or 4
  int cluster;         // blocks that share the inputs of a tile: 1, or on sm_90 2, 4 or 8
  int blocks_per_sm;   // of the grid; what is more than the card holds at once just comes later
};

// The first line that fits: rows up to, and more tiles of 16 outputs than so many for every multiprocessor. `warps` is
// what is wanted; fit_warps() takes the nearest number that divides the inputs well.
struct Line {
  int rows, tiles_per_sm;
  Cut cut;
};
constexpr Line kTable[] = {
    // Few outputs: a tile a multiprocessor, with all its bytes under way at once. From 9 rows on the traffic of x
    // counts, which larger tiles of fewer inputs divide. Many: small blocks, that wait for each other less.
    {8, 1, {8, 1, 1, 2}},
    {8, 0, {16, 1, 1, 1}},
    {16, 1, {8, 1, 1, 2}},
    {GDN_LINEAR_ROWS, 1, {8, 2, 1, 1}},
    {GDN_LINEAR_ROWS, 0, {8, 2, 2, 1}},
};

// The warps along the inputs that leave the fewest places of rounds empty; of those, the nearest to what is wanted.
int fit_warps(int chunks, int wanted, int cluster, int most) {
  int best = 1;
  int64_t best_places = INT64_MAX;
  for (int warps = most < 4 ? most : 4; warps <= most; ++warps) {
    const int64_t parts = static_cast<int64_t>(warps) * cluster;
    const int64_t places = ceil_div(ceil_div(chunks, parts), kChunks) * kChunks * parts;
    if (places < best_places || (places == best_places && abs(warps - wanted) < abs(best - wanted))) {
      best = warps;
      best_places = places;
    }
  }
  return best;
}

// What a cut tells the kernel.
struct Plan {
  Args args;
  From from;
  int64_t bytes;    // of shared memory
};

Plan make_plan(const gdn_linear_params &p, const Cut &cut, int nt, int optin, int per_sm) {
  Plan plan = {};
  Args &args = plan.args;
  args.w = p.w;
  args.x = p.x;
  args.y = p.y;
  args.w_row = p.w_stride * 2;
  args.x_row = p.x_stride * 2;
  args.y_stride = p.y_stride;
  args.rows = p.rows;
  args.outputs = p.outputs;
  args.chunks = p.inputs / kChunk;
  args.slice = static_cast<int>(ceil_div(args.chunks, cut.warps * cut.cluster));
  args.rounds = static_cast<int>(ceil_div(args.slice, kChunks));
  args.group_shift = cut.groups == 4 ? 2 : cut.groups - 1;
  args.tiles = static_cast<int>(ceil_div(p.outputs, kTile * cut.groups));

  // Barriers, partial sums, what blocks of a cluster send each other, x.
  const int warps = cut.warps * cut.groups;
  int64_t bytes = kBarriers;
  args.partial_at = static_cast<int>(bytes);
  bytes += static_cast<int64_t>(warps) * nt * 8 * kColumn * sizeof(float);
  args.meet_at = static_cast<int>(bytes);
  if (cut.cluster > 1) bytes += ceil_div(2 * p.rows * kTile * cut.groups * sizeof(float), 16) * 16;
  plan.from = From::kRegisters;
  if (nt > 1 || args.rounds > 1) {
    // x beside as many blocks as the cut has on a multiprocessor, each of which costs 1 KB more.
    const int64_t row = static_cast<int64_t>(cut.warps) * args.slice * kChunkBytes + kPadding, x = row * p.rows;
    const int beside = cut.blocks_per_sm > 4 ? 1 : cut.blocks_per_sm;
    const bool fits = bytes + x <= optin && (bytes + x + 1024) * beside <= per_sm;
    args.x_at = static_cast<int>(bytes);
    args.x_shared_row = static_cast<int>(row);
    plan.from = fits ? From::kShared : From::kGlobal;
    if (fits) bytes += x;
  }
  plan.bytes = bytes;
  return plan;
}

template <typename T, int NT, From FROM> int launch_kernel(const Plan &plan, const LaunchConfig &config, int optin) {
  if (const int status = allow_shared_memory(linear_kernel<T, NT, FROM>, config.shared_bytes, optin)) return status;
  return launch(linear_kernel<T, NT, FROM>, config, plan.args);
}

template <typename T, int NT> int launch_rows(const Plan &plan, const LaunchConfig &config, int optin) {
  if constexpr (NT == 1)
    if (plan.from == From::kRegisters) return launch_kernel<T, NT, From::kRegisters>(plan, config, optin);
  if (plan.from == From::kShared) return launch_kernel<T, NT, From::kShared>(plan, config, optin);
  return launch_kernel<T, NT, From::kGlobal>(plan, config, optin);
}

int run(const gdn_linear_params *params, cudaStream_t stream) {
  if (!params) return GDN_NULL_POINTER;
  const gdn_linear_params &p = *params;
  if (p.dtype != GDN_BF16 && p.dtype != GDN_F16) return GDN_BAD_DTYPE;
  // Inputs are addressed by 32-bit offsets in bytes, outputs by 32-bit numbers up to a grid past the last.
  if (p.rows < 0 || p.rows > GDN_LINEAR_ROWS || p.inputs < 1 || p.inputs > (1 << 29) || p.outputs < 0 ||
      p.outputs > (1 << 30))
    return GDN_BAD_LENGTH;
  if (p.x_stride < 0 || p.w_stride < 0 || p.y_stride < 0) return GDN_BAD_STRIDE;
  if (p.rows == 0 || p.outputs == 0) return GDN_OK;
  if (!p.x || !p.w || !p.y) return GDN_NULL_POINTER;
  if (p.inputs % kChunk || !aligned(p.x, 16) || !aligned(p.w, 16) || p.w_stride % 8 || (p.rows > 1 && p.x_stride % 8))
    return GDN_BAD_ALGO;

  int sms = 0, optin = 0, per_sm = 0, major = 0;
  if (const int status = sm_count(&sms)) return status;
  if (const int status = device_attribute<cudaDevAttrMaxSharedMemoryPerBlockOptin>(&optin)) return status;
  if (const int status = device_attribute<cudaDevAttrMaxSharedMemoryPerMultiprocessor>(&per_sm)) return status;
  if (const int status = device_attribute<cudaDevAttrComputeCapabilityMajor>(&major)) return status;

  const int nt = p.rows <= 8 ? 1 : p.rows <= 16 ? 2 : 4;
  Cut cut;
  Plan plan;
  const int64_t all_tiles = ceil_div(p.outputs, kTile);
  const Line *line = kTable;
  while (p.rows > line->rows || all_tiles <= line->tiles_per_sm * static_cast<int64_t>(sms)) ++line;
  // NOTES: clusters are not a question of the device alone, since the kernels of sm_80 may be what a newer one runs.
  bool clusters = major >= 9 && (nt > 1 || line->cut.cluster > 1);
  if (clusters)
    if (const int status = has_sm90_code(&clusters)) return status;
  const auto fit = [&](int cluster, int blocks_per_sm) {
    cut = line->cut;
    cut.cluster = cluster;
    cut.blocks_per_sm = blocks_per_sm;
    cut.warps = fit_warps(p.inputs / kChunk, cut.warps, cluster, kMaxWarps / cut.groups);
    plan = make_plan(p, cut, nt, optin, per_sm);
    return plan.from != From::kGlobal;
  };
  // Where x does not fit: one block a multiprocessor, then fewer inputs a block.
  const int begin = clusters ? line->cut.cluster : 1, most = clusters ? 8 : 1;
  bool fits = fit(begin, line->cut.blocks_per_sm);
  for (int cluster = begin; !fits && nt > 1 && cluster <= most; cluster *= 2) fits = fit(cluster, 1);
  if (!fits) fit(1, line->cut.blocks_per_sm);

  LaunchConfig config;
  const int64_t tiles = plan.args.tiles, wave = ceil_div(static_cast<int64_t>(sms) * cut.blocks_per_sm, cut.cluster);
  const int64_t grid = tiles < wave ? tiles : wave;
  config.grid = dim3(cut.cluster, static_cast<unsigned>(grid < 65535 ? grid : 65535));
  config.block = dim3(32, cut.warps, cut.groups);
  config.shared_bytes = plan.bytes;
  config.stream = stream;
  config.overlap = p.overlap != 0;
  config.cluster = cut.cluster;
  return with_dtype(p.dtype, [&](auto type) -> int {
    using T = typename decltype(type)::type;
    if constexpr (sizeof(T) == 2) {
      if (nt == 1) return launch_rows<T, 1>(plan, config, optin);
      if (nt == 2) return launch_rows<T, 2>(plan, config, optin);
      return launch_rows<T, 4>(plan, config, optin);
    }
    return GDN_BAD_DTYPE;
  });
}

}  // namespace
}  // namespace linear
}  // namespace gdn

extern "C" int gdn_linear(const gdn_linear_params *params, cudaStream_t stream) {
  return gdn::linear::run(params, stream);
}
