// gdn_rule_backward: checks the parameters and launches the kernel.
#include "../common/launch.cuh"
#include "recurrent.cuh"

namespace gdn {
namespace {

int check(const gdn_rule_backward_params &p) {
  if (const int status = check_common(p.common)) return status;
  if (p.common.gate_dtype != GDN_F32 || p.common.state_dtype != GDN_F32) return GDN_BAD_DTYPE;
  if (p.common.seqs.cu_seqlens && p.common.seqs.total_tokens < 0) return GDN_BAD_LENGTH;
  for (const gdn_heads *x : {&p.q, &p.k, &p.v, &p.d_o, &p.d_q, &p.d_k, &p.d_v, &p.d_log_decay, &p.d_beta})
    if (!valid_strides(*x)) return GDN_BAD_STRIDE;
  return p.algo == GDN_AUTO || p.algo == GDN_RECURRENT ? GDN_OK : GDN_BAD_ALGO;
}

}  // namespace
}  // namespace gdn

extern "C" int gdn_rule_backward_choice(const gdn_rule_backward_params *params, int32_t *algo) {
  using namespace gdn;
  if (!params || !algo) return GDN_NULL_POINTER;
  *algo = GDN_RECURRENT;
  return check(*params);
}

extern "C" int gdn_rule_backward_workspace(const gdn_rule_backward_params *params, int64_t *bytes) {
  using namespace gdn;
  if (!params || !bytes) return GDN_NULL_POINTER;
  if (const int status = check(*params)) return status;
  *bytes = recurrent_backward_workspace(*params);
  return GDN_OK;
}

extern "C" int gdn_rule_backward(const gdn_rule_backward_params *params, cudaStream_t stream) {
  using namespace gdn;
  if (!params) return GDN_NULL_POINTER;
  const gdn_rule_backward_params &p = *params;
  if (const int status = check(p)) return status;
  if (p.common.seqs.num_seqs == 0) return GDN_OK;
  if (max_tokens(p.common.seqs) > 0) {
    for (const gdn_heads *x : {&p.common.a, &p.common.b, &p.q, &p.k, &p.v, &p.d_o, &p.d_q, &p.d_k, &p.d_v, &p.d_log_decay, &p.d_beta})
      if (!x->ptr) return GDN_NULL_POINTER;
  }
  return launch_recurrent_backward(p, stream);
}
