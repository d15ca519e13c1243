// gdn_rule_backward: checks the parameters and launches what ../plan.h chooses.
#include "../common/launch.cuh"
#include "../plan.h"
#include "cut.h"
#include "rule.h"

namespace gdn {
namespace {

int check(const gdn_rule_backward_params &p) {
  if (const int status = check_common(p.common)) return status;
  if (p.common.gate_dtype != GDN_F32 || p.common.state_dtype != GDN_F32) return GDN_BAD_DTYPE;
  if (p.algo < GDN_AUTO || p.algo > GDN_CHUNKED_SM90) return GDN_BAD_ALGO;
  if (p.segments < 0 || p.segments > backward::kMostSegments || (p.common.seqs.cu_seqlens && p.common.seqs.total_tokens < 0)) return GDN_BAD_LENGTH;
  for (const gdn_heads *x : {&p.q, &p.k, &p.v, &p.d_o, &p.d_q, &p.d_k, &p.d_v, &p.d_log_decay, &p.d_beta})
    if (!valid_strides(*x)) return GDN_BAD_STRIDE;
  return GDN_OK;
}

bool any_null(const gdn_rule_backward_params &p) {
  if (max_tokens(p.common.seqs) == 0) return false;
  for (const gdn_heads *x :
       {&p.q, &p.k, &p.v, &p.common.a, &p.common.b, &p.d_o, &p.d_q, &p.d_k, &p.d_v, &p.d_log_decay, &p.d_beta})
    if (!x->ptr) return true;
  return false;
}

int choose(const gdn_rule_backward_params &p, int32_t *algo) {
  Device device = {};
  if (const int status = current_device(&device)) return status;
  *algo = plan::rule_backward_algo(p, device);
  return *algo == GDN_AUTO ? GDN_BAD_ALGO : GDN_OK;
}

}  // namespace
}  // namespace gdn

extern "C" int gdn_rule_backward_choice(const gdn_rule_backward_params *params, int32_t *algo) {
  using namespace gdn;
  if (!params || !algo) return GDN_NULL_POINTER;
  if (const int status = check(*params)) return status;
  return choose(*params, algo);
}

extern "C" int gdn_rule_backward_workspace(const gdn_rule_backward_params *params, int64_t *bytes) {
  using namespace gdn;
  if (!params || !bytes) return GDN_NULL_POINTER;
  if (const int status = check(*params)) return status;
  int32_t algo = GDN_AUTO;
  if (const int status = choose(*params, &algo)) return status;
  if (algo != GDN_RECURRENT) return chunked_backward_workspace(*params, algo == GDN_CHUNKED_SM90, bytes);
  *bytes = recurrent_backward_workspace(*params);
  return GDN_OK;
}

extern "C" int gdn_rule_backward(const gdn_rule_backward_params *params, cudaStream_t stream) {
  using namespace gdn;
  if (!params) return GDN_NULL_POINTER;
  const gdn_rule_backward_params &p = *params;
  if (const int status = check(p)) return status;
  if (p.common.seqs.num_seqs == 0) return GDN_OK;
  if (any_null(p)) return GDN_NULL_POINTER;

  int32_t algo = GDN_AUTO;
  if (const int status = choose(p, &algo)) return status;
  return algo == GDN_RECURRENT ? launch_recurrent_backward(p, stream) : launch_chunked_backward(p, algo == GDN_CHUNKED_SM90, stream);
}
