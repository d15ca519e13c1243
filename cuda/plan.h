// Which kernel runs for which sizes, of all families but linear: pure functions of the parameters and of the device, without
// CUDA's headers, tested as tables on any machine (tests/plan_test.cpp).
//
// The choice is made here, since callers of the C ABI get GDN_AUTO from it too; what Rust chooses (src/plan.rs) is between ops, and
// it repeats the sizes that it needs for that and for its messages. All bounds were measured; each family's README.md has the times.
#pragma once

#include "common/checks.h"

namespace gdn {
namespace plan {

constexpr int64_t kMaxOffset = 0xffffffffLL;    // of kernels whose offsets have 32 bits

// Value heads of all sequences.
inline int64_t heads_of(const gdn_common &p) { return static_cast<int64_t>(p.seqs.num_seqs) * p.num_v_heads; }
inline int ratio_of(const gdn_common &p) { return p.num_v_heads / p.num_k_heads; }
inline bool one_token(const gdn_sequences &s) { return !s.cu_seqlens && s.tokens_per_seq == 1; }

// Whether all offsets of a tensor [sequence, head, dim] fit in 32 bits.
inline bool short_offsets(const gdn_heads &x, int64_t seqs, int64_t heads, int64_t dim) {
  return x.seq_stride <= kMaxOffset && x.head_stride <= kMaxOffset &&
         x.seq_stride * (seqs - 1) + x.head_stride * (heads - 1) + dim <= kMaxOffset;
}

// The same for what the rule and the step have in common; gates in the inputs' type or in f32.
inline bool short_offsets(const gdn_common &p) {
  for (const gdn_slots *s : {&p.in_slots, &p.out_slots})
    if (s->slot_stride > kMaxOffset || s->num_slots > kMaxOffset) return false;
  return short_offsets(p.a, p.seqs.num_seqs, p.num_v_heads, 1) && short_offsets(p.b, p.seqs.num_seqs, p.num_v_heads, 1) &&
         p.seqs.num_seqs <= 65535 && p.num_v_heads <= 65535 && (p.gate_dtype == p.io_dtype || p.gate_dtype == GDN_F32);
}

// ---- gdn_rule ----

// Head sizes of gdn_step and of the ring, and of GDN_DECODE for several tokens.
inline bool step_dims(int32_t k, int32_t v) { return (k == 128 && v == 128) || (k == 96 && v == 192); }

// Head sizes of GDN_DECODE for one token. All its blocks have 4, 8, 16 or 32 value rows.
inline bool decode_dims(int32_t k, int32_t v) { return (k == 64 || k == 96 || k == 128 || k == 192 || k == 256) && v % 32 == 0; }

// Without the extras that only GDN_RECURRENT supports, but for those that the chunk forms support too. States that are null are asked
// for apart: a workspace may be sized before they are known.
inline bool without_extras(const gdn_rule_params &p) {
  const int64_t dense_head = static_cast<int64_t>(p.common.head_v) * p.common.head_k;
  return !p.counts && p.common.state_dtype != GDN_F16 && p.dt_bias_dtype == GDN_F32 &&
         (p.head_stride == 0 || p.head_stride == dense_head);
}

inline bool recurrent_128_supports(const gdn_rule_params &p) {
  return p.common.head_k == 128 && p.common.head_v == 128 && aligned_state(p.common, 4) && aligned_rows(p.q, 4, p.common.io_dtype) &&
         aligned_rows(p.k, 4, p.common.io_dtype);
}

inline bool decode_supports(const gdn_rule_params &p) {
  const gdn_common &c = p.common;
  const int64_t n = c.seqs.num_seqs;
  const auto short_rows = [&] {
    return short_offsets(c) && short_offsets(p.q, n, c.num_k_heads, c.head_k) && short_offsets(p.k, n, c.num_k_heads, c.head_k) &&
           short_offsets(p.v, n, c.num_v_heads, c.head_v) && short_offsets(p.o, n, c.num_v_heads, c.head_v);
  };
  const bool fits = one_token(c.seqs) ? decode_dims(c.head_k, c.head_v) && short_rows() : step_dims(c.head_k, c.head_v);
  return fits && max_tokens(c.seqs) <= 16 && n <= 65535 && aligned_state(c, c.state_dtype == GDN_F32 ? 4 : 8) &&
         aligned_rows(p.q, 8, c.io_dtype) && aligned_rows(p.k, 8, c.io_dtype) && aligned_rows(p.v, 4, c.io_dtype);
}

inline bool chunked_sm80_supports(const gdn_rule_params &p) {
  const gdn_common &c = p.common;
  for (const gdn_heads *x : {&p.q, &p.k, &p.v, &p.o})
    if (!aligned_rows(*x, 8, c.io_dtype)) return false;
  return (c.io_dtype == GDN_BF16 || c.io_dtype == GDN_F16) && c.head_k <= 128 && c.head_k % 8 == 0 && c.head_v % 8 == 0 && aligned_state(c, 4);
}

// Whether a tensor map can describe it: no dimension of more than one element is repeated by a stride of zero. One without tokens
// is never read.
inline bool has_map(const gdn_heads &x, int32_t heads, const gdn_sequences &s) {
  const bool packed = s.cu_seqlens != nullptr;
  const int32_t tokens = packed ? s.total_tokens : s.tokens_per_seq;
  return tokens == 0 || ((heads == 1 || x.head_stride > 0) && (tokens <= 1 || x.token_stride > 0) &&
                         (packed || s.num_seqs <= 1 || x.seq_stride > 0));
}

inline bool chunked_sm90_supports(const gdn_rule_params &p, const Device &d) {
  const gdn_common &c = p.common;
  return d.sm90a && has_map(p.q, c.num_k_heads, c.seqs) && has_map(p.k, c.num_k_heads, c.seqs) && has_map(p.v, c.num_v_heads, c.seqs) &&
         has_map(p.o, c.num_v_heads, c.seqs) && chunked_sm80_supports(p);
}

// From so many tokens on the chunk form is faster than the recurrence.
constexpr int32_t kChunked90Tokens = 10, kChunked80Tokens = 24;

// The kernel for checked parameters: the requested one, or the best that supports them. GDN_AUTO: the requested one does not.
// `null_states`: a state that is null counts. Only GDN_RECURRENT supports one; the chunk forms support no state_in, and ready gates.
inline int32_t rule_algo(const gdn_rule_params &p, bool null_states, const Device &d) {
  const bool chunked = without_extras(p) && !(null_states && !p.common.state_out);
  const bool any = chunked && p.gates == GDN_GATES_RAW && !(null_states && !p.common.state_in);
  const bool supported[] = {true,
                            true,
                            any && recurrent_128_supports(p),
                            any && decode_supports(p),
                            chunked && chunked_sm80_supports(p),
                            chunked && chunked_sm90_supports(p, d)};
  if (p.algo != GDN_AUTO) return supported[p.algo] ? p.algo : GDN_AUTO;
  // Several tokens of few heads leave the decode kernel's few blocks with a long chain of them; the recurrent one divides a
  // head over more, but it is slower with guards, as for K 96 and V 192.
  const int32_t tokens = max_tokens(p.common.seqs);
  const int64_t heads = heads_of(p.common);
  const bool several = supported[GDN_RECURRENT_128] ? tokens <= 8 && heads > d.sms : heads > d.sms / 2;
  return supported[GDN_DECODE] && tokens <= 1                        ? GDN_DECODE
         : tokens >= kChunked90Tokens && supported[GDN_CHUNKED_SM90] ? GDN_CHUNKED_SM90
         : tokens >= kChunked80Tokens && supported[GDN_CHUNKED_SM80] ? GDN_CHUNKED_SM80
         : supported[GDN_DECODE] && several                          ? GDN_DECODE
         : supported[GDN_RECURRENT_128]                              ? GDN_RECURRENT_128
                                                                     : GDN_RECURRENT;
}

// ---- gdn_rule_backward ----

inline bool chunked_backward_supports(const gdn_rule_backward_params &p) {
  const gdn_common &c = p.common;
  for (const gdn_heads *x : {&p.q, &p.k, &p.v, &p.d_o, &p.d_q, &p.d_k, &p.d_v})
    if (!aligned_rows(*x, 8, c.io_dtype)) return false;
  return (c.io_dtype == GDN_BF16 || c.io_dtype == GDN_F16) && c.head_k <= 128 && c.head_k % 8 == 0 && c.head_v % 8 == 0 &&
         aligned(c.state_in, 8) && aligned(p.d_state_out, 8) && aligned(p.d_state_in, 16);
}

// As rule_algo().
inline int32_t rule_backward_algo(const gdn_rule_backward_params &p, const Device &d) {
  const gdn_common &c = p.common;
  const bool chunked = chunked_backward_supports(p), has_maps = has_map(p.q, c.num_k_heads, c.seqs) && has_map(p.k, c.num_k_heads, c.seqs) &&
                       has_map(p.v, c.num_v_heads, c.seqs) && has_map(p.d_o, c.num_v_heads, c.seqs) && has_map(p.d_v, c.num_v_heads, c.seqs) &&
                       has_map(p.d_q, c.num_k_heads, c.seqs) && has_map(p.d_k, c.num_k_heads, c.seqs);
  const bool chunked90 = chunked && d.sm90a && has_maps;
  if (p.algo == GDN_AUTO) return chunked90 ? GDN_CHUNKED_SM90 : chunked ? GDN_CHUNKED_SM80 : GDN_RECURRENT;
  const bool supported =
      p.algo == GDN_RECURRENT || (p.algo == GDN_CHUNKED_SM80 && chunked) || (p.algo == GDN_CHUNKED_SM90 && chunked90);
  return supported ? p.algo : GDN_AUTO;
}

// GDN_RECURRENT_128: rows a thread, so 16, 32 or 64 a block: 8, 4 or 2 blocks a head. All stay resident from start to end, so that
// a second wave would double the time: small ones while they leave no multiprocessor idle.
inline int recurrent_rows(int64_t heads, int sms) { return heads <= sms / 8 ? 1 : heads <= sms / 2 ? 2 : 4; }

// GDN_DECODE, one token: rows a lane group and warps a block. Few heads are divided over as many warps as there are rows; with more
// work the rows of a warp share the loads of q and k, but a lane has at most 256 bytes of the state under way.
struct DecodeShape {
  int rows, warps;
};
enum class Work { kFew, kSome, kMany };
constexpr DecodeShape decode_shape(Work work, int32_t state_dtype, int k) {
  if (work == Work::kFew) return {1, 4};
  if (state_dtype == GDN_BF16) return k > 128 ? DecodeShape{2, 2} : DecodeShape{4, 1};
  return work == Work::kSome ? DecodeShape{k > 128 ? 2 : 4, 2} : DecodeShape{k >= 128 ? 2 : 4, 1};
}
inline Work decode_work(const gdn_common &p, int sms) {
  const int64_t heads = heads_of(p) * p.head_k * p.head_v / (128 * 128);    // as many as have the same bytes with K = V = 128
  return heads <= sms * 5 / 4 ? Work::kFew : heads <= sms * 5 / 2 ? Work::kSome : Work::kMany;
}

// ---- gdn_step ----

// What all variants need: sizes, and four neighbouring elements at a time of everything but the states' 16 bytes.
inline bool step_supports(const gdn_step_params &p) {
  const gdn_common &c = p.common;
  const gdn_layer &layer = p.layer;
  const int64_t bytes = 4 * dtype_size(c.io_dtype);
  return step_dims(c.head_k, c.head_v) && layer.conv_width == 4 && c.seqs.num_seqs <= 65535 && max_tokens(c.seqs) <= 16 &&
         aligned_state(c, c.state_dtype == GDN_F32 ? 4 : 8) && aligned_tokens(layer.x, 4, c.io_dtype) &&
         aligned_rows(layer.z, 4, c.io_dtype) && aligned_rows(layer.out, 4, c.io_dtype) && aligned(layer.conv_weight, 16) &&
         aligned(p.conv_in, bytes) && aligned(p.conv_out, bytes) && p.conv_in_stride % 4 == 0 && p.conv_out_stride % 4 == 0;
}

// Whether all offsets of GDN_STEP_SPLIT fit in 32 bits.
inline bool split_offsets_fit(const gdn_step_params &p) {
  const gdn_common &c = p.common;
  const int64_t n = c.seqs.num_seqs, channels = int64_t{2} * c.num_k_heads * c.head_k + int64_t{c.num_v_heads} * c.head_v;
  return short_offsets(c) && short_offsets(p.layer.x, n, 1, channels) && short_offsets(p.layer.z, n, c.num_v_heads, c.head_v) &&
         short_offsets(p.layer.out, n, c.num_v_heads, c.head_v) && p.conv_in_stride <= kMaxOffset && p.conv_out_stride <= kMaxOffset;
}

// Shared memory of a block with `ratio` value heads and tiles of the most bytes (step/whole.cuh): tiles, barrier, tokens.
constexpr int64_t kWholeHeader = 16;
constexpr int64_t whole_tiles(int k) { return 512 * k; }
constexpr int64_t token_floats(int k, int v, int ratio) { return 2 * k + ratio * v + (2 * ratio + 4) / 4 * 4; }
inline int64_t whole_bytes(const gdn_common &p, int ratio) {
  const int64_t tokens = max_tokens(p.seqs) > 1 ? max_tokens(p.seqs) : 1;
  return whole_tiles(p.head_k) + kWholeHeader + tokens * token_floats(p.head_k, p.head_v, ratio) * 4;
}

struct Step {
  int algo = GDN_STEP_AUTO;    // none
  int rows = 1;                // of GDN_STEP_SPLIT, a group of eight lanes
  int depth = 4;               // of GDN_STEP_HEADS
  int blocks = 0;              // a multiprocessor at most, but for GDN_STEP_SPLIT
};

// The variant for checked parameters.
inline Step step(const gdn_step_params &p, const Device &d) {
  Step s;
  if (!step_supports(p)) return s;
  const int ratio = ratio_of(p.common), sms = d.sms;
  const int64_t heads = heads_of(p.common);
  const int splits = p.common.head_v / 32;    // of a value head at most
  s.rows = ratio * splits <= 8 && heads <= (ratio == 1 ? sms / 4 : sms / 2) ? 2 : 4;
  s.depth = heads <= sms * 3 / 2 ? 4 : 2;
  const bool whole = whole_bytes(p.common, ratio) <= d.shared_bytes;
  const bool split = d.sm90 && one_token(p.common.seqs) && ratio * (2 * splits / s.rows) <= 8 && split_offsets_fit(p);
  const bool in_clusters = d.sm90 && ratio > 1 && ratio <= 8 && whole_bytes(p.common, 1) <= d.shared_bytes;

  const bool supported[] = {true, whole, split, in_clusters};
  if (p.algo != GDN_STEP_AUTO) s.algo = supported[p.algo] ? p.algo : GDN_STEP_AUTO;
  else if (split && heads <= (ratio == 1 ? sms * 3 / 4 : sms / 2)) s.algo = GDN_STEP_SPLIT;
  else if (in_clusters && (heads <= (ratio == 2 ? sms * 5 / 4 : sms * 3) || !whole)) s.algo = GDN_STEP_HEADS;
  else if (whole) s.algo = GDN_STEP_WHOLE;
  // Two blocks have enough under way. Where one each is all there is, an overlapping launch must not put several on the
  // multiprocessors that the kernel before it leaves first; but clusters of more than two could not all be placed so.
  const int64_t blocks = s.algo == GDN_STEP_WHOLE ? heads / ratio : heads;
  const bool in_cluster = s.algo == GDN_STEP_HEADS;
  s.blocks = blocks <= sms && !(in_cluster && ratio > 2) ? 1 : in_cluster && blocks > 2 * sms ? 3 : 2;
  return s;
}

// ---- the ring ----

// Sizes and alignments of its kernels.
inline bool ring_supports(const gdn_common &p, const gdn_ring &ring) {
  return step_dims(p.head_k, p.head_v) && aligned_state(p, 16 / dtype_size(p.state_dtype)) && aligned(ring.keys, 16) &&
         aligned(ring.updates, 16) && ring.keys_stride % (16 / dtype_size(p.io_dtype)) == 0 && ring.updates_stride % 4 == 0;
}

// The kernel of gdn_ring_step for checked parameters; GDN_RING_AUTO: none. That of one token reads four channels at a time.
inline int32_t ring_algo(const gdn_ring_step_params &p) {
  const gdn_common &c = p.common;
  const int64_t io = 16 / dtype_size(c.io_dtype);
  if (!ring_supports(c, p.ring) || c.state_in != c.state_out || p.layer.conv_width != 4 || !aligned_tokens(p.layer.x, io, c.io_dtype) ||
      !aligned_rows(p.layer.z, io, c.io_dtype))
    return GDN_RING_AUTO;
  const bool fma = !c.seqs.cu_seqlens && c.seqs.tokens_per_seq <= 1 && aligned(p.layer.conv_weight, 16) &&
                   aligned(p.inputs, 4 * dtype_size(c.io_dtype)) && p.inputs_stride % 4 == 0;
  if (p.algo == GDN_RING_FMA && !fma) return GDN_RING_AUTO;
  return p.algo != GDN_RING_AUTO ? p.algo : fma ? GDN_RING_FMA : GDN_RING_MMA;
}

// ---- the chunk form, beside ./chunk/segments.h ----

// The combination of segments: rows of a block, blocks of a cluster. The fewer heads, the more blocks each, which share the
// columns of a segment's matrix in a cluster.
struct Combine {
  int rows, cluster;
};
inline Combine combine(const gdn_common &p, int64_t slots, const Device &d) {
  const auto blocks = [&](int rows, int cluster) { return ceil_div(p.head_v, rows) * p.num_v_heads * slots * cluster; };
  if (d.sm90 && p.head_k == 128) return blocks(16, 2) <= d.sms ? Combine{16, 2} : blocks(32, 2) <= 2 * d.sms ? Combine{32, 2} : Combine{64, 2};
  return blocks(16, 1) <= d.sms ? Combine{16, 1} : Combine{64, 1};
}

}  // namespace plan
}  // namespace gdn
