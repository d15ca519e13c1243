// The kernel for prompts (sm_90a), for the chooser in attention.cu.
#pragma once

#include <cuda.h>

#include "attention.h"

namespace gdn {
namespace attention {

// Tensor maps of keys and values: boxes of 64 elements of a head by the keys of a tile, zero outside of the cache.
// Coordinates: element, position, kv head, slot.
struct PromptMaps {
  CUtensorMap keys, values;
};

constexpr int kPromptRows = 128;    // a block
constexpr int prompt_keys(int dim) { return dim == 256 ? 80 : 128; }    // a tile

// The most tiles of `rows_a_tile` rows, with `rows` rows a kv head in each sequence. For packed tokens bounded by their total.
int64_t prompt_tiles(const gdn_attention_params &p, int64_t rows, int64_t rows_a_tile);

// Whether it supports the arguments: code, element type, strides and alignment. Not whether it is faster.
bool prompt_supports(const gdn_attention_params &p);

int launch_prompt(const gdn_attention_params &p, const Plan &plan, int optin, cudaStream_t stream);

// One translation unit an input type, so that they compile in parallel.
int launch_prompt_bf16(const gdn_attention_params &p, const Plan &plan, const PromptMaps &maps, int optin, cudaStream_t stream);
int launch_prompt_f16(const gdn_attention_params &p, const Plan &plan, const PromptMaps &maps, int optin, cudaStream_t stream);

}  // namespace attention
}  // namespace gdn
