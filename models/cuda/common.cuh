// Shared by kernels of several folders here.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

#include <type_traits>

namespace gdn {

// Two numbers of bf16 or f16 in a word, rounded to nearest by one instruction.
template <typename T> __device__ __forceinline__ uint32_t pack2(float a, float b) {
  uint32_t word;
  if constexpr (std::is_same_v<T, __half>) {
    const __half2 pair = __floats2half2_rn(a, b);
    word = *reinterpret_cast<const uint32_t *>(&pair);
  } else {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(a, b);
    word = *reinterpret_cast<const uint32_t *>(&pair);
  }
  return word;
}

// The line that holds `p` comes into L2. Of what no kernel writes.
__device__ __forceinline__ void prefetch_l2(const void *p) {
#if defined(__CUDA_ARCH__)
  asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
#endif
}

// A stage of a pipeline, and the parity of its barriers' phase.
template <int STAGES> struct Stage {
  int index = 0, parity = 0;
  __device__ __forceinline__ void next() {
    if (++index == STAGES) index = 0, parity ^= 1;
  }
};

}  // namespace gdn
