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

}  // namespace

int make_schedule(const gdn_rule_params &p, bool sm90, Schedule *s) {
  int sms = 0;
  if (const int status = sm_count(&sms)) return status;
  const int64_t longest = ceil_div(max_tokens(p.seqs), kChunk), heads = static_cast<int64_t>(p.seqs.num_seqs) * p.num_v_heads;
  s->chunks = p.seqs.cu_seqlens ? p.seqs.total_tokens / kChunk + p.seqs.num_seqs : longest * p.seqs.num_seqs;
  if (longest == 0) s->chunks = 0;
  s->record_bytes = sm90 ? 0 : ceil_div(s->chunks * p.num_v_heads * static_cast<int64_t>(sizeof(Record)), 256) * 256;

  const int64_t tiles = ceil_div(p.head_v, 64), wide_tiles = ceil_div(p.head_v, 128);
  const bool has_wide = p.head_k > 64 && p.head_v > 64;    // blocks of 128 value rows
  // Microseconds on an H200 (README.md): a chunk of the scan and of the transfer pass, by blocks of 64 rows and of 128; a step of
  // the combination; what a round of blocks takes to begin and end; what the two launches more cost.
  const double scan = sm90 ? 2.15 : 4.3, wide_scan = 3.0, transfer = sm90 ? 1.3 : 2.2, wide_transfer = 1.87, combine = 3.7;
  const double begin = 4, launches = 7;
  const auto passes = [&](int64_t blocks, int64_t chunks, double chunk) {
    const double rounds = static_cast<double>(ceil_div(blocks, sm90 ? sms : 2 * sms));
    return rounds * (static_cast<double>(chunks) * chunk + begin);
  };
  int64_t segments = 1;
  bool wide = false, wide_transfers = false;
  double best = -1;
  for (int64_t n = p.segments > 0 ? p.segments : 1; n == 1 || n == p.segments || (n <= 32 && n * 8 <= longest); ++n) {
    const int64_t length = ceil_div(longest, n);
    double joined = 0;
    bool wide_joined = false;
    if (n > 1) {
      joined = passes((n - 1) * heads * (tiles + ceil_div(p.head_k, 64)), length, transfer);
      const double cost = passes((n - 1) * heads * (wide_tiles + ceil_div(p.head_k, 128)), length, wide_transfer);
      wide_joined = sm90 && has_wide && cost < joined;
      joined = (wide_joined ? cost : joined) + static_cast<double>(n - 1) * combine + launches;
    }
    for (const bool w : {false, true}) {
      if (w && !(has_wide && sm90)) continue;
      const double cost = joined + (w ? passes(n * heads * wide_tiles, length, wide_scan) : passes(n * heads * tiles, length, scan));
      if (best < 0 || cost < best) best = cost, segments = n, wide = w, wide_transfers = wide_joined;
    }
    if (p.segments > 0) break;
  }
  s->segment_chunks = static_cast<int32_t>(ceil_div(longest, segments));
  if (s->segment_chunks < 1) s->segment_chunks = 1;
  s->segments = static_cast<int32_t>(ceil_div(longest, s->segment_chunks));
  if (s->segments < 1) s->segments = 1;
  // Of each segment but the last [V + K, K], and of each sequence [V, K].
  const int64_t rows = s->segments > 1 ? (s->segments - 1) * (p.head_v + p.head_k) + p.head_v : 0;
  s->transfer_bytes = rows * heads * p.head_k * static_cast<int64_t>(sizeof(float));

  if (!sm90) {    // more rows a block read the keys less often, where blocks would not all run at once
    int optin = 0;
    if (const int status = device_attribute<cudaDevAttrMaxSharedMemoryPerBlockOptin>(&optin)) return status;
    wide = has_wide && s->segments * heads * tiles > 2 * sms && optin >= 120 * 1024;
  }
  s->tile_rows = wide ? 128 : 64;
  s->transfer_rows = wide_transfers ? 128 : 64;
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
  *bytes = s.record_bytes + s.transfer_bytes;
  return GDN_OK;
}

int launch_chunked_tensor(const gdn_rule_params &p, int32_t algo, cudaStream_t stream) {
  const bool sm90 = algo == GDN_CHUNKED_SM90;
  prefill::Schedule s;
  if (const int status = prefill::make_schedule(p, sm90, &s)) return status;
  const int64_t bytes = s.record_bytes + s.transfer_bytes;
  if (bytes > 0 && (!p.workspace || !aligned(p.workspace, 256) || p.workspace_bytes < bytes)) return GDN_BAD_WORKSPACE;
  return p.io_dtype == GDN_F16 ? prefill::launch_f16(p, s, sm90, stream) : prefill::launch_bf16(p, s, sm90, stream);
}

}  // namespace gdn
