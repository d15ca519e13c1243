// gdn_dequantize: a matrix in e4m3 as the numbers that it stands for.
#include "common/launch.cuh"
#include "e4m3.cuh"

namespace gdn {
namespace scaled {
namespace {

constexpr int kPiece = 16;      // inputs of a thread: 16 bytes
constexpr int kThreads = 256;

struct DequantizeArgs {
  const char *w;
  ScaleArgs scales;
  void *y;
  int64_t w_stride, y_stride, pieces;
  int32_t per_row;
};

template <typename T> __global__ void __launch_bounds__(kThreads) dequantize_kernel(const __grid_constant__ DequantizeArgs a) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  ptx::grid_dependency_wait();
  ptx::grid_dependency_launch();
  if (i >= a.pieces) return;
  const int64_t row = i / a.per_row;
  const int column = static_cast<int>(i - row * a.per_row) * kPiece;
  const uint4 w = ptx::load_stream(a.w + row * a.w_stride + column);
  const float scale = a.scales.row(row)[column / GDN_SCALE_COLUMNS];
  const uint32_t words[] = {w.x, w.y, w.z, w.w};
  uint32_t y[4][2];
#pragma unroll
  for (int c = 0; c < 4; ++c) e4m3_scaled<T>(words[c], scale, y[c]);
  uint4 *to = reinterpret_cast<uint4 *>(static_cast<T *>(a.y) + row * a.y_stride + column);
  to[0] = {y[0][0], y[0][1], y[1][0], y[1][1]};
  to[1] = {y[2][0], y[2][1], y[3][0], y[3][1]};
}

}  // namespace
}  // namespace scaled
}  // namespace gdn

extern "C" int gdn_dequantize(const gdn_dequantize_params *params, cudaStream_t stream) {
  using namespace gdn;
  using namespace gdn::scaled;
  if (!params) return GDN_NULL_POINTER;
  const gdn_dequantize_params &p = *params;
  if (p.dtype != GDN_BF16 && p.dtype != GDN_F16) return GDN_BAD_DTYPE;
  if (p.outputs < 0 || p.inputs < 0) return GDN_BAD_LENGTH;
  if (p.w_stride < 0 || p.y_stride < 0) return GDN_BAD_STRIDE;
  if (const int status = check_scales(p.scales)) return status;
  if (p.outputs == 0 || p.inputs == 0) return GDN_OK;
  if (!p.w || !p.scales.ptr || !p.y) return GDN_NULL_POINTER;
  if (p.inputs % kPiece || !aligned(p.w, 16) || !aligned(p.y, 16) || p.w_stride % 16 || p.y_stride % 8) return GDN_BAD_ALGO;
  DequantizeArgs args = {static_cast<const char *>(p.w), scale_args(p.scales), p.y, p.w_stride, p.y_stride, 0, 0};
  args.per_row = p.inputs / kPiece;
  args.pieces = static_cast<int64_t>(args.per_row) * p.outputs;
  const int64_t blocks = ceil_div(args.pieces, kThreads);
  if (blocks > kMaxBlocks) return GDN_BAD_LENGTH;
  LaunchConfig config;
  config.grid = dim3(static_cast<unsigned>(blocks));
  config.block = dim3(kThreads);
  config.stream = stream;
  return p.dtype == GDN_BF16 ? launch(dequantize_kernel<__nv_bfloat16>, config, args)
                             : launch(dequantize_kernel<__half>, config, args);
}
