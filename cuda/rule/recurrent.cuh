// The gated delta rule token by token, the state in registers from the first token to the last.
//
// A block owns a tile of value rows of one (sequence, value head). Eight lanes share a row of the state, E of its
// elements each, and a thread holds ROWS rows, so one shuffle reduction serves four row groups of a warp. Tokens come
// in stages: a stage's q and k (normalised), v and gates are prepared once per block in shared memory: the first by all
// warps, later ones one stage ahead by extra warps.
//
// One pass over the state serves a token: with s = S k and r = S q of the old state and kq = k.q,
//   d = beta (v - e^g s),   o = e^g r + d kq,   S <- e^g S + d k^T.
// The state is kept as scale * S', so that the decay of a token is one product of scalars and not one per element:
// three multiply-adds an element and token remain. A scale below 2^-20 is folded into S' before it can underflow.
#pragma once

#include "../common/convert.cuh"
#include "../common/host.cuh"
#include "../common/launch.cuh"
#include "../common/math.cuh"
#include "../common/profile.cuh"
#include "../common/sequences.cuh"

namespace gdn {
namespace recurrent {

constexpr int kLanes = 8;        // lanes that share a row
constexpr int kConsumers = 4;    // warps that hold the state
constexpr int kProducers = 4;    // warps that prepare the next stage, when there is one
constexpr int kDecodeTokens = 4; // up to here no warps are spent on preparing stages ahead
constexpr float kMinScale = 1.f / (1 << 20);

// What the host decides.
struct Plan {
  int32_t v_tiles;
  int32_t stage;      // tokens a stage; with AHEAD always the most
  bool vec_qk;        // q and k rows can be read four elements at a time
  bool vec_state;     // state rows can be read and written 16 bytes at a time
  bool ready;         // GDN_GATES_READY
  int64_t head_stride;    // of states
  bool keep_state;    // a sequence without tokens need not copy its state
  GDN_PROFILED(profile::Target profile;)
};

template <int E, int ROWS, bool AHEAD> struct Shape {
  static constexpr int kK = kLanes * E;                                 // key elements, padded
  static constexpr int kTile = kConsumers * (32 / kLanes) * ROWS;       // value rows a block
  static constexpr int kRecord = 2 * kK + kTile + 4;                    // floats a staged token: k, q, v, scalars
  static constexpr int kParts = (kK + 127) / 128;                       // four elements a lane and part
  // Tokens a warp prepares at once, as far as registers allow; decode has one.
  static constexpr int kAtOnce = !AHEAD ? 1 : kParts == 1 && ROWS < 4 ? 4 : 2;
  // Two stages of this many tokens stay under 48 KB, which every device gives without asking.
  static constexpr int kMaxStage = kRecord <= 360 ? 16 : 8;
  static constexpr int kThreads = 32 * (kConsumers + (AHEAD ? kProducers : 0));
  static_assert(2 * kMaxStage * kRecord * 4 <= 48 * 1024, "stages do not fit");
};

// Prepares tokens first .. first + count of the sequence. This warp takes kAtOnce of every `warps` * kAtOnce, so that
// their loads and reductions overlap; the last warp does the gates of all tokens besides, a lane a token.
// One function: raw rows are registers from the loads at its begin to the norms at its end.
template <typename T, int E, int ROWS, bool EXACT, bool AHEAD>
__device__ __forceinline__ void stage_tokens(const gdn_rule_params &p, const Plan &plan, int n, int64_t first,
                                             int count, int head, int row0, int warp, int warps, float *stage
                                             GDN_PROFILED(, profile::Stamps &stamps)) {
  using S = Shape<E, ROWS, AHEAD>;
  constexpr int kN = S::kAtOnce, kParts = S::kParts, kVs = (S::kTile + 31) / 32;
  constexpr int kV = 2 * S::kK, kScalars = kV + S::kTile;    // where v and decay, beta, k.q stand in a record
  const int lane = threadIdx.x % 32;
  const int key_head = head / (p.common.num_v_heads / p.common.num_k_heads);
  const int head_k = EXACT ? S::kK : p.common.head_k, head_v = EXACT ? S::kK : p.common.head_v;

  const bool gates = warp == warps - 1 && lane < count;
  uint32_t raw_a = 0, raw_b = 0;
  float a_log = 0.f, dt_bias = 0.f;
  if (gates) {
    raw_a = raw_load_any(p.common.a.ptr, heads_offset(p.common.a, n, first + lane, head), p.common.gate_dtype);
    raw_b = raw_load_any(p.common.b.ptr, heads_offset(p.common.b, n, first + lane, head), p.common.gate_dtype);
    if (EXACT || !plan.ready) {
      a_log = p.common.a_log[head];
      dt_bias = EXACT ? static_cast<const float *>(p.common.dt_bias)[head] : load_any(p.common.dt_bias, head, p.dt_bias_dtype);
    }
  }

  for (int t0 = warp * kN; t0 < count; t0 += warps * kN) {
    Raw4<T> raw_k[kN][kParts], raw_q[kN][kParts];
    T v[kN][kVs];
    const T *kp = heads_at<T>(p.k, n, first + t0, key_head), *qp = heads_at<T>(p.q, n, first + t0, key_head);
    const T *vp = heads_at<T>(p.v, n, first + t0, head) + row0;
#pragma unroll
    for (int u = 0; u < kN; ++u) {
#pragma unroll
      for (int m = 0; m < kParts; ++m) {
        raw_k[u][m] = raw_load4(kp, 4 * lane + 128 * m, head_k, EXACT || plan.vec_qk);
        raw_q[u][m] = raw_load4(qp, 4 * lane + 128 * m, head_k, EXACT || plan.vec_qk);
      }
#pragma unroll
      for (int m = 0; m < kVs; ++m) {
        const int row = lane + 32 * m;
        v[u][m] = row < S::kTile && row0 + row < head_v ? vp[row] : T(0.f);
      }
      if (t0 + u + 1 < count) {    // past the end the last token is read again and not stored
        kp += p.k.token_stride;
        qp += p.q.token_stride;
        vp += p.v.token_stride;
      }
    }
    GDN_PROFILED(stamps.lap(profile::kLoadQkv);)
    GDN_PROFILED(stamps.wait(profile::kWaitQkv, raw_k, raw_q, v);)
    float k[kN][kParts][4], q[kN][kParts][4], qq[kN], kq[kN];
    SquareSum kk[kN];
#pragma unroll
    for (int u = 0; u < kN; ++u) {
      qq[u] = kq[u] = 0.f;
#pragma unroll
      for (int m = 0; m < kParts; ++m)
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          k[u][m][c] = raw_to_float(raw_k[u][m], c, p.common.io_dtype);
          q[u][m][c] = raw_to_float(raw_q[u][m], c, p.common.io_dtype);
          kk[u].add_square(k[u][m][c]);
          qq[u] = fmaf(q[u][m][c], q[u][m][c], qq[u]);
          kq[u] = fmaf(k[u][m][c], q[u][m][c], kq[u]);
        }
    }
#pragma unroll
    for (int d = 16; d > 0; d /= 2)
#pragma unroll
      for (int u = 0; u < kN; ++u) {
        kk[u].add_lane(d);
        qq[u] += __shfl_xor_sync(0xffffffffu, qq[u], d);
        kq[u] += __shfl_xor_sync(0xffffffffu, kq[u], d);
      }
#pragma unroll
    for (int u = 0; u < kN; ++u) {
      const Factor k_scale = p.common.l2norm ? inverse_root(kk[u], p.common.l2_eps) : Factor{1.f, 0.f};
      const float q_scale = p.common.l2norm ? rsqrtf(qq[u] + p.common.l2_eps) * p.common.scale : p.common.scale;
      if (t0 + u < count) {
        float *record = stage + (t0 + u) * S::kRecord;
#pragma unroll
        for (int m = 0; m < kParts; ++m) {
          const int i = 4 * lane + 128 * m;
          if (S::kK % 128 == 0 || i < S::kK) {
            *reinterpret_cast<float4 *>(record + i) = make_float4(k_scale.times(k[u][m][0]), k_scale.times(k[u][m][1]),
                                                                  k_scale.times(k[u][m][2]), k_scale.times(k[u][m][3]));
            *reinterpret_cast<float4 *>(record + S::kK + i) = make_float4(
                q[u][m][0] * q_scale, q[u][m][1] * q_scale, q[u][m][2] * q_scale, q[u][m][3] * q_scale);
          }
        }
#pragma unroll
        for (int m = 0; m < kVs; ++m)
          if (lane + 32 * m < S::kTile) record[kV + lane + 32 * m] = to_float(v[u][m], p.common.io_dtype);
        if (lane == 0) record[kScalars + 2] = kq[u] * k_scale.hi * q_scale;
      }
    }
    GDN_PROFILED(stamps.lap(profile::kNormalise);)
  }
  GDN_PROFILED(if (warp == warps - 1) stamps.wait(profile::kWaitGates, raw_a, raw_b, a_log, dt_bias);)
  if (gates) {
    float *record = stage + lane * S::kRecord;
    const float a = raw_to_float(raw_a, p.common.gate_dtype), b = raw_to_float(raw_b, p.common.gate_dtype);
    const bool ready = !EXACT && plan.ready;
    record[kScalars] = expf(ready ? a : log_decay(a, dt_bias, -expf(a_log)));
    record[kScalars + 1] = ready ? b : p.common.beta_scale * sigmoid(b);
  }
  GDN_PROFILED(if (warp == warps - 1) stamps.lap(profile::kGates);)
}

// EXACT: K = V = 128 (E = 16) with aligned q, k and state, so that nothing is guarded. AHEAD: producer warps prepare the
// next stage; without them it is the decode kernel, whose registers go to loads of the state.
// One function: the state is in registers of all its parts, some of which are lambdas.
template <typename T, typename ST, int E, int ROWS, bool EXACT, bool AHEAD>
__global__ void __launch_bounds__(Shape<E, ROWS, AHEAD>::kThreads, EXACT && AHEAD ? 2 : 1)
recurrent_kernel(const __grid_constant__ gdn_rule_params p, const __grid_constant__ Plan plan) {
  using S = Shape<E, ROWS, AHEAD>;
  constexpr int kVecs = E / 4;
  extern __shared__ __align__(16) float smem[];
  const int head_k = EXACT ? S::kK : p.common.head_k, head_v = EXACT ? S::kK : p.common.head_v;
  GDN_PROFILED(const profile::Role role = threadIdx.x / 32 < kConsumers ? profile::kConsumer : profile::kProducer;
               profile::Stamps stamps(plan.profile, AHEAD ? role : profile::kRecurrent);)

  int block = blockIdx.x;
  const int row0 = block % plan.v_tiles * S::kTile;
  block /= plan.v_tiles;
  const int head = block % p.common.num_v_heads, n = block / p.common.num_v_heads;

  Tokens seq = tokens_of(p.common.seqs, n);
  if (!EXACT && p.counts) seq.count = static_cast<int32_t>(min(p.counts[n], static_cast<uint32_t>(seq.count)));
  const int64_t in_slot = slot_of(p.common.in_slots, n), out_slot = slot_of(p.common.out_slots, n);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
  GDN_PROFILED(stamps.lap(profile::kSetup);)

  if (in_slot < 0 || out_slot < 0) {    // padding
    const int rows = min(S::kTile, head_v - row0);
    for (int64_t i = threadIdx.x; i < static_cast<int64_t>(seq.count) * rows; i += blockDim.x)
      out_heads_at<T>(p.o, n, seq.first + i / rows, head)[row0 + i % rows] = from_float<T>(0.f, p.common.io_dtype);
    GDN_PROFILED(stamps.lap(profile::kPadding);)
    return;
  }
  if (seq.count <= 0 && plan.keep_state) return;

  const int stage_size = AHEAD ? S::kMaxStage : plan.stage;
  const bool consumer = !AHEAD || warp < kConsumers;
  const int part = lane % kLanes;                                        // which eighth of a row
  const int tile_row = (warp * (32 / kLanes) + lane / kLanes) * ROWS;    // first of this thread's rows in the tile

  float state[ROWS][E];
  auto load_state = [&] {
    if (!consumer) return;
    with_state_type<ST>(p.common.state_dtype, [&](auto type) {
      using S = typename decltype(type)::type;
      const S *in = static_cast<const S *>(p.common.state_in) + in_slot * p.common.in_slots.slot_stride + head * plan.head_stride;
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
        const int row = row0 + tile_row + r;
        const S *sp = in + row * head_k;
#pragma unroll
        for (int j = 0; j < kVecs; ++j) {
          const int i = 4 * (part + kLanes * j);
          if (EXACT) {
            float x[4];
            load_pack<S, 4>(sp + i, x);
#pragma unroll
            for (int c = 0; c < 4; ++c) state[r][4 * j + c] = x[c];
          } else {
            float x[4] = {0.f, 0.f, 0.f, 0.f};
            if (row < head_v && p.common.state_in) load4(sp, i, head_k, plan.vec_state, x);
#pragma unroll
            for (int c = 0; c < 4; ++c) state[r][4 * j + c] = x[c];
          }
        }
      }
    });
    GDN_PROFILED(stamps.lap(profile::kLoadState);)
  };

  const int stage_floats = stage_size * S::kRecord;
  auto stage = [&](int t0, int worker, int workers, float *to) {
    GDN_PROFILED(stamps.at(t0);)
    stage_tokens<T, E, ROWS, EXACT, AHEAD>(p, plan, n, seq.first + t0, min(stage_size, seq.count - t0), head, row0,
                                           worker, workers, to GDN_PROFILED(, stamps));
  };
  float scale = 1.f;
  auto store_state = [&] {
    with_state_type<ST>(p.common.state_dtype, [&](auto type) {
      using S = typename decltype(type)::type;
      S *to = static_cast<S *>(p.common.state_out) + out_slot * p.common.out_slots.slot_stride + head * plan.head_stride;
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
        const int row = row0 + tile_row + r;
        S *sp = to + row * head_k;
#pragma unroll
        for (int j = 0; j < kVecs; ++j) {
          const int i = 4 * (part + kLanes * j);
          const float x[4] = {scale * state[r][4 * j], scale * state[r][4 * j + 1], scale * state[r][4 * j + 2],
                              scale * state[r][4 * j + 3]};
          if (EXACT) {
            store_pack<S, 4>(sp + i, x);
          } else if (row < head_v) {
            store4(sp, i, head_k, plan.vec_state, x);
          }
        }
      }
    });
  };
  T *o = out_heads_at<T>(p.o, n, seq.first, head) + row0 + tile_row + part;    // written by lanes part < ROWS
  const bool writes = consumer && part < ROWS && row0 + tile_row + part < head_v;

  load_state();
  for (int t0 = 0, parity = 0; t0 < seq.count; t0 += stage_size, parity ^= 1) {
    // Without producers there is one buffer, and all warps fill it before each stage.
    float *now = smem + (AHEAD ? parity : 0) * stage_floats;
    if (t0 == 0 || !AHEAD) {
      stage(t0, warp, warps, now);
      __syncthreads();
      GDN_PROFILED(stamps.lap(profile::kBarrier);)
    }
    if (AHEAD && !consumer && t0 + stage_size < seq.count)
      stage(t0 + stage_size, warp - kConsumers, warps - kConsumers, smem + (parity ^ 1) * stage_floats);
    if (consumer) {
      GDN_PROFILED(stamps.at(t0);)
      GDN_PROFILED(if (t0 == 0) stamps.wait(profile::kWaitState, state);)
      const int count = min(stage_size, seq.count - t0);
      for (int t = 0; t < count; ++t) {
        const float *record = now + t * S::kRecord;
        const float4 gates = *reinterpret_cast<const float4 *>(record + 2 * S::kK + S::kTile);
        float k[E], q[E], v[ROWS];
#pragma unroll
        for (int j = 0; j < kVecs; ++j) {
          *reinterpret_cast<float4 *>(&k[4 * j]) =
              *reinterpret_cast<const float4 *>(record + 4 * (part + kLanes * j));
          *reinterpret_cast<float4 *>(&q[4 * j]) =
              *reinterpret_cast<const float4 *>(record + S::kK + 4 * (part + kLanes * j));
        }
#pragma unroll
        for (int r = 0; r < ROWS; ++r) v[r] = record[2 * S::kK + tile_row + r];

        scale *= gates.x;
        if (scale < kMinScale) {
#pragma unroll
          for (int r = 0; r < ROWS; ++r)
#pragma unroll
            for (int i = 0; i < E; ++i) state[r][i] *= scale;
          scale = 1.f;
        }
        const float inverse = __fdividef(1.f, scale);    // one ulp; the scale is far from subnormal

        float sk[ROWS], sq[ROWS];
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
          float x[2] = {0.f, 0.f}, y[2] = {0.f, 0.f};    // two chains each, to halve their latency
#pragma unroll
          for (int i = 0; i < E; ++i) {
            x[i & 1] = fmaf(state[r][i], k[i], x[i & 1]);
            y[i & 1] = fmaf(state[r][i], q[i], y[i & 1]);
          }
          sk[r] = x[0] + x[1];
          sq[r] = y[0] + y[1];
        }
#pragma unroll
        for (int d = kLanes / 2; d > 0; d /= 2)
#pragma unroll
          for (int r = 0; r < ROWS; ++r) {
            sk[r] += __shfl_xor_sync(0xffffffffu, sk[r], d);
            sq[r] += __shfl_xor_sync(0xffffffffu, sq[r], d);
          }
        float out = 0.f;
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
          const float d = gates.y * (v[r] - scale * sk[r]);
          const float e = d * inverse;
#pragma unroll
          for (int i = 0; i < E; ++i) state[r][i] = fmaf(e, k[i], state[r][i]);
          const float y = fmaf(d, gates.z, scale * sq[r]);
          if (part == r) out = y;
        }
        if (writes) o[(t0 + t) * p.o.token_stride] = from_float<T>(out, p.common.io_dtype);
      }
      GDN_PROFILED(stamps.lap(profile::kUpdate);)
    }
    __syncthreads();
    GDN_PROFILED(stamps.lap(profile::kBarrier);)
  }

  if (consumer && (EXACT || p.common.state_out)) {
    store_state();
    GDN_PROFILED(stamps.lap(profile::kStoreState);)
  }
}

template <typename T, typename ST, int E, int ROWS, bool EXACT, bool AHEAD>
int launch_as(const gdn_rule_params &p, cudaStream_t stream) {
  using S = Shape<E, ROWS, AHEAD>;
  Plan plan;
  plan.v_tiles = static_cast<int32_t>(ceil_div(p.common.head_v, S::kTile));
  plan.vec_qk = p.common.head_k % 4 == 0 && aligned_rows(p.q, 4, p.common.io_dtype) && aligned_rows(p.k, 4, p.common.io_dtype);
  plan.vec_state = p.common.head_k % 4 == 0 && aligned_state(p.common, 4) && p.head_stride % 4 == 0;
  plan.ready = p.gates == GDN_GATES_READY;
  plan.head_stride = p.head_stride ? p.head_stride : static_cast<int64_t>(p.common.head_v) * p.common.head_k;
  plan.keep_state = state_in_place(p.common);
  const int32_t tokens = max_tokens(p.common.seqs);
  plan.stage = AHEAD || tokens > S::kMaxStage ? S::kMaxStage : tokens < 1 ? 1 : tokens;
  const int64_t blocks = static_cast<int64_t>(p.common.seqs.num_seqs) * p.common.num_v_heads * plan.v_tiles;
  if (blocks > kMaxBlocks) return GDN_BAD_LENGTH;
  GDN_PROFILED(if (const int status = profile::attach(plan.profile, blocks, S::kThreads)) return status;)
  const int64_t bytes = (AHEAD ? 2 : 1) * plan.stage * S::kRecord * static_cast<int64_t>(sizeof(float));
  return launch(recurrent_kernel<T, ST, E, ROWS, EXACT, AHEAD>,
                {dim3(static_cast<unsigned>(blocks)), dim3(S::kThreads), bytes, stream}, p, plan);
}

}  // namespace recurrent
}  // namespace gdn
