// gdn_norm_backward: the gradients of y = w n act(z), n = x r, r = (mean(x^2) + eps)^-1/2.
//
//   dz = dy w n act'(z)      dn = dy w act(z)      dx = r (dn - n mean(n dn))      dw = sum over rows of dy n act(z)
//
// As in the forward pass a row, of a token and a head, is shared by the fewest lanes (a power of two) that read it in one pass of 16
// bytes a lane. The blocks go through all rows side by side, and each leaves what its rows add to dw; sum_rows() adds the blocks'.
#include "../common/host.cuh"
#include "../common/launch.cuh"
#include "../common/math.cuh"
#include "../common/sum.h"
#include "rows.cuh"

namespace gdn {
namespace norm {
namespace {

constexpr int kThreads = 128;
constexpr int64_t kMostBlocks = 4096;
template <int ITEMS> constexpr int kRows = ITEMS == 1 ? 2 : 1;    // of a group of lanes at a time

struct Plan {
  uint32_t rows, heads;
  uint32_t divide;    // the high half of a row's number times this is its quotient by heads; 0: divide
  float mean;         // 1 / head_v
};

// A lane's share of a row, N elements a load, LANES lanes apart.
template <typename T, int N, int ITEMS, int LANES> struct Share {
  Row<T, N> x[ITEMS], z[ITEMS], dy[ITEMS];
  uint32_t token, head;
  bool there;

  __device__ __forceinline__ int64_t at(const gdn_heads &tensor) const { return token * tensor.token_stride + head * tensor.head_stride; }
  __device__ __forceinline__ void load(const gdn_norm_backward_params &p, const Plan &plan, uint32_t row, int col) {
    there = row < plan.rows;
    token = plan.divide ? __umulhi(row, plan.divide) : row / plan.heads, head = row - token * plan.heads;
    const T *xs = static_cast<const T *>(p.x.ptr) + at(p.x), *zs = static_cast<const T *>(p.z.ptr) + at(p.z);
    const T *dys = static_cast<const T *>(p.d_out.ptr) + at(p.d_out);
#pragma unroll
    for (int m = 0; m < ITEMS; ++m) {
      const int i = col + m * LANES * N;
      if (there && i < p.head_v) x[m] = load_row<T, N>(xs + i), z[m] = load_row<T, N>(zs + i), dy[m] = load_row<T, N>(dys + i);
    }
  }

  // Stores dx and dz, and adds to d_weight.
  __device__ __forceinline__ void differentiate(const gdn_norm_backward_params &p, const Plan &plan, const float (&weight)[ITEMS][N],
                                                float (&d_weight)[ITEMS][N], int col) const {
    float squares = 0.f, dot = 0.f;    // of x, and of x and dn
    float dn[ITEMS][N], slope[ITEMS][N];
#pragma unroll
    for (int m = 0; m < ITEMS; ++m)
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const float gate = z[m][i], s = row_sigmoid(gate), act = p.sigmoid ? s : gate * s;
        const float by = p.sigmoid ? fmaf(-s, s, s) : fmaf(gate * s, 1.f - s, s);
        const bool valid = there && col + m * LANES * N < p.head_v;
        dn[m][i] = valid ? dy[m][i] * act : 0.f;    // without the weight
        slope[m][i] = dy[m][i] * by;
        const float value = valid ? x[m][i] : 0.f;
        squares = fmaf(value, value, squares);
        dot = fmaf(value, weight[m][i] * dn[m][i], dot);
      }
    const float r = rsqrtf(group_sum<LANES>(squares) * plan.mean + p.eps);
    const float along = group_sum<LANES>(dot) * plan.mean * r * r;
    if (!there) return;
    T *dx = static_cast<T *>(const_cast<void *>(p.d_x.ptr)) + at(p.d_x), *dz = static_cast<T *>(const_cast<void *>(p.d_z.ptr)) + at(p.d_z);
#pragma unroll
    for (int m = 0; m < ITEMS; ++m) {
      if (col + m * LANES * N >= p.head_v) continue;
      float to_x[N], to_z[N];
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const float n = x[m][i] * r;
        to_x[i] = r * fmaf(-x[m][i], along, weight[m][i] * dn[m][i]);
        to_z[i] = slope[m][i] * (weight[m][i] * n);
        d_weight[m][i] = fmaf(dn[m][i], n, d_weight[m][i]);
      }
      store_row(dx + col + m * LANES * N, to_x);
      store_row(dz + col + m * LANES * N, to_z);
    }
  }
};

template <typename T, int N, int ITEMS, int LANES>
__global__ void __launch_bounds__(kThreads, ITEMS * N <= 8 ? 5 : 3)
    norm_backward_kernel(const __grid_constant__ gdn_norm_backward_params p, const __grid_constant__ Plan plan, float *partial) {
  constexpr int kGroups = kThreads / LANES, kEach = kRows<ITEMS>;
  __shared__ float sums[kGroups * LANES * N * ITEMS];
  const int group = threadIdx.x / LANES, col = threadIdx.x % LANES * N;
  float weight[ITEMS][N] = {}, d_weight[ITEMS][N] = {};
#pragma unroll
  for (int m = 0; m < ITEMS; ++m) {
    const int at = col + m * LANES * N;
    if (at < p.head_v) {
      if (p.weight_dtype == GDN_F32) load_weights(static_cast<const float *>(p.weight) + at, weight[m]);
      else if (p.weight_dtype == GDN_BF16) load_weights(static_cast<const __nv_bfloat16 *>(p.weight) + at, weight[m]);
      else load_weights(static_cast<const __half *>(p.weight) + at, weight[m]);
    }
  }
  // All lanes of a block make the same number of turns, which shuffles need.
  for (uint32_t first = blockIdx.x * (kGroups * kEach); first < plan.rows; first += gridDim.x * (kGroups * kEach)) {
    Share<T, N, ITEMS, LANES> share[kEach];
#pragma unroll
    for (int u = 0; u < kEach; ++u) share[u].load(p, plan, first + u * kGroups + group, col);
#pragma unroll
    for (int u = 0; u < kEach; ++u) share[u].differentiate(p, plan, weight, d_weight, col);
  }
#pragma unroll
  for (int m = 0; m < ITEMS; ++m)
#pragma unroll
    for (int i = 0; i < N; ++i) sums[(group * ITEMS + m) * (LANES * N) + col + i] = d_weight[m][i];
  __syncthreads();
  for (int i = threadIdx.x; i < p.head_v; i += kThreads) {
    float sum = 0.f;
    for (int g = 0; g < kGroups; ++g) sum += sums[g * ITEMS * LANES * N + i];
    partial[static_cast<int64_t>(blockIdx.x) * p.head_v + i] = sum;
  }
}

// Blocks by the rows that a block of one element a lane would take, so that the workspace follows from sizes alone.
int64_t blocks_of(const gdn_norm_backward_params &p) {
  const int64_t blocks = ceil_div(p.tokens * p.heads, 8);
  return blocks < kMostBlocks ? blocks : kMostBlocks;
}

template <typename T, int N, int ITEMS, int LANES> int launch(const gdn_norm_backward_params &p, cudaStream_t stream) {
  // ceil(2^32 / heads) divides exactly as long as its error, less than heads a row, stays below 2^32 in all.
  const uint32_t rows = static_cast<uint32_t>(p.tokens * p.heads), heads = static_cast<uint32_t>(p.heads);
  const bool multiply = p.heads > 1 && int64_t{rows} + 2 * kThreads < (1LL << 32) / p.heads;
  const Plan plan = {rows, heads, multiply ? static_cast<uint32_t>(ceil_div(1LL << 32, p.heads)) : 0, 1.f / p.head_v};
  return gdn::launch(norm_backward_kernel<T, N, ITEMS, LANES>, {dim3(static_cast<unsigned>(blocks_of(p))), dim3(kThreads), 0, stream}, p, plan,
                     static_cast<float *>(p.workspace));
}

template <typename T, int N> int with_lanes(const gdn_norm_backward_params &p, cudaStream_t stream) {
  if (p.head_v <= N) return launch<T, N, 1, 1>(p, stream);
  if (p.head_v <= 2 * N) return launch<T, N, 1, 2>(p, stream);
  if (p.head_v <= 4 * N) return launch<T, N, 1, 4>(p, stream);
  if (p.head_v <= 8 * N) return launch<T, N, 1, 8>(p, stream);
  if (p.head_v <= 16 * N) return launch<T, N, 1, 16>(p, stream);
  if (p.head_v <= 32 * N) return launch<T, N, 1, 32>(p, stream);
  return launch<T, N, (256 + 32 * N - 1) / (32 * N), 32>(p, stream);
}

int check(const gdn_norm_backward_params &p) {
  if (!valid_dtype(p.io_dtype) || !valid_dtype(p.weight_dtype)) return GDN_BAD_DTYPE;
  if (p.head_v < 1 || p.head_v > 256) return GDN_BAD_HEAD_DIM;
  if (p.tokens < 0 || p.heads < 0 || (p.heads > 0 && p.tokens > 0x7fffffff / p.heads)) return GDN_BAD_LENGTH;
  for (const gdn_heads *x : {&p.x, &p.z, &p.d_out, &p.d_x, &p.d_z})
    if (x->token_stride < 0 || x->head_stride < 0) return GDN_BAD_STRIDE;
  return GDN_OK;
}

int64_t workspace_of(const gdn_norm_backward_params &p) { return blocks_of(p) * p.head_v * static_cast<int64_t>(sizeof(float)); }

}  // namespace
}  // namespace norm
}  // namespace gdn

extern "C" int gdn_norm_backward_workspace(const gdn_norm_backward_params *params, int64_t *bytes) {
  using namespace gdn;
  if (!params || !bytes) return GDN_NULL_POINTER;
  if (const int status = norm::check(*params)) return status;
  *bytes = norm::workspace_of(*params);
  return GDN_OK;
}

extern "C" int gdn_norm_backward(const gdn_norm_backward_params *params, cudaStream_t stream) {
  using namespace gdn;
  if (!params) return GDN_NULL_POINTER;
  const gdn_norm_backward_params &p = *params;
  if (const int status = norm::check(p)) return status;
  if (!p.d_weight) return GDN_NULL_POINTER;
  if (p.tokens > 0 && p.heads > 0) {
    for (const gdn_heads *x : {&p.x, &p.z, &p.d_out, &p.d_x, &p.d_z})
      if (!x->ptr) return GDN_NULL_POINTER;
    if (!p.weight) return GDN_NULL_POINTER;
    if (const int status = check_workspace(p.workspace, p.workspace_bytes, norm::workspace_of(p))) return status;
    const int status = with_dtype(p.io_dtype, [&](auto type) {
      using T = typename decltype(type)::type;
      constexpr int kVec = 16 / sizeof(T);
      bool vec = p.head_v % kVec == 0;
      for (const gdn_heads *x : {&p.x, &p.z, &p.d_out, &p.d_x, &p.d_z})
        vec = vec && aligned(x->ptr, 16) && x->token_stride % kVec == 0 && x->head_stride % kVec == 0;
      if (vec) return norm::with_lanes<T, kVec>(p, stream);
      return norm::with_lanes<T, 1>(p, stream);
    });
    if (status) return status;
  }
  return sum_rows(static_cast<const float *>(p.workspace), norm::blocks_of(p), p.head_v, p.d_weight, stream);
}
