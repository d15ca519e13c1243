// Shared by the kernels of this folder: checks of arguments, addresses in the cache, lengths of sequences.
#pragma once

#include "common/host.cuh"
#include "common/sequences.cuh"
#include "../gdn_attention.h"

namespace gdn {
namespace attention {

// The offset of position 0 of a head, in k and in v.
__device__ __forceinline__ int64_t cache_offset(const gdn_kv_cache &c, int64_t slot, int head) {
  return slot * c.slots.slot_stride + head * c.head_stride;
}

// The most positions of a sequence with a window: sums of them and of lengths fit in 32 bits.
constexpr int kMaxPosition = 1 << 30;

// Tokens in the cache before the new ones, without a window at most its capacity.
template <bool WINDOW> __device__ __forceinline__ int position_of(const gdn_kv_cache &c, const uint32_t *positions, int n) {
  return static_cast<int>(min(positions[n], static_cast<uint32_t>(WINDOW ? kMaxPosition : c.capacity)));
}

inline int check_heads(int heads, int kv_heads, int head_dim) {
  if (heads < 1 || kv_heads < 1 || heads % kv_heads != 0) return GDN_BAD_HEADS;
  return head_dim < 8 || head_dim > 256 || head_dim % 8 != 0 ? GDN_BAD_HEAD_DIM : GDN_OK;
}

// `tokens`: the most new ones of a sequence.
inline int check_cache(const gdn_kv_cache &c, int tokens, int dtype) {
  if (const int status = check_slots(c.slots)) return status;
  if (c.capacity < 0 || c.window < 0 || c.window > kMaxPosition) return GDN_BAD_LENGTH;
  if (c.window > 0 && tokens > c.capacity) return GDN_BAD_LENGTH;
  if (c.head_stride < 0 || c.token_stride < 0) return GDN_BAD_STRIDE;
  const int64_t n = 16 / dtype_size(dtype);
  return aligned(c.k, 16) && aligned(c.v, 16) && c.slots.slot_stride % n == 0 && c.head_stride % n == 0 &&
                 c.token_stride % n == 0
             ? GDN_OK
             : GDN_BAD_ALGO;
}

}  // namespace attention
}  // namespace gdn
