// Instructions that CUDA C++ has no name for. All are `volatile`, so that they stay in the order written.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

#include <type_traits>

namespace gdn {
namespace ptx {

// What this pass of the compiler makes code for. A kernel that only newer code runs has no body elsewhere, which saves the time to
// compile it; launchers ask has_sm90_code() or has_sm90a_code() before.
#if __CUDA_ARCH__ >= 900
constexpr bool kSm90 = true;
#else
constexpr bool kSm90 = false;
#endif
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
constexpr bool kSm90a = true;
#else
constexpr bool kSm90a = false;
#endif

// Programmatic dependent launch. After the wait all that the kernels before this one wrote is there; in a plain launch
// it returns at once. The launch lets the next kernel's blocks begin as soon as every block has called it and there is
// room. Call it after the wait: the next kernel may then rely on all before this one being complete. gdn_residual of
// the models calls it before, and gdn_linear in a small product between a norm and a large product of the same x.
// On older devices, where nothing overlaps, both are empty (see launch.cuh).
__device__ __forceinline__ void grid_dependency_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ void grid_dependency_launch() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// What a warp has written to global memory, for a warp of another block of the same launch that waits for its flag; by all lanes.
__device__ __forceinline__ void set_flag(uint32_t *flag, int lane) {
  __syncwarp();
  if (lane != 0) return;
  __threadfence();
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(flag), "r"(1u) : "memory");
}
__device__ __forceinline__ void wait_for_flag(const uint32_t *flag, int lane) {
  if (lane == 0) {
    uint32_t there = 0;
    while (there == 0) asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(there) : "l"(flag) : "memory");
  }
  __syncwarp();
}

// One more for a count of another kernel, with all that this thread has written or has seen written.
__device__ __forceinline__ void add_to_count(uint32_t *count) {
  asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(count) : "memory");
}
__device__ __forceinline__ void wait_for_count(const uint32_t *count, uint32_t least) {
  for (;;) {
    uint32_t there;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(there) : "l"(count) : "memory");
    if (there >= least) return;
    __nanosleep(100);
  }
}

// 8 bytes that another kernel reads while this one runs, as one access; alone, and not with what was written before.
__device__ __forceinline__ void store_relaxed(void *to, uint64_t x) {
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(to), "l"(x) : "memory");
}
__device__ __forceinline__ uint64_t load_relaxed(const void *from) {
  uint64_t x;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(x) : "l"(from) : "memory");
  return x;
}

__device__ __forceinline__ uint32_t shared_address(const void *p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// Computed in every lane, where the compiler would compute it only in those that use it.
__device__ __forceinline__ uint32_t in_every_lane(uint32_t x) {
  asm volatile("" : "+r"(x));
  return x;
}

// The lane, by an exchange and not from the thread's number alone: the assembler would read that again (S2R, about 30 cycles)
// wherever registers are short.
__device__ __forceinline__ int kept_lane() {
  const int lane = static_cast<int>(threadIdx.x % 32);
  return __shfl_sync(0xffffffffu, lane, lane) & 31;    // so that divisions of it are shifts
}

// ---- loads of 16 bytes ----

// Past L1, and L2 fetches whole lines. For data that no kernel writes while this one runs, nor the kernel before it under overlap.
// No "memory" clobber: it may pass other accesses, but not another volatile instruction.
//
// NOTES: not ld.global.nc. ptxas (13.0) moves griddepcontrol.wait up above such loads, as they depend on no store, and
// nothing would be under way during the wait; it does not above these.
__device__ __forceinline__ uint4 load_stream(const void *p) {
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}

// For data that the kernel before this one wrote: the coherent path, and not before a wait above it.
__device__ __forceinline__ uint4 load_after_wait(const void *p) {
  uint4 v;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
  return v;
}

// The same for one number, through L1: a scale of many weights.
__device__ __forceinline__ float load_float(const float *p) {
  float x;
  asm volatile("ld.global.f32 %0, [%1];" : "=f"(x) : "l"(p));
  return x;
}

__device__ __forceinline__ uint4 load_shared(uint32_t address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address) : "memory");
  return v;
}

__device__ __forceinline__ uint2 load_shared_8(uint32_t address) {
  uint2 v;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(address) : "memory");
  return v;
}

// 16 bytes from global to shared memory, past L1 and without registers. Groups complete in order.
__device__ __forceinline__ void copy_async(uint32_t to, const void *from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

// 8 bytes, through L1.
__device__ __forceinline__ void copy_async_8(uint32_t to, const void *from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(to), "l"(from) : "memory");
}

__device__ __forceinline__ void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Until at most N of this thread's groups are under way.
template <int N> __device__ __forceinline__ void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

// The same for `bytes` of the 16, the rest zero; with 0 nothing is read.
__device__ __forceinline__ void copy_async_or_zero(uint32_t to, const void *from, uint32_t bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}

__device__ __forceinline__ void store_shared(uint32_t address, uint32_t v) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(v) : "memory");
}

// THREADS threads of the block, one of its barriers 1 to 15.
template <int THREADS> __device__ __forceinline__ void group_barrier(int id) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(THREADS) : "memory");
}

// ---- 8 x 8 matrices of 16-bit elements between shared memory and registers ----
// Lane l gives the address of row l % 8 of matrix l / 8, 16 bytes, and holds of each matrix the elements 2 (l % 4), + 1 of
// row l / 4; with `trans` of the transposed matrix.
__device__ __forceinline__ void load_matrices(uint32_t (&m)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3]) : "r"(row) : "memory");
}

__device__ __forceinline__ void load_matrices_trans(uint32_t (&m)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3]) : "r"(row) : "memory");
}

// One such matrix transposed within registers.
__device__ __forceinline__ uint32_t transpose_matrix(uint32_t m) {
  uint32_t t;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(t) : "r"(m));
  return t;
}

// ---- matrix products: acc[16, 8] += a[16, 16] b[16, 8] ----
// Lane l holds of a the pairs k = 2 (l % 4), + 1 and 8 further, in rows l / 4 and l / 4 + 8: a = {row, row + 8, row
// with k + 8, row + 8 with k + 8}; of b the same pairs of column l / 4; of acc those rows, columns 2 (l % 4), + 1.
template <typename T>
__device__ __forceinline__ void mma16816(float (&acc)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                         uint32_t b0, uint32_t b1) {
  if constexpr (std::is_same_v<T, __half>)
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  else
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// acc[16, 8] += a[16, 8] b[8, 8] in TF32: the upper 19 bits of f32 words. Lane l holds of a columns l % 4 and 4 further in
// rows l / 4 and l / 4 + 8: a = {row, row + 8, row with column + 4, row + 8 with column + 4}; of b rows l % 4 and 4 further
// of column l / 4; acc as above.
__device__ __forceinline__ void mma1688_tf32(float (&acc)[4], const float (&a)[4], const float (&b)[2]) {
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
               "{%0, %1, %2, %3};"
               : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
               : "r"(__float_as_uint(a[0])), "r"(__float_as_uint(a[1])), "r"(__float_as_uint(a[2])),
                 "r"(__float_as_uint(a[3])), "r"(__float_as_uint(b[0])), "r"(__float_as_uint(b[1])));
}

// ---- bulk copies and their barriers, clusters: sm_90 and later ----
// Elsewhere empty, for kernels whose other half is for every device; none with clusters is launched there.
#if __CUDA_ARCH__ >= 900
#define GDN_SM90(...) asm volatile(__VA_ARGS__)
#else
#define GDN_SM90(...) ((void)0)
#endif

__device__ __forceinline__ void barrier_init(uint32_t barrier, uint32_t arrivals) {
  GDN_SM90("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// Makes this thread's barrier_init() visible to the copy engine; other threads still need a barrier of the block. It takes long:
// once for all barriers.
__device__ __forceinline__ void barriers_initialised() { GDN_SM90("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// Arrives, with `bytes` to come from copies or store_async() before the phase is over. They may be there already.
__device__ __forceinline__ void barrier_expect(uint32_t barrier, uint32_t bytes) {
  GDN_SM90("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
  GDN_SM90("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// blockIdx.x, read at this place: what depends on it is computed again and not kept in registers.
__device__ __forceinline__ unsigned reread_block() {
  unsigned x;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(x));
  return x;
}

// The lane, in a register from here on and not from the begin of the kernel.
__device__ __forceinline__ int lane_here() {
  int x;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(x));
  return x & 31;    // so that divisions of it are shifts
}

// `lane`, through a shared address that changes in each iteration of a loop: what depends on it is computed in each iteration, in a
// few instructions, where ptxas would keep it in registers that it does not have.
__device__ __forceinline__ int recompute_lane(int lane, uint32_t address) { return (lane | static_cast<int>(address >> 31)) & 31; }

// Makes this thread's earlier writes to shared memory visible to later wgmma and bulk copies.
__device__ __forceinline__ void fence_async() { GDN_SM90("fence.proxy.async.shared::cta;" ::: "memory"); }

// The same between global memory that this thread may read and copies from there that it starts.
__device__ __forceinline__ void fence_async_global() { GDN_SM90("fence.proxy.async.global;" ::: "memory"); }

// Until the phase of this parity is over: the first has parity 0.
__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
  GDN_SM90(
      "{\n.reg .pred done;\n"
      "again_%=:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again_%=;\n}" ::"r"(barrier), "r"(parity)
      : "memory");
}

// `bytes` from global to shared memory: a multiple of 16, as are both addresses. Completes on `barrier`.
__device__ __forceinline__ void copy_bulk(uint32_t to, const void *from, uint32_t bytes, uint32_t barrier) {
  GDN_SM90("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(from), "r"(bytes), "r"(barrier)
               : "memory");
}

// Brings a tensor map to where copies read it.
__device__ __forceinline__ void prefetch_map(const void *map) { GDN_SM90("prefetch.tensormap [%0];" ::"l"(map) : "memory"); }

// A box of a tensor map, as large as the map says. Completes on `barrier`, for the whole box whatever lies outside.
__device__ __forceinline__ void copy_box(uint32_t to, const void *map, int c0, int c1, int c2, int c3, uint32_t barrier) {
  GDN_SM90("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], [%6];" ::
               "r"(to), "l"(map), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(barrier)
           : "memory");
}

// The reverse: writes what lies inside of the tensor.
__device__ __forceinline__ void store_box(uint32_t from, const void *map, int c0, int c1, int c2, int c3) {
  GDN_SM90("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%1, %2, %3, %4}], [%5];\ncp.async.bulk.commit_group;" ::
               "l"(map), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(from)
           : "memory");
}

// `bytes` from shared to global memory: a multiple of 16, as are both addresses.
__device__ __forceinline__ void store_bulk(void *to, uint32_t from, uint32_t bytes) {
  GDN_SM90("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\ncp.async.bulk.commit_group;" ::"l"(to), "r"(from), "r"(bytes)
           : "memory");
}

// Waits until this thread's boxes and bulks have been read, so that their shared memory may be written.
__device__ __forceinline__ void stores_read() { GDN_SM90("cp.async.bulk.wait_group.read 0;" ::: "memory"); }

// Waits until they are in global memory.
__device__ __forceinline__ void stores_done() { GDN_SM90("cp.async.bulk.wait_group 0;" ::: "memory"); }

// The reverses of load_matrices() and load_matrices_trans().
__device__ __forceinline__ void store_matrices(uint32_t row, const uint32_t (&m)[4]) {
  GDN_SM90("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(m[0]), "r"(m[1]),
           "r"(m[2]), "r"(m[3])
           : "memory");
}

__device__ __forceinline__ void store_matrices_trans(uint32_t row, const uint32_t (&m)[4]) {
  GDN_SM90("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(m[0]), "r"(m[1]),
           "r"(m[2]), "r"(m[3])
           : "memory");
}

// The same for data that other blocks of the cluster sent.
__device__ __forceinline__ void barrier_wait_cluster(uint32_t barrier, uint32_t parity) {
  GDN_SM90(
      "{\n.reg .pred done;\n"
      "again_%=:\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again_%=;\n}" ::"r"(barrier), "r"(parity)
      : "memory");
}

// One word into any block's shared memory, its arrival counted by the barrier there: an exchange within the cluster
// without a barrier of the cluster, whose release and acquire would flush all of memory (MEMBAR.ALL.GPU, CCTL.IVALL).
__device__ __forceinline__ void store_async(uint32_t there, float value, uint32_t barrier_there) {
  GDN_SM90("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(there),
               "r"(__float_as_uint(value)), "r"(barrier_there)
               : "memory");
}

// All threads of the cluster, in two halves. Orders nothing but barrier_init() before it: for the begin of a kernel.
__device__ __forceinline__ void cluster_begin_arrive() { GDN_SM90("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_begin_wait() { GDN_SM90("barrier.cluster.wait.aligned;" ::: "memory"); }

__device__ __forceinline__ void cluster_begin() {
  cluster_begin_arrive();
  cluster_begin_wait();
}

// The address, in block `rank` of the cluster, of what lies at `address` in this one's shared memory.
__device__ __forceinline__ uint32_t cluster_address(uint32_t address, uint32_t rank) {
  uint32_t there = 0;
  GDN_SM90("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}

// A word to the variable that stands at this address in the shared memory of the cluster's block `rank`, and its arrival
// to the barrier there.
__device__ __forceinline__ void send(float *variable, float x, uint32_t barrier, uint32_t rank) {
  store_async(cluster_address(shared_address(variable), rank), x, cluster_address(barrier, rank));
}

// Arrives at the barrier that stands at this address in the shared memory of the cluster's block `rank`. Relaxed, for the same
// reason as store_async(): what was read before has come, as it was used.
__device__ __forceinline__ void barrier_arrive_at(uint32_t barrier, uint32_t rank) {
  GDN_SM90("mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [%0];" ::"r"(cluster_address(barrier, rank)) : "memory");
}

#undef GDN_SM90

}  // namespace ptx
}  // namespace gdn
