// gdn_conv: checks the parameters and calls the launcher of the input type.
#include "../common/host.cuh"
#include "conv.h"

extern "C" int gdn_conv(const gdn_conv_params *params, cudaStream_t stream) {
  using namespace gdn;
  if (!params) return GDN_NULL_POINTER;
  const gdn_conv_params &p = *params;
  if (!valid_dtype(p.io_dtype) || !valid_dtype(p.weight_dtype)) return GDN_BAD_DTYPE;
  if (p.width < 2 || p.width > 8) return GDN_BAD_CONV_WIDTH;
  if (p.channels < 0) return GDN_BAD_LENGTH;
  if (const int status = check_sequences(p.seqs)) return status;
  if (const int status = check_slots(p.in_slots)) return status;
  if (const int status = check_slots(p.out_slots)) return status;
  for (const gdn_heads *x : {&p.x, &p.y})
    if (x->seq_stride < 0 || x->token_stride < 0) return GDN_BAD_STRIDE;

  const int32_t tokens = max_tokens(p.seqs);
  if (p.seqs.num_seqs == 0 || p.channels == 0) return GDN_OK;
  if (tokens == 0 && state_in_place(p)) return GDN_OK;
  if (!p.weight || !p.state_in || !p.state_out || (tokens > 0 && (!p.x.ptr || !p.y.ptr))) return GDN_NULL_POINTER;

  int sms = 0;
  if (const int status = sm_count(&sms)) return status;
  switch (p.io_dtype) {
    case GDN_F32: return launch_conv_f32(p, sms, stream);
    case GDN_BF16: return launch_conv_bf16(p, sms, stream);
    case GDN_F16: return launch_conv_f16(p, sms, stream);
  }
  return GDN_BAD_DTYPE;
}
