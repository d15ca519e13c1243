// The convolution of a step over the ring.
//
// The convolution's window is a ring too, of its raw inputs, in the rows of the ring's entries: before the row of a token are
// those of the tokens before it, flushed or not, until they are overwritten a whole capacity later. So the span says where the
// window is, and a rejected draft takes its inputs back together with its entries.
#pragma once

#include "../common/ptx.cuh"
#include "../step/raw.cuh"
#include "entries.cuh"

namespace gdn {
namespace ring {

using step::kWidth;    // of the convolution

// A channel of the inputs of a slot, by row of the ring.
template <typename T> struct Inputs {
  T *const first;
  const uint32_t channels;

  __device__ __forceinline__ Inputs(const gdn_ring_step_params &p, const Sizes &sizes, uint32_t slot, uint32_t channel)
      : first(static_cast<T *>(p.inputs) + (static_cast<uint64_t>(slot) * static_cast<uint32_t>(p.inputs_stride) + channel)),
        channels(sizes.channels) {}
  __device__ __forceinline__ T *row(uint32_t row) const { return first + static_cast<uint64_t>(row) * channels; }
};

// Several tokens: the channels of a value head (k, q and v) over the threads of a block, one channel a thread and pass.
template <typename T, int MAX, int THREADS, int K, int V> struct Convolution {
  static constexpr int kChannels = 2 * K + V, kPasses = (kChannels + THREADS - 1) / THREADS;
  const gdn_ring_step_params &p;
  const Sizes &sizes;
  const Tokens tokens;
  const uint32_t head, key_head;
  T input[kPasses][MAX], window[kPasses][kWidth - 1];
  uint32_t weight[kPasses][kWidth];

  __device__ __forceinline__ Convolution(const gdn_ring_step_params &p, const Sizes &sizes, const Tokens &tokens, uint32_t head,
                                         uint32_t key_head)
      : p(p), sizes(sizes), tokens(tokens), head(head), key_head(key_head) {}

  static __device__ __forceinline__ int unit(int pass) { return static_cast<int>(threadIdx.x) + pass * THREADS; }
  static __device__ __forceinline__ bool active(int pass) { return kPasses * THREADS == kChannels || unit(pass) < kChannels; }
  // 0: k, 1: q, 2: v.
  static __device__ __forceinline__ int kind(int pass) { return K == V ? unit(pass) / K : min(unit(pass) / K, 2); }
  static __device__ __forceinline__ int element(int pass) { return K == V ? unit(pass) % K : unit(pass) - K * kind(pass); }

  __device__ __forceinline__ uint32_t channel(int pass) const {
    const uint32_t key_heads = p.common.num_k_heads;
    const uint32_t first = kind(pass) == 1 ? key_head : kind(pass) == 0 ? key_heads + key_head : 2 * key_heads + head * (V / K);
    return first * K + element(pass);
  }

  __device__ __forceinline__ void load_weights() {
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      if (!active(pass)) continue;
#pragma unroll
      for (int i = 0; i < kWidth; ++i)
        weight[pass][i] = raw_load_any(p.layer.conv_weight, static_cast<int64_t>(channel(pass)) * kWidth + i, p.layer.conv_dtype);
    }
  }

  __device__ __forceinline__ void load_inputs() {
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      if (!active(pass)) continue;
      const T *row = tokens.row<T>(p.layer.x, 0, 0) + channel(pass);
#pragma unroll
      for (int t = 0; t < MAX; ++t, row += static_cast<uint32_t>(p.layer.x.token_stride))
        if (t < static_cast<int>(tokens.count)) input[pass][t] = *row;
    }
  }

  __device__ __forceinline__ void load_window(const Entries &ring, uint32_t slot) {
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      if (!active(pass)) continue;
      const Inputs<T> inputs(p, sizes, slot, channel(pass));
#pragma unroll
      for (int i = 0; i < kWidth - 1; ++i) window[pass][i] = *inputs.row(ring.row_before(kWidth - 1 - i));
    }
  }

  // Rounded to T, as gdn_conv stores it; of q and k, of v, or of all.
  template <bool KEYS, bool VALUES, typename S> __device__ __forceinline__ void run(S &shared, const Entries &ring) const {
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      if (!active(pass) || !(kind(pass) == 2 ? VALUES : KEYS)) continue;
      float x[kWidth], taps[kWidth];
#pragma unroll
      for (int i = 0; i < kWidth; ++i) taps[i] = raw_to_float(weight[pass][i], p.layer.conv_dtype);
#pragma unroll
      for (int i = 0; i < kWidth - 1; ++i) x[i] = to_float(window[pass][i]);
#pragma unroll
      for (int t = 0; t < MAX; ++t) {
        if (t >= static_cast<int>(ring.count)) break;
        x[kWidth - 1] = to_float(input[pass][t]);
        float sum = 0.f;
#pragma unroll
        for (int i = 0; i < kWidth; ++i) sum = fmaf(taps[i], x[i], sum);
#pragma unroll
        for (int i = 0; i < kWidth - 1; ++i) x[i] = x[i + 1];
        (kind(pass) == 2 ? shared.v(t) : shared.tokens[2 * t + kind(pass)])[element(pass)] = from_float<T>(fast_silu(sum));
      }
    }
  }

  // Appends the inputs, and where a state moves its window. The first value head of a key head writes q and k.
  __device__ __forceinline__ void append(const Entries &ring, uint32_t slot, bool moved) const {
    const bool first = head == key_head * sizes.ratio;
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      if (!active(pass) || (kind(pass) != 2 && !first)) continue;
      const Inputs<T> inputs(p, sizes, slot, channel(pass));
#pragma unroll
      for (int t = 0; t < MAX; ++t)
        if (t < static_cast<int>(ring.count)) *inputs.row(ring.row(ring.length + t)) = input[pass][t];
      if (moved) {
#pragma unroll
        for (int i = 0; i < kWidth - 1; ++i) *inputs.row(ring.row_before(kWidth - 1 - i)) = window[pass][i];
      }
    }
  }
};

// One token: channels of q by warp 0, of k by warp 1, of v by the warps after them, four of them a lane.
template <typename T, int K, int V> struct TokenConvolution {
  static constexpr int kWarps = 2 + (V + 127) / 128;
  const gdn_ring_step_params &p;
  const Sizes &sizes;
  const uint32_t n;
  const int kind, first;       // q, k, v; the first of the four
  const bool active;
  const uint32_t channel;
  step::RawTaps taps;
  Raw4<T> window[kWidth - 1], input = {};

  __device__ __forceinline__ TokenConvolution(const gdn_ring_step_params &p, const Sizes &sizes, uint32_t n, uint32_t head,
                                              uint32_t key_head, int warp, int lane)
      : p(p), sizes(sizes), n(n), kind(min(warp, 2)), first(4 * lane + 128 * (warp - kind)),
        active(warp < kWarps && first < (kind == 2 ? V : K)),
        channel((warp == 0   ? key_head
                 : warp == 1 ? p.common.num_k_heads + key_head
                             : 2 * p.common.num_k_heads + head * (V / K)) * K + first) {}

  __device__ __forceinline__ void load_weights() {
    if (active) taps.load(p.layer.conv_weight, static_cast<int>(channel), p.layer.conv_dtype);
  }

  __device__ __forceinline__ void load_window(const Entries &ring, uint32_t slot) {
    if (!active) return;
    const Inputs<T> inputs(p, sizes, slot, channel);
#pragma unroll
    for (int i = 0; i < kWidth - 1; ++i) window[i] = raw_load4(inputs.row(ring.row_before(kWidth - 1 - i)), 0, 4, true);
  }

  __device__ __forceinline__ void load_input() {
    if (active) input = raw_load4(static_cast<const T *>(p.layer.x.ptr) + row_index(p.layer.x, n, 0, 0) + channel, 0, 4, true);
  }

  // Rounded to T, as gdn_conv stores it.
  template <typename S> __device__ __forceinline__ void run(S &shared) const {
    if (!active) return;
    float tap[4][kWidth], y[4];
#pragma unroll
    for (int c = 0; c < 4; ++c)
#pragma unroll
      for (int i = 0; i < kWidth; ++i) tap[c][i] = taps.at(c, i, p.layer.conv_dtype), compute_now(tap[c][i]);    // before inputs arrive
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      float sum = 0.f;
#pragma unroll
      for (int i = 0; i < kWidth; ++i) sum = fmaf(tap[c][i], raw_to_float(i < kWidth - 1 ? window[i] : input, c), sum);
      y[c] = to_float(from_float<T>(fast_silu(sum)));
    }
    float *const row = kind == 0 ? shared.q : kind == 1 ? shared.k : shared.v;
    *reinterpret_cast<float4 *>(row + first) = make_float4(y[0], y[1], y[2], y[3]);
  }

  // Appends the input, and where a state moves its window. `stores_key`: this block appends q and k too.
  __device__ __forceinline__ void append(const Entries &ring, uint32_t slot, bool moved, bool stores_key) const {
    if (!active || (kind != 2 && !stores_key)) return;
    const Inputs<T> inputs(p, sizes, slot, channel);
    const auto store = [&](uint32_t row, const Raw4<T> &x) {
      *reinterpret_cast<Pack<uint32_t, sizeof(T)> *>(inputs.row(row)) = reinterpret_cast<const Pack<uint32_t, sizeof(T)> &>(x);
    };
    if (ring.count) store(ring.row(ring.length), input);
    if (moved) {
#pragma unroll
      for (int i = 0; i < kWidth - 1; ++i) store(ring.row_before(kWidth - 1 - i), window[i]);
    }
  }
};

}  // namespace ring
}  // namespace gdn
