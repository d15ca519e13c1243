// How much heads forget, for context parallelism (context.cuh): where segments begin, and from where a transfer runs.
//
// A token multiplies a state by e^g (I - beta k k^T), which makes no row longer than by e^g max(1, |1 - beta k k|). A head forgets a state
// within a stretch of tokens whose product of these factors is at most 2^-24, a rounding of f32. Where that stretch is shorter than a
// segment, what the segment makes of zeros is the state after the segment, and the segment's last chunks, the warm-up, decide it alone.
#pragma once

#include "matrices.cuh"
#include "stretch.cuh"

namespace gdn {
namespace chunk {

// log2 of what a token leaves of a state at most.
template <typename T> __device__ __forceinline__ float left_by_token(const gdn_rule_params &p, int n, int64_t token, int head) {
  const GatesAt at = gates_at(p, n, token, head);
  const float2 factors = gate_factors(p, head);
  const float decay = decay_of(p, raw_load_any(at.a, 0, p.common.gate_dtype), factors.x, factors.y);
  const float beta = beta_of(p, raw_load_any(at.b, 0, p.common.gate_dtype));
  float square = 1.f;    // of a normalised key
  if (!p.common.l2norm) {
    const uint4 *k = reinterpret_cast<const uint4 *>(heads_at<T>(p.k, n, token, head / (p.common.num_v_heads / p.common.num_k_heads)));
    square = 0.f;
#pragma unroll 8
    for (int i = 0; i < p.common.head_k / kPiece; ++i) {
      const uint4 x = k[i];
      for (const uint32_t word : {x.x, x.y, x.z, x.w}) {
        const float2 pair = unpack2<T>(word);
        square = fmaf(pair.x, pair.x, fmaf(pair.y, pair.y, square));
      }
    }
  }
  const float size = fabsf(1.f - beta * square);
  return decay + (size <= 1.f ? 0.f : log2f(size));
}

// The chunk from which a transfer of a forgetting head runs: of no state from before this chunk anything is left at the end of the segment.
// Zero where the sequence's own state may be left: then the transfer begins with that state. By all of the block's WARPS; `shared` has room
// for a float of each warp.
template <typename T, int WARPS>
__device__ __forceinline__ int begin_of_warm_up(const gdn_rule_params &p, const Plan &plan, const Stretch &s, float *shared) {
  const int thread = static_cast<int>(threadIdx.x);
  int begin = s.end, usual = plan.warm_ups[s.slot * p.common.num_v_heads + s.head];    // chunks that are usually enough; then one at a time
  for (float left = 0.f; begin > 0 && left > kLeft;) {    // a NaN ends it
    const int chunks = min(min(max(usual, 1), WARPS * 32 / kChunk), begin);
    usual -= chunks;
    float x = thread < chunks * kChunk ? left_by_token<T>(p, s.n, s.seq.first + (begin - chunks) * kChunk + thread, s.head) : 0.f;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) x += __shfl_xor_sync(0xffffffffu, x, d);
    if (thread % 32 == 0) shared[thread / 32] = x;
    __syncthreads();
    for (int i = chunks - 1; i >= 0 && left > kLeft; --i) left += shared[2 * i] + shared[2 * i + 1], --begin;
    __syncthreads();
  }
  return begin;
}

}  // namespace chunk
}  // namespace gdn
