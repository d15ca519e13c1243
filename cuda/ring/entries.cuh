// The parameters of the kernels of this folder, and where the entries of a ring lie.
#pragma once

#include "../common/math.cuh"
#include "../step/lanes.cuh"
#include "../step/small.h"

namespace gdn {
namespace ring {

using step::kDim;
using step::kEach;
using step::kGroups;
using step::kLanes;
using step::Pool;
using step::Ratio;

constexpr int kWindow = GDN_RING_WINDOW;

// A tensor [sequence, token, head, dim]; strides in elements.
struct Field {
  const void *ptr;
  uint32_t seq, token, head;

  __device__ __forceinline__ uint64_t index(uint32_t n, uint32_t t, uint32_t h) const {
    return static_cast<uint64_t>(n) * seq + static_cast<uint64_t>(t) * token + static_cast<uint64_t>(h) * head;
  }
  template <typename T> __device__ __forceinline__ const T *at(uint32_t n, uint32_t t, uint32_t h) const {
    return static_cast<const T *>(ptr) + index(n, t, h);
  }
  template <typename T> __device__ __forceinline__ T *out(uint32_t n, uint32_t t, uint32_t h) const {
    return const_cast<T *>(at<T>(n, t, h));
  }
};

struct Params {
  const void *state_in;
  void *state_out;
  Pool in, out;
  Field q, k, v, a, b, o;
  const float *a_log, *dt_bias;
  void *keys;
  float *updates, *decays;
  const uint32_t *cursors, *counts, *cu_seqlens;
  uint32_t keys_stride, updates_stride, decays_stride;    // from slot to slot
  uint32_t capacity, window, tokens;
  Ratio ratio;
  uint32_t key_heads, heads;
  int32_t gate_dtype, l2norm, fold;
  int32_t apart;    // state_in and state_out are two pools
  float l2_eps, scale, beta_scale;
};

// And of the fused step, where q, k and v are columns of x.
struct StepParams : Params {
  Field z;
  const void *conv_weight, *norm_weight;
  void *inputs;               // of the convolution, by the rows of the ring
  uint32_t inputs_stride;     // from slot to slot
  uint32_t channels;
  int32_t conv_dtype, norm_dtype, sigmoid;
  float norm_eps;
  int32_t overlap;
};

template <typename GIVEN> constexpr bool kStep = std::is_same_v<GIVEN, StepParams>;

// Where the tokens of a sequence lie, and how many there are to be read.
struct Tokens {
  uint32_t seq, first, count;

  __device__ __forceinline__ Tokens(const Params &p, uint32_t n) : seq(n), first(0), count(p.tokens) {
    if (!p.cu_seqlens) return;
    seq = 0, first = p.cu_seqlens[n];
    count = min(p.cu_seqlens[n + 1] - first, p.tokens);
  }
  template <typename T> __device__ __forceinline__ T *of(const Field &x, uint32_t t, uint32_t h) const {
    return x.out<T>(seq, first + t, h);
  }
};

// The entries of one sequence, and what this launch does with them.
struct Entries {
  uint32_t first, length, count, capacity;    // count: new tokens
  bool fold;

  // `moved`: the state goes to another place, even without an entry.
  __device__ __forceinline__ Entries(const Params &p, uint32_t n, uint32_t cursor, bool moved)
      : first(cursor >> 16), length(cursor & 0xffffu), count(p.tokens), capacity(p.capacity) {
    if (p.cu_seqlens) count = min(p.cu_seqlens[n + 1] - p.cu_seqlens[n], p.tokens);
    else if (p.counts) count = min(p.counts[n], p.tokens);
    fold = moved || (length > 0 && (p.fold || length + count > p.window));
  }

  // The row `back` before the first new entry's, further back than the ring's first too.
  __device__ __forceinline__ uint32_t row_before(uint32_t back) const {
    const uint32_t next = row(length);
    return next >= back ? next - back : next + capacity - back;
  }

  // The row of entry j, old ones and then new ones.
  __device__ __forceinline__ uint32_t row(uint32_t j) const {
    const uint32_t row = first + j;
    return row < capacity ? row : row - capacity;
  }
};

template <typename T> __device__ __forceinline__ T *keys_of(const Params &p, uint32_t slot, uint32_t key_head) {
  return static_cast<T *>(p.keys) +
         (static_cast<uint64_t>(slot) * p.keys_stride + static_cast<uint64_t>(key_head) * p.capacity * kDim);
}
__device__ __forceinline__ float *updates_of(const Params &p, uint32_t slot, uint32_t head) {
  return p.updates +
         (static_cast<uint64_t>(slot) * p.updates_stride + static_cast<uint64_t>(head) * p.capacity * kDim);
}
__device__ __forceinline__ float *decays_of(const Params &p, uint32_t slot, uint32_t head) {
  return p.decays + (static_cast<uint64_t>(slot) * p.decays_stride + static_cast<uint64_t>(head) * p.capacity);
}

// What is left of each entry, and of the state, behind the last entry: lane j < kWindow brings the log decay of entry j, lanes
// without one 0. Every sum is of decays behind the entry alone: as a difference of sums from the state on it would lose what
// small decays behind a strong one are.
struct Left {
  float entry, state;

  Left() = default;
  __device__ __forceinline__ explicit Left(float decay, int lane) {
    float sum = __shfl_down_sync(0xffffffffu, decay, 1);
    if (lane >= kWindow - 1) sum = 0.f;
#pragma unroll
    for (int d = 1; d < kWindow; d *= 2) {
      const float other = __shfl_down_sync(0xffffffffu, sum, d);
      if (lane + d < kWindow) sum += other;
    }
    entry = expf(sum);
    state = expf(__shfl_sync(0xffffffffu, sum + decay, 0));
  }
};

// Makes the compiler work out x where this stands, and not where x is used.
__device__ __forceinline__ void here(float &x) { asm volatile("" : "+f"(x)); }

// Sixteen bytes of a state row as floats.
template <typename ST> __device__ __forceinline__ void unpack(const uint4 &words, float *x) {
  if constexpr (std::is_same_v<ST, __half>) {
    const uint32_t w[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 both = __half22float2(reinterpret_cast<const __half2 &>(w[i]));
      x[2 * i] = both.x, x[2 * i + 1] = both.y;
    }
  } else {
    step::Lanes<ST>::unpack(words, x);
  }
}

}  // namespace ring
}  // namespace gdn
