// Context parallelism, for few long sequences: segments of a sequence are walked side by side. Nothing is left out or approximated.
//
// A segment maps the state before it to the one after it, S -> S M + N, and the gradient after it to the one before it, dS -> dS M^T + R
// (as ../chunk/context.cuh for the forward pass). N and R are what it makes of zeros, M what it makes of the identity when there are no
// values. A first launch walks the first segment forward and the last one backward, as they are, and finds N, M and R of the others. This
// kernel goes through those and puts the states and gradients at their borders where N and R were. A second launch walks the other
// segments from there.
#pragma once

#include "../common/ptx.cuh"
#include "plan.h"

namespace gdn {
namespace backward {

constexpr int kCombineThreads = 256;
constexpr int kCombineRows = 16;    // rows of a state that a block carries on
constexpr int kCombineStride = 129;    // floats: rows and columns are read without conflicts
struct CombineShared {
  float state[kCombineRows][128];
  float matrix[128 * kCombineStride];
};

__host__ __device__ inline int64_t combine_blocks(const gdn_common &c) {
  return int64_t{2} * c.seqs.num_seqs * c.num_v_heads * ((c.head_v + kCombineRows - 1) / kCombineRows);
}

// `states` [segment, sequence, head, head_v, head_k]: the state after the first segment, then N of the middle ones. `gradients`: R of the
// middle segments, then the gradient before the last one. `transfers`: M of the middle segments.
__global__ void __launch_bounds__(kCombineThreads)
combine_kernel(const __grid_constant__ gdn_common c, float *states, float *gradients, const float *transfers, int segments) {
  extern __shared__ __align__(16) uint8_t raw_shared[];
  CombineShared &shared = *reinterpret_cast<CombineShared *>(raw_shared);
  ptx::grid_dependency_wait();
  const unsigned tiles = (c.head_v + kCombineRows - 1) / kCombineRows, heads = static_cast<unsigned>(c.seqs.num_seqs) * c.num_v_heads;
  const int row0 = static_cast<int>(blockIdx.x % tiles) * kCombineRows, rows = min(kCombineRows, c.head_v - row0);
  const unsigned item = blockIdx.x / tiles % heads;
  const bool reverse = blockIdx.x / tiles >= heads;
  const int64_t size = static_cast<int64_t>(c.head_v) * c.head_k, matrix_size = static_cast<int64_t>(c.head_k) * c.head_k;
  const auto state_at = [&](int i) { return (reverse ? gradients : states) + (static_cast<int64_t>(i) * heads + item) * size + row0 * c.head_k; };
  const int thread = threadIdx.x, column = thread % 128, first_row = thread / 128;
  // The state at the first border.
  float *from = state_at(reverse ? segments - 2 : 0);
  for (int i = first_row; i < rows; i += 2)
    if (column < c.head_k) shared.state[i][column] = from[i * c.head_k + column];
  for (int step = 0; step < segments - 2; ++step) {
    const int transfer = reverse ? segments - 3 - step : step;
    const float *matrix = transfers + (static_cast<int64_t>(transfer) * heads + item) * matrix_size;
#pragma unroll 16
    for (int i = 4 * thread; i < matrix_size; i += 4 * kCombineThreads) {
      const float4 x = *reinterpret_cast<const float4 *>(matrix + i);
      float *to = shared.matrix + i / c.head_k * kCombineStride + i % c.head_k;
      to[0] = x.x, to[1] = x.y, to[2] = x.z, to[3] = x.w;
    }
    __syncthreads();
    float *place = state_at(reverse ? transfer : step + 1);
    float sums[kCombineRows / 2] = {};
    if (column < c.head_k) {
      const float *m = shared.matrix + (reverse ? column * kCombineStride : column);
      const int stride = reverse ? 1 : kCombineStride;
#pragma unroll
      for (int i = 0; i < kCombineRows / 2; ++i)
        if (2 * i + first_row < rows) sums[i] = place[(2 * i + first_row) * c.head_k + column];
      for (int k = 0; k < c.head_k; k += 4) {
        const float x[4] = {m[k * stride], m[(k + 1) * stride], m[(k + 2) * stride], m[(k + 3) * stride]};
#pragma unroll
        for (int i = 0; i < kCombineRows / 2; ++i) {
          const float4 y = *reinterpret_cast<const float4 *>(&shared.state[2 * i + first_row][k]);
          sums[i] = fmaf(y.x, x[0], fmaf(y.y, x[1], fmaf(y.z, x[2], fmaf(y.w, x[3], sums[i]))));
        }
      }
    }
    __syncthreads();
    if (column < c.head_k)
#pragma unroll
      for (int i = 0; i < kCombineRows / 2; ++i)
        if (2 * i + first_row < rows) {
          shared.state[2 * i + first_row][column] = sums[i];
          place[(2 * i + first_row) * c.head_k + column] = sums[i];
        }
  }
}

}  // namespace backward
}  // namespace gdn
