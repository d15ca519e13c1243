// Products of tiles of rows with their expert's weights in 16 bits, by the instructions of sm_90a: many tokens.
//
// A block multiplies a tile of up to 128 rows by 256 rows of their expert's weights (many_kernel: by 128), then takes the next tile,
// until none is left. One of its three warpgroups copies, 64 inputs at a time, into a ring in shared memory: rows of x by cp.async,
// since they lie apart, and weights by the copy engine. Each of the other two multiplies 64 rows.
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
constexpr int kWideCopyRegisters = 56, kWideMathRegisters = 224;
constexpr int kWideRows = 128;
constexpr int kWideHalf = 128;      // rows of weights that one box has: of gate, of up, or half of a tile of down
constexpr int kWideInputs = 64;     // at a time: 128 bytes of a row
constexpr int kWideStages = 4;
constexpr int kWideXTile = kWideRows * 128, kWideBox = kWideHalf * 128;    // bytes

// Rows of an expert times a part of its weights. No rows: nothing is left.
struct alignas(16) WideItem {
  int expert, first, rows, part;
};

struct WideShared {
  alignas(1024) uint8_t x[kWideStages][kWideXTile];
  uint8_t w[kWideStages][2 * kWideBox];
  uint64_t full[kWideStages], free[kWideStages];    // of a stage: its tiles have come; no warp reads them any more
  WideItem item[kWideStages];                       // of the stages with the first inputs of an item: that item
  int taken;                                        // the number of the next item
};

// The weights of all experts and of the shared one: [rows, inputs].
struct WideMaps {
  CUtensorMap routed, shared;
};

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

// GATED: h = silu(gate) * up is written; else mlp(x).
template <typename T, bool GATED>
__global__ void __launch_bounds__(kWideThreads, 1)
    wide_kernel(const __grid_constant__ Args a, const __grid_constant__ WideMaps maps) {
  if constexpr (ptx::kSm90a) {
    extern __shared__ __align__(1024) unsigned char wide_bytes[];
    WideShared &shared = *reinterpret_cast<WideShared *>(wide_bytes);
    const uint32_t x_tiles = ptx::shared_address(shared.x), w_tiles = ptx::shared_address(shared.w);
    const auto full = [&](int stage) { return ptx::shared_address(shared.full) + 8 * stage; };
    const auto free = [&](int stage) { return ptx::shared_address(shared.free) + 8 * stage; };
    const int tid = threadIdx.x, lane = tid % 32;
    const int warpgroup = __shfl_sync(0xffffffffu, tid / 128, 0);    // by an exchange, so that the compiler knows all lanes have the same
    if (tid == 0) {
      for (int s = 0; s < kWideStages; ++s) {
        ptx::barrier_init(full(s), kWideCopyThreads / 32 + 1);    // a warp's rows of x; the weights
        ptx::barrier_init(free(s), 8);
      }
      ptx::barriers_initialised();
    }
    __syncthreads();
    ptx::grid_dependency_wait();
    ptx::grid_dependency_launch();

    const auto inner_of = [&](const WideItem &item) { return item.expert == a.experts ? a.shared_inner : a.inner; };
    const auto turns_of = [&](const WideItem &item) { return (GATED ? a.hidden : inner_of(item)) / kWideInputs; };

    if (warpgroup == 0) {
      fewer_registers<kWideCopyRegisters>();
      // Tiles of the shared expert come last.
      const auto parts_of = [&](int inner) {
        constexpr int kEach = GATED ? kWideHalf : 2 * kWideHalf;
        return ((GATED ? inner : a.hidden) + kEach - 1) / kEach;
      };
      const int routed_tiles = a.tile_count[1], routed_parts = parts_of(a.inner), shared_parts = parts_of(a.shared_inner);
      const int routed = routed_tiles * routed_parts, items = routed + (a.tile_count[0] - routed_tiles) * shared_parts;
      const auto item_of = [&](int index) {
        if (index >= items) return WideItem{};
        const bool shared_expert = index >= routed;
        const int of_kind = shared_expert ? index - routed : index, parts = shared_expert ? shared_parts : routed_parts;
        const Tile tile = a.tiles[(shared_expert ? routed_tiles : 0) + of_kind / parts];
        return WideItem{tile.expert, tile.first, tile.rows, of_kind % parts};
      };

      // A thread copies one 16-byte piece of every 16th row of x.
      constexpr int kApart = kWideCopyThreads / 8, kCopies = kWideRows / kApart;
      const int piece = tid % 8, copy_row = tid / 8;
      const uint32_t to_row = x_tiles + copy_row * 128 + ((piece ^ copy_row % 8) << 4);
      const char *x_base = static_cast<const char *>(GATED ? a.x : a.h) + piece * 16;
      const int64_t x_row_bytes = (GATED ? a.x_stride : static_cast<int64_t>(a.h_stride)) * static_cast<int64_t>(sizeof(T));
      int row[kCopies];
      const auto find_rows = [&](const WideItem &item) {
#pragma unroll
        for (int i = 0; i < kCopies; ++i) {
          row[i] = item.first + min(copy_row + kApart * i, item.rows - 1);
          if constexpr (GATED) row[i] = item.expert == a.experts ? row[i] - a.tokens * a.top_k : a.token_of_row[row[i]];
        }
      };

      Stage<kWideStages> to, ready;    // the stage to fill; the stage before, whose rows of x have not been waited for
      bool begun = false;
      const auto announce = [&] {
        ptx::fence_async();
        __syncwarp();
        if (lane == 0) ptx::barrier_arrive(full(ready.index));
        ready.next();
      };
      WideItem item = item_of(blockIdx.x);
      if (item.rows > 0) find_rows(item);
      while (item.rows > 0) {
        const char *x[kCopies];
#pragma unroll
        for (int i = 0; i < kCopies; ++i) x[i] = x_base + row[i] * x_row_bytes;
        const bool shared_expert = item.expert == a.experts;
        const void *map = shared_expert ? &maps.shared : &maps.routed;
        const int first_weight = (shared_expert ? 0 : item.expert * (GATED ? 2 * a.inner : a.hidden)) + item.part * (GATED ? 1 : 2) * kWideHalf;
        const int second_weight = first_weight + (GATED ? inner_of(item) : kWideHalf);
        if (tid == 0) shared.taken = static_cast<int>(gridDim.x) + atomicAdd(a.tile_count + (GATED ? 2 : 3), 1);
        const int turns = turns_of(item);
        WideItem next;
        for (int turn = 0; turn < turns; ++turn) {
          ptx::barrier_wait(free(to.index), to.parity ^ 1);
          if (tid == 0) {
            if (turn == 0) shared.item[to.index] = item;
            const uint32_t w = w_tiles + to.index * 2 * kWideBox;
            ptx::barrier_expect(full(to.index), 2 * kWideBox);
            ptx::copy_box(w, map, turn * kWideInputs, first_weight, 0, 0, full(to.index));
            ptx::copy_box(w + kWideBox, map, turn * kWideInputs, second_weight, 0, 0, full(to.index));
          }
#pragma unroll
          for (int i = 0; i < kCopies; ++i) {
            ptx::copy_async_or_zero(to_row + to.index * kWideXTile + i * kApart * 128, x[i], copy_row + kApart * i < item.rows ? 16 : 0);
            x[i] += 128;
          }
          ptx::copy_async_commit();
          to.next();
          if (begun) {
            ptx::copy_async_wait<1>();
            announce();
          }
          begun = true;
          // The next item, and then its rows, are looked up while this one is copied.
          if (turn == min(1, turns - 1)) {
            ptx::group_barrier<kWideCopyThreads>(1);
            next = item_of(shared.taken);
            ptx::group_barrier<kWideCopyThreads>(1);
          }
          if (turn == min(3, turns - 1) && next.rows > 0) find_rows(next);
        }
        item = next;
      }
      if (begun) {
        ptx::copy_async_wait<0>();
        announce();
      }
      ptx::barrier_wait(free(to.index), to.parity ^ 1);
      if (tid == 0) {
        shared.item[to.index].rows = 0;
        ptx::barrier_arrive(full(to.index));
      }
      announce();
    } else {
      more_registers<kWideMathRegisters>();
      const int first_row = (warpgroup - 1) * 64, warp = tid % 128 / 32, g = lane >> 2, t = lane & 3;
      Stage<kWideStages> at;
      const auto release = [&](int stage) {
        if (lane == 0) ptx::barrier_arrive(free(stage));
      };
      while (true) {
        ptx::barrier_wait(full(at.index), at.parity);
        // Lane 0 releases the stage, so lane 0 reads the item, and hands it to the others. By the exchange the compiler also knows that
        // all lanes have the same.
        WideItem item = {};
        if (lane == 0) item = shared.item[at.index];
        for (int *field : {&item.expert, &item.first, &item.rows, &item.part}) *field = __shfl_sync(0xffffffffu, *field, 0);
        if (item.rows == 0) break;
        const int turns = turns_of(item);
        const int rows = item.rows - first_row;
        if (rows <= 0) {
          for (int turn = 0; turn < turns; ++turn, at.next()) {
            ptx::barrier_wait(full(at.index), at.parity);
            release(at.index);
          }
          continue;
        }
        float acc[2 * kWideHalf / 8][4];
        int before = 0;
        for (int turn = 0; turn < turns; ++turn, at.next()) {
          ptx::barrier_wait(full(at.index), at.parity);
          const uint64_t x = wgmma::tile_of_columns(x_tiles + at.index * kWideXTile + first_row * 128);
          const uint64_t w = wgmma::tile_of_columns(w_tiles + at.index * 2 * kWideBox);
          wgmma::fence();
#pragma unroll
          for (int k = 0; k < kWideInputs / 16; ++k)
            wgmma::product_of_tiles<T>(acc, x + wgmma::bytes(32 * k), w + wgmma::bytes(32 * k), turn + k > 0);
          wgmma::commit();
          wgmma::wait<1>();
          if (turn > 0) release(before);
          before = at.index;
        }
        wgmma::wait<0>();
        wgmma::hold(acc);
        release(before);

        // Columns of up lie kWideHalf after those of gate. Four lanes store 32 columns of a row, 8 each.
        const int outputs = GATED ? inner_of(item) : a.hidden;
        const int first_output = item.part * (GATED ? 1 : 2) * kWideHalf + 8 * t;
        const int64_t stride = GATED ? a.h_stride : a.hidden;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int r = warp * 16 + half * 8 + g;
          T *to = static_cast<T *>(GATED ? a.h : a.rows) + (item.first + first_row + r) * stride + first_output;
#pragma unroll
          for (int i = 0; i < (GATED ? 1 : 2) * kWideHalf / 32; ++i) {
            uint32_t words[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
              float y[2] = {acc[4 * i + j][2 * half], acc[4 * i + j][2 * half + 1]};
              if constexpr (GATED)
                for (int c = 0; c < 2; ++c) y[c] = fast_silu(y[c]) * acc[kWideHalf / 8 + 4 * i + j][2 * half + c];
              words[j] = pack2<T>(y[0], y[1]);
            }
            transpose_words(words, t);
            if (r < rows && first_output + 32 * i < outputs) *reinterpret_cast<uint4 *>(to + 32 * i) = {words[0], words[1], words[2], words[3]};
          }
        }
      }
    }
  }
}

}  // namespace moe
}  // namespace gdn
