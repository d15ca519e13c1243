// wgmma: products of a warpgroup's registers with a tile in shared memory. Only in code for sm_90a; elsewhere empty.
//
// All tiles have the 128-byte swizzle: rows of 64 16-bit elements, 128 bytes apart, the 16-byte piece p of row r at p ^ r % 8,
// eight rows of 1024 bytes beginning at a multiple of 1024.
#pragma once

#include "ptx.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define GDN_WGMMA(...) asm volatile(__VA_ARGS__)
#else
#define GDN_WGMMA(...) ((void)0)
#endif

namespace gdn {
namespace wgmma {

// Registers of accumulators and of operands written before are seen by the products after it.
__device__ __forceinline__ void fence() { GDN_WGMMA("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void commit() { GDN_WGMMA("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Until at most N of the committed groups are under way.
template <int N> __device__ __forceinline__ void wait() {
  GDN_WGMMA("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

// Keeps the compiler from moving or copying an accumulator across this point.
template <int N> __device__ __forceinline__ void hold(float (&acc)[N][4]) {
#pragma unroll
  for (int i = 0; i < N; ++i)
    asm volatile("" : "+f"(acc[i][0]), "+f"(acc[i][1]), "+f"(acc[i][2]), "+f"(acc[i][3])::"memory");
}

// A tile whose rows are B's columns n, 64 of k a row ("K-major"): eight rows every 1024 bytes.
__device__ __forceinline__ uint64_t tile_of_columns(uint32_t address) {
  return (uint64_t{1} << 62) | (uint64_t{1024 >> 4} << 32) | (uint64_t{1} << 16) | ((address & 0x3ffff) >> 4);
}

// A tile whose rows are B's rows k, 64 of n a row ("MN-major"); the next 64 of n lie `next` bytes further.
__device__ __forceinline__ uint64_t tile_of_rows(uint32_t address, uint32_t next) {
  return (uint64_t{1} << 62) | (uint64_t{1024 >> 4} << 32) | (uint64_t{next >> 4} << 16) | ((address & 0x3ffff) >> 4);
}

// Added to either, what lies so many bytes further; within the tile as it would without the swizzle.
__device__ __forceinline__ constexpr uint64_t bytes(uint32_t distance) { return distance >> 4; }

// Keeps the registers of a left operand from being used for something else before this point.
template <int N> __device__ __forceinline__ void hold(uint32_t (&a)[N][4]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+r"(a[i][0]), "+r"(a[i][1]), "+r"(a[i][2]), "+r"(a[i][3])::"memory");
}

// acc[64, N] (+)= a[64, 16] b[16, N] in two forms. product(): a in registers; ROWS: b is a tile_of_rows. product_of_tiles(): both are
// tiles of columns, the rows of a those of its tile; ROWS_A, ROWS: a tile_of_rows, of a of its transpose. A warp's part of acc is that
// of N / 8 mma16816 side by side, and of a that of one.
//
// A shape is N, N / 8, its accumulators as PTX has them and as C++ has them (last), and the numbers of the operands after those.
#define GDN_PRODUCT(N, D, P0, P1, P2, P3, P4, P5, P6, TYPE, ...)                                                                    \
  GDN_WGMMA("{\n.reg .pred p;\nsetp.ne.b32 p, %" P5 ", 0;\n"                                                                       \
            "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" D "}, {%" P0 ", %" P1 ", %" P2 ", %" P3 "}, %" P4  \
            ", p, 1, 1, %" P6 ";\n}"                                                                                               \
            : __VA_ARGS__                                                                                                          \
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)), "n"(ROWS ? 1 : 0))
#define GDN_PRODUCT_OF_TILES(N, D, P0, P1, P2, P3, P4, TYPE, ...)                                                                   \
  GDN_WGMMA("{\n.reg .pred p;\nsetp.ne.b32 p, %" P2 ", 0;\n"                                                                       \
            "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" D "}, %" P0 ", %" P1 ", p, 1, 1, %" P3  \
            ", %" P4 ";\n}"                                                                                                        \
            : __VA_ARGS__                                                                                                          \
            : "l"(a), "l"(b), "r"(static_cast<int>(add)), "n"(ROWS_A ? 1 : 0), "n"(ROWS ? 1 : 0))
#define GDN_SHAPE(N, TILES, D, P0, P1, P2, P3, P4, P5, P6, ...)                                                                     \
  template <typename T, bool ROWS>                                                                                                 \
  __device__ __forceinline__ void product(float (&d)[TILES][4], const uint32_t (&a)[4], uint64_t b, bool add) {                    \
    if constexpr (std::is_same_v<T, __half>)                                                                                       \
      GDN_PRODUCT(N, D, P0, P1, P2, P3, P4, P5, P6, "f16", __VA_ARGS__);                                                           \
    else                                                                                                                           \
      GDN_PRODUCT(N, D, P0, P1, P2, P3, P4, P5, P6, "bf16", __VA_ARGS__);                                                          \
  }                                                                                                                                \
  template <typename T, bool ROWS_A = false, bool ROWS = false>                                                                    \
  __device__ __forceinline__ void product_of_tiles(float (&d)[TILES][4], uint64_t a, uint64_t b, bool add) {                       \
    if constexpr (std::is_same_v<T, __half>)                                                                                       \
      GDN_PRODUCT_OF_TILES(N, D, P0, P1, P2, P3, P4, "f16", __VA_ARGS__);                                                              \
    else                                                                                                                           \
      GDN_PRODUCT_OF_TILES(N, D, P0, P1, P2, P3, P4, "bf16", __VA_ARGS__);                                                             \
  }

#define GDN_ACC1(d, i) "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])
#define GDN_ACC2(d, i) GDN_ACC1(d, i), GDN_ACC1(d, i + 1)
#define GDN_ACC8(d, i) GDN_ACC2(d, i), GDN_ACC2(d, i + 2), GDN_ACC2(d, i + 4), GDN_ACC2(d, i + 6)
#define GDN_ACC16(d, i) GDN_ACC8(d, i), GDN_ACC8(d, i + 8)
#define GDN_D_SHORT "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define GDN_D0                                                                                                                     \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, "  \
  "%27, %28, %29, %30, %31"
#define GDN_D32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define GDN_D40                                                                                                                    \
  ", %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define GDN_D64                                                                                                                    \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, %86, %87, %88, " \
  "%89, %90, %91, %92, %93, %94, %95"
#define GDN_D96                                                                                                                    \
  ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "                                 \
  "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

GDN_SHAPE(32, 4, GDN_D_SHORT, "16", "17", "18", "19", "20", "21", "22", GDN_ACC2(d, 0), GDN_ACC2(d, 2))
GDN_SHAPE(64, 8, GDN_D0, "32", "33", "34", "35", "36", "37", "38", GDN_ACC8(d, 0))
GDN_SHAPE(80, 10, GDN_D0 GDN_D32, "40", "41", "42", "43", "44", "45", "46", GDN_ACC8(d, 0), GDN_ACC2(d, 8))
GDN_SHAPE(128, 16, GDN_D0 GDN_D32 GDN_D40, "64", "65", "66", "67", "68", "69", "70", GDN_ACC16(d, 0))
GDN_SHAPE(192, 24, GDN_D0 GDN_D32 GDN_D40 GDN_D64, "96", "97", "98", "99", "100", "101", "102", GDN_ACC16(d, 0), GDN_ACC8(d, 16))
GDN_SHAPE(256, 32, GDN_D0 GDN_D32 GDN_D40 GDN_D64 GDN_D96, "128", "129", "130", "131", "132", "133", "134", GDN_ACC16(d, 0), GDN_ACC16(d, 16))

#undef GDN_PRODUCT
#undef GDN_PRODUCT_OF_TILES
#undef GDN_SHAPE
#undef GDN_ACC1
#undef GDN_ACC2
#undef GDN_ACC8
#undef GDN_ACC16
#undef GDN_D_SHORT
#undef GDN_D0
#undef GDN_D32
#undef GDN_D40
#undef GDN_D64
#undef GDN_D96

}  // namespace wgmma

// Registers a thread of this warpgroup may have from here on.
template <int N> __device__ __forceinline__ void more_registers() {
  GDN_WGMMA("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}
template <int N> __device__ __forceinline__ void fewer_registers() {
  GDN_WGMMA("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}

}  // namespace gdn
