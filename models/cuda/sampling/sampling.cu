// gdn_sampling: each row's next token, by a group of blocks a row. See README.md.
#include "common/host.cuh"
#include "common/launch.cuh"
#include "../gdn_sampling.h"
#include "weight.cuh"

namespace gdn {
namespace sampling {
namespace {

constexpr int kThreads = 512, kWarps = kThreads / 32;
constexpr int kBlocksPerSm = 2;
constexpr int kUnit = 512;    // logits that a warp takes at a time
constexpr int kBins = 2048, kBinsAThread = kBins / kThreads;
constexpr int kParts = 3, kPartBits = 13;    // of a weight: sums of kMostVocab fit 32 bits
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

// What is kept of a row: keys above `key`, and of those equal to it the first `ties` by id.
struct Cut {
  uint32_t key, ties;
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

// One block's part of one row.
struct Row {
  const Args &args;
  Shared &s;
  Group *group;
  float *logits;
  gdn_sampling_row row;
  int rank, passes = 0, turns = 0;
  float best = 0.f;

  __device__ Row(const Args &args, Shared &s, int number, int rank)
      : args(args), s(s), group(static_cast<Group *>(args.p.workspace) + number % args.groups),
        logits(args.p.logits + number * args.p.logits_stride), row(args.p.state[number]), rank(rank) {}

  // f(unit) of this block's part, a warp each.
  template <typename F> __device__ __forceinline__ void units(F &&f) const {
    for (int unit = rank + args.blocks * (threadIdx.x / 32); unit < args.units; unit += args.blocks * kWarps) f(unit);
  }

  // f(logit, id) of a unit.
  template <typename F> __device__ __forceinline__ void within(int unit, F &&f) const {
    const int lane = threadIdx.x % 32, from = unit * kUnit, vocab = args.p.vocab;
    if (args.vec && from + kUnit <= vocab) {
      float4 x[kUnit / 128];
#pragma unroll
      for (int j = 0; j < kUnit / 128; ++j)
        x[j] = *reinterpret_cast<const float4 *>(logits + from + j * 128 + lane * 4);
#pragma unroll
      for (int j = 0; j < kUnit / 128; ++j) {
        const int id = from + j * 128 + lane * 4;
        f(x[j].x, id);
        f(x[j].y, id + 1);
        f(x[j].z, id + 2);
        f(x[j].w, id + 3);
      }
    } else {
      for (int id = from + lane; id < from + kUnit && id < vocab; id += 32) f(logits[id], id);
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

  // Tokens of the window, that of `ids` the latest, whose logits lie in this block's part. Read all before any is written: a token may
  // be there twice.
  __device__ void penalise(int number) {
    if (row.window == 0) return;
    uint32_t *recent = args.p.recent + static_cast<int64_t>(number) * args.p.history;
    float *kept = args.p.kept + static_cast<int64_t>(number) * args.p.history;
    const uint32_t newest = row.seen % row.window, last = args.p.ids[number];
    const uint32_t count = row.seen < row.window ? row.seen + 1 : row.window;
    const auto here = [&](uint32_t i, uint32_t &id) {
      id = i == newest ? last : recent[i];
      return id < static_cast<uint32_t>(args.p.vocab) && static_cast<int>(id / kUnit) % args.blocks == rank;
    };
    for (uint32_t i = threadIdx.x; i < count; i += kThreads) {
      uint32_t id;
      if (here(i, id)) kept[i] = logits[id];
    }
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < count; i += kThreads) {
      uint32_t id;
      if (!here(i, id)) continue;
      const float x = kept[i];
      if (!isfinite(x)) continue;
      const float y = x > 0.f ? __fdiv_rn(x, row.penalty) : __fmul_rn(x, row.penalty);
      logits[id] = fminf(fmaxf(y, -3.40282347e38f), 3.40282347e38f);
    }
    __syncthreads();
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

  // Counts and weighs the tokens with keys from `low` to `high` in bins of 2^shift keys, the likeliest first, over the whole group.
  __device__ const Mass *weigh(uint32_t low, uint32_t high, int shift) {
    Mass *bins = group->bins[passes % 3], *other = group->bins[(passes + 2) % 3];
    ++passes;
    for (int i = threadIdx.x; i < kBins; i += kThreads) {
      s.counts[i] = 0;
      for (int part = 0; part < kParts; ++part) s.parts[part][i] = 0;
    }
    __syncthreads();
    each([&](float x, int) {
      const uint32_t key = key_of(x);
      if (key < low || key > high) return;
      const uint64_t weight = weight_of(x, best, row.scale);
      if (weight == 0) return;    // never drawn
      const uint32_t bin = (high - key) >> shift;
      atomicAdd(&s.counts[bin], 1u);
#pragma unroll
      for (int part = 0; part < kParts; ++part)
        atomicAdd(&s.parts[part][bin], static_cast<uint32_t>(weight >> (part * kPartBits)) & ((1u << kPartBits) - 1));
    });
    __syncthreads();
    for (int i = threadIdx.x; i < kBins; i += kThreads) {
      if (s.counts[i] == 0) continue;
      uint64_t weight = 0;
      for (int part = 0; part < kParts; ++part) weight += static_cast<uint64_t>(s.parts[part][i]) << (part * kPartBits);
      atomicAdd(&bins[i].count, s.counts[i]);
      atomicAdd(reinterpret_cast<unsigned long long *>(&bins[i].weight), static_cast<unsigned long long>(weight));
    }
    wait_for_group();
    // Nobody reads the bins of the pass before any more.
    for (int i = threadIdx.x + kThreads * rank; i < kBins; i += kThreads * args.blocks) other[i] = {0, 0};
    return bins;
  }

  // Where the most likely tokens are cut off that come to `top_k` in count (BY_COUNT), or to the share top_p of `total` in weight; `total` is
  // left as what is kept weighs. Tokens beyond the cut do not count.
  template <bool BY_COUNT> __device__ void cut_off(Cut &cut, uint64_t &total) {
    uint32_t low = cut.key, high = key_of(best);
    Mass above = {0, 0};
    uint64_t need = 0;
    for (bool first = true;; first = false) {
      const uint32_t span = high - low;
      const int bits = 32 - __clz(static_cast<int>(span));
      const int shift = bits > 11 ? bits - 11 : 0;
      const Mass *bins = weigh(low, high, shift);
      Mass mine[kBinsAThread], own = {0, 0}, before, all;
#pragma unroll
      for (int i = 0; i < kBinsAThread; ++i) {
        const Mass *bin = bins + threadIdx.x * kBinsAThread + i;
        mine[i] = {__ldcg(reinterpret_cast<const unsigned long long *>(&bin->weight)), __ldcg(&bin->count)};
        own.weight += mine[i].weight;
        own.count += mine[i].count;
      }
      scan(own, before, all);
      if (first) {
        if (BY_COUNT && all.count <= row.top_k) {
          total = all.weight;
          return;
        }
        // Without a cut before this one nobody has added them up.
        if (total == 0) total = all.weight;
        need = BY_COUNT ? row.top_k : share_of(total, row.top_p);
      }
      before.weight += above.weight;
      before.count += above.count;
#pragma unroll
      for (int i = 0; i < kBinsAThread; ++i) {
        const Mass until = {before.weight + mine[i].weight, before.count + mine[i].count};
        const bool starts = BY_COUNT ? before.count < need : before.weight < need;
        const bool ends = BY_COUNT ? until.count >= need : until.weight >= need;
        if (starts && ends) {
          s.above = before;
          s.found = mine[i];
          s.at = threadIdx.x * kBinsAThread + i;
        }
        before = until;
      }
      __syncthreads();
      above = s.above;
      const Mass found = s.found;
      high -= s.at << shift;
      const uint32_t lowest = shift > 0 ? high - ((1u << shift) - 1) : high;
      // A bin at the end may reach past the lowest key.
      low = lowest <= high && lowest > low ? lowest : low;
      __syncthreads();
      if (found.count == 1 || (BY_COUNT && above.count + found.count == need)) {
        // All of the bin: keys above the one below it. No finite one has key 0.
        cut = low == cut.key ? cut : Cut{low - 1, 0};
        total = above.weight + found.weight;
        return;
      }
      if (low == high) {
        const uint64_t weight = weight_of(logit_of(low), best, row.scale);
        const uint64_t ties = BY_COUNT ? need - above.count : (need - above.weight + weight - 1) / weight;
        cut = {low, static_cast<uint32_t>(ties)};
        total = above.weight + ties * weight;
        return;
      }
    }
  }

  // What is kept of each unit is added up by all blocks; the last of them draws from that, and ends the row.
  __device__ void draw(int number, Cut cut) {
    Mass *masses = group->bins[passes % 3];
    units([&](int unit) {
      Mass kept = {0, 0};
      within(unit, [&](float x, int) {
        const uint32_t key = key_of(x);
        if (key > cut.key) kept.weight += weight_of(x, best, row.scale);
        kept.count += key == cut.key;
      });
#pragma unroll
      for (int by = 16; by > 0; by /= 2) {
        kept.weight += __shfl_xor_sync(0xffffffffu, kept.weight, by);
        kept.count += __shfl_xor_sync(0xffffffffu, kept.count, by);
      }
      if (threadIdx.x % 32 == 0) masses[unit] = kept;
    });
    if (!is_last()) return;

    const uint64_t tie = cut.ties > 0 ? weight_of(logit_of(cut.key), best, row.scale) : 0;
    const int share = (args.units + kThreads - 1) / kThreads, from = threadIdx.x * share;
    const int to = min(from + share, args.units);
    const auto load = [&](int unit) -> Mass {
      return {__ldcg(reinterpret_cast<const unsigned long long *>(&masses[unit].weight)), __ldcg(&masses[unit].count)};
    };
    // With its ties, as far as they are kept behind those before it.
    const auto whole = [&](const Mass &unit, uint32_t ties) {
      const uint32_t left = cut.ties > ties ? cut.ties - ties : 0;
      return unit.weight + tie * (unit.count < left ? unit.count : left);
    };
    Mass own = {0, 0}, before, all;
    for (int unit = from; unit < to; ++unit) own.count += load(unit).count;
    scan(own, before, all);
    const uint32_t ties_before = before.count;
    uint32_t ties = ties_before;
    for (int unit = from; unit < to; ++unit) {
      const Mass mass = load(unit);
      own.weight += whole(mass, ties);
      ties += mass.count;
    }
    scan(own, before, all);
    const uint64_t target = __umul64hi(random_bits(row.seed, row.index), all.weight);
    if (target >= before.weight && target < before.weight + own.weight) {
      uint64_t left = target - before.weight;
      ties = ties_before;
      int unit = from;
      for (;; ++unit) {
        const Mass mass = load(unit);
        const uint64_t weight = whole(mass, ties);
        if (left < weight) break;
        left -= weight;
        ties += mass.count;
      }
      s.at = unit;
      s.found = {left, ties};
    }
    __syncthreads();
    if (threadIdx.x < 32) {
      const int lane = threadIdx.x, first = s.at * kUnit;
      Mass left = s.found;
      uint32_t token = GDN_NO_TOKEN;
      for (int at = first; at < first + kUnit && token == GDN_NO_TOKEN; at += 32) {
        const int id = at + lane;
        const float x = id < args.p.vocab ? logits[id] : -INFINITY;
        const uint32_t key = key_of(x);
        const uint32_t equal = __ballot_sync(0xffffffffu, key == cut.key);
        uint64_t weight = key > cut.key ? weight_of(x, best, row.scale) : 0;
        if (key == cut.key && left.count + __popc(equal & ((1u << lane) - 1)) < cut.ties) weight = tie;
#pragma unroll
        for (int by = 1; by < 32; by *= 2) {
          const uint64_t other = shuffle_up(weight, by);
          if (lane >= by) weight += other;
        }
        const uint32_t reached = __ballot_sync(0xffffffffu, left.weight < weight);
        if (reached) token = at + __ffs(static_cast<int>(reached)) - 1;
        left.weight -= __shfl_sync(0xffffffffu, weight, 31);
        left.count += __popc(equal);
      }
      if (lane == 0) s.at = token;
    }
    __syncthreads();
    finish(number, s.at);
  }

  // By the last block. The group is as it was for the next launch, and the row is at its next token.
  __device__ void finish(int number, uint32_t token) {
    if (row.scale > 0.)
      for (int i = threadIdx.x; i < kBins; i += kThreads) group->bins[(passes + 2) % 3][i] = group->bins[passes % 3][i] = {0, 0};
    if (threadIdx.x == 0) {
      group->best = 0;
      group->arrived = 0;
      gdn_sampling_row &next = args.p.state[number];
      if (row.window > 0) {
        args.p.recent[static_cast<int64_t>(number) * args.p.history + row.seen % row.window] = args.p.ids[number];
        next.seen = row.seen + 1;
      }
      // A greedy row is the same for every token, so that the host need not follow it.
      if (row.scale > 0.) next.index = row.index + 1;
      args.p.drawn[number] = token;
      args.p.ids[number] = token == GDN_NO_TOKEN ? 0 : token;
    }
  }

  __device__ void run(int number) {
    if (row.scale < 0.) return;
    penalise(number);
    find_best();
    if (row.scale == 0.) {
      if (!is_last()) return;
      const uint64_t found = groups_best();
      return finish(number, found == ~0ull ? GDN_NO_TOKEN : ~static_cast<uint32_t>(found));
    }
    wait_for_group();
    const uint64_t found = groups_best();
    if (found == ~0ull) {
      if (is_last()) finish(number, GDN_NO_TOKEN);
      return;
    }
    best = logit_of(static_cast<uint32_t>(found >> 32));
    Cut cut = {0, 0};
    uint64_t total = 0;
    if (row.top_k > 0 && row.top_k < static_cast<uint32_t>(args.p.vocab)) cut_off<true>(cut, total);
    if (row.top_p < 1.) cut_off<false>(cut, total);
    draw(number, cut);
  }
};

__global__ void __launch_bounds__(kThreads, kBlocksPerSm) sampling_kernel(const __grid_constant__ Args args) {
  __shared__ Shared s;
  // More than one row a group only where a group is one block.
  for (int number = blockIdx.x / args.blocks; number < args.p.rows; number += args.groups) {
    Row row(args, s, number, blockIdx.x % args.blocks);
    row.run(number);
    __threadfence();
    __syncthreads();
  }
}

// Blocks that run at once.
int most_blocks(int *value) {
  static PerDevice known;
  return known.get(value, [](int device, int *v) {
    int sms = 0, per_sm = 0;
    if (const cudaError_t e = cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device)) return e;
    const cudaError_t e = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_sm, sampling_kernel, kThreads, 0);
    *v = sms * (per_sm < kBlocksPerSm ? per_sm : kBlocksPerSm);
    return e == cudaSuccess && *v == 0 ? cudaErrorLaunchOutOfResources : e;
  });
}

int run(const gdn_sampling_params *params, cudaStream_t stream) {
  if (!params) return GDN_NULL_POINTER;
  const gdn_sampling_params &p = *params;
  if (p.rows < 0 || p.vocab < 1 || p.vocab > kMostVocab || p.history < 0) return GDN_BAD_LENGTH;
  if (p.logits_stride < 0) return GDN_BAD_STRIDE;
  if (p.rows == 0) return GDN_OK;
  if (!p.logits || !p.ids || !p.drawn || !p.state || (p.history > 0 && (!p.recent || !p.kept))) return GDN_NULL_POINTER;
  int64_t bytes = 0;
  if (const int status = gdn_sampling_workspace(p.rows, &bytes)) return status;
  if (!p.workspace || !aligned(p.workspace, 16) || p.workspace_bytes < bytes) return GDN_BAD_WORKSPACE;
  int most = 0;
  if (const int status = most_blocks(&most)) return status;
  Args args;
  args.p = p;
  args.units = static_cast<int>(ceil_div(p.vocab, kUnit));
  args.groups = p.rows < most ? p.rows : most;
  args.blocks = most / args.groups < args.units ? most / args.groups : args.units;
  args.vec = aligned(p.logits, 16) && p.logits_stride % 4 == 0;

  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(args.groups * args.blocks));
  config.blockDim = dim3(kThreads);
  config.stream = stream;
  // The blocks of a group wait for each other.
  cudaLaunchAttribute together = {};
  together.id = cudaLaunchAttributeCooperative;
  together.val.cooperative = 1;
  config.attrs = &together;
  config.numAttrs = 1;
  const cudaError_t e = cudaLaunchKernelEx(&config, sampling_kernel, args);
  if (e != cudaSuccess) cudaGetLastError();    // reported here, and not again by the next launch
  return cuda_status(e);
}

}  // namespace
}  // namespace sampling
}  // namespace gdn

extern "C" int gdn_sampling(const gdn_sampling_params *params, cudaStream_t stream) {
  return gdn::sampling::run(params, stream);
}

extern "C" int gdn_sampling_workspace(int32_t rows, int64_t *bytes) {
  using namespace gdn::sampling;
  if (!bytes) return GDN_NULL_POINTER;
  if (rows < 0) return GDN_BAD_LENGTH;
  int most = 0;
  if (const int status = most_blocks(&most)) return status;
  const int64_t groups = rows < most ? rows : most;
  *bytes = groups * static_cast<int64_t>(sizeof(Group));
  return GDN_OK;
}
