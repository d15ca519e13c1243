// Depthwise causal convolution over time with its rolling state, then SiLU.
//
// A thread owns N neighbouring channels (16 bytes of them where alignment allows) and a run of tokens; its window of
// the last W inputs lives in registers, so that an input is read once per run, plus W - 1 inputs before the run.
// Only the block that owns a sequence's first run reads the old state, and that same block writes the new one, after
// all it had to read: with state_in == state_out no other block can see either.
#pragma once

#include "../common/convert.cuh"
#include "../common/host.cuh"
#include "../common/math.cuh"
#include "../common/sequences.cuh"
#include "conv.h"

namespace gdn {
namespace conv {

constexpr int kThreads = 128;
constexpr int kAhead = 8;    // inputs a thread loads before it uses the first
constexpr int kMinRun = 8;   // tokens a run, at least: more than W - 1, so that only a first run reaches the old state

struct Plan {
  int32_t channel_blocks;
  int32_t runs;      // runs of tokens a sequence
  int32_t run;       // tokens a run
};

// `count` consecutive weights, 16 bytes at a time where the type's size and the address allow.
template <typename T, int count> __device__ __forceinline__ void load_weights(const T *w, float (&x)[count]) {
  constexpr int kVec = 16 / sizeof(T);
  if (count % kVec == 0 && reinterpret_cast<uintptr_t>(w) % 16 == 0) {
#pragma unroll
    for (int m = 0; m < count / kVec; ++m) {
      float y[kVec];
      load_pack<T, kVec>(w + m * kVec, y);
#pragma unroll
      for (int i = 0; i < kVec; ++i) x[m * kVec + i] = y[i];
    }
  } else {
#pragma unroll
    for (int i = 0; i < count; ++i) x[i] = to_float(w[i]);
  }
}

template <typename T, int W, int N>
__global__ void __launch_bounds__(kThreads, 1) conv_kernel(const __grid_constant__ gdn_conv_params p,
                                                        const __grid_constant__ Plan plan) {
  int block = blockIdx.x;
  const int channel = (block % plan.channel_blocks * kThreads + static_cast<int>(threadIdx.x)) * N;
  block /= plan.channel_blocks;
  const int first_run = block % plan.runs, n = block / plan.runs;
  if (channel >= p.channels) return;

  const Tokens seq = tokens_of(p.seqs, n);
  const T *x = static_cast<const T *>(p.x.ptr) + n * p.x.seq_stride + seq.first * p.x.token_stride + channel;
  T *y = static_cast<T *>(const_cast<void *>(p.y.ptr)) + n * p.y.seq_stride + seq.first * p.y.token_stride + channel;
  const int64_t in_slot = slot_of(p.in_slots, n), out_slot = slot_of(p.out_slots, n);

  if (in_slot < 0 || out_slot < 0) {    // padding
    const float zero[N] = {};
    for (int t0 = first_run * plan.run; t0 < seq.count; t0 += plan.runs * plan.run)
      for (int t = t0; t < min(t0 + plan.run, seq.count); ++t) store_pack<T, N>(y + t * p.y.token_stride, zero);
    return;
  }
  const T *old_state = static_cast<const T *>(p.state_in) + in_slot * p.in_slots.slot_stride + channel;
  T *new_state = static_cast<T *>(p.state_out) + out_slot * p.out_slots.slot_stride + channel;

  float weight[N * W];    // [channel][tap]
  {
    const int64_t at = static_cast<int64_t>(channel) * W;
    if (p.weight_dtype == GDN_F32) load_weights(static_cast<const float *>(p.weight) + at, weight);
    else if (p.weight_dtype == GDN_BF16) load_weights(static_cast<const __nv_bfloat16 *>(p.weight) + at, weight);
    else load_weights(static_cast<const __half *>(p.weight) + at, weight);
  }

  float window[W][N];    // the last W - 1 inputs, oldest first, then the current one

  // More runs than the host foresaw are taken in turn.
  for (int t0 = first_run * plan.run; t0 < seq.count; t0 += plan.runs * plan.run) {
    const int end = min(t0 + plan.run, seq.count);
#pragma unroll
    for (int j = 0; j < W - 1; ++j) {
      const int t = t0 - (W - 1) + j;
      load_pack<T, N>(t < 0 ? old_state + static_cast<int64_t>(t + W - 1) * p.channels : x + t * p.x.token_stride,
                      window[j]);
    }
    for (int t = t0; t < end; t += kAhead) {
      Pack<T, N> ahead[kAhead];    // as they come, in half the registers
#pragma unroll
      for (int u = 0; u < kAhead; ++u)
        ahead[u] = *reinterpret_cast<const Pack<T, N> *>(x + min(t + u, end - 1) * p.x.token_stride);
#pragma unroll
      for (int u = 0; u < kAhead; ++u) {
        if (t + u >= end) break;
        float out[N];
#pragma unroll
        for (int i = 0; i < N; ++i) {
          window[W - 1][i] = to_float(ahead[u].x[i]);
          float sum = 0.f;
#pragma unroll
          for (int j = 0; j < W; ++j) sum = fmaf(weight[i * W + j], window[j][i], sum);
          out[i] = p.silu ? fast_silu(sum) : sum;
#pragma unroll
          for (int j = 0; j < W - 1; ++j) window[j][i] = window[j + 1][i];
        }
        store_pack<T, N>(y + (t + u) * p.y.token_stride, out);
      }
    }
  }

  if (first_run == 0) {
    // The last W - 1 of (old state, inputs): at hand when the sequence was one run, else read anew. All is read before
    // any is written, because a short sequence moves rows within the state. The conversions are exact both ways.
    if (seq.count <= 0 || seq.count > plan.run) {
#pragma unroll
      for (int j = 0; j < W - 1; ++j) {
        const int t = seq.count - (W - 1) + j;
        load_pack<T, N>(t < 0 ? old_state + static_cast<int64_t>(t + W - 1) * p.channels : x + t * p.x.token_stride,
                        window[j]);
      }
    }
#pragma unroll
    for (int j = 0; j < W - 1; ++j) store_pack<T, N>(new_state + static_cast<int64_t>(j) * p.channels, window[j]);
  }
}

template <typename T, int W, int N> int launch(const gdn_conv_params &p, int sms, cudaStream_t stream) {
  Plan plan;
  plan.channel_blocks = static_cast<int32_t>(ceil_div(p.channels, kThreads * N));
  // Long runs read fewer inputs twice; short ones fill the card. 8 tokens at least, 64 at most.
  const int64_t tokens = max_tokens(p.seqs) > 0 ? max_tokens(p.seqs) : 1;
  const int64_t columns = static_cast<int64_t>(p.seqs.num_seqs) * plan.channel_blocks;
  static_assert(kMinRun > W - 1, "a later run would need the old state");
  int64_t run = 64;
  while (run > kMinRun && columns * ceil_div(tokens, run) < 8LL * sms) run /= 2;
  plan.run = static_cast<int32_t>(run);
  plan.runs = static_cast<int32_t>(ceil_div(tokens, run));
  const int64_t blocks = columns * plan.runs;
  if (blocks > kMaxBlocks) return GDN_BAD_LENGTH;
  conv_kernel<T, W, N><<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(p, plan);
  return launched();
}

template <typename T, int W> int with_width(const gdn_conv_params &p, int sms, cudaStream_t stream) {
  constexpr int kVec = 16 / sizeof(T);
  const bool vec = p.channels % kVec == 0 && aligned_tokens(p.x, kVec, p.io_dtype) &&
                   aligned_tokens(p.y, kVec, p.io_dtype) && aligned(p.state_in, 16) && aligned(p.state_out, 16) &&
                   p.in_slots.slot_stride % kVec == 0 && p.out_slots.slot_stride % kVec == 0;
  // Measured: wide threads win for one token a sequence, but for the smallest batches, and for the longest inputs; between
  // them a thread a channel has more warps to hide the latency behind.
  const int64_t work = static_cast<int64_t>(p.seqs.num_seqs) * max_tokens(p.seqs) * p.channels;
  const int64_t enough = max_tokens(p.seqs) < kMinRun ? 512LL * sms : 256LL * 1024 * sms;
  if (vec && work >= enough) return launch<T, W, kVec>(p, sms, stream);
  return launch<T, W, 1>(p, sms, stream);
}

template <typename T> int with_dtype_of_io(const gdn_conv_params &p, int sms, cudaStream_t stream) {
  switch (p.width) {
    case 2: return with_width<T, 2>(p, sms, stream);
    case 3: return with_width<T, 3>(p, sms, stream);
    case 4: return with_width<T, 4>(p, sms, stream);
    case 5: return with_width<T, 5>(p, sms, stream);
    case 6: return with_width<T, 6>(p, sms, stream);
    case 7: return with_width<T, 7>(p, sms, stream);
    case 8: return with_width<T, 8>(p, sms, stream);
  }
  return GDN_BAD_CONV_WIDTH;
}

}  // namespace conv
}  // namespace gdn
