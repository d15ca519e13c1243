// candle-gdn: products of few rows with weights in e4m3, and such that end in SwiGLU. The rules of gdn.h hold here too: one parameter struct and a stream, nothing allocated, nothing awaited,
// strides in elements, statuses of gdn_status; a launch can be captured.
#ifndef CANDLE_GDN_SCALED_H
#define CANDLE_GDN_SCALED_H

#include "gdn.h"

#ifdef __cplusplus
extern "C" {
#endif

// Of a matrix [n, k] in e4m3, a byte a number: the number (i, j) is its byte's times ptr[i / rows * stride + j / GDN_SCALE_COLUMNS].
// What a byte of NaN stands for is left open.
#define GDN_SCALE_COLUMNS 128
typedef struct gdn_scales {
  const float *ptr;        // null: the matrix is not in e4m3
  int64_t stride;          // elements
  int32_t rows;            // a power of two
} gdn_scales;

// y = x w^T for few rows of x, where reading w is all the work. With `swiglu` w is [2 * outputs, inputs], the gate's rows and then up's, and
// y = silu(x gate^T) * (x up^T), unrounded up to the store. A product without scales and SwiGLU is gdn_linear's.
typedef struct gdn_scaled_params {
  const void *x;           // [rows, inputs], dtype
  const void *w;           // [outputs, inputs], with scales e4m3, else dtype, rows contiguous; inputs a multiple of 64, each row aligned to
                           // 16 bytes
  const void *below;       // more rows of w, [outputs_below, inputs], dtype; beside scales only, and not with swiglu
  void *y;                 // written: [rows, outputs + outputs_below], dtype
  gdn_scales scales;       // of w; GDN_BAD_ALGO without them and without swiglu
  int64_t x_stride, w_stride, below_stride, y_stride;    // elements from row to row
  int32_t rows;            // 1 to GDN_SCALED_ROWS, with swiglu to GDN_SWIGLU_ROWS
  int32_t inputs, outputs, outputs_below;
  int32_t swiglu;
  int32_t dtype;           // GDN_BF16 or GDN_F16; sums are f32
  int32_t overlap;         // GDN_OVERLAP
} gdn_scaled_params;
#define GDN_SCALED_ROWS 64
// What every device takes at once. More are one launch on sm_90a where x fits into the shared memory of a cluster, else two, or refused
// (GDN_BAD_ALGO) where that is more than twice as many rows.
#define GDN_SCALED_FEW_ROWS 16
#define GDN_SWIGLU_ROWS 8
// `options`: null, or how to divide the product, for measurements. With swiglu groups are always 2, one of them up's. For more than
// GDN_SCALED_FEW_ROWS rows warps and groups are warpgroups, two in all.
int gdn_scaled(const gdn_scaled_params *params, const gdn_linear_options *options, cudaStream_t stream);

// y = the numbers of a matrix in e4m3, each rounded once: for products of many rows.
typedef struct gdn_dequantize_params {
  const void *w;           // [outputs, inputs], e4m3; inputs a multiple of 16, w and y and their rows aligned to 16 bytes
  gdn_scales scales;
  void *y;                 // written: [outputs, inputs], dtype
  int64_t w_stride, y_stride;    // elements from row to row
  int32_t outputs, inputs;
  int32_t dtype;           // GDN_BF16 or GDN_F16
} gdn_dequantize_params;
int gdn_dequantize(const gdn_dequantize_params *params, cudaStream_t stream);

#ifdef __cplusplus
}
#endif

#endif  // CANDLE_GDN_SCALED_H
