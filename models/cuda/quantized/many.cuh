// y = x w^T of packed weights for many rows of x: numbers of x's dtype are made in registers, for the tensor cores. See README.md.
#pragma once

#include "common/convert.cuh"
#include "common/launch.cuh"
#include "common/math.cuh"
#include "common/ptx.cuh"
#include "layout.cuh"
#include "many.h"
#include "unit.cuh"

namespace gdn {
namespace quantized {

// A block's work for 8 NT rows of x at most: two tiles of outputs a warp, and x and weights of a step, a unit of inputs, in each stage.
template <int TYPE, int NT, int STAGES = NT <= 4 ? 3 : 2> struct Shape {
  using F = Format<TYPE>;
  static constexpr int kWarps = NT == 16 && TYPE != GDN_Q6_K ? 8 : 4, kThreads = 32 * kWarps, kTiles = 2 * kWarps;
  static constexpr int kRows = 8 * NT, kRow = F::kInputs * 2 + 64;    // bytes from row to row: without conflicts
  static constexpr int kX = kRows * kRow, kStage = kX + kTiles * F::kBytes, kStages = STAGES;
  static constexpr int kSums = kTiles * kTile + 4;                     // f32 from row to row: without conflicts
  static constexpr int kBytes = kStages * kStage > kRows * kSums * 4 ? kStages * kStage : kRows * kSums * 4;
};

// Of 4 numbers of 8 bits as unpack() gives them, two words of T: scale * number - minimum. Each byte stands in the mantissa of a float that is
// 128 and more; `offset` takes that away again.
template <typename T, int TYPE> __device__ __forceinline__ uint2 numbers_of(uint32_t word, float factor, float offset) {
  float v[4];
  if constexpr (TYPE == GDN_Q8_0) word ^= 0x80808080u;                             // -128 .. 127 to 0 .. 255
  if constexpr (TYPE == GDN_Q6_K) word = (word >> 2 ^ 0x20202020u) & 0x3f3f3f3fu;    // 4 times -32 .. 31 to 0 .. 63
#pragma unroll
  for (int b = 0; b < 4; ++b)
    v[b] = fmaf(__uint_as_float(__byte_perm(word, 0x43000000u, TYPE == GDN_Q8_0 ? 0x7404 | b << 4 : 0x7044 | b << 8)), factor, offset);
  Pack<T, 4> made = {{from_float<T>(v[0]), from_float<T>(v[1]), from_float<T>(v[2]), from_float<T>(v[3])}};
  uint2 words;
  memcpy(&words, &made, sizeof(words));
  return words;
}

// All threads of the cluster; what was written before it is visible after it.
__device__ __forceinline__ void cluster_meet() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

__device__ __forceinline__ float4 load_there(uint32_t address, int rank) {
  float4 v = {};
#if __CUDA_ARCH__ >= 900
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(ptx::cluster_address(address, rank)) : "memory");
#endif
  return v;
}

template <typename T, typename S, int TYPE, int NT>
__global__ void __launch_bounds__(S::kThreads) many_kernel(const __grid_constant__ ManyArgs a) {
  using F = Format<TYPE>;
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  const uint32_t shared = ptx::shared_address(shared_bytes);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane >> 2, t = lane & 3;
  const int rank = blockIdx.x % a.cluster, group = blockIdx.x / a.cluster;
  const int first = rank * a.units / a.cluster, steps = (rank + 1) * a.units / a.cluster - first;

  // Tile s of this warp. One past the last reads the last and is not stored.
  const char *from[2];
#pragma unroll
  for (int s = 0; s < 2; ++s) {
    const int tile = a.up ? min(group * S::kWarps + warp, a.tiles - 1) + s * a.up : min(group * S::kTiles + s * S::kWarps + warp, a.tiles - 1);
    from[s] = a.w + (static_cast<int64_t>(tile) * a.units + first) * F::kBytes;
  }
  const auto weights_at = [&](int stage, int s) { return shared + stage * S::kStage + S::kX + (2 * warp + s) * F::kBytes; };
  const auto load_weights = [&](int step) {
#pragma unroll
    for (int s = 0; s < 2; ++s) {
      const uint32_t to = weights_at(step % S::kStages, s);
#pragma unroll
      for (int i = 0; i < F::kBytes; i += 512)
        if (i + lane * 16 < F::kBytes) ptx::copy_async(to + i + lane * 16, from[s] + static_cast<int64_t>(step) * F::kBytes + i + lane * 16);
    }
  };
  // A chunk of a row is 16 pieces of 8 inputs; piece i of block t lies at 4 i + t, so that a quad reads 64 bytes in a row.
  const auto load_x = [&](int step) {
    constexpr int kPieces = F::kInputs / 8;
    for (int i = threadIdx.x; i < S::kRows * kPieces; i += S::kThreads) {
      const int row = i / kPieces, to = i % kPieces, piece = to / 16 * 16 + to % 4 * 4 + to % 16 / 4;
      const char *x = static_cast<const char *>(a.x) + min(row, a.rows - 1) * a.x_row + (static_cast<int64_t>(first + step) * F::kInputs + piece * 8) * 2;
      ptx::copy_async_or_zero(shared + step % S::kStages * S::kStage + row * S::kRow + to * 16, x, row < a.rows ? 16 : 0);
    }
  };
#pragma unroll
  for (int step = 0; step < S::kStages - 1; ++step)
    if (step < steps) load_weights(step);
  ptx::grid_dependency_wait();
  ptx::grid_dependency_launch();
#pragma unroll
  for (int step = 0; step < S::kStages - 1; ++step) {
    if (step < steps) load_x(step);
    ptx::copy_async_commit();
  }

  float sum[2][NT][4] = {};
  for (int step = 0; step < steps; ++step) {
    ptx::copy_async_wait<S::kStages - 2>();
    __syncthreads();    // the step is there, and all have done with the one before, whose place is filled again
    if (const int next = step + S::kStages - 1; next < steps) {
      load_weights(next);
      load_x(next);
    }
    ptx::copy_async_commit();
    const uint32_t x_lane = shared + step % S::kStages * S::kStage + g * S::kRow + t * 16;
    Unit<TYPE> unit[2];
    Scales<TYPE> scales[2];
#pragma unroll
    for (int s = 0; s < 2; ++s) {
      unit[s].load(weights_at(step % S::kStages, s), lane);
      scales[s] = scales_of<TYPE>(unit[s].record, unit[s].factors);
    }
#pragma unroll
    for (int c = 0; c < kChunksOf<TYPE>; ++c) {
      uint32_t words[2][16];
#pragma unroll
      for (int s = 0; s < 2; ++s) unpack<TYPE>(c, [&](int j) { return unit[s].pieces[j]; }, words[s]);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        uint2 w[2][2][2];    // of tile s, inputs 4 h .. + 3 of 8, rows g and g + 8
#pragma unroll
        for (int s = 0; s < 2; ++s)
#pragma unroll
          for (int row = 0; row < 2; ++row) {
            const float scale = scales[s].scale[c][row][i * F::kGroups / 4];
            // Exact but for Q4_K's minimum: what `offset` is rounded by, all numbers of a group would be wrong by.
            float factor = scale, offset = 0.f;
            if constexpr (TYPE == GDN_Q8_0) {    // the byte is at 1 / 256
              factor = 256.f * scale;
              offset = -32896.f * scale;
            }
            if constexpr (TYPE == GDN_Q6_K) {    // scale is a quarter
              factor = 4.f * scale;
              offset = -640.f * scale;
            }
            if constexpr (TYPE == GDN_Q4_K) offset = fmaf(-128.f, scale, -scales[s].minimum[c][row]);
#pragma unroll
            for (int h = 0; h < 2; ++h) w[s][h][row] = numbers_of<T, TYPE>(words[s][4 * i + 2 * h + row], factor, offset);
          }
        constexpr int kAtOnce = NT < 4 ? NT : 4;
#pragma unroll
        for (int n = 0; n < NT; n += kAtOnce) {
          uint4 x[kAtOnce];
#pragma unroll
          for (int j = 0; j < kAtOnce; ++j) x[j] = ptx::load_shared(x_lane + (n + j) * 8 * S::kRow + c * 256 + i * 64);
#pragma unroll
          for (int h = 0; h < 2; ++h)
#pragma unroll
            for (int s = 0; s < 2; ++s)
#pragma unroll
              for (int j = 0; j < kAtOnce; ++j)
                ptx::mma16816<T>(sum[s][n + j], w[s][h][0].x, w[s][h][1].x, w[s][h][0].y, w[s][h][1].y, h ? x[j].z : x[j].x, h ? x[j].w : x[j].y);
        }
      }
    }
  }

  // The sums of this block's inputs, and those of the other blocks of the cluster in the order of the inputs.
  ptx::copy_async_wait<0>();
  __syncthreads();
  float *sums = reinterpret_cast<float *>(shared_bytes);
#pragma unroll
  for (int s = 0; s < 2; ++s)
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) sums[(8 * n + 2 * t + e % 2) * S::kSums + (s * S::kWarps + warp) * kTile + g + e / 2 * 8] = sum[s][n][e];
  if (a.cluster > 1) cluster_meet();
  else __syncthreads();
  // Of four outputs, all blocks' parts before the first is added.
  const auto sum_of = [&](int at, float (&all)[4]) {
    float4 parts[kMostBlocks];
    if (a.cluster == 1) parts[0] = *reinterpret_cast<const float4 *>(sums + at);
    else {
#pragma unroll
      for (int r = 0; r < kMostBlocks; ++r)
        if (r < a.cluster) parts[r] = load_there(shared + at * 4, r);
    }
    all[0] = all[1] = all[2] = all[3] = 0.f;
#pragma unroll
    for (int r = 0; r < kMostBlocks; ++r)
      if (r < a.cluster) {
        all[0] += parts[r].x;
        all[1] += parts[r].y;
        all[2] += parts[r].z;
        all[3] += parts[r].w;
      }
  };
  const int width = (a.up ? S::kWarps : S::kTiles) * kTile;
  for (int i = 4 * (rank * S::kThreads + threadIdx.x); i < a.rows * width; i += 4 * a.cluster * S::kThreads) {
    const int row = i / width, at = i % width, output = group * width + at;
    float y[4], up[4];
    sum_of(row * S::kSums + at, y);
    if (a.up) {
      sum_of(row * S::kSums + width + at, up);
#pragma unroll
      for (int e = 0; e < 4; ++e) y[e] = fast_silu(y[e]) * up[e];
    }
#pragma unroll
    for (int e = 0; e < 4; ++e)
      if (output + e < a.outputs) static_cast<T *>(a.y)[row * a.y_stride + a.column + output + e] = from_float<T>(y[e]);
  }
  if (a.cluster > 1) cluster_meet();    // what others read here is here until then
}

// How many blocks of a cluster divide the inputs: so that those of a multiprocessor have the fewest steps together.
inline int cluster_of(int groups, int units, int sms) {
  int best = 1;
  int64_t least = INT64_MAX;
  for (int blocks = 1; blocks <= kMostBlocks && blocks <= units; ++blocks) {
    const int64_t steps = ceil_div(static_cast<int64_t>(groups) * blocks, sms) * ceil_div(units, blocks);
    if (steps < least) {
      least = steps;
      best = blocks;
    }
  }
  return best;
}

template <typename T, typename S, int TYPE, int NT> int launch_many(ManyArgs args, LaunchConfig config, int sms, int optin, bool clusters) {
  const int groups = static_cast<int>(ceil_div(args.tiles, args.up ? S::kWarps : S::kTiles));
  args.cluster = config.cluster = clusters ? cluster_of(groups, args.units, sms) : 1;
  config.grid = dim3(static_cast<unsigned>(groups * args.cluster));
  config.block = dim3(S::kThreads);
  config.shared_bytes = S::kBytes;
  return launch_allowed<many_kernel<T, S, TYPE, NT>>(config, optin, args);
}

// Three stages where they fit into 99 KB, else two.
template <int TYPE, int NT> using Least = std::conditional_t<(Shape<TYPE, NT>::kBytes <= kLeastShared), Shape<TYPE, NT>, Shape<TYPE, NT, 2>>;

// As many rows at a time as there is shared memory for: with 99 KB 32.
template <typename T> int run_many(ManyArgs args, int type, const LaunchConfig &config, int sms, int optin, bool clusters) {
  return with_type(type, [&](auto kind) {
    constexpr int kType = decltype(kind)::value;
    static_assert(Least<kType, 2>::kBytes <= kLeastShared && Least<kType, 4>::kBytes <= kLeastShared, "a shape for every card");
    int left = args.rows;
    const auto launch = [&](auto shape, auto nt) {
      constexpr int kNt = decltype(nt)::value;
      args.rows = left < 8 * kNt ? left : 8 * kNt;
      const int status = launch_many<T, decltype(shape), kType, kNt>(args, config, sms, optin, clusters);
      args.x = static_cast<const char *>(args.x) + args.rows * args.x_row;
      args.y = static_cast<T *>(args.y) + args.rows * args.y_stride;
      left -= args.rows;
      return status;
    };
    const auto launch_of = [&](auto nt) { return launch(Shape<kType, decltype(nt)::value>{}, nt); };
    const auto fits = [&](auto nt) { return Shape<kType, decltype(nt)::value>::kBytes <= optin; };
    using std::integral_constant;
    const integral_constant<int, 2> two;
    const integral_constant<int, 4> four;
    const integral_constant<int, 8> eight;
    const integral_constant<int, 16> sixteen;
    int status = GDN_OK;
    while (left > 0 && status == GDN_OK) {
      if (left > 64 && fits(sixteen)) status = launch_of(sixteen);
      else if (left > 32 && fits(eight)) status = launch_of(eight);
      else if (left > 16 && fits(four)) status = launch_of(four);
      else if (left <= 16 && fits(two)) status = launch_of(two);
      else if (left <= 16) status = launch(Least<kType, 2>{}, two);
      else status = launch(Least<kType, 4>{}, four);
    }
    return status;
  });
}

}  // namespace quantized
}  // namespace gdn
