// gdn_norm: gated RMSNorm, out = x * rsqrt(mean(x^2) + eps) * weight * act(z).
//
// A row is shared by the fewest lanes (a power of two) that can read it in one pass of 16 bytes a lane. They take the
// rows of one head at up to kTokens tokens, all of which are on their way before the first is used.
#include "../common/host.cuh"
#include "../common/launch.cuh"
#include "../common/math.cuh"
#include "rows.cuh"

namespace gdn {
namespace norm {

// Measured (README.md): threads a block, blocks a multiprocessor, and tokens a group of lanes, at most; a lane of several loads a
// row has fewer.
constexpr int kThreads = 128, kBlocks = 896 / kThreads, kMaxTokens = 4;
template <int ITEMS> constexpr int kTokens = kMaxTokens / ITEMS < 1 ? 1 : kMaxTokens / ITEMS;

struct Plan {
  const void *x, *z;    // of the first token of this launch
  void *out;
  uint32_t tokens, heads;
  uint32_t groups;      // of lanes: heads times pieces of `each` tokens
  uint32_t divide;      // the high half of a group's number times this is its quotient by heads; 0: divide
  int32_t each;
  float mean;           // 1 / head_v
};

// N elements a load, ITEMS loads a lane, LANES lanes a row.
template <typename T, int N, int ITEMS, int LANES>
__global__ void __launch_bounds__(kThreads, kBlocks)
    norm_kernel(const __grid_constant__ gdn_norm_params p, const __grid_constant__ Plan plan) {
  // The last tokens first: what came before them may have written those last, and L2 still has them.
  const uint32_t group = (gridDim.x - 1 - blockIdx.x) * (kThreads / LANES) + threadIdx.x / LANES;
  const uint32_t piece = plan.divide ? __umulhi(group, plan.divide) : group / plan.heads;
  const uint32_t head = group - piece * plan.heads, first = piece * plan.each;
  const int col = threadIdx.x % LANES * N;
  // A group past the last one has no tokens, but takes part in shuffles.
  const int count = group < plan.groups ? min(static_cast<uint32_t>(plan.each), plan.tokens - first) : 0;

  const T *x = static_cast<const T *>(plan.x) + first * p.x.token_stride + head * p.x.head_stride + col;
  const T *z = static_cast<const T *>(plan.z) + first * p.z.token_stride + head * p.z.head_stride + col;
  Row<T, N> xs[ITEMS][kTokens<ITEMS>], zs[ITEMS][kTokens<ITEMS>];
#pragma unroll
  for (int m = 0; m < ITEMS; ++m) {
    const int remaining = col + m * LANES * N < p.head_v ? count : 0;
    const T *from_x = x + m * LANES * N, *from_z = z + m * LANES * N;
    load_group(xs[m], from_x, p.x.token_stride, remaining);
    load_group(zs[m], from_z, p.z.token_stride, remaining);
  }

  float weight[ITEMS][N] = {};
#pragma unroll
  for (int m = 0; m < ITEMS; ++m) {
    const int at = col + m * LANES * N;
    if (at < p.head_v) {
      if (p.weight_dtype == GDN_F32) load_weights(static_cast<const float *>(p.weight) + at, weight[m]);
      else if (p.weight_dtype == GDN_BF16) load_weights(static_cast<const __nv_bfloat16 *>(p.weight) + at, weight[m]);
      else load_weights(static_cast<const __half *>(p.weight) + at, weight[m]);
    }
  }

  T *out = static_cast<T *>(plan.out) + first * p.out.token_stride + head * p.out.head_stride + col;
#pragma unroll
  for (int u = 0; u < kTokens<ITEMS>; ++u, out += p.out.token_stride) {
    if (u >= plan.each) break;    // all lanes alike
    float sum = 0.f;
#pragma unroll
    for (int m = 0; m < ITEMS; ++m) {
      float more = sum;
#pragma unroll
      for (int i = 0; i < N; ++i) more = fmaf(xs[m][u][i], xs[m][u][i], more);
      sum = col + m * LANES * N < p.head_v ? more : sum;
    }
    const float scale = rsqrtf(group_sum<LANES>(sum) * plan.mean + p.eps);
#pragma unroll
    for (int m = 0; m < ITEMS; ++m) {
      if (u >= count || col + m * LANES * N >= p.head_v) continue;
      float y[N];
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const float gate = zs[m][u][i], s = row_sigmoid(gate);
        y[i] = xs[m][u][i] * scale * weight[m][i] * (p.sigmoid ? s : gate * s);
      }
      store_row(out + m * LANES * N, y);
    }
  }
}

template <typename T, int N, int ITEMS, int LANES> int launch(const gdn_norm_params &p, int sms, cudaStream_t stream) {
  constexpr int64_t kGroups = kThreads / LANES, kMost = 1LL << 29;    // groups a block, a launch
  const auto at = [](const gdn_heads &x, int64_t token) { return static_cast<const T *>(x.ptr) + token * x.token_stride; };
  // One token a group until the card is full.
  const int64_t full = sms * kBlocks * kGroups, wanted = ceil_div(p.tokens * p.heads, full);
  const int64_t each = wanted < kTokens<ITEMS> ? wanted : kTokens<ITEMS>;
  const int64_t most = (p.heads < kMost ? kMost / p.heads : 1) * each;
  for (int64_t token = 0; token < p.tokens; token += most) {
    const int64_t tokens = p.tokens - token < most ? p.tokens - token : most, groups = ceil_div(tokens, each) * p.heads;
    // ceil(2^32 / heads) divides exactly as long as its error, less than heads a group, stays below 2^32 in all.
    const bool multiply = p.heads > 1 && groups + kGroups < (1LL << 32) / p.heads;
    const Plan plan = {at(p.x, token), at(p.z, token), const_cast<T *>(at(p.out, token)), static_cast<uint32_t>(tokens),
                       static_cast<uint32_t>(p.heads), static_cast<uint32_t>(groups),
                       multiply ? static_cast<uint32_t>(ceil_div(1LL << 32, p.heads)) : 0, static_cast<int32_t>(each),
                       1.f / p.head_v};
    const dim3 grid(static_cast<unsigned>(ceil_div(groups, kGroups)));
    if (const int status = gdn::launch(norm_kernel<T, N, ITEMS, LANES>, {grid, dim3(kThreads), 0, stream}, p, plan)) return status;
  }
  return GDN_OK;
}

template <typename T, int N> int with_lanes(const gdn_norm_params &p, int sms, cudaStream_t stream) {
  if (p.head_v <= N) return launch<T, N, 1, 1>(p, sms, stream);
  if (p.head_v <= 2 * N) return launch<T, N, 1, 2>(p, sms, stream);
  if (p.head_v <= 4 * N) return launch<T, N, 1, 4>(p, sms, stream);
  if (p.head_v <= 8 * N) return launch<T, N, 1, 8>(p, sms, stream);
  if (p.head_v <= 16 * N) return launch<T, N, 1, 16>(p, sms, stream);
  if (p.head_v <= 32 * N) return launch<T, N, 1, 32>(p, sms, stream);
  return launch<T, N, (256 + 32 * N - 1) / (32 * N), 32>(p, sms, stream);
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
    if (vec) return norm::with_lanes<T, kVec>(p, sms, stream);
    return norm::with_lanes<T, 1>(p, sms, stream);
  });
}
