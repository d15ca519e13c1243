// Runs of elements that are asked for long before they are used.
#pragma once

#include "../common/convert.cuh"

namespace gdn {
namespace step {

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

constexpr int kWidth = 4;    // of the convolution

// Four neighbouring channels a lane: their taps as raw words, in whatever type they come.
struct RawTaps {
  uint4 word[4];

  __device__ __forceinline__ void load(const void *weight, int channel, int dtype) {
    if (dtype == GDN_F32) {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        word[i] = reinterpret_cast<const uint4 *>(static_cast<const float *>(weight) + channel * kWidth)[i];
    } else {
#pragma unroll
      for (int i = 0; i < 2; ++i)
        word[i] = reinterpret_cast<const uint4 *>(static_cast<const uint16_t *>(weight) + channel * kWidth)[i];
    }
  }

  // Tap j of channel c.
  __device__ __forceinline__ float at(int c, int j, int dtype) const {
    const uint4 full = word[c], half = word[c / 2];
    const uint32_t f[4] = {full.x, full.y, full.z, full.w}, h[4] = {half.x, half.y, half.z, half.w};
    const uint32_t w = h[c % 2 * 2 + j / 2];
    return dtype == GDN_F32 ? __uint_as_float(f[j]) : raw_to_float(j % 2 ? w >> 16 : w & 0xffffu, dtype);
  }
};

}  // namespace step
}  // namespace gdn
