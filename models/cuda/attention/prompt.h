// The kernel for prompts (sm_90a), for the chooser in attention.cu.
#pragma once

#include <cuda.h>

#include "attention.h"

namespace gdn {
namespace attention {

// How the copy engine sees keys and values: boxes of 64 elements of a head by the keys of a tile, zero outside of the cache.
// Coordinates: element, position, kv head, slot.
struct PromptMaps {
  CUtensorMap keys, values;
};

constexpr int kPromptRows = 128;    // a block
constexpr int prompt_keys(int dim) { return dim == 256 ? 80 : 128; }    // a tile

// Its blocks, or those of another number of rows: of so many rows a kv head in each sequence, at most. Packed, no more than
// there can be with so many tokens in all.
int64_t prompt_tiles(const gdn_attention_params &p, int64_t rows, int64_t rows_a_tile);

// Whether it can: code, element type, strides and alignment. Not whether it pays.
bool prompt_takes(const gdn_attention_params &p);

int launch_prompt(const gdn_attention_params &p, const Plan &plan, int optin, cudaStream_t stream);

// One translation unit an input type, so that they compile side by side.
int launch_prompt_bf16(const gdn_attention_params &p, const Plan &plan, const PromptMaps &maps, int optin, cudaStream_t stream);
int launch_prompt_f16(const gdn_attention_params &p, const Plan &plan, const PromptMaps &maps, int optin, cudaStream_t stream);

}  // namespace attention
}  // namespace gdn
