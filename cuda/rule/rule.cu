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

}  // namespace
}  // namespace gdn

extern "C" int gdn_rule(const gdn_rule_params *params, cudaStream_t stream) {
  using namespace gdn;
  if (!params) return GDN_NULL_POINTER;
  const gdn_rule_params &p = *params;
  if (const int status = check(p)) return status;
  const int32_t tokens = max_tokens(p.seqs);
  if (p.seqs.num_seqs == 0) return GDN_OK;
  if (tokens == 0 && state_in_place(p.state_in, p.state_out, p.in_slots, p.out_slots)) return GDN_OK;
  if (any_null(p)) return GDN_NULL_POINTER;

  switch (p.algo) {
    case GDN_RECURRENT: return launch_recurrent(p, stream);
    case GDN_RECURRENT_128: return recurrent_128_takes(p) ? launch_recurrent_128(p, stream) : GDN_BAD_ALGO;
    case GDN_CHUNKED: return launch_chunked(p, stream);
  }
  // In f32 the chunk form does no less arithmetic than the recurrence, and it is slower at every size measured: see the
  // ladders in ../recurrent and ../chunked. It waits here for a shape or a rung where it wins.
  if (recurrent_128_takes(p)) return launch_recurrent_128(p, stream);
  return launch_recurrent(p, stream);
}
