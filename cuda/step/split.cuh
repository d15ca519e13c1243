// The fused step for work that leaves the card half empty: a cluster of blocks a (sequence, key head), a block a run of
// value rows of one head. One token.
//
// Every block makes the convolution of q and k for itself, and of its own rows of v. Two things tie the blocks together:
// the old convolution state of q and k may be replaced only when all have read it, and the norm of a head needs the squares
// of all its rows. Both are words sent into another block's shared memory.
#pragma once

#include "../common/ptx.cuh"
#include "../common/profile.cuh"
#include "prepare.cuh"
#include "compact.cuh"

namespace gdn {
namespace step {

constexpr int kSplitWarps = 4;

// ROWS a group of eight lanes, so 16 ROWS value rows a block and V / (16 ROWS) blocks a head.
// One function: loads are under way from its first lines to its last, in registers that its parts could not pass on.
template <typename T, typename G, typename ST, int K, int V, int ROWS>
__global__ void __launch_bounds__(32 * kSplitWarps) split_kernel(
    const __grid_constant__ gdn_step_params p, const __grid_constant__ Sizes sizes
        GDN_PROFILED(, const __grid_constant__ profile::Target target)) {
  if (!ptx::kSm90) return;
  GDN_PROFILED(profile::Stamps stamps(target, profile::kStep);)
  using L = Lanes<ST, K>;
  constexpr int kRows = ROWS * L::kLanes / 8;    // a lane group
  constexpr int kTile = kSplitWarps * L::kGroups * kRows, kSplits = V / kTile;
  static_assert(K <= 128 && kTile <= 128 && kSplits * kTile == V);
  __shared__ __align__(16) float shared_q[K], shared_k[K], shared_v[kTile];
  __shared__ float2 shared_gates;
  __shared__ float squares[kSplits][kSplitWarps];    // of all blocks of the head, sent by them
  // The squares; and at block 0, where all blocks arrive when they have read the convolution's state.
  __shared__ __align__(8) uint64_t arrived[2];
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, part = lane % L::kLanes;
  const uint32_t rank = blockIdx.x, n = blockIdx.z, key_head = blockIdx.y;    // the cluster is the grid's x
  const uint32_t split = rank % kSplits, head = key_head * sizes.ratio + rank / kSplits;
  const gdn_common &common = p.common;
  const uint32_t in_slot = slot_number(common.in_slots, n), out_slot = slot_number(common.out_slots, n);
  const uint32_t all_squares = ptx::shared_address(&arrived[0]), all_read = ptx::shared_address(&arrived[1]);
  if (threadIdx.x == 0) {
    ptx::barrier_init(all_squares, 1);
    ptx::barrier_init(all_read, gridDim.x);
    ptx::barriers_initialised();
    ptx::barrier_expect(all_squares, sizeof(squares));
  }
  __syncwarp();
  ptx::cluster_begin_arrive();    // all blocks must run before one writes into another
  if (in_slot >= num_slots_of(common.in_slots) || out_slot >= num_slots_of(common.out_slots)) {    // padding, for all blocks of the cluster
    ptx::grid_dependency_wait();
    if (threadIdx.x < kTile) *out_row_at<T>(p.layer.out, n, head, split * kTile + threadIdx.x) = from_float<T>(0.f);
    ptx::cluster_begin_wait();
    GDN_PROFILED(stamps.lap(profile::kPadding);)
    return;
  }
  // Load the state.
  const uint32_t tile_row = (warp * L::kGroups + lane / L::kLanes) * kRows, row0 = split * kTile + tile_row;
  const uint32_t within = (head * V + row0) * K;
  const ST *in = state_at<ST>(common.state_in, common.in_slots, in_slot) + within;
  // With `overlap` the state does not wait for the kernel before this one.
  if (!p.layer.overlap) ptx::grid_dependency_wait();
  GDN_PROFILED(stamps.lap(profile::kSetup);)
  uint4 raw_state[kRows][L::kChunks];
#pragma unroll
  for (int r = 0; r < kRows; ++r)
#pragma unroll
    for (int j = 0; j < L::kChunks; ++j) raw_state[r][j] = L::load(in + r * K, part, j);
  __syncwarp();    // later loads stay after these
  GDN_PROFILED(stamps.lap(profile::kLoadState);)

  // Load the convolution's window and weights: warps 0 and 1 those of q and k, warp 2 those of v (a lane four channels), warp 3
  // the gates' parameters.
  const uint32_t key = key_head * K;
  const uint32_t channel =
      (warp == 0 ? key : warp == 1 ? sizes.keys + key : 2 * sizes.keys + head * V + split * kTile) + 4 * lane;
  const bool active = warp < 2 ? K == 128 || 4 * lane < K : warp == 2 && 4 * lane < kTile;
  RawTaps taps;
  Raw4<T> old[kWidth - 1], now = {};
  float a_log = 0.f, dt_bias = 0.f;
  if (active) {
    const T *from = static_cast<const T *>(p.conv_in) + (static_cast<uint64_t>(in_slot) * static_cast<uint32_t>(p.conv_in_stride) + channel);
#pragma unroll
    for (int j = 0; j < kWidth - 1; ++j) old[j] = raw_load4(from + j * sizes.channels, 0, 4, true);
    taps.load(p.layer.conv_weight, channel, p.layer.conv_dtype);
  }
  if (warp == 3) a_log = common.a_log[head], dt_bias = static_cast<const float *>(common.dt_bias)[head];
  const uint32_t out_row = row0 + part;    // lanes part < kRows write a row each
  const float weight = part < kRows ? load_any(p.layer.norm_weight, out_row, p.layer.norm_dtype) : 0.f;
  GDN_PROFILED(stamps.lap(profile::kLoadQkv);)
  if (p.layer.overlap) ptx::grid_dependency_wait();
  GDN_PROFILED(stamps.lap(profile::kWaitKernel);)
  ptx::grid_dependency_launch();

  if (active) now = raw_load4(row_at<T>(p.layer.x, n, 0, channel), 0, 4, true);    // x begins with q
  G raw_a = {}, raw_b = {};
  if (warp == 3) raw_a = *row_at<G>(common.a, n, head), raw_b = *row_at<G>(common.b, n, head);
  T raw_z = {};
  if (part < kRows) raw_z = *row_at<T>(p.layer.z, n, head, out_row);

  GDN_PROFILED(stamps.lap(profile::kLoadQkv);)
  // Convolution.
  float window[kWidth][4];
  if (active) {
    GDN_PROFILED(stamps.wait(profile::kWaitQkv, old, now);)
    float y[4];
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      float sum = 0.f;
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        window[j][c] = raw_to_float(j < kWidth - 1 ? old[j] : now, c);
        sum = fmaf(taps.at(c, j, p.layer.conv_dtype), window[j][c], sum);
      }
      y[c] = fast_silu(sum);
    }
    float *to = warp == 0 ? shared_q : warp == 1 ? shared_k : shared_v;
    *reinterpret_cast<float4 *>(to + 4 * lane) = make_float4(y[0], y[1], y[2], y[3]);
    GDN_PROFILED(stamps.lap(profile::kConvolve);)
  }
  GDN_PROFILED(if (warp == 3) stamps.wait(profile::kWaitGates, raw_a, raw_b, a_log, dt_bias);)
  if (warp == 3 && lane == 0)
    shared_gates = make_float2(expf(log_decay(to_float(raw_a), dt_bias, -expf(a_log))),
                           common.beta_scale * sigmoid(to_float(raw_b)));
  GDN_PROFILED(if (warp == 3) stamps.lap(profile::kGates);)
  __syncthreads();
  ptx::cluster_begin_wait();
  GDN_PROFILED(stamps.lap(profile::kBarrier); stamps.wait(profile::kWaitState, raw_state);)
  if (threadIdx.x == 0) ptx::barrier_arrive_at(all_read, 0);

  // The rule.
  float k[L::kEach], q[L::kEach], state[kRows][L::kEach], v[kRows], o[kRows];
  L::slice(shared_k, part, k);
  L::slice(shared_q, part, q);
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    v[r] = shared_v[tile_row + r];
#pragma unroll
    for (int j = 0; j < L::kChunks; ++j) L::unpack(raw_state[r][j], &state[r][j * L::kVec]);
  }
  normalise_and_update<L::kLanes>(common, state, k, q, v, shared_gates.x, shared_gates.y, o);
  GDN_PROFILED(stamps.lap(profile::kUpdate);)

  // Send the squares to the other blocks of the head; store the state.
  float square = 0.f, out = 0.f;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    square = fmaf(o[r], o[r], square);
    if (part == r) out = o[r];
  }
#pragma unroll
  for (int d = L::kLanes; d < 32; d *= 2) square += __shfl_xor_sync(0xffffffffu, square, d);
  if (lane < kSplits) ptx::send(&squares[split][warp], square, all_squares, rank / kSplits * kSplits + lane);

  ST *to = const_cast<ST *>(state_at<ST>(common.state_out, common.out_slots, out_slot)) + within;
#pragma unroll
  for (int r = 0; r < kRows; ++r) L::store(to + r * K, part, state[r]);
  const float gate = to_float(raw_z);
  const float factor = weight * (p.layer.sigmoid ? fast_sigmoid(gate) : fast_silu(gate));

  GDN_PROFILED(stamps.lap(profile::kStoreState);)
  ptx::barrier_wait_cluster(all_squares, 0);
  GDN_PROFILED(stamps.lap(profile::kBarrier);)
  // Norm.
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < kSplits; ++i)
#pragma unroll
    for (int w = 0; w < kSplitWarps; ++w) sum += squares[i][w];
  if (part < kRows)
    *out_row_at<T>(p.layer.out, n, head, out_row) = from_float<T>(out * rsqrtf(sum * (1.f / V) + p.layer.norm_eps) * factor);
  GDN_PROFILED(stamps.lap(profile::kOutput);)

  // Store the convolution's state: v belongs to this block alone, q and k all blocks must have read.
  if (active && (warp == 2 || rank == 0)) {
    if (warp < 2) ptx::barrier_wait_cluster(all_read, 0);
    T *conv = static_cast<T *>(p.conv_out) + (static_cast<uint64_t>(out_slot) * static_cast<uint32_t>(p.conv_out_stride) + channel);
#pragma unroll
    for (int j = 0; j < kWidth - 1; ++j) store_pack<T, 4>(conv + j * sizes.channels, window[j + 1]);
  }
  GDN_PROFILED(stamps.lap(profile::kStoreConv);)
}

}  // namespace step
}  // namespace gdn
