// Offsets of 32 bits into the tensors of the ABI, for kernels of few tokens.
//
// NOTES: with little work such a kernel lives for some 3 us, of which address arithmetic in 64 bits took a tenth before the
// first load. So it reads the low halves of the ABI's strides, once the launcher has checked that 32 bits are enough.
#pragma once

#include <stdint.h>

#include "../gdn.h"

namespace gdn {
namespace step {

// Sizes that the host derives for a kernel.
struct Sizes {
  uint32_t ratio;            // value heads a key head
  uint32_t inverse_ratio;    // ceil(2^32 / ratio), exact for head * ratio < 2^32; not read for a ratio of 1
  uint32_t keys, channels;   // columns of q (and of k), and of q, k and v

  // The key head of a value head, without a division.
  __device__ __forceinline__ uint32_t key_head(uint32_t head) const { return ratio == 1 ? head : __umulhi(head, inverse_ratio); }
};

inline Sizes sizes_of(const gdn_common &p) {
  const uint32_t ratio = static_cast<uint32_t>(p.num_v_heads / p.num_k_heads), keys = static_cast<uint32_t>(p.num_k_heads * p.head_k);
  return {ratio, static_cast<uint32_t>(((1ull << 32) + ratio - 1) / ratio), keys,
          2 * keys + static_cast<uint32_t>(p.num_v_heads * p.head_v)};
}

// The slot of sequence n; padding from num_slots_of() on.
__device__ __forceinline__ uint32_t slot_number(const gdn_slots &s, uint32_t n) { return s.slots ? s.slots[n] : n; }
__device__ __forceinline__ uint32_t num_slots_of(const gdn_slots &s) { return static_cast<uint32_t>(s.num_slots); }

// Where a slot of a state begins.
template <typename ST> __device__ __forceinline__ const ST *state_at(const void *states, const gdn_slots &s, uint32_t slot) {
  return static_cast<const ST *>(states) + static_cast<uint64_t>(slot) * static_cast<uint32_t>(s.slot_stride);
}

// Element i of head h of a tensor with one token a sequence, all of whose offsets fit.
template <typename T> __device__ __forceinline__ const T *row_at(const gdn_heads &x, uint32_t n, uint32_t h, uint32_t i = 0) {
  return static_cast<const T *>(x.ptr) + (n * static_cast<uint32_t>(x.seq_stride) + h * static_cast<uint32_t>(x.head_stride) + i);
}
template <typename T> __device__ __forceinline__ T *out_row_at(const gdn_heads &x, uint32_t n, uint32_t h, uint32_t i = 0) {
  return const_cast<T *>(row_at<T>(x, n, h, i));
}

}  // namespace step
}  // namespace gdn
