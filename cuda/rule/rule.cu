// gdn_rule: checks the parameters and launches what ../plan.h chooses.
#include "../chunk/chunk.h"
#include "../common/launch.cuh"
#include "../plan.h"
#include "rule.h"

namespace gdn {
namespace {

int check(const gdn_rule_params &p) {
  if (const int status = check_common(p.common)) return status;
  if (!valid_dtype(p.dt_bias_dtype) || (p.gates != GDN_GATES_RAW && p.gates != GDN_GATES_READY)) return GDN_BAD_DTYPE;
  if (p.algo < GDN_AUTO || p.algo > GDN_CHUNKED_SM90) return GDN_BAD_ALGO;
  if (p.segments < 0 || (p.common.seqs.cu_seqlens && p.common.seqs.total_tokens < 0)) return GDN_BAD_LENGTH;
  for (const gdn_heads *x : {&p.q, &p.k, &p.v, &p.o})
    if (!valid_strides(*x)) return GDN_BAD_STRIDE;
  // Heads that overlap would be written by several blocks.
  const int64_t dense_head = static_cast<int64_t>(p.common.head_v) * p.common.head_k;
  return p.head_stride != 0 && p.head_stride < dense_head ? GDN_BAD_STRIDE : GDN_OK;
}

bool any_null(const gdn_rule_params &p) {
  const gdn_common &c = p.common;
  if (p.gates == GDN_GATES_RAW && (!c.a_log || !c.dt_bias)) return true;
  return max_tokens(c.seqs) > 0 && (!p.q.ptr || !p.k.ptr || !p.v.ptr || !c.a.ptr || !c.b.ptr || !p.o.ptr);
}

// The kernel that checked parameters get on the current device.
int choose(const gdn_rule_params &p, bool null_states, int32_t *algo) {
  Device device = {};
  if (const int status = current_device(&device)) return status;
  *algo = plan::rule_algo(p, null_states, device);
  return *algo == GDN_AUTO ? GDN_BAD_ALGO : GDN_OK;
}

}  // namespace
}  // namespace gdn

extern "C" int gdn_rule_choice(const gdn_rule_params *params, int32_t *algo) {
  using namespace gdn;
  if (!params || !algo) return GDN_NULL_POINTER;
  if (const int status = check(*params)) return status;
  return choose(*params, true, algo);
}

extern "C" int gdn_rule_workspace(const gdn_rule_params *params, int64_t *bytes) {
  using namespace gdn;
  if (!params || !bytes) return GDN_NULL_POINTER;
  if (const int status = check(*params)) return status;
  int32_t algo = GDN_AUTO;
  if (const int status = choose(*params, false, &algo)) return status;
  *bytes = 0;
  return algo == GDN_CHUNKED_SM80 || algo == GDN_CHUNKED_SM90 ? chunked_workspace(*params, algo, bytes) : GDN_OK;
}

extern "C" int gdn_rule(const gdn_rule_params *params, cudaStream_t stream) {
  using namespace gdn;
  if (!params) return GDN_NULL_POINTER;
  const gdn_rule_params &p = *params;
  if (const int status = check(p)) return status;
  if (p.common.seqs.num_seqs == 0) return GDN_OK;
  if (max_tokens(p.common.seqs) == 0 && state_in_place(p.common)) return GDN_OK;
  if (any_null(p)) return GDN_NULL_POINTER;

  int32_t algo = GDN_AUTO;
  if (const int status = choose(p, true, &algo)) return status;
  switch (algo) {
    case GDN_RECURRENT: return launch_recurrent(p, stream);
    case GDN_RECURRENT_128: return launch_recurrent_128(p, stream);
    case GDN_DECODE: return launch_decode(p, stream);
  }
  return launch_chunked(p, algo, stream);
}
