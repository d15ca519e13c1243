// gdn_rule: checks the parameters and chooses the kernel, from sizes the host knows.
#include "../chunked/chunked.h"
#include "../common/host.cuh"
#include "../recurrent/recurrent.h"

namespace gdn {
namespace {

int check(const gdn_rule_params &p) {
  if (!valid_dtype(p.io_dtype) || !valid_dtype(p.gate_dtype)) return GDN_BAD_DTYPE;
  if (p.num_k_heads < 1 || p.num_v_heads < 1 || p.num_v_heads % p.num_k_heads != 0) return GDN_BAD_HEADS;
  if (p.head_k < 1 || p.head_k > 256 || p.head_v < 1 || p.head_v > 256) return GDN_BAD_HEAD_DIM;
  if (p.algo < GDN_AUTO || p.algo > GDN_CHUNKED) return GDN_BAD_ALGO;
  if (const int status = check_sequences(p.seqs)) return status;
  if (const int status = check_slots(p.in_slots)) return status;
  if (const int status = check_slots(p.out_slots)) return status;
  for (const gdn_heads *x : {&p.q, &p.k, &p.v, &p.a, &p.b, &p.o})
    if (!valid_strides(*x)) return GDN_BAD_STRIDE;
  return GDN_OK;
}

bool any_null(const gdn_rule_params &p) {
  if (!p.a_log || !p.dt_bias || !p.state_in || !p.state_out) return true;
  return max_tokens(p.seqs) > 0 && (!p.q.ptr || !p.k.ptr || !p.v.ptr || !p.a.ptr || !p.b.ptr || !p.o.ptr);
}

// The kernel that runs for checked parameters: the one asked for, or the best that takes them. 0 when that one does not.
int choose(const gdn_rule_params &p) {
  if (p.algo == GDN_RECURRENT_128) return recurrent_128_takes(p) ? GDN_RECURRENT_128 : 0;
  if (p.algo != GDN_AUTO) return p.algo;
  // In f32 the chunk form does no less arithmetic than the recurrence, and it is slower at every size measured: see the
  // ladders in ../recurrent and ../chunked. It waits here for a shape or a rung where it wins.
  return recurrent_128_takes(p) ? GDN_RECURRENT_128 : GDN_RECURRENT;
}

}  // namespace
}  // namespace gdn

extern "C" int gdn_rule_choice(const gdn_rule_params *params, int32_t *algo) {
  using namespace gdn;
  if (!params || !algo) return GDN_NULL_POINTER;
  if (const int status = check(*params)) return status;
  *algo = choose(*params);
  return *algo ? GDN_OK : GDN_BAD_ALGO;
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

  switch (choose(p)) {
    case GDN_RECURRENT: return launch_recurrent(p, stream);
    case GDN_RECURRENT_128: return launch_recurrent_128(p, stream);
    case GDN_CHUNKED: return launch_chunked(p, stream);
  }
  return GDN_BAD_ALGO;
}
