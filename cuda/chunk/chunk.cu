// GDN_CHUNKED_SM80 and GDN_CHUNKED_SM90: what they take, what is launched, and how much workspace that needs.
#include "chunk.h"

#include "../common/launch.cuh"
#include "layout.cuh"
#include "maps.h"
#include "plan.h"
#include "segments.h"

namespace gdn {
namespace chunk {
namespace {
constexpr int32_t kLeastChosen = 16;    // chunks of a segment: for fewer the choice on the device takes longer than it gains
}  // namespace

int make_schedule(const gdn_rule_params &p, bool sm90, Schedule *s) {
  int sms = 0;
  if (const int status = sm_count(&sms)) return status;
  const int64_t longest = ceil_div(max_tokens(p.common.seqs), kChunk), heads = static_cast<int64_t>(p.common.seqs.num_seqs) * p.common.num_v_heads;
  s->chunks = p.common.seqs.cu_seqlens ? p.common.seqs.total_tokens / kChunk + p.common.seqs.num_seqs : longest * p.common.seqs.num_seqs;
  if (longest == 0) s->chunks = 0;
  s->record_bytes = sm90 ? 0 : ceil_div(s->chunks * p.common.num_v_heads * static_cast<int64_t>(sizeof(Record)), 256) * 256;

  const bool has_wide = p.common.head_k > 64 && p.common.head_v > 64;    // blocks of 128 value rows
  Segments segments;
  if (heads > 0) segments = choose_segments(p, longest, sm90, sms, sm90 && has_wide);
  s->longest = static_cast<int32_t>(longest);
  s->planned = {static_cast<int32_t>(segments.first_chunks), static_cast<int32_t>(segments.chunks)};
  s->mixed = segments.slots > 0;
  s->slots = s->mixed ? static_cast<int32_t>(segments.slots) : p.common.seqs.num_seqs;
  s->long_tokens = static_cast<int32_t>(segments.long_tokens);
  const int64_t later_chunks = longest - s->planned.first_chunks;
  s->segments = static_cast<int32_t>(1 + (later_chunks > 0 ? ceil_div(later_chunks, s->planned.segment_chunks) : 0));
  // [V, K] after the first; [V + K, K] of each that is neither it nor the last.
  const int64_t rows = s->segments > 1 ? p.common.head_v + (s->segments - 2) * (p.common.head_v + p.common.head_k) : 0;
  const int64_t slot_heads = s->slots * int64_t{p.common.num_v_heads};
  s->transfer_bytes = rows * slot_heads * p.common.head_k * static_cast<int64_t>(sizeof(float));
  if (s->segments > 1 && s->planned.segment_chunks >= kLeastChosen)
    s->border_bytes = static_cast<int64_t>(sizeof(Borders)) + 2 * slot_heads * static_cast<int64_t>(sizeof(int32_t));
  s->costs = pass_costs(segments, sm90);

  if (!sm90) {    // more rows a block read the keys less often, where blocks would not all run at once
    int optin = 0;
    if (const int status = shared_limit(&optin)) return status;
    const int64_t side_by_side = s->segments > 1 ? s->segments - 1 : 1;
    segments.wide = has_wide && side_by_side * heads * ceil_div(p.common.head_v, 64) > 2 * sms && optin >= 120 * 1024;
  }
  s->tile_rows = segments.wide ? 128 : 64;
  s->first_rows = segments.wide_first ? 128 : 64;
  s->places = segments.rounds ? sms : 0;
  // At most places - 1 heads are split: flags of 8 warps, and states.
  s->split_bytes = segments.split ? sms * (8 * int64_t{sizeof(uint32_t)} + int64_t{s->tile_rows} * p.common.head_k * int64_t{sizeof(float)}) : 0;
  return GDN_OK;
}

// The kernels in order.
template <typename T> int launch_all(const gdn_rule_params &p, const Schedule &s, bool sm90, cudaStream_t stream) {
  Plan plan = {};
  static_cast<Cuts &>(plan) = s;
  plan.keep_state = state_in_place(p.common);
  Record *records = static_cast<Record *>(p.workspace);
  plan.records = records;
  plan.transfers = reinterpret_cast<float *>(static_cast<uint8_t *>(p.workspace) + s.record_bytes);
  if (s.border_bytes > 0) {
    plan.borders = reinterpret_cast<Borders *>(static_cast<uint8_t *>(p.workspace) + s.record_bytes + s.transfer_bytes);
    plan.warm_ups = reinterpret_cast<int32_t *>(plan.borders + 1);
    int sms = 0;
    if (const int status = sm_count(&sms)) return status;
    if (const int status = launch_borders(p, s, plan, sm90 ? sms : 2 * sms, stream)) return status;
  }
  Maps maps;
  if (s.chunks > 0)
    if (const int status = sm90 ? make_maps(p, &maps) : launch_prepare<T>(p, s, records, stream)) return status;
  const auto scan = [&](Pass pass) {
    if (!sm90) return launch_sm80<T>(p, s, plan, pass, stream);
    return p.common.state_dtype == GDN_BF16 ? launch_sm90<T, __nv_bfloat16>(p, s, plan, maps, pass, stream)
                                     : launch_sm90<T, float>(p, s, plan, maps, pass, stream);
  };
  if (s.segments > 1) {
    if (const int status = scan(kFirst)) return status;
  }
  if (s.segments > 2) {
    if (const int status = launch_combine(p, plan, stream)) return status;
  }
  return scan(s.places > 0 ? kSeveral : kWhole);
}

}  // namespace chunk

int chunked_workspace(const gdn_rule_params &p, int32_t algo, int64_t *bytes) {
  chunk::Schedule s;
  if (const int status = chunk::make_schedule(p, algo == GDN_CHUNKED_SM90, &s)) return status;
  *bytes = s.bytes();
  return GDN_OK;
}

int launch_chunked(const gdn_rule_params &params, int32_t algo, cudaStream_t stream) {
  gdn_rule_params p = params;
  p.common.l2_eps = chunked_eps(p.common.l2_eps);
  const bool sm90 = algo == GDN_CHUNKED_SM90;
  chunk::Schedule s;
  if (const int status = chunk::make_schedule(p, sm90, &s)) return status;
  if (const int status = check_workspace(p.workspace, p.workspace_bytes, s.bytes())) return status;
  return p.common.io_dtype == GDN_F16 ? chunk::launch_all<__half>(p, s, sm90, stream) : chunk::launch_all<__nv_bfloat16>(p, s, sm90, stream);
}

}  // namespace gdn
