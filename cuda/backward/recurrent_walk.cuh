// Token by token, once forward and once backward, with the state or its gradient in registers:
//
//   forward    y = v - e^g S k        d = beta y       S <- e^g S + d k^T
//   backward   dS' = dS + do q^T      dd = dS' k       dv = beta dd          dS <- e^g (dS' - dv k^T)
//
// No row of either needs another row, so that a block owns 32 rows of a (sequence, value head) and leaves y, or dd and dv, of every
// token, and the state, or its gradient, at the borders of chunks. All that sums over rows is left to recurrent_chunk.cuh.
#pragma once

#include "../common/convert.cuh"
#include "../common/launch.cuh"
#include "../common/math.cuh"
#include "../common/sequences.cuh"
#include "recurrent_plan.h"

namespace gdn {
namespace backward {

constexpr int kLanes = 8, kRows = 2;              // lanes that share a row of the state, rows of a thread
constexpr int kConsumers = 4, kProducers = 4;     // warps that hold the state, and that prepare the next stage of tokens
constexpr int kTile = kConsumers * (32 / kLanes) * kRows;    // value rows of a block
constexpr int kWalkThreads = 32 * (kConsumers + kProducers);

enum Walk { kForward, kBorders, kBackward };

template <int E, Walk WALK> struct Stage {
  static constexpr int kK = kLanes * E;                              // key elements, padded
  static constexpr int kTokens = E > 16 ? 8 : 16;                    // so that two stages stay under 48 KB
  static constexpr int kQ = kK, kV = WALK == kBackward ? 2 * kK : kK, kGates = kV + kTile, kRecord = kGates + 4;
  static constexpr int kParts = (kK + 127) / 128, kEach = kTokens / kProducers;
  static constexpr int64_t kBytes = int64_t{2} * kTokens * kRecord * sizeof(float);
  static_assert(kBytes <= 48 * 1024 && kTile == 32, "stages fit, and a lane has a value of each token");
};

// The tokens of a sequence in this launch, and where they are in the workspace.
struct Span {
  Tokens seq;
  int begin, end;
  int64_t row, chunk, factor;    // of token `begin`; of the sequence's first token
};
__device__ __forceinline__ Span span_of(const gdn_sequences &s, const Plan &plan, int n, bool whole) {
  Span x;
  x.seq = tokens_of(s, n);
  const int64_t begin = whole ? 0 : static_cast<int64_t>(plan.section) * plan.section_tokens;
  x.begin = static_cast<int>(min(begin, static_cast<int64_t>(x.seq.count)));
  x.end = whole ? x.seq.count : static_cast<int>(min(begin + plan.section_tokens, static_cast<int64_t>(x.seq.count)));
  x.row = plan.by_rows ? x.seq.first : static_cast<int64_t>(n) * plan.section_tokens;
  x.chunk = plan.by_rows ? x.seq.first / plan.chunk + n : static_cast<int64_t>(n) * ((plan.section_tokens + plan.chunk - 1) / plan.chunk);
  x.factor = s.cu_seqlens ? x.seq.first : static_cast<int64_t>(n) * s.tokens_per_seq;
  return x;
}

// Reciprocal norms, a warp a token and key head.
template <typename T>
__global__ void __launch_bounds__(256) factors_kernel(const __grid_constant__ gdn_rule_backward_params p, const __grid_constant__ Plan plan) {
  const int64_t item = static_cast<int64_t>(blockIdx.x) * 8 + threadIdx.x / 32;
  const gdn_common &c = p.common;
  if (item >= plan.tokens * c.num_k_heads) return;
  const int64_t token = item / c.num_k_heads;
  const int head = static_cast<int>(item % c.num_k_heads), lane = threadIdx.x % 32;
  const bool packed = c.seqs.cu_seqlens != nullptr;
  const int n = packed ? 0 : static_cast<int>(token / c.seqs.tokens_per_seq);
  const int64_t t = packed ? token : token % c.seqs.tokens_per_seq;
  const T *k = heads_at<T>(p.k, n, t, head), *q = heads_at<T>(p.q, n, t, head);
  SquareSum kk;
  float qq = 0.f;
  for (int i = lane; i < c.head_k; i += 32) {
    const float x = to_float(q[i], c.io_dtype);
    kk.add_square(to_float(k[i], c.io_dtype));
    qq = fmaf(x, x, qq);
  }
#pragma unroll
  for (int d = 16; d > 0; d /= 2) kk.add_lane(d);
  qq = group_sum(qq);
  const Factor f = c.l2norm ? inverse_root(kk, c.l2_eps) : Factor{1.f, 0.f};
  if (lane == 0) plan.factors[item] = make_float4(f.hi, f.lo, c.l2norm ? rsqrtf(qq + c.l2_eps) : 1.f, 0.f);
}

// Prepares `count` tokens from `first` on, forward or backward: this warp every kProducers-th.
template <typename T, int E, Walk WALK>
__device__ __forceinline__ void stage_tokens(const gdn_rule_backward_params &p, const Plan &plan, const Span &span, int n, int head, int row0,
                                             int first, int count, int worker, bool vec, float *stage) {
  using S = Stage<E, WALK>;
  constexpr bool kBack = WALK == kBackward;
  const gdn_common &c = p.common;
  const int lane = threadIdx.x % 32, key_head = head / (c.num_v_heads / c.num_k_heads);
  Raw4<T> k[S::kEach][S::kParts], q[S::kEach][S::kParts];
  float4 factors[S::kEach];
  T value[S::kEach] = {};
  float g[S::kEach], beta[S::kEach];
#pragma unroll
  for (int u = 0; u < S::kEach; ++u) {
    const int j = worker + u * kProducers;
    if (j >= count) break;
    const int t = kBack ? first - j : first + j;
    const int64_t token = span.seq.first + t;
    const T *kp = heads_at<T>(p.k, n, token, key_head), *qp = heads_at<T>(p.q, n, token, key_head);
#pragma unroll
    for (int m = 0; m < S::kParts; ++m) {
      k[u][m] = raw_load4(kp, 4 * lane + 128 * m, c.head_k, vec);
      if (kBack) q[u][m] = raw_load4(qp, 4 * lane + 128 * m, c.head_k, vec);
    }
    factors[u] = plan.factors[(span.factor + t) * c.num_k_heads + key_head];
    if (row0 + lane < c.head_v) value[u] = heads_at<T>(kBack ? p.d_o : p.v, n, token, head)[row0 + lane];
    g[u] = *heads_at<float>(c.a, n, token, head), beta[u] = *heads_at<float>(c.b, n, token, head);
  }
#pragma unroll
  for (int u = 0; u < S::kEach; ++u) {
    const int j = worker + u * kProducers;
    if (j >= count) break;
    float *record = stage + j * S::kRecord;
    const Factor f = {factors[u].x, factors[u].y};
#pragma unroll
    for (int m = 0; m < S::kParts; ++m) {
      const int i = 4 * lane + 128 * m;
      if (i >= S::kK) continue;
      float x[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) x[e] = f.times(raw_to_float(k[u][m], e, c.io_dtype));
      *reinterpret_cast<float4 *>(record + i) = make_float4(x[0], x[1], x[2], x[3]);
      if (kBack) {
#pragma unroll
        for (int e = 0; e < 4; ++e) x[e] = raw_to_float(q[u][m], e, c.io_dtype) * (factors[u].z * c.scale);
        *reinterpret_cast<float4 *>(record + S::kQ + i) = make_float4(x[0], x[1], x[2], x[3]);
      }
    }
    record[S::kV + lane] = row0 + lane < c.head_v ? to_float(value[u], c.io_dtype) : 0.f;
    if (lane == 0) record[S::kGates] = expf(g[u]), record[S::kGates + 1] = beta[u];
  }
}

// This thread's rows of a state [head_v, head_k] from or to memory; zero where there is none.
template <int E> struct State {
  float x[kRows][E];
  int row, part;    // the first of its rows; which eighth of a row

  __device__ __forceinline__ void load(const float *from, const gdn_common &c, bool vec) {
#pragma unroll
    for (int r = 0; r < kRows; ++r)
#pragma unroll
      for (int j = 0; j < E / 4; ++j) {
        float y[4] = {};
        if (from && row + r < c.head_v) load4(from + static_cast<int64_t>(row + r) * c.head_k, 4 * (part + kLanes * j), c.head_k, vec, y);
#pragma unroll
        for (int e = 0; e < 4; ++e) x[r][4 * j + e] = y[e];
      }
  }
  __device__ __forceinline__ void store(float *to, const gdn_common &c, bool vec) const {
#pragma unroll
    for (int r = 0; r < kRows; ++r)
#pragma unroll
      for (int j = 0; j < E / 4; ++j) {
        const float y[4] = {x[r][4 * j], x[r][4 * j + 1], x[r][4 * j + 2], x[r][4 * j + 3]};
        if (row + r < c.head_v) store4(to + static_cast<int64_t>(row + r) * c.head_k, 4 * (part + kLanes * j), c.head_k, vec, y);
      }
  }
  // Sums over the lanes of a row of x times k.
  __device__ __forceinline__ void dot(const float (&k)[E], float (&sum)[kRows]) const {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      float y[2] = {0.f, 0.f};    // two chains, to halve their latency
#pragma unroll
      for (int i = 0; i < E; ++i) y[i & 1] = fmaf(x[r][i], k[i], y[i & 1]);
      sum[r] = y[0] + y[1];
    }
#pragma unroll
    for (int d = kLanes / 2; d > 0; d /= 2)
#pragma unroll
      for (int r = 0; r < kRows; ++r) sum[r] += __shfl_xor_sync(0xffffffffu, sum[r], d);
  }
};

template <int E> __device__ __forceinline__ void read_record(const float *from, int part, float (&x)[E]) {
#pragma unroll
  for (int j = 0; j < E / 4; ++j)
    *reinterpret_cast<float4 *>(&x[4 * j]) = *reinterpret_cast<const float4 *>(from + 4 * (part + kLanes * j));
}

// One function: the state is in registers of all its parts.
template <typename T, int E, Walk WALK>
__global__ void __launch_bounds__(kWalkThreads)
    walk_kernel(const __grid_constant__ gdn_rule_backward_params p, const __grid_constant__ Plan plan, int32_t tiles, bool vec) {
  using S = Stage<E, WALK>;
  constexpr bool kBack = WALK == kBackward;
  extern __shared__ __align__(16) float smem[];
  const gdn_common &c = p.common;
  const int tile = blockIdx.x % tiles, head = blockIdx.x / tiles % c.num_v_heads, n = blockIdx.x / tiles / c.num_v_heads;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row0 = tile * kTile;
  const bool consumer = warp < kConsumers;
  const Span span = span_of(c.seqs, plan, n, WALK == kBorders);
  const int tokens = span.end - span.begin;
  if (tokens == 0 && (!kBack || plan.section > 0)) return;

  // Which state the section begins with, and where the last one goes.
  const int64_t size = static_cast<int64_t>(c.head_v) * c.head_k, item = (static_cast<int64_t>(n) * c.num_v_heads + head) * size;
  const int64_t all = static_cast<int64_t>(c.seqs.num_seqs) * c.num_v_heads * size;
  const auto at = [&](const float *states) { return states ? states + item : nullptr; };
  State<E> state;
  state.part = lane % kLanes, state.row = row0 + (warp * (32 / kLanes) + lane / kLanes) * kRows;
  if (consumer) {
    if (kBack) state.load(span.end == span.seq.count ? at(p.d_state_out) : plan.carry + item, c, vec);
    else if (WALK == kBorders || plan.section == 0) state.load(at(static_cast<const float *>(c.state_in)), c, vec);
    else state.load(plan.borders + (plan.section - 1) * all + item, c, vec);
  }

  const int first = kBack ? span.end - 1 : span.begin;
  const auto stage = [&](int done, int parity, int worker) {
    stage_tokens<T, E, WALK>(p, plan, span, n, head, row0, kBack ? first - done : first + done, min(S::kTokens, tokens - done), worker, vec,
                             smem + parity * (S::kTokens * S::kRecord));
  };
  // The state, or its gradient, at the border of a chunk.
  const auto keep = [&](int t) {
    if (WALK == kBorders) {
      if (t > 0 && t % plan.section_tokens == 0) state.store(plan.borders + (t / plan.section_tokens - 1) * all + item, c, vec);
      return;
    }
    const bool border = kBack ? t % plan.chunk == plan.chunk - 1 || t == span.seq.count - 1 : t % plan.chunk == 0;
    if (!border) return;
    const int64_t chunk = span.chunk + (t - span.begin) / plan.chunk;
    state.store((kBack ? plan.d_states : plan.states) + (chunk * c.num_v_heads + head) * size, c, vec);
  };

  // The rows that this lane writes of each token: of lanes part < kRows.
  const int out = state.row + state.part;
  const bool writes = consumer && WALK != kBorders && state.part < kRows && out < c.head_v;
  float *values = (kBack ? plan.d_values : plan.values) + (span.row * c.num_v_heads + head) * c.head_v + out;
  const int64_t values_stride = static_cast<int64_t>(c.num_v_heads) * c.head_v;

  if (!consumer && tokens > 0) stage(0, 0, warp - kConsumers);
  __syncthreads();
  for (int done = 0, parity = 0; done < tokens; done += S::kTokens, parity ^= 1) {
    if (!consumer && done + S::kTokens < tokens) stage(done + S::kTokens, parity ^ 1, warp - kConsumers);
    if (consumer) {
      const int count = min(S::kTokens, tokens - done);
      for (int j = 0; j < count; ++j) {
        const int t = kBack ? first - done - j : first + done + j;
        const float *record = smem + (parity * S::kTokens + j) * S::kRecord;
        const float decay = record[S::kGates], beta = record[S::kGates + 1];
        keep(t);
        float k[E], value[kRows], sum[kRows];
        read_record<E>(record, state.part, k);
#pragma unroll
        for (int r = 0; r < kRows; ++r) value[r] = record[S::kV + state.row - row0 + r];
        if (kBack) {
          float q[E];
          read_record<E>(record + S::kQ, state.part, q);
#pragma unroll
          for (int r = 0; r < kRows; ++r)
#pragma unroll
            for (int i = 0; i < E; ++i) state.x[r][i] = fmaf(value[r], q[i], state.x[r][i]);
        }
        state.dot(k, sum);
        float mine = 0.f;
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          const float y = kBack ? sum[r] : value[r] - decay * sum[r];
          const float d = kBack ? -decay * (beta * y) : beta * y;
#pragma unroll
          for (int i = 0; i < E; ++i) state.x[r][i] = fmaf(d, k[i], decay * state.x[r][i]);
          if (state.part == r) mine = y;
        }
        if (writes) {
          values[(t - span.begin) * values_stride] = mine;
          if (kBack) out_heads_at<T>(p.d_v, n, span.seq.first + t, head)[out] = from_float<T>(beta * mine, c.io_dtype);
        }
      }
    }
    __syncthreads();
  }
  if (!kBack || !consumer) return;
  if (plan.section > 0) state.store(plan.carry + item, c, vec);
  else if (p.d_state_in) state.store(p.d_state_in + item, c, vec);
}

template <typename T, int E, Walk WALK> int launch_walk_as(const gdn_rule_backward_params &p, const Plan &plan, cudaStream_t stream) {
  const gdn_common &c = p.common;
  const int64_t tiles = ceil_div(c.head_v, kTile), blocks = tiles * c.num_v_heads * c.seqs.num_seqs;
  if (blocks > kMaxBlocks) return GDN_BAD_LENGTH;
  const bool vec = c.head_k % 4 == 0 && aligned_rows(p.q, 4, c.io_dtype) && aligned_rows(p.k, 4, c.io_dtype) && aligned(c.state_in, 16) &&
                   aligned(p.d_state_in, 16) && aligned(p.d_state_out, 16);
  return launch(walk_kernel<T, E, WALK>, {dim3(static_cast<unsigned>(blocks)), dim3(kWalkThreads), Stage<E, WALK>::kBytes, stream}, p, plan,
                static_cast<int32_t>(tiles), vec);
}

template <typename T, Walk WALK> int launch_walk(const gdn_rule_backward_params &p, const Plan &plan, cudaStream_t stream) {
  if (p.common.head_k <= 64) return launch_walk_as<T, 8, WALK>(p, plan, stream);
  return p.common.head_k <= 128 ? launch_walk_as<T, 16, WALK>(p, plan, stream) : launch_walk_as<T, 32, WALK>(p, plan, stream);
}

}  // namespace backward
}  // namespace gdn
