// A warp's rows of the state in shared memory, until outputs and a fold are made of them: read again, they would come from memory.
//
// The copy engine brings them, from sm_90 on. What a multiprocessor loads comes back in the order in which it was asked for: a
// block that loaded its state would hold up the cursors and entries of the blocks beside it, and all that waits for them.
#pragma once

#include "../common/ptx.cuh"
#include "ring.cuh"

namespace gdn {
namespace replay {

template <typename ST, int ROWS> struct StateRows {
  static constexpr uint32_t kBytes = ROWS * kDim * sizeof(ST);
  using Memory = ST[ROWS][kDim];    // on 16 bytes
  Memory &rows;
  const uint32_t barrier;

  // By all lanes, before they load anything: the fence would wait for it.
  __device__ __forceinline__ StateRows(Memory &rows, uint64_t &barrier) : rows(rows), barrier(ptx::shared_address(&barrier)) {
    if (threadIdx.x % 32 == 0) ptx::barrier_init(this->barrier, 1), ptx::barriers_initialised();
    __syncwarp();
  }

  // Asks for the rows that begin at `in`.
  __device__ __forceinline__ void load(const ST *in) const {
    const auto to = ptx::shared_address(rows);
    const uint32_t lane = threadIdx.x % 32;
#if __CUDA_ARCH__ >= 900
    if (lane == 0) ptx::barrier_expect(barrier, kBytes), ptx::copy_bulk(to, in, kBytes, barrier);
#else
#pragma unroll
    for (uint32_t i = 16 * lane; i < kBytes; i += 16 * 32) ptx::copy_async(to + i, reinterpret_cast<const char *>(in) + i);
    ptx::copy_async_commit();
#endif
  }

  // Before they are used, or the block ends.
  __device__ __forceinline__ void wait() const {
#if __CUDA_ARCH__ >= 900
    ptx::barrier_wait(barrier, 0);
#else
    ptx::copy_async_wait<0>();
    __syncwarp();
#endif
  }
};

}  // namespace replay
}  // namespace gdn
