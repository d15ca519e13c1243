// Element types: every kernel computes in f32 and reads and writes f32, bf16 or f16.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

#include <type_traits>

#include "../gdn.h"

namespace gdn {

template <typename T> __device__ __forceinline__ float to_float(T x);
template <> __device__ __forceinline__ float to_float<float>(float x) { return x; }
template <> __device__ __forceinline__ float to_float<__nv_bfloat16>(__nv_bfloat16 x) { return __bfloat162float(x); }
template <> __device__ __forceinline__ float to_float<__half>(__half x) { return __half2float(x); }

// Rounds to nearest, ties to even.
template <typename T> __device__ __forceinline__ T from_float(float x);
template <> __device__ __forceinline__ float from_float<float>(float x) { return x; }
template <> __device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float x) { return __float2bfloat16_rn(x); }
template <> __device__ __forceinline__ __half from_float<__half>(float x) { return __float2half_rn(x); }

// N consecutive elements moved by one instruction; the address must be a multiple of N * sizeof(T).
template <typename T, int N> struct alignas(sizeof(T) * N) Pack { T x[N]; };

template <typename T, int N> __device__ __forceinline__ void load_pack(const T *p, float (&x)[N]) {
  const Pack<T, N> v = *reinterpret_cast<const Pack<T, N> *>(p);
#pragma unroll
  for (int i = 0; i < N; ++i) x[i] = to_float<T>(v.x[i]);
}

template <typename T, int N> __device__ __forceinline__ void store_pack(T *p, const float (&x)[N]) {
  Pack<T, N> v;
#pragma unroll
  for (int i = 0; i < N; ++i) v.x[i] = from_float<T>(x[i]);
  *reinterpret_cast<Pack<T, N> *>(p) = v;
}

// NOTES: where several loads shall be in flight at once they come as raw words, and are converted by code that stands
// after all of them. A conversion, or even the taking apart of 16-bit halves, inside the branch that chose the load
// would make each load wait for the one before.
template <typename T> struct Raw4 { uint32_t word[sizeof(T)]; };

// Elements i .. i + 3 of a row of `size`; those past its end read as zero. `vec` says that the row is aligned for
// four-element access and that `size` is a multiple of four.
template <typename T>
__device__ __forceinline__ Raw4<T> raw_load4(const T *row, int i, int size, bool vec) {
  Raw4<T> v = {};
  if (vec) {
    if (i < size) {
      const auto words = *reinterpret_cast<const Pack<uint32_t, sizeof(T)> *>(row + i);
#pragma unroll
      for (int c = 0; c < static_cast<int>(sizeof(T)); ++c) v.word[c] = words.x[c];
    }
  } else {
#pragma unroll
    for (int c = 0; c < 4; ++c)
      if (i + c < size) {
        if constexpr (sizeof(T) == 4)
          v.word[c] = reinterpret_cast<const uint32_t *>(row)[i + c];
        else
          v.word[c / 2] |= static_cast<uint32_t>(reinterpret_cast<const uint16_t *>(row)[i + c]) << (16 * (c % 2));
      }
  }
  return v;
}

template <typename T> __device__ __forceinline__ float raw_to_float(const Raw4<T> &v, int c) {
  if constexpr (sizeof(T) == 4) {
    return __uint_as_float(v.word[c]);
  } else if constexpr (std::is_same_v<T, __half>) {
    return __half2float(__ushort_as_half(static_cast<uint16_t>(v.word[c / 2] >> (16 * (c % 2)))));
  } else {
    return __uint_as_float(c % 2 ? v.word[c / 2] & 0xffff0000u : v.word[c / 2] << 16);
  }
}

// bf16 or f16, where only run time knows which: for kernels that are not worth compiling twice. With `dtype` all types convert.
struct Any16 {
  uint16_t bits;
  Any16() = default;
  __device__ __forceinline__ explicit Any16(uint16_t b) : bits(b) {}
  __device__ __forceinline__ explicit Any16(float) : bits(0) {}    // zero, as other types are made of it
};

template <typename T> __device__ __forceinline__ float to_float(T x, int dtype) {
  if constexpr (!std::is_same_v<T, Any16>) return to_float<T>(x);
  else return dtype == GDN_F16 ? __half2float(__ushort_as_half(x.bits)) : __uint_as_float(static_cast<uint32_t>(x.bits) << 16);
}

template <typename T> __device__ __forceinline__ T from_float(float x, int dtype) {
  if constexpr (!std::is_same_v<T, Any16>) return from_float<T>(x);
  else return Any16(dtype == GDN_F16 ? __half_as_ushort(__float2half_rn(x)) : __bfloat16_as_ushort(__float2bfloat16_rn(x)));
}

template <typename T> __device__ __forceinline__ float raw_to_float(const Raw4<T> &v, int c, int dtype) {
  if constexpr (!std::is_same_v<T, Any16>) return raw_to_float(v, c);
  else return to_float(Any16(static_cast<uint16_t>(v.word[c / 2] >> (16 * (c % 2)))), dtype);
}

// The same of load and conversion in one, where nothing else is to be in flight.
template <typename T>
__device__ __forceinline__ void load4(const T *row, int i, int size, bool vec, float (&x)[4]) {
  if (vec) {
    if (i < size) {
      load_pack<T, 4>(row + i, x);
    } else {
      x[0] = x[1] = x[2] = x[3] = 0.f;
    }
  } else {
#pragma unroll
    for (int c = 0; c < 4; ++c) x[c] = i + c < size ? to_float<T>(row[i + c]) : 0.f;
  }
}

template <typename T>
__device__ __forceinline__ void store4(T *row, int i, int size, bool vec, const float (&x)[4]) {
  if (vec) {
    if (i < size) store_pack<T, 4>(row + i, x);
  } else {
#pragma unroll
    for (int c = 0; c < 4; ++c)
      if (i + c < size) row[i + c] = from_float<T>(x[c]);
  }
}

// One element whose type is known only at run time: for gates and weights, which are few.
__device__ __forceinline__ float load_any(const void *p, int64_t i, int dtype) {
  if (dtype == GDN_BF16) return to_float(static_cast<const __nv_bfloat16 *>(p)[i]);
  if (dtype == GDN_F16) return to_float(static_cast<const __half *>(p)[i]);
  return static_cast<const float *>(p)[i];
}

__device__ __forceinline__ void store_any(const void *p, int64_t i, int dtype, float x) {
  void *to = const_cast<void *>(p);
  if (dtype == GDN_BF16) static_cast<__nv_bfloat16 *>(to)[i] = from_float<__nv_bfloat16>(x);
  else if (dtype == GDN_F16) static_cast<__half *>(to)[i] = from_float<__half>(x);
  else static_cast<float *>(to)[i] = x;
}

__device__ __forceinline__ uint32_t raw_load_any(const void *p, int64_t i, int dtype) {
  return dtype == GDN_F32 ? static_cast<const uint32_t *>(p)[i] : static_cast<const uint16_t *>(p)[i];
}

__device__ __forceinline__ float raw_to_float(uint32_t raw, int dtype) {
  const float bf16 = __uint_as_float(raw << 16), f16 = __half2float(__ushort_as_half(static_cast<uint16_t>(raw)));
  return dtype == GDN_F32 ? __uint_as_float(raw) : dtype == GDN_BF16 ? bf16 : f16;
}

template <typename T> struct Type { using type = T; };

// The type of a state whose dtype is known only at run time: where states are a small part of the work, one kernel serves all.
struct AnyState {};
template <typename ST, typename F> __device__ __forceinline__ void with_state_type(int dtype, const F &fn) {
  if constexpr (!std::is_same_v<ST, AnyState>) fn(Type<ST>{});
  else if (dtype == GDN_BF16) fn(Type<__nv_bfloat16>{});
  else if (dtype == GDN_F16) fn(Type<__half>{});
  else fn(Type<float>{});
}

// The element type of a gdn_dtype on the host, as the argument of a generic lambda: fn(Type<T>).
template <typename F> int with_dtype(int dtype, F &&fn) {
  switch (dtype) {
    case GDN_F32: return fn(Type<float>{});
    case GDN_BF16: return fn(Type<__nv_bfloat16>{});
    case GDN_F16: return fn(Type<__half>{});
  }
  return GDN_BAD_DTYPE;
}

// The same for the dtype of a state.
template <typename F> int with_state_dtype(int dtype, F &&fn) {
  return dtype == GDN_F32 ? fn(Type<float>{}) : dtype == GDN_BF16 ? fn(Type<__nv_bfloat16>{}) : GDN_BAD_DTYPE;
}

// Both of them: fn(Type<T>, Type<ST>).
template <typename F> int with_dtypes(const gdn_common &p, F &&fn) {
  return with_dtype(p.io_dtype, [&](auto io) {
    return with_state_dtype(p.state_dtype, [&](auto state) { return fn(io, state); });
  });
}

}  // namespace gdn
