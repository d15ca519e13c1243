// Host side: questions to the current device, and the end of a launch.
#pragma once

#include <cuda_runtime.h>
#include <limits.h>

#include <atomic>

#include "checks.h"

namespace gdn {

inline int cuda_status(cudaError_t e) { return e == cudaSuccess ? GDN_OK : GDN_CUDA_ERROR + static_cast<int>(e); }

// A fact that never changes for a device, by its ordinal: asked once, whoever asks. Races write the same value.
struct PerDevice {
  static constexpr int kDevices = 64;
  std::atomic<int> known[kDevices];    // value + 1; 0 until it was asked

  // ask(device, &value) is a cudaError_t.
  template <typename Ask> int get(int *value, Ask &&ask) {
    int device = 0;
    if (const cudaError_t e = cudaGetDevice(&device)) return cuda_status(e);
    const bool fits = device >= 0 && device < kDevices;
    if (const int k = fits ? known[device].load(std::memory_order_relaxed) : 0) {
      *value = k - 1;
      return GDN_OK;
    }
    const cudaError_t e = ask(device, value);
    if (e == cudaSuccess && fits) known[device].store(*value + 1, std::memory_order_relaxed);
    return cuda_status(e);
  }
};

// What the launchers ask of the current device.
template <cudaDeviceAttr ATTR> int device_attribute(int *value) {
  static PerDevice known;
  return known.get(value, [](int device, int *v) { return cudaDeviceGetAttribute(v, ATTR, device); });
}

inline int sm_count(int *value) { return device_attribute<cudaDevAttrMultiProcessorCount>(value); }

// Bytes of shared memory that a block may have at most. A build with GDN_SHARED_LIMIT caps it, so that a card with more stands in for
// those with less.
#ifndef GDN_SHARED_LIMIT
#define GDN_SHARED_LIMIT INT_MAX
#endif
inline int shared_limit(int *value) {
  const int status = device_attribute<cudaDevAttrMaxSharedMemoryPerBlockOptin>(value);
  if (*value > GDN_SHARED_LIMIT) *value = GDN_SHARED_LIMIT;
  return status;
}

// The same of a multiprocessor, which has 1 KB more on every card.
inline int shared_of_sm(int *value) {
  const int status = device_attribute<cudaDevAttrMaxSharedMemoryPerMultiprocessor>(value);
  constexpr int64_t kMost = int64_t{GDN_SHARED_LIMIT} + 1024;
  if (*value > kMost) *value = static_cast<int>(kMost);
  return status;
}

// Lets `kernel` use more than 48 KB of dynamic shared memory on the current device. The limit set is always the
// device's own: were it the size of this launch, a thread that launches a smaller shape could lower it between
// another thread's call of this and its launch.
constexpr int64_t kAlwaysAllowed = 48 * 1024;
template <typename Kernel> int allow_shared_memory(Kernel *kernel, int64_t bytes, int optin) {
  if (bytes <= kAlwaysAllowed) return GDN_OK;
  return cuda_status(cudaFuncSetAttribute(reinterpret_cast<const void *>(kernel),
                                          cudaFuncAttributeMaxDynamicSharedMemorySize, optin));
}

}  // namespace gdn
