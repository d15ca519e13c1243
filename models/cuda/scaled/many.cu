// How the product of many rows beside weights in e4m3 is divided, and its launch.
#include "many.h"

#include "common/launch.cuh"
#include "many.cuh"

namespace gdn {
namespace scaled {
namespace {

// Warpgroups of a block along the inputs and along the outputs, blocks of a cluster.
struct Tiling {
  int along, groups, cluster;
};

int chunks_of(const gdn_scaled_params &p) { return static_cast<int>(ceil_div(p.inputs, many::kChunk)); }
int slice_of(const gdn_scaled_params &p, const Tiling &t) { return static_cast<int>(ceil_div(chunks_of(p), t.along * t.cluster)); }
int tiles_of(int64_t outputs, const Tiling &t) { return static_cast<int>(ceil_div(outputs, many::kTile * t.groups)); }
int all_tiles(const gdn_scaled_params &p, const Tiling &t) { return tiles_of(p.outputs, t) + tiles_of(p.outputs_below, t); }

int64_t shared_bytes(const gdn_scaled_params &p, const Tiling &t) {
  return many::kXAt + int64_t{2} * many::kXTile * t.along * slice_of(p, t);
}

// Clusters that the device holds at a time: fewer than its multiprocessors would make, as a cluster lies within one of their groups.
template <int SIZE> int most_clusters(int optin, int *value) {
  static PerDevice known;
  return known.get(value, [&](int, int *v) {
    if (allow_shared_memory(many::many_kernel<__nv_bfloat16>, optin, optin)) return cudaErrorInvalidValue;
    cudaLaunchAttribute cluster = {};
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim.x = SIZE;
    cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
    cudaLaunchConfig_t c = {};
    c.gridDim = dim3(SIZE);
    c.blockDim = dim3(many::kThreads);
    c.dynamicSmemBytes = static_cast<size_t>(optin);
    c.attrs = &cluster;
    c.numAttrs = 1;
    return cudaOccupancyMaxActiveClusters(v, many::many_kernel<__nv_bfloat16>, &c);
  });
}

int most_clusters(int size, int optin, int *value) {
  return size == 2 ? most_clusters<2>(optin, value) : size == 4 ? most_clusters<4>(optin, value) : most_clusters<8>(optin, value);
}

// What goes through a multiprocessor, in bytes: weights, x, and as much as could while sums meet.
constexpr int64_t kMeeting = 24 << 10;
int64_t cost(const gdn_scaled_params &p, const Tiling &t, int clusters) {
  const int64_t turns = ceil_div(all_tiles(p, t), clusters), chunks = int64_t{t.along} * slice_of(p, t);
  return turns * (chunks * many::kChunk * many::kTile * t.groups + kMeeting) + chunks * 2 * many::kXTile;
}

// Of the tilings that fit and were asked for, those of the smallest clusters, whose sums meet fastest, and of them the one that costs least; and how many
// clusters to launch.
int choose(const gdn_scaled_params &p, const gdn_linear_options &o, Tiling *best, int *clusters) {
  int optin = 0;
  if (const int status = shared_limit(&optin)) return status;
  int64_t least = INT64_MAX;
  for (int cluster = 2; cluster <= 8 && least == INT64_MAX; cluster *= 2)    // NOTES: st.async is illegal in a cluster of one block
    for (int along = 1; along <= many::kGroups; ++along) {
      const Tiling t = {along, many::kGroups / along, cluster};
      if ((o.warps && o.warps != along) || (o.groups && o.groups != t.groups) || (o.cluster && o.cluster != cluster)) continue;
      if (shared_bytes(p, t) > optin) continue;
      int most = 0;
      if (const int status = most_clusters(cluster, optin, &most)) return status;
      if (most < 1) continue;
      const int64_t here = cost(p, t, most);
      if (here >= least) continue;
      least = here;
      *best = t;
      *clusters = all_tiles(p, t) < most ? all_tiles(p, t) : most;
    }
  return least < INT64_MAX ? GDN_OK : GDN_BAD_ALGO;
}

template <typename T> int launch_as(const gdn_scaled_params &p, const Tiling &t, const LaunchConfig &config, int optin) {
  many::Args args = {};
  args.w = p.w;
  args.x = p.x;
  args.y = p.y;
  args.w_row = p.w_stride;
  args.x_row = p.x_stride * 2;
  args.y_stride = p.y_stride;
  args.rows = p.rows;
  args.outputs = p.outputs;
  args.halves = p.inputs / 64;
  args.slice = slice_of(p, t);
  args.tiles = tiles_of(p.outputs, t);
  while (1 << args.cluster_shift < t.cluster) ++args.cluster_shift;
  args.scales = scale_args(p.scales);
  args.below = p.below;
  args.below_row = p.below_stride * 2;
  args.outputs_below = p.outputs_below;
  args.tiles_below = tiles_of(p.outputs_below, t);
  return launch_allowed<many::many_kernel<T>>(config, optin, args);
}

}  // namespace

int launch_many(const gdn_scaled_params &p, const gdn_linear_options &options, cudaStream_t stream) {
  bool sm90a = false;
  if (const int status = has_sm90a_code(&sm90a)) return status;
  if (!sm90a) return GDN_BAD_ALGO;
  Tiling t = {};
  int clusters = 0;
  if (const int status = choose(p, options, &t, &clusters)) return status;
  LaunchConfig config;
  config.grid = dim3(t.cluster, clusters);
  config.block = dim3(128, t.along, t.groups);
  config.shared_bytes = shared_bytes(p, t);
  config.stream = stream;
  config.overlap = p.overlap != 0;
  config.cluster = t.cluster;
  int optin = 0;
  if (const int status = shared_limit(&optin)) return status;
  return p.dtype == GDN_F16 ? launch_as<__half>(p, t, config, optin) : launch_as<__nv_bfloat16>(p, t, config, optin);
}

}  // namespace scaled
}  // namespace gdn
