// How sequences are cut into segments: the choice with the least time in a model of the passes. No CUDA: a test compiles it as C++.
#include "segments.h"

#include <algorithm>

#include "../common/checks.h"

namespace gdn {
namespace chunk {
namespace {

// Measured on an H200 (README.md), in microseconds.
struct BlockCosts {
  double chunk, begin;                      // of a block of the scan: a chunk; its begin and its end
  double transfer_chunk, transfer_begin;    // the same of the transfer pass
  double begin_hidden;    // the part of the begin of the blocks after the combination that overlaps it
  double next_block;      // from the end of a block to the next one at its place, where `begin` does not include it
};
struct Costs {
  BlockCosts rows_64, rows_128;    // by the value rows of a block
  double combine;                  // the combination
  double combine_segment;          // the same for each segment
  double combine_head;             // the same for each segment and head
  double next_head;                // from one head to the next, in a block that processes several

  constexpr const BlockCosts &of(bool wide) const { return wide ? rows_128 : rows_64; }
};

constexpr Costs costs_sm90() {
  Costs c = {};
  c.rows_64.chunk = 1.77, c.rows_64.begin = 6.5;
  c.rows_64.transfer_chunk = 1.12, c.rows_64.transfer_begin = 6.5;
  c.rows_64.begin_hidden = 1., c.rows_64.next_block = 4.5;
  c.rows_128.chunk = 2.6, c.rows_128.begin = 13.;
  c.rows_128.transfer_chunk = 1.48, c.rows_128.transfer_begin = 10.;
  c.rows_128.begin_hidden = 5.;
  c.combine = 2.7, c.combine_segment = 0.9, c.combine_head = 0.08;
  c.next_head = 3.;
  return c;
}

// Without blocks of 128 value rows, and without blocks of several heads.
constexpr Costs costs_sm80() {
  Costs c = {};
  c.rows_64.chunk = 4.3, c.rows_64.begin = 4.;
  c.rows_64.transfer_chunk = 2.2, c.rows_64.transfer_begin = 4.;
  c.combine = 3., c.combine_segment = 1., c.combine_head = 0.06;
  return c;
}

constexpr Costs kCosts90 = costs_sm90(), kCosts80 = costs_sm80();

constexpr double kModelError = 4.;         // microseconds by which the model may be wrong: a sequence is cut for more
constexpr double kSplitCost = 2.;          // microseconds more where heads are split
constexpr int64_t kSplitChunks = 8;        // a head of fewer chunks is not split
constexpr int64_t kMostJobs = 64;          // of a place
constexpr int64_t kMostSegments = 33;
constexpr int64_t kSegmentChunks = 4;      // of a segment at least
constexpr int kMostTransfers = 4;          // of a place, one after the other, beside the first segment
constexpr int64_t kMostMixed = 256;        // sequences among which blocks look for the long ones
constexpr double kIdleBlock = 1.;          // microseconds of a block without work

// The end of all blocks if `late` blocks of `long_block` each begin first, then `brief` blocks of `brief_block`, on `places`, with
// `again` between two blocks of a place.
double makespan(int64_t late, double long_block, int64_t brief, double brief_block, int64_t places, double again) {
  const int64_t rounds = late / places, last = late % places;
  const double begin = static_cast<double>(rounds) * long_block, end = begin + (last > 0 ? long_block : 0.);
  double best = -1.;
  const double each = brief_block + again;
  for (const double from : {begin - again, begin + long_block}) {    // a brief block ends last: at the same time as the long ones, or after them
    for (int64_t k = 0; k <= ceil_div(brief, places - last) + 1; ++k) {
      const double at = from + static_cast<double>(k) * each;
      if (at < end || (best >= 0. && at >= best)) continue;
      const int64_t beside = static_cast<int64_t>((at - begin + again) / each + 1e-6);
      const int64_t after = last > 0 ? static_cast<int64_t>((at - end) / each + 1e-6) : 0;
      if ((places - last) * beside + last * after >= brief) best = at;
    }
  }
  return best < end ? end : best;
}

// The best choice considered so far, by the model's time. The lengths of packed sequences are known to the device alone: the model
// assumes as many of the longest length as fit, and that the others share the remaining tokens.
class Search {
 public:
  Search(const gdn_rule_params &p, int64_t longest, bool sm90, int sms, bool has_wide)
      : p_(p), cost_(sm90 ? kCosts90 : kCosts80), longest_(longest), places_(sm90 ? sms : 2 * sms), widths_(has_wide ? 2 : 1) {
    const gdn_sequences &s = p.common.seqs;
    const int64_t fitting = s.cu_seqlens && s.max_tokens_per_seq > 0 ? s.total_tokens / s.max_tokens_per_seq : s.num_seqs;
    mixed_ = fitting < s.num_seqs && s.num_seqs <= kMostMixed;
    long_ones_ = !mixed_ ? s.num_seqs : fitting > 1 ? fitting : 1;
    heads_ = long_ones_ * p.common.num_v_heads;
    if (mixed_ && fitting > 0) other_tokens_ = s.total_tokens - fitting * s.max_tokens_per_seq;
  }

  // One segment, a block a head; with more blocks than places those of long sequences begin first.
  void consider_one() {
    Segments one;
    one.first_chunks = one.chunks = longest_;
    const int64_t blocks = int64_t{p_.common.seqs.num_seqs} * p_.common.num_v_heads * v_tiles(0);
    if (mixed_ && blocks > places_) {
      one.long_tokens = p_.common.seqs.max_tokens_per_seq / 4;
      one.slots = slots_for(one.long_tokens);
    }
    for (int w = 0; w < widths_; ++w) {
      const double block = scan(w, longest_), longs = static_cast<double>(heads_ * v_tiles(w));
      const double rounds = static_cast<double>(ceil_div(heads_ * v_tiles(w), places_));
      take(one, w, std::max(rounds * block, mixed_ ? shared(longs * block, w, one.long_tokens) : 0.));
    }
  }

  // One segment, and several heads a block (plan.h). For known lengths only: otherwise the scheduler of the device balances blocks
  // better.
  void consider_rounds() {
    if (p_.common.seqs.cu_seqlens) return;
    for (int w = 0; w < widths_; ++w) {
      const BlockCosts &cost = cost_.of(w == 1);
      const int64_t jobs = heads_ * v_tiles(w);
      if (jobs <= places_ || jobs > kMostJobs * places_) continue;
      const double phases = static_cast<double>(jobs) / static_cast<double>(places_), head = static_cast<double>(longest_) * cost.chunk;
      for (const bool split : {false, true}) {
        const double length = split ? phases : static_cast<double>(ceil_div(jobs, places_));
        const double changes = split ? phases + 1. : length - 1.;
        if (split && longest_ < kSplitChunks) continue;
        Segments s;
        s.first_chunks = s.chunks = longest_;
        s.rounds = true, s.split = split;
        take(s, w, length * head + changes * cost_.next_head + cost.begin + (split ? kSplitCost : 0.));
      }
    }
  }

  // `n` segments; the first has as many chunks as take the time of the transfers beside it.
  void consider_segments(int64_t n) {
    const double step = cost_.combine_segment + cost_.combine_head * static_cast<double>(heads_);
    for (int w = 0; w < widths_; ++w) {
      const BlockCosts &cost = cost_.of(w == 1);
      const int64_t each_slot = v_tiles(w) + (n - 2) * (v_tiles(w) + k_tiles(w)), transfers = heads_ * (n - 2) * (v_tiles(w) + k_tiles(w));
      for (int k = 1; k <= kMostTransfers; ++k) {
        const double each = static_cast<double>(longest_) / static_cast<double>(n - 1), per = k * cost.transfer_chunk;
        const double lost = (k - 1) * cost.next_block;
        const double first = (per * each + k * cost.transfer_begin + lost - cost.begin) / (cost.chunk + per / static_cast<double>(n - 1));
        Segments s;
        s.count = n, s.wide_first = w == 1;
        s.first_chunks = static_cast<int64_t>(first + 0.5);
        if (s.first_chunks < 1) s.first_chunks = 1;
        s.chunks = longest_ > s.first_chunks ? ceil_div(longest_ - s.first_chunks, n - 1) : 1;
        const double transfer = static_cast<double>(s.chunks) * cost.transfer_chunk + cost.transfer_begin;
        const double scan_first = scan(w, s.first_chunks);
        double joined = makespan(heads_ * v_tiles(w), scan_first, transfers, transfer, places_, cost.next_block);
        if (mixed_) {
          const int64_t longer = slots_for(s.first_chunks * GDN_CHUNK);
          if (longer < p_.common.seqs.num_seqs) s.slots = longer, s.long_tokens = s.first_chunks * GDN_CHUNK;
          const double idle = static_cast<double>((longer - long_ones_) * p_.common.num_v_heads * each_slot) * kIdleBlock;
          const double work = static_cast<double>(heads_ * v_tiles(w)) * scan_first + static_cast<double>(transfers) * transfer + idle;
          joined = std::max(joined, shared(work, w, s.first_chunks * GDN_CHUNK));
        }
        for (int last = 0; last < widths_; ++last) {
          const double rounds = static_cast<double>(ceil_div(heads_ * v_tiles(last) * (n - 1), places_));
          take(s, last, joined + cost_.combine + static_cast<double>(n - 2) * step + rounds * scan(last, s.chunks) -
                            cost_.of(last == 1).begin_hidden);
        }
      }
    }
  }

  // More blocks than two rounds of places do not pay: all after the first segment is computed twice.
  int64_t most_segments() const { return 2 + 2 * places_ / (heads_ * v_tiles(widths_ - 1)); }

  const Segments &best() const { return best_; }

 private:
  int64_t v_tiles(int w) const { return ceil_div(p_.common.head_v, w == 1 ? 128 : 64); }
  int64_t k_tiles(int w) const { return ceil_div(p_.common.head_k, w == 1 ? 128 : 64); }

  double scan(int w, int64_t chunks) const {
    const BlockCosts &cost = cost_.of(w == 1);
    return static_cast<double>(chunks) * cost.chunk + cost.begin;
  }

  // The number of sequences that may have more than `tokens` tokens.
  int64_t slots_for(int64_t tokens) const { return std::min(int64_t{p_.common.seqs.num_seqs}, p_.common.seqs.total_tokens / (tokens + 1)); }

  // The end of blocks of `work` in all, and of the other sequences, all shorter than `longest` tokens, on all places together.
  double shared(double work, int w, int64_t longest) const {
    const BlockCosts &cost = cost_.of(w == 1);
    const double others = static_cast<double>(p_.common.seqs.num_seqs - long_ones_), chunks = static_cast<double>(other_tokens_) / GDN_CHUNK;
    const double each = static_cast<double>(p_.common.num_v_heads * v_tiles(w));
    const double all = work + each * (others * (cost.begin + 0.5 * cost.chunk) + chunks * cost.chunk);
    const double last = scan(w, ceil_div(std::min(longest, other_tokens_), GDN_CHUNK));
    return std::max(last, all / static_cast<double>(places_) + 0.5 * last);
  }

  // Keeps a better choice; to cut a sequence it must be better by more than the model's error.
  void take(const Segments &s, int w, double time) {
    if (time_ >= 0. && time >= time_ - (s.count > 1 && best_.count == 1 ? kModelError : 0.)) return;
    time_ = time, best_ = s;
    best_.wide = w == 1;
  }

  const gdn_rule_params &p_;
  const Costs &cost_;
  const int64_t longest_, places_;
  const int widths_;
  bool mixed_;
  int64_t long_ones_, heads_;    // sequences of the longest length, and their heads
  int64_t other_tokens_ = 0;     // of the others
  double time_ = -1.;    // of the best; below zero where there is none
  Segments best_;
};

}  // namespace

PassCosts pass_costs(const Segments &s, bool sm90) {
  const Costs &costs = sm90 ? kCosts90 : kCosts80;
  const BlockCosts &first = costs.of(s.wide_first);
  const auto us = [](double x) { return static_cast<float>(x); };
  return {us(first.chunk), us(first.begin), us(first.transfer_chunk), us(first.transfer_begin), us(costs.of(s.wide).chunk)};
}

Segments choose_segments(const gdn_rule_params &p, int64_t longest, bool sm90, int sms, bool has_wide) {
  Search search(p, longest, sm90, sms, has_wide);
  if (p.segments > 1) {
    // A segment has at least a chunk.
    search.consider_segments(std::min(int64_t{p.segments}, std::max(longest, int64_t{2})));
    return search.best();
  }
  search.consider_one();
  if (sm90) search.consider_rounds();
  if (p.segments == 0)
    for (int64_t n = 3; n <= kMostSegments && n <= search.most_segments() && n * kSegmentChunks <= longest; ++n)
      search.consider_segments(n);
  return search.best();
}

}  // namespace chunk
}  // namespace gdn
