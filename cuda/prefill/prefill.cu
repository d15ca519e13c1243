// GDN_CHUNKED_SM80 and GDN_CHUNKED_SM90: what they take, how a call is cut up, and how much workspace it needs.
#include "prefill.h"

#include "../common/launch.cuh"
#include "layout.cuh"
#include "plan.h"

namespace gdn {
namespace prefill {
namespace {

bool takes(const gdn_rule_params &p) {
  const bool io = p.io_dtype == GDN_BF16 || p.io_dtype == GDN_F16;
  return io && !p.token_states && p.head_k <= 128 && p.head_k % 8 == 0 && p.head_v % 8 == 0 && aligned_state(p, 2) &&
         aligned(p.checkpoints, 2 * dtype_size(p.state_dtype)) && aligned_rows(p.q, 8, p.io_dtype) &&
         aligned_rows(p.k, 8, p.io_dtype) && aligned_rows(p.v, 8, p.io_dtype) && aligned_rows(p.o, 8, p.io_dtype);
}

// Whether a tensor map can describe it: no dimension of more than one element is repeated by a stride of zero. One without tokens
// is never read.
bool has_map(const gdn_heads &x, int32_t heads, const gdn_sequences &s) {
  const bool packed = s.cu_seqlens != nullptr;
  const int32_t tokens = packed ? s.total_tokens : s.tokens_per_seq;
  return tokens == 0 || ((heads == 1 || x.head_stride > 0) && (tokens <= 1 || x.token_stride > 0) &&
         (packed || s.num_seqs <= 1 || x.seq_stride > 0));
}

// Microseconds on an H200 (README.md), by blocks of 64 value rows and of 128: a chunk of the scan and of the transfer pass, and
// what a block of each takes to begin and end; a step of the combination, and what it takes more for each head; launches.
struct Costs {
  double whole[2], begin_whole[2], transfer[2], begin_transfer[2];
  double combine, combine_head, launches;
  double change;    // from one head to the next, in a block that goes through several
  double again[2];  // until a place that was left has its next block; where a block's beginning above is not of such
};
constexpr Costs kCosts90 = {{2., 2.79}, {6.5, 13.}, {1.45, 1.6}, {6.5, 10.}, 1., 0.06, 1., 3., {4.5, 0.}};
constexpr Costs kCosts80 = {{4.3, 4.3}, {4., 4.}, {2.2, 2.2}, {4., 4.}, 1., 0.06, 3., 0., {0., 0.}};

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

// How a sequence of `longest` chunks is cut, so that all is done first.
struct Cut {
  int64_t segments = 1, first = 1, others = 1;
  bool wide = false, wide_first = false;    // forms of the scan and of the first pass
  bool rounds = false, cut = false;         // a block goes through several heads; some cut in two
};

Cut choose_cut(const gdn_rule_params &p, int64_t longest, const Costs &cost, int64_t places, bool has_wide, bool has_rounds) {
  const int64_t heads = int64_t{p.seqs.num_seqs} * p.num_v_heads;
  const int64_t v_tiles[2] = {ceil_div(p.head_v, 64), ceil_div(p.head_v, 128)};
  const int64_t k_tiles[2] = {ceil_div(p.head_k, 64), ceil_div(p.head_k, 128)};
  const auto whole = [&](int w, int64_t chunks) { return static_cast<double>(chunks) * cost.whole[w] + cost.begin_whole[w]; };
  const double step = cost.combine + cost.combine_head * static_cast<double>(heads);
  double best = -1.;
  Cut cut;
  const auto consider = [&](Cut c, double before) {
    for (int w = 0; w <= (has_wide ? 1 : 0); ++w) {
      const int64_t blocks = heads * v_tiles[w] * (c.segments > 1 ? c.segments - 1 : 1);
      const double time = before + static_cast<double>(ceil_div(blocks, places)) * whole(w, c.others);
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
    if (has_rounds) consider_rounds();
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
        consider(c, joined + static_cast<double>(n - 2) * step + cost.launches);
      }
    }
    if (p.segments > 1) break;
  }
  return cut;
}

}  // namespace

int make_schedule(const gdn_rule_params &p, bool sm90, Schedule *s) {
  int sms = 0;
  if (const int status = sm_count(&sms)) return status;
  const int64_t longest = ceil_div(max_tokens(p.seqs), kChunk), heads = static_cast<int64_t>(p.seqs.num_seqs) * p.num_v_heads;
  s->chunks = p.seqs.cu_seqlens ? p.seqs.total_tokens / kChunk + p.seqs.num_seqs : longest * p.seqs.num_seqs;
  if (longest == 0) s->chunks = 0;
  s->record_bytes = sm90 ? 0 : ceil_div(s->chunks * p.num_v_heads * static_cast<int64_t>(sizeof(Record)), 256) * 256;

  const bool has_wide = p.head_k > 64 && p.head_v > 64;    // blocks of 128 value rows
  Cut cut;
  if (heads > 0) cut = choose_cut(p, longest, sm90 ? kCosts90 : kCosts80, sm90 ? sms : 2 * sms, sm90 && has_wide, sm90);
  s->first_chunks = static_cast<int32_t>(cut.first < 1 ? 1 : cut.first);
  s->segment_chunks = static_cast<int32_t>(cut.others < 1 ? 1 : cut.others);
  const int64_t behind = longest - s->first_chunks;
  s->segments = static_cast<int32_t>(1 + (behind > 0 ? ceil_div(behind, s->segment_chunks) : 0));
  // [V, K] after the first; [V + K, K] of each that is neither it nor the last.
  const int64_t rows = s->segments > 1 ? p.head_v + (s->segments - 2) * (p.head_v + p.head_k) : 0;
  s->transfer_bytes = rows * heads * p.head_k * static_cast<int64_t>(sizeof(float));

  if (!sm90) {    // more rows a block read the keys less often, where blocks would not all run at once
    int optin = 0;
    if (const int status = device_attribute<cudaDevAttrMaxSharedMemoryPerBlockOptin>(&optin)) return status;
    const int64_t side_by_side = s->segments > 1 ? s->segments - 1 : 1;
    cut.wide = has_wide && side_by_side * heads * ceil_div(p.head_v, 64) > 2 * sms && optin >= 120 * 1024;
  }
  s->tile_rows = cut.wide ? 128 : 64;
  s->first_rows = cut.wide_first ? 128 : 64;
  s->places = cut.rounds ? sms : 0;
  // At most places - 1 heads are cut: flags of 8 warps, and states.
  s->cut_bytes = cut.cut ? sms * (8 * int64_t{sizeof(uint32_t)} + int64_t{s->tile_rows} * p.head_k * int64_t{sizeof(float)}) : 0;
  return GDN_OK;
}

}  // namespace prefill

bool chunked_sm80_takes(const gdn_rule_params &p) { return prefill::takes(p); }

bool chunked_sm90_takes(const gdn_rule_params &p) {
  bool yes = false;
  using prefill::has_map;
  const bool maps = has_map(p.q, p.num_k_heads, p.seqs) && has_map(p.k, p.num_k_heads, p.seqs) && has_map(p.v, p.num_v_heads, p.seqs) &&
                    has_map(p.o, p.num_v_heads, p.seqs);
  return maps && prefill::takes(p) && has_sm90a_code(&yes) == GDN_OK && yes;
}

int chunked_workspace(const gdn_rule_params &p, int32_t algo, int64_t *bytes) {
  prefill::Schedule s;
  if (const int status = prefill::make_schedule(p, algo == GDN_CHUNKED_SM90, &s)) return status;
  *bytes = s.bytes();
  return GDN_OK;
}

int launch_chunked_tensor(const gdn_rule_params &p, int32_t algo, cudaStream_t stream) {
  const bool sm90 = algo == GDN_CHUNKED_SM90;
  prefill::Schedule s;
  if (const int status = prefill::make_schedule(p, sm90, &s)) return status;
  const int64_t bytes = s.bytes();
  if (bytes > 0 && (!p.workspace || !aligned(p.workspace, 256) || p.workspace_bytes < bytes)) return GDN_BAD_WORKSPACE;
  return p.io_dtype == GDN_F16 ? prefill::launch_f16(p, s, sm90, stream) : prefill::launch_bf16(p, s, sm90, stream);
}

}  // namespace gdn
