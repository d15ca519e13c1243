// Runs of elements that are asked for long before they are used.
#pragma once

#include "../common/convert.cuh"

namespace gdn {
namespace decode {

// N elements as raw words: a conversion beside a load would make each load wait for the one before.
template <typename T, int N> struct RawRun {
  static constexpr int kWords = N * sizeof(T) / 4, kAt = kWords < 4 ? kWords : 4;
  uint32_t word[kWords];

  __device__ __forceinline__ void load(const T *p) {
#pragma unroll
    for (int w = 0; w < kWords; w += kAt) {
      const auto words = reinterpret_cast<const Pack<uint32_t, kAt> *>(p)[w / kAt];
#pragma unroll
      for (int c = 0; c < kAt; ++c) word[w + c] = words.x[c];
    }
  }

  __device__ __forceinline__ void store(T *p) const {
#pragma unroll
    for (int w = 0; w < kWords; w += kAt) {
      Pack<uint32_t, kAt> words;
#pragma unroll
      for (int c = 0; c < kAt; ++c) words.x[c] = word[w + c];
      reinterpret_cast<Pack<uint32_t, kAt> *>(p)[w / kAt] = words;
    }
  }

  __device__ __forceinline__ float at(int i) const {
    Raw4<T> four;
#pragma unroll
    for (int w = 0; w < static_cast<int>(sizeof(T)); ++w) four.word[w] = word[i / 4 * sizeof(T) + w];
    return raw_to_float(four, i % 4);
  }
};

}  // namespace decode
}  // namespace gdn
