// What a token weighs, and random numbers: in whole numbers, so that sums are the same in any order, and by operations that round the same everywhere. models/src/sampling/cpu.rs has the same.
#pragma once

#include <math.h>
#include <stdint.h>

namespace gdn {
namespace sampling {

// Logits as numbers whose order is theirs: finite ones are above 0.
__device__ __forceinline__ uint32_t key_of(float x) {
  const uint32_t bits = __float_as_uint(x);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float logit_of(uint32_t key) {
  return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}

constexpr uint64_t kHeaviest = 1ull << 38;    // of the most likely token

// 2^38 * exp((x - best) / temperature), rounded down.
__device__ __forceinline__ uint64_t weight_of(float x, float best, double scale) {
  const double z = __dmul_rn(__dsub_rn(x, best), scale);
  if (!(z < 0.)) return kHeaviest;
  if (z <= -39.) return 0;
  const double whole = floor(z);
  const float f = static_cast<float>(__dsub_rn(z, whole));
  // 2^f on [0, 1], to 1e-7
  float p = 2.1900955e-4f;
  p = __fadd_rn(__fmul_rn(p, f), 1.2407868e-3f);
  p = __fadd_rn(__fmul_rn(p, f), 9.678594e-3f);
  p = __fadd_rn(__fmul_rn(p, f), 5.548587e-2f);
  p = __fadd_rn(__fmul_rn(p, f), 2.402286e-1f);
  p = __fadd_rn(__fmul_rn(p, f), 6.9314718e-1f);
  p = __fadd_rn(__fmul_rn(p, f), 1.f);
  const uint64_t mantissa = static_cast<uint64_t>(__fmul_rn(p, 8388608.f));
  return (mantissa << 15) >> static_cast<int>(-whole);
}

// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011): 64 bits of it.
__device__ __forceinline__ uint64_t random_bits(uint64_t seed, uint64_t index) {
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  uint32_t c0 = static_cast<uint32_t>(index), c1 = static_cast<uint32_t>(index >> 32), c2 = 0, c3 = 0;
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = static_cast<uint64_t>(0xd2511f53u) * c0, b = static_cast<uint64_t>(0xcd9e8d57u) * c2;
    c0 = static_cast<uint32_t>(b >> 32) ^ c1 ^ k0;
    c1 = static_cast<uint32_t>(b);
    c2 = static_cast<uint32_t>(a >> 32) ^ c3 ^ k1;
    c3 = static_cast<uint32_t>(a);
    k0 += 0x9e3779b9u;
    k1 += 0xbb67ae85u;
  }
  return static_cast<uint64_t>(c1) << 32 | c0;
}

// The weight from the heaviest down that the share p of the total comes to; at least 1.
__device__ __forceinline__ uint64_t share_of(uint64_t total, double p) {
  const double need = ceil(__dmul_rn(p, __ull2double_rn(total)));
  const uint64_t whole = need >= 1. ? static_cast<uint64_t>(need) : 1;
  return whole < total ? whole : total;
}

}  // namespace sampling
}  // namespace gdn
