// gdn_rule: checks the parameters and chooses the kernel, from sizes the host knows.
#include "../common/host.cuh"
#include "decode.h"
#include "../chunk/chunk.h"
#include "recurrent.h"

namespace gdn {
namespace {

int64_t dense_head(const gdn_rule_params &p) { return static_cast<int64_t>(p.head_v) * p.head_k; }

int check(const gdn_rule_params &p) {
  for (const int32_t dtype : {p.io_dtype, p.gate_dtype, p.state_dtype, p.dt_bias_dtype})
    if (!valid_dtype(dtype)) return GDN_BAD_DTYPE;
  if (p.gates != GDN_GATES_RAW && p.gates != GDN_GATES_READY) return GDN_BAD_DTYPE;
  if (p.num_k_heads < 1 || p.num_v_heads < 1 || p.num_v_heads % p.num_k_heads != 0) return GDN_BAD_HEADS;
  if (p.head_k < 1 || p.head_k > 256 || p.head_v < 1 || p.head_v > 256) return GDN_BAD_HEAD_DIM;
  if (p.algo < GDN_AUTO || p.algo > GDN_CHUNKED_SM90) return GDN_BAD_ALGO;
  if (p.checkpoints && (p.checkpoint_tokens <= 0 || p.checkpoint_tokens % GDN_CHUNK != 0)) return GDN_BAD_CHECKPOINTS;
  if (p.segments < 0 || (p.seqs.cu_seqlens && p.seqs.total_tokens < 0)) return GDN_BAD_LENGTH;
  if (const int status = check_sequences(p.seqs)) return status;
  if (const int status = check_slots(p.in_slots)) return status;
  if (const int status = check_slots(p.out_slots)) return status;
  for (const gdn_heads *x : {&p.q, &p.k, &p.v, &p.a, &p.b, &p.o})
    if (!valid_strides(*x)) return GDN_BAD_STRIDE;
  // Heads that overlap would be written by several blocks.
  return p.head_stride != 0 && p.head_stride < dense_head(p) ? GDN_BAD_STRIDE : GDN_OK;
}

// What every kernel takes and not GDN_RECURRENT alone. States that are null are beside this.
bool plain(const gdn_rule_params &p) {
  return !p.counts && p.state_dtype != GDN_F16 && p.gates == GDN_GATES_RAW && p.dt_bias_dtype == GDN_F32 &&
         (p.head_stride == 0 || p.head_stride == dense_head(p));
}

bool both_states(const gdn_rule_params &p) { return p.state_in && p.state_out; }

bool any_null(const gdn_rule_params &p) {
  if (p.gates == GDN_GATES_RAW && (!p.a_log || !p.dt_bias)) return true;
  return max_tokens(p.seqs) > 0 && (!p.q.ptr || !p.k.ptr || !p.v.ptr || !p.a.ptr || !p.b.ptr || !p.o.ptr);
}

// From so many tokens on the chunk form is faster than the recurrence (README.md).
constexpr int32_t kChunked90Tokens = 12, kChunked80Tokens = 24;

// The kernel that runs for checked parameters: the one asked for, or the best that takes them, by measured bounds
// (README.md). GDN_AUTO when the one asked for does not take them. `any`: whether it may be another than GDN_RECURRENT.
int choose(const gdn_rule_params &p, bool any, int32_t *algo) {
  const bool takes[] = {true,
                        true,
                        any && recurrent_128_takes(p),
                        any && decode_128_takes(p),
                        any && chunked_sm80_takes(p),
                        any && chunked_sm90_takes(p)};
  *algo = takes[p.algo] ? p.algo : GDN_AUTO;
  if (p.algo != GDN_AUTO) return GDN_OK;
  int sms = 0;
  if (const int status = sm_count(&sms)) return status;
  // Several tokens of few heads leave the decode kernel's few blocks with a long chain of them; the recurrent one divides a
  // head over more.
  const int32_t tokens = max_tokens(p.seqs);
  const bool several = tokens <= 8 && static_cast<int64_t>(p.seqs.num_seqs) * p.num_v_heads > sms;
  *algo = takes[GDN_DECODE_128] && (tokens <= 1 || several) ? GDN_DECODE_128
          : tokens >= kChunked90Tokens && takes[GDN_CHUNKED_SM90] ? GDN_CHUNKED_SM90
          : tokens >= kChunked80Tokens && takes[GDN_CHUNKED_SM80] ? GDN_CHUNKED_SM80
          : takes[GDN_RECURRENT_128]                        ? GDN_RECURRENT_128
                                                            : GDN_RECURRENT;
  return GDN_OK;
}

}  // namespace
}  // namespace gdn

extern "C" int gdn_rule_choice(const gdn_rule_params *params, int32_t *algo) {
  using namespace gdn;
  if (!params || !algo) return GDN_NULL_POINTER;
  if (const int status = check(*params)) return status;
  if (const int status = choose(*params, plain(*params) && both_states(*params), algo)) return status;
  return *algo == GDN_AUTO ? GDN_BAD_ALGO : GDN_OK;
}

extern "C" int gdn_rule_workspace(const gdn_rule_params *params, int64_t *bytes) {
  using namespace gdn;
  if (!params || !bytes) return GDN_NULL_POINTER;
  if (const int status = check(*params)) return status;
  int32_t algo = GDN_AUTO;
  // Pointers that are null may come later.
  if (const int status = choose(*params, plain(*params), &algo)) return status;
  if (algo == GDN_AUTO) return GDN_BAD_ALGO;
  *bytes = 0;
  return algo == GDN_CHUNKED_SM80 || algo == GDN_CHUNKED_SM90 ? chunked_workspace(*params, algo, bytes) : GDN_OK;
}

extern "C" int gdn_rule(const gdn_rule_params *params, cudaStream_t stream) {
  using namespace gdn;
  if (!params) return GDN_NULL_POINTER;
  const gdn_rule_params &p = *params;
  if (const int status = check(p)) return status;
  const int32_t tokens = max_tokens(p.seqs);
  if (p.seqs.num_seqs == 0) return GDN_OK;
  if (tokens == 0 && state_in_place(p.state_in, p.state_out, p.in_slots, p.out_slots)) return GDN_OK;
  if (any_null(p)) return GDN_NULL_POINTER;

  int32_t algo = GDN_AUTO;
  if (const int status = choose(p, plain(p) && both_states(p), &algo)) return status;
  switch (algo) {
    case GDN_RECURRENT: return launch_recurrent(p, stream);
    case GDN_RECURRENT_128: return launch_recurrent_128(p, stream);
    case GDN_DECODE_128: return launch_decode_128(p, stream);
    case GDN_CHUNKED_SM80:
    case GDN_CHUNKED_SM90: return launch_chunked(p, algo, stream);
  }
  return GDN_BAD_ALGO;
}
