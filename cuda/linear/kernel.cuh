// y[rows, outputs] = x[rows, inputs] w[outputs, inputs]^T for few rows: the weights stream once through registers into
// the matrix units. See README.md.
#pragma once

#include "../common/convert.cuh"
#include "../common/e4m3.cuh"
#include "../common/math.cuh"
#include "../common/ptx.cuh"

namespace gdn {
namespace linear {

constexpr int kChunkBytes = 128;                // of a row of weights: 64 inputs, in e4m3 128
constexpr int kTile = 16;                       // outputs of a warp
constexpr int kChunks = 4;                      // chunks of a round, which is under way in registers
constexpr int kMaxThreads = 512;                // leaves 128 registers a thread
constexpr int kMaxWarps = kMaxThreads / 32;
constexpr int kColumn = 20;                     // floats from column to column of partial sums: 16, without conflicts
constexpr int kBarriers = 32;                   // bytes: of x, and two of what blocks of a cluster send each other

// How x lies beside weights of type W.
template <typename W> struct WeightLayout {
  static constexpr bool kScaled = false;
  static constexpr int kChunkBytes = linear::kChunkBytes;    // of a row of x
  static constexpr int kPadding = 64;    // bytes after a row of x in shared memory, so that rows 2i and 2i + 1 lie in
                                         // different halves of the banks
};
template <> struct WeightLayout<E4m3> {
  static constexpr bool kScaled = true;
  static constexpr int kChunkBytes = 2 * linear::kChunkBytes;
  static constexpr int kPadding = 16;    // a quad reads every second piece of 16 bytes
};

// Where a warp finds its part of x.
enum class XSource {
  kRegisters,   // its part is one round: loaded once, kept over all tiles
  kShared,
  kHalf,        // the same of one row in bf16 beside weights in e4m3: in f16 there (half_of_block)
  kGlobal       // for when it does not fit
};

// A block is (32 lanes, warps along the inputs, groups of outputs), the grid (cluster, tiles). All warps along the
// inputs, of all blocks of the cluster, take `slice` chunks each.
struct Args {
  const void *w, *x;
  void *y;
  int64_t w_row, x_row;        // bytes from row to row
  int64_t y_stride;            // elements
  int32_t rows, outputs;
  int32_t tile_rows, group_rows, last_row;    // of w: from tile to tile, from group to group, the last there is
  int32_t swiglu;              // group 0 has the gate's rows, group 1 up's: y = silu(gate) * up
  int32_t chunks;              // of a row
  int32_t slice, rounds;       // chunks of a warp, in so many rounds
  int32_t tiles;               // of 16 << group_shift outputs, with swiglu of 16
  int32_t group_shift;
  int32_t partial_at, x_at, x_shared_row, factors_at, meet_at;    // shared memory: bytes
  ScaleArgs scales;            // of w in e4m3
  int32_t halves;              // of a row, in e4m3: 64 inputs
  int32_t lets_in;             // the next launch, before the wait
};

// T: of x and y. W: of w, T or E4m3. NT: tiles of 8 rows. This is block `block` of `blocks` along the tiles.
// One function: weights are under way from its first lines to its last, in registers that no part of it could hand on.
template <typename T, typename W, int NT, XSource SOURCE>
__device__ __forceinline__ void multiply(const Args &a, int block, int blocks, unsigned char *shared_bytes) {
  [[maybe_unused]] constexpr bool kClusters = SOURCE != XSource::kGlobal;    // a larger cluster is what lets x fit
  constexpr bool kScaled = WeightLayout<W>::kScaled;
  constexpr int kXBytes = WeightLayout<W>::kChunkBytes;
  constexpr bool kHalf = SOURCE == XSource::kHalf, kInShared = SOURCE == XSource::kShared || kHalf;
  using Product = std::conditional_t<kHalf, __half, T>;
  static_assert(!kScaled || SOURCE != XSource::kRegisters, "x takes as many again as weights do");

  // A lane holds, as the matrix units want it, rows g and g + 8 of a tile and a quarter of the inputs. Which quarter is
  // free as long as x has the same: 8 in a row, so that they come by one load. Of 32 inputs a lane's 16 bytes are
  // k = 8t .. 8t + 7; the units take words 0 and 1 for k = 2t, 2t + 1 and 2t + 8, 2t + 9 of a first product, and words
  // 2 and 3 of a second. In e4m3 they are 16 of 64 inputs, and each word makes both words of a product.
  const int lane = threadIdx.x, g = lane >> 2, t = lane & 3;
  const int rank = blockIdx.x, part = rank * blockDim.y + threadIdx.y;
  // Chunks to do, in e4m3 halves, of which the last chunk may have one; < 1: none here.
  const int first = part * a.slice;
  const int live = kScaled ? min(2 * a.slice, a.halves - 2 * first) : min(a.slice, a.chunks - first);

  // The stream of weights runs a round in front of their use, over the ends of tiles.
  const char *row0 = nullptr, *row8 = nullptr;
  [[maybe_unused]] const float *scale0 = nullptr, *scale8 = nullptr;
  int fetch_tile = block, fetch_round = 0, fetch_live = 0;
  const auto start_tile = [&] {
    // Outputs past the end read the last row, and are not stored.
    const int row = fetch_tile * a.tile_rows + threadIdx.z * a.group_rows + g;
    const char *w = static_cast<const char *>(a.w) + (first * kChunkBytes + t * 16);
    row0 = w + min(row, a.last_row) * a.w_row;
    row8 = w + min(row + 8, a.last_row) * a.w_row;
    if constexpr (kScaled) {
      scale0 = a.scales.row(min(row, a.last_row)) + first;
      scale8 = a.scales.row(min(row + 8, a.last_row)) + first;
    }
    fetch_live = fetch_tile < a.tiles ? live : 0;
  };
  const auto advance = [&] {
    if (SOURCE != XSource::kRegisters && ++fetch_round < a.rounds) {
      row0 += kChunks * kChunkBytes;
      row8 += kChunks * kChunkBytes;
      fetch_live -= kScaled ? 2 * kChunks : kChunks;
      if constexpr (kScaled) {
        scale0 += kChunks;
        scale8 += kChunks;
      }
    } else {
      fetch_round = 0;
      fetch_tile += blocks;
      start_tile();
    }
  };

  uint4 w[kChunks][4];    // of row g, the first and the second half of the chunk; of row g + 8
  [[maybe_unused]] float scale[kScaled ? kChunks : 1][2];
  const uint32_t shared = ptx::shared_address(shared_bytes);
  const int warp = threadIdx.z * blockDim.y + threadIdx.y;
  const auto fetch = [&](int d) {
    const char *from0 = row0 + d * kChunkBytes, *from8 = row8 + d * kChunkBytes;
    if constexpr (kScaled) {
      if (2 * d < fetch_live) {
        w[d][0] = ptx::load_stream(from0);
        w[d][2] = ptx::load_stream(from8);
        scale[d][0] = ptx::load_float(scale0 + d);
        scale[d][1] = ptx::load_float(scale8 + d);
      }
      if (2 * d + 1 < fetch_live) {
        w[d][1] = ptx::load_stream(from0 + 64);
        w[d][3] = ptx::load_stream(from8 + 64);
      }
    } else if (d < fetch_live) {
      w[d][0] = ptx::load_stream(from0);
      w[d][1] = ptx::load_stream(from0 + 64);
      w[d][2] = ptx::load_stream(from8);
      w[d][3] = ptx::load_stream(from8 + 64);
    }
  };

  // Start the first round of weights: they depend on no other launch.
  start_tile();
#pragma unroll
  for (int d = 0; d < kChunks; ++d) fetch(d);

  const int tid = warp * 32 + lane;
  const int block_first = rank * blockDim.y * a.slice;
  const int block_chunks = static_cast<int>(blockDim.y) * a.slice;
  const int block_bytes = kScaled ? min(2 * block_chunks, a.halves - 2 * block_first) * (kXBytes / 2)
                                  : min(block_chunks, a.chunks - block_first) * kXBytes;
  // Initialise the barriers of x and of the cluster.
#if __CUDA_ARCH__ >= 900
  if ((kInShared && !kHalf) || (kClusters && gridDim.x > 1)) {
    if (tid == 0) {
      for (int i = 0; i < 3; ++i) ptx::barrier_init(shared + 8 * i, 1);
      ptx::barriers_initialised();
    }
    if (kClusters && gridDim.x > 1)
      ptx::cluster_begin();
    else
      __syncthreads();
  }
#endif
  // Wait for the launch before this one, which writes x.
  if (a.lets_in) ptx::grid_dependency_launch();
  ptx::grid_dependency_wait();
  ptx::grid_dependency_launch();

  // Load x, to shared memory, to registers or not yet. Rows past the end are the last one again: their sums are not stored, and they cost no traffic.
  uint4 x[SOURCE == XSource::kRegisters ? kChunks : 1][2];
  const char *x_global[NT];
  uint32_t x_shared[NT];
  if constexpr (kInShared) {
    const char *from = static_cast<const char *>(a.x) + block_first * kXBytes;
    if constexpr (kHalf) {
      half_of_row([&](int piece) { return ptx::load_after_wait(from + piece * 16); }, reinterpret_cast<uint4 *>(shared_bytes + a.x_at),
                  reinterpret_cast<float *>(shared_bytes + a.factors_at), block_bytes / 16, tid, blockDim.z * blockDim.y * 32);
      __syncthreads();
    } else {
#if __CUDA_ARCH__ >= 900
      if (threadIdx.y == 0 && threadIdx.z == 0 && block_bytes > 0) {
        if (lane == 0) ptx::barrier_expect(shared, a.rows * block_bytes);
        __syncwarp();
        if (lane < a.rows)
          ptx::copy_bulk(shared + a.x_at + lane * a.x_shared_row, from + lane * a.x_row, block_bytes, shared);
      }
      if (block_bytes > 0) ptx::barrier_wait(shared, 0);
#else
      const int threads = blockDim.z * blockDim.y * 32;
      for (int r = 0; r < a.rows; ++r)
        for (int i = tid * 16; i < block_bytes; i += threads * 16)
          ptx::copy_async(shared + a.x_at + r * a.x_shared_row + i, from + r * a.x_row + i);
      ptx::copy_async_commit();
      ptx::copy_async_wait<0>();
      __syncthreads();
#endif
    }
#pragma unroll
    for (int n = 0; n < NT; ++n)
      x_shared[n] = shared + a.x_at + min(8 * n + g, a.rows - 1) * a.x_shared_row +
                    threadIdx.y * a.slice * kXBytes + t * (kXBytes / 8);
  } else {
#pragma unroll
    for (int n = 0; n < NT; ++n)
      x_global[n] =
          static_cast<const char *>(a.x) + (first * kXBytes + t * (kXBytes / 8)) + min(8 * n + g, a.rows - 1) * a.x_row;
    if constexpr (SOURCE == XSource::kRegisters) {
#pragma unroll
      for (int d = 0; d < kChunks; ++d)
        if (d < live) {
          x[d][0] = ptx::load_after_wait(x_global[0] + d * kChunkBytes);
          x[d][1] = ptx::load_after_wait(x_global[0] + d * kChunkBytes + 64);
        }
    }
  }
  advance();

  // Chains of products: one alone would be bound by their latency. In e4m3 those of a block.
  constexpr int kSums = NT == 1 && !kScaled ? 2 : 1, kBlockSums = NT == 1 ? 2 : 1;
  float *partial = reinterpret_cast<float *>(shared_bytes + a.partial_at);
  constexpr int kPart = NT * 8 * kColumn;
  // x, `offset` bytes after the start of this warp's inputs.
  const auto x_of = [&](int n, int offset) {
    if constexpr (kInShared) return ptx::load_shared(x_shared[n] + offset);
    else return ptx::load_after_wait(x_global[n] + offset);
  };
  // What chunks of x are divided by.
  [[maybe_unused]] const float *factors = reinterpret_cast<const float *>(shared_bytes + a.factors_at) + threadIdx.y * a.slice;
  int turns = 0;    // tiles done

  for (int tile = block; tile < a.tiles; tile += blocks) {
    // Multiply: a round of chunks, whose registers are refilled for the next round as they are used.
    float sum[kSums][NT][4] = {};
    for (int round = 0; round < (SOURCE == XSource::kRegisters ? 1 : a.rounds); ++round) {
      const int chunk = round * kChunks;
#pragma unroll
      for (int d = 0; d < kChunks; ++d) {
        if constexpr (kScaled) {
          if (2 * (chunk + d) < live) {
            float block[kBlockSums][NT][4] = {};
#pragma unroll
            for (int half = 0; half < 2; ++half)
              if (half == 0 || 2 * (chunk + d) + 1 < live) {
                const uint4 w0 = w[d][half], w8 = w[d][2 + half];
                const uint32_t words0[] = {w0.x, w0.y, w0.z, w0.w}, words8[] = {w8.x, w8.y, w8.z, w8.w};
#pragma unroll
                for (int piece = 0; piece < 2; ++piece) {
                  uint4 b[NT];
#pragma unroll
                  for (int n = 0; n < NT; ++n) b[n] = x_of(n, (chunk + d) * kXBytes + half * (kXBytes / 2) + piece * 16);
                  uint32_t pairs0[2], pairs8[2];
                  e4m3_pairs<Product>(words0[2 * piece], pairs0);
                  e4m3_pairs<Product>(words8[2 * piece], pairs8);
#pragma unroll
                  for (int n = 0; n < NT; ++n)
                    ptx::mma16816<Product>(block[0][n], pairs0[0], pairs8[0], pairs0[1], pairs8[1], b[n].x, b[n].y);
                  e4m3_pairs<Product>(words0[2 * piece + 1], pairs0);
                  e4m3_pairs<Product>(words8[2 * piece + 1], pairs8);
#pragma unroll
                  for (int n = 0; n < NT; ++n)
                    ptx::mma16816<Product>(block[kBlockSums - 1][n], pairs0[0], pairs8[0], pairs0[1], pairs8[1], b[n].z, b[n].w);
                }
              }
            const float factor = kHalf ? factors[chunk + d] : 1.f;
#pragma unroll
            for (int n = 0; n < NT; ++n)
#pragma unroll
              for (int i = 0; i < 4; ++i) {
                const float of_block = kBlockSums == 2 ? block[0][n][i] + block[1][n][i] : block[0][n][i];
                sum[0][n][i] = fmaf(scale[d][i / 2], of_block * factor, sum[0][n][i]);
              }
          }
        } else if (chunk + d < live) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const uint4 w0 = w[d][half], w8 = w[d][2 + half];
            uint4 b[NT];
#pragma unroll
            for (int n = 0; n < NT; ++n) {
              const int offset = d * kChunkBytes + half * 64;
              if constexpr (SOURCE == XSource::kRegisters)
                b[n] = x[d][half];
              else if constexpr (kInShared)
                b[n] = ptx::load_shared(x_shared[n] + chunk * kChunkBytes + offset);
              else
                b[n] = ptx::load_after_wait(x_global[n] + chunk * kChunkBytes + offset);
            }
#pragma unroll
            for (int n = 0; n < NT; ++n) {
              ptx::mma16816<T>(sum[0][n], w0.x, w8.x, w0.y, w8.y, b[n].x, b[n].y);
              ptx::mma16816<T>(sum[kSums - 1][n], w0.z, w8.z, w0.w, w8.w, b[n].z, b[n].w);
            }
          }
        }
        fetch(d);
      }
      advance();
    }

    // Add the sums of all warps along the inputs, in the order of the inputs.
    if (turns > 0) __syncthreads();    // those of the last tile have been read
    float *warp_sums = partial + warp * kPart;
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        warp_sums[(8 * n + 2 * t + i % 2) * kColumn + g + i / 2 * 8] =
            kSums == 2 ? sum[0][n][i] + sum[1][n][i] : sum[0][n][i];
    __syncthreads();
    const int threads = blockDim.z * blockDim.y * 32, shift = 4 + a.group_shift, values = a.rows << shift;
    const auto sum_parts = [&](int i) {
      const int output = i & ((1 << shift) - 1), row = i >> shift;
      const float *sums = partial + ((output >> 4) * blockDim.y * NT * 8 + row) * kColumn + (output & 15);
      float y = 0.f;
#pragma unroll 8
      for (int p = 0; p < static_cast<int>(blockDim.y); ++p) y += sums[p * kPart];
      return y;
    };
    // Store: through the cluster, as SwiGLU of two halves, or as it is.
    const auto store = [&](int i, float y) {
      const int output = (tile << shift) + (i & ((1 << shift) - 1)), row = i >> shift;
      if (output < a.outputs) static_cast<T *>(a.y)[row * a.y_stride + output] = from_float<T>(y);
    };
#if __CUDA_ARCH__ >= 900
    if (kClusters && gridDim.x > 1) {
      // Every block sends the sums of its inputs to the block that stores the output: each stores as many. Two turns'
      // worth of room is enough: who sends those of the next turn but one has had this block's of the next, which it
      // sends after it has read these.
      const int own = values / gridDim.x, half = turns & 1;
      const uint32_t barrier = shared + 8 + 8 * half, meet = shared + a.meet_at + half * values * 4;
      if (tid == 0) ptx::barrier_expect(barrier, values * 4);
      for (int i = tid; i < values; i += threads) {
        const int to = i / own;
        ptx::store_async(ptx::cluster_address(meet + (rank * own + i - to * own) * 4, to), sum_parts(i),
                         ptx::cluster_address(barrier, to));
      }
      ptx::barrier_wait_cluster(barrier, turns >> 1 & 1);
      const float *sums = reinterpret_cast<const float *>(shared_bytes + a.meet_at) + half * values;
      for (int i = tid; i < own; i += threads) {
        float y = 0.f;
        for (unsigned r = 0; r < gridDim.x; ++r) y += sums[r * own + i];
        store(rank * own + i, y);
      }
    } else
#endif
    if (a.swiglu) {
      for (int i = tid; i < a.rows * kTile; i += threads) {
        const int output = tile * kTile + i % kTile, row = i / kTile, gate = row * 2 * kTile + i % kTile;
        const float y = fast_silu(sum_parts(gate)) * sum_parts(gate + kTile);
        if (output < a.outputs) static_cast<T *>(a.y)[row * a.y_stride + output] = from_float<T>(y);
      }
    } else {
      for (int i = tid; i < values; i += threads) store(i, sum_parts(i));
    }
    ++turns;
  }
}

template <typename T, typename W, int NT, XSource SOURCE>
__global__ void __launch_bounds__(kMaxThreads, 1) linear_kernel(const __grid_constant__ Args a) {
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  multiply<T, W, NT, SOURCE>(a, blockIdx.y, gridDim.y, shared_bytes);
}

// Rows of w in e4m3, and those below them in the dtype of x: the first blocks have these, a tile each.
struct PairArgs {
  Args scaled, below;
};

template <typename T, XSource SOURCE>
__global__ void __launch_bounds__(kMaxThreads, 1) pair_kernel(const __grid_constant__ PairArgs a) {
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  const int block = blockIdx.y, of_below = a.below.tiles;
  if (block < of_below) multiply<T, T, 1, XSource::kGlobal>(a.below, block, of_below, shared_bytes);
  else multiply<T, E4m3, 1, SOURCE>(a.scaled, block - of_below, gridDim.y - of_below, shared_bytes);
}

}  // namespace linear
}  // namespace gdn
