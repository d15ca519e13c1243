// sum_rows: each column by several threads of a block that share the rows, and a tree over these threads.
#include "sum.h"

#include "launch.cuh"

namespace gdn {
namespace {

constexpr int kThreads = 1024;
constexpr int64_t kManyRows = 256, kManyColumns = 8192;    // more threads for each column, or more columns a block

template <int COLUMNS>
__global__ void __launch_bounds__(kThreads) sum_rows_kernel(const float *from, int64_t rows, int64_t columns, float *to) {
  constexpr int kRows = kThreads / COLUMNS;
  __shared__ float parts[kRows][COLUMNS];
  const int x = threadIdx.x % COLUMNS, y = threadIdx.x / COLUMNS;
  const int64_t column = static_cast<int64_t>(blockIdx.x) * COLUMNS + x;
  float sum = 0.f;
  if (column < columns)
#pragma unroll 8
    for (int64_t row = y; row < rows; row += kRows) sum += from[row * columns + column];
  parts[y][x] = sum;
#pragma unroll
  for (int half = kRows / 2; half > 0; half /= 2) {
    __syncthreads();
    if (y < half) parts[y][x] += parts[y + half][x];
  }
  if (y == 0 && column < columns) to[column] = parts[0][x];
}

template <int COLUMNS> int launch_sum(const float *from, int64_t rows, int64_t columns, float *to, cudaStream_t stream) {
  const int64_t blocks = ceil_div(columns, COLUMNS);
  if (blocks > kMaxBlocks) return GDN_BAD_LENGTH;
  return launch(sum_rows_kernel<COLUMNS>, {dim3(static_cast<unsigned>(blocks)), dim3(kThreads), 0, stream}, from, rows, columns, to);
}

}  // namespace
}  // namespace gdn

int gdn::sum_rows(const float *from, int64_t rows, int64_t columns, float *to, cudaStream_t stream) {
  if (columns == 0) return GDN_OK;
  if (rows > kManyRows) return launch_sum<8>(from, rows, columns, to, stream);
  return columns >= kManyColumns ? launch_sum<128>(from, rows, columns, to, stream) : launch_sum<32>(from, rows, columns, to, stream);
}
