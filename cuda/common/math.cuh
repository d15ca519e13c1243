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

// hi + lo = a + b without loss (Knuth).
__device__ __forceinline__ void two_sum(float a, float b, float &hi, float &lo) {
  hi = __fadd_rn(a, b);
  const float t = __fsub_rn(hi, a);
  lo = __fadd_rn(__fsub_rn(a, __fsub_rn(hi, t)), __fsub_rn(b, t));
}

// The sum of squares of a row whose elements are spread over lanes, and the reciprocal of its root, to more than f32:
// hi + lo each. A lane's own few squares are added plainly, since the rounding of 32 lanes averages out; the sum over
// lanes keeps its rounding errors.
//
// NOTES: a key's norm must not be off by even half an ulp in all its elements alike. With repeated keys, beta near 2 and
// no decay a token maps the state's component along the key to (1 - beta |k|^2) of itself, so a common factor in the key
// adds up token by token; independent rounding of the elements does so far less.
struct SquareSum {
  float hi = 0.f, lo = 0.f;

  __device__ __forceinline__ void add_square(float x) { hi = fmaf(x, x, hi); }

  // One step of a butterfly over lanes; both partners get the same bits.
  __device__ __forceinline__ void add_lane(int distance) {
    const float other = __shfl_xor_sync(0xffffffffu, hi, distance);
    const float other_lo = __shfl_xor_sync(0xffffffffu, lo, distance);
    float t;
    two_sum(hi, other, hi, t);
    lo = (lo + other_lo) + t;
  }
};

struct Factor {
  float hi, lo;

  // x times the factor, rounded once.
  __device__ __forceinline__ float times(float x) const { return fmaf(x, hi, x * lo); }
};

// (s + eps)^-1/2, one Newton step from the hardware's.
__device__ __forceinline__ Factor inverse_root(const SquareSum &s, float eps) {
  float hi, lo;
  two_sum(s.hi, eps, hi, lo);
  lo += s.lo;
  const float r = rsqrtf(hi), rr = __fmul_rn(r, r), rr_lo = __fmaf_rn(r, r, -rr);
  const float rest = __fmaf_rn(-hi, rr, 1.f) - hi * rr_lo - lo * rr;    // 1 - (hi + lo) r^2
  // A zero row with eps 0 has no direction: it stays infinite, as 1 / 0.
  return {r, isinf(r) ? 0.f : 0.5f * r * rest};
}

// a / b, correctly rounded but for rare ties; b is neither tiny nor huge. Unlike the operator it has no branch, across
// which nothing could be scheduled.
__device__ __forceinline__ float divide(float a, float b) {
  const float r = __fdividef(1.f, b), y = a * r;
  return fmaf(fmaf(-y, b, a), r, y);
}

// Through the smaller of sigmoid(x) and sigmoid(-x), so that a value near one is rounded once and not three times.
__device__ __forceinline__ float sigmoid(float x) {
  const float e = expf(-fabsf(x)), small = divide(e, 1.f + e);
  return x >= 0.f ? 1.f - small : small;
}

// For whole tensors, where the exact division and exponential would cost more than the memory: off by |x| ulp at most.
__device__ __forceinline__ float fast_sigmoid(float x) { return __fdividef(1.f, 1.f + __expf(-x)); }
__device__ __forceinline__ float fast_silu(float x) { return __fdividef(x, 1.f + __expf(-x)); }

// log(1 + e^x). Above 20 it is x to f32 precision and e^x would overflow. What 1 + e^x rounds away is added back through
// the derivative of the logarithm, so that the tail below zero keeps its precision.
__device__ __forceinline__ float softplus(float x) {
  const float e = expf(x > 20.f ? 20.f : x), u = 1.f + e;    // fminf would hide a NaN
  return x > 20.f ? x : logf(u) + divide(e - (u - 1.f), u);
}

// The log decay of one token, <= 0. `neg_exp_a` is -exp(A_log), the same for all tokens of a head.
__device__ __forceinline__ float log_decay(float a, float dt_bias, float neg_exp_a) {
  return neg_exp_a * softplus(a + dt_bias);
}

}  // namespace gdn
