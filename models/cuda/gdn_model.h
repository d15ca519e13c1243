// candle-gdn: what stands between the mixers of a model: residual and norm, SwiGLU. The rules of gdn.h hold here too: one parameter struct and a stream, nothing allocated, nothing awaited, strides in
// elements, statuses of gdn_status.
#ifndef CANDLE_GDN_MODEL_H
#define CANDLE_GDN_MODEL_H

#include "gdn.h"

#ifdef __cplusplus
extern "C" {
#endif

// A residual and the norm after it:
//   sum = x + h;   y = sum * rsqrt(mean(sum^2) + eps) * weight
// The norm is of the sum as it was rounded and stored. Without h it is the norm alone.
//
// A later launch that overlaps may begin while the kernel before this one still runs. Neither of the two may write what that launch
// reads before its wait. In a model it is a projection or the experts, which read weights.
typedef struct gdn_residual_params {
  const void *x;           // [rows, dim], dtype
  const void *h;           // the same; null: nothing is added, and `sum` is not written
  void *sum;               // written: [rows, dim], dtype; may be x or h
  void *y;                 // written: [rows, dim], dtype; may be x or h, not sum
  const float *weight;     // [dim]; 1 + w where the model's weight w is zero-centred
  int64_t x_stride, h_stride, sum_stride, y_stride;    // elements from row to row
  int64_t rows;
  int32_t dim;
  int32_t dtype;           // gdn_dtype; arithmetic is f32
  int32_t overlap;         // GDN_OVERLAP; the weight is read before the wait
  float eps;
} gdn_residual_params;
int gdn_residual(const gdn_residual_params *params, cudaStream_t stream);

// out = gate * sigmoid(gate) * up
typedef struct gdn_swiglu_params {
  const void *gate, *up;   // [rows, columns], dtype; as a rule halves of one projection's rows
  void *out;               // written: [rows, columns], dtype; may be gate or up
  int64_t gate_stride, up_stride, out_stride;    // elements from row to row
  int64_t rows;
  int32_t columns;
  int32_t dtype;           // gdn_dtype; arithmetic is f32
  int32_t overlap;         // GDN_OVERLAP; nothing is read before the wait
} gdn_swiglu_params;
int gdn_swiglu(const gdn_swiglu_params *params, cudaStream_t stream);

#ifdef __cplusplus
}
#endif

#endif  // CANDLE_GDN_MODEL_H
