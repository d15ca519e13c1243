// y[rows, outputs] = x[rows, inputs] w[outputs, inputs]^T for few rows: the weights stream once through registers into
// the matrix units. See README.md.
#pragma once

#include "../common/convert.cuh"
#include "../common/math.cuh"
#include "../common/ptx.cuh"

namespace gdn {
namespace linear {

constexpr int kChunkBytes = 128;                // of a row of weights
constexpr int kTile = 16;                       // outputs of a warp
constexpr int kChunks = 4;                      // chunks of a round, which is under way in registers
constexpr int kMaxThreads = 512;                // leaves 128 registers a thread
constexpr int kMaxWarps = kMaxThreads / 32;
constexpr int kColumn = 20;                     // floats from column to column of partial sums: 16, without conflicts
constexpr int kBarriers = 32;                   // bytes: of x, and two of what blocks of a cluster send each other

// Where a warp finds its part of x.
enum class XSource {
  kRegisters,   // its part is one round: loaded once, kept over all tiles
  kShared,
  kGlobal       // for when it does not fit
};

// A block is (32 lanes, warps along the inputs, groups of outputs), the grid (cluster, tiles). All warps along the
// inputs, of all blocks of the cluster, take `slice` chunks each. A layout of weights or an epilogue that needs more extends it.
struct Args {
  const void *w, *x;
  void *y;
  int64_t w_row, x_row;        // bytes from row to row
  int64_t y_stride;            // elements
  int32_t rows, outputs;
  int32_t tile_rows, group_rows, last_row;    // of w: from tile to tile, from group to group, the last there is
  int32_t parts;               // of a row: of a layout's chunks, the last of which may have fewer
  int32_t slice, rounds;       // chunks of a warp, in so many rounds
  int32_t tiles;               // of 16 << group_shift outputs, of 16 where the rows of w of two groups make one output
  int32_t group_shift;
  int32_t partial_at, x_at, x_shared_row, meet_at;    // shared memory: bytes
  int32_t lets_in;             // the next launch, before the wait
};

// A layout of weights, here T as it is: the registers of a lane's weights that are under way, how they come and how they are multiplied.
template <typename T> struct Dense {
  static constexpr int kChunkInputs = 64;
  static constexpr int kElementBytes = 2;
  static constexpr int kParts = 1;                 // of a chunk, see Args
  static constexpr int kXBytes = kChunkBytes;      // of a row of x beside a chunk
  static constexpr int kXPadding = 64;             // bytes after a row of x in shared memory, so that rows 2i and 2i + 1 lie in
                                                   // different halves of the banks
  static constexpr bool kConvertsX = false;        // x is not copied to shared memory but converted, by convert_x()
  // Chains of products: one alone would be bound by their latency.
  template <int NT> static constexpr int kSums = NT == 1 ? 2 : 1;

  uint4 w[kChunks][4];    // of row g, the first and the second half of the chunk; of row g + 8

  // A tile begins, of these rows of w, at this chunk.
  template <typename A> __device__ __forceinline__ void start_tile(const A &, int, int, int) {}
  __device__ __forceinline__ void advance() {}    // by a round

  // Chunk d of a round that has `live` parts.
  __device__ __forceinline__ void fetch(int d, int live, const char *from0, const char *from8) {
    if (d < live) {
      w[d][0] = ptx::load_stream(from0);
      w[d][1] = ptx::load_stream(from0 + 64);
      w[d][2] = ptx::load_stream(from8);
      w[d][3] = ptx::load_stream(from8 + 64);
    }
  }

  // Chunk d of the round that begins with `chunk` of a warp's, which has `live` parts. x_of(n, round, offset): 16 bytes of x, as many bytes after
  // those beside the warp's first chunk as both say.
  template <int NT, int SUMS, typename A, typename X>
  __device__ __forceinline__ void multiply(float (&sum)[SUMS][NT][4], const A &, const unsigned char *, int d, int chunk, int live, const X &x_of) {
    if (chunk + d < live) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint4 w0 = w[d][half], w8 = w[d][2 + half];
        uint4 b[NT];
#pragma unroll
        for (int n = 0; n < NT; ++n) b[n] = x_of(n, chunk * kXBytes, d * kXBytes + half * 64);
#pragma unroll
        for (int n = 0; n < NT; ++n) {
          ptx::mma16816<T>(sum[0][n], w0.x, w8.x, w0.y, w8.y, b[n].x, b[n].y);
          ptx::mma16816<T>(sum[SUMS - 1][n], w0.z, w8.z, w0.w, w8.w, b[n].z, b[n].w);
        }
      }
    }
  }
};

// An epilogue, here none: stores a tile's sums, sum_of(i), as they are, store(i, y), for every thread `tid` of `threads`.
struct StoreSums {
  template <typename T, typename A, typename Sum, typename Store>
  static __device__ __forceinline__ void store_tile(const A &, int, int values, int tid, int threads, const Sum &sum_of, const Store &store) {
    for (int i = tid; i < values; i += threads) store(i, sum_of(i));
  }
};

// T: of x and y. A: Args or more. WEIGHTS: their layout. NT: tiles of 8 rows. This is block `block` of `blocks` along the tiles.
// One function: weights are under way from its first lines to its last, in registers that no part of it could hand on.
template <typename T, typename WEIGHTS, typename EPILOGUE, int NT, XSource SOURCE, typename A>
__device__ __forceinline__ void multiply(const A &a, int block, int blocks, unsigned char *shared_bytes) {
  [[maybe_unused]] constexpr bool kClusters = SOURCE != XSource::kGlobal;    // a larger cluster is what lets x fit
  constexpr int kParts = WEIGHTS::kParts, kXBytes = WEIGHTS::kXBytes;
  constexpr bool kInShared = SOURCE == XSource::kShared, kCopied = kInShared && !WEIGHTS::kConvertsX;
  static_assert(kXBytes == kChunkBytes || SOURCE != XSource::kRegisters, "x takes as many as weights do");
  static_assert(kInShared || !WEIGHTS::kConvertsX, "converted to shared memory");

  // A lane holds, as the matrix units want it, rows g and g + 8 of a tile and a quarter of the inputs. Which quarter is
  // free as long as x has the same: 8 in a row, so that they come by one load. Of 32 inputs a lane's 16 bytes are
  // k = 8t .. 8t + 7; the units take words 0 and 1 for k = 2t, 2t + 1 and 2t + 8, 2t + 9 of a first product, and words
  // 2 and 3 of a second.
  const int lane = threadIdx.x, g = lane >> 2, t = lane & 3;
  const int rank = blockIdx.x, part = rank * blockDim.y + threadIdx.y;
  // Parts of chunks to do; < 1: none here.
  const int first = part * a.slice;
  const int live = min(kParts * a.slice, a.parts - kParts * first);

  // The stream of weights runs a round in front of their use, over the ends of tiles.
  WEIGHTS weights;
  const char *row0 = nullptr, *row8 = nullptr;
  int fetch_tile = block, fetch_round = 0, fetch_live = 0;
  const auto start_tile = [&] {
    // Outputs past the end read the last row, and are not stored.
    const int row = fetch_tile * a.tile_rows + threadIdx.z * a.group_rows + g;
    const char *w = static_cast<const char *>(a.w) + (first * kChunkBytes + t * 16);
    row0 = w + min(row, a.last_row) * a.w_row;
    row8 = w + min(row + 8, a.last_row) * a.w_row;
    weights.start_tile(a, min(row, a.last_row), min(row + 8, a.last_row), first);
    fetch_live = fetch_tile < a.tiles ? live : 0;
  };
  const auto advance = [&] {
    if (SOURCE != XSource::kRegisters && ++fetch_round < a.rounds) {
      row0 += kChunks * kChunkBytes;
      row8 += kChunks * kChunkBytes;
      fetch_live -= kParts * kChunks;
      weights.advance();
    } else {
      fetch_round = 0;
      fetch_tile += blocks;
      start_tile();
    }
  };

  const uint32_t shared = ptx::shared_address(shared_bytes);
  const int warp = threadIdx.z * blockDim.y + threadIdx.y;
  const auto fetch = [&](int d) { weights.fetch(d, fetch_live, row0 + d * kChunkBytes, row8 + d * kChunkBytes); };

  // Start the first round of weights: they depend on no other launch.
  start_tile();
#pragma unroll
  for (int d = 0; d < kChunks; ++d) fetch(d);

  const int tid = warp * 32 + lane;
  const int block_first = rank * blockDim.y * a.slice;
  const int block_chunks = static_cast<int>(blockDim.y) * a.slice;
  const int block_bytes = min(kParts * block_chunks, a.parts - kParts * block_first) * (kXBytes / kParts);
  // Initialise the barriers of x and of the cluster.
#if __CUDA_ARCH__ >= 900
  if (kCopied || (kClusters && gridDim.x > 1)) {
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
    if constexpr (!kCopied) {
      WEIGHTS::convert_x(a, from, block_bytes, shared_bytes, tid, blockDim.z * blockDim.y * 32);
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

  constexpr int kSums = WEIGHTS::template kSums<NT>;
  float *partial = reinterpret_cast<float *>(shared_bytes + a.partial_at);
  constexpr int kPart = NT * 8 * kColumn;
  const auto x_of = [&](int n, int round, int offset) {
    if constexpr (SOURCE == XSource::kRegisters) return x[offset / kXBytes][offset / 64 % 2];
    else if constexpr (kInShared) return ptx::load_shared(x_shared[n] + round + offset);
    else return ptx::load_after_wait(x_global[n] + round + offset);
  };
  int turns = 0;    // tiles done

  for (int tile = block; tile < a.tiles; tile += blocks) {
    // Multiply: a round of chunks, whose registers are refilled for the next round as they are used.
    float sum[kSums][NT][4] = {};
    for (int round = 0; round < (SOURCE == XSource::kRegisters ? 1 : a.rounds); ++round) {
      const int chunk = round * kChunks;
#pragma unroll
      for (int d = 0; d < kChunks; ++d) {
        weights.multiply(sum, a, shared_bytes, d, chunk, live, x_of);
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
    // Store: through the cluster, or by the epilogue.
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
    EPILOGUE::template store_tile<T>(a, tile, values, tid, threads, sum_parts, store);
    ++turns;
  }
}

template <typename A, typename T, typename WEIGHTS, typename EPILOGUE, int NT, XSource SOURCE>
__global__ void __launch_bounds__(kMaxThreads, 1) linear_kernel(const __grid_constant__ A a) {
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  multiply<T, WEIGHTS, EPILOGUE, NT, SOURCE>(a, blockIdx.y, gridDim.y, shared_bytes);
}

}  // namespace linear
}  // namespace gdn
