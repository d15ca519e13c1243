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

#define GDN_ACC4(a) "+f"(a[0]), "+f"(a[1]), "+f"(a[2]), "+f"(a[3])
#define GDN_D32                                                                                                     \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, " \
  "%24, %25, %26, %27, %28, %29, %30, %31}"
#define GDN_D64                                                                                                     \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, " \
  "%24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, "  \
  "%46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}"

// acc[64, 64] (+)= a[64, 16] b[16, 64]; ROWS: b is a tile_of_rows. A warp's part of acc is that of eight mma16816 side by
// side, and of a that of one.
template <typename T, bool ROWS>
__device__ __forceinline__ void product(float (&d)[8][4], const uint32_t (&a)[4], uint64_t b, bool add) {
#define GDN_WGMMA_64(TYPE)                                                                                            \
  GDN_WGMMA("{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"                                                              \
            "wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE " " GDN_D32                                    \
            ", {%32, %33, %34, %35}, %36, p, 1, 1, %38;\n}"                                                            \
            : GDN_ACC4(d[0]), GDN_ACC4(d[1]), GDN_ACC4(d[2]), GDN_ACC4(d[3]), GDN_ACC4(d[4]), GDN_ACC4(d[5]),         \
              GDN_ACC4(d[6]), GDN_ACC4(d[7])                                                                          \
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)), "n"(ROWS ? 1 : 0))
  if constexpr (std::is_same_v<T, __half>)
    GDN_WGMMA_64("f16");
  else
    GDN_WGMMA_64("bf16");
#undef GDN_WGMMA_64
}

// acc[64, 64] (+)= a[64, 16] b[16, 64] of two tiles of columns: the rows of a are those of its tile.
template <typename T>
__device__ __forceinline__ void product_of_tiles(float (&d)[8][4], uint64_t a, uint64_t b, bool add) {
#define GDN_WGMMA_TILES(TYPE)                                                                                         \
  GDN_WGMMA("{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"                                                              \
            "wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE " " GDN_D32 ", %32, %33, p, 1, 1, 0, 0;\n}"   \
            : GDN_ACC4(d[0]), GDN_ACC4(d[1]), GDN_ACC4(d[2]), GDN_ACC4(d[3]), GDN_ACC4(d[4]), GDN_ACC4(d[5]),         \
              GDN_ACC4(d[6]), GDN_ACC4(d[7])                                                                          \
            : "l"(a), "l"(b), "r"(static_cast<int>(add)))
  if constexpr (std::is_same_v<T, __half>)
    GDN_WGMMA_TILES("f16");
  else
    GDN_WGMMA_TILES("bf16");
#undef GDN_WGMMA_TILES
}

// The same as product() for acc[64, 128].
template <typename T, bool ROWS>
__device__ __forceinline__ void product(float (&d)[16][4], const uint32_t (&a)[4], uint64_t b, bool add) {
#define GDN_WGMMA_128(TYPE)                                                                                           \
  GDN_WGMMA("{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\n"                                                              \
            "wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE " " GDN_D64                                   \
            ", {%64, %65, %66, %67}, %68, p, 1, 1, %70;\n}"                                                            \
            : GDN_ACC4(d[0]), GDN_ACC4(d[1]), GDN_ACC4(d[2]), GDN_ACC4(d[3]), GDN_ACC4(d[4]), GDN_ACC4(d[5]),         \
              GDN_ACC4(d[6]), GDN_ACC4(d[7]), GDN_ACC4(d[8]), GDN_ACC4(d[9]), GDN_ACC4(d[10]), GDN_ACC4(d[11]),       \
              GDN_ACC4(d[12]), GDN_ACC4(d[13]), GDN_ACC4(d[14]), GDN_ACC4(d[15])                                      \
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)), "n"(ROWS ? 1 : 0))
  if constexpr (std::is_same_v<T, __half>)
    GDN_WGMMA_128("f16");
  else
    GDN_WGMMA_128("bf16");
#undef GDN_WGMMA_128
}

#undef GDN_ACC4
#undef GDN_D32
#undef GDN_D64

}  // namespace wgmma

// Registers a thread of this warpgroup may have from here on.
template <int N> __device__ __forceinline__ void more_registers() {
  GDN_WGMMA("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}
template <int N> __device__ __forceinline__ void fewer_registers() {
  GDN_WGMMA("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}

}  // namespace gdn
