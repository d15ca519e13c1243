// The kernel for prompts with the instructions of sm_90a: bf16 and f16, many new tokens.
//
// A block has 128 rows (tokens times query heads of a kv head, token by token) and all keys that they see, and reads these from
// the last tile to the first, so that masked tiles come first. Three warpgroups:
//   - one of single warps: one copies tiles of keys, one tiles of values, the others clear the rows past the last key,
//   - two of arithmetic, 64 rows each, with sums, scores and weights in registers.
// A warpgroup of arithmetic starts the scores of a tile, then the product of the previous tile's weights and values; during the
// latter it computes the weights of the former. The two alternate, so that the softmax of one overlaps the products of the other.
#pragma once

#include "mma.cuh"
#include "prompt.h"
#include "prompt_products.cuh"

namespace gdn {
namespace attention {

// Heads of up to DIM.
template <int DIM> struct Prompt {
  static constexpr int kGroups = 2;    // warpgroups of arithmetic
  static constexpr int kThreads = 128 * (1 + kGroups);
  static constexpr int kKeys = prompt_keys(DIM);
  static constexpr int kStages = DIM == 256 ? 2 : DIM == 128 ? 3 : 4;
  static constexpr int kBox = kKeys * 128, kTile = DIM / 64 * kBox;    // bytes
  static constexpr int kCopyRegisters = 24, kMathRegisters = 240;
  static_assert(64 * kGroups == kPromptRows && kKeys % 16 == 0, "tiles");
  static_assert(kCopyRegisters + kGroups * kMathRegisters <= (1 + kGroups) * (65536 / kThreads / 8 * 8), "registers");

  struct Shared {
    alignas(1024) uint8_t queries[kGroups][64 * DIM * 2];    // then gates, then outputs
    uint8_t keys[kStages][kTile], values[kStages][kTile];
    // Of a stage: the tile has come; all have read it. Of the last tile of values: the rows past the last key are zero.
    uint64_t keys_full[kStages], keys_free[kStages], values_full[kStages], values_free[kStages], cleared;
  };
  static_assert(sizeof(Shared) <= 227 * 1024, "shared memory");
};

__device__ __forceinline__ void prefetch_map(const CUtensorMap *map) {
#if __CUDA_ARCH__ >= 900
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
#endif
}

// A barrier of both warpgroups of arithmetic: 128 threads wait, the other 128 arrive without a wait.
__device__ __forceinline__ void order_wait(int id) { asm volatile("bar.sync %0, 256;" ::"r"(id) : "memory"); }
__device__ __forceinline__ void order_arrive(int id) { asm volatile("bar.arrive %0, 256;" ::"r"(id) : "memory"); }

// Runs fn(row of the warp's 16, piece) over the 16-byte pieces of a warp's rows, whole rows at a time.
//
// NOTES: not unrolled in full, or ptxas would keep the addresses of queries through the whole loop, for gates and outputs.
template <int DIM, typename F> __device__ __forceinline__ void for_pieces(int lane, F &&fn) {
  constexpr int kPieces = DIM / 8, kTogether = 32 / kPieces;
#pragma unroll(kTogether == 4 ? 2 : 4)
  for (int i = 0; i < 16 / kTogether; ++i) fn(i * kTogether + lane / kPieces, lane % kPieces);
}

// Starts copies of a warp's rows `first` .. `first` + 15 of queries or gates to shared memory; zero past the last row.
template <typename T, int DIM>
__device__ __forceinline__ void copy_rows(const gdn_heads &x, int head_dim, const Plan &plan, const Rows &b, int first,
                                          uint32_t tile, int warp, int lane) {
  for_pieces<DIM>(lane, [&](int r, int piece) {
    const bool in = b.first_row + first + r < b.rows && piece * 8 < head_dim;
    const T *source = heads_at<T>(x, b.n, b.tokens.first + b.token(plan, first + r), b.head(plan, first + r)) + piece * 8;
    ptx::copy_async_or_zero(piece_in(tile, 64, 16 * warp + r, piece), source, in ? 16 : 0);
  });
  ptx::copy_async_commit();
}

// A number that is equal in a warp, in a form that the compiler recognises: in a branch that it considers divergent it waits for
// every product, and keeps loop counters in the registers of every lane.
__device__ __forceinline__ int uniform(int x) { return __shfl_sync(0xffffffffu, x, 0); }

struct RowTile {
  int n, kv_head, row_tile;
  bool exists;
};

// The tile of rows of this block. Late tiles see most keys: they come first, of all kv heads and sequences.
__device__ __forceinline__ RowTile row_tile_of_block(const gdn_attention_params &p, const Plan &plan, int lane) {
  const unsigned kv_heads = static_cast<unsigned>(p.num_kv_heads), seqs = static_cast<unsigned>(p.seqs.num_seqs);
  if (!plan.search) {
    const unsigned late = blockIdx.x / (kv_heads * seqs), which = blockIdx.x % (kv_heads * seqs);
    return {static_cast<int>(which / kv_heads), static_cast<int>(which % kv_heads), plan.row_tiles - 1 - static_cast<int>(late), true};
  }
  // Packed, few sequences may be as long as the longest: a block counts the tiles of all sequences, each warp for itself.
  // NOTES: no loop condition depends on loaded data, or ptxas considers all that follows divergent, and spills.
  const int item = static_cast<int>(blockIdx.x / kv_heads), kv_head = static_cast<int>(blockIdx.x % kv_heads);
  const auto tiles_of = [&](unsigned n) {
    const Tokens tokens = tokens_of(p.seqs, static_cast<int>(min(n, seqs - 1)));
    return n < seqs ? (tokens.count * static_cast<int>(plan.group.value) + kPromptRows - 1) / kPromptRows : 0;
  };
  const auto tiles_from = [&](int row_tile) {    // tiles numbered `row_tile` or later in their sequence
    int sum = 0;
    for (unsigned first = 0; first < seqs; first += 32) sum += max(tiles_of(first + lane) - row_tile, 0);
    return __reduce_add_sync(0xffffffffu, sum);
  };
  int row_tile = 0;
  for (int bit = 1 << (31 - __clz(plan.row_tiles)); bit > 0; bit /= 2)
    if (tiles_from(row_tile + bit) > item) row_tile += bit;
  int rest = item - tiles_from(row_tile + 1), n = -1;
  for (unsigned first = 0; first < seqs; first += 32) {
    const bool has = tiles_of(first + lane) > row_tile;
    const unsigned all = __ballot_sync(0xffffffffu, has);
    const unsigned found = __ballot_sync(0xffffffffu, has && __popc(all & ((1u << lane) - 1)) == rest);
    n = found ? static_cast<int>(first) + __ffs(static_cast<int>(found)) - 1 : n;
    rest -= __popc(all);
  }
  n = uniform(n);
  return {max(n, 0), kv_head, uniform(row_tile), n >= 0};
}

// The running softmax of a lane's two rows, 8 apart in a tile.
struct Softmax {
  float largest[2] = {-INFINITY, -INFINITY}, total[2] = {0.f, 0.f};    // scores unscaled; of this lane's keys alone

  // Turns scores into weights; `keep`: the factors that rescale earlier sums; `visible`: keys seen from this lane's first on.
  // With a window keys before `hidden` are not seen.
  template <bool MASKED, bool WINDOW, int N>
  __device__ __forceinline__ void weigh(float (&x)[N][4], float scale, const int (&visible)[2], const int (&hidden)[2],
                                        float (&keep)[2]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float most = largest[h];
#pragma unroll
      for (int c = 0; c < N; ++c)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          if ((MASKED && 8 * c + i >= visible[h]) || (WINDOW && 8 * c + i < hidden[h])) x[c][2 * h + i] = -INFINITY;
          most = fmaxf(most, x[c][2 * h + i]);
        }
      most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
      most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2));
      const float zero = finite_or_zero(most), minus = -zero * scale;
      keep[h] = power_of_two((largest[h] - zero) * scale);    // exactly 1 where nothing changed
      largest[h] = most;
      float added = 0.f;
#pragma unroll
      for (int c = 0; c < N; ++c)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          x[c][2 * h + i] = power_of_two(fmaf(x[c][2 * h + i], scale, minus));
          added += x[c][2 * h + i];
        }
      total[h] = fmaf(total[h], keep[h], added);
    }
  }

  // After all weights. NOTES: without it ptxas puts the wait for a running product before most of them. No sum is negative, and
  // fminf ignores NaN: the mask is always all lanes, which ptxas does not know.
  __device__ __forceinline__ void settle() const {
    const uint32_t none = __float_as_uint(fminf(total[0] + total[1], 0.f));
    asm volatile("bar.warp.sync %0;" ::"r"(0xffffffffu ^ none) : "memory");
  }
};

// The arithmetic of 64 rows.
// One function: products run between its steps, and ptxas must see that nothing touches their registers.
template <typename T, int DIM, bool WINDOW>
__device__ __forceinline__ void run_arithmetic(const gdn_attention_params &p, const Plan &plan,
                                            typename Prompt<DIM>::Shared &shared, const Rows &b, int first_tile, int tiles, int group,
                                            int warp, int lane) {
  using S = Prompt<DIM>;
  constexpr int kKeys = S::kKeys;
  const int first = 64 * group + 16 * warp;    // the warp's rows
  const uint32_t queries = ptx::shared_address(shared.queries[group]);
  const uint32_t keys = ptx::shared_address(shared.keys), values = ptx::shared_address(shared.values);
  const uint32_t keys_full = ptx::shared_address(shared.keys_full), keys_free = ptx::shared_address(shared.keys_free);
  const uint32_t values_full = ptx::shared_address(shared.values_full), values_free = ptx::shared_address(shared.values_free);
  const int order = 1 + group, together = 3 + group;    // barriers

  // Load the queries.
  copy_rows<T, DIM>(p.q, p.head_dim, plan, b, first, queries, warp, lane);
  const int quad = lane % 4;
  const int seen[2] = {b.seen(plan, first + lane / 4), b.seen(plan, first + lane / 4 + 8)};
  // Tiles from this one on hold keys that some row does not see; with a window all.
  const int masked = WINDOW ? first_tile : uniform(min(b.position + b.token(plan, 0) + 1, b.keys) / kKeys);
  if (group == 1) order_arrive(1);
  ptx::copy_async_wait<0>();
  ptx::fence_async();
  ptx::group_barrier<128>(together);
  float out[DIM / 8][4] = {}, x[kKeys / 8][4], keep[2];
  uint32_t weight[kKeys / 16][4];
  Softmax softmax;
  Stage<S::kStages> key, value;
  const auto visible_in = [&](int tile, int(&visible)[2], int(&hidden)[2]) {
    const Tile keys_of_tile = Tile::of<WINDOW, kKeys>(p.cache, tile);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      visible[h] = b.seen_of<WINDOW>(keys_of_tile, seen[h]) - 2 * quad;
      hidden[h] = b.hidden_of<WINDOW>(p.cache, keys_of_tile, seen[h]) - 2 * quad;
    }
  };
  const auto round_weights = [&] {
#pragma unroll
    for (int c = 0; c < kKeys / 16; ++c) {
      weight[c][0] = pack2<T>(x[2 * c][0], x[2 * c][1]), weight[c][1] = pack2<T>(x[2 * c][2], x[2 * c][3]);
      weight[c][2] = pack2<T>(x[2 * c + 1][0], x[2 * c + 1][1]), weight[c][3] = pack2<T>(x[2 * c + 1][2], x[2 * c + 1][3]);
    }
  };

  // The last tile: scores and weights.
  int tile = tiles - 1;
  {
    ptx::barrier_wait(keys_full + 8 * key.index, key.parity);
    start_scores<T, DIM>(x, queries, keys + key.index * S::kTile);
    wgmma::wait<0>();
    wgmma::hold(x);
    ptx::barrier_arrive(keys_free + 8 * key.index);
    key.next();
    int visible[2], hidden[2];
    visible_in(tile, visible, hidden);
    softmax.weigh<true, WINDOW>(x, plan.scale, visible, hidden, keep);
    round_weights();
  }
  ptx::barrier_wait(ptx::shared_address(&shared.cleared), 0);

  const auto step = [&](auto with_mask) {
    --tile;
    // Start the scores of this tile and the values of the one after it, in the order of the two warpgroups.
    ptx::barrier_wait(keys_full + 8 * key.index, key.parity);
    order_wait(order);
    start_scores<T, DIM>(x, queries, keys + key.index * S::kTile);
    ptx::barrier_wait(values_full + 8 * value.index, value.parity);
    start_values<T>(out, weight, values + value.index * S::kTile);
    order_arrive(order ^ 3);
    // Weights of this tile.
    wgmma::wait<1>();
    wgmma::hold(x);
    ptx::barrier_arrive(keys_free + 8 * key.index);
    key.next();
    int visible[2], hidden[2];
    visible_in(tile, visible, hidden);
    softmax.weigh<decltype(with_mask)::value, WINDOW>(x, plan.scale, visible, hidden, keep);
    softmax.settle();
    // Rescale the sums.
    wgmma::wait<0>();
    wgmma::hold(out);
    wgmma::hold(weight);
    ptx::barrier_arrive(values_free + 8 * value.index);
    value.next();
    round_weights();
#pragma unroll
    for (int c = 0; c < DIM / 8; ++c)
#pragma unroll
      for (int i = 0; i < 4; ++i) out[c][i] *= keep[i / 2];
  };
#pragma unroll 1
  while (tile > masked) step(std::true_type{});
#pragma unroll 1
  while (!WINDOW && tile > 0) step(std::false_type{});

  // The first tile's values. No warp reads the queries any more: gates replace them.
  ptx::group_barrier<128>(together);
  if (p.gate.ptr) copy_rows<T, DIM>(p.gate, p.head_dim, plan, b, first, queries, warp, lane);
  ptx::barrier_wait(values_full + 8 * value.index, value.parity);
  if (group == 0) order_wait(1);    // as often as the other has arrived
  start_values<T>(out, weight, values + value.index * S::kTile);
  float factor[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float total = group_sum<4>(softmax.total[h]);
    factor[h] = total == 0.f ? 0.f : 1.f / total;
  }
  wgmma::wait<0>();
  wgmma::hold(out);
  wgmma::hold(weight);

  // Divide and gate, through shared memory, so that whole rows are written; a warp writes its own rows.
  ptx::copy_async_wait<0>();
  __syncwarp();
  const auto finish = [&](auto gated) {
#pragma unroll
    for (int c = 0; c < DIM / 16; ++c) {
      const uint32_t address = piece_in(queries, 64, 16 * warp + lane % 16, 2 * c + lane / 16);
      uint32_t word[4];
      if constexpr (decltype(gated)::value) ptx::load_matrices(word, address);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float f = factor[i % 2];
        float y[2];
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          y[j] = out[2 * c + i / 2][i % 2 * 2 + j] * f;
          if constexpr (decltype(gated)::value) y[j] *= fast_sigmoid(to_float(reinterpret_cast<const T *>(&word[i])[j]));
          y[j] = f == 0.f ? 0.f : y[j];
        }
        word[i] = pack2<T>(y[0], y[1]);
      }
      ptx::store_matrices(address, word);
    }
  };
  if (p.gate.ptr) finish(std::true_type{});
  else finish(std::false_type{});
  __syncwarp();
  for_pieces<DIM>(lane, [&](int r, int piece) {
    const uint4 v = ptx::load_shared(piece_in(queries, 64, 16 * warp + r, piece));
    if (b.first_row + first + r < b.rows && piece * 8 < p.head_dim)
      *reinterpret_cast<uint4 *>(out_heads_at<T>(p.o, b.n, b.tokens.first + b.token(plan, first + r), b.head(plan, first + r)) +
                                 piece * 8) = v;
  });
}

template <typename T, int DIM, bool WINDOW>
__global__ void __launch_bounds__(Prompt<DIM>::kThreads, 1)
    prompt_kernel(const __grid_constant__ gdn_attention_params p, const __grid_constant__ Plan plan,
                  const __grid_constant__ PromptMaps maps) {
  if (!ptx::kSm90a) return;
  using S = Prompt<DIM>;
  extern __shared__ __align__(1024) uint8_t raw_shared[];
  typename S::Shared &shared = *reinterpret_cast<typename S::Shared *>(raw_shared);
  const int group = uniform(static_cast<int>(threadIdx.x) / 128), warp = uniform(static_cast<int>(threadIdx.x) / 32 % 4);
  const int lane = ptx::kept_lane();

  // Find the block's rows.
  const RowTile row_tile = row_tile_of_block(p, plan, lane);
  Rows b(p, plan, row_tile.n, row_tile.kv_head, row_tile.row_tile, std::bool_constant<WINDOW>());
  b.rows = uniform(row_tile.exists ? b.rows : 0), b.keys = uniform(b.keys);
  const uint32_t keys_full = ptx::shared_address(shared.keys_full), keys_free = ptx::shared_address(shared.keys_free);
  const uint32_t values_full = ptx::shared_address(shared.values_full), values_free = ptx::shared_address(shared.values_free);
  const uint32_t cleared = ptx::shared_address(&shared.cleared);
  // Initialise the barriers.
  if (threadIdx.x == 0) {
    prefetch_map(&maps.keys);
    prefetch_map(&maps.values);
    for (int i = 0; i < S::kStages; ++i) {
      ptx::barrier_init(keys_full + 8 * i, 1);
      ptx::barrier_init(values_full + 8 * i, 1);
      ptx::barrier_init(keys_free + 8 * i, 128 * S::kGroups);
      ptx::barrier_init(values_free + 8 * i, 128 * S::kGroups);
    }
    ptx::barrier_init(cleared, 64);
    ptx::barriers_initialised();
  }
  ptx::grid_dependency_wait();
  ptx::grid_dependency_launch();
  if (b.rows == 0) return;
  if (b.keys == 0) {    // padding, or a cache without capacity
    for (int i = threadIdx.x; i < kPromptRows * (DIM / 8); i += S::kThreads) {
      const int row = i / (DIM / 8), column = i % (DIM / 8) * 8;
      if (b.first_row + row < b.rows && column < p.head_dim)
        *reinterpret_cast<uint4 *>(out_heads_at<T>(p.o, b.n, b.tokens.first + b.token(plan, row), b.head(plan, row)) + column) =
            make_uint4(0, 0, 0, 0);
    }
    return;
  }
  __syncthreads();
  // The tiles of keys, from `first_tile` to the one before `tiles`.
  int first_tile = 0, tiles;
  if constexpr (WINDOW) {
    const auto tile = [&](int position) {
      return uniform(tile_of_ring(p.cache, position, S::kKeys, [](int x) { return x / S::kKeys; }));
    };
    b.first_key = uniform(b.first_key);
    first_tile = tile(b.first_key), tiles = tile(b.keys - 1) + 1;
  } else {
    tiles = uniform((b.keys + S::kKeys - 1) / S::kKeys);
  }

  if (group == 0) {
    fewer_registers<S::kCopyRegisters>();
    // Copy keys and values, each by its own warp, so that neither waits for the other's stage.
    if (warp < 2) {
      const CUtensorMap &map = warp == 0 ? maps.keys : maps.values;
      const uint32_t tiles_address = ptx::shared_address(warp == 0 ? shared.keys : shared.values);
      const uint32_t full = warp == 0 ? keys_full : values_full, free = warp == 0 ? keys_free : values_free;
      const int slot = static_cast<int>(b.slot);
      Stage<S::kStages> stage;
      if (lane == 0)
#pragma unroll 1
        for (int tile = tiles - 1; tile >= first_tile; --tile, stage.next()) {
          ptx::barrier_wait(free + 8 * stage.index, stage.parity ^ 1);    // passes at once in the first round
          ptx::barrier_expect(full + 8 * stage.index, S::kTile);
#pragma unroll
          for (int c = 0; c < DIM / 64; ++c)
            ptx::copy_box(tiles_address + stage.index * S::kTile + c * S::kBox, &map, 64 * c, Tile::of<WINDOW, S::kKeys>(p.cache, tile).row, b.kv_head, slot, full + 8 * stage.index);
        }
    } else {
      // Clear the values past the last key: zero times NaN is not zero.
      ptx::barrier_wait(values_full, 0);
      const int count = b.keys - Tile::of<WINDOW, S::kKeys>(p.cache, tiles - 1).start, words = (S::kKeys - count) * 8;
#pragma unroll 1
      for (int c = 0; c < DIM / 64; ++c)
#pragma unroll 1
        for (int i = static_cast<int>(threadIdx.x) - 64; i < words; i += 64)
          *reinterpret_cast<uint4 *>(shared.values[0] + c * S::kBox + count * 128 + i * 16) = make_uint4(0, 0, 0, 0);
      ptx::fence_async();
      ptx::barrier_arrive(cleared);
    }
    return;
  }
  more_registers<S::kMathRegisters>();
  run_arithmetic<T, DIM, WINDOW>(p, plan, shared, b, first_tile, tiles, group - 1, warp, ptx::lane_here());
}

}  // namespace attention
}  // namespace gdn
