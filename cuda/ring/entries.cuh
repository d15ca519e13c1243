// Where tokens and the entries of a ring lie.
#pragma once

#include "../common/math.cuh"
#include "../step/compact.cuh"
#include "../step/lanes.cuh"

namespace gdn {
namespace ring {

using step::kGroups;
using step::kLanes;
using step::Sizes;

constexpr int kEntries = GDN_RING_ENTRIES;

// Head sizes that the kernels can be made for: channels of v are counted in K, operands have 32 columns, a flush 64 rows a block.
template <int K, int V> constexpr bool kSizes = V % K == 0 && K % 32 == 0 && V % 64 == 0 && V >= 128;

// The element of a tensor [sequence, token, head, dim] where a row begins; strides fit in 32 bits.
__device__ __forceinline__ uint64_t row_index(const gdn_heads &x, uint32_t n, uint32_t t, uint32_t h) {
  return static_cast<uint64_t>(n) * static_cast<uint32_t>(x.seq_stride) + static_cast<uint64_t>(t) * static_cast<uint32_t>(x.token_stride) +
         static_cast<uint64_t>(h) * static_cast<uint32_t>(x.head_stride);
}

// The tokens of one sequence.
struct Tokens {
  uint32_t seq, first, count;

  __device__ __forceinline__ Tokens(const gdn_sequences &s, uint32_t n) : seq(n), first(0), count(s.tokens_per_seq) {
    if (!s.cu_seqlens) return;
    seq = 0, first = s.cu_seqlens[n];
    count = min(s.cu_seqlens[n + 1] - first, static_cast<uint32_t>(s.max_tokens_per_seq));
  }
  __device__ __forceinline__ uint64_t index(const gdn_heads &x, uint32_t t, uint32_t h) const { return row_index(x, seq, first + t, h); }
  template <typename T> __device__ __forceinline__ const T *row(const gdn_heads &x, uint32_t t, uint32_t h) const {
    return static_cast<const T *>(x.ptr) + index(x, t, h);
  }
  template <typename T> __device__ __forceinline__ T *out_row(const gdn_heads &x, uint32_t t, uint32_t h) const {
    return const_cast<T *>(row<T>(x, t, h));
  }
};

// The entries of one sequence, and what a launch does with them.
struct Entries {
  uint32_t head, length, count, capacity;    // count: new tokens
  bool flush;

  // `moved`: the state goes to another place, even without an entry.
  __device__ __forceinline__ Entries(const gdn_ring &r, uint32_t span, uint32_t count, bool moved)
      : head(span >> 16), length(span & 0xffffu), count(count), capacity(r.capacity) {
    flush = moved || (length > 0 && length + count > static_cast<uint32_t>(r.max_entries));
  }

  // The row `back` before the first new entry's, also further back than the head.
  __device__ __forceinline__ uint32_t row_before(uint32_t back) const {
    const uint32_t next = row(length);
    return next >= back ? next - back : next + capacity - back;
  }

  // The row of entry j; new entries follow the old ones.
  __device__ __forceinline__ uint32_t row(uint32_t j) const {
    const uint32_t row = head + j;
    return row < capacity ? row : row - capacity;
  }
};

template <typename T, int K> __device__ __forceinline__ T *keys_of(const gdn_ring &r, uint32_t slot, uint32_t key_head) {
  return static_cast<T *>(r.keys) + (static_cast<uint64_t>(slot) * static_cast<uint32_t>(r.keys_stride) +
                                     static_cast<uint64_t>(key_head) * static_cast<uint32_t>(r.capacity) * K);
}
template <int V> __device__ __forceinline__ float *updates_of(const gdn_ring &r, uint32_t slot, uint32_t head) {
  return r.updates + (static_cast<uint64_t>(slot) * static_cast<uint32_t>(r.updates_stride) +
                      static_cast<uint64_t>(head) * static_cast<uint32_t>(r.capacity) * V);
}
__device__ __forceinline__ float *decays_of(const gdn_ring &r, uint32_t slot, uint32_t head) {
  return r.decays + (static_cast<uint64_t>(slot) * static_cast<uint32_t>(r.decays_stride) +
                     static_cast<uint64_t>(head) * static_cast<uint32_t>(r.capacity));
}

// The product of the decays after each entry, and after the state: lane j < kEntries brings the log decay of entry j, lanes
// without an entry 0. Every sum is over the decays after its entry alone: as a difference of sums from the state on it would
// lose small decays after a strong one.
struct DecayProducts {
  float entry, state;

  DecayProducts() = default;
  __device__ __forceinline__ explicit DecayProducts(float decay, int lane) {
    float sum = __shfl_down_sync(0xffffffffu, decay, 1);
    if (lane >= kEntries - 1) sum = 0.f;
#pragma unroll
    for (int d = 1; d < kEntries; d *= 2) {
      const float other = __shfl_down_sync(0xffffffffu, sum, d);
      if (lane + d < kEntries) sum += other;
    }
    entry = expf(sum);
    state = expf(__shfl_sync(0xffffffffu, sum + decay, 0));
  }
};

// Makes the compiler compute x here, and not where x is used.
__device__ __forceinline__ void compute_now(float &x) { asm volatile("" : "+f"(x)); }

}  // namespace ring
}  // namespace gdn
