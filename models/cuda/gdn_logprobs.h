// candle-gdn: the log-probabilities of a row's drawn token and of the likeliest ones, for rows that ask. The rules of gdn.h hold
// here too: one parameter struct and a stream, nothing allocated, nothing awaited, strides in elements, statuses of gdn_status.
//
// They are of the softmax of the logits as the model gives them: before penalties and temperature. So a launch before
// gdn_sampling reads the logits, and one after it knows the token.
#ifndef CANDLE_GDN_LOGPROBS_H
#define CANDLE_GDN_LOGPROBS_H

#include "gdn_sampling.h"

#ifdef __cplusplus
extern "C" {
#endif

#define GDN_MOST_LIKELIEST 20    // tokens besides the drawn one

// Of a row: `likeliest` of its gdn_sampling_row, the log-probability of the token drawn, and of `likeliest - 1` tokens, or as many
// as there are, from the likeliest one on the ids and the log-probabilities. Of equal ones the lower id comes first.
typedef struct gdn_logprobs_row {
  uint32_t likeliest;
  float drawn;
  uint32_t ids[GDN_MOST_LIKELIEST];
  float logprobs[GDN_MOST_LIKELIEST];
} gdn_logprobs_row;

typedef struct gdn_logprobs_params {
  const void *logits;              // [rows, vocab] of `dtype`, finite
  const gdn_sampling_row *state;   // [rows], as of gdn_sampling_params
  const uint32_t *ids;             // [rows], as of gdn_sampling_params
  const uint32_t *drawn;           // [rows]
  const uint32_t *recent;          // [rows, history]
  gdn_logprobs_row *out;          // written: [rows]; nothing of padding rows, `likeliest` alone of rows that do not ask
  float *raw;                      // [rows, history]: logits of recent tokens, from the first launch to the second
  uint32_t *parts;                 // so many words as gdn_logprobs_words says, from the first launch to the second
  int64_t logits_stride;           // elements from row to row
  int32_t rows;
  int32_t vocab;                   // at most 2^19
  int32_t history;
  int32_t dtype;                   // GDN_F32, GDN_BF16 or GDN_F16
} gdn_logprobs_params;

// Before gdn_sampling: reads the logits, and those of recent tokens, which a penalty may overwrite.
int gdn_logprobs_begin(const gdn_logprobs_params *params, cudaStream_t stream);

// After gdn_sampling, which nothing but a change of what it drew may follow.
int gdn_logprobs_end(const gdn_logprobs_params *params, cudaStream_t stream);

// Words of `parts`.
int gdn_logprobs_words(int32_t rows, int32_t vocab, int64_t *words);

#ifdef __cplusplus
}
#endif

#endif  // CANDLE_GDN_LOGPROBS_H
