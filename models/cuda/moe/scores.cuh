// The router's logits, in f32: x as it is times the sum of the router's parts, all in bf16, so that every product is exact.
#pragma once

#include "common/math.cuh"
#include "common/ptx.cuh"
#include "../common.cuh"
#include "args.h"

namespace gdn {
namespace moe {

// x as numbers in bf16 whose sum it is: a number in f16 has three bits more than bf16 holds.
template <typename T> constexpr int kTerms = std::is_same_v<T, __half> ? 2 : 1;

template <typename T> __device__ __forceinline__ void terms_of(uint32_t pair, uint32_t (&term)[kTerms<T>]) {
  if constexpr (kTerms<T> == 1) {
    term[0] = pair;
  } else {
    const float2 x = __half22float2(*reinterpret_cast<const __half2 *>(&pair));
    const __nv_bfloat162 high = __floats2bfloat162_rn(x.x, x.y);
    const float2 taken = __bfloat1622float2(high);
    const __nv_bfloat162 rest = __floats2bfloat162_rn(x.x - taken.x, x.y - taken.y);
    term[0] = *reinterpret_cast<const uint32_t *>(&high);
    term[1] = *reinterpret_cast<const uint32_t *>(&rest);
  }
}

// One token's choice is not made yet (share_choice), and no block has made those of several. Without a table the way of many tokens follows.
__device__ __forceinline__ void clear_table(const Args &a, int tid) {
  if (!a.table || blockIdx.x + blockIdx.y > 0) return;
  if (a.tokens == 1 && tid <= a.top_k) ptx::store_relaxed(&a.table->entry[tid], 0);
  if (a.tokens > 1 && tid == 0) a.table->blocks = 0;
}

// ---- up to kFewScored tokens ----

constexpr int kScoreThreads = 256, kScoreWarps = kScoreThreads / 32;
constexpr int kScoreRows = 16;       // of the router, a block: the left operand
constexpr int kScoreInputs = 32;     // of a chunk: 8 in a row of every lane
constexpr int kScoreColumn = 20;     // floats from token to token of sums: 16, without conflicts

// A block is 16 rows of the router and all tokens, 8 * GROUPS at most. blockIdx.y and the warps divide the inputs; a lane
// holds those of x and of the router alike, by loads of 16 bytes. Sums of a split go to logits of their own.
template <typename T, int GROUPS>
__global__ void __launch_bounds__(kScoreThreads) few_scores_kernel(const __grid_constant__ Args a) {
  constexpr int kBatch = GROUPS == 8 ? 2 : 4;    // chunks under way
  __shared__ float partial[kScoreWarps][GROUPS * 8 * kScoreColumn];
  const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32, g = lane >> 2, t = lane & 3;
  const int first_row = static_cast<int>(blockIdx.x) * kScoreRows, of_row = a.hidden / kScoreInputs;
  const int chunks = a.router_parts * of_row, slices = static_cast<int>(gridDim.y) * kScoreWarps;
  const int each = (chunks + slices - 1) / slices;
  const int first = (static_cast<int>(blockIdx.y) * kScoreWarps + warp) * each, end = min(first + each, chunks);

  uint4 w[kBatch][2] = {};
  int input[kBatch] = {};
  const auto load = [&](int chunk) {
#pragma unroll
    for (int d = 0; d < kBatch; ++d) {
      const int at = min(chunk + d, end - 1), part = at / of_row;
      input[d] = (at - part * of_row) * kScoreInputs + t * 8;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int64_t row = static_cast<int64_t>(part) * a.scored + min(first_row + g + 8 * half, a.scored - 1);
        w[d][half] = ptx::load_stream(static_cast<const __nv_bfloat16 *>(a.router) + row * a.hidden + input[d]);
      }
    }
  };
  load(first);

  // The memory is idle until the experts are known, all but the shared one: its first weights come into L2 meanwhile.
  const int blocks = gridDim.x * gridDim.y, block = blockIdx.y * gridDim.x + blockIdx.x;
  for (int i = block * kScoreThreads + tid; i < a.shared_lines; i += blocks * kScoreThreads)
    prefetch_l2(static_cast<const char *>(a.shared_gate_up) + i * int64_t{128});

  ptx::grid_dependency_wait();
  ptx::grid_dependency_launch();
  clear_table(a, tid);

  float sum[GROUPS][4] = {};
  for (int chunk = first; chunk < end; chunk += kBatch) {
    if (chunk > first) load(chunk);
    uint4 x[kBatch][GROUPS];
#pragma unroll
    for (int d = 0; d < kBatch; ++d) {
      const T *from = static_cast<const T *>(a.x) + input[d];
#pragma unroll
      for (int n = 0; n < GROUPS; ++n)    // past the end the last token, whose sums are not stored
        x[d][n] = ptx::load_after_wait(from + min(n * 8 + g, a.tokens - 1) * a.x_stride);
    }
    __syncwarp();    // all loads stand before it: otherwise the compiler moves each after the products before its own
#pragma unroll
    for (int d = 0; d < kBatch; ++d)
      if (chunk + d < end)
#pragma unroll
        for (int n = 0; n < GROUPS; ++n) {
          const uint4 w0 = w[d][0], w8 = w[d][1], pairs = x[d][n];
          uint32_t b[4][kTerms<T>];
          terms_of<T>(pairs.x, b[0]);
          terms_of<T>(pairs.y, b[1]);
          terms_of<T>(pairs.z, b[2]);
          terms_of<T>(pairs.w, b[3]);
#pragma unroll
          for (int i = 0; i < kTerms<T>; ++i) {
            ptx::mma16816<__nv_bfloat16>(sum[n], w0.x, w8.x, w0.y, w8.y, b[0][i], b[1][i]);
            ptx::mma16816<__nv_bfloat16>(sum[n], w0.z, w8.z, w0.w, w8.w, b[2][i], b[3][i]);
          }
        }
  }
#pragma unroll
  for (int n = 0; n < GROUPS; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) partial[warp][(n * 8 + 2 * t + i % 2) * kScoreColumn + g + i / 2 * 8] = sum[n][i];
  __syncthreads();
  const int j = tid % kScoreRows;
  float *to = a.logits + blockIdx.y * a.split_stride + first_row + j;
  if (first_row + j < a.scored)
    for (int token = tid / kScoreRows; token < a.tokens; token += kScoreThreads / kScoreRows) {
      float all = 0.f;
#pragma unroll
      for (int p = 0; p < kScoreWarps; ++p) all += partial[p][token * kScoreColumn + j];
      to[token * a.logits_stride] = all;
    }
}

// ---- any number ----

constexpr int kGemmThreads = 256;
constexpr int kGemmRowBytes = 2 * kGemmInputs;
constexpr int kGemmStageBytes = (kGemmTokens + kGemmRows) * kGemmRowBytes;
constexpr int kGemmStages = 4, kGemmLeastStages = 3;    // of inputs under way, and where 99 KB have to do
constexpr int kGemmColumns = 9;    // of eight rows of the router, a warp; of the second half of the warps 8

// A block is 128 tokens times 136 rows of the router: as many as make two blocks of 256 experts and the shared one's gate.
// Eight warps, four along the tokens, so that of the 9 and 8 columns of eight rows each scheduler has both; tiles lie in
// shared memory with the 16-byte piece p of row r at p ^ r % 8. blockIdx.y divides the inputs.
//
// NOTES: the matrix units cut off what has no place beside the largest summand. So they sum 64 inputs at a time, and those
// sums are added in f32: a logit is then as good as a product in f32 makes it.
template <typename T, int STAGES> __global__ void __launch_bounds__(kGemmThreads, 1) scores_kernel(const __grid_constant__ Args a) {
  extern __shared__ __align__(128) unsigned char tiles[];
  const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32, warp_m = warp % 4, warp_n = warp / 4;
  const uint32_t shared = ptx::shared_address(tiles);
  const int row_blocks = (a.scored + kGemmRows - 1) / kGemmRows, block = blockIdx.x;
  const int first_token = block / row_blocks * kGemmTokens, first_row = block % row_blocks * kGemmRows;
  const int of_row = a.hidden / kGemmInputs, all = a.router_parts * of_row;
  const int each = (all + static_cast<int>(gridDim.y) - 1) / static_cast<int>(gridDim.y);
  const int first = static_cast<int>(blockIdx.y) * each, turns = min(each, all - first);    // < 1: none

  // A thread copies one 16-byte piece of every 32nd row.
  constexpr int kPasses = kGemmTokens / 32, kRest = kGemmRows - kGemmTokens;
  const int piece = tid % 8, copy_row = tid / 8;
  const uint32_t copy_to = shared + copy_row * kGemmRowBytes + ((piece ^ copy_row % 8) << 4);
  const int row_bytes = a.hidden * 2;
  const int64_t x_row_bytes = a.x_stride * 2, part_bytes = static_cast<int64_t>(a.scored) * row_bytes;
  const char *x[kPasses], *w[kPasses + 1];
#pragma unroll
  for (int i = 0; i < kPasses; ++i)    // past the end the last token or row, whose sums are not stored
    x[i] = static_cast<const char *>(a.x) + min(first_token + copy_row + 32 * i, a.tokens - 1) * x_row_bytes + piece * 16;
#pragma unroll
  for (int i = 0; i <= kPasses; ++i)
    w[i] = static_cast<const char *>(a.router) +
           static_cast<int64_t>(min(first_row + copy_row + 32 * i, a.scored - 1)) * row_bytes + piece * 16;
  // Turn by turn: the next inputs, after a row's last ones the first of the router's next part.
  int x_from = first % of_row * kGemmRowBytes, w_from = x_from;
  int64_t w_part = first / of_row * part_bytes;
  const auto copy_x = [&](int stage) {
    const uint32_t to = copy_to + stage * kGemmStageBytes;
#pragma unroll
    for (int i = 0; i < kPasses; ++i) ptx::copy_async(to + i * 32 * kGemmRowBytes, x[i] + x_from);
    x_from += kGemmRowBytes;
    if (x_from == row_bytes) x_from = 0;
  };
  const auto copy_w = [&](int stage) {
    const uint32_t to = copy_to + stage * kGemmStageBytes + kGemmTokens * kGemmRowBytes;
#pragma unroll
    for (int i = 0; i <= kPasses; ++i)
      if (i < kPasses || copy_row < kRest) ptx::copy_async(to + i * 32 * kGemmRowBytes, w[i] + w_part + w_from);
    w_from += kGemmRowBytes;
    if (w_from == row_bytes) {
      w_from = 0;
      w_part += part_bytes;
    }
  };

#pragma unroll
  for (int s = 0; s < STAGES - 1; ++s)
    if (s < turns) copy_w(s);
  ptx::grid_dependency_wait();
  ptx::grid_dependency_launch();
  clear_table(a, tid);
#pragma unroll
  for (int s = 0; s < STAGES - 1; ++s) {
    if (s < turns) copy_x(s);
    ptx::copy_async_commit();
  }

  // Where ldmatrix finds this lane's row of the 16 x 16 matrices; the ninth column's words are read as they are.
  const int g = lane >> 2, t = lane & 3, swizzle = lane % 8;
  const int x_row = warp_m * 32 + lane % 16, w_row = kGemmTokens + warp_n * (kGemmColumns * 8) + lane % 8 + lane / 16 * 8;
  const uint32_t x_at = shared + x_row * kGemmRowBytes, w_at = shared + w_row * kGemmRowBytes;
  const int x_piece = lane / 16, w_piece = lane / 8 % 2;
  const unsigned char *last = tiles + (kGemmTokens + (kGemmColumns - 1) * 8 + g) * kGemmRowBytes + t * 4;
  const bool nine = warp_n == 0;
  float acc[2][kGemmColumns][4] = {};
  const auto multiply = [&](auto columns, uint32_t at) {
    float sum[2][columns][4] = {};
#pragma unroll
    for (int k = 0; k < kGemmInputs / 16; ++k) {
      uint32_t m[2][4], n[kGemmColumns / 2 + 1][4], term[2][4][kTerms<T>];
#pragma unroll
      for (int i = 0; i < 2; ++i)
        ptx::load_matrices(m[i], x_at + at + i * 16 * kGemmRowBytes + (((2 * k + x_piece) ^ swizzle) << 4));
#pragma unroll
      for (int j = 0; j < columns / 2; ++j)
        ptx::load_matrices(n[j], w_at + at + j * 16 * kGemmRowBytes + (((2 * k + w_piece) ^ swizzle) << 4));
      if constexpr (columns % 2)
#pragma unroll
        for (int half = 0; half < 2; ++half)
          n[columns / 2][half] = *reinterpret_cast<const uint32_t *>(last + at + (((2 * k + half) ^ g) << 4));
#pragma unroll
      for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int c = 0; c < 4; ++c) terms_of<T>(m[i][c], term[i][c]);
#pragma unroll
      for (int j = 0; j < columns; ++j)
#pragma unroll
        for (int p = 0; p < kTerms<T>; ++p)
#pragma unroll
          for (int i = 0; i < 2; ++i)
            ptx::mma16816<__nv_bfloat16>(sum[i][j], term[i][0][p], term[i][1][p], term[i][2][p], term[i][3][p],
                                         n[j / 2][j % 2 * 2], n[j / 2][j % 2 * 2 + 1]);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int j = 0; j < columns; ++j)
#pragma unroll
        for (int c = 0; c < 4; ++c) acc[i][j][c] += sum[i][j][c];
  };
  int stage = 0, next = STAGES - 1;
  for (int turn = 0; turn < turns; ++turn) {
    ptx::copy_async_wait<STAGES - 2>();
    __syncthreads();    // all see this stage, and have used up the one before it
    if (turn + STAGES - 1 < turns) {
      copy_x(next);
      copy_w(next);
    }
    ptx::copy_async_commit();
    if (nine)
      multiply(std::integral_constant<int, kGemmColumns>(), stage * kGemmStageBytes);
    else
      multiply(std::integral_constant<int, kGemmColumns - 1>(), stage * kGemmStageBytes);
    stage = stage == STAGES - 1 ? 0 : stage + 1;
    next = next == STAGES - 1 ? 0 : next + 1;
  }
  ptx::copy_async_wait<0>();

  float *scores = a.logits + blockIdx.y * a.split_stride;
#pragma unroll
  for (int i = 0; i < 2; ++i)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int token = first_token + warp_m * 32 + i * 16 + half * 8 + g;
      const int column = first_row + warp_n * (kGemmColumns * 8) + 2 * t;
      float2 *to = reinterpret_cast<float2 *>(scores + token * a.logits_stride + column);
#pragma unroll
      for (int j = 0; j < kGemmColumns; ++j)
        if (token < a.tokens && column + 8 * j < a.logits_stride && (nine || j < kGemmColumns - 1))
          to[4 * j] = make_float2(acc[i][j][2 * half], acc[i][j][2 * half + 1]);
    }
}

}  // namespace moe
}  // namespace gdn
