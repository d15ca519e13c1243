// The layout of a block of the kernel for sm_90a: its warpgroups, their registers, its shared memory.
#pragma once

#include "maps.h"
#include "matrices.cuh"

namespace gdn {
namespace chunk {

// An index into a cyclic buffer, and the parity of its barrier's phase.
template <int N> struct Phase {
  int parity = 0, index = 0;
  __device__ __forceinline__ void next() {
    if (++index == N) index = 0, parity ^= 1;
  }
};

// Barriers in shared memory, one for each place of a cyclic buffer.
struct Barriers {
  uint32_t address;

  template <int N> __device__ __forceinline__ explicit Barriers(uint64_t (&barriers)[N]) : address(ptx::shared_address(barriers)) {}
  __device__ __forceinline__ uint32_t operator[](int i) const { return address + 8 * i; }
  __device__ __forceinline__ void init(int i, uint32_t arrivals) const { ptx::barrier_init((*this)[i], arrivals); }
  __device__ __forceinline__ void arrive(int i) const { ptx::barrier_arrive((*this)[i]); }
  __device__ __forceinline__ void wait(int i, uint32_t parity) const { ptx::barrier_wait((*this)[i], parity); }

  // Waits for this phase's data.
  template <int N> __device__ __forceinline__ void wait(const Phase<N> &at) const { ptx::barrier_wait(address + 8 * at.index, at.parity); }
  // Waits until the previous phase's data has been read; returns at once in the first round.
  template <int N> __device__ __forceinline__ void wait_before(const Phase<N> &at) const { ptx::barrier_wait(address + 8 * at.index, at.parity ^ 1); }
};

// The block's named barriers, beside the one of __syncthreads(): the 128 threads of a maker, and those of its warps that invert
// (inverse.cuh). The second maker has the next number of each.
enum NamedBarrier { kMakerBarrier = 1, kPairBarrier = 6, kHalfBarrier = 8 };

// Warps of the first warpgroup; its other warps compute the norms of q.
enum SingleWarp { kGateWarp = 2, kLoadWarp = 3 };

// Two phases, of as few registers as there are different ones.
template <int A, int B> struct Phases {
  Phase<A> first;
  Phase<B> other;
  __device__ __forceinline__ const Phase<B> &second() const {
    if constexpr (A == B) return first;
    else return other;
  }
  __device__ __forceinline__ void next() {
    first.next();
    if constexpr (A != B) other.next();
  }
};

template <int KK, int NM> struct Stage90 {
  alignas(1024) uint8_t k[KK / 64 * kTileBytes];
  uint8_t q[KK / 64 * kTileBytes];
  uint8_t v[kTileBytes];
};
template <int KK> struct Stage90<KK, 2> {
  alignas(1024) uint8_t k[KK / 64 * kTileBytes];
  uint8_t q[KK / 64 * kTileBytes];
};

// NM warpgroups of arithmetic: one in the narrow form, two in the wide one. Two more compute the matrices, each those of every
// second chunk.
template <int KK, int NM> struct Shape90 {
  using Stage = Stage90<KK, NM>;
  static constexpr bool kWide = NM == 2;
  static constexpr int kMakers = 2, kMath = 1 + kMakers;    // the latter is the first warpgroup of arithmetic
  static constexpr int kThreads = 128 * (kMath + NM);
  static constexpr int kBuffers = 3;
  static constexpr int kStages = kWide ? 3 : 4;
  static constexpr int kValues = kWide ? 2 : 1;             // wide: v has stages of its own, which are also o's way out
  static constexpr int kOuts = kWide ? kValues : kStages;    // tiles of v
  static constexpr uint32_t kQ = offsetof(Stage, q), kStage = sizeof(Stage);

  // Registers a thread in each kind of warpgroup, multiples of 8; together at most what the block is launched with.
  static constexpr int kSingleRegisters = kWide ? 32 : 40, kMakerRegisters = kWide ? 64 : 112;
  static constexpr int kMathRegisters = kWide ? 160 : 240;
  static_assert(kSingleRegisters + kMakers * kMakerRegisters + NM * kMathRegisters <=
                    kThreads / 128 * (65536 / kThreads / 8 * 8),
                "registers");

  struct Shared {
    Stage stage[kStages];
    alignas(1024) uint8_t values[kWide ? kValues : 1][kWide ? NM * kTileBytes : 1024];
    Matrices matrices[kBuffers];
    alignas(kWide ? 1024 : 16) uint8_t state[kWide ? NM * KK / 64 * kTileBytes : 16];    // wide: as an operand
    TokenGates gates[kStages];
    float4 decays[kWide ? kMakers : 1][kWide ? 128 : 1];    // wide: makers have no registers for these while they invert
    float2 more_decays[kWide ? kMakers : 1][kWide ? 128 : 1];
    int4 out[kOuts];    // for each tile of v: the box of o that the copying thread stores from it
    // Barriers. Of a stage: its tiles have arrived (full), its gates (gated), its norms of q (normed); its gates have been read
    // (used), its tiles too (empty). Of a tile of v: it has arrived (valued); v has been read and o is in its place (drained). Of a
    // warpgroup of arithmetic: its rows of the state are in shared memory (stated). Of a buffer: inverse and factors are there
    // (ready); the attention is there (attended; narrow: of the first chunk alone, else it is there with the inverse); all has been
    // read (free).
    uint64_t full[kStages], gated[kStages], normed[kStages], used[kStages], empty[kStages];
    uint64_t valued[kValues], drained[kValues], stated[NM];
    uint64_t ready[kBuffers], attended[kBuffers], free[kBuffers];
  };
  static_assert(sizeof(Shared) <= 227 * 1024, "shared memory");
};

// The position of the arithmetic in its buffers, and the number of chunks so far.
template <typename S> struct MathPhases {
  Phases<S::kStages, S::kBuffers> chunk;
  int chunks = 0;
};

}  // namespace chunk
}  // namespace gdn
