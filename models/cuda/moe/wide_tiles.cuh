// What copying and multiplying warpgroups of wide_kernel share, and the products of 16-bit weights.
#pragma once

#include <cuda.h>

#include "common/convert.cuh"
#include "common/math.cuh"
#include "common/wgmma.cuh"
#include "../common.cuh"
#include "args.h"

namespace gdn {
namespace moe {

constexpr int kWideCopyThreads = 128, kWideThreads = kWideCopyThreads + 256;
constexpr int kWideInputs = 64;                      // at a time: 128 bytes of a row of x
constexpr int kWideHRows = 64;                       // rows of h that one box has
constexpr int kWideHBox = kWideHRows * 128;          // bytes

// Rows of an expert times a part of its weights. No rows: nothing is left.
struct alignas(16) WideItem {
  int expert, first, rows, part;
};

// W: weights as stored, T or E4m3. A tile has as many products of either: weights in e4m3 are converted for each tile, so their tiles have more
// rows of x.
template <typename W> struct WideShared {
  static constexpr bool kScaled = std::is_same_v<W, E4m3>;
  static constexpr int kRows = kScaled ? 256 : 128, kStages = kScaled ? 5 : 4;
  static constexpr int kHalf = kScaled ? 64 : 128;    // rows of weights that one box has: of gate, of up, or half of a tile of down
  static constexpr int kXTile = kRows * 128, kBox = kHalf * kWideInputs * static_cast<int>(sizeof(W));    // bytes
  alignas(1024) uint8_t x[kStages][kXTile];
  uint8_t w[kStages][2 * kBox];
  uint64_t full[kStages], free[kStages];    // of a stage: its tiles have come; no warp reads them any more
  WideItem item[kStages];                   // of the stages with the first inputs of an item: that item
  int taken;                                // the number of the next item

  __device__ __forceinline__ uint32_t x_at(int stage) const { return ptx::shared_address(x) + stage * kXTile; }
  __device__ __forceinline__ uint32_t w_at(int stage) const { return ptx::shared_address(w) + stage * 2 * kBox; }
  __device__ __forceinline__ uint32_t full_at(int stage) const { return ptx::shared_address(full) + 8 * stage; }
  __device__ __forceinline__ uint32_t free_at(int stage) const { return ptx::shared_address(free) + 8 * stage; }
};

// Of the two sizes of MLP in a layer, that of an item's expert; and the steps over its inputs.
__device__ __forceinline__ int inner_of(const Args &a, const WideItem &item) { return item.expert == a.experts ? a.shared_inner : a.inner; }
template <bool GATED> __device__ __forceinline__ int turns_of(const Args &a, const WideItem &item) {
  return (GATED ? a.hidden : inner_of(a, item)) / kWideInputs;
}

// The item whose first inputs are in a stage, which is full. Lane 0 releases the stage, so lane 0 reads the item, and hands it to the
// others. By the exchange the compiler also knows that all lanes have the same.
template <typename W> __device__ __forceinline__ WideItem item_in(const WideShared<W> &shared, int stage) {
  WideItem item = {};
  if (threadIdx.x % 32 == 0) item = shared.item[stage];
  for (int *field : {&item.expert, &item.first, &item.rows, &item.part}) *field = __shfl_sync(0xffffffffu, *field, 0);
  return item;
}

template <typename W> __device__ __forceinline__ void release(const WideShared<W> &shared, int stage) {
  if (threadIdx.x % 32 == 0) ptx::barrier_arrive(shared.free_at(stage));
}

// Of four lanes side by side each has four words: word i of lane t goes to word t of lane i.
__device__ __forceinline__ void transpose_words(uint32_t (&w)[4], int t) {
#pragma unroll
  for (int step = 1; step <= 2; step *= 2)
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (!(i & step)) {
        const bool upper = t & step;
        const uint32_t got = __shfl_xor_sync(0xffffffffu, upper ? w[i] : w[i + step], step);
        (upper ? w[i] : w[i + step]) = got;
      }
}

// One of two warpgroups, each with 64 of the rows and all weights. GATED: columns of up lie kHalf after those of gate.
template <typename T, bool GATED> __device__ __forceinline__ void multiply_16_bits(const Args &a, const WideShared<T> &shared, int warpgroup) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32, g = lane >> 2, t = lane & 3, first_row = warpgroup * 64;
  constexpr int kHalf = WideShared<T>::kHalf;
  Stage<WideShared<T>::kStages> at;
  while (true) {
    ptx::barrier_wait(shared.full_at(at.index), at.parity);
    const WideItem item = item_in(shared, at.index);
    if (item.rows == 0) return;
    const int turns = turns_of<GATED>(a, item), rows = item.rows - first_row;
    if (rows <= 0) {
      for (int turn = 0; turn < turns; ++turn, at.next()) {
        ptx::barrier_wait(shared.full_at(at.index), at.parity);
        release(shared, at.index);
      }
      continue;
    }
    float acc[2 * kHalf / 8][4];
    int before = 0;
    for (int turn = 0; turn < turns; ++turn, at.next()) {
      ptx::barrier_wait(shared.full_at(at.index), at.parity);
      const uint64_t x = wgmma::tile_of_columns(shared.x_at(at.index) + first_row * 128);
      const uint64_t w = wgmma::tile_of_columns(shared.w_at(at.index));
      wgmma::fence();
#pragma unroll
      for (int k = 0; k < kWideInputs / 16; ++k)
        wgmma::product_of_tiles<T>(acc, x + wgmma::bytes(32 * k), w + wgmma::bytes(32 * k), turn + k > 0);
      wgmma::commit();
      wgmma::wait<1>();
      if (turn > 0) release(shared, before);
      before = at.index;
    }
    wgmma::wait<0>();
    wgmma::hold(acc);
    release(shared, before);

    // Four lanes store 32 columns of a row, 8 each.
    const int outputs = GATED ? inner_of(a, item) : a.hidden;
    const int first_output = item.part * (GATED ? 1 : 2) * kHalf + 8 * t;
    const int64_t stride = GATED ? a.h_stride : a.hidden;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = warp * 16 + half * 8 + g;
      T *to = static_cast<T *>(GATED ? a.h : a.rows) + (item.first + first_row + r) * stride + first_output;
#pragma unroll
      for (int i = 0; i < (GATED ? 1 : 2) * kHalf / 32; ++i) {
        uint32_t words[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          float y[2] = {acc[4 * i + j][2 * half], acc[4 * i + j][2 * half + 1]};
          if constexpr (GATED)
            for (int c = 0; c < 2; ++c) y[c] = fast_silu(y[c]) * acc[kHalf / 8 + 4 * i + j][2 * half + c];
          words[j] = pack2<T>(y[0], y[1]);
        }
        transpose_words(words, t);
        if (r < rows && first_output + 32 * i < outputs) *reinterpret_cast<uint4 *>(to + 32 * i) = {words[0], words[1], words[2], words[3]};
      }
    }
  }
}

}  // namespace moe
}  // namespace gdn
