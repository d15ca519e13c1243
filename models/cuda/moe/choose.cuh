// The experts of a token.
#pragma once

#include "common/math.cuh"
#include "common/ptx.cuh"
#include "args.h"

namespace gdn {
namespace moe {

// Orders as the floats do; every NaN above all else. Never 0.
__device__ __forceinline__ uint32_t key_of(float x) {
  const uint32_t bits = __float_as_uint(x);
  return x != x ? 0xffffffffu : bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float of_key(uint32_t key) {
  return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);    // a NaN comes back as one
}

struct Choice {
  int expert;
  float weight;
};

// Of one token, by a whole warp: lane j < k gets the j-th best. PER_LANE * 32 >= experts >= k.
template <int PER_LANE>
__device__ __forceinline__ Choice choose(const float *logits, int experts, int k, bool normalise) {
  const int lane = threadIdx.x % 32;
  uint32_t key[PER_LANE], most = 0;
#pragma unroll
  for (int i = 0; i < PER_LANE; ++i) {
    const int e = i * 32 + lane;
    key[i] = e < experts ? key_of(logits[e]) : 0;
    most = max(most, key[i]);
  }
  const float top = of_key(__reduce_max_sync(0xffffffffu, most));    // NaN where any is
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < PER_LANE; ++i) {
    const float p = __expf(of_key(key[i]) - top);
    sum += key[i] == 0 ? 0.f : p;
  }
  sum = group_sum(sum);

  Choice mine = {0, 0.f};
  float total = 0.f;
  for (int j = 0; j < k; ++j) {
    uint32_t best = 0, at = 0;
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i)
      if (key[i] > best) {
        best = key[i];
        at = i;
      }
    most = __reduce_max_sync(0xffffffffu, best);
    const uint32_t expert = __reduce_min_sync(0xffffffffu, best == most ? at * 32 + lane : 0xffffffffu);
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i)
      if (i * 32 + lane == expert) key[i] = 0;
    const float p = divide(__expf(of_key(most) - top), sum);
    total += p;
    if (lane == j) mine = {static_cast<int>(expert), p};
  }
  if (normalise) mine.weight = divide(mine.weight, total);
  return mine;
}

__device__ __forceinline__ Choice choose(const Args &a, int token) {
  const float *logits = a.logits + token * a.logits_stride;
  if (a.experts <= 256) return choose<8>(logits, a.experts, a.top_k, a.normalise);
  if (a.experts <= 512) return choose<16>(logits, a.experts, a.top_k, a.normalise);
  return choose<32>(logits, a.experts, a.top_k, a.normalise);
}

__device__ __forceinline__ float shared_weight(const Args &a, int token) {
  return sigmoid(a.logits[token * a.logits_stride + a.experts]);
}

}  // namespace moe
}  // namespace gdn
