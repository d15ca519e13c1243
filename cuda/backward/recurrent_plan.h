// How the recurrent backward pass is divided, and what lies in its workspace.
#pragma once

#include "../common/host.cuh"

namespace gdn {
namespace backward {

// Sequences are walked a section of tokens at a time, the last section first; one section is usual.
struct Plan {
  int32_t chunk;             // tokens between two states that are kept
  int32_t sections;          // of the longest sequence
  int32_t section_tokens;    // a multiple of `chunk`, or all tokens
  int32_t section;           // the one of this launch
  bool by_rows;              // packed and in one section: tokens have the rows of the packed tensors; else each sequence has section_tokens
  int64_t rows, chunks;      // of a section, of all sequences
  int64_t tokens;            // of all sequences
  float4 *factors;           // [tokens, num_k_heads]: reciprocal norms of k (in two parts) and of q
  float *states;             // [chunks, num_v_heads, head_v, head_k]: before the chunk
  float *d_states;           // the gradient of the state after it
  float *values, *d_values;  // [rows, num_v_heads, head_v]: v - S k, and its gradient over beta, which is dS k
  float *borders;            // [sections - 1, sequence, num_v_heads, head_v, head_k]: states before the sections but the first
  float *carry;              // [sequence, num_v_heads, head_v, head_k]: the gradient of the state between two sections
};

// One translation unit an input type: the kernels of one section. `borders`: first, the states before the sections.
template <typename T> int launch_factors(const gdn_rule_backward_params &p, const Plan &plan, cudaStream_t stream);
template <typename T> int launch_borders(const gdn_rule_backward_params &p, const Plan &plan, cudaStream_t stream);
template <typename T> int launch_section(const gdn_rule_backward_params &p, const Plan &plan, cudaStream_t stream);

// Head sizes from here on have chunks of 32 tokens, so that gradients of q and k fit the registers of a block.
constexpr int kWideKeys = 129;

}  // namespace backward
}  // namespace gdn
