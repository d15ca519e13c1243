// gdn_sampling: each row's next token, by a group of blocks a row. See README.md.
#include "common/host.cuh"
#include "common/launch.cuh"
#include "cut.cuh"

namespace gdn {
namespace sampling {
namespace {

template <typename T> struct Row : Cutting<T> {
  using Cutting<T>::Cutting;
  using Part<T>::args, Part<T>::s, Part<T>::group, Part<T>::logits, Part<T>::row, Part<T>::number, Part<T>::passes, Part<T>::best;

  // What is kept of each unit is added up by all blocks; the last of them draws from that, and ends the row.
  __device__ void draw(Cut cut) {
    Mass *masses = group->bins[passes % 3];
    this->units([&](int unit) {
      Mass kept = {0, 0};
      this->within(unit, [&](float x, int) {
        const uint32_t key = key_of(x);
        if (key > cut.key) kept.weight += weight_of(x, best, row.scale);
        kept.count += key == cut.key;
      });
#pragma unroll
      for (int by = 16; by > 0; by /= 2) {
        kept.weight += __shfl_xor_sync(0xffffffffu, kept.weight, by);
        kept.count += __shfl_xor_sync(0xffffffffu, kept.count, by);
      }
      if (threadIdx.x % 32 == 0) masses[unit] = kept;
    });
    if (!this->is_last()) return;

    const uint64_t tie = cut.ties > 0 ? weight_of(logit_of(cut.key), best, row.scale) : 0;
    const int share = (args.units + kThreads - 1) / kThreads, from = threadIdx.x * share;
    const int to = min(from + share, args.units);
    const auto load = [&](int unit) -> Mass {
      return {__ldcg(reinterpret_cast<const unsigned long long *>(&masses[unit].weight)), __ldcg(&masses[unit].count)};
    };
    // With its ties, as far as they are kept after those before it.
    const auto whole = [&](const Mass &unit, uint32_t ties) {
      const uint32_t left = cut.ties > ties ? cut.ties - ties : 0;
      return unit.weight + tie * (unit.count < left ? unit.count : left);
    };
    Mass own = {0, 0}, before, all;
    for (int unit = from; unit < to; ++unit) own.count += load(unit).count;
    this->scan(own, before, all);
    const uint32_t ties_before = before.count;
    uint32_t ties = ties_before;
    for (int unit = from; unit < to; ++unit) {
      const Mass mass = load(unit);
      own.weight += whole(mass, ties);
      ties += mass.count;
    }
    this->scan(own, before, all);
    const uint64_t target = __umul64hi(random_bits(row.seed, row.index), all.weight);
    if (target >= before.weight && target < before.weight + own.weight) {
      uint64_t left = target - before.weight;
      ties = ties_before;
      int unit = from;
      for (;; ++unit) {
        const Mass mass = load(unit);
        const uint64_t weight = whole(mass, ties);
        if (left < weight) break;
        left -= weight;
        ties += mass.count;
      }
      s.at = unit;
      s.found = {left, ties};
    }
    __syncthreads();
    if (threadIdx.x < 32) {
      const int lane = threadIdx.x, first = s.at * kUnit;
      Mass left = s.found;
      uint32_t token = GDN_NO_TOKEN;
      for (int at = first; at < first + kUnit && token == GDN_NO_TOKEN; at += 32) {
        const int id = at + lane;
        const float x = id < args.p.vocab ? this->value(__ldcg(logits + id), id) : -INFINITY;
        const uint32_t key = key_of(x);
        const uint32_t equal = __ballot_sync(0xffffffffu, key == cut.key);
        uint64_t weight = key > cut.key ? weight_of(x, best, row.scale) : 0;
        if (key == cut.key && left.count + __popc(equal & ((1u << lane) - 1)) < cut.ties) weight = tie;
#pragma unroll
        for (int by = 1; by < 32; by *= 2) {
          const uint64_t other = shuffle_up(weight, by);
          if (lane >= by) weight += other;
        }
        const uint32_t reached = __ballot_sync(0xffffffffu, left.weight < weight);
        if (reached) token = at + __ffs(static_cast<int>(reached)) - 1;
        left.weight -= __shfl_sync(0xffffffffu, weight, 31);
        left.count += __popc(equal);
      }
      __syncwarp();    // all lanes have read s.at
      if (lane == 0) s.at = token;
    }
    __syncthreads();
    finish(s.at);
  }

  // By the last block. The group is as it was for the next launch, and the row is at its next token.
  __device__ void finish(uint32_t token) {
    if (row.scale > 0.)
      for (int i = threadIdx.x; i < kBins; i += kThreads) group->bins[(passes + 2) % 3][i] = group->bins[passes % 3][i] = {0, 0};
    if (threadIdx.x == 0) {
      group->best = 0;
      group->arrived = 0;
      gdn_sampling_row &next = args.p.state[number];
      if (row.window > 0) {
        args.p.recent[static_cast<int64_t>(number) * args.p.history + row.seen % row.window] = args.p.ids[number];
        next.seen = row.seen + 1;
      }
      // A greedy row is the same for every token, so that the host need not follow it.
      if (row.scale > 0.) next.index = row.index + 1;
      args.p.drawn[number] = token;
      args.p.ids[number] = token == GDN_NO_TOKEN ? 0 : token;
    }
  }

  __device__ void run() {
    if (row.scale < 0.) return;
    this->penalise();
    this->find_best();
    if (row.scale == 0.) {
      if (!this->is_last()) return;
      const uint64_t found = this->groups_best();
      return finish(found == ~0ull ? GDN_NO_TOKEN : ~static_cast<uint32_t>(found));
    }
    this->wait_for_group();
    const uint64_t found = this->groups_best();
    if (found == ~0ull) {
      if (this->is_last()) finish(GDN_NO_TOKEN);
      return;
    }
    best = logit_of(static_cast<uint32_t>(found >> 32));
    Cut cut = {0, 0};
    uint64_t total = 0;
    if (row.top_k > 0 && row.top_k < static_cast<uint32_t>(args.p.vocab)) this->template cut_off<true>(cut, total);
    if (row.top_p < 1.) this->template cut_off<false>(cut, total);
    if (row.gap < INFINITY) {
      // A logit is the bound, so no search is needed. Both zeros are the same number.
      const float least = __double2float_ru(__dsub_rn(best, row.gap));
      const uint32_t below = key_of(least == 0.f ? -0.f : least) - 1;
      if (below >= cut.key) cut = {below, 0};
    }
    draw(cut);
  }
};

template <typename T>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm) sampling_kernel(const __grid_constant__ Args args) {
  __shared__ Shared s;
  // More than one row a group only where a group is one block.
  for (int number = blockIdx.x / args.blocks; number < args.p.rows; number += args.groups) {
    Row<T> row(args, s, number, blockIdx.x % args.blocks);
    row.run();
    __threadfence();
    __syncthreads();
  }
}

// By gdn_dtype.
const void *const kKernels[] = {reinterpret_cast<const void *>(sampling_kernel<float>),
                                reinterpret_cast<const void *>(sampling_kernel<__nv_bfloat16>),
                                reinterpret_cast<const void *>(sampling_kernel<__half>)};

// Blocks that run at once, whatever the logits are in.
int most_blocks(int *value) {
  static PerDevice known;
  return known.get(value, [](int device, int *v) {
    int sms = 0, per_sm = kBlocksPerSm;
    if (const cudaError_t e = cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device)) return e;
    for (const void *kernel : kKernels) {
      int fit = 0;
      if (const cudaError_t e = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&fit, kernel, kThreads, 0)) return e;
      per_sm = fit < per_sm ? fit : per_sm;
    }
    *v = sms * per_sm;
    return *v == 0 ? cudaErrorLaunchOutOfResources : cudaSuccess;
  });
}

int run(const gdn_sampling_params *params, cudaStream_t stream) {
  if (!params) return GDN_NULL_POINTER;
  const gdn_sampling_params &p = *params;
  if (!valid_dtype(p.dtype)) return GDN_BAD_DTYPE;
  if (p.rows < 0 || p.vocab < 1 || p.vocab > kMostVocab || p.history < 0) return GDN_BAD_LENGTH;
  if (p.logits_stride < 0) return GDN_BAD_STRIDE;
  if (p.rows == 0) return GDN_OK;
  if (!p.logits || !p.ids || !p.drawn || !p.state || (p.history > 0 && (!p.recent || !p.kept))) return GDN_NULL_POINTER;
  int64_t bytes = 0;
  if (const int status = gdn_sampling_workspace(p.rows, &bytes)) return status;
  if (!p.workspace || !aligned(p.workspace, 16) || p.workspace_bytes < bytes) return GDN_BAD_WORKSPACE;
  int most = 0;
  if (const int status = most_blocks(&most)) return status;
  Args args;
  args.p = p;
  args.units = static_cast<int>(ceil_div(p.vocab, kUnit));
  args.groups = p.rows < most ? p.rows : most;
  args.blocks = most / args.groups < args.units ? most / args.groups : args.units;
  args.vec = aligned(p.logits, 16) && p.logits_stride * dtype_size(p.dtype) % 16 == 0;

  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(args.groups * args.blocks));
  config.blockDim = dim3(kThreads);
  config.stream = stream;
  // The blocks of a group wait for each other.
  cudaLaunchAttribute together = {};
  together.id = cudaLaunchAttributeCooperative;
  together.val.cooperative = 1;
  config.attrs = &together;
  config.numAttrs = 1;
  void *arguments[] = {&args};
  const cudaError_t e = cudaLaunchKernelExC(&config, kKernels[p.dtype], arguments);
  if (e != cudaSuccess) cudaGetLastError();    // reported here, and not again by the next launch
  return cuda_status(e);
}

}  // namespace
}  // namespace sampling
}  // namespace gdn

extern "C" int gdn_sampling(const gdn_sampling_params *params, cudaStream_t stream) {
  return gdn::sampling::run(params, stream);
}

extern "C" int gdn_sampling_workspace(int32_t rows, int64_t *bytes) {
  using namespace gdn::sampling;
  if (!bytes) return GDN_NULL_POINTER;
  if (rows < 0) return GDN_BAD_LENGTH;
  int most = 0;
  if (const int status = most_blocks(&most)) return status;
  const int64_t groups = rows < most ? rows : most;
  *bytes = groups * static_cast<int64_t>(sizeof(Group));
  return GDN_OK;
}
