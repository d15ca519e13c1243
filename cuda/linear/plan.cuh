// How a product is divided: over warps, blocks and multiprocessors. Host code; nothing is asked of the device here.
#pragma once

#include <stdlib.h>

#include "../common/host.cuh"
#include "../gdn.h"
#include "kernel.cuh"

namespace gdn {
namespace linear {

// What the choice depends on besides the sizes.
struct Card {
  int sms;
  int optin, per_sm;    // bytes of shared memory of a block, of a multiprocessor
  bool clusters;
};

// What the choice depends on of a layout of weights: see Dense.
struct WeightSizes {
  int chunk_inputs, element_bytes, parts, x_bytes, x_padding;
};
template <typename WEIGHTS> constexpr WeightSizes sizes_of() {
  return {WEIGHTS::kChunkInputs, WEIGHTS::kElementBytes, WEIGHTS::kParts, WEIGHTS::kXBytes, WEIGHTS::kXPadding};
}

struct Problem {
  const gdn_linear_params &p;
  WeightSizes weights;
  bool paired;            // w has twice as many rows: two, `outputs` apart, make an output
  int chunk_extra = 0;    // bytes in front of x in shared memory, for each chunk of a block

  int chunks() const { return static_cast<int>(ceil_div(p.inputs, weights.chunk_inputs)); }
  int columns() const { return p.rows <= 8 ? 1 : p.rows <= 16 ? 2 : 4; }    // tiles of 8 rows
  int64_t tiles(int groups) const { return ceil_div(p.outputs, kTile * (paired ? 1 : groups)); }
};

// How a product is divided. A tile is 16 * groups outputs; `warps` times `cluster` warps share its inputs.
struct Tiling {
  int warps;           // along the inputs, in a block
  int groups;          // of 16 outputs, in a block: 1, 2 or 4
  int cluster;         // blocks that share the inputs of a tile: 1, or on sm_90 2, 4 or 8
  int blocks_per_sm;   // of the grid; what is more than the card holds at once just comes later
};

// More than 8 rows. The first line that fits: rows up to, and more tiles of 16 outputs than so many for every
// multiprocessor. `warps` is what is wanted; fit_warps() takes the nearest number that divides the inputs well.
struct Line {
  int rows, tiles_per_sm;
  Tiling tiling;
};
constexpr Line kTable[] = {
    // From 9 rows on the traffic of x counts, which larger tiles of fewer inputs divide.
    {16, 1, {8, 1, 1, 2}},
    {GDN_LINEAR_ROWS, 1, {8, 2, 1, 1}},
    {GDN_LINEAR_ROWS, 0, {8, 2, 2, 1}},
};

// The warps along the inputs that leave the fewest places of rounds empty; of those, the nearest to what is wanted.
inline int fit_warps(int chunks, int wanted, int cluster, int most) {
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

// What a tiling tells the kernel.
struct Plan {
  Tiling tiling;
  Args args;
  XSource x_source;
  int64_t bytes;       // of shared memory
  int64_t extra_at;    // there: Problem::chunk_extra

  // Of so many tiles: as many blocks, or clusters, as run at once.
  int64_t blocks(int64_t tiles, const Card &card) const {
    const int64_t wave = ceil_div(static_cast<int64_t>(card.sms) * tiling.blocks_per_sm, tiling.cluster), most = wave < 65535 ? wave : 65535;
    return tiles < most ? tiles : most;
  }
};

inline Plan make_plan(const Problem &problem, const Tiling &tiling, const Card &card) {
  const gdn_linear_params &p = problem.p;
  const int nt = problem.columns();
  Plan plan = {};
  plan.tiling = tiling;
  Args &args = plan.args;
  args.w = p.w;
  args.x = p.x;
  args.y = p.y;
  args.w_row = p.w_stride * problem.weights.element_bytes;
  args.x_row = p.x_stride * 2;
  args.y_stride = p.y_stride;
  args.rows = p.rows;
  args.outputs = p.outputs;
  args.parts = static_cast<int>(ceil_div(p.inputs, problem.weights.chunk_inputs / problem.weights.parts));
  args.slice = static_cast<int>(ceil_div(problem.chunks(), tiling.warps * tiling.cluster));
  args.rounds = static_cast<int>(ceil_div(args.slice, kChunks));
  args.group_shift = tiling.groups == 4 ? 2 : tiling.groups - 1;
  args.tiles = static_cast<int>(problem.tiles(tiling.groups));
  args.tile_rows = problem.paired ? kTile : kTile * tiling.groups;
  args.group_rows = problem.paired ? p.outputs : kTile;
  args.last_row = (problem.paired ? 2 : 1) * p.outputs - 1;

  // Barriers, partial sums, what blocks of a cluster send each other, x.
  const int warps = tiling.warps * tiling.groups;
  int64_t bytes = kBarriers;
  args.partial_at = static_cast<int>(bytes);
  bytes += static_cast<int64_t>(warps) * nt * 8 * kColumn * sizeof(float);
  args.meet_at = static_cast<int>(bytes);
  if (tiling.cluster > 1) bytes += ceil_div(2 * p.rows * kTile * tiling.groups * sizeof(float), 16) * 16;
  plan.x_source = XSource::kRegisters;
  if (nt > 1 || args.rounds > 1 || problem.weights.x_bytes > kChunkBytes) {
    // x beside as many blocks as the tiling has on a multiprocessor, each of which costs 1 KB more.
    const int64_t chunks = static_cast<int64_t>(tiling.warps) * args.slice, row = chunks * problem.weights.x_bytes + problem.weights.x_padding;
    const int64_t extra = ceil_div(chunks * problem.chunk_extra, 16) * 16, x = row * p.rows + extra;
    const int beside = tiling.blocks_per_sm > 4 ? 1 : tiling.blocks_per_sm;
    const bool fits = bytes + x <= card.optin && (bytes + x + 1024) * beside <= card.per_sm;
    plan.extra_at = bytes;
    args.x_at = static_cast<int>(bytes + extra);
    args.x_shared_row = static_cast<int>(row);
    plan.x_source = fits ? XSource::kShared : XSource::kGlobal;
    if (fits) bytes += x;
  }
  plan.bytes = bytes;
  return plan;
}

// Up to 8 rows, inputs that divide into 32 chunks, for which the kernel was measured first. Few outputs: a tile a
// multiprocessor, with all its bytes under way at once. Many: small blocks, that wait for each other less.
inline Plan plan_even(const Problem &problem, const Card &card) {
  const int groups = problem.paired ? 2 : 1, most = kMaxWarps / groups;
  const bool many = problem.tiles(groups) > 2 * card.sms;
  const int warps = fit_warps(problem.chunks(), many ? 8 / groups : most, 1, most);
  return make_plan(problem, {warps, groups, 1, many ? 2 : 1}, card);
}

// How far so many warps a multiprocessor, with a round of loads under way each, keep the memory busy.
inline double busy(double warps) { return warps / (warps + 2); }
constexpr double kThroughCaches = 0.75;    // the same where x does not fit into shared memory

// So many that it can pay to share them among the blocks of a cluster.
constexpr int kManyChunks = 96;

// Up to 8 rows, as the sweep on an H200 had it (README). False where it says nothing.
inline bool plan_swept(const Problem &problem, const Card &card, Plan *plan) {
  const int chunks = problem.chunks();
  const auto take = [&](const Tiling &tiling) {
    *plan = make_plan(problem, tiling, card);
    return plan->x_source != XSource::kGlobal;
  };
  // 40 to 64 chunks, 2,560 to 4,096 inputs of 16 bits: one large block, whose warps have all their bytes under way in one round; two with SwiGLU.
  if (chunks >= 40 && chunks <= 64)
    return take(problem.paired ? Tiling{8, 2, 1, 1} : Tiling{static_cast<int>(ceil_div(chunks, kChunks)), 1, 1, 1});
  // Few outputs of many inputs. Where the tiles occupy all multiprocessors in one turn or two, one large block takes all inputs of a tile.
  const int64_t tiles = problem.tiles(1), turns = ceil_div(tiles, card.sms);
  if (problem.paired || chunks < kManyChunks || turns > 2) return false;
  if (tiles >= 0.85 * static_cast<double>(turns * card.sms) && take({kMaxWarps, 1, 1, 1})) return true;
  // Else the blocks of a cluster share the inputs of a tile, so that every multiprocessor has as much to read.
  if (!card.clusters) return false;
  for (const Tiling &tiling : {Tiling{5, 1, 4, 3}, Tiling{5, 1, 2, 3}, Tiling{12, 1, 2, 1}}) {
    const int parts = tiling.warps * tiling.cluster;
    const int64_t places = ceil_div(ceil_div(chunks, parts), kChunks) * kChunks * parts;
    if (chunks >= 0.85 * static_cast<double>(places) && take(tiling)) return true;
  }
  return false;
}

// Up to 8 rows, any other inputs: of all numbers of warps along them the one that is done first, all tiles but the rest
// of the last turn with the card full. The empty places of rounds are not under way. Of equals the one with fewer of
// them, then the smaller.
inline Plan plan_few(const Problem &problem, const Card &card) {
  const int chunks = problem.chunks(), groups = problem.paired ? 2 : 1, most = kMaxWarps / groups;
  Plan best = {};
  if (chunks % 32 == 0) return plan_even(problem, card);
  const int64_t tiles = problem.tiles(groups);
  if (plan_swept(problem, card, &best)) return best;
  double best_time = 0;
  int64_t best_places = 0;
  for (int warps = most < 4 ? most : 4; warps <= most; ++warps) {
    Plan plan;
    for (int blocks = most / warps; blocks > 0; --blocks) {
      plan = make_plan(problem, {warps, groups, 1, blocks}, card);
      if (plan.x_source != XSource::kGlobal) break;
    }
    if (plan.x_source == XSource::kGlobal) plan = make_plan(problem, {warps, groups, 1, most / warps}, card);
    const int64_t places = static_cast<int64_t>(plan.args.rounds) * kChunks * warps;
    const int64_t slots = static_cast<int64_t>(card.sms) * plan.tiling.blocks_per_sm, rest = tiles % slots;
    const double each = static_cast<double>(warps) * groups * chunks / places / card.sms;
    double time = (tiles - rest) / busy(each * slots) + (rest ? rest / busy(each * rest) : 0);
    if (plan.x_source == XSource::kGlobal) time /= kThroughCaches;
    if (best_places == 0 || time < best_time || (time == best_time && places < best_places)) {
      best = plan;
      best_time = time;
      best_places = places;
    }
  }
  return best;
}

// More than 8 rows.
inline Plan plan_many(const Problem &problem, const Card &card) {
  const int64_t all_tiles = ceil_div(problem.p.outputs, kTile);
  const Line *line = kTable;
  while (problem.p.rows > line->rows || all_tiles <= line->tiles_per_sm * static_cast<int64_t>(card.sms)) ++line;
  Plan plan;
  const auto fit = [&](int cluster, int blocks_per_sm) {
    Tiling tiling = line->tiling;
    tiling.cluster = cluster;
    tiling.blocks_per_sm = blocks_per_sm;
    tiling.warps = fit_warps(problem.chunks(), tiling.warps, cluster, kMaxWarps / tiling.groups);
    plan = make_plan(problem, tiling, card);
    return plan.x_source != XSource::kGlobal;
  };
  // Where x does not fit: one block a multiprocessor, then fewer inputs a block.
  const int begin = card.clusters ? line->tiling.cluster : 1, most = card.clusters ? 8 : 1;
  bool fits = fit(begin, line->tiling.blocks_per_sm);
  for (int cluster = begin; !fits && cluster <= most; cluster *= 2) fits = fit(cluster, 1);
  if (!fits) fit(1, line->tiling.blocks_per_sm);
  return plan;
}

}  // namespace linear
}  // namespace gdn
