// The product of gdn_scaled for up to 64 rows beside weights in e4m3, on sm_90a: they stream once through registers into wgmma,
// as its left operand. See README.md.
#pragma once

#include "common/convert.cuh"
#include "common/ptx.cuh"
#include "common/wgmma.cuh"
#include "../common.cuh"
#include "e4m3.cuh"

namespace gdn {
namespace scaled {
namespace many {

constexpr int kRows = GDN_SCALED_ROWS;  // of x, the products' columns
constexpr int kTile = 64;                   // outputs of a warpgroup
constexpr int kGroups = 2;                  // warpgroups, each with up to 255 registers a thread
constexpr int kThreads = 128 * kGroups;
constexpr int kChunk = 128;                 // inputs, a block of the scales: 128 bytes of a row of weights
constexpr int kStages = 3;                  // chunks under way
constexpr int kStage = kTile * kGroups * kChunk;
constexpr int kXTile = kRows * 128;         // bytes of 64 inputs of x
constexpr int kSums = kTile * kRows * 4;    // bytes of a warpgroup's sums
constexpr int kScalesAt = 64;               // after two barriers; 16 numbers of a warp and stage

// Where they begin in shared memory. Tiles of x do at multiples of 1024.
constexpr int kSumsAt = (kScalesAt + kStages * kGroups * kTile * 4 + 1023) / 1024 * 1024;
constexpr int kRingAt = kSumsAt + kGroups * kSums;
constexpr int kXAt = kRingAt + kStages * kStage;

// A block is (128 threads, warpgroups along the inputs, along the outputs), kGroups in all; the grid (cluster, tiles). All warpgroups along
// the inputs, of all blocks of the cluster, take `slice` chunks each, the last ones fewer.
struct Args {
  const void *w, *x;
  void *y;
  int64_t w_row, x_row;    // bytes from row to row
  int64_t y_stride;        // elements
  int32_t rows, outputs;
  int32_t halves;          // of a row: 64 inputs
  int32_t slice;           // chunks of a warpgroup
  int32_t tiles;           // of 64 outputs for each warpgroup along them
  int32_t cluster_shift;
  ScaleArgs scales;
  // Rows below those in e4m3, of the dtype of x, whose outputs follow.
  const void *below;
  int64_t below_row;       // bytes from row to row
  int32_t outputs_below, tiles_below;
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

__device__ __forceinline__ float load_scale(uint32_t address) {
  float x;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(address) : "memory");
  return x;
}

// 16 bytes past L1 without registers; L2 fetches the whole line.
__device__ __forceinline__ void copy_stream(uint32_t to, const void *from) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

__device__ __forceinline__ void copy_scale(uint32_t to, const float *from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}

// Weights are under way from the first lines to the last, each lane's own to a place that it alone reads.
template <typename T> __global__ void __launch_bounds__(kThreads, 1) many_kernel(const __grid_constant__ Args a) {
  if constexpr (!ptx::kSm90a) return;
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  const int lane = threadIdx.x % 32, g = lane >> 2, t = lane & 3, warp = threadIdx.x / 32;
  const int tid = (threadIdx.z * blockDim.y + threadIdx.y) * 128 + threadIdx.x;
  const int rank = blockIdx.x, parts = blockDim.y << a.cluster_shift, part = rank * blockDim.y + threadIdx.y;
  const int first = part * a.slice, halves = max(0, min(2 * a.slice, a.halves - 2 * first)), chunks = (halves + 1) / 2;
  const uint32_t shared = ptx::shared_address(shared_bytes), x_at = shared + kXAt;

  // The stream of weights runs kStages chunks in front of their use, over the ends of tiles. A lane has rows g and g + 8 of its warp's 16 and
  // 16 of 64 inputs, which the units take in an order of ours.
  const uint32_t ring = shared + kRingAt + tid * 16, scales = shared + kScalesAt + tid / 32 * 64;
  const char *row0 = nullptr, *row8 = nullptr;
  const float *scale_row = nullptr;
  int fetch_tile = blockIdx.y, fetch_chunk = 0, fetch_stage = 0;
  const auto start_tile = [&] {
    // Outputs past the end read the last row, and are not stored.
    const int row = (fetch_tile * static_cast<int>(blockDim.z) + threadIdx.z) * kTile + warp * 16, last = a.outputs - 1;
    const char *w = static_cast<const char *>(a.w) + (first * kChunk + t * 16);
    row0 = w + min(row + g, last) * a.w_row;
    row8 = w + min(row + 8 + g, last) * a.w_row;
    scale_row = a.scales.row(min(row + lane % 16, last)) + first;
  };
  const auto fetch = [&] {
    if (fetch_tile < a.tiles && chunks > 0) {
      const uint32_t to = ring + fetch_stage * kStage;
      copy_stream(to, row0);
      copy_stream(to + 2 * kThreads * 16, row8);
      if (2 * fetch_chunk + 1 < halves) {
        copy_stream(to + kThreads * 16, row0 + 64);
        copy_stream(to + 3 * kThreads * 16, row8 + 64);
      }
      if (lane < 16) copy_scale(scales + fetch_stage * (kGroups * kTile * 4) + lane * 4, scale_row);
      row0 += kChunk;
      row8 += kChunk;
      ++scale_row;
      if (++fetch_chunk == chunks) {
        fetch_chunk = 0;
        fetch_tile += gridDim.y;
        start_tile();
      }
    }
    ptx::copy_async_commit();
    fetch_stage = fetch_stage + 1 == kStages ? 0 : fetch_stage + 1;
  };
  start_tile();
#pragma unroll
  for (int i = 0; i < kStages; ++i) fetch();
  // The last tiles are of the rows below. If this block has one, its weights come into L2 meanwhile.
  const int of_both = a.tiles + a.tiles_below, tile_below = a.tiles + (gridDim.y + blockIdx.y - a.tiles % gridDim.y) % gridDim.y;
  const auto row_below = [&](int tile, int r) {
    const int row = ((tile - a.tiles) * static_cast<int>(blockDim.z) + threadIdx.z) * kTile + warp * 16 + r;
    return static_cast<const char *>(a.below) + min(row, a.outputs_below - 1) * a.below_row + first * (2 * kChunk);
  };
  if (tile_below < of_both)
    for (int line = lane / 16; line < halves; line += 2) prefetch_l2(row_below(tile_below, lane % 16) + line * 128);

  const uint32_t full = shared, empty = shared + 8;
  if (tid == 0) {
    ptx::barrier_init(full, 1);
    ptx::barrier_init(empty, kThreads / 32 << a.cluster_shift);
    ptx::barriers_initialised();
  }
  ptx::cluster_begin();
  ptx::grid_dependency_wait();
  ptx::grid_dependency_launch();

  // x: 64 inputs of all rows a tile, in the order of the weights: input 16 t + 4 j + i of a tile is 16 j + 2 t + (0, 1 for i = 1, 3; 8, 9
  // for i = 0, 2). Rows and inputs past the end are zeros.
  {
    const int x_first = 2 * rank * static_cast<int>(blockDim.y) * a.slice, x_halves = a.halves - x_first;
    const int pieces = 2 * static_cast<int>(blockDim.y) * a.slice * kRows * 8, q = tid % 8;
    const char *from = static_cast<const char *>(a.x) + (static_cast<int64_t>(x_first) * 128 + q * 16);
    constexpr int kAtOnce = 16;
    for (int begin = tid; begin < pieces; begin += kThreads * kAtOnce) {
      uint4 v[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int unit = begin + i * kThreads, r = unit / 8 % kRows, tile = unit / (8 * kRows);
        v[i] = make_uint4(0, 0, 0, 0);
        if (unit < pieces && tile < x_halves && r < a.rows) v[i] = ptx::load_after_wait(from + r * a.x_row + tile * 128);
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int unit = begin + i * kThreads, r = unit / 8 % kRows, tile = unit / (8 * kRows);
        if (unit < pieces) {
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

  const uint32_t x_here = x_at + threadIdx.y * a.slice * 2 * kXTile;
  const int own_shift = 3 - a.cluster_shift, own = 1 << own_shift;    // tiles of 8 rows whose sums meet in each block
  int turns = 0, stage = 0;
  float sum[8][4], acc[2][8][4], scale[2][2];
  uint32_t operand[2][4][4];
  // Of the chunk before, whose products are done.
  const auto add = [&](float (&of)[8][4], const float (&scale)[2]) {
#pragma unroll
    for (int n = 0; n < 8; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) sum[n][i] = fmaf(scale[i / 2], of[n][i], sum[n][i]);
  };
  const auto step = [&](int chunk, auto number) {
    constexpr int kThis = decltype(number)::value, kLast = 1 - kThis;
    ptx::copy_async_wait<kStages - 1>();
    __syncwarp();
    const uint32_t here = ring + stage * kStage, scales_here = scales + stage * (kGroups * kTile * 4) + g * 4;
    const uint4 words[2][2] = {{ptx::load_shared(here), ptx::load_shared(here + 2 * kThreads * 16)},
                               {ptx::load_shared(here + kThreads * 16), ptx::load_shared(here + 3 * kThreads * 16)}};
    scale[kThis][0] = load_scale(scales_here);
    scale[kThis][1] = load_scale(scales_here + 32);
    stage = stage + 1 == kStages ? 0 : stage + 1;
    const uint64_t b = wgmma::tile_of_columns(x_here + chunk * 2 * kXTile);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t(&m)[4][4] = operand[half];
      const uint32_t words0[] = {words[half][0].x, words[half][0].y, words[half][0].z, words[half][0].w};
      const uint32_t words8[] = {words[half][1].x, words[half][1].y, words[half][1].z, words[half][1].w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        spread<T>(words0[j], m[j][0], m[j][2]);
        spread<T>(words8[j], m[j][1], m[j][3]);
      }
      // The products of the half before, beside which these became numbers.
      wgmma::hold(m);
      wgmma::wait<0>();
      wgmma::hold(acc[half == 0 ? kLast : kThis]);
      wgmma::fence();
#pragma unroll
      for (int j = 0; j < 4; ++j)
        wgmma::product<T, false>(acc[kThis], m[j], b + wgmma::bytes(half * kXTile + j * 32), half + j > 0);
      wgmma::commit();
      if (half == 0) {
        if (chunk > 0) add(acc[kLast], scale[kLast]);
        __syncwarp();    // all lanes have read the chunk
        fetch();
      }
    }
  };
  // The rows below have no scales. A lane's 16 inputs are 32 bytes of a row, two pieces of 16.
  const auto multiply_below = [&](int tile) {
    const char *from[2] = {row_below(tile, g) + t * 32, row_below(tile, g + 8) + t * 32};
    uint4 w[2][2];
    const auto load = [&](int half) {
#pragma unroll
      for (int r = 0; r < 2; ++r)
#pragma unroll
        for (int i = 0; i < 2; ++i) w[r][i] = ptx::load_stream(from[r] + half * 128 + i * 16);
    };
    if (halves > 0) load(0);
    for (int half = 0; half < halves; ++half) {
      uint32_t(&m)[4][4] = operand[0];
#pragma unroll
      for (int r = 0; r < 2; ++r)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          m[2 * i][r] = __byte_perm(w[r][i].x, w[r][i].y, 0x7632), m[2 * i][r + 2] = __byte_perm(w[r][i].x, w[r][i].y, 0x5410);
          m[2 * i + 1][r] = __byte_perm(w[r][i].z, w[r][i].w, 0x7632), m[2 * i + 1][r + 2] = __byte_perm(w[r][i].z, w[r][i].w, 0x5410);
        }
      if (half + 1 < halves) load(half + 1);
      const uint64_t b = wgmma::tile_of_columns(x_here + half * kXTile);
      wgmma::hold(m);
      wgmma::fence();
#pragma unroll
      for (int j = 0; j < 4; ++j) wgmma::product<T, false>(acc[0], m[j], b + wgmma::bytes(j * 32), half + j > 0);
      wgmma::commit();
      wgmma::wait<0>();
    }
    wgmma::hold(acc[0]);
    if (halves > 0) {
#pragma unroll
      for (int n = 0; n < 8; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) sum[n][i] = acc[0][n][i];
    }
  };
  // Sums that met in a turn: every warpgroup has sent its own to the block that stores the rows' outputs. They are added in the order of the inputs.
  const uint32_t meet = kSumsAt + threadIdx.z * blockDim.y * kSums;
  const auto finish = [&](int tile, int turn) {
    const bool below = tile >= a.tiles;
    const int outputs = below ? a.outputs_below : a.outputs;
    ptx::barrier_wait_cluster(full, turn & 1);
    for (int i = tid; i < static_cast<int>(blockDim.z) * own * kTile; i += kThreads) {
      const int group = i >> (own_shift + 6), n = i >> 6 & (own - 1), output = i & 63;
      const unsigned char *from = shared_bytes + kSumsAt + group * blockDim.y * kSums + (n * kTile + output) * 32;
      float y[8] = {};
      for (int p = 0; p < parts; ++p, from += own * kTile * 32) {
        float x[8];
        load_pack<float, 4>(reinterpret_cast<const float *>(from), *reinterpret_cast<float(*)[4]>(x));
        load_pack<float, 4>(reinterpret_cast<const float *>(from) + 4, *reinterpret_cast<float(*)[4]>(x + 4));
#pragma unroll
        for (int r = 0; r < 8; ++r) y[r] += x[r];
      }
      const int column = ((below ? tile - a.tiles : tile) * static_cast<int>(blockDim.z) + group) * kTile + output, row = 8 * (rank * own + n);
      if (column < outputs)
#pragma unroll
        for (int r = 0; r < 8; ++r)
          if (row + r < a.rows) static_cast<T *>(a.y)[(row + r) * a.y_stride + (below ? a.outputs : 0) + column] = from_float<T>(y[r]);
    }
  };
  for (int tile = blockIdx.y; tile < of_both; tile += gridDim.y, ++turns) {
#pragma unroll
    for (int n = 0; n < 8; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) sum[n][i] = 0.f;
    if (tile >= a.tiles) {
      multiply_below(tile);
    } else {
      for (int chunk = 0; chunk < chunks; chunk += 2) {
        step(chunk, std::integral_constant<int, 0>());
        if (chunk + 1 < chunks) step(chunk + 1, std::integral_constant<int, 1>());
      }
      wgmma::wait<0>();
      wgmma::hold(acc[0]);
      wgmma::hold(acc[1]);
      if (chunks > 0) {
        if (chunks % 2) add(acc[0], scale[0]);
        else add(acc[1], scale[1]);
      }
    }

    // The sums of the turn before have met beside these products. The new sums are sent when all blocks of the cluster have read the old ones.
    if (turns > 0) {
      finish(tile - gridDim.y, turns - 1);
      __syncwarp();
      if (lane < 1 << a.cluster_shift) ptx::barrier_arrive_at(empty, lane);
    }
    if (tid == 0) ptx::barrier_expect(full, kGroups * kSums);
    if (turns > 0) ptx::barrier_wait_cluster(empty, (turns - 1) & 1);
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const int to = n >> own_shift;
      const uint32_t there = ptx::cluster_address(
          shared + meet + (((part << own_shift) + n - (to << own_shift)) * kTile + warp * 16 + g) * 32 + t * 8, to);
      const uint32_t barrier_there = ptx::cluster_address(full, to);
      store_async_2(there, sum[n][0], sum[n][1], barrier_there);
      store_async_2(there + 8 * 32, sum[n][2], sum[n][3], barrier_there);
    }
  }
  if (turns > 0) finish(blockIdx.y + (turns - 1) * gridDim.y, turns - 1);
}

}  // namespace many
}  // namespace scaled
}  // namespace gdn
