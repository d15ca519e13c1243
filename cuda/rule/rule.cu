// gdn_rule: checks the parameters and chooses the kernel, from sizes the host knows.
#include "../common/host.cuh"
#include "decode.h"
#include "../chunk/chunk.h"
#include "recurrent.h"

namespace gdn {
namespace {

int64_t dense_head(const gdn_rule_params &p) { return static_cast<int64_t>(p.common.head_v) * p.common.head_k; }

int check(const gdn_rule_params &p) {
  if (const int status = check_common(p.common)) return status;
  if (!valid_dtype(p.dt_bias_dtype) || (p.gates != GDN_GATES_RAW && p.gates != GDN_GATES_READY)) return GDN_BAD_DTYPE;
  if (p.algo < GDN_AUTO || p.algo > GDN_CHUNKED_SM90) return GDN_BAD_ALGO;
  if (p.segments < 0 || (p.common.seqs.cu_seqlens && p.common.seqs.total_tokens < 0)) return GDN_BAD_LENGTH;
  for (const gdn_heads *x : {&p.q, &p.k, &p.v, &p.o})
    if (!valid_strides(*x)) return GDN_BAD_STRIDE;
  // Heads that overlap would be written by several blocks.
  return p.head_stride != 0 && p.head_stride < dense_head(p) ? GDN_BAD_STRIDE : GDN_OK;
}

// Without the extras that only GDN_RECURRENT supports, but for null states.
bool plain(const gdn_rule_params &p) {
  return !p.counts && p.common.state_dtype != GDN_F16 && p.gates == GDN_GATES_RAW && p.dt_bias_dtype == GDN_F32 &&
         (p.head_stride == 0 || p.head_stride == dense_head(p));
}

bool both_states(const gdn_rule_params &p) { return p.common.state_in && p.common.state_out; }

bool any_null(const gdn_rule_params &p) {
  const gdn_common &c = p.common;
  if (p.gates == GDN_GATES_RAW && (!c.a_log || !c.dt_bias)) return true;
  return max_tokens(c.seqs) > 0 && (!p.q.ptr || !p.k.ptr || !p.v.ptr || !c.a.ptr || !c.b.ptr || !p.o.ptr);
}

// From so many tokens on the chunk form is faster than the recurrence (README.md).
constexpr int32_t kChunked90Tokens = 12, kChunked80Tokens = 24;

// The kernel that runs for checked parameters: the one asked for, or the best that takes them, by measured bounds
// (README.md). GDN_AUTO when the one asked for does not take them. `any`: whether it may be another than GDN_RECURRENT.
int choose(const gdn_rule_params &p, bool any, int32_t *algo) {
  const bool supported[] = {true,
                        true,
                        any && recurrent_128_supports(p),
                        any && decode_128_supports(p),
                        any && chunked_sm80_supports(p),
                        any && chunked_sm90_supports(p)};
  *algo = supported[p.algo] ? p.algo : GDN_AUTO;
  if (p.algo != GDN_AUTO) return GDN_OK;
  int sms = 0;
  if (const int status = sm_count(&sms)) return status;
  // Several tokens of few heads leave the decode kernel's few blocks with a long chain of them; the recurrent one divides a
  // head over more.
  const int32_t tokens = max_tokens(p.common.seqs);
  const bool several = tokens <= 8 && static_cast<int64_t>(p.common.seqs.num_seqs) * p.common.num_v_heads > sms;
  *algo = supported[GDN_DECODE_128] && (tokens <= 1 || several) ? GDN_DECODE_128
          : tokens >= kChunked90Tokens && supported[GDN_CHUNKED_SM90] ? GDN_CHUNKED_SM90
          : tokens >= kChunked80Tokens && supported[GDN_CHUNKED_SM80] ? GDN_CHUNKED_SM80
          : supported[GDN_RECURRENT_128]                        ? GDN_RECURRENT_128
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
  const int32_t tokens = max_tokens(p.common.seqs);
  if (p.common.seqs.num_seqs == 0) return GDN_OK;
  if (tokens == 0 && state_in_place(p.common)) return GDN_OK;
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
