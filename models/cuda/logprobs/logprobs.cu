// gdn_logprobs_begin, gdn_logprobs_end: log-probabilities of drawn and of likely tokens. See README.md.
#include <math.h>

#include "common/convert.cuh"
#include "common/host.cuh"
#include "common/launch.cuh"
#include "../gdn_logprobs.h"

namespace gdn {
namespace logprobs {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kEach = 32;                      // logits of a thread
constexpr int kSpan = kThreads * kEach;        // of a block: a part of a row
constexpr int kMostVocab = 1 << 19;
constexpr int kMostParts = kMostVocab / kSpan;
static_assert(kMostParts <= 64, "a lane of the warp that merges has two parts");

// What a part leaves, in words: the greatest logit, the sum of exp(x - that), then ids and logits of the likeliest tokens.
constexpr int kIds = 2, kLogits = kIds + GDN_MOST_LIKELIEST, kPartWords = kLogits + GDN_MOST_LIKELIEST;

// The order of a logit, followed by the complement of the id: the greatest is the likeliest token, of equal ones the first. 0: none.
__device__ __forceinline__ uint64_t key_of(float x, uint32_t id) {
  const uint32_t bits = __float_as_uint(x);
  return static_cast<uint64_t>(bits & 0x80000000u ? ~bits : bits | 0x80000000u) << 32 | ~id;
}
__device__ __forceinline__ uint32_t id_of(uint64_t key) { return ~static_cast<uint32_t>(key); }
__device__ __forceinline__ float logit_of(uint64_t key) {
  const uint32_t bits = static_cast<uint32_t>(key >> 32);
  return __uint_as_float(bits & 0x80000000u ? bits & 0x7fffffffu : ~bits);
}

__device__ __forceinline__ uint64_t greatest(uint64_t x) {
#pragma unroll
  for (int by = 16; by > 0; by /= 2) {
    const uint64_t other = __shfl_xor_sync(0xffffffffu, x, by);
    x = other > x ? other : x;
  }
  return x;
}

// A block takes part blockIdx.x of row blockIdx.y.
template <typename T>
__global__ void __launch_bounds__(kThreads) begin_kernel(const __grid_constant__ gdn_logprobs_params p) {
  __shared__ uint64_t best[2][kWarps];
  __shared__ float sums[kWarps];
  const int number = blockIdx.y, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const gdn_sampling_row row = p.state[number];
  if (row.scale < 0.) return;
  if (blockIdx.x == 0 && threadIdx.x == 0) p.out[number].likeliest = row.likeliest;
  if (row.likeliest == 0) return;
  const T *logits = static_cast<const T *>(p.logits) + number * p.logits_stride;
  if (row.window > 0) {
    const int64_t first = static_cast<int64_t>(number) * p.history;
    const uint32_t newest = row.seen % row.window;
    const uint32_t count = row.seen < row.window ? row.seen + 1 : row.window;
    for (uint32_t i = blockIdx.x * kThreads + threadIdx.x; i < count; i += gridDim.x * kThreads) {
      const uint32_t id = i == newest ? p.ids[number] : p.recent[first + i];
      if (id < static_cast<uint32_t>(p.vocab)) p.raw[first + i] = to_float<T>(logits[id]);
    }
  }
  uint64_t keys[kEach];
  uint64_t own = 0;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const uint32_t id = blockIdx.x * kSpan + i * kThreads + threadIdx.x;
    keys[i] = id < static_cast<uint32_t>(p.vocab) ? key_of(to_float<T>(logits[id]), id) : 0;
    own = keys[i] > own ? keys[i] : own;
  }
  uint32_t *part = p.parts + (static_cast<int64_t>(number) * gridDim.x + blockIdx.x) * kPartWords;
  const uint32_t rounds = row.likeliest - 1 < GDN_MOST_LIKELIEST ? row.likeliest - 1 : GDN_MOST_LIKELIEST;
  float most = 0.f;
  for (uint32_t i = 0; i < rounds || i == 0; ++i) {
    const uint64_t of_warp = greatest(own);
    if (lane == 0) best[i % 2][warp] = of_warp;
    __syncthreads();
    uint64_t found = best[i % 2][0];
#pragma unroll
    for (int w = 1; w < kWarps; ++w) found = best[i % 2][w] > found ? best[i % 2][w] : found;
    if (i == 0) most = logit_of(found);
    if (threadIdx.x == 0) {
      part[kIds + i] = found == 0 ? GDN_NO_TOKEN : id_of(found);
      part[kLogits + i] = __float_as_uint(logit_of(found));
    }
    if (own == found && found != 0) {
      own = 0;
#pragma unroll
      for (int j = 0; j < kEach; ++j) own = keys[j] < found && keys[j] > own ? keys[j] : own;
    }
  }
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < kEach; ++i)
    if (keys[i] != 0) sum += expf(logit_of(keys[i]) - most);
#pragma unroll
  for (int by = 16; by > 0; by /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, by);
  if (lane == 0) sums[warp] = sum;
  __syncthreads();
  if (threadIdx.x > 0) return;
  for (int w = 1; w < kWarps; ++w) sum += sums[w];
  part[0] = __float_as_uint(most);
  part[1] = __float_as_uint(sum);
}

// A block takes a row; its first warp merges the parts, and all look for the token among the recent ones.
template <typename T>
__global__ void __launch_bounds__(kThreads) end_kernel(const __grid_constant__ gdn_logprobs_params p, int parts) {
  __shared__ float drawn;
  const int number = blockIdx.x, lane = threadIdx.x % 32;
  const gdn_sampling_row row = p.state[number];
  const uint32_t token = p.drawn[number];
  if (row.scale < 0. || row.likeliest == 0 || token >= static_cast<uint32_t>(p.vocab)) return;
  if (threadIdx.x == 0) drawn = to_float<T>((static_cast<const T *>(p.logits) + number * p.logits_stride)[token]);
  __syncthreads();
  const int64_t first = static_cast<int64_t>(number) * p.history;
  const uint32_t count = row.seen < row.window ? row.seen : row.window;
  for (uint32_t i = threadIdx.x; i < count; i += kThreads)
    if (p.recent[first + i] == token) drawn = p.raw[first + i];    // the same wherever it is
  __syncthreads();
  if (threadIdx.x >= 32) return;

  const uint32_t *of_row = p.parts + static_cast<int64_t>(number) * parts * kPartWords;
  const auto part = [&](int half) { return of_row + static_cast<int64_t>(lane + 32 * half) * kPartWords; };
  const uint32_t rounds = row.likeliest - 1 < GDN_MOST_LIKELIEST ? row.likeliest - 1 : GDN_MOST_LIKELIEST;
  const auto key = [&](int half, uint32_t i) -> uint64_t {
    if (lane + 32 * half >= parts || i >= rounds || part(half)[kIds + i] == GDN_NO_TOKEN) return 0;
    return key_of(__uint_as_float(part(half)[kLogits + i]), part(half)[kIds + i]);
  };
  float most = -INFINITY, sum = 0.f;
  for (int half = 0; half < 2; ++half)
    if (lane + 32 * half < parts) most = fmaxf(most, __uint_as_float(part(half)[0]));
#pragma unroll
  for (int by = 16; by > 0; by /= 2) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, by));
  for (int half = 0; half < 2; ++half)
    if (lane + 32 * half < parts) sum += __uint_as_float(part(half)[1]) * expf(__uint_as_float(part(half)[0]) - most);
#pragma unroll
  for (int by = 16; by > 0; by /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, by);
  const float log_sum = logf(sum);
  gdn_logprobs_row &out = p.out[number];
  if (lane == 0) out.drawn = (drawn - most) - log_sum;

  uint64_t heads[2] = {key(0, 0), key(1, 0)};
  uint32_t at[2] = {0, 0};
  for (uint32_t i = 0; i < rounds; ++i) {
    const uint64_t found = greatest(heads[0] > heads[1] ? heads[0] : heads[1]);
    if (lane == 0) {
      out.ids[i] = found == 0 ? GDN_NO_TOKEN : id_of(found);
      out.logprobs[i] = (logit_of(found) - most) - log_sum;
    }
#pragma unroll
    for (int half = 0; half < 2; ++half)
      if (found != 0 && heads[half] == found) heads[half] = key(half, ++at[half]);
  }
}

int check(const gdn_logprobs_params *params) {
  if (!params) return GDN_NULL_POINTER;
  const gdn_logprobs_params &p = *params;
  if (p.rows < 0 || p.rows > 65535 || p.vocab < 1 || p.vocab > kMostVocab || p.history < 0) return GDN_BAD_LENGTH;
  if (p.logits_stride < 0) return GDN_BAD_STRIDE;
  if (p.rows == 0) return GDN_OK;
  for (const void *x : {p.logits, static_cast<const void *>(p.state), static_cast<const void *>(p.ids),
                        static_cast<const void *>(p.drawn), static_cast<const void *>(p.out),
                        static_cast<const void *>(p.parts)})
    if (!x) return GDN_NULL_POINTER;
  return p.history > 0 && (!p.recent || !p.raw) ? GDN_NULL_POINTER : GDN_OK;
}

int parts_of(int vocab) { return static_cast<int>(ceil_div(vocab, kSpan)); }

}  // namespace
}  // namespace logprobs
}  // namespace gdn

extern "C" int gdn_logprobs_begin(const gdn_logprobs_params *params, cudaStream_t stream) {
  using namespace gdn;
  using namespace gdn::logprobs;
  if (const int status = logprobs::check(params)) return status;
  if (params->rows == 0) return GDN_OK;
  const dim3 grid(static_cast<unsigned>(parts_of(params->vocab)), static_cast<unsigned>(params->rows));
  return with_dtype(params->dtype, [&](auto type) {
    return launch(begin_kernel<typename decltype(type)::type>, {grid, dim3(kThreads), 0, stream}, *params);
  });
}

extern "C" int gdn_logprobs_end(const gdn_logprobs_params *params, cudaStream_t stream) {
  using namespace gdn;
  using namespace gdn::logprobs;
  if (const int status = logprobs::check(params)) return status;
  if (params->rows == 0) return GDN_OK;
  const dim3 grid(static_cast<unsigned>(params->rows));
  return with_dtype(params->dtype, [&](auto type) {
    return launch(end_kernel<typename decltype(type)::type>, {grid, dim3(kThreads), 0, stream}, *params,
                  parts_of(params->vocab));
  });
}

extern "C" int gdn_logprobs_words(int32_t rows, int32_t vocab, int64_t *words) {
  using namespace gdn::logprobs;
  if (!words) return GDN_NULL_POINTER;
  if (rows < 0 || vocab < 1 || vocab > kMostVocab) return GDN_BAD_LENGTH;
  *words = static_cast<int64_t>(rows) * parts_of(vocab) * kPartWords;
  return GDN_OK;
}
