// How a product with weights in e4m3 or with SwiGLU is divided.
#pragma once

#include "../gdn_scaled.h"
#include "kernel.cuh"
#include "linear/plan.cuh"

namespace gdn {
namespace scaled {

using linear::Card, linear::Plan, linear::Problem, linear::Tiling;

// One row in bf16 beside e4m3 is converted.
inline bool converts_x(const gdn_scaled_params &p) { return p.scales.ptr && p.rows == 1 && p.dtype == GDN_BF16; }

inline Problem problem_of(const gdn_scaled_params &p, const gdn_linear_params &product) {
  if (!p.scales.ptr) return {product, linear::sizes_of<linear::Dense<__half>>(), p.swiglu != 0};
  return {product, linear::sizes_of<Stored<__half, false>>(), p.swiglu != 0, converts_x(p) ? static_cast<int>(sizeof(float)) : 0};
}

// Up to 8 rows beside e4m3, as the sweep on an H200 had it; false where it says nothing. Chunks are 128 inputs. Rows past the second cost shared memory's time, which larger blocks
// with fewer copies of x save.
inline bool plan_swept_e4m3(const Problem &problem, const Card &card, Plan *plan) {
  const int chunks = problem.chunks();
  const int64_t tiles = problem.tiles(1), sms = card.sms;
  const bool few = problem.p.rows <= 2;
  const auto take = [&](const Tiling &tiling) {
    *plan = make_plan(problem, tiling, card);
    return plan->x_source != XSource::kGlobal;
  };
  if (chunks == 16 || chunks == 20) {    // 2,048 and 2,560 inputs
    if (problem.paired) return take(few ? Tiling{3, 2, 1, 2} : Tiling{5, 2, 1, 1});
    if (tiles > 16 * sms) return take({chunks == 16 ? 4 : 3, 2, 1, 2});
    if (!few) return take({5, 2, 1, 1});
    if (tiles > 5 * sms) return take(chunks == 16 ? Tiling{8, 1, 1, 2} : Tiling{5, 1, 1, 3});
    return take(chunks == 16 ? Tiling{4, 1, 1, 4} : Tiling{3, 1, 1, 5});
  }
  if (problem.paired) return false;
  if (chunks == 32) {    // 4,096
    if (few || (tiles <= sms && !card.clusters)) return take({8, 1, 1, 2});
    return take(tiles > sms ? Tiling{8, 2, 1, 1} : Tiling{4, 2, 2, 2});
  }
  if (card.clusters && chunks >= 64 && chunks <= 80 && tiles <= 2 * sms)    // 8,192 to 10,240, few outputs
    return take(few ? Tiling{5, 1, 2, 3} : Tiling{12, 1, 2, 1});
  return false;
}

inline Plan plan_of(const Problem &problem, bool e4m3, const Card &card) {
  Plan best = {};
  if (problem.columns() > 1) return linear::plan_many(problem, card);
  return e4m3 && plan_swept_e4m3(problem, card, &best) ? best : linear::plan_few(problem, card);
}

}  // namespace scaled
}  // namespace gdn
