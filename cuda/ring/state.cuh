// What a warp copies into shared memory: its rows of the state, which stay there until the outputs and a flush are computed, since a
// second read would come from memory; and rows of tokens and entries.
//
// The copy engine copies them, from sm_90 on. A multiprocessor's loads return in the order of their requests: a block that
// loaded its state would delay the spans and entries of the blocks beside it, and all that waits for them.
#pragma once

#include "../common/ptx.cuh"
#include "entries.cuh"

namespace gdn {
namespace ring {

// `bytes`, a multiple of 16, from global to shared memory by all lanes together; on `barrier` where there is a copy engine.
__device__ __forceinline__ void copy_run(void *target, const void *source, uint32_t bytes, uint32_t barrier) {
  const auto address = ptx::shared_address(target);
  const uint32_t lane = threadIdx.x % 32;
#if __CUDA_ARCH__ >= 900
  if (lane == 0 && bytes) ptx::copy_bulk(address, source, bytes, barrier);
#else
  for (uint32_t i = 16 * lane; i < bytes; i += 16 * 32) ptx::copy_async(address + i, static_cast<const char *>(source) + i);
#endif
}

template <typename ST, int ROWS, int K> struct StateRows {
  static constexpr uint32_t kBytes = ROWS * K * sizeof(ST);
  using Memory = ST[ROWS][K];    // aligned to 16 bytes
  Memory &rows;
  const uint32_t barrier;

  // By all lanes, before their first load: the fence would wait for it. The racecheck tool of CUDA 13.5 reads the address in every
  // lane, while the compiler would set it in lane 0 alone.
  __device__ __forceinline__ StateRows(Memory &rows, uint64_t &barrier)
      : rows(rows), barrier(ptx::in_every_lane(ptx::shared_address(&barrier))) {
    if (threadIdx.x % 32 == 0) ptx::barrier_init(this->barrier, 1), ptx::barriers_initialised();
    __syncwarp();
  }

  // Starts the copy of the rows that begin at `in`.
  __device__ __forceinline__ void load(const ST *in) const {
    if (threadIdx.x % 32 == 0) ptx::barrier_expect(barrier, kBytes);
    copy_run(rows, in, kBytes, barrier);
#if __CUDA_ARCH__ < 900
    ptx::copy_async_commit();
#endif
  }

  // Before the rows are used, or the block ends.
  __device__ __forceinline__ void wait() const {
#if __CUDA_ARCH__ >= 900
    ptx::barrier_wait(barrier, 0);
#else
    ptx::copy_async_wait<0>();
    __syncwarp();
#endif
  }
};

// Rows of tokens and entries, which one warp copies for its block, one row a lane: the copy engine needs no address for every 16 bytes.
struct RowCopies {
  const uint32_t barrier;

  // By all warps, `copies` in the one that copies, before its StateRows, whose fence serves this barrier too.
  __device__ __forceinline__ RowCopies(uint64_t &barrier, bool copies) : barrier(ptx::shared_address(&barrier)) {
    if (copies && threadIdx.x % 32 == 0) ptx::barrier_init(this->barrier, 1);
  }

  // Once, by all lanes of that warp, before its copies: their number of bytes.
  __device__ __forceinline__ void expect(uint32_t bytes) const {
    if (threadIdx.x % 32 == 0) ptx::barrier_expect(barrier, bytes);
    __syncwarp();
  }

  template <uint32_t BYTES> __device__ __forceinline__ void copy(void *target, const void *source) const {
    const auto address = ptx::shared_address(target);
#if __CUDA_ARCH__ >= 900
    ptx::copy_bulk(address, source, BYTES, barrier);
#else
    for (uint32_t i = 0; i < BYTES; i += 16) ptx::copy_async(address + i, static_cast<const char *>(source) + i);
#endif
  }

  // By every reader; without a copy engine after the copying warp's wait for its own copies, and a barrier.
  __device__ __forceinline__ void wait() const {
#if __CUDA_ARCH__ >= 900
    ptx::barrier_wait(barrier, 0);
#else
    ptx::copy_async_commit();
    ptx::copy_async_wait<0>();
#endif
  }
};

}  // namespace ring
}  // namespace gdn
