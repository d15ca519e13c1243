// f32: all in f32 on the ordinary cores. Made for exactness, not for speed.
#pragma once

#include "output.cuh"
#include "ring.cuh"

namespace gdn {
namespace attention {

template <int DIM, bool WINDOW> struct Scalar {
  static constexpr int kSlots = 4, kRows = 16;
  using R = Ring<float, DIM, kSlots, WINDOW>;
  static constexpr int kKeys = R::kKeys, kStride = kRows + 4;    // of the scores of a key
  static constexpr int kQ = R::kBytes, kScores = kQ + kRows * DIM * 4, kKeep = kScores + kKeys * kStride * 4;
  static constexpr int kBytes = kKeep + kRows * 4;
};

// One function: its steps share the registers of sums.
template <int DIM, bool WINDOW>
__global__ void __launch_bounds__(kThreads, 2)
    scalar_kernel(const __grid_constant__ gdn_attention_params p, const __grid_constant__ Plan plan) {
  using S = Scalar<DIM, WINDOW>;
  constexpr int kRowStep = kThreads / S::kKeys, kEach = S::kRows / kRowStep;    // rows of a thread's scores
  constexpr int kColumns = DIM > kThreads ? DIM / kThreads : 1;                 // of a thread's sums
  constexpr int kSumRows = S::kRows * DIM / kColumns / kThreads;                // and their rows
  constexpr int kWarpRows = S::kRows / kWarps;                                  // rows whose weights a warp makes
  extern __shared__ __align__(128) uint8_t smem[];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;

  // Find the block's rows and keys, and start its first tiles.
  Block b(p, plan, std::bool_constant<WINDOW>());
  if (b.rows == 0) {
    ptx::grid_dependency_wait();
    ptx::grid_dependency_launch();
    return;
  }
  typename S::R ring(smem, p, b);
  ring.start(b.position);

  // Load the queries.
  float *const queries = reinterpret_cast<float *>(smem + S::kQ);
  float *const scores = reinterpret_cast<float *>(smem + S::kScores);
  float *const keeps = reinterpret_cast<float *>(smem + S::kKeep);
  for (int i = threadIdx.x; i < S::kRows * DIM; i += kThreads) {
    const int row = i / DIM, column = i % DIM;
    const bool in = b.first_row + row < b.rows && column < p.head_dim && b.keys > 0;
    queries[i] = in ? heads_at<float>(p.q, b.n, b.tokens.first + b.token(plan, row), b.head(plan, row))[column] : 0.f;
  }

  // Running maximum and sum of the rows warp * kWarpRows + r; the same in all lanes.
  float largest[kWarpRows], total[kWarpRows];
#pragma unroll
  for (int r = 0; r < kWarpRows; ++r) largest[r] = -INFINITY, total[r] = 0.f;
  float acc[kSumRows][kColumns] = {};
  const int column = threadIdx.x * kColumns % DIM, sum_row = threadIdx.x * kColumns / DIM * kSumRows;

  for (int tile = b.first_tile; tile < b.end_tile; ++tile) {
    const int pass = 2 * (tile - b.first_tile);
    // Scores, to shared memory.
    const uint8_t *keys = smem + ring.next(pass);
    {
      const int key = threadIdx.x % S::kKeys, row = threadIdx.x / S::kKeys;
      const uint8_t *key_row = keys + key * DIM * 4;
      float sum[kEach] = {};
      for (int c = 0; c < DIM / 4; ++c) {
        const float4 k = *reinterpret_cast<const float4 *>(key_row + (c ^ key % 8) * 16);
#pragma unroll
        for (int e = 0; e < kEach; ++e) {
          const float4 q = *reinterpret_cast<const float4 *>(queries + (row + e * kRowStep) * DIM + c * 4);
          sum[e] = fmaf(q.x, k.x, fmaf(q.y, k.y, fmaf(q.z, k.z, fmaf(q.w, k.w, sum[e]))));
        }
      }
#pragma unroll
      for (int e = 0; e < kEach; ++e) scores[key * S::kStride + row + e * kRowStep] = sum[e];
    }

    // Weights in place of the scores.
    const uint8_t *values = smem + ring.next(pass + 1);
    const Tile keys_of_tile = Tile::of<WINDOW, S::kKeys>(p.cache, tile);
#pragma unroll
    for (int r = 0; r < kWarpRows; ++r) {
      const int row = warp * kWarpRows + r, seen_keys = b.seen(plan, row);
      const int seen = b.seen_of<WINDOW>(keys_of_tile, seen_keys), hidden = b.hidden_of<WINDOW>(p.cache, keys_of_tile, seen_keys);
      constexpr int kLaneKeys = (S::kKeys + 31) / 32;
      float x[kLaneKeys], most = largest[r];
#pragma unroll
      for (int m = 0; m < kLaneKeys; ++m) {
        const int key = m * 32 + lane;
        x[m] = key < seen && key < S::kKeys && (!WINDOW || key >= hidden) ? scores[key * S::kStride + row] * plan.scale : -INFINITY;
        most = fmaxf(most, x[m]);
      }
#pragma unroll
      for (int d = 16; d > 0; d /= 2) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, d));
      const float zero = finite_or_zero(most), keep = power_of_two(largest[r] - zero);
      largest[r] = most;
      float added = 0.f;
#pragma unroll
      for (int m = 0; m < kLaneKeys; ++m) {
        x[m] = power_of_two(x[m] - zero);
        added += x[m];
        if (m * 32 + lane < S::kKeys) scores[(m * 32 + lane) * S::kStride + row] = x[m];
      }
      total[r] = fmaf(total[r], keep, group_sum(added));
      if (lane == 0) keeps[row] = keep;
    }
    __syncthreads();

    // Add the weighted values of the thread's columns.
#pragma unroll
    for (int r = 0; r < kSumRows; ++r)
#pragma unroll
      for (int c = 0; c < kColumns; ++c) acc[r][c] *= keeps[sum_row + r];
    for (int key = 0; key < S::kKeys; ++key) {
      const float *value = reinterpret_cast<const float *>(values + key * DIM * 4 + (column / 4 ^ key % 8) * 16) + column % 4;
      float v[kColumns];
#pragma unroll
      for (int c = 0; c < kColumns; ++c) v[c] = value[c];
#pragma unroll
      for (int r = 0; r < kSumRows; r += 4) {
        const float4 w = *reinterpret_cast<const float4 *>(scores + key * S::kStride + sum_row + r);
        const float weight[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
          for (int c = 0; c < kColumns; ++c) acc[r + i][c] = fmaf(weight[i], v[c], acc[r + i][c]);
      }
    }
  }

  // Exchange the sums of weights.
  __syncthreads();
#pragma unroll
  for (int r = 0; r < kWarpRows; ++r) {
    const int row = warp * kWarpRows + r;
    if (lane == 0) keeps[row] = total[r];
    if (lane == 0 && plan.splits > 1 && b.first_row + row < b.rows) store_sums(p, plan, b, row, largest[r], total[r]);
  }
  __syncthreads();

  // Store the rows, gated, or their partial sums.
#pragma unroll
  for (int r = 0; r < kSumRows; ++r) {
    const int row = sum_row + r;
    if (b.first_row + row >= b.rows || column >= p.head_dim) continue;
    const Output<float> out(p, plan, b, row, keeps[row]);
    float gate[kColumns] = {};
    out.load_gate(column, gate);
    out.store(column, acc[r], gate);
  }
}

}  // namespace attention
}  // namespace gdn
