// Exact context parallelism: a sequence is cut into segments that run side by side.
//
// A segment maps the state before it to the one after it: S -> S M + N, with N what it makes of no state at all and M what it
// makes of the identity when there are no values. The transfer pass of the scan finds both, for all segments but the last at
// once; this kernel goes through the segments of a head and puts the state before each in the place of the N before it, and
// keeps that before the first one.
#pragma once

#include "scan.cuh"

namespace gdn {
namespace prefill {

// TF32 in two parts: products keep f32's precision, as a sum over segments must.
namespace detail {

struct Split {
  float hi, lo;
};
__device__ __forceinline__ Split split(float x) {
  const float hi = __uint_as_float(__float_as_uint(x) & 0xffffe000u);
  return {hi, x - hi};
}

// acc += a b to about f32's precision. The order of k is any that a and b agree on; here lane % 4 holds k = 2 (lane % 4)
// and the one after it, as an accumulator holds its columns.
__device__ __forceinline__ void mma_f32(float (&acc)[4], const float (&a)[4], const float (&b)[2]) {
  float ah[4], al[4], bh[2], bl[2];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const Split s = split(a[i]);
    ah[i] = s.hi, al[i] = s.lo;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const Split s = split(b[i]);
    bh[i] = s.hi, bl[i] = s.lo;
  }
  ptx::mma1688_tf32(acc, ah, bl);
  ptx::mma1688_tf32(acc, al, bh);
  ptx::mma1688_tf32(acc, ah, bh);
}

}  // namespace detail

constexpr int kCombineRows = 16;
template <int KK> constexpr int kCombineThreads = 32 * (KK / 8);    // a warp eight columns

template <int KK> struct CombineShared {
  static constexpr int kRow = KK + 4;    // floats: rows 2c and columns n of a B operand fall on 32 banks
  float m[2][KK * kRow];
  float state[kCombineRows * kRow];
};

template <typename ST, int KK>
__global__ void __launch_bounds__(kCombineThreads<KK>)
combine_kernel(const __grid_constant__ gdn_rule_params p, const __grid_constant__ Plan plan) {
  using Shared = CombineShared<KK>;
  constexpr int kRow = Shared::kRow, kThreads = kCombineThreads<KK>;
  extern __shared__ __align__(1024) uint8_t raw_shared[];
  Shared &shared = *reinterpret_cast<Shared *>(raw_shared);
  ptx::grid_dependency_launch();

  const int tiles = (p.head_v + kCombineRows - 1) / kCombineRows;
  const int row0 = static_cast<int>(blockIdx.x % tiles) * kCombineRows;
  const int head = static_cast<int>(blockIdx.x / tiles % p.num_v_heads), n = static_cast<int>(blockIdx.x / tiles / p.num_v_heads);
  const int64_t in_slot = slot_of(p.in_slots, n);
  const int chunks = (tokens_of(p.seqs, n).count + kChunk - 1) / kChunk;
  const int segments = (chunks + plan.segment_chunks - 1) / plan.segment_chunks;
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  if (in_slot < 0 || slot_of(p.out_slots, n) < 0 || segments < 2) {
    ptx::grid_dependency_wait();
    return;
  }

  const ST *in = static_cast<const ST *>(p.state_in) + in_slot * p.in_slots.slot_stride +
                 static_cast<int64_t>(head) * p.head_v * p.head_k;
  for (int i = thread; i < kCombineRows * KK; i += kThreads) {
    const int row = row0 + i / KK, column = i % KK;
    const bool there = row < p.head_v && column < p.head_k;
    const float x = there ? to_float<ST>(in[row * p.head_k + column]) : 0.f;
    shared.state[i / KK * kRow + column] = x;
    if (there) first_at(p, plan, n, head)[row * p.head_k + column] = x;
  }
  ptx::grid_dependency_wait();
  auto load = [&](int segment) {
    if (segment < segments - 1) {
      const float *m = transfer_at(p, plan, n, segment, head) + p.head_v * p.head_k;
      const uint32_t to = ptx::shared_address(shared.m[segment % 2]);
      for (int i = thread; i < KK * KK / 4; i += kThreads) {
        const int row = i / (KK / 4), column = i % (KK / 4) * 4;
        const bool there = row < p.head_k && column < p.head_k;
        ptx::copy_async_or_zero(to + 4 * (row * kRow + column), there ? m + row * p.head_k + column : m, there ? 16 : 0);
      }
    }
    ptx::copy_async_commit();
  };
  // N of a segment: this thread's four elements.
  const int column = 8 * warp + 2 * (lane % 4);
  const auto place = [&](int segment, int i) {
    return transfer_at(p, plan, n, segment, head) + (row0 + lane / 4 + 8 * i) * p.head_k + column;
  };
  const bool inside = column < p.head_k;    // and the one after it, as sizes are multiples of 8
  float next[4] = {};
  const auto load_place = [&](int segment) {
#pragma unroll
    for (int i = 0; i < 2; ++i)
      if (segment < segments - 1 && inside && row0 + lane / 4 + 8 * i < p.head_v) {
        const float2 x = *reinterpret_cast<const float2 *>(place(segment, i));
        next[2 * i] = x.x, next[2 * i + 1] = x.y;
      }
  };
  load(0);
  load_place(0);
  for (int segment = 0; segment < segments - 1; ++segment) {
    load(segment + 1);
    float acc[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) acc[i] = next[i];
    load_place(segment + 1);
    ptx::copy_async_wait<1>();
    __syncthreads();
    const float *m = shared.m[segment % 2] + 2 * (lane % 4) * kRow + 8 * warp + lane / 4;
    const float *state = shared.state + lane / 4 * kRow + 2 * (lane % 4);
    float part[2][4] = {};    // two chains, to halve their latency
#pragma unroll
    for (int k = 0; k < KK / 8; ++k) {
      const float2 top = *reinterpret_cast<const float2 *>(state + 8 * k);
      const float2 low = *reinterpret_cast<const float2 *>(state + 8 * k + 8 * kRow);
      const float a[4] = {top.x, low.x, top.y, low.y}, b[2] = {m[8 * k * kRow], m[(8 * k + 1) * kRow]};
      detail::mma_f32(part[k % 2], a, b);
    }
    __syncthreads();    // the state has been read
#pragma unroll
    for (int i = 0; i < 4; ++i) acc[i] += part[0][i] + part[1][i];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float2 x = make_float2(acc[2 * i], acc[2 * i + 1]);
      *reinterpret_cast<float2 *>(shared.state + (lane / 4 + 8 * i) * kRow + column) = x;
      if (inside && row0 + lane / 4 + 8 * i < p.head_v) *reinterpret_cast<float2 *>(place(segment, i)) = x;
    }
    // The barrier before the next product orders these writes and the next reads.
  }
}

}  // namespace prefill
}  // namespace gdn
