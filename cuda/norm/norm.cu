// gdn_norm: gated RMSNorm, out = x * rsqrt(mean(x^2) + eps) * weight * act(z).
//
// A row is shared by the fewest lanes (a power of two) that can read it in one pass of 16 bytes a lane; a warp takes
// 32 / lanes rows at a time. The weight of a thread's columns stays in its registers while it goes from row to row.
#include "../common/convert.cuh"
#include "../common/host.cuh"
#include "../common/math.cuh"

namespace gdn {
namespace norm {

constexpr int kThreads = 128;
constexpr int kUnroll = 2;    // rows a thread works on at once, to have more loads in flight

// N elements a load, up to ITEMS loads a lane.
template <typename T, int N, int ITEMS>
__global__ void __launch_bounds__(kThreads) norm_kernel(const __grid_constant__ gdn_norm_params p, int lanes) {
  const int sub = threadIdx.x % lanes;
  const int64_t rows = p.tokens * p.heads, groups = static_cast<int64_t>(gridDim.x) * (kThreads / lanes);
  const int64_t group = static_cast<int64_t>(blockIdx.x) * (kThreads / lanes) + threadIdx.x / lanes;

  float weight[ITEMS][N];
#pragma unroll
  for (int m = 0; m < ITEMS; ++m)
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const int col = (sub + m * lanes) * N + i;
      weight[m][i] = col < p.head_v ? load_any(p.weight, col, p.weight_dtype) : 0.f;
    }

  const float mean = 1.f / p.head_v;
  // 64-bit division costs as much as the rest of a row.
  const bool small = rows <= 0xffffffffLL;

  // The bound is the same for all lanes of a warp, because shuffles follow.
  const int64_t warp_group = group - threadIdx.x % 32 / lanes;
  for (int64_t shift = 0; warp_group + shift < rows; shift += groups * kUnroll) {
    float x[kUnroll][ITEMS][N], z[kUnroll][ITEMS][N];
    int64_t out_at[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t row = group + shift + u * groups;
      const int64_t token = small ? static_cast<uint32_t>(row) / static_cast<uint32_t>(p.heads) : row / p.heads;
      const int64_t head = row - token * p.heads;
      out_at[u] = row < rows ? token * p.out.token_stride + head * p.out.head_stride : -1;
      const T *xp = static_cast<const T *>(p.x.ptr) + token * p.x.token_stride + head * p.x.head_stride;
      const T *zp = static_cast<const T *>(p.z.ptr) + token * p.z.token_stride + head * p.z.head_stride;
#pragma unroll
      for (int m = 0; m < ITEMS; ++m) {
        const int col = (sub + m * lanes) * N;
        if (row < rows && col < p.head_v) {
          load_pack<T, N>(xp + col, x[u][m]);
          load_pack<T, N>(zp + col, z[u][m]);
        } else {
#pragma unroll
          for (int i = 0; i < N; ++i) x[u][m][i] = z[u][m][i] = 0.f;
        }
      }
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      float sum = 0.f;
#pragma unroll
      for (int m = 0; m < ITEMS; ++m)
#pragma unroll
        for (int i = 0; i < N; ++i) sum = fmaf(x[u][m][i], x[u][m][i], sum);
      for (int d = lanes / 2; d > 0; d /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, d);
      const float scale = rsqrtf(sum * mean + p.eps);
      if (out_at[u] < 0) continue;
      T *out = static_cast<T *>(const_cast<void *>(p.out.ptr)) + out_at[u];
#pragma unroll
      for (int m = 0; m < ITEMS; ++m) {
        const int col = (sub + m * lanes) * N;
        float y[N];
#pragma unroll
        for (int i = 0; i < N; ++i)
          y[i] = x[u][m][i] * scale * weight[m][i] * (p.sigmoid ? fast_sigmoid(z[u][m][i]) : fast_silu(z[u][m][i]));
        if (col < p.head_v) store_pack<T, N>(out + col, y);
      }
    }
  }
}

template <typename T, int N, int ITEMS> int launch(const gdn_norm_params &p, int sms, cudaStream_t stream) {
  int lanes = 1;
  while (lanes < 32 && lanes * N < p.head_v) lanes *= 2;
  const int64_t rows = p.tokens * p.heads, rows_per_block = kThreads / lanes;
  // One row a thread until the card is full, then kUnroll rows, then more.
  const int64_t blocks = ceil_div(rows, rows_per_block), full = 16LL * sms;
  const int64_t grid = blocks < full ? blocks : full;
  norm_kernel<T, N, ITEMS><<<static_cast<unsigned>(grid), kThreads, 0, stream>>>(p, lanes);
  return launched();
}

}  // namespace norm
}  // namespace gdn

extern "C" int gdn_norm(const gdn_norm_params *params, cudaStream_t stream) {
  using namespace gdn;
  if (!params) return GDN_NULL_POINTER;
  const gdn_norm_params &p = *params;
  if (!valid_dtype(p.io_dtype) || !valid_dtype(p.weight_dtype)) return GDN_BAD_DTYPE;
  if (p.head_v < 1 || p.head_v > 256) return GDN_BAD_HEAD_DIM;
  if (p.tokens < 0 || p.heads < 0) return GDN_BAD_LENGTH;
  for (const gdn_heads *x : {&p.x, &p.z, &p.out})
    if (x->token_stride < 0 || x->head_stride < 0) return GDN_BAD_STRIDE;
  if (p.tokens == 0 || p.heads == 0) return GDN_OK;
  if (!p.x.ptr || !p.z.ptr || !p.out.ptr || !p.weight) return GDN_NULL_POINTER;

  int sms = 0;
  if (const int status = sm_count(&sms)) return status;
  return with_dtype(p.io_dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    constexpr int kVec = 16 / sizeof(T);
    bool vec = p.head_v % kVec == 0;
    for (const gdn_heads *x : {&p.x, &p.z, &p.out})
      vec = vec && aligned(x->ptr, 16) && x->token_stride % kVec == 0 && x->head_stride % kVec == 0;
    if (vec) return norm::launch<T, kVec, 256 / (32 * kVec)>(p, sms, stream);
    return norm::launch<T, 1, 8>(p, sms, stream);
  });
}
