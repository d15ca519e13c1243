// candle-gdn: what stands between drafting, verifying and drawing, so that a round of all three asks nothing of the host.
// The rules of gdn.h hold here too: one parameter struct and a stream, nothing allocated, nothing awaited, statuses of
// gdn_status. models/src/cpu/round.rs does the same.
//
// A round of a sequence is `tokens` tokens: one that is certain, and the draft head's behind it. Verified, row i of them
// draws what follows token i; drafts stay as long as they are what was drawn. The draft head is fed the tokens that
// stayed with the next round.
#ifndef CANDLE_GDN_ROUND_H
#define CANDLE_GDN_ROUND_H

#include "gdn_sampling.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct gdn_round_params {
  uint32_t *ids;           // [seqs, tokens]: those of the round
  gdn_sampling_row *rows;  // [seqs * tokens], as of gdn_sampling_params: how the token behind each is chosen
  uint32_t *chosen;        // [seqs * tokens]: ids of gdn_sampling_params
  uint32_t *drawn;         // [seqs * tokens]
  uint32_t *recent;        // [seqs * tokens, history]
  uint32_t *stayed;        // [seqs]: tokens of the last round that stayed, at least 1
  uint32_t *last;          // [seqs]: the row of the last of them
  uint32_t *positions;     // [seqs]: tokens in the model's caches
  uint32_t *head;          // [seqs]: tokens in the draft head's cache before those that stayed
  uint32_t *behind;        // [seqs]: the same with them
  uint32_t *out;           // [seqs, 1 + tokens]: how many stayed, and what the rows drew
  int32_t seqs;
  int32_t tokens;
  int32_t history;
  float forced;            // for benchmarks: the chance of a draft to be taken for right, whatever was drawn; negative: none
} gdn_round_params;

// Before gdn_sampling: each row of a sequence chooses as the last token that stayed would have its row choose the one after
// it, so many tokens later. A sequence whose row is nobody's stays nobody's.
int gdn_round_begin(const gdn_round_params *params, cudaStream_t stream);

// After gdn_sampling: how many tokens stay, and all that follows from it for the next round, whose first token is the last
// one drawn.
int gdn_round_end(const gdn_round_params *params, cudaStream_t stream);

#ifdef __cplusplus
}
#endif

#endif  // CANDLE_GDN_ROUND_H
