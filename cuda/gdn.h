// candle-gdn: the C ABI of the CUDA kernels.
//
// Every launcher takes one parameter struct and a stream, checks what can be checked on the host, launches, and
// returns a `gdn_status`. None of them allocates, synchronises or reads device memory from the host, so all of them
// may be captured into a CUDA graph. Strides count elements and are 64-bit; the innermost dimension of every tensor
// is contiguous. The build needs nothing but nvcc; README.md has the command.
//
// The rule (Yang et al., "Gated Delta Networks", arXiv 2412.06464), per value head h with key head h / (HV / HK):
//   q, k <- x * rsqrt(sum(x^2) + eps) when l2norm;   q <- q * scale
//   g = -exp(A_log) * softplus(a + dt_bias);         beta = beta_scale * sigmoid(b)
//   S <- exp(g) S;  d = beta (v - S k);  S <- S + d k^T;  o = S q
#ifndef CANDLE_GDN_H
#define CANDLE_GDN_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// As CUDA declares it, so that this header needs none of CUDA's.
typedef struct CUstream_st *cudaStream_t;

typedef enum gdn_dtype { GDN_F32 = 0, GDN_BF16 = 1, GDN_F16 = 2 } gdn_dtype;

// Zero is success. A CUDA error `e` at launch comes back as GDN_CUDA_ERROR + e.
typedef enum gdn_status {
  GDN_OK = 0,
  GDN_BAD_DTYPE = 1,        // a dtype field is not a gdn_dtype, or gates not a gdn_gates
  GDN_NULL_POINTER = 2,     // a required pointer is null
  GDN_BAD_HEADS = 3,        // num_k_heads does not divide num_v_heads, or one of them is not positive
  GDN_BAD_HEAD_DIM = 4,     // a head size outside 1..256
  GDN_BAD_LENGTH = 5,       // a negative count, or one past what the grid or an index can hold
  GDN_BAD_CONV_WIDTH = 6,   // a convolution width outside 2..8
  GDN_BAD_ALGO = 7,         // the requested kernel does not support this shape, alignment or device
  GDN_BAD_STRIDE = 8,       // a negative stride
  GDN_NO_PROFILE = 9,       // built without GDN_PROFILE
  GDN_PROFILE_BUFFER = 10,  // the profile buffer is misaligned, or has no room for the warps of the launch
  GDN_BAD_WORKSPACE = 11,   // the workspace is null, misaligned or smaller than the launcher's _workspace function says
  GDN_CUDA_ERROR = 1000
} gdn_status;

// The meaning of a status in English. Never null.
const char *gdn_status_string(int status);

// A tensor [sequence, token, head, dim] with a contiguous last dimension. Packed (varlen) tensors have seq_stride 0.
typedef struct gdn_heads {
  const void *ptr;
  int64_t seq_stride;
  int64_t token_stride;
  int64_t head_stride;
} gdn_heads;

// How tokens are grouped into sequences. With `cu_seqlens` (device, num_seqs + 1 values, the first 0, non-decreasing)
// sequence n owns the packed tokens cu_seqlens[n] .. cu_seqlens[n + 1]; without it every sequence has
// `tokens_per_seq` tokens. Sequences may be empty. `max_tokens_per_seq` is a host-known bound on the length of any one,
// `total_tokens` the rows that the packed tensors have, at least cu_seqlens[num_seqs]; both are read only with cu_seqlens,
// the second only by the chunk forms and the backward pass, which size their workspace by it and may load (and drop) any of those
// rows, and by gdn_attention, which sizes its grid by it (0: not known).
typedef struct gdn_sequences {
  const uint32_t *cu_seqlens;
  int32_t num_seqs;
  int32_t tokens_per_seq;
  int32_t max_tokens_per_seq;
  int32_t total_tokens;
} gdn_sequences;

// State rows per sequence. `slots` (device, num_seqs values) maps sequence n to a slot; null is the identity.
// A slot number >= num_slots (GDN_NO_SLOT by convention), in or out, is padding: that sequence reads and writes no
// state, and its output rows are zero. No two sequences of one launch may write one slot, and where state_in and
// state_out overlap none may write a slot that another one reads; several may read one.
#define GDN_NO_SLOT 0xffffffffu
typedef struct gdn_slots {
  const uint32_t *slots;
  int64_t num_slots;
  int64_t slot_stride;  // elements from one slot to the next
} gdn_slots;

// What gdn_rule, gdn_step, gdn_ring_step and gdn_ring_flush have in common: heads, gates, states and sequences.
typedef struct gdn_common {
  gdn_heads a, b;          // [.., num_v_heads], gate_dtype; head_stride counts from head to head
  const float *a_log;      // [num_v_heads]
  const void *dt_bias;     // [num_v_heads], f32; gdn_rule also supports 16 bits (dt_bias_dtype)
  const void *state_in;    // [slot, num_v_heads, head_v, head_k], state_dtype; may equal state_out
  void *state_out;         // written, same shape
  gdn_slots in_slots;      // how state_in is addressed
  gdn_slots out_slots;     // how state_out is addressed
  gdn_sequences seqs;
  int32_t num_k_heads, num_v_heads, head_k, head_v;
  int32_t io_dtype;        // gdn_dtype of q, k, v and the output
  int32_t gate_dtype;      // gdn_dtype of a, b
  int32_t state_dtype;     // GDN_F32 or GDN_BF16: how states are stored; all arithmetic is in f32. gdn_rule also supports GDN_F16
  int32_t l2norm;          // normalise q and k in the kernel
  float l2_eps;            // inside the root, added to the sum of squares; in the chunk forms 2^-100 at least
  float scale;             // multiplies q after the norm
  float beta_scale;        // 1, or 2 for models with negative eigenvalues
} gdn_common;

typedef enum gdn_algo {
  GDN_AUTO = 0,
  GDN_RECURRENT = 1,       // token by token, any head size
  GDN_RECURRENT_128 = 2,   // token by token, K = V = 128; rows of q, k and the state aligned to 4 elements
  GDN_DECODE = 3,          // made for decode: one token, K 64, 96, 128, 192 or 256 and V a multiple of 32, gates in f32 or in io_dtype;
                           // or up to 16 tokens (also with cu_seqlens), K = V = 128 or K 96 and V 192. Rows of q and k aligned to 8
                           // elements, of v to 4, of the state to 16 bytes
  GDN_CHUNKED_SM80 = 4,    // chunk form on tensor cores (mma.sync): bf16 or f16, K up to 128 and both head sizes multiples
                           // of 8; rows of q, k, v, o aligned to 16 bytes, of the state to 4 elements
  GDN_CHUNKED_SM90 = 5     // the same with the instructions of sm_90a (wgmma), which no other architecture has; no strides
                           // of zero over more than one element of q, k, v
} gdn_algo;

// Tokens a chunk of GDN_CHUNKED_SM80 and _SM90.
#define GDN_CHUNK 64

typedef enum gdn_gates {
  GDN_GATES_RAW = 0,       // a and b are the model's projections, unchanged
  GDN_GATES_READY = 1      // a is g, the log of the decay, and b is beta; a_log, dt_bias and beta_scale are not read
} gdn_gates;

// The gated delta rule over any number of tokens per sequence. Decode is tokens_per_seq = 1.
//
// GDN_RECURRENT and the chunk forms support these extras, and GDN_AUTO then chooses one of them:
//   ready gates                    for layers that compute their own gates, as Kimi's and the peers' functions do, and for training
//   state_in null                  for calls without an initial state
// GDN_RECURRENT alone supports these, and GDN_AUTO then chooses it:
//   state_out null                 for callers that need only the outputs
//   counts                         for engines that pad a batch: the device knows the lengths, the host does not
//   head_stride, f16 states, dt_bias in 16 bits    for the state pools and weights of other engines
typedef struct gdn_rule_params {
  gdn_common common;       // state_in null: zeros; state_out null: not written
  gdn_heads q, k;          // [.., num_k_heads, head_k], io_dtype
  gdn_heads v;             // [.., num_v_heads, head_v], io_dtype
  gdn_heads o;             // written: [.., num_v_heads, head_v], io_dtype
  void *workspace;         // gdn_rule_workspace() bytes of device memory, aligned to 256; may be null where that is 0.
  int64_t workspace_bytes; // Its contents mean nothing before and after
  int64_t head_stride;     // of state_in and state_out, elements from one head to the next; 0: head_v * head_k
  const uint32_t *counts;  // null, or [num_seqs]: sequence n has at most counts[n] tokens; later rows of o stay as they are
  int32_t dt_bias_dtype;   // gdn_dtype
  int32_t gates;           // gdn_gates
  int32_t algo;            // gdn_algo
  int32_t segments;        // context parallelism of the chunk forms: 0 chooses, 1 is none, n cuts a sequence of the longest
                           // length into n segments, of which all after the first run side by side
} gdn_rule_params;
int gdn_rule(const gdn_rule_params *params, cudaStream_t stream);
// Which kernel gdn_rule would launch for these parameters on the current device: a gdn_algo other than GDN_AUTO.
int gdn_rule_choice(const gdn_rule_params *params, int32_t *algo);
// How many bytes of workspace gdn_rule needs for these parameters on the current device. Nothing on the device is read, but with
// GDN_AUTO it holds for these pointers and strides alone: their alignment decides which kernel runs. A null pointer is aligned.
int gdn_rule_workspace(const gdn_rule_params *params, int64_t *bytes);

// Depthwise causal convolution over time, then SiLU: y[t, c] = silu(sum_j w[c, j] x[t - width + 1 + j, c]), where
// inputs before the sequence come from the state (the last width - 1 inputs, oldest first) and are replaced by the
// last width - 1 inputs of this call.
typedef struct gdn_conv_params {
  gdn_heads x;             // [sequence, token, channels]; head_stride is not read
  gdn_heads y;             // written, same shape; must not overlap x
  const void *weight;      // [channels, width]
  const void *state_in;    // [slot, width - 1, channels], io_dtype; may equal state_out
  void *state_out;
  gdn_slots in_slots, out_slots;
  gdn_sequences seqs;
  int32_t channels, width;
  int32_t io_dtype, weight_dtype;
  int32_t silu;            // apply SiLU
} gdn_conv_params;
int gdn_conv(const gdn_conv_params *params, cudaStream_t stream);

// out = x * rsqrt(mean(x^2) + eps) * weight * act(z) per head of size head_v, act = silu or sigmoid.
typedef struct gdn_norm_params {
  gdn_heads x, z, out;     // [1, token, head, head_v], io_dtype; seq_stride is not read; out may be x or z itself
  const void *weight;      // [head_v]
  int64_t tokens;
  int32_t heads, head_v;
  int32_t io_dtype, weight_dtype;
  int32_t sigmoid;         // act is sigmoid instead of silu
  float eps;
} gdn_norm_params;
int gdn_norm(const gdn_norm_params *params, cudaStream_t stream);

// The backward pass. Gradients are of a loss L: d_x has the shape of x and holds dL/dx. Sums over tokens go through a fixed tree, so that
// equal inputs give equal bits on equal devices. Slots are not supported: sequence n has state n. The workspaces are aligned to 256
// bytes, and their contents mean nothing before and after. Their sizes follow from the sizes of the call and from the device, and hold
// for its pointers and strides alone: the alignment of these decides which kernel runs.

// The gates of the rule by themselves: g = -exp(a_log) softplus(a + dt_bias) and beta = beta_scale sigmoid(b).
typedef struct gdn_ready_gates_params {
  gdn_heads a, b;          // [sequence, token, head], gate_dtype; head_stride counts from head to head
  gdn_heads log_decay, beta;    // the same shape, f32: written by gdn_ready_gates, not read by gdn_ready_gates_backward
  const float *a_log, *dt_bias; // [heads]
  int64_t num_seqs, tokens_per_seq;    // packed tokens are one sequence
  int32_t heads;
  int32_t gate_dtype;
  float beta_scale;
} gdn_ready_gates_params;
int gdn_ready_gates(const gdn_ready_gates_params *params, cudaStream_t stream);

typedef struct gdn_ready_gates_backward_params {
  gdn_ready_gates_params gates;
  gdn_heads d_log_decay, d_beta;    // f32
  gdn_heads d_a, d_b;      // written, gate_dtype
  float *d_a_log, *d_dt_bias;       // written: [heads]
  void *workspace;
  int64_t workspace_bytes;
} gdn_ready_gates_backward_params;
int gdn_ready_gates_backward(const gdn_ready_gates_backward_params *params, cudaStream_t stream);
int gdn_ready_gates_backward_workspace(const gdn_ready_gates_backward_params *params, int64_t *bytes);

// Gradients of gdn_rule with ready gates.
typedef struct gdn_rule_backward_params {
  gdn_common common;       // a: the log decay, b: beta, both f32; state_in: f32, contiguous, or null for zeros. Not read: a_log,
                           // dt_bias, state_out, slots, beta_scale
  gdn_heads q, k, v;       // as in gdn_rule_params
  gdn_heads d_o;           // [.., num_v_heads, head_v], io_dtype
  const float *d_state_out;    // [sequence, num_v_heads, head_v, head_k], contiguous: of the final state; null for zeros
  gdn_heads d_q, d_k, d_v; // written, io_dtype
  gdn_heads d_log_decay, d_beta;    // written, f32: [.., num_v_heads]
  float *d_state_in;       // written, as d_state_out; null: not written. Not aligned to 16 bytes: GDN_RECURRENT
  void *workspace;
  int64_t workspace_bytes;
  int32_t segments;        // context parallelism of the chunk forms: 0 chooses, 1 is none, n cuts every sequence into n segments, at
                           // most 64, that run side by side. Each leaves out at most 2^-24 of the state before it. A choice depends on
                           // all sequences of the call and on the device, and so do bits
  int32_t recompute;       // states of fewer chunks at a time: less workspace, more time; without segments
  int32_t algo;            // GDN_AUTO, GDN_RECURRENT, GDN_CHUNKED_SM80 or GDN_CHUNKED_SM90, supported sizes as in the forward pass
} gdn_rule_backward_params;
int gdn_rule_backward(const gdn_rule_backward_params *params, cudaStream_t stream);
int gdn_rule_backward_choice(const gdn_rule_backward_params *params, int32_t *algo);
int gdn_rule_backward_workspace(const gdn_rule_backward_params *params, int64_t *bytes);

// Gradients of gdn_conv.
typedef struct gdn_conv_backward_params {
  gdn_heads x, d_y;        // [sequence, token, channels], io_dtype; head_stride is not read
  gdn_heads d_x;           // written, io_dtype
  const void *weight;      // [channels, width], weight_dtype
  const void *state_in;    // [sequence, width - 1, channels], io_dtype, contiguous; null for zeros
  float *d_weight;         // written: [channels, width]
  void *d_state_in;        // written, as state_in; null: not written
  gdn_sequences seqs;
  void *workspace;
  int64_t workspace_bytes;
  int32_t channels, width;
  int32_t io_dtype, weight_dtype;
  int32_t silu;
} gdn_conv_backward_params;
int gdn_conv_backward(const gdn_conv_backward_params *params, cudaStream_t stream);
int gdn_conv_backward_workspace(const gdn_conv_backward_params *params, int64_t *bytes);

// Gradients of gdn_norm.
typedef struct gdn_norm_backward_params {
  gdn_heads x, z, d_out;   // [1, token, head, head_v], io_dtype; seq_stride is not read
  gdn_heads d_x, d_z;      // written, io_dtype; d_x may be d_out, d_z may be z
  const void *weight;      // [head_v], weight_dtype
  float *d_weight;         // written: [head_v]
  void *workspace;
  int64_t workspace_bytes;
  int64_t tokens;
  int32_t heads, head_v;
  int32_t io_dtype, weight_dtype;
  int32_t sigmoid;
  float eps;
} gdn_norm_backward_params;
int gdn_norm_backward(const gdn_norm_backward_params *params, cudaStream_t stream);
int gdn_norm_backward_workspace(const gdn_norm_backward_params *params, int64_t *bytes);

// What gdn_step and gdn_ring_step have in common: the inputs of a layer between its two projections.
typedef struct gdn_layer {
  gdn_heads x;             // [sequence, token, channels], io_dtype: q | k | v by head; head_stride is not read
  gdn_heads z;             // [.., num_v_heads, head_v], io_dtype
  gdn_heads out;           // written: [.., num_v_heads, head_v], io_dtype
  const void *conv_weight; // [channels, conv_width], conv_dtype
  const void *norm_weight; // [head_v], norm_dtype
  int32_t conv_width, conv_dtype, norm_dtype;
  int32_t sigmoid;         // the gate of the norm is sigmoid(z) instead of silu(z)
  float norm_eps;
  int32_t overlap;         // GDN_OVERLAP
} gdn_layer;

// One decode step of a layer between its two projections, in one launch: the convolution and its state, SiLU, the L2
// norms, the gates, the rule and its state, and the gated norm: gdn_conv, gdn_rule and gdn_norm in one kernel, without
// rounding in between. 1 to 16 tokens a sequence, K = V = 128 or K 96 and V 192, a convolution of width 4, rows aligned to 4 elements,
// states and conv_weight to 16 bytes (GDN_BAD_ALGO otherwise: gdn_step_choice tells beforehand).
typedef enum gdn_step_algo {
  GDN_STEP_AUTO = 0,
  GDN_STEP_WHOLE = 1,      // a block a (sequence, key head)
  GDN_STEP_SPLIT = 2,      // a cluster of blocks a (sequence, key head), several a value head: one token a sequence
  GDN_STEP_HEADS = 3       // the same, a block a value head. Both need code for sm_90 or later, and at most 8 blocks
} gdn_step_algo;

typedef struct gdn_step_params {
  gdn_common common;
  gdn_layer layer;
  const void *conv_in;     // [slot, conv_width - 1, channels], io_dtype; slots as state_in's; may equal conv_out
  void *conv_out;          // written, slots as state_out's
  int64_t conv_in_stride, conv_out_stride;    // elements from one slot of a convolution state to the next
  int32_t algo;            // gdn_step_algo
} gdn_step_params;
int gdn_step(const gdn_step_params *params, cudaStream_t stream);
// Which variant gdn_step would launch on the current device: a gdn_step_algo, or GDN_STEP_AUTO where none supports it.
int gdn_step_choice(const gdn_step_params *params, int32_t *algo);

// The rule over the pair (state, ring), for decode and for the verification of drafted tokens: a launch reads the state S0,
// and writes it only where the ring is full. The ring holds the tokens since S0, of each its key k_j, its update e_j and its
// log decay g_j:  S = exp(g_1 + .. + g_P) S0 + sum_j exp(g_(j + 1) + .. + g_P) e_j k_j^T. A step appends the tokens of a
// sequence to its ring. It first flushes the ring into the state where both together exceed `max_entries`, or where in and
// out slot differ. The device decides it, sequence by sequence.
//
// The head and the length of a ring are in `spans`, which no step writes: the layers of a model share them, and
// gdn_ring_advance moves them after all layers are done. Rejected drafts are taken back by advancing by fewer tokens. A span of
// 0 is an empty ring: the state alone holds everything.
#define GDN_RING_ENTRIES 16
#define GDN_RING_CAPACITY 32
typedef struct gdn_ring {
  void *keys;              // [slot, num_k_heads, capacity, head_k], io_dtype: raw keys, before the norm
  float *updates;          // [slot, num_v_heads, capacity, head_v]: e_j, which contains the key's norm
  float *decays;           // [slot, num_v_heads, capacity]: g_j
  const uint32_t *spans;   // [slot]: head << 16 | length; entry j is row (head + j) % capacity
  int64_t keys_stride, updates_stride, decays_stride;    // elements from one slot to the next
  int32_t capacity;        // rows, at most GDN_RING_CAPACITY and at least max_entries + tokens, so that a step never
                           // overwrites a row that another block still reads
  int32_t max_entries;     // length at most, 1 to GDN_RING_ENTRIES
} gdn_ring;

// One decode step of a layer over (state, ring), or the verification of drafted tokens: the convolution, SiLU, the rule and the
// gated norm. The convolution's output is rounded to io_dtype, as by gdn_conv. Its window is a ring too: the input of a token
// is in the row of the token's entry, and the last three inputs before an empty ring are in the rows before its head.
//
// K = V = 128 or K 96 and V 192, up to GDN_RING_STEP_TOKENS tokens, max_entries of 3 or more. The state is updated in place
// (state_in equals state_out). Strides are below 2^32; rows of x and z, states, keys and updates are aligned to 16 bytes. With
// cu_seqlens a sequence has at most max_tokens_per_seq tokens.
#define GDN_RING_STEP_TOKENS 16
typedef enum gdn_ring_algo {
  GDN_RING_AUTO = 0,
  GDN_RING_FMA = 1,        // one token a sequence, without cu_seqlens; conv_weight aligned to 16 bytes, rows of `inputs` to 4
                           // elements
  GDN_RING_MMA = 2         // any number of tokens, products on tensor cores
} gdn_ring_algo;

typedef struct gdn_ring_step_params {
  gdn_common common;
  gdn_layer layer;         // with overlap the kernel before this one must not write spans, rings or `inputs` either
  gdn_ring ring;           // read at the slots of in_slots, appended to at those of out_slots
  void *inputs;            // [slot, capacity, channels], io_dtype: read and appended to as the ring
  int64_t inputs_stride;   // elements from one slot to the next
  int32_t algo;            // gdn_ring_algo
} gdn_ring_step_params;
int gdn_ring_step(const gdn_ring_step_params *params, cudaStream_t stream);

// Flushes rings into states: state_out = the state of (state_in, ring). An empty ring copies the state if it moves. Writes no
// span (gdn_ring_advance with `flushed` does). Head sizes, alignments and strides as for gdn_ring_step; gates, tokens, l2norm
// and scales are not read.
typedef struct gdn_ring_flush_params {
  gdn_common common;       // state_out may be another pool
  gdn_ring ring;           // read at the slots of in_slots
} gdn_ring_flush_params;
int gdn_ring_flush(const gdn_ring_flush_params *params, cudaStream_t stream);

// Moves the spans after the launches of a step, from the slots that the step read to those that it wrote. Fields have the
// step's values; `accepted` (null: all) is how many of each sequence's tokens stay.
typedef struct gdn_ring_advance_params {
  uint32_t *spans;
  const uint32_t *accepted;
  gdn_slots in_slots, out_slots;    // slot_stride is not read
  gdn_sequences seqs;
  int32_t capacity, max_entries;
  int32_t flushed;         // the rings have been flushed (gdn_ring_flush): they are empty before the tokens
} gdn_ring_advance_params;
int gdn_ring_advance(const gdn_ring_advance_params *params, cudaStream_t stream);

// Copies the convolution's window between a ring and the plain state of gdn_conv: the last inputs before the next entry, out
// of the rings of in_slots (`to_ring` 0), or into those of out_slots, whatever their length. The position comes from the spans
// of in_slots in both directions. A window that is copied out, run through gdn_conv and copied back lands at the same position.
// For prefill over a ring, snapshots and restores. Padding is not copied.
typedef struct gdn_ring_inputs_params {
  void *inputs;            // as in gdn_ring_step_params
  void *conv_state;        // [out slot, conv_width - 1, channels], io_dtype, oldest first; rows and channels contiguous
  const uint32_t *spans;
  gdn_slots in_slots, out_slots;    // out_slots' slot_stride is conv_state's; the other is not read
  int64_t inputs_stride;   // elements from one slot to the next
  int32_t num_seqs, channels, conv_width;
  int32_t capacity;        // rows, more than conv_width
  int32_t io_dtype;
  int32_t to_ring;
} gdn_ring_inputs_params;
int gdn_ring_inputs(const gdn_ring_inputs_params *params, cudaStream_t stream);

// y = x w^T for few rows of x, as in decode, where reading w is all the work.
typedef struct gdn_linear_params {
  const void *x;           // [rows, inputs], dtype
  const void *w;           // [outputs, inputs], dtype, rows contiguous; inputs a multiple of 64, each row aligned to 16 bytes
  void *y;                 // written: [rows, outputs], dtype
  int64_t x_stride, w_stride, y_stride;    // elements from row to row
  int32_t rows;            // 1 to GDN_LINEAR_ROWS
  int32_t inputs, outputs;
  int32_t dtype;           // GDN_BF16 or GDN_F16; sums are f32
  int32_t overlap;         // GDN_OVERLAP, or with it GDN_OVERLAP_NEXT
} gdn_linear_params;
#define GDN_LINEAR_ROWS 32
int gdn_linear(const gdn_linear_params *params, cudaStream_t stream);

// How a product is divided, for measurements. 0 chooses, and what the device does not support is refused (GDN_BAD_ALGO).
typedef struct gdn_linear_options {
  int32_t warps;           // of a block along the inputs, 1 to 16; 0: the others are not read
  int32_t groups;          // of 16 outputs in a block: 1, 2 or 4
  int32_t cluster;         // blocks that share the inputs of a tile: 1, or 2, 4 or 8 on sm_90
  int32_t blocks;          // of a multiprocessor in the grid
} gdn_linear_options;
int gdn_linear_with(const gdn_linear_params *params, const gdn_linear_options *options, cudaStream_t stream);

// On sm_90 and later a launch may begin while the kernel before it on the stream is still running (programmatic
// dependent launch). With `overlap` non-zero the launch does so, and reads what no kernel writes (the weights), and for
// gdn_step the old states, slot numbers and cu_seqlens too, before it waits for the kernel before it: that kernel must
// therefore not write them. In a layer it is the projection. All else happens after the wait, so that the result is the
// same.
#define GDN_OVERLAP 1
// Beside it, of gdn_linear: a launch after this one that overlaps may begin before this one has waited. Then the kernel before this
// one must not write what that launch reads before its wait either.
#define GDN_OVERLAP_NEXT 2

// Profiling inside the kernels of gdn_step and gdn_rule, in a build with -DGDN_PROFILE. A
// warp of a launch owns a gdn_profile_warp and, right after it, `events_per_warp` gdn_profile_events, of which the first
// `count` are written. Warps follow each other
// in the buffer, and launches in their order. Cycles are of the warp's multiprocessor, which has its own count;
// nanoseconds are of the device's global timer, whose steps may be as coarse as a microsecond.
typedef struct gdn_profile_warp {
  uint32_t launch;         // 1, 2, ... since gdn_profile_set; 0 where no warp has written
  uint32_t role;           // see gdn_profile_role
  uint32_t sm;             // the multiprocessor it ran on
  uint32_t block, warp;    // in the grid, in the block
  uint32_t count;          // events written
  uint32_t dropped;        // events that found no room
  uint32_t reserved;
  uint64_t begin_ns, begin_cycles;
  uint64_t end_cycles, end_ns;    // 0 until the warp ends; count and dropped too
} gdn_profile_warp;

typedef struct gdn_profile_event {
  uint32_t scope;          // see gdn_profile_scope
  uint32_t token;          // first token of the stage or chunk it belongs to, in its sequence
  uint32_t begin;          // low half of the cycle count
  uint32_t cycles;
} gdn_profile_event;

// Of kernels without registers to spare an event begins where the one before it ended, the first with the warp. Then `scope` has
// this bit set beside the scope in its low eight bits, `token` is the low half of the cycle count at the end, and the rest is
// unwritten. With the second bit set, bits 8 to 29 of `scope` are the chunk (GDN_CHUNK tokens) of the warp's stretch from this
// event on.
#define GDN_PROFILE_LEAN 0x80000000u
#define GDN_PROFILE_CHUNK 0x40000000u

// From now on launches of the calling thread on the current device write into `buffer` (device memory, zeroed, aligned
// to 16 bytes, `bytes` long) until the next call; null ends it. The caller keeps the buffer alive and reads it when
// the launches are done. A launch with more warps than the buffer has room left for is refused with GDN_PROFILE_BUFFER.
// Not for graphs: a replay would write where its capture did. GDN_NO_PROFILE in any other build.
int gdn_profile_set(void *buffer, uint64_t bytes, uint32_t events_per_warp);

// The names of scopes and roles, numbered from 0; null past the last one. In every build.
const char *gdn_profile_scope(uint32_t scope);
const char *gdn_profile_role(uint32_t role);

#ifdef __cplusplus
}
#endif
#endif
