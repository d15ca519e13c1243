// A CUDA runtime without a device: it answers the launchers' questions as a card would, and counts launches instead of running them.
// A launch with more dynamic shared memory than the card has, or than its kernel was allowed, fails as on a card.
#include <cuda_runtime_api.h>
#include <stddef.h>
#include <string.h>

enum { kMost = 4096, kAlways = 48 * 1024 };
static int limit, sms, version, launches;
static struct { const void *kernel; int bytes; } allowed[kMost];
static int count;

void fake_card(int shared_limit, int multiprocessors, int ptx_version) { limit = shared_limit, sms = multiprocessors, version = ptx_version; }
int fake_launches(void) { return launches; }

static int *allowed_of(const void *kernel) {
  for (int i = 0; i < count; ++i)
    if (allowed[i].kernel == kernel) return &allowed[i].bytes;
  if (count == kMost) return NULL;
  allowed[count].kernel = kernel;
  allowed[count].bytes = kAlways;
  return &allowed[count++].bytes;
}

cudaError_t cudaGetDevice(int *device) { return *device = 0, cudaSuccess; }
cudaError_t cudaGetLastError(void) { return cudaSuccess; }
const char *cudaGetErrorString(cudaError_t e) { return e == cudaSuccess ? "success" : "error"; }
cudaError_t cudaMemsetAsync_ptsz(void *p, int v, size_t n, cudaStream_t s) { return (void)p, (void)v, (void)n, (void)s, cudaSuccess; }
cudaError_t cudaMemset2DAsync_ptsz(void *p, size_t pitch, int v, size_t width, size_t height, cudaStream_t s) {
  return (void)p, (void)pitch, (void)v, (void)width, (void)height, (void)s, cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
  (void)device;
  switch (attribute) {
    case cudaDevAttrMultiProcessorCount: *value = sms; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = limit; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = limit + 1024; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = 1536; break;
    case cudaDevAttrComputeCapabilityMajor: *value = version / 10; break;
    default: return cudaErrorInvalidValue;    // a new question needs an answer here
  }
  return cudaSuccess;
}
cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *of, const void *kernel) {
  (void)kernel;
  memset(of, 0, sizeof(*of));
  of->ptxVersion = version;
  of->maxThreadsPerBlock = 128;
  return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void *kernel, enum cudaFuncAttribute attribute, int value) {
  int *bytes = allowed_of(kernel);
  if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize || !bytes || value > limit) return cudaErrorInvalidValue;
  return *bytes = value, cudaSuccess;
}
cudaError_t cudaLaunchKernelExC_ptsz(const cudaLaunchConfig_t *config, const void *kernel, void **args) {
  (void)args;
  const int *bytes = allowed_of(kernel);
  const unsigned threads = config->blockDim.x * config->blockDim.y * config->blockDim.z;
  const int fits = bytes && config->dynamicSmemBytes <= (size_t)*bytes && threads > 0 && threads <= 1024 && config->gridDim.x > 0 &&
                   config->gridDim.y > 0 && config->gridDim.y < 65536 && config->gridDim.z > 0 && config->gridDim.z < 65536;
  launches += fits;
  return fits ? cudaSuccess : cudaErrorInvalidValue;
}
cudaError_t cudaOccupancyMaxActiveClusters(int *clusters, const void *kernel, const cudaLaunchConfig_t *config) {
  (void)kernel;
  return *clusters = sms / (int)config->gridDim.x, cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *kernel, int threads, size_t bytes) {
  (void)kernel, (void)threads;
  return *blocks = bytes <= (size_t)limit, cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *kernel, int threads, size_t bytes, unsigned flags) {
  (void)flags;
  return cudaOccupancyMaxActiveBlocksPerMultiprocessor(blocks, kernel, threads, bytes);
}
cudaError_t cudaGetDriverEntryPointByVersion_ptsz(const char *name, void **f, unsigned v, unsigned long long flags, void *found) {
  (void)name, (void)f, (void)v, (void)flags, (void)found;
  return cudaErrorNotSupported;
}

// What nvcc's host code calls when a library is loaded.
void **__cudaRegisterFatBinary(void *binary) {
  static void *handle;
  return (void)binary, &handle;
}
void __cudaRegisterFatBinaryEnd(void **handle) { (void)handle; }
char __cudaInitModule(void **handle) { return (void)handle, 1; }
void __cudaUnregisterFatBinary(void **handle) { (void)handle; }
void __cudaRegisterFunction(void **handle, const char *host, char *device, const char *name, int limit_, void *a, void *b, void *c, void *d, int *e) {
  (void)handle, (void)host, (void)device, (void)name, (void)limit_, (void)a, (void)b, (void)c, (void)d, (void)e;
}
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t bytes, void *stream) { return (void)grid, (void)block, (void)bytes, (void)stream, 0; }
cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *bytes, void *stream) { return (void)grid, (void)block, (void)bytes, (void)stream, cudaErrorNotSupported; }
cudaError_t __cudaGetKernel(void **kernel, const void *f) { return (void)kernel, (void)f, cudaErrorNotSupported; }
cudaError_t __cudaLaunchKernel_ptsz(void *kernel, dim3 grid, dim3 block, void **args, size_t bytes, void *stream) {
  return (void)kernel, (void)grid, (void)block, (void)args, (void)bytes, (void)stream, cudaErrorNotSupported;
}
