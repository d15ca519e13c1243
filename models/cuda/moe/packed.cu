// Few tokens with packed experts: launches.
#include "common/launch.cuh"
#include "../quantized/product.h"
#include "packed.cuh"

namespace gdn {
namespace moe {
namespace {

PackedArgs packed_args(const void *w, int type, int rows, int inputs) {
  return {static_cast<const char *>(w), type, rows / kTile, w ? inputs / quantized::extent(type).unit_inputs : 1};
}

int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

// How many units a warp has under way: for one token a single one, which makes room for blocks of the next launch; otherwise as many
// as it has in all, or as there is room for.
int stages_of(int rows, int64_t units, int64_t stage, int64_t room) {
  const int64_t stages = room / (kWarps * stage), wanted = rows == 1 ? 1 : units < kMostStages ? units : kMostStages;
  return static_cast<int>(stages < wanted ? stages : wanted);
}

// Shared memory of packed_gate_up_kernel in front of its rings: barriers and table, x, its scales, sums of two turns.
int64_t lay_out_gate_up(const gdn_moe_params &p, int tokens, FewArgs *q) {
  q->chunks = p.hidden / quantized::kChunk;
  q->x_shared_row = q->chunks * kChunkOfX;
  q->scales_row = q->chunks * kScalesOfX;
  q->scales_at = static_cast<int32_t>(kBehindTable + static_cast<int64_t>(tokens) * q->x_shared_row);
  q->partial_at = q->scales_at + tokens * q->scales_row;
  q->partial_size = (kWarps + kTurn) * (tokens == 1 ? 1 : kGroup) * kTile * static_cast<int32_t>(sizeof(float));
  return q->ring_at = static_cast<int32_t>(ceil_div(q->partial_at + 2 * q->partial_size, 128) * 128);
}

}  // namespace

int packed_tokens(const gdn_moe_params &p, int optin) {
  const int units[] = {p.gate_up_type, p.shared_inner > 0 ? p.shared_gate_up_type : p.gate_up_type};
  const int64_t stage = kWarps * most(quantized::extent(units[0]).unit_bytes, quantized::extent(units[1]).unit_bytes);
  int tokens = p.tokens;
  FewArgs q;
  while (tokens > 0 && lay_out_gate_up(p, tokens, &q) + stage > optin) --tokens;
  return tokens;
}

template <typename T> int run_packed(const gdn_moe_params &p, const Args &args, bool overlap, cudaStream_t stream) {
  int sms = 0, optin = 0;
  if (const int status = sm_count(&sms)) return status;
  if (const int status = shared_limit(&optin)) return status;
  FewArgs q = {};
  q.a = args;
  q.gate_up = packed_args(p.gate_up, p.gate_up_type, 2 * p.inner, p.hidden);
  q.down = packed_args(p.down, p.down_type, p.hidden, p.inner);
  q.shared_gate_up = packed_args(p.shared_inner > 0 ? p.shared_gate_up : nullptr, p.shared_gate_up_type, 2 * p.shared_inner, p.hidden);
  q.shared_down = packed_args(p.shared_inner > 0 ? p.shared_down : nullptr, p.shared_down_type, p.hidden, p.shared_inner);
  q.x = p.x;
  q.x_row = p.x_stride * static_cast<int64_t>(sizeof(T));
  q.rows = p.tokens;
  const int64_t pairs = static_cast<int64_t>(p.tokens) * p.top_k;
  const int shared_groups = p.shared_inner > 0 ? (p.tokens + kGroup - 1) / kGroup : 0;
  const auto bytes = [](const PackedArgs &part) { return static_cast<int64_t>(quantized::extent(part.type).unit_bytes); };
  const bool shared = shared_groups > 0;

  // gate_up
  LaunchConfig config;
  config.stream = stream;
  config.overlap = overlap;
  config.block = dim3(kThreads);
  const int rows = p.tokens == 1 ? 1 : kGroup;
  int64_t at = lay_out_gate_up(p, p.tokens, &q);
  const int64_t stage = shared ? most(bytes(q.gate_up), bytes(q.shared_gate_up)) : bytes(q.gate_up);
  const int64_t tiles = pairs * q.gate_up.tiles + static_cast<int64_t>(shared_groups) * q.shared_gate_up.tiles;
  const int units = shared ? static_cast<int>(most(q.gate_up.units, q.shared_gate_up.units)) : q.gate_up.units;
  const int64_t blocks = tiles < sms ? tiles : sms;
  const int64_t most_units = ceil_div((tiles / blocks + 2) * units, kWarps);
  q.stages = stages_of(rows, most_units, stage, optin - at);
  config.grid = dim3(static_cast<unsigned>(blocks));
  config.shared_bytes = at + q.stages * kWarps * stage;
  const int status = rows == 1 ? launch_allowed<packed_gate_up_kernel<T, 1>>(config, optin, q)
                               : launch_allowed<packed_gate_up_kernel<T, kGroup>>(config, optin, q);
  if (status) return status;

  // down: barriers and table, two rows of a unit's inputs for each warp, sums, the rings.
  q.sums_at = kBehindTable + kWarps * 2 * kRowOfUnit;
  at = ceil_div(q.sums_at + static_cast<int64_t>(kWarps) * p.tokens * kTile * static_cast<int>(sizeof(float)), 128) * 128;
  q.down_ring_at = static_cast<int32_t>(at);
  q.down_stage = static_cast<int32_t>(shared ? most(bytes(q.down), bytes(q.shared_down)) : bytes(q.down));
  const int64_t down_units = pairs * q.down.units + static_cast<int64_t>(shared_groups) * q.shared_down.units;
  q.down_stages = stages_of(rows, ceil_div(down_units, kWarps), q.down_stage, optin - at);
  config.overlap = p.overlap >= 0;
  config.grid = dim3(static_cast<unsigned>(p.hidden / kTile));
  config.shared_bytes = at + q.down_stages * kWarps * q.down_stage;
  return rows == 1 ? launch_allowed<packed_down_kernel<T, 1>>(config, optin, q)
                   : launch_allowed<packed_down_kernel<T, kGroup>>(config, optin, q);
}

template int run_packed<__nv_bfloat16>(const gdn_moe_params &, const Args &, bool, cudaStream_t);
template int run_packed<__half>(const gdn_moe_params &, const Args &, bool, cudaStream_t);

}  // namespace moe
}  // namespace gdn
