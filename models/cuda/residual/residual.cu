// gdn_residual: sum = x + h, y = norm(sum) * weight, a block a row. See README.md.
#include <algorithm>

#include "common/host.cuh"
#include "common/launch.cuh"
#include "common/math.cuh"
#include "common/ptx.cuh"
#include "../common.cuh"
#include "../gdn_model.h"
#include "norm/rows.cuh"

namespace gdn {
namespace residual {
namespace {

constexpr int kMaxThreads = 1024;
template <int ITEMS> constexpr int kPackThreads = ITEMS == 1 ? 1024 : 768;    // leaves the registers for two packs

struct Args {
  gdn_residual_params p;
  float mean;    // 1 / dim
};

// The next launch may start at once: it loads weights, and this one is short.
__device__ __forceinline__ void launch_next_and_wait() {
  ptx::grid_dependency_launch();
  ptx::grid_dependency_wait();
}

// The sum over the block, in all threads and in the order of the warps. One barrier: consecutive rows use different halves of
// `parts`.
__device__ __forceinline__ float block_sum(float x, float (&parts)[2][32], int half) {
  x = group_sum(x);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  if (lane == 0) parts[half][warp] = x;
  __syncthreads();
  return group_sum(lane < warps ? parts[half][lane] : 0.f);
}

// 16 bytes as the elements that they are.
template <typename T, int N> __device__ __forceinline__ void unpack(const uint4 &words, float (&x)[N]) {
  const Row<T, N> row = {{words.x, words.y, words.z, words.w}};
#pragma unroll
  for (int i = 0; i < N; ++i) x[i] = row[i];
}

// Rounded in pairs: one by one would take eight instructions at a quarter of the rate.
template <typename T, int N> __device__ __forceinline__ uint4 pack(const float (&x)[N]) {
  uint32_t word[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (sizeof(T) == 4) word[i] = __float_as_uint(x[i]);
    else word[i] = pack2<T>(x[2 * i], x[2 * i + 1]);
  }
  return {word[0], word[1], word[2], word[3]};
}

// Rows of whole 16-byte packs, up to ITEMS of them a thread: a row stays in registers from its load to its last store.
template <typename T, int ITEMS, bool ADD>
__global__ void __launch_bounds__(kPackThreads<ITEMS>) packs_kernel(const __grid_constant__ Args args) {
  constexpr int N = 16 / sizeof(T);
  __shared__ float parts[2][32];
  const gdn_residual_params &p = args.p;
  // Load the weights.
  int column[ITEMS];
  uint4 weight[ITEMS][N / 4];
#pragma unroll
  for (int m = 0; m < ITEMS; ++m) {
    column[m] = (m * blockDim.x + threadIdx.x) * N;
    if (column[m] < p.dim)
#pragma unroll
      for (int i = 0; i < N / 4; ++i) weight[m][i] = ptx::load_stream(p.weight + column[m] + 4 * i);
  }
  uint4 raw_x[ITEMS], raw_h[ITEMS];
  const auto load = [&](int64_t row) {
    const T *x = static_cast<const T *>(p.x) + row * p.x_stride;
    const T *h = static_cast<const T *>(p.h) + row * p.h_stride;
#pragma unroll
    for (int m = 0; m < ITEMS; ++m)
      if (column[m] < p.dim) {
        raw_x[m] = ptx::load_after_wait(x + column[m]);
        if (ADD) raw_h[m] = ptx::load_after_wait(h + column[m]);
      }
  };
  launch_next_and_wait();

  int half = 0;
  load(blockIdx.x);
  for (int64_t row = blockIdx.x; row < p.rows; row += gridDim.x, half ^= 1) {
    // Sum, and its squares.
    float v[ITEMS][N], squares = 0.f;
#pragma unroll
    for (int m = 0; m < ITEMS; ++m) {
      if (column[m] >= p.dim) continue;
      unpack<T, N>(raw_x[m], v[m]);
      if (ADD) {
        float more[N];
        unpack<T, N>(raw_h[m], more);
#pragma unroll
        for (int i = 0; i < N; ++i) v[m][i] += more[i];
        const uint4 rounded = pack<T, N>(v[m]);
        *reinterpret_cast<uint4 *>(static_cast<T *>(p.sum) + row * p.sum_stride + column[m]) = rounded;
        unpack<T, N>(rounded, v[m]);
      }
#pragma unroll
      for (int i = 0; i < N; ++i) squares = fmaf(v[m][i], v[m][i], squares);
    }
    if (row + gridDim.x < p.rows) load(row + gridDim.x);    // during the rest of this row
    // Norm.
    const float scale = rsqrtf(block_sum(squares, parts, half) * args.mean + p.eps);
#pragma unroll
    for (int m = 0; m < ITEMS; ++m) {
      if (column[m] >= p.dim) continue;
#pragma unroll
      for (int i = 0; i < N; i += 4) {
        const uint4 w = weight[m][i / 4];
        v[m][i] *= scale * __uint_as_float(w.x);
        v[m][i + 1] *= scale * __uint_as_float(w.y);
        v[m][i + 2] *= scale * __uint_as_float(w.z);
        v[m][i + 3] *= scale * __uint_as_float(w.w);
      }
      *reinterpret_cast<uint4 *>(static_cast<T *>(p.y) + row * p.y_stride + column[m]) = pack<T, N>(v[m]);
    }
  }
}

// Any row: element by element, read twice. The second time a thread reads its own writes.
template <typename T, bool ADD>
__global__ void __launch_bounds__(kMaxThreads) elements_kernel(const __grid_constant__ Args args) {
  __shared__ float parts[2][32];
  const gdn_residual_params &p = args.p;
  launch_next_and_wait();
  int half = 0;
  for (int64_t row = blockIdx.x; row < p.rows; row += gridDim.x, half ^= 1) {
    const T *x = static_cast<const T *>(p.x) + row * p.x_stride;
    const T *h = static_cast<const T *>(p.h) + row * p.h_stride;
    T *sum = static_cast<T *>(p.sum) + row * p.sum_stride, *y = static_cast<T *>(p.y) + row * p.y_stride;
    float squares = 0.f;
    for (int i = threadIdx.x; i < p.dim; i += blockDim.x) {
      T v = x[i];
      if (ADD) sum[i] = v = from_float<T>(to_float<T>(v) + to_float<T>(h[i]));
      squares = fmaf(to_float<T>(v), to_float<T>(v), squares);
    }
    const float scale = rsqrtf(block_sum(squares, parts, half) * args.mean + p.eps);
    for (int i = threadIdx.x; i < p.dim; i += blockDim.x)
      y[i] = from_float<T>(to_float<T>(ADD ? sum[i] : x[i]) * (scale * p.weight[i]));
  }
}

template <typename T, bool ADD> int launch_rows(const gdn_residual_params &p, int sms, cudaStream_t stream) {
  constexpr int kPack = 16 / sizeof(T);
  const auto whole = [](const void *x, int64_t stride) { return aligned(x, 16) && stride % kPack == 0; };
  const int64_t packs = ceil_div(p.dim, kPack);
  const bool vec = p.dim % kPack == 0 && packs <= 2 * kPackThreads<2> && aligned(p.weight, 16) &&
                   whole(p.x, p.x_stride) && whole(p.y, p.y_stride) &&
                   (!ADD || (whole(p.h, p.h_stride) && whole(p.sum, p.sum_stride)));
  const int items = vec && packs > kPackThreads<1> ? 2 : 1;
  const int64_t wanted = ceil_div(vec ? ceil_div(packs, items) : p.dim, 32) * 32;
  const int threads = static_cast<int>(wanted < kMaxThreads ? wanted : kMaxThreads);
  const Args args = {p, 1.f / p.dim};
  const auto launch_kernel = [&](auto *kernel) {
    // No more blocks than run at once.
    int64_t blocks = p.rows;
    if (p.rows > sms) {
      int fit = 0;
      if (const cudaError_t e = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&fit, kernel, threads, 0)) return cuda_status(e);
      blocks = std::min(p.rows, int64_t{sms} * fit);
    }
    LaunchConfig config;
    config.grid = dim3(static_cast<unsigned>(blocks));
    config.block = dim3(static_cast<unsigned>(threads));
    config.stream = stream;
    config.overlap = p.overlap != 0;
    return launch(kernel, config, args);
  };
  if (!vec) return launch_kernel(elements_kernel<T, ADD>);
  return items == 1 ? launch_kernel(packs_kernel<T, 1, ADD>) : launch_kernel(packs_kernel<T, 2, ADD>);
}

int run(const gdn_residual_params *params, cudaStream_t stream) {
  if (!params) return GDN_NULL_POINTER;
  const gdn_residual_params &p = *params;
  if (!valid_dtype(p.dtype)) return GDN_BAD_DTYPE;
  if (p.rows < 0 || p.dim < 1 || p.dim > (1 << 30)) return GDN_BAD_LENGTH;
  for (const int64_t stride : {p.x_stride, p.h_stride, p.sum_stride, p.y_stride})
    if (stride < 0) return GDN_BAD_STRIDE;
  if (p.rows == 0) return GDN_OK;
  if (!p.x || !p.y || !p.weight || (p.h && !p.sum)) return GDN_NULL_POINTER;
  int sms = 0;
  if (const int status = sm_count(&sms)) return status;
  return with_dtype(p.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    return p.h ? launch_rows<T, true>(p, sms, stream) : launch_rows<T, false>(p, sms, stream);
  });
}

}  // namespace
}  // namespace residual
}  // namespace gdn

extern "C" int gdn_residual(const gdn_residual_params *params, cudaStream_t stream) {
  return gdn::residual::run(params, stream);
}
