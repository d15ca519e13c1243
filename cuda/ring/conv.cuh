// What the fused step does before the rule: the convolution.
//
// The convolution's window is a ring too, of its inputs as they came, in the rows of the ring's entries: behind the row of a
// token stand those of the tokens before it, folded or not, until they are overwritten a whole turn later. So the cursor says
// where the window is, and a draft that is taken back leaves it with the ring.
#pragma once

#include "../common/ptx.cuh"
#include "../step/raw.cuh"
#include "entries.cuh"

namespace gdn {
namespace ring {

using step::kWidth;    // of the convolution

// The rule's, which has none.
struct NoConvolution {
  template <typename... A> __device__ __forceinline__ explicit NoConvolution(A &&...) {}
};

// Channels of a value head: k, q and v, an element of each of them a thread.
template <typename T, int MAX, int THREADS> struct Convolution {
  static constexpr int kTurns = (3 * kDim + THREADS - 1) / THREADS;
  const StepParams &p;
  const Tokens tokens;
  const uint32_t head, key_head;
  T fresh[kTurns][MAX], past[kTurns][kWidth - 1];
  uint32_t weight[kTurns][kWidth];

  __device__ __forceinline__ Convolution(const StepParams &p, const Tokens &tokens, uint32_t head, uint32_t key_head)
      : p(p), tokens(tokens), head(head), key_head(key_head) {}

  static __device__ __forceinline__ int unit(int turn) { return static_cast<int>(threadIdx.x) + turn * THREADS; }
  static __device__ __forceinline__ bool some(int turn) { return kTurns * THREADS == 3 * kDim || unit(turn) < 3 * kDim; }
  // 0: k, 1: q, 2: v.
  static __device__ __forceinline__ int kind(int turn) { return unit(turn) / kDim; }

  __device__ __forceinline__ uint32_t channel(int turn) const {
    const uint32_t first = kind(turn) == 1 ? key_head : kind(turn) == 0 ? p.key_heads + key_head : 2 * p.key_heads + head;
    return first * kDim + unit(turn) % kDim;
  }

  __device__ __forceinline__ T *inputs(uint32_t slot, uint32_t row, int turn) const {
    return static_cast<T *>(p.inputs) + (static_cast<uint64_t>(slot) * p.inputs_stride + static_cast<uint64_t>(row) * p.channels +
                                         channel(turn));
  }

  __device__ __forceinline__ void load_weights() {
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
      if (!some(turn)) continue;
#pragma unroll
      for (int i = 0; i < kWidth; ++i)
        weight[turn][i] = raw_load_any(p.conv_weight, static_cast<int64_t>(channel(turn)) * kWidth + i, p.conv_dtype);
    }
  }

  __device__ __forceinline__ void load_fresh() {
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
      if (!some(turn)) continue;
#pragma unroll
      for (int t = 0; t < MAX; ++t)
        if (t < static_cast<int>(tokens.count)) fresh[turn][t] = tokens.of<T>(p.q, t, 0)[channel(turn)];
    }
  }

  __device__ __forceinline__ void load_past(const Entries &ring, uint32_t slot) {
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
      if (!some(turn)) continue;
#pragma unroll
      for (int i = 0; i < kWidth - 1; ++i) past[turn][i] = *inputs(slot, ring.row_before(kWidth - 1 - i), turn);
    }
  }

  // Rounded as the convolution alone would store it.
  template <typename S> __device__ __forceinline__ void run(S &shared, const Entries &ring) const {
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
      if (!some(turn)) continue;
      float window[kWidth], taps[kWidth];
#pragma unroll
      for (int i = 0; i < kWidth; ++i) taps[i] = raw_to_float(weight[turn][i], p.conv_dtype);
#pragma unroll
      for (int i = 0; i < kWidth - 1; ++i) window[i] = to_float(past[turn][i]);
#pragma unroll
      for (int t = 0; t < MAX; ++t) {
        if (t >= static_cast<int>(ring.count)) break;
        window[kWidth - 1] = to_float(fresh[turn][t]);
        float sum = 0.f;
#pragma unroll
        for (int i = 0; i < kWidth; ++i) sum = fmaf(taps[i], window[i], sum);
#pragma unroll
        for (int i = 0; i < kWidth - 1; ++i) window[i] = window[i + 1];
        const int d = unit(turn) % kDim;
        (kind(turn) == 2 ? shared.v[t] : shared.tokens[2 * t + kind(turn)])[d] = from_float<T>(fast_silu(sum));
      }
    }
  }

  // Appends the inputs; with them those of the window, where a state moves. The first value head of a key head has q and k.
  __device__ __forceinline__ void keep(const Entries &ring, uint32_t slot, bool moved) const {
    const bool first = head == key_head * p.ratio.ratio;
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
      if (!some(turn) || (kind(turn) != 2 && !first)) continue;
#pragma unroll
      for (int t = 0; t < MAX; ++t)
        if (t < static_cast<int>(ring.count)) *inputs(slot, ring.row(ring.length + t), turn) = fresh[turn][t];
      if (moved) {
#pragma unroll
        for (int i = 0; i < kWidth - 1; ++i) *inputs(slot, ring.row_before(kWidth - 1 - i), turn) = past[turn][i];
      }
    }
  }
};

// One token: channels of q, k and v by warps 0, 1 and 2, four of them a lane.
template <typename T> struct TokenConvolution {
  const StepParams &p;
  const uint32_t n;
  const int kind, first;       // q, k, v; the first of the four
  const bool some;
  const uint32_t channel;
  step::RawTaps taps;
  Raw4<T> past[kWidth - 1], fresh = {};

  __device__ __forceinline__ TokenConvolution(const StepParams &p, uint32_t n, uint32_t head, uint32_t key_head, int warp, int lane)
      : p(p), n(n), kind(warp), first(4 * lane), some(warp < 3),
        channel((warp == 0   ? key_head
                 : warp == 1 ? p.key_heads + key_head
                             : 2 * p.key_heads + head) * kDim + first) {}

  __device__ __forceinline__ T *inputs(uint32_t slot, uint32_t row) const {
    return static_cast<T *>(p.inputs) +
           (static_cast<uint64_t>(slot) * p.inputs_stride + static_cast<uint64_t>(row) * p.channels + channel);
  }

  __device__ __forceinline__ void load_weights() {
    if (some) taps.load(p.conv_weight, static_cast<int>(channel), p.conv_dtype);
  }

  __device__ __forceinline__ void load_past(const Entries &ring, uint32_t slot) {
    if (!some) return;
#pragma unroll
    for (int i = 0; i < kWidth - 1; ++i) past[i] = raw_load4(inputs(slot, ring.row_before(kWidth - 1 - i)), 0, 4, true);
  }

  __device__ __forceinline__ void load_fresh() {
    if (some) fresh = raw_load4(p.q.at<T>(n, 0, 0) + channel, 0, 4, true);
  }

  // Rounded as the convolution alone would store it.
  template <typename S> __device__ __forceinline__ void run(S &shared) const {
    if (!some) return;
    float tap[4][kWidth], y[4];
#pragma unroll
    for (int c = 0; c < 4; ++c)
#pragma unroll
      for (int i = 0; i < kWidth; ++i) tap[c][i] = taps.at(c, i, p.conv_dtype), here(tap[c][i]);    // before inputs are there
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      float sum = 0.f;
#pragma unroll
      for (int i = 0; i < kWidth; ++i) sum = fmaf(tap[c][i], raw_to_float(i < kWidth - 1 ? past[i] : fresh, c), sum);
      y[c] = to_float(from_float<T>(fast_silu(sum)));
    }
    float *const to = kind == 0 ? shared.q : kind == 1 ? shared.k : shared.v;
    *reinterpret_cast<float4 *>(to + first) = make_float4(y[0], y[1], y[2], y[3]);
  }

  // Appends the input; with it those of the window, where a state moves. `keys`: whether this block has q and k to append too.
  __device__ __forceinline__ void keep(const Entries &ring, uint32_t slot, bool moved, bool keys) const {
    if (!some || (kind != 2 && !keys)) return;
    const auto store = [&](uint32_t row, const Raw4<T> &x) {
      *reinterpret_cast<Pack<uint32_t, sizeof(T)> *>(inputs(slot, row)) = reinterpret_cast<const Pack<uint32_t, sizeof(T)> &>(x);
    };
    if (ring.count) store(ring.row(ring.length), fresh);
    if (moved) {
#pragma unroll
      for (int i = 0; i < kWidth - 1; ++i) store(ring.row_before(kWidth - 1 - i), past[i]);
    }
  }
};

}  // namespace ring
}  // namespace gdn
