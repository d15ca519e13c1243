// Where segments begin, decided on the device: by one small kernel before the passes.
#include "borders.cuh"

#include "../common/launch.cuh"

namespace gdn {
namespace chunk {
namespace {

// What the choice of the borders knows of the call.
struct BordersOf {
  PassCosts costs;
  int32_t places;                   // blocks that run at once
  int32_t tiles, identity_tiles;    // blocks of a head in the first pass: value rows, rows of the identity
};

constexpr int kBorderThreads = 1024;
constexpr int kSamples = 2;          // tokens a lane: loading more takes longer than a better estimate gains
constexpr int kCandidates = 2 * 32, kSharers = kBorderThreads / kCandidates;
constexpr int32_t kNever = 1 << 24;

// Chunks after which a head has forgotten a state, about: from some of its decays, without regard to its keys.
__device__ __forceinline__ int usual_warm_up(const gdn_rule_params &p, int n, int head, int lane) {
  const Tokens seq = tokens_of(p.common.seqs, n);
  if (seq.count == 0) return kNever;
  const float2 factors = gate_factors(p, head);
  const GatesAt at = gates_at(p, n, seq.first, head);
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < kSamples; ++i) {
    const int64_t token = static_cast<int64_t>(i * 32 + lane) * seq.count / (32 * kSamples);
    sum += decay_of(p, raw_load_any(at.a + token * at.a_step, 0, p.common.gate_dtype), factors.x, factors.y);
  }
#pragma unroll
  for (int d = 1; d < 32; d *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, d);
  const float chunks = 1.125f * kLeft * (32 * kSamples) / kChunk / sum;    // the sum of so few samples is often off by an eighth
  return chunks >= 0.f && chunks < kNever - 1 ? 1 + static_cast<int>(chunks) : kNever;
}

// Chooses, by one block, the borders that take the least time in a model of the passes like that of segments.cu, and which heads forget
// within a segment. A longer first segment makes the others shorter, and those of a head that does not forget are walked twice.
__global__ void __launch_bounds__(kBorderThreads)
borders_kernel(const __grid_constant__ gdn_rule_params p, const __grid_constant__ Plan plan, const __grid_constant__ BordersOf of) {
  __shared__ float times[kCandidates];
  __shared__ int others, other_chunks, longest_other;    // sequences that are not cut
  ptx::grid_dependency_launch();
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const int heads = p.common.num_v_heads, items = plan.slots * heads;
  int32_t *const sequence_chunks = plan.warm_ups + items;
  const auto chunks_of = [&](int n) { return (tokens_of(p.common.seqs, n).count + kChunk - 1) / kChunk; };
  if (thread == 0) others = other_chunks = longest_other = 0;
  __syncthreads();
  for (int item = warp; item < items; item += kBorderThreads / 32) {
    const int found = plan.mixed ? sequence_of_slot(p.common.seqs, plan, item / heads) : item / heads;
    const int warm_up = found < 0 ? 0 : usual_warm_up(p, found, item % heads, lane);
    if (lane == 0) plan.warm_ups[item] = warm_up, sequence_chunks[item] = found < 0 ? 0 : chunks_of(found);
  }
  if (plan.mixed)
    for (int n = thread; n < p.common.seqs.num_seqs; n += kBorderThreads)
      if (tokens_of(p.common.seqs, n).count <= plan.long_tokens)
        atomicAdd(&others, 1), atomicAdd(&other_chunks, chunks_of(n)), atomicMax(&longest_other, chunks_of(n));
  __syncthreads();

  // Time with each candidate for the first segment's chunks, closer together where they are few; several threads share the heads.
  const int candidate = thread / kSharers, sharer = thread % kSharers, later = plan.segments - 1;
  const auto first_of = [&](int i) {
    const float x = static_cast<float>(i) / (kCandidates - 1), most = 2.f * static_cast<float>(plan.longest) / static_cast<float>(plan.segments);
    return min(1 + static_cast<int>(most * x * x), max(plan.longest - 1, 1));
  };
  const auto later_of = [&](int first) { return max((plan.longest - first + later - 1) / later, 1); };
  const int first = first_of(candidate), chunks = later_of(first);
  const float whole = static_cast<float>(first) * of.costs.first_chunk + of.costs.first_begin;
  const float exact = static_cast<float>(chunks) * of.costs.transfer_chunk + of.costs.transfer_begin;
  float firsts = 0.f, work = 0.f, blocks = 0.f, longest = 0.f;
  for (int item = sharer; item < items; item += kSharers) {
    const int warm_up = plan.warm_ups[item];
    const bool forgetting = warm_up <= chunks;
    const float time = forgetting ? static_cast<float>(warm_up) * of.costs.transfer_chunk + of.costs.transfer_begin : exact;
    const int transfers = (sequence_chunks[item] - first + chunks - 1) / chunks - 1;    // of all segments but the first and the last
    if (sequence_chunks[item] > 0) firsts += static_cast<float>(of.tiles);
    if (transfers <= 0) continue;
    const float each = static_cast<float>(transfers * (of.tiles + (forgetting ? 0 : of.identity_tiles)));
    work += each * time, blocks += each, longest = fmaxf(longest, time);
  }
#pragma unroll
  for (int d = 1; d < kSharers; d *= 2) {
    work += __shfl_xor_sync(0xffffffffu, work, d), blocks += __shfl_xor_sync(0xffffffffu, blocks, d);
    firsts += __shfl_xor_sync(0xffffffffu, firsts, d), longest = fmaxf(longest, __shfl_xor_sync(0xffffffffu, longest, d));
  }
  if (sharer == 0) {
    // The pass ends with a first segment, with the longest transfer, or with the last round of transfers on the places that first segments
    // leave. Sequences that are not cut fill the gaps: then not before the work of all is done.
    const float places = static_cast<float>(of.places);
    const float rounds = ceilf(blocks / fmaxf(places - firsts, 1.f)) * (blocks > 0.f ? work / blocks : 0.f);
    const float other = static_cast<float>(longest_other) * of.costs.first_chunk + of.costs.first_begin;
    const float other_work = static_cast<float>(of.tiles * heads) *
                             (static_cast<float>(other_chunks) * of.costs.first_chunk + static_cast<float>(others) * of.costs.first_begin);
    const float all = others > 0 ? fmaxf(other, (firsts * whole + work + other_work) / places + 0.5f * other) : 0.f;
    times[candidate] = fmaxf(fmaxf(whole, longest), fmaxf(rounds, all)) + static_cast<float>(chunks) * of.costs.chunk;
  }
  __syncthreads();
  // The first candidate with the least time: positive numbers have the order of their bits.
  const float near = times[lane], far = times[lane + 32];
  const unsigned least = __reduce_min_sync(0xffffffffu, __float_as_uint(fminf(near, far)));
  const unsigned nears = __ballot_sync(0xffffffffu, __float_as_uint(near) == least), fars = __ballot_sync(0xffffffffu, __float_as_uint(far) == least);
  const int best = first_of(nears ? __ffs(nears) - 1 : 31 + __ffs(fars)), limit = later_of(best);
  if (thread == 0) *plan.borders = {best, limit};
  for (int item = thread; item < items; item += kBorderThreads)
    if (plan.warm_ups[item] > limit) plan.warm_ups[item] = 0;
}

}  // namespace

int launch_borders(const gdn_rule_params &p, const Schedule &s, const Plan &plan, int places, cudaStream_t stream) {
  BordersOf of = {s.costs, places, static_cast<int32_t>(ceil_div(p.common.head_v, s.first_rows)),
                  static_cast<int32_t>(ceil_div(p.common.head_k, s.first_rows))};
  LaunchConfig c;
  c.stream = stream;
  c.grid = dim3(1);
  c.block = dim3(kBorderThreads);
  return launch(borders_kernel, c, p, plan, of);
}

}  // namespace chunk
}  // namespace gdn
