// The gated delta rule in chunk form, all in f32: the precise path, without tensor cores.
//
// A block owns VT value rows of one (sequence, value head) and walks its chunks of C tokens in order, the state tile in
// shared memory from first to last. With c the running sum of the log decays inside a chunk (inclusive):
//   1. one product of [Q; K] (2C rows) with [K; S] (C + VT rows) over the key dimension gives Q K^T, K K^T, Q S^T, K S^T
//   2. X = beta (V - e^c K S^T), and (I + L) V' = X is solved by forward substitution, one thread a value row, with
//      L_ij = beta_i (k_i . k_j) e^(c_i - c_j) for i > j. No inverse is formed: with repeated keys it can be huge where
//      its product with X is not
//   3. O = e^c Q S^T + tril(Q K^T e^(c_i - c_j)) V'
//   4. S <- e^(c_last) S + (V' e^(c_last - c))^T K
// Exponents are differences <= 0 that are masked before the exponential. c is kept as a sum of two floats: after a
// strong decay its own rounding would otherwise be the error of small differences.
#pragma once

#include "../common/convert.cuh"
#include "../common/host.cuh"
#include "../common/math.cuh"
#include "../common/profile.cuh"
#include "../common/sequences.cuh"
#include "chunked.h"

namespace gdn {
namespace chunked {

constexpr int kInFlight = 4;    // q and k rows a warp asks for at once

struct Plan {
  int32_t v_tiles;
  int32_t k_pad;     // K rounded up to four
  int32_t pitch;     // floats from one shared row to the next: an odd number of 16-byte units, so that eight
                     // consecutive rows read at the same column hit eight different bank groups
  bool vec_qk, vec_v, vec_o, vec_state;
  bool keep_state;
  GDN_PROFILED(profile::Target profile;)
};

template <int C, int VT> struct Shape {
  static constexpr int kRowThreads = 2 * C / 4;          // threads along [Q; K]
  static constexpr int kColThreads = (C + VT) / 4;       // threads along [K; S]
  static constexpr int kThreads = kRowThreads * kColThreads;
  static constexpr int kRows = 2 * C + VT;               // Q, K, S in one array
  static constexpr int kVPitch = VT + 4, kCPitch = C + 4;
  static_assert(kRowThreads % 8 == 0 && kColThreads % 4 == 0 && kThreads % 32 == 0, "a warp is 8 x 4 threads");
  static constexpr int64_t bytes(int pitch) {
    return sizeof(float) * (static_cast<int64_t>(kRows) * pitch + 3 * C * kVPitch + 2 * C * kCPitch + 5 * C);
  }
};

template <typename T, typename ST, int C, int VT>
__global__ void __launch_bounds__(Shape<C, VT>::kThreads, 1)
chunked_kernel(const __grid_constant__ gdn_rule_params p, const __grid_constant__ Plan plan) {
  using S = Shape<C, VT>;
  extern __shared__ __align__(16) float smem[];
  GDN_PROFILED(profile::Stamps stamps(plan.profile, profile::kChunked);)
  float *const q_rows = smem, *const k_rows = q_rows + C * plan.pitch, *const s_rows = k_rows + C * plan.pitch;
  float *const x = s_rows + VT * plan.pitch;          // V, then X, then V'          [C][VT]
  float *const w = x + C * S::kVPitch;                // V' e^(c_last - c)           [C][VT]
  float *const o = w + C * S::kVPitch;                // e^c Q S^T                   [C][VT]
  float *const l = o + C * S::kVPitch;                // L transposed: l[j][i]       [C][C]
  float *const a = l + C * S::kCPitch;                // masked Q K^T, transposed    [C][C]
  float *const c_hi = a + C * S::kCPitch, *const c_lo = c_hi + C, *const beta = c_lo + C;
  float *const decay = beta + C, *const rest = decay + C;    // e^c and e^(c_last - c)

  int block = blockIdx.x;
  const int row0 = block % plan.v_tiles * VT;
  block /= plan.v_tiles;
  const int head = block % p.num_v_heads, n = block / p.num_v_heads;
  const int key_head = head / (p.num_v_heads / p.num_k_heads);
  const int rows = min(VT, p.head_v - row0);
  const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32;

  const Tokens seq = tokens_of(p.seqs, n);
  const int64_t in_slot = slot_of(p.in_slots, n), out_slot = slot_of(p.out_slots, n);
  GDN_PROFILED(stamps.lap(profile::kSetup);)
  if (in_slot < 0 || out_slot < 0) {    // padding
    for (int64_t i = tid; i < static_cast<int64_t>(seq.count) * rows; i += S::kThreads)
      out_heads_at<T>(p.o, n, seq.first + i / rows, head)[row0 + i % rows] = from_float<T>(0.f);
    GDN_PROFILED(stamps.lap(profile::kPadding);)
    return;
  }
  if (seq.count <= 0 && plan.keep_state) return;

  const int k_vecs = plan.k_pad / 4;
  {
    const ST *in = static_cast<const ST *>(p.state_in) + in_slot * p.in_slots.slot_stride +
                      (static_cast<int64_t>(head) * p.head_v + row0) * p.head_k;
    for (int i = tid; i < VT * k_vecs; i += S::kThreads) {
      const int row = i / k_vecs, col = i % k_vecs * 4;
      float v[4] = {0.f, 0.f, 0.f, 0.f};
      if (row < rows) load4(in + row * p.head_k, col, p.head_k, plan.vec_state, v);
      *reinterpret_cast<float4 *>(s_rows + row * plan.pitch + col) = make_float4(v[0], v[1], v[2], v[3]);
    }
    GDN_PROFILED(stamps.lap(profile::kLoadState);)
  }
  const float neg_exp_a = -expf(p.a_log[head]), dt_bias = p.dt_bias[head];

  // This thread's part of product 1: rows ti + 4 strides and columns tj + 4 strides, interleaved so that the eight
  // (four) threads of a warp along a side read consecutive shared rows.
  const int ti = warp % (S::kRowThreads / 8) * 8 + lane % 8, tj = warp / (S::kRowThreads / 8) * 4 + lane / 8;

  for (int t0 = 0; t0 < seq.count; t0 += C) {
    const int count = min(C, seq.count - t0);
    const int64_t first = seq.first + t0;
    GDN_PROFILED(stamps.at(t0);)

    // Load: q and k rows normalised, a warp a row; zero past the end, which makes those tokens
    // leave everything as it is.
    for (int r0 = kInFlight * warp; r0 < 2 * C; r0 += kInFlight * (S::kThreads / 32)) {
      Raw4<T> raw[kInFlight][2];
#pragma unroll
      for (int u = 0; u < kInFlight; ++u) {
        const int t = (r0 + u) % C;
        const T *row = heads_at<T>(r0 + u < C ? p.q : p.k, n, first + min(t, count - 1), key_head);
#pragma unroll
        for (int m = 0; m < 2; ++m)
          raw[u][m] = raw_load4(row, 4 * lane + 128 * m, t < count ? p.head_k : 0, plan.vec_qk);
      }
      GDN_PROFILED(stamps.lap(profile::kLoadQkv);)
      GDN_PROFILED(stamps.wait(profile::kWaitQkv, raw);)
#pragma unroll
      for (int u = 0; u < kInFlight; ++u) {
        float v[2][4];
        SquareSum sum;
        Factor norm = {1.f, 0.f};
#pragma unroll
        for (int m = 0; m < 2; ++m)
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            v[m][i] = raw_to_float(raw[u][m], i);
            sum.add_square(v[m][i]);
          }
        if (p.l2norm) {
#pragma unroll
          for (int d = 16; d > 0; d /= 2) sum.add_lane(d);
          norm = inverse_root(sum, p.l2_eps);
        }
        if (r0 + u < C) norm = {norm.hi * p.scale, norm.lo * p.scale};
        if ((r0 + u) % C >= count) norm = {0.f, 0.f};    // with l2_eps 0 it is infinite there
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          const int col = 4 * lane + 128 * m;
          if (col < plan.k_pad)
            *reinterpret_cast<float4 *>(q_rows + (r0 + u) * plan.pitch + col) =
                make_float4(norm.times(v[m][0]), norm.times(v[m][1]), norm.times(v[m][2]), norm.times(v[m][3]));
        }
      }
      GDN_PROFILED(stamps.lap(profile::kNormalise);)
    }
    for (int i = tid; i < C * (VT / 4); i += S::kThreads) {
      const int t = i / (VT / 4), col = i % (VT / 4) * 4;
      Raw4<T> raw = {};
      if (t < count) raw = raw_load4(heads_at<T>(p.v, n, first + t, head) + row0, col, rows, plan.vec_v);
      *reinterpret_cast<float4 *>(x + t * S::kVPitch + col) =
          make_float4(raw_to_float(raw, 0), raw_to_float(raw, 1), raw_to_float(raw, 2), raw_to_float(raw, 3));
    }
    GDN_PROFILED(stamps.lap(profile::kLoadV);)
    if (warp == S::kThreads / 32 - 1) {    // gates, a lane a token
      float hi = 0.f, lo = 0.f, b = 0.f;
      if (lane < count) {
        const uint32_t raw_a = raw_load_any(p.a.ptr, heads_offset(p.a, n, first + lane, head), p.gate_dtype);
        const uint32_t raw_b = raw_load_any(p.b.ptr, heads_offset(p.b, n, first + lane, head), p.gate_dtype);
        GDN_PROFILED(stamps.wait(profile::kWaitGates, raw_a, raw_b);)
        hi = log_decay(raw_to_float(raw_a, p.gate_dtype), dt_bias, neg_exp_a);
        if (hi < -1e30f) hi = -1e30f;    // the exponential is zero long before; -inf - -inf would be NaN
        b = p.beta_scale * sigmoid(raw_to_float(raw_b, p.gate_dtype));
      }
#pragma unroll
      for (int d = 1; d < C; d *= 2) {
        const float up_hi = __shfl_up_sync(0xffffffffu, hi, d), up_lo = __shfl_up_sync(0xffffffffu, lo, d);
        if (lane >= d) {
          float s, e;
          two_sum(hi, up_hi, s, e);
          e += lo + up_lo;
          hi = __fadd_rn(s, e);
          lo = __fsub_rn(e, __fsub_rn(hi, s));
        }
      }
      const float last_hi = __shfl_sync(0xffffffffu, hi, C - 1), last_lo = __shfl_sync(0xffffffffu, lo, C - 1);
      if (lane < C) {
        c_hi[lane] = hi;
        c_lo[lane] = lo;
        beta[lane] = b;
        decay[lane] = expf(hi);
        rest[lane] = expf(fminf((last_hi - hi) + (last_lo - lo), 0.f));
      }
      GDN_PROFILED(stamps.lap(profile::kGates);)
    }
    __syncthreads();
    GDN_PROFILED(stamps.lap(profile::kBarrier);)

    {    // Product 1, then X, L and A from it.
      // The sums of K K^T keep their rounding (Kahan, four products at a time): it would be the same for every pair of
      // repeated keys and add up over the chunk. They stand where the row is past Q and the column may be before S.
      constexpr int kKeyRows = C / S::kRowThreads, kKeyCols = (C - 1) / S::kColThreads + 1;
      float acc[4][4] = {}, lost[4 - kKeyRows][kKeyCols] = {};
      const float *left = q_rows + ti * plan.pitch, *right = k_rows + tj * plan.pitch;
#pragma unroll 2
      for (int k = 0; k < plan.k_pad; k += 4) {
        float4 f[4], g[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          f[i] = *reinterpret_cast<const float4 *>(left + i * S::kRowThreads * plan.pitch + k);
          g[i] = *reinterpret_cast<const float4 *>(right + i * S::kColThreads * plan.pitch + k);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            if (i >= kKeyRows && j < kKeyCols) {
              const float xy = fmaf(f[i].x, g[j].x, f[i].y * g[j].y);
              const float y = fmaf(f[i].z, g[j].z, fmaf(f[i].w, g[j].w, xy));
              add_kahan(acc[i][j], lost[i - kKeyRows][j], y);
            } else {
              acc[i][j] = fmaf(f[i].x, g[j].x, acc[i][j]);
              acc[i][j] = fmaf(f[i].y, g[j].y, acc[i][j]);
              acc[i][j] = fmaf(f[i].z, g[j].z, acc[i][j]);
              acc[i][j] = fmaf(f[i].w, g[j].w, acc[i][j]);
            }
          }
      }
#pragma unroll
      for (int m = 0; m < 4; ++m)
#pragma unroll
        for (int u = 0; u < 4; ++u) {
          const int row = ti + m * S::kRowThreads, col = tj + u * S::kColThreads;
          const bool is_q = row < C;
          const int i = is_q ? row : row - C;
          if (col < C) {
            const int j = col;
            float e = 0.f;
            if (is_q ? i >= j : i > j) e = acc[m][u] * expf(fminf((c_hi[i] - c_hi[j]) + (c_lo[i] - c_lo[j]), 0.f));
            if (is_q) {
              a[j * S::kCPitch + i] = e;
            } else {
              l[j * S::kCPitch + i] = beta[i] * e;
            }
          } else {
            const int at = i * S::kVPitch + col - C;
            if (is_q) {
              o[at] = decay[i] * acc[m][u];
            } else {
              x[at] = beta[i] * (x[at] - decay[i] * acc[m][u]);
            }
          }
        }
    }
    GDN_PROFILED(stamps.lap(profile::kProduct);)
    __syncthreads();
    GDN_PROFILED(stamps.lap(profile::kBarrier);)

    if (tid < VT) {    // Forward substitution, a thread a value row, eight tokens at a time.
      float *const xs = x + tid, *const ws = w + tid;
      for (int i0 = 0; i0 < C; i0 += 8) {
        float y[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) y[i] = xs[(i0 + i) * S::kVPitch];
        // Kept as loops: fully unrolled, the compiler loads all of L ahead and spills.
#pragma unroll 4
        for (int j = 0; j < i0; ++j) {
          const float v = xs[j * S::kVPitch];
          float f[8];
          *reinterpret_cast<float4 *>(f) = *reinterpret_cast<const float4 *>(l + j * S::kCPitch + i0);
          *reinterpret_cast<float4 *>(f + 4) = *reinterpret_cast<const float4 *>(l + j * S::kCPitch + i0 + 4);
#pragma unroll
          for (int i = 0; i < 8; ++i) y[i] = fmaf(-f[i], v, y[i]);
        }
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          xs[(i0 + j) * S::kVPitch] = y[j];
          ws[(i0 + j) * S::kVPitch] = y[j] * rest[i0 + j];
#pragma unroll
          for (int i = j + 1; i < 8; ++i) y[i] = fmaf(-l[(i0 + j) * S::kCPitch + i0 + i], y[j], y[i]);
        }
      }
      GDN_PROFILED(stamps.lap(profile::kSubstitution);)
    }
    __syncthreads();
    GDN_PROFILED(stamps.lap(profile::kBarrier);)

    // State tiles of 4 x 4 first, then output tiles of 1 x 4; both read V' and neither writes what the other reads.
    const int state_tiles = VT / 4 * k_vecs;
    const float last = decay[C - 1];
    for (int i = tid; i < state_tiles; i += S::kThreads) {
      const int row = i / k_vecs * 4, col = i % k_vecs * 4;
      float acc[4][4];
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const float4 s = *reinterpret_cast<const float4 *>(s_rows + (row + r) * plan.pitch + col);
        acc[r][0] = last * s.x, acc[r][1] = last * s.y, acc[r][2] = last * s.z, acc[r][3] = last * s.w;
      }
#pragma unroll 4
      for (int t = 0; t < C; ++t) {
        const float4 f = *reinterpret_cast<const float4 *>(w + t * S::kVPitch + row);
        const float4 g = *reinterpret_cast<const float4 *>(k_rows + t * plan.pitch + col);
        const float fs[4] = {f.x, f.y, f.z, f.w};
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          acc[r][0] = fmaf(fs[r], g.x, acc[r][0]);
          acc[r][1] = fmaf(fs[r], g.y, acc[r][1]);
          acc[r][2] = fmaf(fs[r], g.z, acc[r][2]);
          acc[r][3] = fmaf(fs[r], g.w, acc[r][3]);
        }
      }
#pragma unroll
      for (int r = 0; r < 4; ++r)
        *reinterpret_cast<float4 *>(s_rows + (row + r) * plan.pitch + col) =
            make_float4(acc[r][0], acc[r][1], acc[r][2], acc[r][3]);
    }
    GDN_PROFILED(stamps.lap(profile::kUpdateState);)
    for (int i = tid; i < C * (VT / 4); i += S::kThreads) {
      const int t = i / (VT / 4), col = i % (VT / 4) * 4;
      if (t >= count) continue;
      const float4 s = *reinterpret_cast<const float4 *>(o + t * S::kVPitch + col);
      float acc[4] = {s.x, s.y, s.z, s.w};
      for (int j = 0; j <= t; ++j) {
        const float f = a[j * S::kCPitch + t];
        const float4 g = *reinterpret_cast<const float4 *>(x + j * S::kVPitch + col);
        acc[0] = fmaf(f, g.x, acc[0]);
        acc[1] = fmaf(f, g.y, acc[1]);
        acc[2] = fmaf(f, g.z, acc[2]);
        acc[3] = fmaf(f, g.w, acc[3]);
      }
      store4(out_heads_at<T>(p.o, n, first + t, head) + row0, col, rows, plan.vec_o, acc);
    }
    GDN_PROFILED(stamps.lap(profile::kOutput);)
    __syncthreads();
    GDN_PROFILED(stamps.lap(profile::kBarrier);)
  }

  __syncthreads();    // for a sequence without chunks: the state is stored by other threads than loaded it
  GDN_PROFILED(stamps.lap(profile::kBarrier);)
  ST *out = static_cast<ST *>(p.state_out) + out_slot * p.out_slots.slot_stride +
               (static_cast<int64_t>(head) * p.head_v + row0) * p.head_k;
  for (int i = tid; i < rows * k_vecs; i += S::kThreads) {
    const int row = i / k_vecs, col = i % k_vecs * 4;
    const float4 s = *reinterpret_cast<const float4 *>(s_rows + row * plan.pitch + col);
    const float v[4] = {s.x, s.y, s.z, s.w};
    store4(out + row * p.head_k, col, p.head_k, plan.vec_state, v);
  }
  GDN_PROFILED(stamps.lap(profile::kStoreState);)
}

template <typename T, typename ST, int C, int VT>
int launch(const gdn_rule_params &p, int optin, Plan plan, cudaStream_t stream) {
  using S = Shape<C, VT>;
  plan.v_tiles = static_cast<int32_t>(ceil_div(p.head_v, VT));
  const int64_t blocks = static_cast<int64_t>(p.seqs.num_seqs) * p.num_v_heads * plan.v_tiles;
  if (blocks > kMaxBlocks) return GDN_BAD_LENGTH;
  const int64_t bytes = S::bytes(plan.pitch);
  GDN_PROFILED(if (const int status = profile::attach(plan.profile, blocks, S::kThreads)) return status;)
  if (const int status = allow_shared_memory(&chunked_kernel<T, ST, C, VT>, bytes, optin)) return status;
  chunked_kernel<T, ST, C, VT><<<static_cast<unsigned>(blocks), S::kThreads, bytes, stream>>>(p, plan);
  return launched();
}

template <typename T, typename ST> int choose_as(const gdn_rule_params &p, cudaStream_t stream) {
  int sms = 0, optin = 0;
  if (const int status = sm_count(&sms)) return status;
  if (const int status = device_attribute<cudaDevAttrMaxSharedMemoryPerBlockOptin>(&optin)) return status;
  Plan plan;
  plan.k_pad = (p.head_k + 3) / 4 * 4;
  plan.pitch = (plan.k_pad / 4 | 1) * 4;
  plan.vec_qk = p.head_k % 4 == 0 && aligned_rows(p.q, 4, p.io_dtype) && aligned_rows(p.k, 4, p.io_dtype);
  plan.vec_v = p.head_v % 4 == 0 && aligned_rows(p.v, 4, p.io_dtype);
  plan.vec_o = p.head_v % 4 == 0 && aligned_rows(p.o, 4, p.io_dtype);
  plan.vec_state = p.head_k % 4 == 0 && aligned_state(p, 4);
  plan.keep_state = state_in_place(p.state_in, p.state_out, p.in_slots, p.out_slots);
  // Wide tiles repeat less of K K^T and Q K^T: they win as soon as they alone fill the card (measured, see README.md).
  const int64_t wide = static_cast<int64_t>(p.seqs.num_seqs) * p.num_v_heads * ceil_div(p.head_v, 64);
  if (p.head_v > 32 && wide * 4 >= sms * 3LL && Shape<16, 64>::bytes(plan.pitch) <= optin)
    return launch<T, ST, 16, 64>(p, optin, plan, stream);
  if (Shape<32, 32>::bytes(plan.pitch) <= optin) return launch<T, ST, 32, 32>(p, optin, plan, stream);
  return launch<T, ST, 16, 32>(p, optin, plan, stream);
}

template <typename T> int choose(const gdn_rule_params &p, cudaStream_t stream) {
  return with_state_dtype(p.state_dtype,
                          [&](auto state) { return choose_as<T, typename decltype(state)::type>(p, stream); });
}

}  // namespace chunked
}  // namespace gdn
