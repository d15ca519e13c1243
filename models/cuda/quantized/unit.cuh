// A unit of packed weights, from shared memory into a warp's registers.
#pragma once

#include "common/ptx.cuh"
#include "layout.cuh"

namespace gdn {
namespace quantized {

__device__ __forceinline__ uint32_t load_word(uint32_t address) {
  uint32_t v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(address) : "memory");
  return v;
}

// A unit in registers, and its place in shared memory may be filled again.
template <int TYPE> struct Unit {
  using F = Format<TYPE>;
  uint4 pieces[F::kPieces];
  uint2 record;
  uint32_t factors;

  __device__ __forceinline__ void load(uint32_t unit, int lane) {
    factors = 0;
    if constexpr (TYPE == GDN_Q8_0) record.x = load_word(unit + F::kScalesAt + lane * 4);
    else record = ptx::load_shared_8(unit + F::kScalesAt + lane * 8);
    if constexpr (TYPE == GDN_Q6_K) factors = load_word(unit + F::kFactorsAt + lane / 4 * 4);
#pragma unroll
    for (int j = 0; j < F::kPieces; ++j) pieces[j] = ptx::load_shared(unit + j * 512 + lane * 16);
  }
};

}  // namespace quantized
}  // namespace gdn
