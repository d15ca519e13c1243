// candle-gdn: softmax attention over a cache of keys and values, for the layers that stand between those of the rule.
// The rules of gdn.h hold here too: one parameter struct and a stream, nothing allocated, nothing awaited, strides in
// elements, statuses of gdn_status. No host value says how long a sequence is: one captured graph serves all lengths.
//
// A sequence n that has positions[n] tokens in the cache gets T new ones (gdn_sequences), token t at position
// positions[n] + t. Per query head h with key head h / (H / HKV):
//   q, k <- rotate(x * rsqrt(mean(x^2) + eps) * weight, position)          gdn_attention_prepare, which appends k and v
//   o = sigmoid(gate) * softmax(scale q k^T, keys up to the token's own) v  gdn_attention
// Both take the same positions, in every layer; gdn_advance adds T to them after the last one.
#ifndef CANDLE_GDN_ATTENTION_H
#define CANDLE_GDN_ATTENTION_H

#include "gdn.h"

#ifdef __cplusplus
extern "C" {
#endif

// Keys and values of one layer, [slot, kv_head, position, head_dim] each, laid out alike. A slot number >= num_slots is
// padding: its sequence reads and writes no cache, and its output rows are zero. Two sequences must not share a slot.
// Without a window nothing at or past `capacity` is read or written: a token there is not appended, and attends to what there is.
//
// With a window the token at position t attends to positions t - window + 1 to t, and position p lies at p % capacity. A call's
// tokens are in the cache before the first of them is read: where positions reach `capacity` it must be at least window + T - 1, or
// the first of T tokens attend to fewer. T is at most `capacity` (GDN_BAD_LENGTH), and v must be finite everywhere from the start.
typedef struct gdn_kv_cache {
  void *k, *v;             // io_dtype; aligned to 16 bytes
  gdn_slots slots;
  int64_t head_stride;     // elements from a kv head to the next; a multiple of 16 bytes, as is slot_stride
  int64_t token_stride;    // elements from a position to the next; likewise
  int32_t capacity;        // positions a slot has room for
  int32_t window;          // tokens that a token attends to, itself included; 0: all
} gdn_kv_cache;

// Norm and rotary position of the new queries and keys; keys and values go to the cache, queries to q_out. Any number of
// tokens a sequence. Arithmetic is f32, of the angles f64.
//
// A value row with an infinity or NaN is appended as zeros, and its key row as NaN: gdn_attention multiplies the rows of
// a tile with the weights of all its queries, of which those that do not see the token are zero.
typedef struct gdn_attention_prepare_params {
  gdn_heads q;             // [.., num_heads, head_dim], io_dtype; any strides: columns of one projection, between gates
  gdn_heads k, v;          // [.., num_kv_heads, head_dim], io_dtype
  gdn_heads q_out;         // written: [.., num_heads, head_dim], io_dtype; may be q itself
  const float *q_weight;   // [head_dim]; null, with k_weight: queries and keys come normed
  const float *k_weight;   // [head_dim]
  const float *inv_freq;   // [rotary_dim / 2]: radians a position of the pair of values i and i + rotary_dim / 2
  const float *inv_freq_low;    // null, or [rotary_dim / 2]: what inv_freq lost when it was rounded to f32. At position
                           // 200,000 an angle would otherwise be off by 6e-3
  const uint32_t *positions;    // [num_seqs], device: tokens that are in the cache
  gdn_kv_cache cache;
  gdn_sequences seqs;
  int32_t num_heads, num_kv_heads, head_dim;
  int32_t rotary_dim;      // even, at most head_dim; 0 rotates nothing
  int32_t io_dtype;        // gdn_dtype of q, k, v, q_out and the cache
  int32_t zero_centred;    // multiply by 1 + weight instead of weight
  int32_t overlap;         // GDN_OVERLAP; nothing is read before the wait
  float eps;
} gdn_attention_prepare_params;
int gdn_attention_prepare(const gdn_attention_prepare_params *params, cudaStream_t stream);

// Attention of the new tokens, which are in the cache already: a kernel for few of them, and one for prompts (sm_90a, bf16 and
// f16, rows of o and gate aligned to 16 bytes), chosen here. head_dim is a multiple of 8; rows of q aligned to 16 bytes, of o and gate to two elements (GDN_BAD_ALGO
// otherwise).
typedef struct gdn_attention_params {
  gdn_heads q;             // [.., num_heads, head_dim], io_dtype
  gdn_heads gate;          // the same; a null ptr is no gate
  gdn_heads o;             // written, the same; must not overlap q or gate
  const uint32_t *positions;    // [num_seqs], device: tokens that were in the cache before the new ones
  gdn_kv_cache cache;      // read
  void *workspace;         // gdn_attention_workspace() bytes of device memory, aligned to 256; may be null where that is
  int64_t workspace_bytes; // 0. Its contents mean nothing before and after
  gdn_sequences seqs;
  int32_t num_heads, num_kv_heads, head_dim;
  int32_t io_dtype;        // GDN_BF16 and GDN_F16: products on tensor cores, sums in f32; GDN_F32: all in f32
  int32_t max_len;         // no sequence is longer than this, its new tokens included; 0: capacity. For the plan alone:
                           // a longer one is right, and slower
  int32_t splits;          // 0 chooses, between the kernels too; n: the one for few tokens, where n blocks share the keys of a
                           // sequence and kv head
  int32_t overlap;         // GDN_OVERLAP; read before the wait: slot numbers, positions, cu_seqlens, and keys and values
                           // before positions[n] that a new token sees, which gdn_attention_prepare leaves alone
  float scale;             // of the scores; head_dim^-0.5 as a rule
} gdn_attention_params;
int gdn_attention(const gdn_attention_params *params, cudaStream_t stream);
// How many bytes of workspace gdn_attention needs for these parameters on the current device. Nothing on the device is read, but it
// holds for these pointers alone: the kernel for prompts needs none, and the alignment of o and gate decides whether it runs.
int gdn_attention_workspace(const gdn_attention_params *params, int64_t *bytes);

// positions[n] += the new tokens of sequence n, but for padding: once a forward pass, after its last layer.
typedef struct gdn_advance_params {
  uint32_t *positions;     // [num_seqs], device
  gdn_slots slots;         // slot_stride is not read
  gdn_sequences seqs;
  int32_t overlap;         // GDN_OVERLAP; nothing is read before the wait
} gdn_advance_params;
int gdn_advance(const gdn_advance_params *params, cudaStream_t stream);

#ifdef __cplusplus
}
#endif

#endif  // CANDLE_GDN_ATTENTION_H
