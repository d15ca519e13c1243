// The products of the kernel for prompts: shapes of wgmma that ../common/wgmma.cuh has not, and whole tiles.
#pragma once

#include "../common/wgmma.cuh"

namespace gdn {
namespace wgmma {

#define GDN_ACC1(d, i) "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])
#define GDN_ACC2(d, i) GDN_ACC1(d, i), GDN_ACC1(d, i + 1)
#define GDN_ACC8(d, i) GDN_ACC2(d, i), GDN_ACC2(d, i + 2), GDN_ACC2(d, i + 4), GDN_ACC2(d, i + 6)
#define GDN_ACC16(d, i) GDN_ACC8(d, i), GDN_ACC8(d, i + 8)
#define GDN_D40                                                                                                       \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, "             \
  "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39}"
#define GDN_D64                                                                                                       \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, "             \
  "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, "              \
  "%42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, "              \
  "%62, %63}"
#define GDN_D128                                                                                                      \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, "             \
  "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, "              \
  "%42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, "              \
  "%62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, "              \
  "%82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, %100, "                  \
  "%101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, "                  \
  "%117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127}"

// The same as product_of_tiles() of ../common/wgmma.cuh for acc[64, 80] and acc[64, 128].
template <typename T>
__device__ __forceinline__ void product_of_tiles(float (&d)[10][4], uint64_t a, uint64_t b, bool add) {
#define GDN_WGMMA_80(TYPE)                                                                                            \
  GDN_WGMMA("{\n.reg .pred p;\nsetp.ne.b32 p, %42, 0;\n"                                                              \
            "wgmma.mma_async.sync.aligned.m64n80k16.f32." TYPE "." TYPE " " GDN_D40 ", %40, %41, p, 1, 1, 0, 0;\n}"   \
            : GDN_ACC8(d, 0), GDN_ACC2(d, 8)                                                                          \
            : "l"(a), "l"(b), "r"(static_cast<int>(add)))
  if constexpr (std::is_same_v<T, __half>)
    GDN_WGMMA_80("f16");
  else
    GDN_WGMMA_80("bf16");
#undef GDN_WGMMA_80
}

template <typename T>
__device__ __forceinline__ void product_of_tiles(float (&d)[16][4], uint64_t a, uint64_t b, bool add) {
#define GDN_WGMMA_128(TYPE)                                                                                           \
  GDN_WGMMA("{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"                                                              \
            "wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE " " GDN_D64 ", %64, %65, p, 1, 1, 0, 0;\n}"  \
            : GDN_ACC16(d, 0)                                                                                         \
            : "l"(a), "l"(b), "r"(static_cast<int>(add)))
  if constexpr (std::is_same_v<T, __half>)
    GDN_WGMMA_128("f16");
  else
    GDN_WGMMA_128("bf16");
#undef GDN_WGMMA_128
}

// The same as product() for acc[64, 80] and acc[64, 256].
template <typename T, bool ROWS>
__device__ __forceinline__ void product(float (&d)[10][4], const uint32_t (&a)[4], uint64_t b, bool add) {
#define GDN_WGMMA_80(TYPE)                                                                                            \
  GDN_WGMMA("{\n.reg .pred p;\nsetp.ne.b32 p, %45, 0;\n"                                                              \
            "wgmma.mma_async.sync.aligned.m64n80k16.f32." TYPE "." TYPE " " GDN_D40                                    \
            ", {%40, %41, %42, %43}, %44, p, 1, 1, %46;\n}"                                                            \
            : GDN_ACC8(d, 0), GDN_ACC2(d, 8)                                                                          \
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)), "n"(ROWS ? 1 : 0))
  if constexpr (std::is_same_v<T, __half>)
    GDN_WGMMA_80("f16");
  else
    GDN_WGMMA_80("bf16");
#undef GDN_WGMMA_80
}

template <typename T, bool ROWS>
__device__ __forceinline__ void product(float (&d)[32][4], const uint32_t (&a)[4], uint64_t b, bool add) {
#define GDN_WGMMA_256(TYPE)                                                                                           \
  GDN_WGMMA("{\n.reg .pred p;\nsetp.ne.b32 p, %133, 0;\n"                                                             \
            "wgmma.mma_async.sync.aligned.m64n256k16.f32." TYPE "." TYPE " " GDN_D128                                  \
            ", {%128, %129, %130, %131}, %132, p, 1, 1, %134;\n}"                                                      \
            : GDN_ACC16(d, 0), GDN_ACC16(d, 16)                                                                       \
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)), "n"(ROWS ? 1 : 0))
  if constexpr (std::is_same_v<T, __half>)
    GDN_WGMMA_256("f16");
  else
    GDN_WGMMA_256("bf16");
#undef GDN_WGMMA_256
}

#undef GDN_ACC1
#undef GDN_ACC2
#undef GDN_ACC8
#undef GDN_ACC16
#undef GDN_D40
#undef GDN_D64
#undef GDN_D128

// Keeps the registers of a left operand from being used for something else before this point.
template <int N> __device__ __forceinline__ void hold(uint32_t (&a)[N][4]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+r"(a[i][0]), "+r"(a[i][1]), "+r"(a[i][2]), "+r"(a[i][3])::"memory");
}

}  // namespace wgmma

namespace attention {

// The 16-byte piece `piece` of row `row` in a tile of `rows` rows: 64 columns after the other, each with the 128-byte swizzle.
__device__ __forceinline__ uint32_t piece_in(uint32_t tile, int rows, int row, int piece) {
  return tile + piece / 8 * (rows * 128) + row * 128 + (piece % 8 ^ row % 8) * 16;
}

// x[64, 8 N] = q k^T of a tile of 64 queries and one of 8 N keys, committed as a group and under way when this returns.
template <typename T, int DIM, int N> __device__ __forceinline__ void ask_scores(float (&x)[N][4], uint32_t queries, uint32_t keys) {
  const uint64_t a = wgmma::tile_of_columns(queries), b = wgmma::tile_of_columns(keys);
  wgmma::hold(x);
  wgmma::fence();
#pragma unroll
  for (int i = 0; i < DIM / 16; ++i) {
    const uint64_t step = b + wgmma::bytes(i / 4 * (8 * N * 128) + i % 4 * 32);
    wgmma::product_of_tiles<T>(x, a + wgmma::bytes(i / 4 * (64 * 128) + i % 4 * 32), step, i > 0);
  }
  wgmma::commit();
}

// x[64, DIM] += the weights of 16 N keys times their values; likewise.
template <typename T, int N, int M>
__device__ __forceinline__ void ask_values(float (&x)[M][4], const uint32_t (&weight)[N][4], uint32_t values) {
  const uint64_t b = wgmma::tile_of_rows(values, 16 * N * 128);
  wgmma::hold(x);
  wgmma::fence();
#pragma unroll
  for (int i = 0; i < N; ++i) wgmma::product<T, true>(x, weight[i], b + wgmma::bytes(i * 2048), true);
  wgmma::commit();
}

}  // namespace attention
}  // namespace gdn
