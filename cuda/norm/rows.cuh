// For kernels that stream rows, this one and ../conv: several rows in flight, and a short sigmoid.
#pragma once

#include "../common/convert.cuh"

namespace gdn {

// N elements as they come: converted when they are used. As whole words, not as halves of them: a choice between two
// loads, or between a load and none, would take each half apart.
template <typename T, int N> struct alignas(N * sizeof(T)) Row {
  using Word = std::conditional_t<N * sizeof(T) % 4 == 0, uint32_t, uint16_t>;
  Word word[N * sizeof(T) / sizeof(Word)];

  __device__ __forceinline__ float operator[](int i) const {
    if constexpr (sizeof(T) == 4) {
      return __uint_as_float(word[i]);
    } else if constexpr (std::is_same_v<T, __half>) {
      const uint32_t w = sizeof(Word) == 4 ? word[i / 2] >> (16 * (i % 2)) : word[i];
      return __half2float(__ushort_as_half(static_cast<uint16_t>(w)));
    } else {
      const uint32_t w = word[sizeof(Word) == 4 ? i / 2 : i];
      return __uint_as_float(sizeof(Word) == 4 && i % 2 ? w & 0xffff0000u : w << 16);
    }
  }
};

template <typename T, int N> __device__ __forceinline__ Row<T, N> load_row(const T *from) {
  return *reinterpret_cast<const Row<T, N> *>(from);
}

// Rounded as by store_pack, and stored by one instruction in any case: nvcc (13.0) makes four of some plain stores.
template <typename T, int N> __device__ __forceinline__ void store_row(T *to, const float (&x)[N]) {
  if constexpr (N * sizeof(T) < 4 || N * sizeof(T) > 16) {
    store_pack<T, N>(to, x);
  } else {
    uint32_t word[N * sizeof(T) / 4];
#pragma unroll
    for (int i = 0; i < static_cast<int>(N * sizeof(T) / 4); ++i) {
      if constexpr (sizeof(T) == 4) {
        word[i] = __float_as_uint(x[i]);
      } else if constexpr (std::is_same_v<T, __half>) {
        const __half2 pair = __floats2half2_rn(x[2 * i], x[2 * i + 1]);
        word[i] = *reinterpret_cast<const uint32_t *>(&pair);
      } else {
        const __nv_bfloat162 pair = __floats2bfloat162_rn(x[2 * i], x[2 * i + 1]);
        word[i] = *reinterpret_cast<const uint32_t *>(&pair);
      }
    }
    if constexpr (N * sizeof(T) == 16)
      asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(word[0]), "r"(word[1]), "r"(word[2]), "r"(word[3])
                   : "memory");
    else if constexpr (N * sizeof(T) == 8)
      asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(to), "r"(word[0]), "r"(word[1]) : "memory");
    else
      asm volatile("st.global.u32 [%0], %1;" ::"l"(to), "r"(word[0]) : "memory");
  }
}

// The next rows, of which `remaining` exist.
template <typename T, int N, int G>
__device__ __forceinline__ void load_group(Row<T, N> (&rows)[G], const T *&from, int64_t stride, int remaining) {
#pragma unroll
  for (int u = 0; u < G; ++u) {
    if (u < remaining) rows[u] = load_row<T, N>(from);
    from += stride;
  }
}

// `count` consecutive weights, up to 16 bytes at a time where the address allows.
template <typename T, int count> __device__ __forceinline__ void load_weights(const T *w, float (&x)[count]) {
  constexpr int kMost = 16 / sizeof(T), kPower = count & -count, kVec = kPower < kMost ? kPower : kMost;
  if (reinterpret_cast<uintptr_t>(w) % (kVec * sizeof(T)) == 0) {
    Row<T, kVec> rows[count / kVec];
#pragma unroll
    for (int m = 0; m < count / kVec; ++m) rows[m] = load_row<T, kVec>(w + m * kVec);
#pragma unroll
    for (int i = 0; i < count; ++i) x[i] = rows[i / kVec][i % kVec];
  } else {
#pragma unroll
    for (int i = 0; i < count; ++i) x[i] = to_float(w[i]);
  }
}

// 1 / (1 + 2^(-x log2(e))): fast_sigmoid of math.cuh in five instructions for eight. To flush denormals changes no bit:
// next to 1 they are nothing, and a reciprocal below the smallest normal number is 0 there too.
__device__ __forceinline__ float row_sigmoid(float x) {
  float e, r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(x * -1.4426950408889634f));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(1.f + e));
  return r;
}

}  // namespace gdn
