// How a block streams tiles of keys and values through shared memory.
#pragma once

#include "common/ptx.cuh"
#include "split.cuh"

namespace gdn {
namespace attention {

// Tiles of 16 KB, keys and values alternately, SLOTS of them being copied or in use. The 16-byte piece `c` of row `r` of a tile
// lies at c ^ r % 8, so that eight rows of a column are in different banks. Rows past the last key, before the first, and columns
// past head_dim are zero.
template <typename T, int DIM, int SLOTS, bool WINDOW> struct Ring {
  static constexpr int kVec = 16 / sizeof(T), kPieces = DIM / kVec;    // elements a piece, pieces a row
  static constexpr int kTileBytes = 16384, kKeys = kTileBytes / (DIM * static_cast<int>(sizeof(T)));
  static constexpr int kBytes = SLOTS * kTileBytes;
  static constexpr int kRowStep = kThreads / kPieces, kCopies = kKeys / kRowStep;

  const T *global_keys, *global_values;    // this thread's piece of row 0 of the share; with a window of the cache
  const gdn_kv_cache &cache;
  uint32_t shared_piece;                   // its place in slot 0
  int64_t token_stride;
  int first, count;    // key of row 0; tiles of keys and values together
  int first_tile, first_key, keys, row;
  bool column;         // whether head_dim reaches this piece
  int used = 0;        // slot of the tile that is read next

  __device__ __forceinline__ Ring(uint8_t *smem, const gdn_attention_params &p, const Block &b)
      : cache(p.cache), token_stride(p.cache.token_stride), first(b.first_tile * kKeys), count(2 * max(b.end_tile - b.first_tile, 0)),
        first_tile(b.first_tile), first_key(b.first_key), keys(b.keys) {
    const int piece = threadIdx.x % kPieces;
    row = threadIdx.x / kPieces;
    column = piece * kVec < p.head_dim;
    const int64_t offset = cache_offset(p.cache, max(b.slot, static_cast<int64_t>(0)), b.kv_head) +
                           (WINDOW ? row : first + row) * token_stride + piece * kVec;
    global_keys = static_cast<const T *>(p.cache.k) + offset;
    global_values = static_cast<const T *>(p.cache.v) + offset;
    shared_piece = ptx::shared_address(smem) + row * (DIM * sizeof(T)) + piece * 16;
  }

  // Starts the copies of tile `i`. kRowStep divides 8 or is a multiple of it, so that r % 8 takes few values a thread.
  __device__ __forceinline__ void copy_tile(int i, int slot) {
    if (i < count) {
      const int key = i / 2 * kKeys + row;    // in the share
      const T *x = i % 2 ? global_values : global_keys;
      int begin = 0, end = 0;    // of the rows with a window
      if constexpr (WINDOW) {
        const Tile tile = Tile::of<WINDOW, kKeys>(cache, first_tile + i / 2);
        begin = first_key - tile.start - row, end = min(keys - tile.start, tile.count) - row;
        x += tile.row * token_stride;
      } else {
        x += i / 2 * kKeys * token_stride;
      }
      const uint32_t base = shared_piece + slot * kTileBytes;
#pragma unroll
      for (int c = 0; c < kCopies; ++c, x += kRowStep * token_stride) {
        const int r = c * kRowStep;
        const bool in = column && (WINDOW ? r >= begin && r < end : first + key + r < keys);
        const uint32_t address = base + r * (DIM * sizeof(T));
        // Row r + row: its pieces are exchanged by flipping three bits of the address.
        ptx::copy_async_or_zero(address ^ ((row + r) % 8 * 16), x, in ? 16 : 0);
      }
    }
    ptx::copy_async_commit();    // empty past the end, so that one count fits all
  }

  // Starts the first SLOTS - 1 tiles. Tiles of old keys alone start before the wait for the kernel that writes the new ones.
  __device__ __forceinline__ void start(int position) {
    int i = 0;
    const auto is_old = [&](int i) {
      if constexpr (WINDOW) return Tile::of<WINDOW, kKeys>(cache, first_tile + i / 2).start + kKeys <= position;
      return first + (i / 2 + 1) * kKeys <= position;
    };
    for (; i < SLOTS - 1 && i < count && is_old(i); ++i) copy_tile(i, i);
    ptx::grid_dependency_wait();
    ptx::grid_dependency_launch();
    for (; i < SLOTS - 1; ++i) copy_tile(i, i);
  }

  // The offset of tile `i`, complete and visible to all threads, as are their earlier writes to shared memory. All threads have
  // read the tile before it, and its slot is refilled.
  __device__ __forceinline__ uint32_t next(int i) {
    ptx::copy_async_wait<SLOTS - 2>();
    __syncthreads();
    const int slot = used;
    copy_tile(i + SLOTS - 1, slot == 0 ? SLOTS - 1 : slot - 1);
    used = slot + 1 == SLOTS ? 0 : slot + 1;
    return slot * kTileBytes;
  }
};

}  // namespace attention
}  // namespace gdn
