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
  X(kStoreState, "store state")          /* issued */                                               \
  X(kConvolve, "convolve")               /* step: convolution, norms; into shared memory */         \
  X(kStoreConv, "store conv state")      /* step: issued */                                         \
  X(kWaitKernel, "wait: kernel before")  /* overlapping launches */                                 \
  X(kWaitTiles, "wait: tiles")           /* copies of q, k and v */                                 \
  X(kWaitFree, "wait: free stage")       /* nobody reads any more what comes next there */          \
  X(kCopyKeys, "copy q/k")               /* asked for */                                            \
  X(kCopyValues, "send o, copy v")       /* asked for, but o has left its tile */                   \
  X(kWaitNorms, "wait: norms of q")                                                                 \
  X(kKeys, "K K^T")                      /* makers: the tail cleared, the product asked for */      \
  X(kWaitKeys, "wait: K K^T")                                                                       \
  X(kLower, "L")                         /* norms of k, decays; what is to be inverted */           \
  X(kInvert, "inverse")                  /* with the waits of its warps for each other */           \
  X(kAttention, "attention")             /* Q K^T waited for; the image */                          \
  X(kProducts, "products")               /* sm_80: K K^T and Q K^T */                               \
  X(kStoreRecord, "store record")        /* sm_80 */                                                \
  X(kWaitMatrices, "wait: matrices")     /* of the makers; wide: the inverse */                     \
  X(kWaitAttention, "wait: attention")   /* wide */                                                 \
  X(kWaitValues, "wait: v")              /* wide: S K^T has been asked for */                       \
  X(kStateKeys, "S K^T")                 /* S packed, the product asked for; sm_80: made */         \
  X(kWaitStateKeys, "wait: S K^T")                                                                  \
  X(kCorrect, "U")                       /* made, V' asked for */                                   \
  X(kWaitWritten, "wait: V'")            /* the state and S Q^T are scaled meanwhile */             \
  X(kPackWritten, "V' packed")           /* what follows from it asked for */                       \
  X(kOut, "O")                           /* wide: S Q^T waited for, scaled, the rest asked for */   \
  X(kWaitState2, "wait: new state")                                                                 \
  X(kSendOut, "o to its tile")           /* waited for; wide: S packed too */                       \
  X(kCombine, "combine")                 /* a segment's state from the one before */

// What a warp is in its block.
#define GDN_PROFILE_ROLES(X)                                                                        \
  X(kDecode, "decode")                   /* every warp prepares tokens and holds state */           \
  X(kStep, "step")                       /* the same with convolution and gated norm */              \
  X(kRecurrent, "recurrent")             /* up to four tokens: the same, any head size */           \
  X(kConsumer, "recurrent consumer")     /* many tokens: holds the state */                         \
  X(kProducer, "recurrent producer")     /* many tokens: prepares the next stage */                 \
  X(kLoader, "prefill loader")           /* sm_90a: a lane that copies q, k and v, and o back */    \
  X(kGateWarp, "prefill gates")                                                                     \
  X(kNormWarp, "prefill norms")          /* of q */                                                 \
  X(kMaker, "prefill maker")             /* a warp of four: the matrices of every second chunk */   \
  X(kMath, "prefill math")               /* a warp of four: 16 value rows each */                   \
  X(kPrepareWarp, "prefill prepare")     /* sm_80: the matrices of a chunk */                       \
  X(kScanWarp, "prefill scan")           /* sm_80: 16 value rows */                                 \
  X(kCombineWarp, "prefill combine")     /* the states between segments */

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
inline int attach(Target &target, dim3 grid, int threads) { return attach(target, int64_t{grid.x} * grid.y * grid.z, threads); }

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

// What stands before a warp's events. By lane 0.
class Life {
 public:
  static __device__ __forceinline__ gdn_profile_warp *header(const Target &target) {
    const int64_t warp = static_cast<int64_t>(block()) * (blockDim.x / 32) + threadIdx.x / 32;
    const int64_t size = sizeof(gdn_profile_warp) + target.events * static_cast<int64_t>(sizeof(gdn_profile_event));
    return reinterpret_cast<gdn_profile_warp *>(target.warps + warp * size);
  }

  static __device__ __forceinline__ void begin(const Target &target, Role role) {
    gdn_profile_warp *const warp = header(target);
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

  static __device__ __forceinline__ void end(const Target &target, int32_t room) {
    gdn_profile_warp *const warp = header(target);
    warp->end_cycles = clock64();
    warp->end_ns = globaltimer();
    warp->count = target.events - static_cast<uint32_t>(max(room, 0));
    warp->dropped = static_cast<uint32_t>(max(-room, 0));
  }

 private:
  static __device__ __forceinline__ uint32_t block() {
    return blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
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
};

// Consumes values by an instruction that the compiler cannot leave out; it hardly ever takes effect, and does no harm then.
template <typename... X> __device__ __forceinline__ void need(const X &...values) {
  const uint32_t bits = (bits_of(values) ^ ...);
  asm volatile("{ .reg .pred p; setp.eq.u32 p, %0, 0x7fb5a3c1; @p nanosleep.u32 1; }" :: "r"(bits) : "memory");
}

// One warp's stamps; lane 0 writes them.
class Stamps {
 public:
  __device__ __forceinline__ Stamps(const Target &target, Role role) : target_(target) {
    const bool writes = target.warps != nullptr && threadIdx.x % 32 == 0;
    room_ = writes ? static_cast<int32_t>(target.events) : 0;
    next_ = reinterpret_cast<uint4 *>(Life::header(target) + 1);
    if (writes) Life::begin(target, role);
    if (room_ > 0) last_ = clock();
    lap(kEmpty);
  }

  __device__ __forceinline__ ~Stamps() {
    if (target_.warps != nullptr && threadIdx.x % 32 == 0) Life::end(target_, room_);
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

  // A lap that ends when the values are there.
  template <typename... X> __device__ __forceinline__ void wait(Scope scope, const X &...values) {
    need(values...);
    lap(scope);
  }

 private:
  // The clobber keeps loads and stores on their side of the stamp. For lane 0 alone ptxas mostly reads the clock by an
  // instruction of fixed latency; in uniform code it takes one whose result comes late.
  static __device__ __forceinline__ uint32_t clock() {
    uint32_t t;
    asm volatile("mov.u32 %0, %%clock;" : "=r"(t) :: "memory");
    return t;
  }

  const Target &target_;    // in the kernel's parameters
  uint4 *next_;
  int32_t room_;
  uint32_t last_ = 0, token_ = 0;
};

// The same for kernels that have no registers to spare: two of them. A lap begins where the one before it ended, so
// that the cost of writing that one down is in it. No branch, since ptxas waits for each product in one that it takes for divergent.
class LeanStamps {
 public:
  __device__ __forceinline__ LeanStamps(const Target &target, Role role) : target_(target) {
    const bool writes = target.warps != nullptr && threadIdx.x % 32 == 0;
    room_ = writes ? static_cast<int32_t>(target.events) : 0;
    const int64_t first = reinterpret_cast<char *>(Life::header(target) + 1) - target.warps;
    at_ = static_cast<uint32_t>(first / static_cast<int64_t>(sizeof(gdn_profile_event)));
    if (writes) Life::begin(target, role);
    lap(kEmpty);
  }
  __device__ __forceinline__ ~LeanStamps() {
    if (target_.warps != nullptr && threadIdx.x % 32 == 0) Life::end(target_, room_);
  }

  LeanStamps(const LeanStamps &) = delete;
  LeanStamps &operator=(const LeanStamps &) = delete;

  __device__ __forceinline__ void lap(Scope scope) { write(GDN_PROFILE_LEAN | scope); }

  // The first of a chunk of the warp's stretch, whose number holds for what follows.
  __device__ __forceinline__ void lap(Scope scope, int chunk) {
    write((GDN_PROFILE_LEAN | GDN_PROFILE_CHUNK | scope) + (static_cast<uint32_t>(chunk) << 8));
  }

  template <typename... X> __device__ __forceinline__ void wait(Scope scope, const X &...values) {
    need(values...);
    lap(scope);
  }

 private:
  __device__ __forceinline__ void write(uint32_t what) {
    asm volatile(
        "{ .reg .pred p; .reg .u32 t; .reg .u64 a;\n"
        "setp.gt.s32 p, %0, 0;\n"
        "mov.u32 t, %%clock;\n"
        "mad.wide.u32 a, %1, 16, %2;\n"
        "@p st.global.v2.u32 [a], {%3, t}; }" ::"r"(room_), "r"(at_), "l"(target_.warps), "r"(what)
        : "memory");
    ++at_;
    --room_;
  }

  const Target &target_;    // in the kernel's parameters
  uint32_t at_;             // of the next one, in events from the begin
  int32_t room_;
};

}  // namespace profile
}  // namespace gdn

#endif
