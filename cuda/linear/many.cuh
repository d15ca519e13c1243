// The product of gdn_linear for up to 64 rows beside weights in e4m3, on sm_90a: they stream once through registers into wgmma,
// as its left operand. See README.md.
#pragma once

#include "../common/convert.cuh"
#include "../common/e4m3.cuh"
#include "../common/ptx.cuh"
#include "../common/wgmma.cuh"

namespace gdn {
namespace linear {
namespace many {

constexpr int kRows = 2 * GDN_LINEAR_ROWS;  // of x, the products' columns
constexpr int kTile = 64;                   // outputs of a warpgroup
constexpr int kGroups = 2;                  // warpgroups, each with up to 255 registers a thread
constexpr int kThreads = 128 * kGroups;
constexpr int kChunk = 128;                 // inputs, a block of the scales: 128 bytes of a row of weights
constexpr int kChunks = 4;                  // of a round, which is under way in registers; even, as operands take turns
constexpr int kXTile = kRows * 128;         // bytes of 64 inputs of x
constexpr int kSums = kTile * kRows * 4;    // bytes of a warpgroup's sums
constexpr int kBarriers = 1024;             // bytes: two barriers, and tiles begin at multiples of 1024

// A block is (128 threads, warpgroups along the inputs, along the outputs), kGroups in all; the grid (cluster, tiles). All warpgroups along
// the inputs, of all blocks of the cluster, take `slice` chunks each.
struct Args {
  const void *w, *x;
  void *y;
  int64_t w_row, x_row;    // bytes from row to row
  int64_t y_stride;        // elements
  int32_t rows, outputs;
  int32_t halves;          // of a row: 64 inputs
  int32_t slice, rounds;   // chunks of a warpgroup, in so many rounds
  int32_t tiles;           // of 64 outputs for each warpgroup along them
  int32_t cluster_shift;
  ScaleArgs scales;
};

// Four weights as two pairs of T, those of bytes 1 and 3 and of bytes 0 and 2, exactly: see e4m3_pairs(). x lies in this order.
template <typename T> __device__ __forceinline__ void spread(uint32_t four, uint32_t &odd, uint32_t &even) {
  constexpr int kShift = std::is_same_v<T, __half> ? 1 : 4;
  constexpr uint32_t kMagnitude = 0x7f007f00u >> kShift, kSign = 0x80008000u;
  const auto number = [](uint32_t x) {
    if constexpr (std::is_same_v<T, __half>) {
      const __half2 y = __hmul2(*reinterpret_cast<const __half2 *>(&x), __half2half2(__ushort_as_half(0x5c00)));
      return *reinterpret_cast<const uint32_t *>(&y);
    } else {
      const __nv_bfloat162 y =
          __hmul2(*reinterpret_cast<const __nv_bfloat162 *>(&x), __bfloat162bfloat162(__ushort_as_bfloat16(0x7b80)));
      return *reinterpret_cast<const uint32_t *>(&y);
    }
  };
  odd = number((four >> kShift & kMagnitude) | (four & kSign));
  even = number((four << (8 - kShift) & kMagnitude) | (four << 8 & kSign));
}

// Two words to any block's shared memory: see ptx::store_async().
__device__ __forceinline__ void store_async_2(uint32_t there, float a, float b, uint32_t barrier_there) {
#if __CUDA_ARCH__ >= 900
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%0], {%1, %2}, [%3];" ::"r"(there),
               "r"(__float_as_uint(a)), "r"(__float_as_uint(b)), "r"(barrier_there)
               : "memory");
#endif
}

// One function: weights are under way from its first lines to its last, in registers that no part of it could hand on.
template <typename T> __global__ void __launch_bounds__(kThreads, 1) many_kernel(const __grid_constant__ Args a) {
  if constexpr (!ptx::kSm90a) return;
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  const int lane = threadIdx.x % 32, g = lane >> 2, t = lane & 3, warp = threadIdx.x / 32;
  const int tid = (threadIdx.z * blockDim.y + threadIdx.y) * 128 + threadIdx.x;
  const int rank = blockIdx.x, parts = blockDim.y << a.cluster_shift, part = rank * blockDim.y + threadIdx.y;
  const int first = part * a.slice, live = a.halves - 2 * first;

  // The stream of weights runs a round in front of their use, over the ends of tiles. A lane has rows g and g + 8 of its warp's 16 and
  // 16 of 64 inputs, which the units take in an order of ours.
  const char *row0 = nullptr, *row8 = nullptr;
  const float *scale0 = nullptr, *scale8 = nullptr;
  int fetch_tile = blockIdx.y, fetch_round = 0, fetch_live = 0;
  const auto seek = [&] {
    // Outputs past the end read the last row, and are not stored.
    const int row = (fetch_tile * static_cast<int>(blockDim.z) + threadIdx.z) * kTile + warp * 16 + g;
    const int last = a.outputs - 1;
    const char *w = static_cast<const char *>(a.w) + (first * kChunk + t * 16);
    row0 = w + min(row, last) * a.w_row;
    row8 = w + min(row + 8, last) * a.w_row;
    scale0 = a.scales.row(min(row, last)) + first;
    scale8 = a.scales.row(min(row + 8, last)) + first;
    fetch_live = fetch_tile < a.tiles ? min(live, 2 * a.slice) : 0;
  };
  const auto advance = [&] {
    if (++fetch_round < a.rounds) {
      row0 += kChunks * kChunk;
      row8 += kChunks * kChunk;
      scale0 += kChunks;
      scale8 += kChunks;
      fetch_live -= 2 * kChunks;
    } else {
      fetch_round = 0;
      fetch_tile += gridDim.y;
      seek();
    }
  };
  // Past the end of the inputs old numbers, beside zeros of x. There is no NaN among them: any byte makes a number here.
  uint4 w[kChunks][4] = {};
  float scale[kChunks][2] = {};
  const auto fetch = [&](int d) {
    const char *from0 = row0 + d * kChunk, *from8 = row8 + d * kChunk;
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
  };
  seek();
#pragma unroll
  for (int d = 0; d < kChunks; ++d) fetch(d);

  // Two turns' worth of sums that meet in this block, then x.
  const uint32_t shared = ptx::shared_address(shared_bytes), meet_at = kBarriers, x_at = shared + kBarriers + 2 * kGroups * kSums;
  if (tid == 0) {
    for (int i = 0; i < 2; ++i) ptx::barrier_init(shared + 8 * i, 1);
    ptx::barriers_initialised();
  }
  ptx::cluster_begin();
  ptx::grid_dependency_wait();
  ptx::grid_dependency_launch();

  // x: 64 inputs of all rows a tile, in the order of the weights: input 16 t + 4 j + i of a tile is 16 j + 2 t + (0, 1 for i = 1, 3; 8, 9
  // for i = 0, 2). Rows past the end are the last one again: their sums are not stored.
  {
    const int x_tiles = 2 * blockDim.y * a.slice, pieces = x_tiles * kRows * 8, x_halves = a.halves - 2 * rank * static_cast<int>(blockDim.y) * a.slice;
    const int q = tid % 8;
    const char *from = static_cast<const char *>(a.x) + (static_cast<int64_t>(rank) * blockDim.y * a.slice * 256 + q * 16);
    constexpr int kAtOnce = 8;
    for (int begin = tid; begin < pieces; begin += kThreads * kAtOnce) {
      uint4 v[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int at = begin + i * kThreads, r = at / 8 % kRows, tile = at / (8 * kRows);
        if (at < pieces && tile < x_halves) v[i] = ptx::load_after_wait(from + min(r, a.rows - 1) * a.x_row + tile * 128);
        else v[i] = make_uint4(0, 0, 0, 0);
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int at = begin + i * kThreads, r = at / 8 % kRows, tile = at / (8 * kRows);
        if (at < pieces) {
          const uint32_t to = x_at + tile * kXTile + r * 128 + (q / 2) * 4;
          const uint32_t words[4] = {__byte_perm(v[i].x, v[i].y, 0x7632), __byte_perm(v[i].x, v[i].y, 0x5410),
                                     __byte_perm(v[i].z, v[i].w, 0x7632), __byte_perm(v[i].z, v[i].w, 0x5410)};
#pragma unroll
          for (int p = 0; p < 4; ++p) ptx::store_shared(to + (((4 * (q % 2) + p) ^ r % 8) << 4), words[p]);
        }
      }
    }
    ptx::fence_async();
    __syncthreads();
  }
  advance();

  const uint32_t x_here = x_at + threadIdx.y * a.slice * 2 * kXTile;
  const int own_shift = 3 - a.cluster_shift, own = 1 << own_shift;    // tiles of 8 rows whose sums meet in each block
  int turns = 0;
  for (int tile = blockIdx.y; tile < a.tiles; tile += gridDim.y, ++turns) {
    float sum[8][4] = {}, acc[8][4] = {};
    uint32_t operand[2][4][4];
    float last0 = 0.f, last8 = 0.f;
    const auto add = [&] {
#pragma unroll
      for (int n = 0; n < 8; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) sum[n][i] = fmaf(i < 2 ? last0 : last8, acc[n][i], sum[n][i]);
    };
    for (int round = 0; round < a.rounds; ++round) {
#pragma unroll
      for (int d = 0; d < kChunks; ++d) {
        const int chunk = round * kChunks + d;
        if (d > 0 && chunk >= a.slice) break;
        {
          const float here0 = scale[d][0], here8 = scale[d][1];
          const uint64_t b = wgmma::tile_of_columns(x_here + chunk * 2 * kXTile);
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const uint4 w0 = w[d][half], w8 = w[d][2 + half];
            const uint32_t words0[] = {w0.x, w0.y, w0.z, w0.w}, words8[] = {w8.x, w8.y, w8.z, w8.w};
            uint32_t(&m)[4][4] = operand[half];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
              spread<T>(words0[j], m[j][0], m[j][2]);
              spread<T>(words8[j], m[j][1], m[j][3]);
            }
            if (half == 1) fetch(d);
            // The products of the half before, beside which these became numbers.
            wgmma::hold(m);
            wgmma::wait<0>();
            wgmma::hold(acc);
            if (half == 0) add();
            wgmma::fence();
#pragma unroll
            for (int j = 0; j < 4; ++j)
              wgmma::product<T, false>(acc, m[j], b + wgmma::bytes(half * kXTile + j * 32), half + j > 0);
            wgmma::commit();
          }
          last0 = here0;
          last8 = here8;
        }
      }
#pragma unroll
      for (int d = 1; d < kChunks; ++d)
        if (round * kChunks + d >= a.slice) fetch(d);
      advance();
    }
    wgmma::wait<0>();
    wgmma::hold(acc);
    add();

    // Every warpgroup sends its sums to the block that stores the rows' outputs. Two turns' worth of room is enough: who sends those of the
    // next turn but one has had this block's of the next, which it sends after it has read these.
    const int half = turns & 1;
    const uint32_t barrier = shared + 8 * half;
    const uint32_t meet = meet_at + (half * kGroups + threadIdx.z * blockDim.y) * kSums;
    if (tid == 0) ptx::barrier_expect(barrier, kGroups * kSums);
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const int to = n >> own_shift;
      const uint32_t there = ptx::cluster_address(
          shared + meet + (((part << own_shift) + n - (to << own_shift)) * kTile + warp * 16 + g) * 32 + t * 8, to);
      const uint32_t barrier_there = ptx::cluster_address(barrier, to);
      store_async_2(there, sum[n][0], sum[n][1], barrier_there);
      store_async_2(there + 8 * 32, sum[n][2], sum[n][3], barrier_there);
    }
    ptx::barrier_wait_cluster(barrier, turns >> 1 & 1);
    // In the order of the inputs.
    for (int i = tid; i < static_cast<int>(blockDim.z) * own * kTile; i += kThreads) {
      const int group = i >> (own_shift + 6), n = i >> 6 & (own - 1), output = i & 63;
      const unsigned char *from = shared_bytes + meet_at + (half * kGroups + group * blockDim.y) * kSums + (n * kTile + output) * 32;
      float y[8] = {};
      for (int p = 0; p < parts; ++p, from += own * kTile * 32) {
        float x[8];
        load_pack<float, 4>(reinterpret_cast<const float *>(from), *reinterpret_cast<float(*)[4]>(x));
        load_pack<float, 4>(reinterpret_cast<const float *>(from) + 4, *reinterpret_cast<float(*)[4]>(x + 4));
#pragma unroll
        for (int r = 0; r < 8; ++r) y[r] += x[r];
      }
      const int at = (tile * static_cast<int>(blockDim.z) + group) * kTile + output, row = 8 * (rank * own + n);
      if (at < a.outputs)
#pragma unroll
        for (int r = 0; r < 8; ++r)
          if (row + r < a.rows) static_cast<T *>(a.y)[(row + r) * a.y_stride + at] = from_float<T>(y[r]);
    }
  }
}

}  // namespace many
}  // namespace linear
}  // namespace gdn
