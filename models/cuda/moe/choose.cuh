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

// The largest, in as few dependent steps as possible.
template <int N> __device__ __forceinline__ uint32_t most_of(const uint32_t *key) {
  if constexpr (N == 1)
    return key[0];
  else
    return max(most_of<N / 2>(key), most_of<N / 2>(key + N / 2));
}

// Of one token, by a whole warp: lane j < k gets the j-th best. PER_LANE * 32 >= experts >= k.
template <int PER_LANE> __device__ __forceinline__ Choice choose(const Args &a, int token) {
  const int lane = threadIdx.x % 32, experts = a.experts, k = a.top_k;
  const float *logits = a.logits + token * a.logits_stride;
  float logit[PER_LANE] = {};
#pragma unroll(PER_LANE <= 16 ? 2 : 1)
  for (int s = 0; s < a.splits; ++s) {
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) {
      const int e = i * 32 + lane;
      if (e < experts) logit[i] += logits[e];
    }
    logits += a.split_stride;
  }
  uint32_t key[PER_LANE];
#pragma unroll
  for (int i = 0; i < PER_LANE; ++i) key[i] = i * 32 + lane < experts ? key_of(logit[i]) : 0;
  uint32_t best = most_of<PER_LANE>(key);
  const float top = of_key(__reduce_max_sync(0xffffffffu, best));    // NaN where any is
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < PER_LANE; ++i) {
    const float p = __expf(of_key(key[i]) - top);
    sum += key[i] == 0 ? 0.f : p;
  }
  sum = group_sum(sum);

  int chosen = 0;
  uint32_t chosen_key = 0;
  for (int j = 0; j < k; ++j) {
    const uint32_t most = __reduce_max_sync(0xffffffffu, best);
    uint32_t at = PER_LANE - 1;    // the first, beside the search over lanes
#pragma unroll
    for (int i = PER_LANE - 2; i >= 0; --i)
      if (key[i] == best) at = i;
    const uint32_t expert = __reduce_min_sync(0xffffffffu, best == most ? at * 32 + lane : 0xffffffffu);
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i)
      if (i * 32 + lane == expert) key[i] = 0;
    best = most_of<PER_LANE>(key);
    if (lane == j) {
      chosen = static_cast<int>(expert);
      chosen_key = most;
    }
  }
  const float p = lane < k ? divide(__expf(of_key(chosen_key) - top), sum) : 0.f;
  return {chosen, a.normalise ? divide(p, group_sum(p)) : p};
}

__device__ __forceinline__ Choice choose(const Args &a, int token) {
  if (a.experts <= 256) return choose<8>(a, token);
  if (a.experts <= 512) return choose<16>(a, token);
  return choose<32>(a, token);
}

__device__ __forceinline__ float shared_weight(const Args &a, int token) {
  const float *logits = a.logits + token * a.logits_stride + a.experts;
  float logit = 0.f;
#pragma unroll 2
  for (int s = 0; s < a.splits; ++s) logit += logits[s * a.split_stride];
  return sigmoid(logit);
}

constexpr int kSortThreads = GDN_MOE_EXPERTS;    // an expert each

// The sum of what the threads before this one have, and of all; of kSortThreads.
struct Before {
  int prefix, all;
};
__device__ __forceinline__ Before sum_before(int x, int *of_warp) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int sum = x;
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const int other = __shfl_up_sync(0xffffffffu, sum, d);
    if (lane >= d) sum += other;
  }
  if (lane == 31) of_warp[warp] = sum;
  __syncthreads();
  const int other = of_warp[lane];
  const int before = __reduce_add_sync(0xffffffffu, lane < warp ? other : 0), all = __reduce_add_sync(0xffffffffu, other);
  return {before + sum - x, all};
}
static_assert(kSortThreads == 32 * 32, "a warp sees the sums of all");

}  // namespace moe
}  // namespace gdn
