// Launches, also of clusters, and those that overlap the kernel before them. A launch returns its own error; plain <<<>>> only
// leaves it to cudaGetLastError(), which may also return the error of an unrelated earlier call.
#pragma once

#include <cuda_runtime.h>

#include <utility>

#include "host.cuh"

namespace gdn {

struct LaunchConfig {
  dim3 grid, block;
  int64_t shared_bytes = 0;  // dynamic
  cudaStream_t stream = nullptr;
  bool overlap = false;      // begin while the kernel before it runs, where the device can
  int cluster = 1;           // blocks a cluster, along x; more than one: sm_90 and later
};

// Whether the machine code that the current device runs was compiled for sm_90 or later: with the wait of
// ptx::grid_dependency_wait(), and with clusters.
//
// NOTES: not a question of the device alone. Where a newer one runs code translated from the PTX of an older
// architecture none of that is in it, and an overlapping launch would read its inputs before they are written.
int has_sm90_code(bool *yes);

// Whether it has the instructions that only sm_90a has: wgmma and setmaxnreg.
int has_sm90a_code(bool *yes);

// All that the choosers know of the current device.
inline int current_device(Device *d) {
  if (const int status = sm_count(&d->sms)) return status;
  if (const int status = shared_limit(&d->shared_bytes)) return status;
  if (const int status = has_sm90_code(&d->sm90)) return status;
  return has_sm90a_code(&d->sm90a);
}

// The percentage of a multiprocessor's memory that overlapping launches prefer as shared memory, or more where their blocks need more. The rest
// is L1, where loads of weights need room while they are under way.
//
// NOTES: launches that overlap seldom leave a multiprocessor empty, and only then does it seem to change its split of L1 and shared memory.
// So a kernel with much shared memory decides for the kernels beside it, unless all prefer the same split (README.md).
constexpr int kCarveout = 50;

// The carveout that this launch prefers: room for all its blocks on a multiprocessor. Negative where they do not fit at once, or where
// the query fails; then the driver decides.
template <typename... P> int preferred_carveout(void (*kernel)(P...), const LaunchConfig &config) {
  int sms = 0, shared = 0, threads = 0;
  cudaFuncAttributes of = {};
  if (sm_count(&sms) || shared_of_sm(&shared) ||
      device_attribute<cudaDevAttrMaxThreadsPerMultiProcessor>(&threads) ||
      cudaFuncGetAttributes(&of, reinterpret_cast<const void *>(kernel))) {
    cudaGetLastError();    // the launch goes on without
    return -1;
  }
  const auto volume = [](const dim3 &d) { return int64_t{d.x} * d.y * d.z; };
  const int64_t share = ceil_div(volume(config.grid), sms), room = threads / volume(config.block);
  const int64_t bytes = static_cast<int64_t>(of.sharedSizeBytes) + config.shared_bytes + 1024;    // 1 KB a block is the system's
  const int64_t needed = ceil_div((share < room ? share : room) * bytes * 100, shared);
  return needed > 100 ? -1 : needed > kCarveout ? static_cast<int>(needed) : kCarveout;
}

// Launches `kernel`; returns a gdn_status. Can be captured in a graph: programmatic edges become edges of the graph.
template <typename... P, typename... A>
int launch(void (*kernel)(P...), const LaunchConfig &config, A &&...args) {
  cudaLaunchConfig_t c = {};
  c.gridDim = config.grid;
  c.blockDim = config.block;
  c.dynamicSmemBytes = static_cast<size_t>(config.shared_bytes);
  c.stream = config.stream;
  cudaLaunchAttribute attributes[3];
  c.attrs = attributes;
  if (config.overlap) {
    bool yes = false;
    if (const int status = has_sm90_code(&yes)) return status;
    if (yes) {
      attributes[c.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
      attributes[c.numAttrs++].val.programmaticStreamSerializationAllowed = 1;
      if (const int carveout = preferred_carveout(kernel, config); carveout >= 0) {
        attributes[c.numAttrs].id = cudaLaunchAttributePreferredSharedMemoryCarveout;
        attributes[c.numAttrs++].val.sharedMemCarveout = static_cast<unsigned>(carveout);
      }
    }
  }
  if (config.cluster > 1) {
    attributes[c.numAttrs].id = cudaLaunchAttributeClusterDimension;
    attributes[c.numAttrs].val.clusterDim.x = static_cast<unsigned>(config.cluster);
    attributes[c.numAttrs].val.clusterDim.y = 1;
    attributes[c.numAttrs++].val.clusterDim.z = 1;
  }
  const cudaError_t e = cudaLaunchKernelEx(&c, kernel, std::forward<A>(args)...);
  if (e != cudaSuccess) cudaGetLastError();  // reported here, and not again by the next launch
  return cuda_status(e);
}

// The same for a kernel that may need more than 48 KB of dynamic shared memory, which it must be allowed first: once a
// device and not at every launch. A context that was destroyed and created again has lost it; then the launch fails and repeats it.
template <auto *KERNEL, typename... A> int launch_allowed(const LaunchConfig &config, int optin, A &&...args) {
  static PerDevice allowed;
  const auto allow = [&] { return allow_shared_memory(KERNEL, config.shared_bytes, optin); };
  if (config.shared_bytes > kAlwaysAllowed) {
    int known = 0;
    if (const int status = allowed.get(&known, [&](int, int *v) {
          *v = 1;
          return static_cast<cudaError_t>(allow() ? cudaErrorInvalidValue : cudaSuccess);
        }))
      return status;
  }
  const int status = launch(KERNEL, config, args...);
  if (status != GDN_CUDA_ERROR + cudaErrorInvalidValue || config.shared_bytes <= kAlwaysAllowed) return status;
  if (const int again = allow()) return again;
  return launch(KERNEL, config, args...);
}

}  // namespace gdn
