// gdn_speculate_begin, gdn_speculate_end: a block a sequence.
#include "common/host.cuh"
#include "common/launch.cuh"
#include "../gdn_speculate.h"

namespace gdn {
namespace speculate {
namespace {

constexpr int kThreads = 128;
constexpr int kMostTokens = 16;

__global__ void __launch_bounds__(kThreads) begin_kernel(const __grid_constant__ gdn_speculate_params p) {
  const int first = blockIdx.x * p.tokens, from = first + static_cast<int>(p.accepted[blockIdx.x]) - 1;
  const gdn_sampling_row row = p.rows[from];
  const bool penalised = row.scale >= 0. && row.window > 0;
  if (penalised) {
    const uint32_t known = row.seen < row.window ? row.seen : row.window;
    const uint32_t *source = p.recent + static_cast<int64_t>(from) * p.history;
    for (int i = 0; i < p.tokens; ++i) {
      if (first + i == from) continue;
      uint32_t *to = p.recent + static_cast<int64_t>(first + i) * p.history;
      for (uint32_t j = threadIdx.x; j < known; j += kThreads) to[j] = source[j];
    }
  }
  // All have read the row and its recent tokens before any of them is written.
  __syncthreads();
  const int i = threadIdx.x;
  if (i >= p.tokens) return;
  const uint32_t *ids = p.ids + first;
  gdn_sampling_row own = row;
  if (row.scale > 0.) own.index += i;
  if (penalised) {
    own.seen += i;
    uint32_t *to = p.recent + static_cast<int64_t>(first + i) * p.history;
    for (int j = 0; j < i; ++j) to[(row.seen + j) % row.window] = ids[j];
  }
  p.rows[first + i] = own;
  p.chosen[first + i] = ids[i];
}

// In [0, 1), the same for the same token of the same row.
__device__ __forceinline__ float chance(uint32_t sequence, uint32_t position) {
  uint32_t x = position * 0x9e3779b1u ^ (sequence + 1) * 0x85ebca77u;
  x = (x ^ x >> 16) * 0x7feb352du;
  x = (x ^ x >> 15) * 0x846ca68bu;
  return static_cast<float>((x ^ x >> 16) >> 8) * 0x1p-24f;
}

__global__ void __launch_bounds__(kThreads) end_kernel(const __grid_constant__ gdn_speculate_params p) {
  const int n = blockIdx.x * kThreads + threadIdx.x;
  if (n >= p.seqs) return;
  const int first = n * p.tokens;
  if (p.rows[first].scale < 0.) return;
  uint32_t *ids = p.ids + first, *drawn = p.drawn + first, *chosen = p.chosen + first;
  uint32_t accepted = 1;
  for (; accepted < static_cast<uint32_t>(p.tokens); ++accepted) {
    if (p.forced_acceptance >= 0.f) {
      if (!(chance(n, p.positions[n] + accepted) < p.forced_acceptance)) break;
      drawn[accepted - 1] = chosen[accepted - 1] = ids[accepted];
    } else if (drawn[accepted - 1] != ids[accepted]) {
      break;
    }
  }
  uint32_t *out = p.out + static_cast<int64_t>(n) * (1 + p.tokens);
  out[0] = accepted;
  for (int i = 0; i < p.tokens; ++i) out[1 + i] = drawn[i];
  const uint32_t head = p.head_len[n] + p.accepted[n];
  p.head_len[n] = head;
  p.head_end[n] = head + accepted;
  p.positions[n] += accepted;
  p.accepted[n] = accepted;
  p.last[n] = first + accepted - 1;
  ids[0] = chosen[accepted - 1];
}

int check(const gdn_speculate_params *params) {
  if (!params) return GDN_NULL_POINTER;
  const gdn_speculate_params &p = *params;
  if (p.seqs < 0 || p.tokens < 1 || p.tokens > kMostTokens || p.history < 0) return GDN_BAD_LENGTH;
  for (const void *x : {static_cast<const void *>(p.ids), static_cast<const void *>(p.rows),
                        static_cast<const void *>(p.chosen), static_cast<const void *>(p.drawn),
                        static_cast<const void *>(p.accepted), static_cast<const void *>(p.last),
                        static_cast<const void *>(p.positions), static_cast<const void *>(p.head_len),
                        static_cast<const void *>(p.head_end), static_cast<const void *>(p.out)})
    if (!x) return GDN_NULL_POINTER;
  return p.history > 0 && !p.recent ? GDN_NULL_POINTER : GDN_OK;
}

}  // namespace
}  // namespace speculate
}  // namespace gdn

extern "C" int gdn_speculate_begin(const gdn_speculate_params *params, cudaStream_t stream) {
  using namespace gdn;
  using namespace gdn::speculate;
  if (const int status = speculate::check(params)) return status;
  if (params->seqs == 0) return GDN_OK;
  return launch(begin_kernel, {dim3(static_cast<unsigned>(params->seqs)), dim3(kThreads), 0, stream}, *params);
}

extern "C" int gdn_speculate_end(const gdn_speculate_params *params, cudaStream_t stream) {
  using namespace gdn;
  using namespace gdn::speculate;
  if (const int status = speculate::check(params)) return status;
  if (params->seqs == 0) return GDN_OK;
  const dim3 grid(static_cast<unsigned>(ceil_div(params->seqs, kThreads)));
  return launch(end_kernel, {grid, dim3(kThreads), 0, stream}, *params);
}
