// How a warp streams its tiles of states through shared memory.
#pragma once

#include "../common/ptx.cuh"
#include "lanes.cuh"

namespace gdn {
namespace step {

constexpr int kWarps = 4;

// Of a head of K and V, DEPTH tiles under way, of ROWS rows a lane group. The warps' tiles lie side by side. Every lane copies what it will use
// itself and stores from registers: no lane waits for another.
template <typename ST, int K, int V, int ROWS, int DEPTH> struct StateStream {
  using L = Lanes<ST, K>;
  static constexpr int kTileRows = L::kGroups * ROWS;
  static constexpr int kTiles = V / kWarps / kTileRows;         // of a head, a warp
  static constexpr int kStep = kWarps * kTileRows * K;          // elements from a warp's tile to its next
  static_assert(kTiles * kWarps * kTileRows == V, "tiles divide the rows of a head");
  static constexpr int kChunks = ROWS * L::kChunks, kBytes = kWarps * DEPTH * kChunks * 512;

  const ST *in;    // this lane group's first row of tile 0
  ST *out;
  int tiles, part;
  uint4 *chunks;   // this lane's chunk 0 of slot 0

  __device__ __forceinline__ StateStream(uint8_t *smem, const ST *in, ST *out, int tiles, int warp, int lane)
      : in(in + lane / L::kLanes * ROWS * K), out(out + lane / L::kLanes * ROWS * K), tiles(tiles), part(lane % L::kLanes),
        chunks(reinterpret_cast<uint4 *>(smem) + warp * DEPTH * kChunks * 32 + lane) {}

  __device__ __forceinline__ void request(int i) {
    if (i < tiles) {
      const ST *source = in + i * kStep;
      const uint32_t target = ptx::shared_address(chunks + i % DEPTH * kChunks * 32);
#pragma unroll
      for (int c = 0; c < kChunks; ++c)
        ptx::copy_async(target + c * 512, source + c / L::kChunks * K + L::column(part, c % L::kChunks));
    }
    ptx::copy_async_commit();    // empty past the end, so that one count fits all
  }

  __device__ __forceinline__ void start() {
#pragma unroll
    for (int i = 0; i < DEPTH; ++i) request(i);
  }

  __device__ __forceinline__ void read(int i, float (&state)[ROWS][L::kEach]) {
    ptx::copy_async_wait<DEPTH - 1>();
#pragma unroll
    for (int c = 0; c < kChunks; ++c)
      L::unpack(chunks[(i % DEPTH * kChunks + c) * 32], &state[c / L::kChunks][c % L::kChunks * L::kVec]);
  }

  __device__ __forceinline__ void write(int i, const float (&state)[ROWS][L::kEach]) {
    request(i + DEPTH);
#pragma unroll
    for (int r = 0; r < ROWS; ++r) L::store(out + i * kStep + r * K, part, state[r]);
  }
};

}  // namespace step
}  // namespace gdn
