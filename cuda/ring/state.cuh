// What a warp copies into shared memory: its rows of the state, which stay there until outputs and a fold are made of them, since read
// again they would come from memory; and rows of tokens and entries.
//
// The copy engine brings them, from sm_90 on. What a multiprocessor loads comes back in the order in which it was asked for: a
// block that loaded its state would hold up the cursors and entries of the blocks beside it, and all that waits for them.
#pragma once

#include "../common/ptx.cuh"
#include "entries.cuh"

namespace gdn {
namespace ring {

// `bytes`, a multiple of 16, from global to shared memory by all lanes together; on `barrier` where there is a copy engine.
__device__ __forceinline__ void copy_run(void *to, const void *from, uint32_t bytes, uint32_t barrier) {
  const auto at = ptx::shared_address(to);
  const uint32_t lane = threadIdx.x % 32;
#if __CUDA_ARCH__ >= 900
  if (lane == 0 && bytes) ptx::copy_bulk(at, from, bytes, barrier);
#else
  for (uint32_t i = 16 * lane; i < bytes; i += 16 * 32) ptx::copy_async(at + i, static_cast<const char *>(from) + i);
#endif
}

template <typename ST, int ROWS> struct StateRows {
  static constexpr uint32_t kBytes = ROWS * kDim * sizeof(ST);
  using Memory = ST[ROWS][kDim];    // on 16 bytes
  Memory &rows;
  const uint32_t barrier;

  // By all lanes, before they load anything: the fence would wait for it. Racecheck of CUDA 13.5 reads the address in every lane; the
  // compiler would set it in lane 0 alone.
  __device__ __forceinline__ StateRows(Memory &rows, uint64_t &barrier)
      : rows(rows), barrier(ptx::in_every_lane(ptx::shared_address(&barrier))) {
    if (threadIdx.x % 32 == 0) ptx::barrier_init(this->barrier, 1), ptx::barriers_initialised();
    __syncwarp();
  }

  // Asks for the rows that begin at `in`.
  __device__ __forceinline__ void load(const ST *in) const {
    if (threadIdx.x % 32 == 0) ptx::barrier_expect(barrier, kBytes);
    copy_run(rows, in, kBytes, barrier);
#if __CUDA_ARCH__ < 900
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

// Rows of tokens and entries, which one warp copies for its block, a lane a row: the copy engine needs no address for every 16 bytes.
struct RowCopies {
  const uint32_t barrier;

  // By all warps, `mine` in the one that copies, before its StateRows, whose fence is for this too.
  __device__ __forceinline__ RowCopies(uint64_t &barrier, bool mine) : barrier(ptx::shared_address(&barrier)) {
    if (mine && threadIdx.x % 32 == 0) ptx::barrier_init(this->barrier, 1);
  }

  // Once, by all lanes of that warp, before its copies: how many bytes these are.
  __device__ __forceinline__ void expect(uint32_t bytes) const {
    if (threadIdx.x % 32 == 0) ptx::barrier_expect(barrier, bytes);
    __syncwarp();
  }

  template <uint32_t BYTES> __device__ __forceinline__ void copy(void *to, const void *from) const {
    const auto at = ptx::shared_address(to);
#if __CUDA_ARCH__ >= 900
    ptx::copy_bulk(at, from, BYTES, barrier);
#else
    for (uint32_t i = 0; i < BYTES; i += 16) ptx::copy_async(at + i, static_cast<const char *>(from) + i);
#endif
  }

  // By whoever reads them; where there is no copy engine, behind the copying warp's wait for its own copies and a barrier.
  __device__ __forceinline__ void wait() const {
#if __CUDA_ARCH__ >= 900
    ptx::barrier_wait(barrier, 0);
#else
    ptx::copy_async_wait<0>();
#endif
  }
};

}  // namespace ring
}  // namespace gdn
