// Where a sequence's tokens and its state lie.
#pragma once

#include <stdint.h>

#include "../gdn.h"

namespace gdn {

// The tokens of one sequence. Token t of sequence n lies at n * seq_stride + (first + t) * token_stride: in a packed
// tensor seq_stride is 0, in a batched one `first` is 0.
struct Tokens {
  int64_t first;
  int32_t count;
};

__device__ __forceinline__ Tokens tokens_of(const gdn_sequences &s, int n) {
  if (s.cu_seqlens == nullptr) return {0, s.tokens_per_seq};
  const uint32_t begin = s.cu_seqlens[n], end = s.cu_seqlens[n + 1];
  return {static_cast<int64_t>(begin), static_cast<int32_t>(end - begin)};
}

// The sequence of a row of the packed tokens, or of batched ones in a row, by all lanes of a warp: the last one that begins at or
// before it.
__device__ __forceinline__ int sequence_of_row(const gdn_sequences &s, int64_t row) {
  if (s.cu_seqlens == nullptr) return static_cast<int>(row / s.tokens_per_seq);
  const int lane = threadIdx.x % 32;
  int low = 0, high = s.num_seqs;
  while (high - low > 1) {
    const int step = (high - low + 31) / 32, candidate = low + lane * step;
    const bool begins = candidate < high && s.cu_seqlens[candidate] <= row;
    low += (__popc(__ballot_sync(0xffffffffu, begins)) - 1) * step;
    high = min(high, low + step);
  }
  return low;
}

template <typename T>
__device__ __forceinline__ const T *heads_at(const gdn_heads &x, int n, int64_t token, int head) {
  return static_cast<const T *>(x.ptr) + n * x.seq_stride + token * x.token_stride + head * x.head_stride;
}

template <typename T>
__device__ __forceinline__ T *out_heads_at(const gdn_heads &x, int n, int64_t token, int head) {
  return const_cast<T *>(heads_at<T>(x, n, token, head));
}

__device__ __forceinline__ int64_t heads_offset(const gdn_heads &x, int n, int64_t token, int head) {
  return n * x.seq_stride + token * x.token_stride + head * x.head_stride;
}

// The slot of sequence n, or -1 for padding.
__device__ __forceinline__ int64_t slot_of(const gdn_slots &s, int n) {
  const int64_t slot = s.slots == nullptr ? static_cast<int64_t>(n) : static_cast<int64_t>(s.slots[n]);
  return slot < s.num_slots ? slot : -1;
}

}  // namespace gdn
