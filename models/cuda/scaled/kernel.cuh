// What the kernel of gdn_linear (cuda/linear/kernel.cuh) is given for weights in e4m3 and for SwiGLU. See README.md.
#pragma once

#include "e4m3.cuh"
#include "linear/kernel.cuh"

namespace gdn {
namespace scaled {

using linear::kChunks, linear::kTile, linear::XSource;

struct Args : linear::Args {
  ScaleArgs scales;      // of w in e4m3
  int32_t factors_at;    // shared memory, of Stored with a converted x: bytes
  int32_t swiglu;
};

// Weights in e4m3 beside x in T, 128 inputs a chunk: a lane's 16 bytes are 16 of 64 inputs, and each word makes both words of a product. HALF: x
// is one row in bf16, which is f16 in shared memory (half_of_block).
template <typename T, bool HALF> struct Stored {
  using Product = std::conditional_t<HALF, __half, T>;
  static constexpr int kChunkInputs = 128;
  static constexpr int kElementBytes = 1;
  static constexpr int kParts = 2;
  static constexpr int kXBytes = 2 * linear::kChunkBytes;
  static constexpr int kXPadding = 16;    // a quad reads every second piece of 16 bytes
  static constexpr bool kConvertsX = HALF;
  template <int NT> static constexpr int kSums = 1;

  const float *scale0 = nullptr, *scale8 = nullptr;
  uint4 w[kChunks][4];    // of row g, the first and the second half of the chunk; of row g + 8
  float scale[kChunks][2];

  __device__ __forceinline__ void start_tile(const Args &a, int row0, int row8, int first) {
    scale0 = a.scales.row(row0) + first;
    scale8 = a.scales.row(row8) + first;
  }

  __device__ __forceinline__ void advance() {
    scale0 += kChunks;
    scale8 += kChunks;
  }

  __device__ __forceinline__ void fetch(int d, int live, const char *from0, const char *from8) {
    if (2 * d < live) {
      w[d][0] = ptx::load_stream(from0);
      w[d][2] = ptx::load_stream(from8);
      scale[d][0] = ptx::load_float(scale0 + d);
      scale[d][1] = ptx::load_float(scale8 + d);
    }
    if (2 * d + 1 < live) {
      w[d][1] = ptx::load_stream(from0 + 64);
      w[d][3] = ptx::load_stream(from8 + 64);
    }
  }

  static __device__ __forceinline__ void convert_x(const Args &a, const char *from, int bytes, unsigned char *shared, int tid, int threads) {
    half_of_row([&](int piece) { return ptx::load_after_wait(from + piece * 16); }, reinterpret_cast<uint4 *>(shared + a.x_at),
                reinterpret_cast<float *>(shared + a.factors_at), 1, bytes / 16, tid, threads);
  }

  template <int NT, typename X>
  __device__ __forceinline__ void multiply(float (&sum)[1][NT][4], const Args &a, const unsigned char *shared, int d, int chunk, int live,
                                           const X &x_of) {
    const int here = chunk + d;
    if (2 * here >= live) return;
    constexpr int kBlockSums = NT == 1 ? 2 : 1;    // chains of products
    float block[kBlockSums][NT][4] = {};
#pragma unroll
    for (int half = 0; half < 2; ++half)
      if (half == 0 || 2 * here + 1 < live) {
        const uint4 w0 = w[d][half], w8 = w[d][2 + half];
        const uint32_t words0[] = {w0.x, w0.y, w0.z, w0.w}, words8[] = {w8.x, w8.y, w8.z, w8.w};
#pragma unroll
        for (int piece = 0; piece < 2; ++piece) {
          uint4 b[NT];
#pragma unroll
          for (int n = 0; n < NT; ++n) b[n] = x_of(n, 0, here * kXBytes + half * (kXBytes / 2) + piece * 16);
          uint32_t pairs0[2], pairs8[2];
          e4m3_pairs<Product>(words0[2 * piece], pairs0);
          e4m3_pairs<Product>(words8[2 * piece], pairs8);
#pragma unroll
          for (int n = 0; n < NT; ++n) ptx::mma16816<Product>(block[0][n], pairs0[0], pairs8[0], pairs0[1], pairs8[1], b[n].x, b[n].y);
          e4m3_pairs<Product>(words0[2 * piece + 1], pairs0);
          e4m3_pairs<Product>(words8[2 * piece + 1], pairs8);
#pragma unroll
          for (int n = 0; n < NT; ++n)
            ptx::mma16816<Product>(block[kBlockSums - 1][n], pairs0[0], pairs8[0], pairs0[1], pairs8[1], b[n].z, b[n].w);
        }
      }
    // What the chunk of x was divided by.
    const float factor = HALF ? reinterpret_cast<const float *>(shared + a.factors_at)[threadIdx.y * a.slice + here] : 1.f;
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float of_block = kBlockSums == 2 ? block[0][n][i] + block[1][n][i] : block[0][n][i];
        sum[0][n][i] = fmaf(scale[d][i / 2], of_block * factor, sum[0][n][i]);
      }
  }
};

// Stores sums as they are or, with swiglu, silu(gate) * up: group 0 has the gate's rows, group 1 up's.
struct StoreSwiglu {
  template <typename T, typename Sum, typename Store>
  static __device__ __forceinline__ void store_tile(const Args &a, int tile, int values, int tid, int threads, const Sum &sum_of, const Store &store) {
    if (a.swiglu) {
      for (int i = tid; i < a.rows * kTile; i += threads) {
        const int output = tile * kTile + i % kTile, row = i / kTile, gate = row * 2 * kTile + i % kTile;
        const float y = fast_silu(sum_of(gate)) * sum_of(gate + kTile);
        if (output < a.outputs) static_cast<T *>(a.y)[row * a.y_stride + output] = from_float<T>(y);
      }
    } else {
      linear::StoreSums::store_tile<T>(a, tile, values, tid, threads, sum_of, store);
    }
  }
};

// Rows of w in e4m3, and those below them in the dtype of x: the first blocks have these, a tile each.
struct PairArgs {
  Args scaled;
  linear::Args below;
};

template <typename T, bool HALF>
__global__ void __launch_bounds__(linear::kMaxThreads, 1) pair_kernel(const __grid_constant__ PairArgs a) {
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  const int block = blockIdx.y, of_below = a.below.tiles;
  if (block < of_below)
    linear::multiply<T, linear::Dense<T>, linear::StoreSums, 1, XSource::kGlobal>(a.below, block, of_below, shared_bytes);
  else
    linear::multiply<T, Stored<T, HALF>, StoreSwiglu, 1, XSource::kShared>(a.scaled, block - of_below, gridDim.y - of_below, shared_bytes);
}

}  // namespace scaled
}  // namespace gdn
