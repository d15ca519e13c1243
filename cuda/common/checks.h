// Checks of arguments, without CUDA's headers: plain C++ that the choosers (../plan.h) and their test need.
#pragma once

#include <stdint.h>

#include <initializer_list>

#include "../gdn.h"

namespace gdn {

inline bool valid_dtype(int dtype) { return dtype >= GDN_F32 && dtype <= GDN_F16; }

inline int64_t dtype_size(int dtype) { return dtype == GDN_F32 ? 4 : 2; }

inline bool valid_strides(const gdn_heads &x) {
  return x.seq_stride >= 0 && x.token_stride >= 0 && x.head_stride >= 0;
}

inline bool aligned(const void *p, int64_t bytes) { return reinterpret_cast<uintptr_t>(p) % bytes == 0; }

// Every row of the tensor can be read `n` elements at a time.
inline bool aligned_rows(const gdn_heads &x, int64_t n, int dtype) {
  return aligned(x.ptr, n * dtype_size(dtype)) && x.seq_stride % n == 0 && x.token_stride % n == 0 &&
         x.head_stride % n == 0;
}

// The same for a tensor without heads.
inline bool aligned_tokens(const gdn_heads &x, int64_t n, int dtype) {
  return aligned(x.ptr, n * dtype_size(dtype)) && x.seq_stride % n == 0 && x.token_stride % n == 0;
}

// Rows of states can be read and written `n` elements at a time, when K is a multiple of n.
inline bool aligned_state(const gdn_common &p, int64_t n) {
  const int64_t bytes = n * dtype_size(p.state_dtype);
  return aligned(p.state_in, bytes) && aligned(p.state_out, bytes) && p.in_slots.slot_stride % n == 0 &&
         p.out_slots.slot_stride % n == 0;
}

inline int check_sequences(const gdn_sequences &s) {
  if (s.num_seqs < 0) return GDN_BAD_LENGTH;
  if (s.cu_seqlens ? s.max_tokens_per_seq < 0 : s.tokens_per_seq < 0) return GDN_BAD_LENGTH;
  return GDN_OK;
}

// No sequence is longer than this.
inline int32_t max_tokens(const gdn_sequences &s) { return s.cu_seqlens ? s.max_tokens_per_seq : s.tokens_per_seq; }

inline int check_slots(const gdn_slots &s) {
  if (s.num_slots < 0) return GDN_BAD_LENGTH;
  if (s.slot_stride < 0) return GDN_BAD_STRIDE;
  return GDN_OK;
}

// The checks that gdn_rule, gdn_step and the ring share.
inline int check_common(const gdn_common &p) {
  for (const int32_t dtype : {p.io_dtype, p.gate_dtype, p.state_dtype})
    if (!valid_dtype(dtype)) return GDN_BAD_DTYPE;
  if (p.num_k_heads < 1 || p.num_v_heads < 1 || p.num_v_heads % p.num_k_heads != 0) return GDN_BAD_HEADS;
  if (p.head_k < 1 || p.head_k > 256 || p.head_v < 1 || p.head_v > 256) return GDN_BAD_HEAD_DIM;
  if (const int status = check_sequences(p.seqs)) return status;
  if (const int status = check_slots(p.in_slots)) return status;
  if (const int status = check_slots(p.out_slots)) return status;
  return valid_strides(p.a) && valid_strides(p.b) ? GDN_OK : GDN_BAD_STRIDE;
}

// A sequence without tokens leaves its state where it is, so that nothing is to be copied.
template <typename P> bool state_in_place(const P &p) {
  return p.state_in == p.state_out && p.in_slots.slots == p.out_slots.slots && p.in_slots.slot_stride == p.out_slots.slot_stride;
}

// A workspace of `bytes` bytes, none of which may be needed.
inline int check_workspace(const void *workspace, int64_t given, int64_t bytes) {
  return bytes > 0 && (!workspace || !aligned(workspace, 256) || given < bytes) ? GDN_BAD_WORKSPACE : GDN_OK;
}

// A dimension of a grid that may go past 65535 is its x.
constexpr int64_t kMaxBlocks = 0x7fffffff;

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// What every supported card has at least: bytes of shared memory of a block. Each kernel has a shape for it (static_assert).
constexpr int kLeastShared = 99 * 1024;

// What the choosers know of the current device, and of the machine code that runs on it.
struct Device {
  int sms;             // multiprocessors
  int shared_bytes;    // of a block at most
  bool sm90, sm90a;    // the code was compiled for sm_90 or later (clusters, waits between launches), for sm_90a (wgmma)
};

}  // namespace gdn
