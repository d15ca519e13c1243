// The router's logits, in f32: x as it is times weights of f32 or bf16.
#pragma once

#include "common/convert.cuh"
#include "common/math.cuh"
#include "common/ptx.cuh"
#include "args.h"

namespace gdn {
namespace moe {

constexpr int kScoreThreads = 256, kScoreWarps = kScoreThreads / 32;
constexpr int kScoreRows = 2;      // of the router, a block
constexpr int kScoreTokens = 8;    // at a time
constexpr int kPiece = 8;          // inputs of a thread at a time

// The line that holds `p` comes into L2. Of what no kernel writes.
__device__ __forceinline__ void prefetch_l2(const void *p) {
#if defined(__CUDA_ARCH__)
  asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
#endif
}

// kPiece weights of a row as they lie in memory.
template <typename W> struct RawPiece { uint4 word[sizeof(W) / 2]; };

template <typename W> __device__ __forceinline__ RawPiece<W> load_weights(const void *row, int i) {
  RawPiece<W> piece;
#pragma unroll
  for (int c = 0; c < static_cast<int>(sizeof(W) / 2); ++c)
    piece.word[c] = ptx::load_stream(static_cast<const char *>(row) + i * sizeof(W) + c * 16);
  return piece;
}

__device__ __forceinline__ uint32_t word_of(const uint4 &v, int i) {
  return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}

// Element i of the 16-byte pieces that begin at `v`.
template <typename T> __device__ __forceinline__ float element(const uint4 *v, int i) {
  if constexpr (sizeof(T) == 4) {
    return __uint_as_float(word_of(v[i / 4], i % 4));
  } else {
    const uint32_t word = word_of(v[i / 8], i % 8 / 2);
    if constexpr (std::is_same_v<T, __half>)
      return __half2float(__ushort_as_half(static_cast<uint16_t>(word >> (16 * (i % 2)))));
    else
      return __uint_as_float(i % 2 ? word & 0xffff0000u : word << 16);
  }
}

// A block is kScoreRows rows of the router and all tokens; its threads divide the inputs.
template <typename T, typename W>
__global__ void __launch_bounds__(kScoreThreads) scores_kernel(const __grid_constant__ Args a) {
  __shared__ float partial[kScoreWarps][kScoreTokens * kScoreRows];
  const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32, first = blockIdx.x * kScoreRows;
  constexpr int kStep = kScoreThreads * kPiece;
  const char *row[kScoreRows];
#pragma unroll
  for (int r = 0; r < kScoreRows; ++r)
    row[r] = static_cast<const char *>(a.router) +
             static_cast<int64_t>(min(first + r, a.scored - 1)) * a.hidden * sizeof(W);
  RawPiece<W> w[kScoreRows] = {};
  const auto load = [&](int i) {
#pragma unroll
    for (int r = 0; r < kScoreRows; ++r) w[r] = load_weights<W>(row[r], i);
  };
  if (tid * kPiece < a.hidden) load(tid * kPiece);

  // The memory is idle until the experts are known, all but the shared one: its first weights come into L2 meanwhile.
  const int64_t lines = static_cast<int64_t>(a.shared_inner) * 2 * a.hidden * sizeof(T) / 128;
  for (int64_t i = blockIdx.x * kScoreThreads + tid; i < lines; i += gridDim.x * kScoreThreads)
    prefetch_l2(static_cast<const char *>(a.shared_gate_up) + i * 128);

  ptx::grid_dependency_wait();
  ptx::grid_dependency_launch();

  for (int t0 = 0; t0 < a.tokens; t0 += kScoreTokens) {
    const int tokens = min(kScoreTokens, a.tokens - t0);
    float sum[kScoreTokens][kScoreRows] = {};
    for (int i = tid * kPiece; i < a.hidden; i += kStep) {
      if (a.hidden > kStep && (t0 > 0 || i >= kStep)) load(i);    // else they are there
#pragma unroll
      for (int t = 0; t < kScoreTokens; ++t)
        if (t < tokens) {
          const uint4 x = ptx::load_after_wait(static_cast<const T *>(a.x) + (t0 + t) * a.x_stride + i);
#pragma unroll
          for (int c = 0; c < kPiece; ++c)
#pragma unroll
            for (int r = 0; r < kScoreRows; ++r)
              sum[t][r] = fmaf(element<T>(&x, c), element<W>(w[r].word, c), sum[t][r]);
        }
    }
#pragma unroll
    for (int t = 0; t < kScoreTokens; ++t)
      if (t < tokens)
#pragma unroll
        for (int r = 0; r < kScoreRows; ++r) {
          const float all = group_sum(sum[t][r]);
          if (lane == 0) partial[warp][t * kScoreRows + r] = all;
        }
    __syncthreads();
    const int t = tid / kScoreRows, r = tid % kScoreRows;
    if (t < tokens && first + r < a.scored) {
      float all = 0.f;
#pragma unroll
      for (int p = 0; p < kScoreWarps; ++p) all += partial[p][tid];
      a.scores[(t0 + t) * a.logits_stride + first + r] = all;
    }
    __syncthreads();
  }
}

}  // namespace moe
}  // namespace gdn
