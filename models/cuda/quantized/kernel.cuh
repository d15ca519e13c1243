// y = x w^T of packed weights for few rows of x: the weights stream once through shared memory into the matrix units. See README.md.
#pragma once

#include "common/convert.cuh"
#include "common/math.cuh"
#include "common/ptx.cuh"
#include "fixed.cuh"
#include "layout.cuh"
#include "unit.cuh"

namespace gdn {
namespace quantized {

constexpr int kWarps = 16, kThreads = 32 * kWarps;
constexpr int kMostStages = 2;    // units that a warp has under way. More would take L1 from the launches beside (README.md)
constexpr int kCluster = 4;    // blocks of a cluster
constexpr int kMeet = kWarps * kMostStages * 8;        // bytes; after the rings' barriers lies the barrier of what blocks of a cluster send each other
constexpr int kBarriers = kMeet + 16;

// A part of the outputs, and the blocks that work on it.
struct PartArgs {
  const char *w;
  int32_t type;
  int32_t outputs, column;             // of y: how many, and the first
  int32_t tiles, units;                // of 16 outputs; of a tile's inputs, in a cluster those that a block has
  int32_t up;                          // with swiglu: tiles from a gate's to up's of the same outputs, else 0
  int32_t turn;                        // tiles that a block works on from one barrier to the next
  int32_t stages;                      // of a warp's ring
  int32_t first_block, blocks;         // or clusters
  int32_t each, more;                  // tiles of a block; so many of the first blocks have one more
};

struct Args {
  PartArgs part[GDN_QUANTIZED_PARTS];
  const void *x;
  void *y;
  int64_t x_row, y_stride;     // bytes; elements
  int32_t parts, rows;
  int32_t inputs, chunks;      // of x; that a block has
  int32_t cluster;             // blocks that share the inputs of the same tiles. More than one: one part in one turn, without swiglu
  int32_t groups, per_group, group_size;    // as in gdn_quantized_params
  int32_t x_shared_row, scales_at, scales_row, partial_at, partial_size, meet_at, ring_at;    // shared memory: bytes. x lies after the barriers
};

// A warp's part of the units of a turn: those of its tiles one after the other, with swiglu a gate's tiles and then those of up. They are divided evenly.
struct Walk {
  int units;       // of the turn
  int at, left;    // the next, and how many

  // Where the part of a warp begins, and the warp that has a unit. Of fewer than there are warps each warp has one.
  static __device__ __forceinline__ int begin(int warp, int units) { return units >= kWarps ? warp * units / kWarps : min(warp, units); }
  static __device__ __forceinline__ int owner(int unit, int units) {
    return units >= kWarps ? quotient((unit + 1) * kWarps - 1, units) : unit;
  }

  __device__ __forceinline__ Walk(const PartArgs &part, int tiles, int warp) {
    units = tiles * (part.up ? 2 : 1) * part.units;
    at = begin(warp, units);
    left = begin(warp + 1, units) - at;
  }
};

// sum[16, 8] += a[16, 32] b[32, 8] of 8-bit integers.
__device__ __forceinline__ void mma16832(int (&sum)[4], const uint32_t *a, uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+r"(sum[0]), "+r"(sum[1]), "+r"(sum[2]), "+r"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Only where `active`; elsewhere b stays.
__device__ __forceinline__ void load_where(bool active, uint32_t (&b)[4], uint32_t address) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %5, 0;\n@p ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];\n}"
               : "+r"(b[0]), "+r"(b[1]), "+r"(b[2]), "+r"(b[3])
               : "r"(address), "r"(static_cast<uint32_t>(active))
               : "memory");
}

__device__ __forceinline__ float2 load_floats(uint32_t address) {
  const uint2 v = ptx::load_shared_8(address);
  return make_float2(__uint_as_float(v.x), __uint_as_float(v.y));
}

// Of chunk c of a unit and a row of x: what a lane's block adds to the sums of weights' rows g and g + 8. `x` are the lane's operands, `of_x` its block's scale
// and sum.
template <int TYPE>
__device__ __forceinline__ void add_products(float (&sum)[2], const uint32_t (&words)[16], const Scales<TYPE> &scales, int c,
                                             const uint32_t (&x0)[4], const uint32_t (&x1)[4], float2 of_x) {
  using F = Format<TYPE>;
  int products[F::kGroups][4] = {};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t(&x)[4] = i / 2 ? x1 : x0;
    mma16832(products[i * F::kGroups / 4], words + 4 * i, x[2 * (i % 2)], x[2 * (i % 2) + 1]);
  }
#pragma unroll
  for (int row = 0; row < 2; ++row) {
#pragma unroll
    for (int i = 0; i < F::kGroups; ++i) {
      const float product = static_cast<float>(products[i][2 * row] * 256 + products[i][2 * row + 1]);
      sum[row] = fmaf(product, scales.scale[c][row][i] * of_x.x, sum[row]);
    }
    if constexpr (F::kMinima) sum[row] = fmaf(-scales.minimum[c][row], of_x.y, sum[row]);
  }
}

// A warp's ring of units in shared memory.
struct Ring {
  uint32_t at, barriers;
  int stages, stage = 0, parity = 0, under_way = 0;

  __device__ __forceinline__ void begin(int lane) {
#if __CUDA_ARCH__ >= 900
    if (lane == 0) {
      for (int i = 0; i < stages; ++i) ptx::barrier_init(barriers + 8 * i, 1);
      ptx::barriers_initialised();
    }
    __syncwarp();
#endif
  }

  // `bytes` into a slot; slots are `each` apart.
  __device__ __forceinline__ void fetch(int slot, int each, const char *from, int bytes, int lane) {
#if __CUDA_ARCH__ >= 900
    if (lane == 0) {
      ptx::barrier_expect(barriers + 8 * slot, bytes);
      ptx::copy_bulk(at + slot * each, from, bytes, barriers + 8 * slot);
    }
#else
    for (int i = lane * 16; i < bytes; i += 512) ptx::copy_async(at + slot * each + i, from + i);
#endif
  }

  // After each fetch(), and instead of it where nothing is left to fetch.
  __device__ __forceinline__ void commit() {
#if __CUDA_ARCH__ < 900
    ptx::copy_async_commit();
#endif
  }

  // The oldest unit is there.
  __device__ __forceinline__ void wait() {
#if __CUDA_ARCH__ >= 900
    ptx::barrier_wait(barriers + 8 * stage, parity);
#else
    static_assert(kMostStages == 2);
    if (stages == 1) ptx::copy_async_wait<0>();
    else ptx::copy_async_wait<1>();
    __syncwarp();
#endif
  }

  __device__ __forceinline__ void next() {
    if (++stage == stages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// R: rows of x, at most.
template <typename T, int TYPE, int R>
__device__ __forceinline__ void multiply_part(const Args &a, const PartArgs &part, unsigned char *shared_bytes) {
  using F = Format<TYPE>;
  constexpr int kChunks = kChunksOf<TYPE>;
  const int lane = ptx::kept_lane(), warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x / 32), 0), g = lane >> 2, t = lane & 3;
  const uint32_t shared = ptx::shared_address(shared_bytes);
  int block = static_cast<int>(blockIdx.x) - part.first_block, rank = 0;
  if (a.cluster > 1) {
    rank = block % kCluster;
    block /= kCluster;
  }
  const int begin = block * part.each + min(block, part.more), end = begin + part.each + (block < part.more);

  // Initialise the barriers of the warp's ring and of the cluster.
  Ring ring = {shared + a.ring_at + warp * part.stages * F::kBytes, shared + warp * kMostStages * 8, part.stages};
  const int own = (end - begin) * a.rows * (kTile / kCluster);    // of the cluster's values, that this block adds up
  if (a.cluster > 1 && threadIdx.x == 0) ptx::barrier_init(shared + kMeet, 1);
  ring.begin(lane);
  if (a.cluster > 1) {
    if (threadIdx.x == 0) ptx::barrier_expect(shared + kMeet, own * kCluster * static_cast<int>(sizeof(float)));
    ptx::cluster_begin_arrive();
  }
  // The stream of units runs in front of their use, over the ends of turns. Units are skipped after those of a gate, up to up's, and in a cluster behind those that this block has of a tile.
  int fetch_first = begin, fetch_left = 0, to_gap = 0, gap = 0;
  const char *from = nullptr;
  const auto start_matrix = [&] {
    const Walk walk(part, min(part.turn, end - fetch_first), warp);
    fetch_left = walk.left;
    from = part.w + (static_cast<int64_t>(fetch_first) * a.cluster * part.units + walk.at) * F::kBytes;
    if (a.cluster > 1) {
      const int tile = quotient(walk.at, part.units);
      from += (rank + (kCluster - 1) * tile) * part.units * F::kBytes;
      to_gap = (tile + 1) * part.units - walk.at;
      gap = (kCluster - 1) * part.units;
    } else if (part.up) {
      to_gap = walk.units / 2 - walk.at;
      gap = part.up * part.units - walk.units / 2;
      if (to_gap <= 0) from += static_cast<int64_t>(gap) * F::kBytes;
    }
    fetch_first += part.turn;
  };
  const auto fetch = [&](int slot) {
    while (fetch_left == 0 && fetch_first < end) start_matrix();
    if (fetch_left > 0) {
      ring.fetch(slot, F::kBytes, from, F::kBytes, lane);
      --fetch_left;
      from += F::kBytes;
      if (--to_gap == 0) {
        from += static_cast<int64_t>(gap) * F::kBytes;
        if (a.cluster > 1) to_gap = part.units;
      }
    }
    ring.commit();
  };
  // Start the weights: they depend on no other launch.
  for (int i = 0; i < part.stages; ++i) fetch(i);

  // Wait for the launch before this one, which writes x, and convert x to fixed point in shared memory.
  ptx::grid_dependency_wait();
  ptx::grid_dependency_launch();
  const uint32_t x_shared = shared + kBarriers, scales_shared = shared + a.scales_at;
  convert_x<T, R>(a, rank, x_shared, scales_shared, threadIdx.x, kThreads);
  __syncthreads();

  // Of the matrix units' 8 columns two are for each lane t of a quad: hi and lo of x beside that lane's block, with zeros beside the other three. So a
  // lane has the sums of its own block, whose scales it has too.
  const bool active = g >> 1 == t;
  const uint32_t x_lane = x_shared + t * 32 + (g & 1) * 16, scales_lane = scales_shared + t * 8;
  uint32_t b[R == 1 ? 2 * kChunks : 2][4] = {};
  int turns = 0;
  for (int first = begin; first < end; first += part.turn, ++turns) {
    float *partial = reinterpret_cast<float *>(shared_bytes + a.partial_at + (turns & 1) * a.partial_size);
    const int tiles = min(part.turn, end - first);
    const Walk walk(part, tiles, warp);
    int tile = quotient(walk.at, part.units), at = walk.at - tile * part.units;    // of the tile's units
    float sum[R][2] = {};
    // Multiply: the warp's units of these tiles.
    for (int left = walk.left; left > 0; --left) {
      ring.wait();
      // Read a unit, and refill its slot.
      Unit<TYPE> unit;
      unit.load(ring.at + ring.stage * F::kBytes, lane);
      if constexpr (R == 1) {
#pragma unroll
        for (int i = 0; i < 2 * kChunks; ++i) load_where(active, b[i], x_lane + at * kChunks * kChunkOfX + 128 * i);
      }
      __syncwarp();    // all have read the unit
      fetch(ring.stage);
      ring.next();
      // Unpack it chunk by chunk, and add its products.
      const Scales<TYPE> scales = scales_of<TYPE>(unit.record, unit.factors);
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        uint32_t words[16];
        unpack<TYPE>(c, [&](int j) { return unit.pieces[j]; }, words);
        const int chunk = at * kChunks + c;
#pragma unroll
        for (int r = 0; r < R; ++r) {
          if (R > 2 && r >= a.rows) break;
          if constexpr (R > 1) {
#pragma unroll
            for (int i = 0; i < 2; ++i) load_where(active, b[i], x_lane + r * a.x_shared_row + chunk * kChunkOfX + 128 * i);
          }
          const float2 of_x = load_floats(scales_lane + r * a.scales_row + chunk * kScalesOfX);
          add_products<TYPE>(sum[r], words, scales, c, b[R == 1 ? 2 * c : 0], b[R == 1 ? 2 * c + 1 : 1], of_x);
        }
      }
      // End of a tile: write the warp's sums.
      if (++at == part.units || left == 1) {    // the warp's last of this tile
        float *to = partial + (warp + tile) * (R * kTile) + g;
        at = 0;
        ++tile;
#pragma unroll
        for (int r = 0; r < R; ++r)
#pragma unroll
          for (int row = 0; row < 2; ++row) {
            const float all = group_sum<4>(sum[r][row]);
            if (t == 0) to[r * kTile + 8 * row] = all;
            sum[r][row] = 0.f;
          }
      }
    }
    // The warps' sums meet, in the order of the inputs. One barrier: those of the last turn lie elsewhere.
    __syncthreads();
    const auto sum_of = [&](int tile, int at) {
      const int first_unit = tile * part.units, last = Walk::owner(first_unit + part.units - 1, walk.units);
      float y = 0.f;
      for (int w = Walk::owner(first_unit, walk.units); w <= last; ++w) y += partial[(w + tile) * (R * kTile) + at];
      return y;
    };
    // Each block of a cluster sends what it has to the block that stores it.
    const float *sums = reinterpret_cast<const float *>(shared_bytes + a.meet_at);
    int value = threadIdx.x, values = tiles * a.rows * kTile;
    if (a.cluster > 1) {
      ptx::cluster_begin_wait();
      for (; value < values; value += kThreads) {
        const int tile = quotient(value, a.rows * kTile), to = quotient(value, own);
        ptx::store_async(ptx::cluster_address(shared + a.meet_at + (rank * own + value - to * own) * 4, to),
                         sum_of(tile, value - tile * (a.rows * kTile)), ptx::cluster_address(shared + kMeet, to));
      }
      ptx::barrier_wait_cluster(shared + kMeet, 0);
      value = threadIdx.x + rank * own;
      values = rank * own + own;
    }
    // Store, through SwiGLU where the rows are those of a gate and of an up.
    for (int i = value; i < values; i += kThreads) {
      const int tile = R == 1 ? i / kTile : quotient(i, a.rows * kTile), at = i - tile * (a.rows * kTile), row = at / kTile;
      const int output = (first + tile) * kTile + at % kTile;
      float y;
      if (a.cluster > 1) {
        y = 0.f;
        for (int r = 0; r < kCluster; ++r) y += sums[r * own + i - rank * own];
      } else if (part.up) y = fast_silu(sum_of(tile, at)) * sum_of(tile + tiles, at);
      else y = sum_of(tile, at);
      if (output < part.outputs) static_cast<T *>(a.y)[row * a.y_stride + part.column + output] = from_float<T>(y);
    }
  }
}

template <typename T, int R> __global__ void __launch_bounds__(kThreads, 1) product_kernel(const __grid_constant__ Args a) {
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  int p = 0;
  while (p + 1 < a.parts && static_cast<int>(blockIdx.x) >= a.part[p + 1].first_block) ++p;
  const PartArgs part = a.part[p];
  if (part.type == GDN_Q8_0) multiply_part<T, GDN_Q8_0, R>(a, part, shared_bytes);
  else if (part.type == GDN_Q4_K) multiply_part<T, GDN_Q4_K, R>(a, part, shared_bytes);
  else multiply_part<T, GDN_Q6_K, R>(a, part, shared_bytes);
}

}  // namespace quantized
}  // namespace gdn
