// The combination of the shares of a row's keys: o = sum(w o') / sum(w l'), w = 2^(m' - max m'), in the order of the shares.
#pragma once

#include "common/launch.cuh"
#include "common/ptx.cuh"
#include "output.cuh"

namespace gdn {
namespace attention {

static_assert(kCombineThreads >= kMaxSplits, "a thread a share");

template <typename T, int SIDES, bool WINDOW>
__global__ void __launch_bounds__(kCombineThreads)
    combine_kernel(const __grid_constant__ gdn_attention_params p, const __grid_constant__ Plan plan) {
  constexpr int kColumns = combine_columns(SIDES), kLanes = kColumns / 4, kAhead = 4;
  __shared__ float weights[kMaxSplits], warp_part[2][kCombineThreads / 32];
  __shared__ __align__(16) float parts[SIDES][kColumns];
  const int chunks = (p.head_dim + kColumns - 1) / kColumns;
  const int64_t row = blockIdx.x / chunks;
  const int first = static_cast<int>(blockIdx.x % chunks) * kColumns;
  const int head = static_cast<int>(row % p.num_heads), t = static_cast<int>(row / p.num_heads % plan.max_tokens);
  const int n = static_cast<int>(row / p.num_heads / plan.max_tokens), lane = threadIdx.x % 32, warp = threadIdx.x / 32;

  // Before the wait: memory that no running kernel writes, see gdn_attention_params.overlap.
  const Tokens tokens = tokens_of(p.seqs, n);
  const bool has_token = t < tokens.count;
  const int64_t slot = slot_of(p.cache.slots, n);
  int count = 0;
  if (has_token && slot >= 0) {
    const int group = static_cast<int>(plan.group.value), row_tile = (t * group + plan.group.rest(head)) / plan.rows_a_tile;
    const int position = position_of<WINDOW>(p.cache, p.positions, n);
    const Keys keys = keys_of<WINDOW>(plan, p.cache.capacity, p.cache.window, position, tokens.count * group, row_tile);
    count = Shares::of<WINDOW>(plan, p.cache, keys).count();
  }
  ptx::grid_dependency_wait();
  ptx::grid_dependency_launch();
  if (!has_token) return;

  // Load the first partial sums of this thread's columns.
  const int side = threadIdx.x / kLanes, column = first + threadIdx.x % kLanes * 4;
  const float *partial = plan.partial + row * plan.splits * p.head_dim + column;
  const auto load = [&](int split) {
    return split < count && column < p.head_dim
               ? *reinterpret_cast<const float4 *>(partial + static_cast<int64_t>(split) * p.head_dim)
               : make_float4(0.f, 0.f, 0.f, 0.f);
  };
  float4 x[kAhead];
#pragma unroll
  for (int a = 0; a < kAhead; ++a) x[a] = load(side + a * SIDES);

  // Weights of the shares, a thread a share, and their total.
  const int split = threadIdx.x;
  const float2 sums = split < count ? plan.sums[row * plan.splits + split] : make_float2(-INFINITY, 0.f);
  float most = sums.x;
#pragma unroll
  for (int d = 16; d > 0; d /= 2) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, d));
  if (lane == 0) warp_part[0][warp] = most;
  __syncthreads();
#pragma unroll
  for (int w = 0; w < kCombineThreads / 32; ++w) most = fmaxf(most, warp_part[0][w]);
  const float weight = power_of_two(sums.x - finite_or_zero(most));
  if (split < kMaxSplits) weights[split] = weight;
  const float added = group_sum(weight * sums.y);
  if (lane == 0) warp_part[1][warp] = added;
  __syncthreads();
  float total = 0.f;
#pragma unroll
  for (int w = 0; w < kCombineThreads / 32; ++w) total += warp_part[1][w];

  // Add the weighted partial sums, loads ahead.
  float4 acc = make_float4(0.f, 0.f, 0.f, 0.f);
  for (int begin = side; begin < count; begin += kAhead * SIDES) {
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      const int share = begin + a * SIDES;
      if (share < count) {
        const float w = weights[share];
        acc.x = fmaf(w, x[a].x, acc.x), acc.y = fmaf(w, x[a].y, acc.y);
        acc.z = fmaf(w, x[a].z, acc.z), acc.w = fmaf(w, x[a].w, acc.w);
      }
      x[a] = load(share + kAhead * SIDES);
    }
  }
  *reinterpret_cast<float4 *>(&parts[side][threadIdx.x % kLanes * 4]) = acc;
  __syncthreads();

  // Add the sides, divide, gate and store, a thread a column.
  const int out_column = first + threadIdx.x;
  if (threadIdx.x >= kColumns || out_column >= p.head_dim) return;
  float y = 0.f;
#pragma unroll
  for (int s = 0; s < SIDES; ++s) y += parts[s][threadIdx.x];
  y = total == 0.f ? 0.f : __fdividef(y, total);
  if (p.gate.ptr && total != 0.f) y *= fast_sigmoid(to_float(heads_at<T>(p.gate, n, tokens.first + t, head)[out_column]));
  out_heads_at<T>(p.o, n, tokens.first + t, head)[out_column] = from_float<T>(y);
}

template <typename T, bool WINDOW> int launch_combine(const gdn_attention_params &p, const Plan &plan, cudaStream_t stream) {
  const int64_t rows = int64_t{p.seqs.num_seqs} * plan.max_tokens * p.num_heads;
  const bool few = combine_sides(plan.splits) == kFewSides;
  const int64_t blocks = rows * ceil_div(p.head_dim, combine_columns(few ? kFewSides : kManySides));
  if (blocks > kMaxBlocks) return GDN_BAD_LENGTH;
  // Its blocks may start while the last shares are still summed.
  const dim3 grid(static_cast<unsigned>(blocks));
  const LaunchConfig how = {grid, dim3(kCombineThreads), 0, stream, true};
  return few ? launch(combine_kernel<T, kFewSides, WINDOW>, how, p, plan) : launch(combine_kernel<T, kManySides, WINDOW>, how, p, plan);
}

}  // namespace attention
}  // namespace gdn
