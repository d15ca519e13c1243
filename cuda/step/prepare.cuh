// What a block does around the rule of its heads: before it, the tokens' q, k, v and gates into shared memory, through the
// convolution in the fused step; after it, the gated norm.
#pragma once

#include <type_traits>

#include "../common/convert.cuh"
#include "../common/math.cuh"
#include "../common/profile.cuh"
#include "../common/ptx.cuh"
#include "../common/sequences.cuh"
#include "lanes.cuh"
#include "raw.cuh"
#include "stream.cuh"

namespace gdn {
namespace step {

template <bool FUSED> using ParamsOf = std::conditional_t<FUSED, gdn_step_params, gdn_rule_params>;

__device__ __forceinline__ const gdn_heads &output_of(const gdn_rule_params &p) { return p.o; }
__device__ __forceinline__ const gdn_heads &output_of(const gdn_step_params &p) { return p.layer.out; }

// A token in shared memory, in floats: q, k, v of the block's value heads (in whose place o comes later), decay and beta
// a head, and k.q.
template <int K, int V> struct Record {
  int32_t ratio;
  static constexpr int q = 0, k = K;
  __device__ __forceinline__ int v(int h) const { return 2 * K + h * V; }
  __device__ __forceinline__ int gates(int h) const { return v(ratio) + 2 * h; }
  __device__ __forceinline__ int kq() const { return v(ratio) + 2 * ratio; }
  constexpr __host__ __device__ __forceinline__ int size() const { return 2 * K + ratio * V + (2 * ratio + 4) / 4 * 4; }
};

// A row of q or of a key, four elements a lane: divided by its norm, and q times its scale.
__device__ __forceinline__ void normalise(const gdn_common &p, bool key, float (&y)[4]) {
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

// A warp does K channels at a time, four a lane: q, k, or a part of a value head.
// CLUSTER: other blocks read the convolution's state of q and k too, so that it is stored last.
template <typename T, int K, int V, bool FUSED, bool CLUSTER, bool MANY> struct Prepare {
  static constexpr int kParts = V / K;    // of a value head
  static_assert(K <= 128 && V % K == 0);

  const ParamsOf<FUSED> &p;
  const Record<K, V> layout;
  float *records;
  int n;
  Tokens seq;
  int64_t in_slot, out_slot;
  int key_head, head0, warp, lane;
  GDN_PROFILED(profile::Stamps &stamps;)
  Raw4<T> raw_z[kParts] = {};    // of the first row that this warp will normalise

  // Whether this lane has channels. The others hold zeros.
  __device__ __forceinline__ bool active() const { return K == 128 || 4 * lane < K; }

  // Group 0 is q, group 1 is k, the others are the parts of the value heads. This lane's four channels.
  __device__ __forceinline__ int channel(int group) const {
    const int kk = p.common.num_k_heads * K;
    return (group == 0   ? key_head * K
            : group == 1 ? kk + key_head * K
                         : 2 * kk + (head0 * kParts + group - 2) * K) +
           4 * lane;
  }
  __device__ __forceinline__ int channels() const { return (2 * p.common.num_k_heads + kParts * p.common.num_v_heads) * K; }

  __device__ __forceinline__ const T *input(int group, int t) const {
    if constexpr (FUSED) {
      return heads_at<T>(p.layer.x, n, seq.first + t, 0) + channel(group);
    } else {
      const T *row = group == 0   ? heads_at<T>(p.q, n, seq.first + t, key_head)
                     : group == 1 ? heads_at<T>(p.k, n, seq.first + t, key_head)
                                  : heads_at<T>(p.v, n, seq.first + t, head0 + (group - 2) / kParts) + (group - 2) % kParts * K;
      return row + 4 * lane;
    }
  }

  __device__ __forceinline__ Raw4<T> raw(const T *p) const { return raw_load4(p, 0, active() ? 4 : 0, true); }

  __device__ __forceinline__ void put(float *record, int group, float (&y)[4]) const {
    if (group < 2) normalise(p.common, group == 1, y);
    if (active()) *reinterpret_cast<float4 *>(record + group * K + 4 * lane) = make_float4(y[0], y[1], y[2], y[3]);
  }

  // `load_state` runs between the first loads and their use.
  template <typename Load> __device__ __forceinline__ void operator()(Load &&load_state) {
    const int groups = 2 + layout.ratio * kParts, tokens = MANY ? seq.count : 1;
    RawTaps taps;
    Raw4<T> old[kWidth - 1], now = {};
    auto request_window = [&](int group) {
      if constexpr (FUSED) {
        const int c = channel(group);
        if (active()) taps.load(p.layer.conv_weight, c, p.layer.conv_dtype);
        else taps = {};
        const T *from = static_cast<const T *>(p.conv_in) + in_slot * p.conv_in_stride + c;
#pragma unroll
        for (int j = 0; j < kWidth - 1; ++j) old[j] = raw(from + j * channels());
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
            for (int j = 0; j < kWidth; ++j) sum = fmaf(taps.at(c, j, p.layer.conv_dtype), window[j][c], sum);
            y[c] = fast_silu(sum);
#pragma unroll
            for (int j = 0; j < kWidth - 1; ++j) window[j][c] = window[j + 1][c];
          }
        }
        put(records + t * layout.size(), group, y);
      }
      if constexpr (FUSED) {
        if ((!CLUSTER || group >= 2) && active()) {
          T *to = static_cast<T *>(p.conv_out) + out_slot * p.conv_out_stride + channel(group);
#pragma unroll
          for (int j = 0; j < kWidth - 1; ++j) store_pack<T, 4>(to + j * channels(), window[j]);
        }
      }
      GDN_PROFILED(stamps.lap(FUSED ? profile::kConvolve : profile::kNormalise);)
    };

    // Load a warp's first group, and the gates in the last warp.
    const bool has = warp < groups;    // without tokens the convolution's state may still have to move
    float a_log = 0.f, dt_bias = 0.f;
    const int gate = warp == kWarps - 1 && lane < tokens * layout.ratio ? lane : -1;
    const auto load_rates = [&](int i) {
      a_log = p.common.a_log[head0 + i % layout.ratio], dt_bias = static_cast<const float *>(p.common.dt_bias)[head0 + i % layout.ratio];
    };
    if (gate >= 0) load_rates(gate);
    if (has) request_window(warp);
    if constexpr (FUSED) {
      if (p.layer.overlap) load_state();    // not written by the kernel before this one
      ptx::grid_dependency_wait();
      ptx::grid_dependency_launch();
      GDN_PROFILED(stamps.lap(profile::kWaitKernel);)
    }
    // Load the first inputs and the gates, then the state.
    if (has && tokens > 0) now = raw(input(warp, 0));
    uint32_t raw_a = 0, raw_b = 0;
    auto load_gates = [&](int i) {
      const int64_t t = seq.first + i / layout.ratio;
      const int head = head0 + i % layout.ratio;
      raw_a = raw_load_any(p.common.a.ptr, heads_offset(p.common.a, n, t, head), p.common.gate_dtype);
      raw_b = raw_load_any(p.common.b.ptr, heads_offset(p.common.b, n, t, head), p.common.gate_dtype);
    };
    auto make_gates = [&](int i) {
      GDN_PROFILED(stamps.wait(profile::kWaitGates, raw_a, raw_b, a_log, dt_bias);)
      float *gates = records + i / layout.ratio * layout.size() + layout.gates(i % layout.ratio);
      gates[0] = expf(log_decay(raw_to_float(raw_a, p.common.gate_dtype), dt_bias, -expf(a_log)));
      gates[1] = p.common.beta_scale * sigmoid(raw_to_float(raw_b, p.common.gate_dtype));
      GDN_PROFILED(stamps.lap(profile::kGates);)
    };
    if (gate >= 0) load_gates(gate);
    if constexpr (FUSED) {
      if (warp < tokens * layout.ratio) load_z(warp, raw_z);
      if (!p.layer.overlap) load_state();
    } else {
      load_state();
    }
    // Compute the first group and the gates.
    if (has) make(warp);
    if (gate >= 0) make_gates(gate);

    // Further groups and gates.
    for (int group = warp + kWarps; group < groups; group += kWarps) {
      request_window(group);
      if (tokens > 0) now = raw(input(group, 0));
      make(group);
    }
    if (warp == kWarps - 1) {
      for (int i = gate + 32; gate >= 0 && i < tokens * layout.ratio; i += 32) {
        load_rates(i);
        load_gates(i);
        make_gates(i);
      }
    }
  }

  // The convolution's new state of q or k: the last inputs of (old state, tokens), read again after all blocks have used them.
  __device__ __forceinline__ void store_window(int group) const {
    if (!active()) return;
    const int tokens = MANY ? seq.count : 1, c = channel(group);
    const T *from = static_cast<const T *>(p.conv_in) + in_slot * p.conv_in_stride + c;
    T *to = static_cast<T *>(p.conv_out) + out_slot * p.conv_out_stride + c;
    Pack<T, 4> rows[kWidth - 1];    // all of them before any is replaced
#pragma unroll
    for (int j = 0; j < kWidth - 1; ++j) {
      const int t = tokens - (kWidth - 1) + j;
      rows[j] = *reinterpret_cast<const Pack<T, 4> *>(t < 0 ? from + (t + kWidth - 1) * channels() : input(group, t));
    }
#pragma unroll
    for (int j = 0; j < kWidth - 1; ++j) *reinterpret_cast<Pack<T, 4> *>(to + j * channels()) = rows[j];
  }

  // k.q of every token, where each warp would need too long to compute them for itself.
  __device__ __forceinline__ void products() const {
    for (int t = warp; t < seq.count; t += kWarps) {
      float *record = records + t * layout.size();
      float4 q = {}, k = {};
      if (active()) {
        q = *reinterpret_cast<const float4 *>(record + layout.q + 4 * lane);
        k = *reinterpret_cast<const float4 *>(record + layout.k + 4 * lane);
      }
      const float sum = group_sum(fmaf(q.x, k.x, q.y * k.y) + fmaf(q.z, k.z, q.w * k.w));
      if (lane == 0) record[layout.kq()] = sum;
    }
  }

  // Row i of the output: value head head0 + i % ratio of token i / ratio.
  __device__ __forceinline__ void load_z(int i, Raw4<T> (&z)[kParts]) const {
    const T *row = heads_at<T>(p.layer.z, n, seq.first + i / layout.ratio, head0 + i % layout.ratio) + 4 * lane;
#pragma unroll
    for (int part = 0; part < kParts; ++part) z[part] = raw(row + part * K);
  }

  // The gated norm of o, which stands where v stood: a warp a row.
  __device__ __forceinline__ void norm() const {
    const int rows = (MANY ? seq.count : 1) * layout.ratio;
    Raw4<T> z[kParts];
    float weight[kParts][4];
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      z[part] = raw_z[part];
#pragma unroll
      for (int c = 0; c < 4; ++c)
        weight[part][c] = active() ? load_any(p.layer.norm_weight, part * K + 4 * lane + c, p.layer.norm_dtype) : 0.f;
    }
    for (int i = warp; i < rows; i += kWarps) {
      if (i != warp) load_z(i, z);
      const float *row = records + i / layout.ratio * layout.size() + layout.v(i % layout.ratio) + 4 * lane;
      float x[kParts][4], squares = 0.f;
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        const float4 o = active() ? *reinterpret_cast<const float4 *>(row + part * K) : float4{};
        x[part][0] = o.x, x[part][1] = o.y, x[part][2] = o.z, x[part][3] = o.w;
        squares += fmaf(x[part][0], x[part][0], x[part][1] * x[part][1]) + fmaf(x[part][2], x[part][2], x[part][3] * x[part][3]);
      }
      const float scale = rsqrtf(group_sum(squares) * (1.f / V) + p.layer.norm_eps);
      T *out = out_heads_at<T>(p.layer.out, n, seq.first + i / layout.ratio, head0 + i % layout.ratio) + 4 * lane;
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        float y[4];
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          const float gate = raw_to_float(z[part], c);
          y[c] = x[part][c] * scale * weight[part][c] * (p.layer.sigmoid ? fast_sigmoid(gate) : fast_silu(gate));
        }
        if (active()) store_pack<T, 4>(out + part * K, y);
      }
    }
  }
};

}  // namespace step
}  // namespace gdn
