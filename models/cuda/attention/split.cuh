// The division of the work of gdn_attention: the rows and keys of a block, and the place of its partial sums.
//
// The rows of a sequence and kv head are its new tokens times the query heads of the kv head, token by token. A block has
// `rows_a_tile` of them and one share of their keys. Shares follow from the length on the device, not from the plan's:
// all blocks of a grid have work from the first tile of keys a block on, whatever length a captured launch is replayed at.
#pragma once

#include <type_traits>

#include "cache.cuh"

namespace gdn {
namespace attention {

constexpr int kThreads = 128, kWarps = 4;
constexpr int kMaxSplits = 256;

// Division by a number that the host knows, as a multiplication. NOTES: a division is about 40 dependent instructions, and five
// of them would precede the first load of a block that runs for a few us.
struct Divisor {
  uint32_t value, inverse;    // ceil(2^32 / value): exact for x * value < 2^32

  static Divisor of(int64_t value) {
    return {static_cast<uint32_t>(value), static_cast<uint32_t>(((int64_t{1} << 32) + value - 1) / value)};
  }
  // Whether it divides all x up to this.
  bool divides(int64_t x) const { return value == 1 || x * value < int64_t{1} << 32; }

  __device__ __forceinline__ int quotient(int x) const {
    return value == 1 ? x : static_cast<int>(__umulhi(static_cast<uint32_t>(x), inverse));
  }
  __device__ __forceinline__ int rest(int x) const { return x - quotient(x) * static_cast<int>(value); }
};

constexpr int kCombineThreads = 256;
// Shares that a block reads at once. Few of them leave room for more columns: with many, the blocks exceed a wave, which costs
// more than the sums.
constexpr int kManySides = 16, kFewSides = 4;

// Columns of a row that a block has, four a thread.
constexpr int combine_columns(int sides) { return kCombineThreads / sides * 4; }
// By the largest number of shares.
constexpr int combine_sides(int splits) { return splits <= 2 * kFewSides ? kFewSides : kManySides; }

// The arguments of a launch besides its parameters.
struct Plan {
  int32_t splits;          // shares of the keys at most
  Divisor by_splits;
  int32_t row_tiles;       // of a sequence and kv head, the longest
  bool search;             // of the kernel for prompts: a block finds its tile from the lengths on the device
  int32_t rows_a_tile, keys_a_tile;    // powers of two; of the second the logarithm too
  int32_t keys_bits;
  Divisor group;           // query heads a kv head
  int32_t max_tokens;
  float scale;             // of a score, for powers of two
  bool overlap;            // of the blocks that read keys
  float *partial;          // [row, split, head_dim]: unnormalised sums; a row is (sequence * max_tokens + token) * heads + head
  float2 *sums;            // [row, split]: the largest score and the sum of the weights relative to it
};

// The keys that a tile of rows sees, from `first` on: with a window from the first that the first row sees. Without one `first` is
// 0. With a window all positions count from the start of the ring's turn that `first` is in, and `end` is less than two turns
// later.
struct Keys {
  int position, first, end;    // position: of the first new token
};

template <bool WINDOW>
__device__ __forceinline__ Keys keys_of(const Plan &plan, int capacity, int window, int position, int rows, int row_tile) {
  const int last = min((row_tile + 1) * plan.rows_a_tile, rows) - 1;
  if constexpr (WINDOW) {
    const int seen = position + plan.group.quotient(row_tile * plan.rows_a_tile) + 1;
    const int end = position + plan.group.quotient(last) + 1;
    // The ring holds the last `capacity` positions, and all new tokens are in it already: those of later tiles have taken the places
    // of the first ones.
    const int held = position + plan.group.quotient(rows) - capacity;
    const int first = max(max(seen - window, held), 0), turn = first / capacity * capacity;
    return {position - turn, first - turn, end - turn};
  }
  return {position, 0, static_cast<int>(min(static_cast<uint32_t>(position) + static_cast<uint32_t>(plan.group.quotient(last)) + 1u,
                                            static_cast<uint32_t>(capacity)))};
}

// Tiles of keys are tiles of the cache's rows. Those of a ring's second turn follow those of the first, whose last may be short.
struct Tile {
  int row, start, count;    // in the cache; the position of that row; keys

  // KEYS: of a tile.
  template <bool WINDOW, int KEYS> static __device__ __forceinline__ Tile of(const gdn_kv_cache &c, int tile) {
    if constexpr (WINDOW) {
      const int turn = (c.capacity + KEYS - 1) / KEYS, row = (tile < turn ? tile : tile - turn) * KEYS;
      return {row, tile < turn ? row : row + c.capacity, min(KEYS, c.capacity - row)};
    }
    return {tile * KEYS, tile * KEYS, KEYS};
  }
};

// The tile of a ring that holds a position; `quotient` divides by the keys of a tile, of which there are `keys`.
template <typename F>
__device__ __forceinline__ int tile_of_ring(const gdn_kv_cache &c, int position, int keys, F &&quotient) {
  return position < c.capacity ? quotient(position) : quotient(c.capacity + keys - 1) + quotient(position - c.capacity);
}

// The keys in shares of `each` tiles, from tile `first` on.
struct Shares {
  int first, tiles, each;

  template <bool WINDOW> static __device__ __forceinline__ Shares of(const Plan &plan, const gdn_kv_cache &c, const Keys &keys) {
    if constexpr (WINDOW) {
      if (keys.end == 0) return Shares(plan, 0, 0);
      const auto tile = [&](int position) {
        return tile_of_ring(c, position, plan.keys_a_tile, [&](int x) { return x >> plan.keys_bits; });
      };
      const int first = tile(keys.first);
      return Shares(plan, first, tile(keys.end - 1) + 1 - first);
    }
    return Shares(plan, 0, (keys.end + plan.keys_a_tile - 1) >> plan.keys_bits);
  }

  __device__ __forceinline__ Shares(const Plan &plan, int first, int tiles)
      : first(first), tiles(tiles), each(max(plan.by_splits.quotient(tiles + plan.splits - 1), 1)) {}

  // Shares that have any.
  __device__ __forceinline__ int count() const { return (tiles + each - 1) / each; }
};

// A tile of the rows of a sequence and kv head.
struct Rows {
  int n, kv_head, first_row;
  Tokens tokens;
  int64_t slot;
  int rows;        // of the sequence and kv head; 0: nothing to do
  int position, first_key, keys;    // keys: the end of those that the last row sees; see Keys

  template <bool WINDOW>
  __device__ __forceinline__ Rows(const gdn_attention_params &p, const Plan &plan, int n, int kv_head, int row_tile,
                                  std::bool_constant<WINDOW>)
      : n(n), kv_head(kv_head), first_key(0) {
    // All loads about the sequence together.
    position = position_of<WINDOW>(p.cache, p.positions, n);
    slot = slot_of(p.cache.slots, n);
    tokens = tokens_of(p.seqs, n);
    first_row = row_tile * plan.rows_a_tile;
    rows = tokens.count * static_cast<int>(plan.group.value);
    if (first_row >= rows) {
      rows = 0;
      return;
    }
    if constexpr (WINDOW) {
      const Keys all = keys_of<WINDOW>(plan, p.cache.capacity, p.cache.window, position, rows, row_tile);
      position = all.position, first_key = slot < 0 ? 0 : all.first, keys = slot < 0 ? 0 : all.end;
    } else {
      keys = slot < 0 ? 0 : keys_of<WINDOW>(plan, p.cache.capacity, 0, position, rows, row_tile).end;
    }
  }

  // The end of the keys that a row of this tile sees.
  __device__ __forceinline__ int seen(const Plan &plan, int row) const {
    const int index = first_row + row;
    return index < rows ? min(position + plan.group.quotient(index) + 1, keys) : 0;
  }
  // The same, from `tile` on, and with a window where they begin.
  template <bool WINDOW>
  __device__ __forceinline__ int seen_of(const Tile &tile, int seen) const {
    return WINDOW ? min(seen - tile.start, tile.count) : seen - tile.start;
  }
  template <bool WINDOW>
  __device__ __forceinline__ int hidden_of(const gdn_kv_cache &c, const Tile &tile, int seen) const {
    return WINDOW ? max(seen - c.window, first_key) - tile.start : 0;
  }
  __device__ __forceinline__ int token(const Plan &plan, int row) const {
    return plan.group.quotient(first_row + row);
  }
  __device__ __forceinline__ int head(const Plan &plan, int row) const {
    return kv_head * static_cast<int>(plan.group.value) + plan.group.rest(first_row + row);
  }
};

// The work of one block: such a tile and a share of its keys.
struct Block : Rows {
  int split, first_tile, end_tile;

  // The grid is (splits * row tiles, kv heads, sequences). Late rows see most keys: they come first.
  template <bool WINDOW>
  __device__ __forceinline__ Block(const gdn_attention_params &p, const Plan &plan, std::bool_constant<WINDOW> window)
      : Block(p, plan, plan.by_splits.quotient(blockIdx.x), window) {}

 private:
  template <bool WINDOW>
  __device__ __forceinline__ Block(const gdn_attention_params &p, const Plan &plan, int late, std::bool_constant<WINDOW> window)
      : Rows(p, plan, blockIdx.z, blockIdx.y, plan.row_tiles - 1 - late, window),
        split(static_cast<int>(blockIdx.x) - late * plan.splits) {
    if (rows == 0) return;
    const Shares shares = Shares::of<WINDOW>(plan, p.cache, {position, first_key, keys});
    first_tile = split * shares.each, end_tile = min(first_tile + shares.each, shares.tiles);
    // Without any key the first share still writes zeros.
    if (split > 0 && first_tile >= shares.tiles) rows = 0;
    if constexpr (WINDOW) first_tile += shares.first, end_tile += shares.first;
  }
};

// The place of a row among the partial sums.
__device__ __forceinline__ int64_t partial_row(const Plan &plan, int heads, int n, int token, int head) {
  return (static_cast<int64_t>(n) * plan.max_tokens + token) * heads + head;
}

// 2^x; of -infinity 0.
__device__ __forceinline__ float power_of_two(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// A running maximum that nothing has entered stays -infinity; what is subtracted from scores must be finite.
__device__ __forceinline__ float finite_or_zero(float x) { return x == -INFINITY ? 0.f : x; }

}  // namespace attention
}  // namespace gdn
