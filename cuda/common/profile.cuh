// Clock stamps inside kernels, for builds with -DGDN_PROFILE: a warp divides its life into named scopes and writes one
// record a scope into the buffer of gdn_profile_set. Without GDN_PROFILE everything here is empty and a kernel compiles
// to what it would be without it. See README.md.
#pragma once

#include <stdint.h>

#include "../gdn.h"
#include "convert.cuh"

// What stands in it is there in such builds only.
#ifdef GDN_PROFILE
#define GDN_PROFILED(...) __VA_ARGS__
#else
#define GDN_PROFILED(...)
#endif

// Ids, their names in the trace, and what the time is spent on. Loads and stores only start in their scope: a value
// that is not there yet is waited for in a scope of its own, just before its first use.
#define GDN_PROFILE_SCOPES(X)                                                                       \
  X(kEmpty, "empty")                     /* nothing: what a scope costs by itself */                \
  X(kSetup, "set-up")                    /* addresses, sequence bounds, slot numbers */             \
  X(kPadding, "padding")                 /* zero rows of a sequence without a state */              \
  X(kLoadState, "load state")            /* loads issued */                                         \
  X(kWaitState, "wait: state")                                                                      \
  X(kLoadQkv, "load q/k/v")              /* issued, with the gates' */                              \
  X(kWaitQkv, "wait: q/k/v")                                                                        \
  X(kNormalise, "normalise")             /* norms of q and k; into shared memory */                 \
  X(kWaitGates, "wait: gates")                                                                      \
  X(kGates, "gates")                     /* decay and beta of a stage */                            \
  X(kBarrier, "barrier")                 /* waiting for the block's other warps */                  \
  X(kUpdate, "update")                   /* recurrent: a stage's tokens: state and output */        \
  X(kOutput, "output")                   /* decode: the gated norm */                               \
  X(kStoreState, "store state")          /* issued */

// What a warp is in its block.
#define GDN_PROFILE_ROLES(X)                                                                        \
  X(kDecode, "decode")                   /* every warp prepares tokens and holds state */           \
  X(kRecurrent, "recurrent")             /* up to four tokens: the same, any head size */           \
  X(kConsumer, "recurrent consumer")     /* many tokens: holds the state */                         \
  X(kProducer, "recurrent producer")     /* many tokens: prepares the next stage */

#ifdef GDN_PROFILE

namespace gdn {
namespace profile {

#define GDN_PROFILE_ID(id, name) id,
enum Scope : uint32_t { GDN_PROFILE_SCOPES(GDN_PROFILE_ID) };
enum Role : uint32_t { GDN_PROFILE_ROLES(GDN_PROFILE_ID) };
#undef GDN_PROFILE_ID

// Where the warps of a launch write: goes to the kernel inside its Plan.
struct Target {
  char *warps = nullptr;    // of this launch, one after the other; null when nobody listens
  uint32_t events = 0;      // a warp
  uint32_t launch = 0;
};

// Gives a launch its part of the calling thread's buffer.
int attach(Target &target, int64_t blocks, int threads);

// A word that depends on every value given, so that it is there when they are.
__device__ __forceinline__ uint32_t bits_of(uint32_t x) { return x; }
__device__ __forceinline__ uint32_t bits_of(const uint4 &x) { return x.x ^ x.y ^ x.z ^ x.w; }
__device__ __forceinline__ uint32_t bits_of(float x) { return __float_as_uint(x); }
__device__ __forceinline__ uint32_t bits_of(__nv_bfloat16 x) { return __bfloat16_as_ushort(x); }
__device__ __forceinline__ uint32_t bits_of(__half x) { return __half_as_ushort(x); }
__device__ __forceinline__ uint32_t bits_of(Any16 x) { return x.bits; }
template <typename T> __device__ __forceinline__ uint32_t bits_of(const Raw4<T> &x);
template <typename X, int N> __device__ __forceinline__ uint32_t bits_of(const X (&x)[N]) {
  uint32_t bits = 0;
#pragma unroll
  for (int i = 0; i < N; ++i) bits ^= bits_of(x[i]);
  return bits;
}
template <typename T> __device__ __forceinline__ uint32_t bits_of(const Raw4<T> &x) { return bits_of(x.word); }

// One warp's stamps; lane 0 writes them.
class Stamps {
 public:
  __device__ __forceinline__ Stamps(const Target &target, Role role) : target_(target) {
    const bool writes = target.warps != nullptr && threadIdx.x % 32 == 0;
    room_ = writes ? static_cast<int32_t>(target.events) : 0;
    gdn_profile_warp *const warp = header();
    next_ = reinterpret_cast<uint4 *>(warp + 1);
    if (writes) {
      uint32_t sm;
      asm volatile("mov.u32 %0, %%smid;" : "=r"(sm));
      warp->launch = target.launch;
      warp->role = role;
      warp->sm = sm;
      warp->block = block();
      warp->warp = threadIdx.x / 32;
      warp->begin_ns = globaltimer();
      warp->begin_cycles = clock64();
    }
    if (room_ > 0) last_ = clock();
    lap(kEmpty);
  }

  __device__ __forceinline__ ~Stamps() {
    if (target_.warps != nullptr && threadIdx.x % 32 == 0) {
      gdn_profile_warp *const warp = header();
      warp->end_cycles = clock64();
      warp->end_ns = globaltimer();
      warp->count = target_.events - static_cast<uint32_t>(max(room_, 0));
      warp->dropped = static_cast<uint32_t>(max(-room_, 0));
    }
  }

  Stamps(const Stamps &) = delete;
  Stamps &operator=(const Stamps &) = delete;

  // The first token of what follows, for the records.
  __device__ __forceinline__ void at(int token) { token_ = token; }

  // What was done since the last lap was `scope`. The cost of writing that down belongs to no scope.
  __device__ __forceinline__ void lap(Scope scope) {
    if (room_ > 0) {
      const uint32_t now = clock();
      *next_++ = make_uint4(scope, token_, last_, now - last_);
      last_ = clock();
    }
    --room_;    // below zero it counts what found no room
  }

  // A lap that ends when the values are there. The compiler cannot leave out the instruction that reads them; it hardly
  // ever takes effect, and does no harm then.
  template <typename... X> __device__ __forceinline__ void wait(Scope scope, const X &...values) {
    const uint32_t bits = (bits_of(values) ^ ...);
    asm volatile("{ .reg .pred p; setp.eq.u32 p, %0, 0x7fb5a3c1; @p nanosleep.u32 1; }" :: "r"(bits) : "memory");
    lap(scope);
  }

 private:
  static __device__ __forceinline__ uint32_t block() {
    return blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
  }

  __device__ __forceinline__ gdn_profile_warp *header() const {
    const int64_t warp = static_cast<int64_t>(block()) * (blockDim.x / 32) + threadIdx.x / 32;
    const int64_t size = sizeof(gdn_profile_warp) + target_.events * static_cast<int64_t>(sizeof(gdn_profile_event));
    return reinterpret_cast<gdn_profile_warp *>(target_.warps + warp * size);
  }

  // The clobber keeps loads and stores on their side of the stamp. For lane 0 alone ptxas mostly reads the clock by an
  // instruction of fixed latency; in uniform code it takes one whose result comes late.
  static __device__ __forceinline__ uint32_t clock() {
    uint32_t t;
    asm volatile("mov.u32 %0, %%clock;" : "=r"(t) :: "memory");
    return t;
  }
  static __device__ __forceinline__ uint64_t clock64() {
    uint64_t t;
    asm volatile("mov.u64 %0, %%clock64;" : "=l"(t) :: "memory");
    return t;
  }
  static __device__ __forceinline__ uint64_t globaltimer() {
    uint64_t t;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t) :: "memory");
    return t;
  }

  const Target &target_;    // in the kernel's parameters
  uint4 *next_;
  int32_t room_;
  uint32_t last_ = 0, token_ = 0;
};

}  // namespace profile
}  // namespace gdn

#endif
