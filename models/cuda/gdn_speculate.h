// candle-gdn: the bookkeeping of a speculative step (draft, verify, accept), so that the host takes no part in one.
// The rules of gdn.h hold here too: one parameter struct and a stream, nothing allocated, nothing awaited, statuses of
// gdn_status. models/src/drafting/speculative_tests.rs has the same in Rust.
//
// A speculative step of a sequence has `tokens` tokens: one that is certain, then the drafts of the draft head. The model
// verifies all of them, and row i draws the token after token i. A draft is accepted as long as it equals the token
// drawn. The next step feeds the accepted tokens to the draft head.
#ifndef CANDLE_GDN_SPECULATE_H
#define CANDLE_GDN_SPECULATE_H

#include "gdn_sampling.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct gdn_speculate_params {
  uint32_t *ids;           // [seqs, tokens]: the tokens of the step
  gdn_sampling_row *rows;  // [seqs * tokens], as in gdn_sampling_params: how the token after each is chosen
  uint32_t *chosen;        // [seqs * tokens]: ids of gdn_sampling_params
  uint32_t *drawn;         // [seqs * tokens]
  uint32_t *recent;        // [seqs * tokens, history]
  uint32_t *accepted;      // [seqs]: accepted tokens of the last step, the certain one included, at least 1
  uint32_t *last;          // [seqs]: the row of the last of them
  uint32_t *positions;     // [seqs]: tokens in the model's caches
  uint32_t *head_len;      // [seqs]: tokens in the draft head's cache before the accepted ones
  uint32_t *head_end;      // [seqs]: tokens in it with the accepted ones
  uint32_t *out;           // [seqs, 1 + tokens]: how many were accepted, and what the rows drew
  int32_t seqs;
  int32_t tokens;
  int32_t history;
  float forced_acceptance; // for benchmarks: the chance that a draft is accepted, whatever was drawn; negative: compare
} gdn_speculate_params;

// Before gdn_sampling: row i of a sequence chooses as the row of the last accepted token would choose i tokens later.
// Padding rows stay padding.
int gdn_speculate_begin(const gdn_speculate_params *params, cudaStream_t stream);

// After gdn_sampling: counts the accepted tokens and prepares the next step, whose first token is the last one drawn.
int gdn_speculate_end(const gdn_speculate_params *params, cudaStream_t stream);

#ifdef __cplusplus
}
#endif

#endif  // CANDLE_GDN_SPECULATE_H
