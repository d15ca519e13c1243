// has_sm90_code, has_sm90a_code: ask kernels that were compiled as all the others were.
#include "launch.cuh"

namespace gdn {
namespace {
__global__ void probe_kernel() {}

// The host reads from its bound whether the device's code has the instructions of sm_90a.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
__global__ void __launch_bounds__(256) probe_sm90a_kernel() {}
#else
__global__ void __launch_bounds__(128) probe_sm90a_kernel() {}
#endif
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

int has_sm90a_code(bool *yes) {
  static PerDevice known;
  int threads = 0;
  const int status = known.get(&threads, [](int, int *v) {
    cudaFuncAttributes attributes;
    const cudaError_t e = cudaFuncGetAttributes(&attributes, reinterpret_cast<const void *>(probe_sm90a_kernel));
    if (e == cudaSuccess) *v = attributes.maxThreadsPerBlock;
    return e;
  });
  *yes = status == GDN_OK && threads == 256;
  return status;
}

}  // namespace gdn
