// What a block does around the rule of its heads: before it, the tokens' q, k, v and gates into shared memory, through the
// convolution in the fused step; after it, the gated norm.
#pragma once

#include <type_traits>

#include "../common/convert.cuh"
#include "../common/math.cuh"
#include "../common/profile.cuh"
#include "../common/ptx.cuh"
#include "../common/sequences.cuh"
#include "fused.h"
#include "lanes.cuh"
#include "raw.cuh"
#include "stream.cuh"

namespace gdn {
namespace step {

template <bool FUSED> using ParamsOf = std::conditional_t<FUSED, FusedParams, gdn_rule_params>;

// A token in shared memory, in floats: q, k, v of the block's value heads (in whose place o comes later), decay and beta
// a head, and k.q.
struct Record {
  int32_t ratio;
  static constexpr int q = 0, k = kDim;
  __host__ __device__ __forceinline__ int v(int h) const { return (2 + h) * kDim; }
  __host__ __device__ __forceinline__ int gates(int h) const { return (2 + ratio) * kDim + 2 * h; }
  __host__ __device__ __forceinline__ int kq() const { return (2 + ratio) * kDim + 2 * ratio; }
  __host__ __device__ __forceinline__ int size() const { return (2 + ratio) * kDim + (2 * ratio + 4) / 4 * 4; }
};

// A row of q or of a key, four elements a lane: divided by its norm, and q times its scale.
template <typename P> __device__ __forceinline__ void normalise(const P &p, bool key, float (&y)[4]) {
  if (key) {
    SquareSum kk;
#pragma unroll
    for (int c = 0; c < 4; ++c) kk.add_square(y[c]);
#pragma unroll
    for (int d = 16; d > 0; d /= 2) kk.add_lane(d);
    const Factor scale = p.l2norm ? inverse_root(kk, p.l2_eps) : Factor{1.f, 0.f};
#pragma unroll
    for (int c = 0; c < 4; ++c) y[c] = scale.times(y[c]);
  } else {
    const float qq = group_sum(fmaf(y[0], y[0], y[1] * y[1]) + fmaf(y[2], y[2], y[3] * y[3]));
    const float scale = p.l2norm ? rsqrtf(qq + p.l2_eps) * p.scale : p.scale;
#pragma unroll
    for (int c = 0; c < 4; ++c) y[c] *= scale;
  }
}

// CLUSTER: other blocks read the convolution's state of q and k too, so that it is kept back.
template <typename T, bool FUSED, bool CLUSTER, bool MANY> struct Prepare {
  const ParamsOf<FUSED> &p;
  const Record layout;
  float *records;
  int n;
  Tokens seq;
  int64_t in_slot, out_slot;
  int key_head, head0, warp, lane;
  GDN_PROFILED(profile::Stamps &stamps;)
  Raw4<T> raw_z = {};    // of the first row whose norm this warp will make


  // Group 0 is q, group 1 is k, the others are the value heads. Row pointers of this lane's four channels.
  __device__ __forceinline__ const T *input(int group, int t) const {
    const T *row = group == 0   ? heads_at<T>(p.q, n, seq.first + t, key_head)
                   : group == 1 ? heads_at<T>(p.k, n, seq.first + t, key_head)
                                : heads_at<T>(p.v, n, seq.first + t, head0 + group - 2);
    return row + 4 * lane;
  }

  __device__ __forceinline__ int channel(int group) const {
    const int kk = p.num_k_heads * kDim;
    return (group == 0   ? key_head * kDim
            : group == 1 ? kk + key_head * kDim
                         : 2 * kk + (head0 + group - 2) * kDim) +
           4 * lane;
  }

  static __device__ __forceinline__ Raw4<T> raw(const T *p) { return raw_load4(p, 0, 4, true); }

  __device__ __forceinline__ void put(float *record, int group, float (&y)[4]) const {
    if (group < 2) normalise(p, group == 1, y);
    *reinterpret_cast<float4 *>(record + group * kDim + 4 * lane) = make_float4(y[0], y[1], y[2], y[3]);
  }

  // `load_state` runs when the first loads have been asked for and before they are used.
  template <typename Load> __device__ __forceinline__ void operator()(Load &&load_state) {
    const int groups = 2 + layout.ratio, tokens = MANY ? seq.count : 1;
    RawTaps taps;
    Raw4<T> old[kWidth - 1], now = {};
    auto ask_old = [&](int group) {
      if constexpr (FUSED) {
        const int c = channel(group);
        taps.load(p.conv_weight, c, p.conv_dtype);
        const T *from = static_cast<const T *>(p.conv_in) + in_slot * p.conv_in_stride + c;
#pragma unroll
        for (int j = 0; j < kWidth - 1; ++j) old[j] = raw(from + j * p.channels);
      }
    };
    auto make = [&](int group) {
      GDN_PROFILED(if constexpr (FUSED) profile::need(old); stamps.wait(profile::kWaitQkv, now);)
      float window[kWidth][4];
      if constexpr (FUSED) {
#pragma unroll
        for (int j = 0; j < kWidth - 1; ++j)
#pragma unroll
          for (int c = 0; c < 4; ++c) window[j][c] = raw_to_float(old[j], c);
      }
      for (int t = 0; t < tokens; ++t) {
        float y[4];
#pragma unroll
        for (int c = 0; c < 4; ++c) y[c] = raw_to_float(now, c);
        if (MANY && t + 1 < tokens) now = raw(input(group, t + 1));
        if constexpr (FUSED) {
#pragma unroll
          for (int c = 0; c < 4; ++c) {
            window[kWidth - 1][c] = y[c];
            float sum = 0.f;
#pragma unroll
            for (int j = 0; j < kWidth; ++j) sum = fmaf(taps.at(c, j, p.conv_dtype), window[j][c], sum);
            y[c] = fast_silu(sum);
#pragma unroll
            for (int j = 0; j < kWidth - 1; ++j) window[j][c] = window[j + 1][c];
          }
        }
        put(records + t * layout.size(), group, y);
      }
      if constexpr (FUSED) {
        if (!CLUSTER || group >= 2) {
          T *to = static_cast<T *>(p.conv_out) + out_slot * p.conv_out_stride + channel(group);
#pragma unroll
          for (int j = 0; j < kWidth - 1; ++j) store_pack<T, 4>(to + j * p.channels, window[j]);
        }
      }
      GDN_PROFILED(stamps.lap(FUSED ? profile::kConvolve : profile::kNormalise);)
    };

    // A warp's first group, and the gates in the last warp.
    const bool has = warp < groups;    // without tokens the convolution's state may still have to move
    float a_log = 0.f, dt_bias = 0.f;
    const int gate = warp == kWarps - 1 && lane < tokens * layout.ratio ? lane : -1;
    const auto ask_rates = [&](int i) {
      a_log = p.a_log[head0 + i % layout.ratio], dt_bias = static_cast<const float *>(p.dt_bias)[head0 + i % layout.ratio];
    };
    if (gate >= 0) ask_rates(gate);
    if (has) ask_old(warp);
    if constexpr (FUSED) {
      if (p.overlap) load_state();    // not written by the kernel before this one
      ptx::grid_dependency_wait();
      ptx::grid_dependency_launch();
      GDN_PROFILED(stamps.lap(profile::kWaitKernel);)
    }
    if (has && tokens > 0) now = raw(input(warp, 0));
    uint32_t raw_a = 0, raw_b = 0;
    auto ask_gates = [&](int i) {
      const int64_t t = seq.first + i / layout.ratio;
      const int head = head0 + i % layout.ratio;
      raw_a = raw_load_any(p.a.ptr, heads_offset(p.a, n, t, head), p.gate_dtype);
      raw_b = raw_load_any(p.b.ptr, heads_offset(p.b, n, t, head), p.gate_dtype);
    };
    auto make_gates = [&](int i) {
      GDN_PROFILED(stamps.wait(profile::kWaitGates, raw_a, raw_b, a_log, dt_bias);)
      float *gates = records + i / layout.ratio * layout.size() + layout.gates(i % layout.ratio);
      gates[0] = expf(log_decay(raw_to_float(raw_a, p.gate_dtype), dt_bias, -expf(a_log)));
      gates[1] = p.beta_scale * sigmoid(raw_to_float(raw_b, p.gate_dtype));
      GDN_PROFILED(stamps.lap(profile::kGates);)
    };
    if (gate >= 0) ask_gates(gate);
    if constexpr (FUSED) {
      if (warp < tokens * layout.ratio) raw_z = raw(z_row(warp));
      if (!p.overlap) load_state();
    } else {
      load_state();
    }
    if (has) make(warp);
    if (gate >= 0) make_gates(gate);

    for (int group = warp + kWarps; group < groups; group += kWarps) {
      ask_old(group);
      if (tokens > 0) now = raw(input(group, 0));
      make(group);
    }
    if (warp == kWarps - 1) {
      for (int i = gate + 32; gate >= 0 && i < tokens * layout.ratio; i += 32) {
        ask_rates(i);
        ask_gates(i);
        make_gates(i);
      }
    }
  }

  // The convolution's new state of q or k: the last inputs of (old state, tokens), read anew when all have used them.
  __device__ __forceinline__ void keep(int group) const {
    const int tokens = MANY ? seq.count : 1, c = channel(group);
    const T *from = static_cast<const T *>(p.conv_in) + in_slot * p.conv_in_stride + c;
    T *to = static_cast<T *>(p.conv_out) + out_slot * p.conv_out_stride + c;
    Pack<T, 4> rows[kWidth - 1];    // all of them before any is replaced
#pragma unroll
    for (int j = 0; j < kWidth - 1; ++j) {
      const int t = tokens - (kWidth - 1) + j;
      rows[j] = *reinterpret_cast<const Pack<T, 4> *>(t < 0 ? from + (t + kWidth - 1) * p.channels : input(group, t));
    }
#pragma unroll
    for (int j = 0; j < kWidth - 1; ++j) *reinterpret_cast<Pack<T, 4> *>(to + j * p.channels) = rows[j];
  }

  // k.q of every token, when there are too many for each warp to make them for itself.
  __device__ __forceinline__ void products() const {
    for (int t = warp; t < seq.count; t += kWarps) {
      float *record = records + t * layout.size();
      const float4 q = *reinterpret_cast<const float4 *>(record + layout.q + 4 * lane);
      const float4 k = *reinterpret_cast<const float4 *>(record + layout.k + 4 * lane);
      const float sum = group_sum(fmaf(q.x, k.x, q.y * k.y) + fmaf(q.z, k.z, q.w * k.w));
      if (lane == 0) record[layout.kq()] = sum;
    }
  }

  // Row i of the output: value head head0 + i % ratio of token i / ratio.
  __device__ __forceinline__ const T *z_row(int i) const {
    return heads_at<T>(p.z, n, seq.first + i / layout.ratio, head0 + i % layout.ratio) + 4 * lane;
  }

  // The gated norm of o, which stands where v stood: a warp a row.
  __device__ __forceinline__ void norm() const {
    const int rows = (MANY ? seq.count : 1) * layout.ratio;
    Raw4<T> z = raw_z;
    float weight[4];
#pragma unroll
    for (int c = 0; c < 4; ++c) weight[c] = load_any(p.norm_weight, 4 * lane + c, p.norm_dtype);
    for (int i = warp; i < rows; i += kWarps) {
      if (i != warp) z = raw(z_row(i));
      const float4 o = *reinterpret_cast<const float4 *>(records + i / layout.ratio * layout.size() +
                                                         layout.v(i % layout.ratio) + 4 * lane);
      const float x[4] = {o.x, o.y, o.z, o.w};
      const float sum = group_sum(fmaf(o.x, o.x, o.y * o.y) + fmaf(o.z, o.z, o.w * o.w));
      const float scale = rsqrtf(sum * (1.f / kDim) + p.norm_eps);
      float y[4];
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const float gate = raw_to_float(z, c);
        y[c] = x[c] * scale * weight[c] * (p.sigmoid ? fast_sigmoid(gate) : fast_silu(gate));
      }
      store_pack<T, 4>(out_heads_at<T>(p.o, n, seq.first + i / layout.ratio, head0 + i % layout.ratio) + 4 * lane, y);
    }
  }
};

}  // namespace step
}  // namespace gdn
