// gdn_attention_prepare: RMS norm and rotary position of new queries and keys; keys and values into the cache.
//
// A warp a row: a query head, a key head or a value head of one token. The row is loaded before anything else is known of
// its sequence. Pairs of the rotation lie in different lanes and meet in shared memory.
//
// A value row with an infinity or NaN is kept as zeros, and its key row as NaN: whoever sees the token gets NaN. Products
// of tiles multiply the rows of tokens that a query does not see with a weight of zero, and zero times NaN is not zero.
#include "common/launch.cuh"
#include "common/math.cuh"
#include "common/ptx.cuh"
#include "norm/rows.cuh"
#include "cache.cuh"

namespace gdn {
namespace attention {
namespace {

constexpr int kPrepareWarps = 4, kMaxDim = 256;

// cos and sin of position * frequency. The product and its reduction to half a turn in f64: in f32 an angle of 200,000
// would be off by 6e-3. sincospif has no slow path for large arguments, as sinf has.
__device__ __forceinline__ void angle(int64_t position, float high, float low, float &cosine, float &sine) {
  const double halves = static_cast<double>(position) * (static_cast<double>(high) + static_cast<double>(low)) *
                        0.31830988618379067154;
  sincospif(static_cast<float>(halves - 2.0 * rint(0.5 * halves)), &sine, &cosine);
}

// N elements a load.
template <typename T, int N>
__global__ void __launch_bounds__(32 * kPrepareWarps)
    prepare_kernel(const __grid_constant__ gdn_attention_prepare_params p) {
  constexpr int kItems = kMaxDim / (32 * N);
  __shared__ __align__(16) float rows[kPrepareWarps][kMaxDim];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t item = static_cast<int64_t>(blockIdx.x) * kPrepareWarps + warp;
  const int per_token = p.num_heads + 2 * p.num_kv_heads;
  const int token = static_cast<int>(item / per_token), row = static_cast<int>(item - int64_t{token} * per_token);
  const bool query = row < p.num_heads, value = row >= p.num_heads + p.num_kv_heads;
  const int head = query ? row : value ? row - p.num_heads - p.num_kv_heads : row - p.num_heads;
  const gdn_heads from = query ? p.q : value ? p.v : p.k;
  float *const shared = rows[warp];

  ptx::grid_dependency_wait();
  ptx::grid_dependency_launch();
  for (int n = blockIdx.y; n < p.seqs.num_seqs; n += gridDim.y) {
    const Tokens tokens = tokens_of(p.seqs, n);
    if (token >= tokens.count) continue;    // the whole warp
    const T *x = heads_at<T>(from, n, tokens.first + token, head);
    Row<T, N> raw[kItems], raw_value[kItems];
#pragma unroll
    for (int m = 0; m < kItems; ++m)
      if (const int col = (m * 32 + lane) * N; col < p.head_dim) raw[m] = load_row<T, N>(x + col);
    if (!query) {
      const T *v = heads_at<T>(p.v, n, tokens.first + token, head);
#pragma unroll
      for (int m = 0; m < kItems; ++m)
        if (const int col = (m * 32 + lane) * N; col < p.head_dim) raw_value[m] = load_row<T, N>(v + col);
    }

    const int64_t slot = slot_of(p.cache.slots, n);
    const int64_t position = static_cast<int64_t>(p.positions[n]) + token;
    const bool kept = slot >= 0 && position < p.cache.capacity;
    if (!query && !kept) continue;
    T *to = nullptr;
    if (query) to = out_heads_at<T>(p.q_out, n, tokens.first + token, head);
    else to = static_cast<T *>(value ? p.cache.v : p.cache.k) + cache_offset(p.cache, slot, head) +
              position * p.cache.token_stride;

    float y[kItems][N];
    float sum = 0.f;
#pragma unroll
    for (int m = 0; m < kItems; ++m) {
      const bool in = (m * 32 + lane) * N < p.head_dim;
#pragma unroll
      for (int i = 0; i < N; ++i) {
        y[m][i] = in && slot >= 0 ? raw[m][i] : 0.f;
        sum = fmaf(y[m][i], y[m][i], sum);
      }
    }
    if (!value && slot >= 0) {
      const float scale = rsqrtf(group_sum(sum) / p.head_dim + p.eps), more = p.zero_centred ? 1.f : 0.f;
      const float *weights = query ? p.q_weight : p.k_weight;
      __syncwarp();
#pragma unroll
      for (int m = 0; m < kItems; ++m) {
        const int col = (m * 32 + lane) * N;
        if (col >= p.head_dim) continue;
        float w[N];
        load_weights(weights + col, w);
#pragma unroll
        for (int i = 0; i < N; ++i) shared[col + i] = y[m][i] * scale * (w[i] + more);
      }
      __syncwarp();
      const int half = p.rotary_dim / 2;
      for (int i = lane; i < half; i += 32) {
        float cosine, sine;
        angle(position, p.inv_freq[i], p.inv_freq_low ? p.inv_freq_low[i] : 0.f, cosine, sine);
        const float a = shared[i], b = shared[i + half];
        shared[i] = a * cosine - b * sine;
        shared[i + half] = a * sine + b * cosine;
      }
      __syncwarp();
#pragma unroll
      for (int m = 0; m < kItems; ++m)
#pragma unroll
        for (int i = 0; i < N; ++i)
          if ((m * 32 + lane) * N < p.head_dim) y[m][i] = shared[(m * 32 + lane) * N + i];
    }
    if (!query) {
      bool finite = true;
#pragma unroll
      for (int m = 0; m < kItems; ++m)
#pragma unroll
        for (int i = 0; i < N; ++i)
          if ((m * 32 + lane) * N < p.head_dim) finite = finite && isfinite(raw_value[m][i]);
      if (!__all_sync(0xffffffffu, finite)) {
#pragma unroll
        for (int m = 0; m < kItems; ++m)
#pragma unroll
          for (int i = 0; i < N; ++i) y[m][i] = value ? 0.f : NAN;
      }
    }
#pragma unroll
    for (int m = 0; m < kItems; ++m)
      if (const int col = (m * 32 + lane) * N; col < p.head_dim) store_row<T, N>(to + col, y[m]);
  }
}

int check(const gdn_attention_prepare_params &p) {
  if (!valid_dtype(p.io_dtype)) return GDN_BAD_DTYPE;
  if (const int status = check_heads(p.num_heads, p.num_kv_heads, p.head_dim)) return status;
  if (p.rotary_dim < 0 || p.rotary_dim > p.head_dim || p.rotary_dim % 2 != 0) return GDN_BAD_HEAD_DIM;
  if (const int status = check_sequences(p.seqs)) return status;
  for (const gdn_heads *x : {&p.q, &p.k, &p.v, &p.q_out})
    if (!valid_strides(*x)) return GDN_BAD_STRIDE;
  return check_cache(p.cache, p.io_dtype);
}

template <typename T, int N> int launch_prepare(const gdn_attention_prepare_params &p, cudaStream_t stream) {
  const int64_t rows = int64_t{max_tokens(p.seqs)} * (p.num_heads + 2 * p.num_kv_heads);
  const int64_t blocks = ceil_div(rows, kPrepareWarps);
  if (blocks > kMaxBlocks) return GDN_BAD_LENGTH;
  const unsigned seqs = static_cast<unsigned>(p.seqs.num_seqs < 65535 ? p.seqs.num_seqs : 65535);
  return launch(prepare_kernel<T, N>,
                {dim3(static_cast<unsigned>(blocks), seqs), dim3(32 * kPrepareWarps), 0, stream, p.overlap != 0}, p);
}

}  // namespace
}  // namespace attention
}  // namespace gdn

extern "C" int gdn_attention_prepare(const gdn_attention_prepare_params *params, cudaStream_t stream) {
  using namespace gdn;
  using namespace gdn::attention;
  if (!params) return GDN_NULL_POINTER;
  const gdn_attention_prepare_params &p = *params;
  if (const int status = check(p)) return status;
  if (p.seqs.num_seqs == 0 || max_tokens(p.seqs) == 0) return GDN_OK;
  for (const void *x : {p.q.ptr, p.k.ptr, p.v.ptr, p.q_out.ptr, static_cast<const void *>(p.cache.k),
                        static_cast<const void *>(p.cache.v), static_cast<const void *>(p.positions),
                        static_cast<const void *>(p.q_weight), static_cast<const void *>(p.k_weight)})
    if (!x) return GDN_NULL_POINTER;
  if (p.rotary_dim > 0 && !p.inv_freq) return GDN_NULL_POINTER;
  return with_dtype(p.io_dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    constexpr int kVec = 16 / sizeof(T);
    bool vec = true;
    for (const gdn_heads *x : {&p.q, &p.k, &p.v, &p.q_out}) vec = vec && aligned_rows(*x, kVec, p.io_dtype);
    return vec ? launch_prepare<T, kVec>(p, stream) : launch_prepare<T, 1>(p, stream);
  });
}
