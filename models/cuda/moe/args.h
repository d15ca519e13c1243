// Arguments of the kernels of the mixture of experts.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "../gdn_moe.h"
#include "../scaled/e4m3.cuh"

namespace gdn {
namespace moe {

constexpr int kGroup = 8;    // rows of one expert that share a reading of its weights
constexpr int kTableRows = GDN_MOE_FEW_TOKENS * (GDN_MOE_TOP_K + 1);

// Few tokens' choices. A row is one token at one expert: those of the routed experts, sorted by expert, then one of each
// token for the shared expert. A group is up to kGroup rows of one expert.
// Entry i has row i and, where there are so many groups, group i: so what is copied into shared memory is one piece.
struct alignas(16) TableEntry {
  uint32_t group;    // expert << 16 | first row << 4 | rows; the shared expert is number `experts`
  float weight;      // of the row
  int32_t token, zero;
};
struct alignas(16) Table {
  int32_t routed, groups;    // groups of the routed experts; all
  int32_t blocks, zero;      // of table_kernel, that have chosen
  TableEntry entry[kTableRows];
};

// Many tokens: rows of one expert that a block multiplies at once; those of the shared expert come last.
struct Tile {
  int32_t expert, first, rows, unused;
};

// Pointers of gdn_moe_params, and into the workspace.
struct Args {
  const void *x, *router, *gate_up, *down, *shared_gate_up, *shared_down;
  void *y;
  float *logits;             // of all splits: [splits, tokens, logits_stride]
  void *h;                   // [rows, h_stride]: silu(gate) * up
  Table *table;
  int32_t *chosen;           // [tokens, k]
  float *weights;            // [tokens, k + 1]: of the chosen and of the shared expert
  int32_t *counts;           // [blocks of tokens, experts]: rows
  int32_t *row_of_choice;    // [tokens, k]
  int32_t *token_of_row;     // [tokens k]
  Tile *tiles;
  int32_t *tile_count;       // tiles; those of routed experts; items that wide_kernel has claimed, of gate and up and of down
  void *rows;                // [rows, hidden]: mlp(x)
  int64_t x_stride, logits_stride, y_stride;
  int64_t split_stride;      // from logits to logits, whose sum they are
  int32_t splits;
  int32_t tokens, hidden, experts, top_k, inner, shared_inner, h_stride;
  int32_t scored;            // rows of the router: experts, and the shared expert's gate
  int32_t router_parts;
  int32_t normalise;
  int32_t shared_lines;      // of 128 bytes: the shared expert's gate and up
  ScaleArgs gate_up_scales, down_scales, shared_gate_up_scales, shared_down_scales;    // of weights in e4m3
};

// Bytes of a table of so many rows, and of all that these tokens have.
constexpr __host__ __device__ int32_t table_bytes(int rows) { return static_cast<int32_t>(offsetof(Table, entry) + rows * sizeof(TableEntry)); }
inline __host__ __device__ int32_t table_bytes(const Args &a) { return table_bytes(a.tokens * (a.top_k + (a.shared_inner > 0))); }

// Of down_kernel of few tokens: warps, floats from token to token of a warp's 16 sums, which differ so that banks do, and shared memory for tokens of so
// many rows.
constexpr int kDownWarps = 16, kColumn = 20;
constexpr __host__ __device__ int64_t down_shared_bytes(int tokens, int rows_each) {
  return table_bytes(tokens * rows_each) + static_cast<int64_t>(kDownWarps) * tokens * kColumn * sizeof(float);
}

// The launchers of a dtype, in few.cu, packed.cu, many.cu and scores.cu.
template <typename T> int run_few(const gdn_moe_params &p, const Args &args, cudaStream_t stream);
template <typename T> int run_packed(const gdn_moe_params &p, const Args &args, bool overlap, cudaStream_t stream);    // after logits and table
int packed_tokens(const gdn_moe_params &p, int optin);    // of one call of run_packed, at most; 0: hidden is too wide
template <typename T> int run_many(const gdn_moe_params &p, const Args &args, cudaStream_t stream);
template <typename T> int run_scores(const gdn_moe_params &p, const Args &args, cudaStream_t stream);

constexpr int kFewScored = 64;      // tokens whose logits are a matter of reading the router once
constexpr int kGemmTokens = 128;    // for more: of a tile
constexpr int kGemmRows = 136;      // of the router
constexpr int kGemmInputs = 64;     // at a time

// Into how many sums the inputs of a logit are divided. From sizes alone, as the workspace is: so many that there are some
// 128 blocks, and that each has several tiles of inputs.
inline int score_splits(const gdn_moe_params &p) {
  if (p.tokens <= kFewScored) return p.tokens <= kFewScored / 2 ? 2 : 4;
  const auto tiles = [](int64_t x, int tile) { return (x + tile - 1) / tile; };
  const int64_t blocks = tiles(p.tokens, kGemmTokens) * tiles(p.num_experts + (p.shared_inner > 0), kGemmRows);
  int splits = 1;
  while (splits < 8 && blocks * splits * 2 <= 128 && p.hidden / kGemmInputs >= splits * 8) splits *= 2;
  return splits;
}

// Tokens that a block chooses for: one or more a warp, in at most 128 blocks.
constexpr int kChooseThreads = 512;
inline int choose_tokens(int32_t tokens) {
  constexpr int kWarps = kChooseThreads / 32;
  return (tokens - 1) / (kWarps * 128) * kWarps + kWarps;
}

// Rows of a tile for so many rows of all experts.
inline int tile_rows(int64_t rows, int32_t experts) {
  const int64_t each = rows / experts;
  return each <= 20 ? 32 : each <= 80 ? 64 : 128;
}

}  // namespace moe
}  // namespace gdn
