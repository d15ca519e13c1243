// has_sm90_code: asks a kernel that was compiled as all the others were.
#include "launch.cuh"

namespace gdn {
namespace {
__global__ void probe_kernel() {}
}  // namespace

int has_sm90_code(bool *yes) {
  static PerDevice known;
  int version = 0;
  const int status = known.get(&version, [](int, int *v) {
    cudaFuncAttributes attributes;
    const cudaError_t e = cudaFuncGetAttributes(&attributes, reinterpret_cast<const void *>(probe_kernel));
    if (e == cudaSuccess) *v = attributes.ptxVersion;
    return e;
  });
  *yes = status == GDN_OK && version >= 90;
  return status;
}

}  // namespace gdn
