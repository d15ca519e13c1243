// A block's part of a row: what all steps are made of.
#pragma once

#include "../gdn_sampling.h"
#include "common/convert.cuh"
#include "weight.cuh"

#include <string.h>

namespace gdn {
namespace sampling {
constexpr int kThreads = 512, kWarps = kThreads / 32;
constexpr int kBlocksPerSm = 2;
constexpr int kUnit = 512;    // logits that a warp takes at a time
constexpr int kBins = 2048, kBinsAThread = kBins / kThreads;
constexpr int kParts = 3, kPartBits = 13;    // of a weight: sums of kMostVocab fit 32 bits
constexpr uint32_t kRepeats = 1u << 31;      // beside a count of occurrences
constexpr int64_t kMostVocab = 1 << 19;
static_assert(kMostVocab <= static_cast<int64_t>(kBins) * kUnit, "what a row's units weigh goes to bins");

// A count of tokens and what they weigh.
struct Mass {
  uint64_t weight;
  uint32_t count;
};

// Of a group, in the workspace.
struct Group {
  Mass bins[3][kBins];    // of this pass over the row, the last one, and the next one, which are zeros
  uint64_t best;          // the greatest key, and the complement of its first id; all ones where a logit is not finite
  uint32_t arrived;
  uint32_t unused;
};

struct Args {
  gdn_sampling_params p;
  int groups, blocks;     // blocks of a group
  int units;              // of a row
  bool vec;
};

__device__ __forceinline__ uint64_t shuffle_up(uint64_t x, int by) { return __shfl_up_sync(0xffffffffu, x, by); }

__device__ __forceinline__ uint64_t max_of(uint64_t a, uint64_t b) { return a > b ? a : b; }

struct Shared {
  uint32_t counts[kBins], parts[kParts][kBins];
  uint64_t weights[kWarps];
  uint32_t totals[kWarps];
  uint64_t best;
  // What one thread found for all.
  Mass above, total, found;
  uint32_t at;
  bool last;
};

// The tokens that a row's penalty concerns, that of `ids` among them.
struct Recent {
  uint32_t count, newest, last;
  const uint32_t *before;
  float *kept;

  __device__ __forceinline__ Recent(const gdn_sampling_params &p, const gdn_sampling_row &row, int number)
      : count(row.seen < row.window ? row.seen + 1 : row.window), newest(row.seen % row.window), last(p.ids[number]),
        before(p.recent + static_cast<int64_t>(number) * p.history),
        kept(p.kept + static_cast<int64_t>(number) * p.history) {}

  __device__ __forceinline__ uint32_t id(uint32_t i) const { return i == newest ? last : before[i]; }
};

// A logit that a penalty concerns is one f32 for all that follows, and what lies in the row may be narrower: there the row has a
// NaN that says where among the recent tokens the value is, as far as its bits reach.
template <typename T> struct Marks;
template <> struct Marks<float> {
  using Bits = uint32_t;
  static constexpr Bits kInfinity = 0x7f800000u, kPlaces = 0x007fffffu;
};
template <> struct Marks<__nv_bfloat16> {
  using Bits = uint16_t;
  static constexpr Bits kInfinity = 0x7f80u, kPlaces = 0x007fu;
};
template <> struct Marks<__half> {
  using Bits = uint16_t;
  static constexpr Bits kInfinity = 0x7c00u, kPlaces = 0x03ffu;
};

// One block's part of one row of logits in T.
template <typename T> struct Part {
  using M = Marks<T>;
  using Bits = typename M::Bits;
  static constexpr int kVec = 16 / sizeof(T), kLoads = kUnit / (32 * kVec);

  const Args &args;
  Shared &s;
  Group *group;
  T *logits;
  gdn_sampling_row row;
  int number, rank, passes = 0, turns = 0;
  float best = 0.f;

  __device__ Part(const Args &args, Shared &s, int number, int rank)
      : args(args), s(s), group(static_cast<Group *>(args.p.workspace) + number % args.groups),
        logits(static_cast<T *>(args.p.logits) + number * args.p.logits_stride), row(args.p.state[number]), number(number),
        rank(rank) {}

  // f(unit) of this block's part, a warp each.
  template <typename F> __device__ __forceinline__ void units(F &&f) const {
    for (int unit = rank + args.blocks * (threadIdx.x / 32); unit < args.units; unit += args.blocks * kWarps) f(unit);
  }

  // f(logit, id) of a unit.
  template <typename F> __device__ __forceinline__ void within(int unit, F &&f) const {
    const int lane = threadIdx.x % 32, from = unit * kUnit, vocab = args.p.vocab;
    const auto id_of = [&](int j, int c) { return from + (j * 32 + lane) * kVec + c; };
    const bool vec = args.vec && from + kUnit <= vocab;
    if (vec) {
      Pack<T, kVec> x[kLoads];
#pragma unroll
      for (int j = 0; j < kLoads; ++j) x[j] = *reinterpret_cast<const Pack<T, kVec> *>(logits + id_of(j, 0));
      bool marked = false;
#pragma unroll
      for (int j = 0; j < kLoads; ++j)
#pragma unroll
        for (int c = 0; c < kVec; ++c) marked |= isnan(to_float<T>(x[j].x[c]));
      if (!marked || row.window == 0) {
#pragma unroll
        for (int j = 0; j < kLoads; ++j)
#pragma unroll
          for (int c = 0; c < kVec; ++c) f(to_float<T>(x[j].x[c]), id_of(j, c));
        return;
      }
    }
    // Seldom: one by one.
#pragma unroll 1
    for (int i = 0; i < kUnit / 32; ++i) {
      const int id = vec ? id_of(i / kVec, i % kVec) : from + i * 32 + lane;
      if (id < vocab) f(value(logits[id], id), id);
    }
  }

  template <typename F> __device__ __forceinline__ void each(F &&f) const {
    units([&](int unit) { within(unit, f); });
  }

  // All blocks of the group wait for each other. They run at once: the launch is cooperative.
  __device__ void wait_for_group() {
    __syncthreads();
    ++turns;
    if (args.blocks == 1) return;
    if (threadIdx.x == 0) {
      __threadfence();
      atomicAdd(&group->arrived, 1u);
      const uint32_t all = static_cast<uint32_t>(turns) * args.blocks;
      while (*const_cast<volatile uint32_t *>(&group->arrived) < all) __nanosleep(20);
      __threadfence();
    }
    __syncthreads();
  }

  // Whether this block is the last of its group to come here: it ends the row.
  __device__ bool is_last() {
    __syncthreads();
    if (args.blocks == 1) return true;
    if (threadIdx.x == 0) {
      __threadfence();
      const uint32_t before = atomicAdd(&group->arrived, 1u);
      s.last = before + 1 == static_cast<uint32_t>(turns + 1) * args.blocks;
      __threadfence();
    }
    __syncthreads();
    return s.last;
  }

  // The logit that lies in the row as x.
  __device__ __forceinline__ float value(T x, int id) const {
    const float y = to_float<T>(x);
    return y == y || row.window == 0 ? y : marked(args.p, number, x, id);
  }
  // NOTES: not a member, whose block would have to keep itself in memory for it.
  static __device__ __noinline__ float marked(const gdn_sampling_params &p, int number, T x, int id) {
    const Recent recent(p, p.state[number], number);
    Bits bits;
    memcpy(&bits, &x, sizeof(x));
    for (uint32_t i = (bits & M::kPlaces) - 1u; i < recent.count; i += M::kPlaces)
      if (recent.id(i) == static_cast<uint32_t>(id)) return __ldcg(recent.kept + i);
    return to_float<T>(x);
  }

  // The logit x of a token that occurred so often in the completion, and among the last `repeats` tokens or not.
  __device__ __forceinline__ float penalised(float x, uint32_t occurred) const {
    const uint32_t count = occurred & ~kRepeats;
    float y = x;
    if (occurred & kRepeats) y = x > 0.f ? __fdiv_rn(x, row.penalty) : __fmul_rn(x, row.penalty);
    if (count > 0)
      y = __fsub_rn(__fsub_rn(y, __fmul_rn(row.frequency, static_cast<float>(count))), row.presence);
    return fminf(fmaxf(y, -3.40282347e38f), 3.40282347e38f);
  }

  // Tokens of the window, that of `ids` the latest, whose logits lie in this block's part: so many units at a time as there is room to
  // count in, where that has to be. Read all before any is written: a token may be there twice.
  __device__ void penalise() {
    if (row.window == 0) return;
    const Recent recent(args.p, row, number);
    float *kept = recent.kept;
    const bool counts = row.presence != 0.f || row.frequency != 0.f || row.repeats < row.window;
    const int step = counts ? kParts * kBins / kUnit : args.units;
    uint32_t *occurred = &s.parts[0][0];
    for (int first = 0; first * args.blocks + rank < args.units; first += step) {
      // f(place, id, place among those counted)
      const auto tokens = [&](auto &&f) {
        for (uint32_t i = threadIdx.x; i < recent.count; i += kThreads) {
          const uint32_t id = recent.id(i);
          const int unit = static_cast<int>(id / kUnit), at = unit / args.blocks - first;
          if (id < static_cast<uint32_t>(args.p.vocab) && unit % args.blocks == rank && at >= 0 && at < step)
            f(i, id, at * kUnit + id % kUnit);
        }
      };
      if (counts) {
        for (int i = threadIdx.x; i < kParts * kBins; i += kThreads) occurred[i] = 0;
        __syncthreads();
        tokens([&](uint32_t i, uint32_t, uint32_t at) {
          const uint32_t age = (recent.newest + row.window - i) % row.window;
          if (age < row.repeats) atomicOr(&occurred[at], kRepeats);
          if (row.seen >= row.own + age) atomicAdd(&occurred[at], 1u);
        });
        __syncthreads();
      }
      tokens([&](uint32_t i, uint32_t id, uint32_t at) {
        const float x = to_float<T>(logits[id]);
        kept[i] = isfinite(x) ? penalised(x, counts ? occurred[at] : kRepeats) : x;
      });
      __syncthreads();
      tokens([&](uint32_t i, uint32_t id, uint32_t) {
        if (!isfinite(kept[i])) return;
        // A token that is there twice may have either mark, but not bytes of both: one store.
        *reinterpret_cast<volatile Bits *>(logits + id) = M::kInfinity + static_cast<Bits>(i % M::kPlaces) + 1;
      });
      __syncthreads();
    }
  }

  // The most likely token of this block's part, to the group's.
  __device__ void find_best() {
    uint64_t found = 0;
    each([&](float x, int id) {
      const uint64_t key = static_cast<uint64_t>(key_of(x)) << 32 | ~static_cast<uint32_t>(id);
      found = max_of(found, isfinite(x) ? key : ~0ull);
    });
#pragma unroll
    for (int by = 16; by > 0; by /= 2) found = max_of(found, __shfl_xor_sync(0xffffffffu, found, by));
    if (threadIdx.x % 32 == 0) s.weights[threadIdx.x / 32] = found;
    __syncthreads();
    if (threadIdx.x == 0) {
      for (int warp = 1; warp < kWarps; ++warp) found = max_of(found, s.weights[warp]);
      atomicMax(reinterpret_cast<unsigned long long *>(&group->best), static_cast<unsigned long long>(found));
    }
  }

  __device__ uint64_t groups_best() {
    if (threadIdx.x == 0) s.best = __ldcg(reinterpret_cast<unsigned long long *>(&group->best));
    __syncthreads();
    return s.best;
  }

  // Sums before this thread's, and of all.
  __device__ void scan(Mass own, Mass &before, Mass &all) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    Mass sum = own;
#pragma unroll
    for (int by = 1; by < 32; by *= 2) {
      const uint64_t weight = shuffle_up(sum.weight, by);
      const uint32_t count = __shfl_up_sync(0xffffffffu, sum.count, by);
      if (lane >= by) {
        sum.weight += weight;
        sum.count += count;
      }
    }
    __syncthreads();
    if (lane == 31) {
      s.weights[warp] = sum.weight;
      s.totals[warp] = sum.count;
    }
    __syncthreads();
    before = {sum.weight - own.weight, sum.count - own.count};
    all = {0, 0};
    for (int i = 0; i < kWarps; ++i) {
      if (i < warp) {
        before.weight += s.weights[i];
        before.count += s.totals[i];
      }
      all.weight += s.weights[i];
      all.count += s.totals[i];
    }
  }
};

}  // namespace sampling
}  // namespace gdn
