// Host side of the kernels that hold whole heads: shared memory and grids.
#pragma once

#include "../common/host.cuh"
#include "../common/launch.cuh"
#include "../common/profile.cuh"
#include "../plan.h"
#include "compact.cuh"
#include "whole.cuh"

namespace gdn {
namespace step {

// Sizes of a head.
template <int K, int V> struct Dims {
  static constexpr int kK = K, kV = V;
  static_assert(StateStream<float, K, V, 2, 4>::kBytes == plan::whole_tiles(K) && kHeader == plan::kWholeHeader, "plan.h has the most bytes of a form");
  static_assert(Record<K, V>{1}.size() == plan::token_floats(K, V, 1) && Record<K, V>{4}.size() == plan::token_floats(K, V, 4),
                "plan.h has the size of a token");
};

// fn(Dims<K, V>) for the sizes of plan::step_dims().
template <typename F> int with_step_dims(const gdn_common &p, F &&fn) {
  return p.head_k == 128 ? fn(Dims<128, 128>{}) : fn(Dims<96, 192>{});
}

// `blocks`: at most so many a multiprocessor, 0 for as many as fit.
template <typename T, typename ST, typename D, Unit UNIT, bool MANY, int DEPTH>
int launch_whole(const ParamsOf<UNIT != Unit::kRule> &p, cudaStream_t stream, bool overlap = false, int blocks = 0) {
  const int ratio = UNIT == Unit::kKeyHead ? plan::ratio_of(p.common) : 1;
  constexpr int kTiles = StateStream<ST, D::kK, D::kV, kRows<UNIT, MANY, Lanes<ST, D::kK>::kLanes>, DEPTH>::kBytes;
  int64_t bytes = plan::whole_bytes(p.common, ratio) - plan::whole_tiles(D::kK) + kTiles;
  int optin = 0;
  if (const int status = shared_limit(&optin)) return status;
  // 1 KB a block is the system's.
  if (blocks && optin / blocks - 1024 > bytes) bytes = optin / blocks / 1024 * 1024 - 1024;
  const dim3 grid(static_cast<unsigned>(UNIT == Unit::kKeyHead ? p.common.num_k_heads : p.common.num_v_heads),
                  static_cast<unsigned>(p.common.seqs.num_seqs));
  const int cluster = UNIT == Unit::kValueHead ? plan::ratio_of(p.common) : 1;
  GDN_PROFILED(profile::Target target; if (const int status = profile::attach(target, grid, 32 * kWarps)) return status;)
  return launch_allowed<whole_kernel<T, ST, D::kK, D::kV, UNIT, MANY, DEPTH>>({grid, dim3(32 * kWarps), bytes, stream, overlap, cluster}, optin,
                                                                p GDN_PROFILED(, target));
}

// fn(Type<G>) for the gates' type, where it is T or f32.
template <typename T, typename F> int with_gate(int gate_dtype, F &&fn) {
  if (!std::is_same_v<T, float> && gate_dtype != GDN_F32) return fn(Type<T>{});
  return fn(Type<float>{});
}

}  // namespace step
}  // namespace gdn
