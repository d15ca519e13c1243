// candle-gdn: the next token of each row, chosen from its logits. The rules of gdn.h hold here too: one parameter struct and a
// stream, nothing allocated, nothing awaited, strides in elements, statuses of gdn_status. models/src/cpu/sampling.rs gives the
// same tokens.
#ifndef CANDLE_GDN_SAMPLING_H
#define CANDLE_GDN_SAMPLING_H

#include "gdn.h"

#ifdef __cplusplus
extern "C" {
#endif

// No token could be chosen: a logit is not finite.
#define GDN_NO_TOKEN 0xffffffffu

// How a row's token is chosen. On the device, so that one graph serves all; a launch moves it on to the next token.
typedef struct gdn_sampling_row {
  double scale;     // log2(e) / temperature; 0: the most likely token; negative: a padding row, neither read nor written
  double top_p;     // the choice is among the most likely tokens that together have this probability; 1: all
  uint64_t seed;    // of the random numbers, with the index
  uint64_t index;   // of the token among those of its request
  uint32_t top_k;   // the choice is among so many of the most likely tokens; 0: all
  uint32_t window;  // how many of the last tokens the penalties concern, at most `history`; 0: none
  uint32_t seen;    // tokens in `recent`: number i is at i % window
  float penalty;    // by which the logits of the last `repeats` of them are divided, those below 0 multiplied
  uint32_t repeats;
  uint32_t own;     // tokens from this number on are the completion's, which the next two concern
  float presence;   // what is taken off the logits of those
  float frequency;  // and off them as many times as they occur
  uint32_t likeliest;  // 0: log-probabilities are not asked for; else, and 1 more than the tokens whose they are: see gdn_logprobs.h
  float gap;           // by how much a logit may be below the greatest; infinity: by any
} gdn_sampling_row;

// Each row's token, in three steps; see sampling/README.md. Of equal logits the one of the lower id counts as more likely.
typedef struct gdn_sampling_params {
  void *logits;            // [rows, vocab] of `dtype`; those that a penalty concerns are overwritten
  uint32_t *ids;           // [rows]: the token before; written: the one chosen, 0 for none
  uint32_t *drawn;         // written: [rows], the token chosen, or GDN_NO_TOKEN
  gdn_sampling_row *state; // [rows]; written
  uint32_t *recent;        // [rows, history]: tokens before that of `ids`, which is appended
  float *kept;             // [rows, history]: means nothing before and after
  void *workspace;         // so many bytes as gdn_sampling_workspace says, aligned to 16: zeros, and zeros again afterwards
  int64_t workspace_bytes;
  int64_t logits_stride;   // elements from row to row
  int32_t rows;
  int32_t vocab;           // at most 2^19
  int32_t history;
  int32_t dtype;           // GDN_F32, GDN_BF16 or GDN_F16; all that is done with a logit is done in f32
} gdn_sampling_params;
int gdn_sampling(const gdn_sampling_params *params, cudaStream_t stream);

// What a launch of up to so many rows of the current device needs.
int gdn_sampling_workspace(int32_t rows, int64_t *bytes);

#ifdef __cplusplus
}
#endif

#endif  // CANDLE_GDN_SAMPLING_H
