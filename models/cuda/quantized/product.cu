// gdn_quantized: checks, and how a product is divided over blocks and shared memory.
#include "common/launch.cuh"
#include "many.h"
#include "product.h"

namespace gdn {
namespace quantized {
namespace {

constexpr int kMostRows = 8;              // of a launch
constexpr int kTilesOfOneTurn = 16;       // a block with no more has one turn
constexpr int kUnitsOfTurn = 4;           // of a warp, at least, where there are several
constexpr int64_t kPaysCluster = 56 << 10;    // bytes less for the block that has most to read; blocks that read faster than others make up for less

// Blocks for each part, in proportion to its bytes; small parts have one more rather than one less, what is left the largest has.
void divide_blocks(Args *args, int sms) {
  const auto bytes_of = [&](int p) {
    const PartArgs &part = args->part[p];
    return static_cast<int64_t>(part.tiles) * (part.up ? 2 : 1) * part.units * extent(part.type).unit_bytes;
  };
  int64_t total = 0;
  int largest = 0;
  for (int p = 0; p < args->parts; ++p) {
    total += bytes_of(p);
    if (bytes_of(p) > bytes_of(largest)) largest = p;
  }
  int left = sms;
  for (int p = 0; p < args->parts; ++p) {
    PartArgs &part = args->part[p];
    if (p == largest) continue;
    const int64_t share = ceil_div(bytes_of(p) * sms, total);
    part.blocks = static_cast<int>(share < part.tiles ? share : part.tiles);
    left -= part.blocks;
  }
  PartArgs &most = args->part[largest];
  most.blocks = left < 1 ? 1 : left < most.tiles ? left : most.tiles;
  int first = 0;
  for (int p = 0; p < args->parts; ++p) {
    PartArgs &part = args->part[p];
    part.first_block = first;
    first += part.blocks;
    part.each = part.tiles / part.blocks;
    part.more = part.tiles % part.blocks;
  }
}

// Where tiles are so few that blocks would have very different numbers of them, or some none, clusters divide them and their blocks the inputs.
void share_inputs(Args *args, int clusters) {
  PartArgs &part = args->part[0];
  if (clusters > part.tiles) clusters = part.tiles;
  if (clusters < 1) return;
  const int64_t most = ceil_div(part.tiles, clusters), units = part.units / kCluster;
  const int64_t less = ceil_div(part.tiles, part.blocks) * part.units - most * units;
  if (most > kTilesOfOneTurn || less * extent(part.type).unit_bytes < kPaysCluster) return;
  args->cluster = kCluster;
  args->chunks /= kCluster;
  part.units = static_cast<int32_t>(units);
  part.blocks = clusters;
  part.each = part.tiles / clusters;
  part.more = part.tiles % clusters;
}

// The tiles of a turn: all that a block has, where these are few; else so many that all warps have as many units.
int turn_of(const PartArgs &part) {
  const int factor = part.up ? 2 : 1, most = static_cast<int>(ceil_div(part.tiles, part.blocks));
  if (most * factor <= kTilesOfOneTurn) return most;
  int turn = 1;
  while (turn < kWarps && turn * factor * part.units % kWarps) turn *= 2;
  int several = turn;
  while (several * factor * part.units < kUnitsOfTurn * kWarps) several += turn;
  return several < most ? several : most;
}

// For so many rows at once; false where there is no room for so many stages.
bool lay_out(Args *args, int rows, int least, int64_t room, int64_t *bytes) {
  args->rows = rows;
  args->x_shared_row = args->chunks * kChunkOfX;
  args->scales_row = args->chunks * kScalesOfX;
  int64_t at = kBarriers + static_cast<int64_t>(rows) * args->x_shared_row;
  args->scales_at = static_cast<int32_t>(at);
  at += static_cast<int64_t>(rows) * args->scales_row;
  int slots = 0;
  for (int p = 0; p < args->parts; ++p) {
    const int tiles = args->part[p].turn * (args->part[p].up ? 2 : 1);
    slots = slots < kWarps + tiles ? kWarps + tiles : slots;
  }
  const int padded = rows <= 2 ? rows : rows <= 4 ? 4 : 8;
  args->partial_at = static_cast<int32_t>(at);
  args->partial_size = slots * padded * kTile * static_cast<int>(sizeof(float));
  at += 2 * args->partial_size;
  args->meet_at = static_cast<int32_t>(at);
  if (args->cluster > 1) at += static_cast<int64_t>(args->part[0].turn) * rows * kTile * static_cast<int>(sizeof(float));
  at = ceil_div(at, 128) * 128;
  args->ring_at = static_cast<int32_t>(at);
  *bytes = at;
  for (int p = 0; p < args->parts; ++p) {
    PartArgs &part = args->part[p];
    const int64_t stage = static_cast<int64_t>(kWarps) * extent(part.type).unit_bytes;
    const int64_t units = ceil_div(part.tiles, part.blocks) * (part.up ? 2 : 1) * part.units;
    int64_t stages = (room - at) / stage;
    if (stages < least) return false;
    const int64_t used = ceil_div(units, kWarps);
    if (stages > used) stages = used;
    part.stages = static_cast<int32_t>(stages < kMostStages ? stages : kMostStages);
    if (*bytes < at + part.stages * stage) *bytes = at + part.stages * stage;
  }
  return true;
}

int check(const gdn_quantized_params &p) {
  if (!valid_dtype(p.dtype)) return GDN_BAD_DTYPE;
  if (p.rows < 0 || p.num_parts < 0 || p.num_parts > GDN_QUANTIZED_PARTS || p.inputs < 1 || p.inputs > (1 << 29))
    return GDN_BAD_LENGTH;
  if (p.x_stride < 0 || p.y_stride < 0) return GDN_BAD_STRIDE;
  if (p.swiglu && p.num_parts != 1) return GDN_BAD_ALGO;
  if (p.groups < 0 || p.per_group < 0) return GDN_BAD_LENGTH;
  const int64_t groups = static_cast<int64_t>(p.groups) * p.per_group;
  if (p.groups > 0 && (groups == 0 || groups > p.inputs || p.inputs % groups || p.inputs / groups % 8)) return GDN_BAD_ALGO;
  return GDN_OK;
}

int check_part(const gdn_quantized_params &p, const gdn_quantized_part &part) {
  if (!valid_type(part.type)) return GDN_BAD_DTYPE;
  if (part.outputs < 0 || part.outputs > (1 << 29)) return GDN_BAD_LENGTH;
  if (part.outputs > 0 && !part.w) return GDN_NULL_POINTER;
  if (!aligned(part.w, 128) || p.inputs % extent(part.type).unit_inputs || (p.swiglu && part.outputs % (2 * kTile)))
    return GDN_BAD_ALGO;
  return GDN_OK;
}

// What the parts and x are, of either kernel. Without parts there is nothing to do.
int arguments(const gdn_quantized_params &p, Args *to) {
  Args &args = *to;
  if (const int status = check(p)) return status;
  if (p.num_parts > 0 && !p.parts) return GDN_NULL_POINTER;
  int64_t column = 0;
  for (int i = 0; i < p.num_parts; ++i) {
    const gdn_quantized_part &from = p.parts[i];
    if (const int status = check_part(p, from)) return status;
    if (from.outputs == 0) continue;
    PartArgs &part = args.part[args.parts++];
    part.w = static_cast<const char *>(from.w);
    part.type = from.type;
    part.outputs = p.swiglu ? from.outputs / 2 : from.outputs;
    part.column = static_cast<int32_t>(column);
    part.tiles = static_cast<int32_t>(ceil_div(part.outputs, kTile));
    part.units = p.inputs / extent(from.type).unit_inputs;
    part.up = p.swiglu ? part.tiles : 0;
    column += part.outputs;
  }
  if (column > (1 << 30)) return GDN_BAD_LENGTH;
  if (p.rows == 0) args.parts = 0;
  if (args.parts == 0) return GDN_OK;
  if (!p.x || !p.y) return GDN_NULL_POINTER;
  if (!aligned(p.x, 16) || (p.rows > 1 && p.x_stride * dtype_size(p.dtype) % 16)) return GDN_BAD_ALGO;
  args.x_row = p.x_stride * dtype_size(p.dtype);
  args.y_stride = p.y_stride;
  return GDN_OK;
}

int run(const gdn_quantized_params *params, cudaStream_t stream) {
  if (!params) return GDN_NULL_POINTER;
  const gdn_quantized_params &p = *params;
  Args args = {};
  if (const int status = arguments(p, &args)) return status;
  if (args.parts == 0) return GDN_OK;
  int sms = 0, optin = 0;
  if (const int status = sm_count(&sms)) return status;
  if (const int status = shared_limit(&optin)) return status;
  const int64_t size = dtype_size(p.dtype);
  args.inputs = p.inputs;
  args.chunks = p.inputs / kChunk;
  if (p.groups > 0) {
    args.groups = p.groups;
    args.per_group = p.per_group;
    args.group_size = p.inputs / p.groups / p.per_group;
  }
  divide_blocks(&args, sms);
  args.cluster = 1;
  if (args.parts == 1 && !p.swiglu && args.part[0].units % kCluster == 0) {
    bool yes = false;
    int clusters = 0;
    if (const int status = has_sm90_code(&yes)) return status;
    if (yes)
      if (const int status = clusters_at_once(optin, &clusters)) return status;
    share_inputs(&args, clusters);
  }
  for (int i = 0; i < args.parts; ++i) args.part[i].turn = turn_of(args.part[i]);

  LaunchConfig config;
  const PartArgs &last = args.part[args.parts - 1];
  config.grid = dim3(static_cast<unsigned>((last.first_block + last.blocks) * args.cluster));
  config.cluster = args.cluster;
  config.block = dim3(kThreads);
  config.stream = stream;
  config.overlap = p.overlap != 0;
  for (int64_t first = 0; first < p.rows;) {
    int rows = p.rows - first < kMostRows ? static_cast<int>(p.rows - first) : kMostRows;
    while (!lay_out(&args, rows, rows == 1 ? 1 : 2, optin, &config.shared_bytes)) {
      if (rows == 1) return GDN_BAD_ALGO;
      rows = (rows + 1) / 2;
    }
    args.x = static_cast<const char *>(p.x) + first * args.x_row;
    args.y = static_cast<char *>(p.y) + first * p.y_stride * size;
    const auto run = [&](auto type) { return run_product<typename decltype(type)::type>(args, config, optin); };
    if (const int status = with_dtype(p.dtype, run)) return status;
    first += rows;
  }
  return GDN_OK;
}

int many(const gdn_quantized_params *params, cudaStream_t stream) {
  if (!params) return GDN_NULL_POINTER;
  const gdn_quantized_params &p = *params;
  Args args = {};
  if (const int status = arguments(p, &args)) return status;
  if (p.dtype == GDN_F32) return GDN_BAD_DTYPE;
  if (p.groups > 0) return GDN_BAD_ALGO;
  int sms = 0, optin = 0;
  bool clusters = false;
  if (const int status = sm_count(&sms)) return status;
  if (const int status = shared_limit(&optin)) return status;
  if (const int status = has_sm90_code(&clusters)) return status;
  LaunchConfig config;
  config.stream = stream;
  config.overlap = p.overlap != 0;
  for (int i = 0; i < args.parts; ++i) {
    const PartArgs &part = args.part[i];
    const ManyArgs of = {part.w, p.x, p.y, args.x_row, p.y_stride, part.outputs, part.column, part.tiles, part.units, part.up, p.rows, 1};
    const int status = p.dtype == GDN_BF16 ? run_many<__nv_bfloat16>(of, part.type, config, sms, optin, clusters)
                                            : run_many<__half>(of, part.type, config, sms, optin, clusters);
    if (status) return status;
  }
  return GDN_OK;
}

}  // namespace
}  // namespace quantized
}  // namespace gdn

extern "C" int gdn_quantized(const gdn_quantized_params *params, cudaStream_t stream) { return gdn::quantized::run(params, stream); }
extern "C" int gdn_quantized_many(const gdn_quantized_params *params, cudaStream_t stream) { return gdn::quantized::many(params, stream); }
