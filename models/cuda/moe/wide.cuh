// Products of tiles of rows with their expert's weights, by the instructions of sm_90a: many tokens.
//
// A block multiplies a tile of up to 128 rows by 256 rows of their expert's weights, or 256 by 128 (many_kernel: 128 by 128), then takes the next
// tile, until none is left. One of its three warpgroups copies, 64 inputs at a time, into a ring in shared memory: weights and rows of h by the copy
// engine, rows of x by cp.async, since they lie apart. The other two multiply: 16-bit weights by 64 rows each, weights in e4m3 by all rows, and each
// half of the weights.
#pragma once

#include "wide_e4m3.cuh"
#include "wide_tiles.cuh"

namespace gdn {
namespace moe {

constexpr int kWideCopyRegisters = 88, kWideMathRegisters = 208;
static_assert(kWideCopyRegisters + 2 * kWideMathRegisters <= 3 * 168, "more than a block is launched with, for which it would wait for ever");

// The weights of all experts and of the shared one, [rows, inputs], and h.
struct WideMaps {
  CUtensorMap routed, shared, h;
};

// GATED: h = silu(gate) * up is written; else mlp(x).
template <typename T, typename W, bool GATED>
__global__ void __launch_bounds__(kWideThreads, 1)
    wide_kernel(const __grid_constant__ Args a, const __grid_constant__ WideMaps maps) {
  if constexpr (ptx::kSm90a) {
    extern __shared__ __align__(1024) unsigned char wide_bytes[];
    using Shared = WideShared<W>;
    Shared &shared = *reinterpret_cast<Shared *>(wide_bytes);
    const int tid = threadIdx.x, lane = tid % 32;
    const int warpgroup = __shfl_sync(0xffffffffu, tid / 128, 0);    // by an exchange, so that the compiler knows all lanes have the same
    if (tid == 0) {
      for (int s = 0; s < Shared::kStages; ++s) {
        ptx::barrier_init(shared.full_at(s), GATED ? kWideCopyThreads / 32 + 1 : 1);    // a warp's rows of x; the boxes
        ptx::barrier_init(shared.free_at(s), 8);
      }
      ptx::barriers_initialised();
    }
    __syncthreads();
    ptx::grid_dependency_wait();
    ptx::grid_dependency_launch();

    if (warpgroup == 0) {
      fewer_registers<kWideCopyRegisters>();
      constexpr int kElements = kWideInputs * static_cast<int>(sizeof(W)) / 2;    // of a map of weights, in a row of a box
      // Tiles of the shared expert come last.
      const auto parts_of = [&](int inner) {
        constexpr int kEach = GATED ? Shared::kHalf : 2 * Shared::kHalf;
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
      constexpr int kApart = kWideCopyThreads / 8, kCopies = Shared::kRows / kApart;
      const int piece = tid % 8, copy_row = tid / 8;
      const uint32_t to_row = shared.x_at(0) + copy_row * 128 + ((piece ^ copy_row % 8) << 4);
      const char *x_base = static_cast<const char *>(a.x) + piece * 16;
      const int64_t x_row_bytes = a.x_stride * static_cast<int64_t>(sizeof(T));
      int row[kCopies];
      [[maybe_unused]] const auto find_rows = [&](const WideItem &item) {
#pragma unroll
        for (int i = 0; i < kCopies; ++i) {
          row[i] = item.first + min(copy_row + kApart * i, item.rows - 1);
          row[i] = item.expert == a.experts ? row[i] - a.tokens * a.top_k : a.token_of_row[row[i]];
        }
      };

      Stage<Shared::kStages> to, ready;    // the stage to fill; the stage before, whose rows of x have not been waited for
      bool begun = false;
      const auto announce = [&] {
        ptx::fence_async();
        __syncwarp();
        if (lane == 0) ptx::barrier_arrive(shared.full_at(ready.index));
        ready.next();
      };
      WideItem item = item_of(blockIdx.x);
      if (GATED && item.rows > 0) find_rows(item);
      while (item.rows > 0) {
        [[maybe_unused]] const char *x[kCopies];
        if constexpr (GATED) {
#pragma unroll
          for (int i = 0; i < kCopies; ++i) x[i] = x_base + row[i] * x_row_bytes;
        }
        const bool shared_expert = item.expert == a.experts;
        const void *map = shared_expert ? &maps.shared : &maps.routed;
        const int first_weight = (shared_expert ? 0 : item.expert * (GATED ? 2 * a.inner : a.hidden)) + item.part * (GATED ? 1 : 2) * Shared::kHalf;
        const int second_weight = first_weight + (GATED ? inner_of(a, item) : Shared::kHalf);
        int taken = 0;
        if (tid == 0) taken = static_cast<int>(gridDim.x) + atomicAdd(a.tile_count + (GATED ? 2 : 3), 1);
        const int turns = turns_of<GATED>(a, item), boxes = GATED ? 0 : (item.rows + kWideHRows - 1) / kWideHRows;
        WideItem next;
        for (int turn = 0; turn < turns; ++turn) {
          ptx::barrier_wait(shared.free_at(to.index), to.parity ^ 1);
          if (tid == 0) {
            if (turn == 0) shared.item[to.index] = item;
            const uint32_t w = shared.w_at(to.index), full = shared.full_at(to.index);
            ptx::barrier_expect(full, 2 * Shared::kBox + boxes * kWideHBox);
            ptx::copy_box(w, map, turn * kElements, first_weight, 0, 0, full);
            ptx::copy_box(w + Shared::kBox, map, turn * kElements, second_weight, 0, 0, full);
            for (int box = 0; box < boxes; ++box)
              ptx::copy_box(shared.x_at(to.index) + box * kWideHBox, &maps.h, turn * kWideInputs, item.first + box * kWideHRows, 0, 0, full);
          }
          if constexpr (GATED) {
#pragma unroll
            for (int i = 0; i < kCopies; ++i) {
              // What lies in the rows past the last one spoils no other row's products.
              if (copy_row + kApart * i < item.rows) ptx::copy_async(to_row + to.index * Shared::kXTile + i * kApart * 128, x[i]);
              x[i] += 128;
            }
            ptx::copy_async_commit();
            if (begun) {
              ptx::copy_async_wait<1>();
              announce();
            }
            begun = true;
          }
          to.next();
          // The next item, and then its rows, are looked up while this one is copied.
          if (turn == min(2, turns - 1)) {
            if (tid == 0) shared.taken = taken;
            ptx::group_barrier<kWideCopyThreads>(1);
            next = item_of(shared.taken);
            ptx::group_barrier<kWideCopyThreads>(1);
          }
          if (GATED && turn == min(5, turns - 1) && next.rows > 0) find_rows(next);
        }
        item = next;
      }
      if (begun) {
        ptx::copy_async_wait<0>();
        announce();
      }
      ptx::barrier_wait(shared.free_at(to.index), to.parity ^ 1);
      if (tid == 0) {
        shared.item[to.index].rows = 0;
        ptx::barrier_arrive(shared.full_at(to.index));
      }
      if constexpr (GATED) announce();
    } else {
      more_registers<kWideMathRegisters>();
      if constexpr (std::is_same_v<W, E4m3>)
        multiply_e4m3<T, GATED>(a, shared, warpgroup - 1);
      else
        multiply_16_bits<T, GATED>(a, shared, warpgroup - 1);
    }
  }
}

}  // namespace moe
}  // namespace gdn
