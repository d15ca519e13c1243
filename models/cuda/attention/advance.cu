// gdn_advance: adds the new tokens to the positions.
#include "common/launch.cuh"
#include "common/ptx.cuh"
#include "cache.cuh"

namespace gdn {
namespace attention {
namespace {

constexpr int kAdvanceThreads = 128;

__global__ void __launch_bounds__(kAdvanceThreads) advance_kernel(const __grid_constant__ gdn_advance_params p) {
  ptx::grid_dependency_wait();
  ptx::grid_dependency_launch();
  const int64_t n = static_cast<int64_t>(blockIdx.x) * kAdvanceThreads + threadIdx.x;
  if (n >= p.seqs.num_seqs || slot_of(p.slots, static_cast<int>(n)) < 0) return;
  p.positions[n] += static_cast<uint32_t>(tokens_of(p.seqs, static_cast<int>(n)).count);
}

}  // namespace
}  // namespace attention
}  // namespace gdn

extern "C" int gdn_advance(const gdn_advance_params *params, cudaStream_t stream) {
  using namespace gdn;
  using namespace gdn::attention;
  if (!params) return GDN_NULL_POINTER;
  const gdn_advance_params &p = *params;
  if (const int status = check_sequences(p.seqs)) return status;
  if (const int status = check_slots(p.slots)) return status;
  if (p.seqs.num_seqs == 0 || max_tokens(p.seqs) == 0) return GDN_OK;
  if (!p.positions) return GDN_NULL_POINTER;
  const dim3 grid(static_cast<unsigned>(ceil_div(p.seqs.num_seqs, kAdvanceThreads)));
  return launch(advance_kernel, {grid, dim3(kAdvanceThreads), 0, stream, p.overlap != 0}, p);
}
