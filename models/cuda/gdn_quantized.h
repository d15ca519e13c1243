// candle-gdn: products with matrices in ggml's block types, repacked for them. The rules of gdn.h hold here too: one parameter struct and a stream, nothing allocated, nothing awaited, strides in
// elements, statuses of gdn_status; a launch can be captured.
#ifndef CANDLE_GDN_QUANTIZED_H
#define CANDLE_GDN_QUANTIZED_H

#include "gdn.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum gdn_quantized_type { GDN_Q8_0 = 0, GDN_Q4_K = 1, GDN_Q6_K = 2 } gdn_quantized_type;

// Packs a matrix of ggml's blocks. As many bytes as they have, but for outputs that are no multiple of 16: the last rows are filled up.
typedef struct gdn_quantized_pack_params {
  const void *from;        // [outputs, inputs] in ggml's blocks, aligned to 2 bytes
  void *to;                // written: gdn_quantized_size() bytes, aligned to 128; not `from`
  int32_t type;            // gdn_quantized_type
  int32_t outputs, inputs; // inputs: a multiple of 128 in Q8_0, of 256 in the others (GDN_BAD_ALGO otherwise)
  int32_t paired;          // 0, or: `from` is matrices of 2 `paired` rows, those of a gate and then as many of up, and 8 rows of each alternate in `to`.
                           // A multiple of 8, and outputs of twice it (GDN_BAD_ALGO otherwise)
} gdn_quantized_pack_params;
int gdn_quantized_pack(const gdn_quantized_pack_params *params, cudaStream_t stream);
// Bytes of such a matrix when it is packed.
int gdn_quantized_size(const gdn_quantized_pack_params *params, int64_t *bytes);

// Packed rows.
typedef struct gdn_quantized_part {
  const void *w;           // aligned to 128
  int32_t type;            // gdn_quantized_type
  int32_t outputs;
} gdn_quantized_part;

#define GDN_QUANTIZED_PARTS 4    // at most

// y = x w^T, the outputs of all parts side by side. x is taken in 16 bits of fixed point, with a scale for each 32 inputs: within about 2^-16 of the largest of
// the 32. All else is exact but for sums in f32. A NaN or an infinity in a row of x makes all of its y NaN; numbers of x below 1e-30 count as 0.
typedef struct gdn_quantized_params {
  const void *x;           // [rows, inputs], dtype, aligned to 16 bytes
  const gdn_quantized_part *parts;    // on the host: num_parts of them
  void *y;                 // written: [rows, outputs of all parts], dtype; must not overlap x
  int64_t x_stride, y_stride;    // elements from row to row; x_stride of 16 bytes
  int32_t rows;            // any; the weights are read once for 8 of them, or once for 4, 2 or 1 where inputs are many
  int32_t num_parts;
  int32_t inputs;          // up to 18,432 with a part of Q6_K, 26,624 without, on every card; more where a block has more shared memory
  int32_t swiglu;          // one part, whose rows are those of a gate, then as many of up: y = silu(gate) * up, outputs / 2 wide,
                           // which is a multiple of 16
  int32_t groups, per_group;     // 0, or: the inputs of x are `groups` times `per_group` pieces, those of the parts the same pieces in the order `per_group`
                           // times `groups`; of a multiple of 8 inputs
  int32_t dtype;           // gdn_dtype
  int32_t overlap;         // GDN_OVERLAP; the weights are read before the wait
} gdn_quantized_params;
int gdn_quantized(const gdn_quantized_params *params, cudaStream_t stream);

// The same for many rows, of bf16 or f16 (GDN_BAD_DTYPE otherwise), without groups (GDN_BAD_ALGO): each number of w is rounded to dtype, and multiplied by
// x as it is. Before that a number of Q4_K is up to 2^-23 of 128 scales and its minimum off; the others are exact. The weights are read once for
// 128 rows, or for fewer where a block has little shared memory.
int gdn_quantized_many(const gdn_quantized_params *params, cudaStream_t stream);

// The numbers of packed rows, each rounded to f32 and then to dtype.
typedef struct gdn_quantized_rows_params {
  const void *w;
  const uint32_t *ids;     // [rows]: which rows; one past the last is taken as zeros. null: the first `rows`
  void *y;                 // written: [rows, inputs], dtype, aligned to 16 bytes
  int64_t y_stride;        // of 16 bytes
  int32_t type;            // gdn_quantized_type
  int32_t outputs, inputs, rows;
  int32_t paired;          // as they were packed. Not 0: y's rows are in the order that they had before; all of them, without ids (GDN_BAD_ALGO
                           // otherwise)
  int32_t dtype;           // gdn_dtype
} gdn_quantized_rows_params;
int gdn_quantized_rows(const gdn_quantized_rows_params *params, cudaStream_t stream);

#ifdef __cplusplus
}
#endif

#endif  // CANDLE_GDN_QUANTIZED_H
