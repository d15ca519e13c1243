// gdn_attention_prepare: RMS norm and rotary position of new queries and keys; keys and values into the cache.
//
// A warp has two rows of a token: two query heads, or a key head and its value head. With many tokens it has the same rows of
// every n-th token, and loads the next ones while it works. Pairs of the rotation are in different lanes and are exchanged
// through shared memory.
//
// A value row with an infinity or NaN is stored as zeros, and its key row as NaN: every query that sees the token gets NaN.
// Products of tiles multiply the rows of tokens that a query does not see by a weight of zero, and zero times NaN is NaN.
#include <algorithm>
#include <type_traits>

#include "common/launch.cuh"
#include "common/math.cuh"
#include "common/ptx.cuh"
#include "norm/rows.cuh"
#include "cache.cuh"

namespace gdn {
namespace attention {
namespace {

constexpr int kMaxDim = 256, kRows = 2;    // of a warp
constexpr int kWarps = 4, kBlocks = 7;       // of a block; of a multiprocessor

// cos and sin of position * frequency. The product and its reduction to half a turn in f64: in f32 an angle of 200,000
// would be off by 6e-3. sincospif has no slow path for large arguments, as sinf has.
__device__ __forceinline__ void angle(int64_t position, float high, float low, float &cosine, float &sine) {
  const double halves = static_cast<double>(position) * (static_cast<double>(high) + static_cast<double>(low)) *
                        0.31830988618379067154;
  sincospif(static_cast<float>(halves - 2.0 * rint(0.5 * halves)), &sine, &cosine);
}

// The index of column c of a row in shared memory. The halves of 8 columns a lane are apart, so that neighbouring lanes use all
// banks.
constexpr int kHalf = kMaxDim / 2 + 16, kRowSize = 2 * kHalf;
template <int N> __device__ __forceinline__ unsigned shared_column(unsigned c) { return N < 8 ? c : c / 4 % 2 * kHalf + c / 8 * 4 + c % 4; }

// A warp's rows of token `begin` and of every `step`-th after it, N elements a load. QUERY: query heads `head` and the next; else
// that key head and its value head. A row past the last head and columns past the last are zeros: only loads and stores skip
// them.
template <typename T, int N, bool QUERY, bool WINDOW, bool NORM>
__device__ __forceinline__ void prepare_rows(const gdn_attention_prepare_params &p, int head, int begin, int step, float (&shared)[kRows][kRowSize]) {
  constexpr int kItems = kMaxDim / (32 * N), kRotated = QUERY ? kRows : 1;
  const int lane = threadIdx.x % 32, rows = (QUERY ? p.num_heads : p.num_kv_heads) - head;
  const gdn_heads &rotated = QUERY ? p.q : p.k;
  const float mean = 1.f / p.head_dim;
  const auto column = [&](int m) { return (m * 32 + lane) * N; };
  const auto index = [&](int m, int i) { return shared_column<N>(column(m)) + i % 4 + i / 4 * kHalf; };
  // Load the weights.
  float weights[kItems][N];
#pragma unroll
  for (int m = 0; m < kItems; ++m) {
    if constexpr (!NORM) break;
    if (column(m) < p.head_dim) load_weights((QUERY ? p.q_weight : p.k_weight) + column(m), weights[m]);
#pragma unroll
    for (int i = 0; i < N; ++i) weights[m][i] += p.zero_centred ? 1.f : 0.f;
  }

  for (int n = blockIdx.y; n < p.seqs.num_seqs; n += gridDim.y) {
    const Tokens tokens = tokens_of(p.seqs, n);
    if (begin >= tokens.count) continue;    // the whole warp
    const T *x = heads_at<T>(rotated, n, tokens.first + begin, head), *v = heads_at<T>(p.v, n, tokens.first + begin, head);
    Row<T, N> raw[kRows][kItems] = {};
    const auto load = [&] {
#pragma unroll
      for (int r = 0; r < kRows; ++r)
#pragma unroll
        for (int m = 0; m < kItems; ++m)
          if (r % kRotated < rows && column(m) < p.head_dim)
            raw[r][m] = load_row<T, N>((r < kRotated ? x + r * rotated.head_stride : v) + column(m));
      x += step * rotated.token_stride;
      v += step * p.v.token_stride;
    };
    const auto store = [&](T *row, const auto &element) {
#pragma unroll
      for (int m = 0; m < kItems; ++m) {
        float y[N];
#pragma unroll
        for (int i = 0; i < N; ++i) y[i] = element(m, i);
        if (column(m) < p.head_dim) store_row<T, N>(row + column(m), y);
      }
    };
    load();
    const int64_t slot = slot_of(p.cache.slots, n), before = p.positions[n];
    for (int64_t token = begin; token < tokens.count; token += step) {
      const int64_t position = before + token;
      if (!QUERY && (slot < 0 || (!WINDOW && position >= p.cache.capacity))) break;
      int64_t row = position;
      if constexpr (WINDOW) row = static_cast<uint32_t>(position) % static_cast<uint32_t>(p.cache.capacity);
      const int64_t in_cache = cache_offset(p.cache, slot, head) + row * p.cache.token_stride;
      // Append the value.
      bool good = slot >= 0;
      if constexpr (!QUERY) {
        float zero = 0.f;    // NaN if a value is infinite or NaN
#pragma unroll
        for (int m = 0; m < kItems; ++m)
#pragma unroll
          for (int i = 0; i < N; ++i) zero = fmaf(raw[1][m][i], 0.f, zero);
        good = __all_sync(0xffffffffu, zero == 0.f);
        store(static_cast<T *>(p.cache.v) + in_cache, [&](int m, int i) { return good ? raw[1][m][i] : 0.f; });
      }
      // Norm, to shared memory.
      float sum[kRotated] = {};
#pragma unroll
      for (int r = 0; r < kRotated; ++r)
#pragma unroll
        for (int m = 0; m < kItems; ++m)
#pragma unroll
          for (int i = 0; i < N; ++i) sum[r] = fmaf(raw[r][m][i], raw[r][m][i], sum[r]);
#pragma unroll
      for (int r = 0; r < kRotated; ++r) {
        const float scale = NORM ? rsqrtf(group_sum(sum[r]) * mean + p.eps) : 1.f;
#pragma unroll
        for (int m = 0; m < kItems; ++m)
#pragma unroll
          for (int i = 0; i < N; ++i) shared[r][index(m, i)] = good ? NORM ? raw[r][m][i] * scale * weights[m][i] : raw[r][m][i] : QUERY ? 0.f : NAN;
      }
      if (token + step < tokens.count) load();
      __syncwarp();
      // Rotation.
      const int half = p.rotary_dim / 2;
#pragma unroll 1
      for (int i = lane; i < half; i += 32) {
        float cosine, sine;
        angle(position, p.inv_freq[i], p.inv_freq_low ? p.inv_freq_low[i] : 0.f, cosine, sine);
        const unsigned first = shared_column<N>(i), second = shared_column<N>(i + half);
#pragma unroll
        for (int r = 0; r < kRotated; ++r) {
          const float a = shared[r][first], b = shared[r][second];
          shared[r][first] = a * cosine - b * sine;
          shared[r][second] = a * sine + b * cosine;
        }
      }
      __syncwarp();
      // Store the queries, or append the key.
      T *const out = QUERY ? out_heads_at<T>(p.q_out, n, tokens.first + token, head) : static_cast<T *>(p.cache.k) + in_cache;
#pragma unroll
      for (int r = 0; r < kRotated; ++r)
        if (r < rows) store(out + r * p.q_out.head_stride, [&](int m, int i) { return shared[r][index(m, i)]; });
      __syncwarp();    // before the next token's rows overwrite these
    }
  }
}

template <typename T, int N, bool WINDOW, bool NORM>
__global__ void __launch_bounds__(32 * kWarps, kBlocks) prepare_kernel(const __grid_constant__ gdn_attention_prepare_params p, int step) {
  __shared__ __align__(16) float rows[kWarps][kRows][kRowSize];
  const int warp = threadIdx.x / 32, item = static_cast<int>(blockIdx.x) * kWarps + warp;
  const int query_items = (p.num_heads + kRows - 1) / kRows, token_items = query_items + p.num_kv_heads;
  const int begin = item / token_items, token_item = item - begin * token_items;
  ptx::grid_dependency_wait();
  ptx::grid_dependency_launch();
  if (begin >= step) return;
  if (token_item < query_items) prepare_rows<T, N, true, WINDOW, NORM>(p, token_item * kRows, begin, step, rows[warp]);
  else prepare_rows<T, N, false, WINDOW, NORM>(p, token_item - query_items, begin, step, rows[warp]);
}

int check(const gdn_attention_prepare_params &p) {
  if (!valid_dtype(p.io_dtype)) return GDN_BAD_DTYPE;
  if (const int status = check_heads(p.num_heads, p.num_kv_heads, p.head_dim)) return status;
  if (p.rotary_dim < 0 || p.rotary_dim > p.head_dim || p.rotary_dim % 2 != 0) return GDN_BAD_HEAD_DIM;
  if (const int status = check_sequences(p.seqs)) return status;
  for (const gdn_heads *x : {&p.q, &p.k, &p.v, &p.q_out})
    if (!valid_strides(*x)) return GDN_BAD_STRIDE;
  return check_cache(p.cache, max_tokens(p.seqs), p.io_dtype);
}

template <typename T> int launch_prepare(const gdn_attention_prepare_params &p, cudaStream_t stream) {
  int sms = 0;
  if (const int status = sm_count(&sms)) return status;
  const int64_t seqs = std::min(p.seqs.num_seqs, 65535), token_items = ceil_div(p.num_heads, kRows) + p.num_kv_heads;
  // No more warps than run at once.
  const int64_t step = std::min<int64_t>(max_tokens(p.seqs), ceil_div(int64_t{sms} * kBlocks * kWarps, token_items * seqs));
  LaunchConfig config;
  config.grid = dim3(static_cast<unsigned>(ceil_div(step * token_items, kWarps)), static_cast<unsigned>(seqs));
  config.block = dim3(32 * kWarps);
  config.stream = stream;
  config.overlap = p.overlap != 0;
  constexpr int kVec = 16 / sizeof(T);
  bool vec = true;
  for (const gdn_heads *x : {&p.q, &p.k, &p.v, &p.q_out}) vec = vec && aligned_rows(*x, kVec, p.io_dtype);
  const auto with = [&](auto window, auto norm) {
    constexpr bool kWindow = decltype(window)::value, kNorm = decltype(norm)::value;
    return launch(vec ? prepare_kernel<T, kVec, kWindow, kNorm> : prepare_kernel<T, 1, kWindow, kNorm>, config, p, static_cast<int>(step));
  };
  if (!p.q_weight) return p.cache.window > 0 ? with(std::true_type{}, std::false_type{}) : with(std::false_type{}, std::false_type{});
  return p.cache.window > 0 ? with(std::true_type{}, std::true_type{}) : with(std::false_type{}, std::true_type{});
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
                        static_cast<const void *>(p.cache.v), static_cast<const void *>(p.positions)})
    if (!x) return GDN_NULL_POINTER;
  if (!p.q_weight != !p.k_weight) return GDN_NULL_POINTER;
  if (p.rotary_dim > 0 && !p.inv_freq) return GDN_NULL_POINTER;
  return with_dtype(p.io_dtype, [&](auto type) { return launch_prepare<typename decltype(type)::type>(p, stream); });
}
