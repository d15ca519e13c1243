// gdn_swiglu: out = silu(gate) * up, 16 bytes a thread. See README.md.
#include "common/host.cuh"
#include "common/launch.cuh"
#include "common/ptx.cuh"
#include "../gdn_model.h"
#include "norm/rows.cuh"

namespace gdn {
namespace swiglu {
namespace {

constexpr int kThreads = 128;
constexpr int64_t kMaxGridY = 65535;

// N elements a thread; a row of blocks a row.
template <typename T, int N>
__global__ void __launch_bounds__(kThreads) swiglu_kernel(const __grid_constant__ gdn_swiglu_params p) {
  const int64_t row = blockIdx.x, at = (static_cast<int64_t>(blockIdx.y) * kThreads + threadIdx.x) * N;
  ptx::grid_dependency_wait();
  ptx::grid_dependency_launch();
  if (at >= p.columns) return;
  // The memory clobber of the wait keeps these after it.
  const auto gate = load_row<T, N>(static_cast<const T *>(p.gate) + row * p.gate_stride + at);
  const auto up = load_row<T, N>(static_cast<const T *>(p.up) + row * p.up_stride + at);
  float y[N];
#pragma unroll
  for (int i = 0; i < N; ++i) y[i] = gate[i] * row_sigmoid(gate[i]) * up[i];
  store_row<T, N>(static_cast<T *>(p.out) + row * p.out_stride + at, y);
}

int run(const gdn_swiglu_params *params, cudaStream_t stream) {
  if (!params) return GDN_NULL_POINTER;
  const gdn_swiglu_params &p = *params;
  if (!valid_dtype(p.dtype)) return GDN_BAD_DTYPE;
  if (p.rows < 0 || p.rows > kMaxBlocks || p.columns < 0 || ceil_div(p.columns, kThreads) > kMaxGridY)
    return GDN_BAD_LENGTH;
  if (p.gate_stride < 0 || p.up_stride < 0 || p.out_stride < 0) return GDN_BAD_STRIDE;
  if (p.rows == 0 || p.columns == 0) return GDN_OK;
  if (!p.gate || !p.up || !p.out) return GDN_NULL_POINTER;
  return with_dtype(p.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    constexpr int kPack = 16 / sizeof(T);
    const auto whole = [](const void *x, int64_t stride) { return aligned(x, 16) && stride % kPack == 0; };
    const bool vec = p.columns % kPack == 0 && whole(p.gate, p.gate_stride) && whole(p.up, p.up_stride) &&
                     whole(p.out, p.out_stride);
    LaunchConfig config;
    config.grid = dim3(static_cast<unsigned>(p.rows),
                       static_cast<unsigned>(ceil_div(p.columns, kThreads * (vec ? kPack : 1))));
    config.block = dim3(kThreads);
    config.stream = stream;
    config.overlap = p.overlap != 0;
    return vec ? launch(swiglu_kernel<T, kPack>, config, p) : launch(swiglu_kernel<T, 1>, config, p);
  });
}

}  // namespace
}  // namespace swiglu
}  // namespace gdn

extern "C" int gdn_swiglu(const gdn_swiglu_params *params, cudaStream_t stream) {
  return gdn::swiglu::run(params, stream);
}
