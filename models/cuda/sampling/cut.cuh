// Where the most likely tokens are cut off: by a search over the bits of the logits, 11 at a time.
#pragma once

#include "part.cuh"

namespace gdn {
namespace sampling {

// What is kept of a row: keys above `key`, and of those equal to it the first `ties` by id.
struct Cut {
  uint32_t key, ties;
};

template <typename T> struct Cutting : Part<T> {
  using Part<T>::Part;
  using Part<T>::args, Part<T>::s, Part<T>::group, Part<T>::row, Part<T>::rank, Part<T>::passes, Part<T>::best;

  // Counts and weighs the tokens with keys from `low` to `high` in bins of 2^shift keys, the likeliest first, over the whole group.
  __device__ const Mass *weigh(uint32_t low, uint32_t high, int shift) {
    Mass *bins = group->bins[passes % 3], *other = group->bins[(passes + 2) % 3];
    ++passes;
    for (int i = threadIdx.x; i < kBins; i += kThreads) {
      s.counts[i] = 0;
      for (int part = 0; part < kParts; ++part) s.parts[part][i] = 0;
    }
    __syncthreads();
    this->each([&](float x, int) {
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
    this->wait_for_group();
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
      this->scan(own, before, all);
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
};

}  // namespace sampling
}  // namespace gdn
