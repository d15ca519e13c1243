// GDN_CHUNKED: one translation unit an input type, so that they compile side by side.
#include "../common/host.cuh"
#include "chunked.h"

int gdn::launch_chunked(const gdn_rule_params &p, cudaStream_t stream) {
  switch (p.io_dtype) {
    case GDN_F32: return launch_chunked_f32(p, stream);
    case GDN_BF16: return launch_chunked_bf16(p, stream);
    case GDN_F16: return launch_chunked_f16(p, stream);
  }
  return GDN_BAD_DTYPE;
}
