// The parameters of the kernels for one token, as few and as short as they can be.
//
// NOTES: with little work such a kernel lives for some 3 us, of which address arithmetic in 64 bits took a tenth before the
// first load. Offsets of 32 bits are enough; where they are not the launcher takes another kernel.
#pragma once

#include <stdint.h>

#include "../gdn.h"

namespace gdn {
namespace step {

// head / ratio without a division.
struct Ratio {
  uint32_t ratio, inverse;    // ceil(2^32 / ratio), exact for head * ratio < 2^32; not read for a ratio of 1

  __host__ __device__ __forceinline__ uint32_t of(uint32_t head) const {
#ifdef __CUDA_ARCH__
    return ratio == 1 ? head : __umulhi(head, inverse);
#else
    return head / ratio;
#endif
  }
};

// A tensor [sequence, head, dim] of one token a sequence; strides in elements.
struct Rows {
  const void *ptr;
  uint32_t seq, head;

  template <typename T> __device__ __forceinline__ const T *at(uint32_t n, uint32_t h, uint32_t i = 0) const {
    return static_cast<const T *>(ptr) + (n * seq + h * head + i);
  }
  template <typename T> __device__ __forceinline__ T *out(uint32_t n, uint32_t h, uint32_t i = 0) const {
    return const_cast<T *>(at<T>(n, h, i));
  }
};

// Slots by their numbers, or by the sequence's.
struct Pool {
  const uint32_t *slots;
  uint32_t count, stride;

  __device__ __forceinline__ uint32_t of(uint32_t n) const { return slots ? slots[n] : n; }
};

struct SmallParams {
  const void *state_in;
  void *state_out;
  Pool in, out;
  Rows q, k, v, a, b, o;
  const float *a_log, *dt_bias;
  void *token_states;
  Ratio ratio;
  uint32_t heads;    // value heads
  int32_t l2norm;
  float l2_eps, scale, beta_scale;
};

// And of the fused step, where q, k and v are columns of x.
struct SmallFused : SmallParams {
  Rows z;
  const void *conv_weight, *norm_weight;
  const void *conv_in;
  void *conv_out;
  uint32_t conv_in_stride, conv_out_stride;
  uint32_t channels, keys;    // of the convolution; of them q's, and k's
  int32_t conv_dtype, norm_dtype;
  int32_t sigmoid;
  int32_t overlap;
  float norm_eps;
};

}  // namespace step
}  // namespace gdn
