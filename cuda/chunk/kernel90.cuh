// The kernel for sm_90a: which warp has which role of sm90.cuh.
#pragma once

#include "borders.cuh"
#include "sm90.cuh"

namespace gdn {
namespace chunk {

template <typename T, typename ST, int KK, int NM, Pass PASS>
__device__ __forceinline__ void run_block(const gdn_rule_params &p, const Plan &plan, const Maps &maps) {
  using Block = Block90<T, ST, KK, NM, PASS>;
  using S = typename Block::S;
  extern __shared__ __align__(1024) uint8_t raw_shared[];
  if (threadIdx.x == 32)    // the first copies then need not wait for their maps
    for (const CUtensorMap *map : {&maps.k, &maps.q, &maps.v}) ptx::prefetch_map(map);
  Block block(p, plan, maps, *reinterpret_cast<typename S::Shared *>(raw_shared));
  if (threadIdx.x == 0) block.init_barriers();
  if constexpr (PASS != kSeveral) {
    if (block.is_padding()) {
      ptx::grid_dependency_wait();    // dependent launches rely on all earlier kernels being complete
      block.clear_rows(threadIdx.x, S::kThreads);
      GDN_PROFILED(block.stamps.lap(profile::kPadding);)
      return;
    }
    if (is_idle<PASS>(block.s, plan)) {
      ptx::grid_dependency_wait();
      return;
    }
  }
  if (PASS == kTransfer && block.s.identity) block.clear_values();
  if (PASS == kTransfer && block.s.forgetting) block.s.begin = begin_of_warm_up<T, S::kThreads / 32>(p, plan, block.s, block.shared.gates[0].c);
  __syncthreads();
  block.enter_stretch();
  block.values = PASS != kTransfer || !block.s.identity;
  GDN_PROFILED(if (PASS != kSeveral) block.stamps.lap(profile::kSetup);)

  if (block.group == 0) {    // four warps that go their own ways, those with most to do beside the makers' warps with least
    fewer_registers<S::kSingleRegisters>();
    const int kept = ptx::lane_here();
    Phase<S::kStages> at;
    if (block.warp == kLoadWarp) block.run_loader(at);
    else if (block.warp == kGateWarp) block.run_gates(at, kept);
    else block.run_norms(at, kept);
    return;
  }
  if (block.group < S::kMath) {
    fewer_registers<S::kMakerRegisters>();
    block.run_maker(block.group - 1);
    return;
  }
  more_registers<S::kMathRegisters>();
  block.run_math();
}

// PASS kFirst: its blocks and kTransfer's.
template <typename T, typename ST, int KK, int NM, Pass PASS>
__global__ void __launch_bounds__(Shape90<KK, NM>::kThreads, 1)
sm90_kernel(const __grid_constant__ gdn_rule_params p, const __grid_constant__ Plan plan, const __grid_constant__ Maps maps) {
  if constexpr (ptx::kSm90a) {
    if (PASS == kFirst) ptx::grid_dependency_wait();    // for the borders
    if (PASS != kFirst || !is_transfer(p, plan, 64 * NM, blockIdx.x)) run_block<T, ST, KK, NM, PASS>(p, plan, maps);
    else run_block<T, ST, KK, NM, kTransfer>(p, plan, maps);
  }
}

}  // namespace chunk
}  // namespace gdn
