// The destination of a row of a block: o, gated, or a partial sum.
#pragma once

#include "common/convert.cuh"
#include "common/math.cuh"
#include "split.cuh"

namespace gdn {
namespace attention {

template <typename T> struct Output {
  const T *gate;       // null: none
  T *o;
  float *partial;      // null: o is written
  float factor;        // 1 / the sum of the weights; 0 where there is no key, and then o is 0 whatever the gate; NaN stays NaN

  __device__ __forceinline__ Output(const gdn_attention_params &p, const Plan &plan, const Block &b, int row, float total)
      : gate(nullptr), o(nullptr), partial(nullptr), factor(total == 0.f ? 0.f : 1.f / total) {
    const int t = b.token(plan, row), head = b.head(plan, row);
    if (plan.splits > 1) {
      partial = plan.partial +
                (partial_row(plan, p.num_heads, b.n, t, head) * plan.splits + b.split) * p.head_dim;
    } else {
      if (p.gate.ptr && total != 0.f) gate = heads_at<T>(p.gate, b.n, b.tokens.first + t, head);
      o = out_heads_at<T>(p.o, b.n, b.tokens.first + t, head);
    }
  }

  // The gates of N neighbouring columns from `column` on. Not in store(): the compiler moves no load before its stores.
  template <int N> __device__ __forceinline__ void load_gate(int column, float (&g)[N]) const {
    if (gate) load_pack<T, N>(gate + column, g);
  }

  // Stores N neighbouring values from `column` on, times their gates.
  template <int N> __device__ __forceinline__ void store(int column, const float (&x)[N], const float (&g)[N]) const {
    if (partial) {
      store_pack<float, N>(partial + column, x);
      return;
    }
    float y[N];
#pragma unroll
    for (int i = 0; i < N; ++i) {
      y[i] = factor == 0.f ? 0.f : x[i] * factor;
      if (gate) y[i] *= fast_sigmoid(g[i]);
    }
    store_pack<T, N>(o + column, y);
  }
};

// The largest score and the sum of weights of a row, for the combination.
__device__ __forceinline__ void store_sums(const gdn_attention_params &p, const Plan &plan, const Block &b, int row,
                                           float largest, float total) {
  const int64_t sums_row = partial_row(plan, p.num_heads, b.n, b.token(plan, row), b.head(plan, row));
  plan.sums[sums_row * plan.splits + b.split] = make_float2(largest, total);
}

}  // namespace attention
}  // namespace gdn
