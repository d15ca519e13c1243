// Two numbers of bf16 or f16 in a word.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

#include <type_traits>

namespace gdn {

// Rounded to nearest, by one instruction.
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

}  // namespace gdn
