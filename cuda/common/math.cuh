// Warp reductions and the gates.
#pragma once

#include <cuda_runtime.h>

namespace gdn {

// Sum over aligned groups of LANES lanes; every lane of a group gets the same bits.
template <int LANES = 32> __device__ __forceinline__ float group_sum(float x) {
#pragma unroll
  for (int d = LANES / 2; d > 0; d /= 2) x += __shfl_xor_sync(0xffffffffu, x, d);
  return x;
}

__device__ __forceinline__ float sigmoid(float x) { return 1.f / (1.f + expf(-x)); }

// For whole tensors, where the exact division and exponential would cost more than the memory: off by |x| ulp at most.
__device__ __forceinline__ float fast_sigmoid(float x) { return __fdividef(1.f, 1.f + __expf(-x)); }
__device__ __forceinline__ float fast_silu(float x) { return __fdividef(x, 1.f + __expf(-x)); }

// log(1 + e^x). Above 20 it is x to f32 precision and e^x would overflow; log1p keeps the tail below zero.
__device__ __forceinline__ float softplus(float x) { return x > 20.f ? x : log1pf(expf(x)); }

// The log decay of one token, <= 0. `neg_exp_a` is -exp(A_log), the same for all tokens of a head.
__device__ __forceinline__ float log_decay(float a, float dt_bias, float neg_exp_a) {
  return neg_exp_a * softplus(a + dt_bias);
}

}  // namespace gdn
