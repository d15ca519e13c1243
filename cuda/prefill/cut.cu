// How a call is cut up: what minimises a model of its passes on the card.
#include "cut.h"

#include "../common/host.cuh"

namespace gdn {
namespace prefill {
namespace {

// Microseconds on an H200 (README.md), by blocks of 64 value rows and of 128: a chunk of the scan and of the transfer pass, and
// what a block of each takes to begin and end; the combination, a step of it, and what that takes more for each head; how much of
// the begin of the blocks behind it is done meanwhile.
struct Costs {
  double whole[2], begin_whole[2], transfer[2], begin_transfer[2];
  double combine, combine_step, combine_head, meanwhile[2];
  double change;    // from one head to the next, in a block that goes through several
  double again[2];  // until a place that was left has its next block; where a block's beginning above is not of such
};
constexpr Costs kCosts90 = {{1.77, 2.6}, {6.5, 13.}, {1.12, 1.48}, {6.5, 10.}, 2.7, 0.9, 0.08, {1., 5.}, 3., {4.5, 0.}};
constexpr Costs kCosts80 = {{4.3, 4.3}, {4., 4.}, {2.2, 2.2}, {4., 4.}, 3., 1., 0.06, {0., 0.}, 0., {0., 0.}};

// When all is done if `late` blocks of `long_block` each begin first, then `brief` blocks of `brief_block`, on `places`, which take
// `again` between two blocks.
double makespan(int64_t late, double long_block, int64_t brief, double brief_block, int64_t places, double again) {
  const int64_t rounds = late / places, last = late % places;
  const double begin = static_cast<double>(rounds) * long_block, end = begin + (last > 0 ? long_block : 0.);
  double best = -1.;
  const double each = brief_block + again;
  for (const double from : {begin - again, begin + long_block}) {    // a brief block ends last: one beside, or behind, the long ones
    for (int64_t k = 0; k <= ceil_div(brief, places - last) + 1; ++k) {
      const double at = from + static_cast<double>(k) * each;
      if (at < end || (best >= 0. && at >= best)) continue;
      const int64_t beside = static_cast<int64_t>((at - begin + again) / each + 1e-6);
      const int64_t behind = last > 0 ? static_cast<int64_t>((at - end) / each + 1e-6) : 0;
      if ((places - last) * beside + last * behind >= brief) best = at;
    }
  }
  return best < end ? end : best;
}

}  // namespace

Cut choose_cut(const gdn_rule_params &p, int64_t longest, bool sm90, int sms, bool has_wide) {
  const Costs &cost = sm90 ? kCosts90 : kCosts80;
  const int64_t places = sm90 ? sms : 2 * sms, heads = int64_t{p.seqs.num_seqs} * p.num_v_heads;
  const int64_t v_tiles[2] = {ceil_div(p.head_v, 64), ceil_div(p.head_v, 128)};
  const int64_t k_tiles[2] = {ceil_div(p.head_k, 64), ceil_div(p.head_k, 128)};
  const auto whole = [&](int w, int64_t chunks) { return static_cast<double>(chunks) * cost.whole[w] + cost.begin_whole[w]; };
  const double step = cost.combine_step + cost.combine_head * static_cast<double>(heads);
  double best = -1.;
  Cut cut;
  const auto consider = [&](Cut c, double before) {
    for (int w = 0; w <= (has_wide ? 1 : 0); ++w) {
      const int64_t blocks = heads * v_tiles[w] * (c.segments > 1 ? c.segments - 1 : 1);
      const double time = before + static_cast<double>(ceil_div(blocks, places)) * whole(w, c.others) - (c.segments > 1 ? cost.meanwhile[w] : 0.);
      // A sequence is cut for more than the model may be wrong by.
      if (best >= 0. && time >= best - (c.segments > 1 && cut.segments == 1 ? 4. : 0.)) continue;
      best = time, cut = c;
      cut.wide = w == 1;
    }
  };
  // One segment, and several heads a block (scan.cuh). For lengths that are known: otherwise blocks that come as there is room
  // are balanced better.
  const auto consider_rounds = [&] {
    for (int w = 0; w <= (has_wide ? 1 : 0); ++w) {
      const int64_t jobs = heads * v_tiles[w];
      if (jobs <= places || jobs > 64 * places || p.seqs.cu_seqlens) continue;
      const double turns = static_cast<double>(jobs) / static_cast<double>(places), chunks = static_cast<double>(longest) * cost.whole[w];
      for (const bool with_cut : {false, true}) {
        const double length = with_cut ? turns : static_cast<double>(ceil_div(jobs, places));
        const double changes = with_cut ? turns + 1. : length - 1.;
        const double time = length * chunks + changes * cost.change + cost.begin_whole[w] + (with_cut ? 2. : 0.);
        if (time >= best || (with_cut && longest < 8)) continue;
        best = time, cut = Cut();
        cut.first = cut.others = longest;
        cut.wide = w == 1, cut.rounds = true, cut.cut = with_cut;
      }
    }
  };
  if (p.segments <= 1) {
    Cut uncut;
    uncut.first = uncut.others = longest;
    consider(uncut, 0.);
    if (sm90) consider_rounds();
    if (p.segments == 1) return cut;
  }
  // More blocks than two rounds of places do not pay: all that is cut off is done again.
  const int64_t most = 2 + 2 * places / (heads * v_tiles[has_wide ? 1 : 0]);
  for (int64_t n = p.segments > 1 ? p.segments : 3; n == p.segments || (n <= 33 && n <= most && n * 4 <= longest); ++n) {
    for (int w = 0; w <= (has_wide ? 1 : 0); ++w) {
      const int64_t transfers = heads * (n - 2) * (v_tiles[w] + k_tiles[w]);
      for (int k = 1; k <= 4; ++k) {    // transfers, one after the other, beside the first segment
        const double each = static_cast<double>(longest) / static_cast<double>(n - 1), per = k * cost.transfer[w], lost = (k - 1) * cost.again[w];
        const double first = (per * each + k * cost.begin_transfer[w] + lost - cost.begin_whole[w]) / (cost.whole[w] + per / static_cast<double>(n - 1));
        Cut c;
        c.segments = n, c.wide_first = w == 1;
        c.first = static_cast<int64_t>(first + 0.5);
        if (c.first < 1) c.first = 1;
        c.others = longest > c.first ? ceil_div(longest - c.first, n - 1) : 1;
        const double transfer = static_cast<double>(c.others) * cost.transfer[w] + cost.begin_transfer[w];
        const double joined = makespan(heads * v_tiles[w], whole(w, c.first), transfers, transfer, places, cost.again[w]);
        consider(c, joined + cost.combine + static_cast<double>(n - 2) * step);
      }
    }
    if (p.segments > 1) break;
  }
  return cut;
}

}  // namespace prefill
}  // namespace gdn
