// gdn_attention: checks, and how the work is divided.
#include "prompt.h"

#include <algorithm>
#include <cmath>

#include "split.cuh"

namespace gdn {
namespace attention {
namespace {

constexpr int kBlocks = 2;    // a multiprocessor, by __launch_bounds__
constexpr int kBriefTiles = 12;

int check(const gdn_attention_params &p) {
  if (!valid_dtype(p.io_dtype)) return GDN_BAD_DTYPE;
  if (const int status = check_heads(p.num_heads, p.num_kv_heads, p.head_dim)) return status;
  if (const int status = check_sequences(p.seqs)) return status;
  if (p.seqs.num_seqs > 65535 || p.num_kv_heads > 65535 || p.cache.capacity > 1 << 30) return GDN_BAD_LENGTH;
  if (p.max_len < 0 || p.splits < 0 || p.splits > kMaxSplits) return GDN_BAD_LENGTH;
  if (int64_t{max_tokens(p.seqs)} * (p.num_heads / p.num_kv_heads) > kMaxBlocks - 64) return GDN_BAD_LENGTH;
  for (const gdn_heads *x : {&p.q, &p.gate, &p.o})
    if (!valid_strides(*x)) return GDN_BAD_STRIDE;
  if (const int status = check_cache(p.cache, max_tokens(p.seqs), p.io_dtype)) return status;
  const bool rows = aligned_rows(p.q, 16 / dtype_size(p.io_dtype), p.io_dtype) && aligned_rows(p.o, 2, p.io_dtype) &&
                    (!p.gate.ptr || aligned_rows(p.gate, 2, p.io_dtype));
  return rows ? GDN_OK : GDN_BAD_ALGO;
}

struct Choice {
  bool prompt;      // the kernel for prompts; if not:
  Kernel kernel;
  Plan plan;
  int64_t bytes;    // of workspace
  int optin;
};

// The time of a tile of keys, in units of the time that a multiprocessor's part of the memory's rate needs for it: of a block
// that waits for its bytes; of one that is alone on its multiprocessor; of the multiprocessor. With many rows it is arithmetic,
// which two blocks of a multiprocessor share.
struct TileTimes {
  double waiting, alone, busy;
  bool arithmetic;
};

// Constants from times on an H200 (README).
constexpr TileTimes tile_times(int rows) {
  return rows <= 16   ? TileTimes{0.5, 0.7, 1., false}
         : rows <= 32 ? TileTimes{0.7, 1.2, 1.35, false}
                      : TileTimes{1.3, 3.7, 2.75, true};
}

// The fastest number of shares of the keys. A block costs about a tile more than its own (its start, its partial sums); the
// combination costs a launch and its blocks.
int choose_splits(int64_t groups, int64_t tiles, const TileTimes &t, int64_t rows, int dim, int sms, int64_t resident) {
  int best = 1;
  double least = 0.;
  for (int64_t s = 1; s <= kMaxSplits && s <= (tiles > 1 ? tiles : 1); ++s) {
    const int64_t each = ceil_div(tiles, s), blocks = groups * s;
    const double waiting = t.waiting * static_cast<double>(ceil_div(blocks, resident) * (each + 1));
    const double reading =
        t.arithmetic ? (blocks > sms ? t.busy : t.alone) * static_cast<double>(ceil_div(blocks, sms) * each)
                     : fmax(t.busy / sms, t.alone / static_cast<double>(blocks)) * static_cast<double>(groups * tiles);
    const int64_t combined = rows * ceil_div(dim, combine_columns(combine_sides(static_cast<int>(s))));
    const double cost = fmax(waiting, reading) + (s > 1 ? 1. + static_cast<double>(combined) / 200. : 0.);
    if (s == 1 || cost < least) least = cost, best = static_cast<int>(s);
  }
  return best;
}

// Whether the kernel for prompts is faster. A wave of its blocks, one a multiprocessor, takes as long as kPromptWave blocks of 64
// rows a multiprocessor of the other kernel, for any number of keys. The other divides the keys, and fills the device with fewer
// rows.
constexpr double kPromptWave = 0.45;
bool prompt_is_faster(const gdn_attention_params &p, int64_t rows, int sms) {
  const int64_t blocks = prompt_tiles(p, rows, kPromptRows);
  return rows >= kPromptRows && blocks <= kMaxBlocks &&
         static_cast<double>(ceil_div(blocks, sms) * sms) * kPromptWave <= static_cast<double>(prompt_tiles(p, rows, 64));
}

int choose(const gdn_attention_params &p, Choice *c) {
  int sms = 0, shared = 0;
  if (const int status = sm_count(&sms)) return status;
  if (const int status = shared_limit(&c->optin)) return status;
  if (const int status = shared_of_sm(&shared)) return status;

  const int group = p.num_heads / p.num_kv_heads, tokens = max_tokens(p.seqs);
  const int64_t rows = int64_t{tokens} * group;
  const int dim = p.head_dim <= 64 ? 64 : p.head_dim <= 128 ? 128 : 256;
  Plan &plan = c->plan;
  plan = {};
  plan.group = Divisor::of(group);
  plan.max_tokens = tokens;
  plan.scale = p.scale * 1.4426950408889634f;

  c->prompt = p.splits == 0 && prompt_is_faster(p, rows, sms) && prompt_supports(p) && plan.group.divides(rows + kPromptRows) &&
              plan.group.divides(p.num_heads);
  if (c->prompt) {
    c->bytes = 0;
    plan.splits = 1;
    plan.by_splits = Divisor::of(1);
    plan.overlap = p.overlap != 0;
    plan.row_tiles = static_cast<int>(ceil_div(rows, kPromptRows));
    plan.rows_a_tile = kPromptRows;
    plan.search = prompt_tiles(p, rows, kPromptRows) < int64_t{plan.row_tiles} * p.num_kv_heads * p.seqs.num_seqs;
    return GDN_OK;
  }

  Kernel &k = c->kernel;
  if (p.io_dtype == GDN_F32) {
    k = {dim, 16, 4, 4};
  } else {
    k = {dim, rows <= 16 ? 16 : rows <= 32 ? 32 : 64, 4, 2};
    while (k.bytes() > c->optin && k.rows > 16) k.rows /= 2;
    // More tiles in flight where two such blocks still fit.
    const Kernel deeper = {dim, 16, 6, 2};
    if (k.rows == 16 && kBlocks * (deeper.bytes() + 1024) <= shared && deeper.bytes() <= c->optin) k = deeper;
  }

  // CUDA reserves 1 KB a block.
  const int64_t fit = shared / (k.bytes() + 1024), resident = sms * (fit < 1 ? 1 : fit < kBlocks ? fit : kBlocks);
  const int64_t row_tiles = ceil_div(rows, k.rows);
  const int64_t groups = int64_t{p.seqs.num_seqs} * p.num_kv_heads * row_tiles;
  int64_t max_len = p.max_len > 0 && p.max_len < p.cache.capacity ? p.max_len : p.cache.capacity;
  // With a window a tile of rows sees that of its first token and the tokens after it, which need not begin with a tile of keys.
  const int64_t tile_tokens = ceil_div(k.rows < rows ? k.rows : rows, group);
  if (p.cache.window > 0) max_len = std::min(max_len, p.cache.window + tile_tokens - 1 + k.keys() / 2);
  const int64_t tiles = ceil_div(max_len, k.keys()), all_rows = int64_t{p.seqs.num_seqs} * tokens * p.num_heads;
  plan.splits = p.splits ? p.splits : choose_splits(groups, tiles, tile_times(k.rows), all_rows, p.head_dim, sms, resident);
  plan.by_splits = Divisor::of(plan.splits);
  // Blocks that start early are placed unevenly, two on one multiprocessor and none on another: if they run long that costs
  // more than a launch.
  plan.overlap = p.overlap && ceil_div(tiles, plan.splits) <= kBriefTiles;
  plan.row_tiles = static_cast<int>(row_tiles);
  plan.rows_a_tile = k.rows;
  plan.keys_a_tile = k.keys();
  while (1 << plan.keys_bits < k.keys()) ++plan.keys_bits;
  const int64_t most_tiles = ceil_div(p.cache.capacity, k.keys()) + 2 + plan.splits;
  if (!plan.group.divides(rows + k.rows) || !plan.group.divides(p.num_heads) || !plan.by_splits.divides(most_tiles) ||
      !plan.by_splits.divides(row_tiles * plan.splits))
    return GDN_BAD_LENGTH;
  const int64_t parts = all_rows * plan.splits;
  const int64_t sums = parts * p.head_dim * 4;
  c->bytes = plan.splits > 1 ? sums + parts * 8 : 0;
  if (c->bytes > 0 && p.workspace) {
    plan.partial = static_cast<float *>(p.workspace);
    plan.sums = reinterpret_cast<float2 *>(static_cast<char *>(p.workspace) + sums);
  }
  return GDN_OK;
}

bool nothing_to_do(const gdn_attention_params &p) { return p.seqs.num_seqs == 0 || max_tokens(p.seqs) == 0; }

}  // namespace
}  // namespace attention
}  // namespace gdn

extern "C" int gdn_attention_workspace(const gdn_attention_params *params, int64_t *bytes) {
  using namespace gdn;
  using namespace gdn::attention;
  if (!params || !bytes) return GDN_NULL_POINTER;
  *bytes = 0;
  if (const int status = check(*params)) return status;
  if (nothing_to_do(*params)) return GDN_OK;
  Choice c;
  if (const int status = choose(*params, &c)) return status;
  *bytes = c.bytes;
  return GDN_OK;
}

extern "C" int gdn_attention(const gdn_attention_params *params, cudaStream_t stream) {
  using namespace gdn;
  using namespace gdn::attention;
  if (!params) return GDN_NULL_POINTER;
  const gdn_attention_params &p = *params;
  if (const int status = check(p)) return status;
  if (nothing_to_do(p)) return GDN_OK;
  for (const void *x : {p.q.ptr, p.o.ptr, static_cast<const void *>(p.cache.k), static_cast<const void *>(p.cache.v),
                        static_cast<const void *>(p.positions)})
    if (!x) return GDN_NULL_POINTER;
  Choice c;
  if (const int status = choose(p, &c)) return status;
  if (c.bytes > 0 && (!p.workspace || !aligned(p.workspace, 256) || p.workspace_bytes < c.bytes))
    return GDN_BAD_WORKSPACE;
  if (c.prompt) return launch_prompt(p, c.plan, c.optin, stream);
  switch (p.io_dtype) {
    case GDN_BF16: return launch_bf16(p, c.plan, c.kernel, c.optin, stream);
    case GDN_F16: return launch_f16(p, c.plan, c.kernel, c.optin, stream);
    default: return launch_f32(p, c.plan, c.kernel, c.optin, stream);
  }
}
