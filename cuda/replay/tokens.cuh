// Several tokens a sequence, decode's drafts above all. A block has 16 or 32 rows of a head for each of its four warps. The
// state, which only a fold changes, is multiplied with k and q of all tokens at once on tensor cores; so are the ring's keys and
// the new keys. What is left of the rule is then a recurrence over tokens in each row by itself: a thread a row.
#pragma once

#include "fold.cuh"
#include "step.cuh"

namespace gdn {
namespace replay {

// Shared memory of a block of ROWS rows for up to MAX tokens.
template <typename T, int ROWS, int MAX> struct TokensShared {
  static constexpr int kStride = kRowStride<T>;
  static constexpr int kColumn = ROWS + 4;                      // so that the four tokens of a store meet other banks
  union {
    alignas(16) T tokens[2 * MAX][kStride];                     // k and q of token t in rows 2 t and 2 t + 1
    FoldKeys<T> fold;                                           // when the tokens are done
  };
  alignas(16) T keys[kWindow][kStride];                         // of the ring
  alignas(16) float updates[kWindow][ROWS];
  alignas(16) T v[MAX][ROWS];
  alignas(16) float2 of_state[MAX][kColumn];                    // S0 k and S0 q
  alignas(16) float2 of_entries[MAX][kWindow + GDN_REPLAY_TOKENS];    // k_j . k and k_j . q, then decayed; new tokens last
  float entry_left[kWindow], state_left;                        // before the new tokens
  float log_step[MAX], beta[MAX], q_scale[MAX];
  Factor k_scale[MAX];
};

template <typename T, int ROWS, int MAX> struct StepShared : TokensShared<T, ROWS, MAX> {
  alignas(16) T z[MAX][ROWS];
};

// Whether a block's shared memory is more than may be static.
template <typename S> constexpr bool kDynamic = sizeof(S) > 48 * 1024;

template <typename S> __device__ __forceinline__ S &block_shared() {
  if constexpr (kDynamic<S>) {
    extern __shared__ __align__(16) unsigned char dynamic_shared[];
    return *reinterpret_cast<S *>(dynamic_shared);
  } else {
    __shared__ S shared;
    return shared;
  }
}

// Where there is no convolution.
struct Nothing {
  __device__ __forceinline__ Nothing(const Params &, const Tokens &, uint32_t, uint32_t) {}
};

// Products of 16 keys, row by row `stride` apart from `rows` on and no further than the last, with all tokens.
template <typename T, int MAX, typename S>
__device__ __forceinline__ void key_products(S &shared, const T *rows, int stride, int last, int at, int lane) {
  using P = Piece<T>;
  const int row = lane / 4, c = lane % 4;
  const T *low = rows + min(row, last) * stride + 8 * c, *high = rows + min(row + 8, last) * stride + 8 * c;
  float acc[MAX / 4][4] = {}, rest[MAX / 4][4] = {};
#pragma unroll
  for (int m = 0; m < kPieces; ++m) {
    P piece;
    uint32_t a[P::kTerms][4], b[P::kTerms][4], token[P::kTerms][4];
    piece.load(low + m * kPieceStep);
    piece.terms(a);
    piece.load(high + m * kPieceStep);
    piece.terms(b);
#pragma unroll
    for (int i = 0; i < MAX / 4; ++i) {
      piece.load(shared.tokens[8 * i + row] + 8 * c + m * kPieceStep);
      piece.terms(token);
      multiply(acc[i], rest[i], a, b, token);
    }
  }
#pragma unroll
  for (int i = 0; i < MAX / 4; ++i) {
    shared.of_entries[4 * i + c][at + row] = {acc[i][0] + rest[i][0], acc[i][1] + rest[i][1]};
    shared.of_entries[4 * i + c][at + row + 8] = {acc[i][2] + rest[i][2], acc[i][3] + rest[i][3]};
  }
}

// Tiles of 16 rows a warp. The step's norm takes whole heads in a block: where a warp has one tile, eight warps.
template <typename ST, int MAX> constexpr int kTiles = sizeof(ST) == 2 && MAX < 16 ? 2 : 1;
template <typename ST, int MAX, typename GIVEN>
constexpr int kWarps = std::is_same_v<GIVEN, StepParams> ? 8 / kTiles<ST, MAX> : 4;
template <typename ST, int MAX, typename GIVEN> constexpr int kRows = 16 * kWarps<ST, MAX, GIVEN> * kTiles<ST, MAX>;

template <typename T, typename ST, int MAX, typename GIVEN>
using SharedOf = std::conditional_t<std::is_same_v<GIVEN, StepParams>, StepShared<T, kRows<ST, MAX, GIVEN>, MAX>,
                                    TokensShared<T, kRows<ST, MAX, GIVEN>, MAX>>;

// Blocks that a multiprocessor must have registers for.
template <typename T, int MAX, int WARPS>
constexpr int kBlocks = MAX == 16 && WARPS == 8 ? 2 : ((MAX < 16 ? 4 : 3) - (sizeof(T) == 4)) * 4 / WARPS;

// The rule with Params, the fused step with StepParams. A fold reads the state again, out of L2 as a rule: kept until then it would
// take the registers of the rest.
template <typename T, typename ST, int MAX, typename GIVEN>
__global__ void __launch_bounds__(32 * kWarps<ST, MAX, GIVEN>, (kBlocks<T, MAX, kWarps<ST, MAX, GIVEN>>))
tokens_kernel(const __grid_constant__ GIVEN p) {
  constexpr bool STEP = std::is_same_v<GIVEN, StepParams>;
  constexpr int WARPS = kWarps<ST, MAX, GIVEN>, TILES = kTiles<ST, MAX>, ROWS = kRows<ST, MAX, GIVEN>, kThreads = 32 * WARPS;
  using S = SharedOf<T, ST, MAX, GIVEN>;
  using P = Piece<ST>;
  using K = Piece<T>;
  S &shared = block_shared<S>();
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32, c = lane % 4;
  const uint32_t head = blockIdx.y, n = blockIdx.z, key_head = p.ratio.of(head), row0 = blockIdx.x * ROWS;
  const uint32_t in_slot = p.in.of(n), out_slot = p.out.of(n);
  const Tokens tokens(p, n);
  if (in_slot >= p.in.count || out_slot >= p.out.count) {    // padding
    if constexpr (STEP) ptx::grid_dependency_wait();
    for (uint32_t i = thread; i < tokens.count * ROWS; i += kThreads)
      tokens.template of<T>(p.o, i / ROWS, head)[row0 + i % ROWS] = from_float<T>(0.f);
    return;
  }
  const uint32_t cursor = p.cursors[in_slot];
  // The first of this lane's rows of a tile, its first piece.
  const uint32_t within = (head * kDim + row0 + warp * 16 * TILES + lane / 4) * kDim + 8 * c;
  const ST *in = static_cast<const ST *>(p.state_in) + (static_cast<uint64_t>(in_slot) * p.in.stride + within);
  P state[TILES][2][kPieces];
#pragma unroll
  for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int m = 0; m < kPieces; ++m)
        state[tile][half][m].load(in + (tile * 16 + half * 8) * kDim + m * kPieceStep);
  __syncwarp();    // what follows is not to be moved above these loads

  // Rows of tokens and then of entries, 16 bytes a copy.
  constexpr int kChunk = 16 / sizeof(T), kRowChunks = kDim / kChunk, kRowsChunks = ROWS / kChunk;
  const auto copy_rows = [&](const Field &from, T (&to)[MAX][ROWS]) {
    for (int i = thread; i < static_cast<int>(tokens.count) * kRowsChunks; i += kThreads) {
      const int t = i / kRowsChunks, at = i % kRowsChunks * kChunk;
      ptx::copy_async(ptx::shared_address(&to[t][at]), tokens.template of<T>(from, t, head) + row0 + at);
    }
  };
  std::conditional_t<STEP, Convolution<T, MAX, kThreads>, Nothing> convolution(p, tokens, head, key_head);
  if constexpr (STEP) {
    convolution.load_weights();
    ptx::grid_dependency_wait();
    ptx::grid_dependency_launch();
    convolution.load_fresh();
    copy_rows(p.z, shared.z);
  } else {
    for (int i = thread; i < static_cast<int>(2 * tokens.count) * kRowChunks; i += kThreads) {
      const int row = i / kRowChunks, at = i % kRowChunks * kChunk;
      const T *from = tokens.template of<T>(row % 2 ? p.q : p.k, row / 2, key_head);
      ptx::copy_async(ptx::shared_address(&shared.tokens[row][at]), from + at);
    }
    copy_rows(p.v, shared.v);
  }
  ptx::copy_async_commit();
  const bool moved = p.apart || in_slot != out_slot;
  const Entries ring(p, n, cursor, moved);
  if (ring.count == 0 && !ring.fold) {
    ptx::copy_async_wait<0>();    // before the block's shared memory is another's
    return;
  }
  if constexpr (STEP) convolution.load_past(ring, in_slot);
  const T *keys = keys_of<T>(p, in_slot, key_head);
  for (int i = thread; i < static_cast<int>(ring.length) * kRowChunks; i += kThreads) {
    const int j = i / kRowChunks, at = i % kRowChunks * kChunk;
    ptx::copy_async(ptx::shared_address(&shared.keys[j][at]), keys + ring.row(j) * kDim + at);
  }
  const float *updates = updates_of(p, in_slot, head) + row0;
  constexpr int kUpdates = 16 / sizeof(float), kRowUpdates = ROWS / kUpdates;
  for (int i = thread; i < static_cast<int>(ring.length) * kRowUpdates; i += kThreads) {
    const int j = i / kRowUpdates, at = i % kRowUpdates * kUpdates;
    ptx::copy_async(ptx::shared_address(&shared.updates[j][at]), updates + ring.row(j) * kDim + at);
  }
  ptx::copy_async_commit();

  if (warp == 2) {
    const float decay = lane < ring.length ? decays_of(p, in_slot, head)[ring.row(lane)] : 0.f;
    const Left left(decay, lane);
    if (lane < kWindow) shared.entry_left[lane] = left.entry;
    if (lane == 0) shared.state_left = left.state;
  } else if (warp == 3 && lane < ring.count) {
    const float a = load_any(p.a.ptr, p.a.index(tokens.seq, tokens.first + lane, head), p.gate_dtype);
    const float b = load_any(p.b.ptr, p.b.index(tokens.seq, tokens.first + lane, head), p.gate_dtype);
    shared.log_step[lane] = log_decay(a, p.dt_bias[head], -expf(p.a_log[head]));
    shared.beta[lane] = p.beta_scale * sigmoid(b);
  }
  if constexpr (STEP) {
    convolution.run(shared, ring);
    convolution.keep(ring, out_slot, moved);
  }
  ptx::copy_async_wait<0>();
  __syncthreads();

  if (warp == 0) {
    key_products<T, MAX>(shared, shared.keys[0], S::kStride, kWindow - 1, 0, lane);
  } else if (warp == 1) {
    key_products<T, MAX>(shared, shared.tokens[0], 2 * S::kStride, MAX - 1, kWindow, lane);
  } else {
    for (uint32_t t = warp - 2; t < ring.count; t += WARPS - 2) {
      SquareSum kk;
      float qq = 0.f;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        kk.add_square(to_float(shared.tokens[2 * t][lane + 32 * i]));
        const float q = to_float(shared.tokens[2 * t + 1][lane + 32 * i]);
        qq = fmaf(q, q, qq);
      }
#pragma unroll
      for (int d = 16; d > 0; d /= 2) kk.add_lane(d);
      qq = group_sum(qq);
      if (lane == 0) {
        shared.k_scale[t] = p.l2norm ? inverse_root(kk, p.l2_eps) : Factor{1.f, 0.f};
        shared.q_scale[t] = p.l2norm ? rsqrtf(qq + p.l2_eps) * p.scale : p.scale;
      }
    }
  }
  __syncthreads();

  // Decays onto the products with keys: of an entry of the ring, of a token before this one; a token's own is for q alone.
  constexpr int kEntries = kWindow + GDN_REPLAY_TOKENS;
  for (int i = thread; i < static_cast<int>(ring.count) * kEntries; i += kThreads) {
    const int t = i / kEntries, j = i % kEntries, token = j - kWindow;
    float sum = 0.f;
    for (int m = max(token + 1, 0); m <= t; ++m) sum += shared.log_step[m];
    const float left = expf(sum) * (token < 0 ? shared.entry_left[j] : 1.f);
    const bool some = token < 0 ? j < static_cast<int>(ring.length) : token <= t;
    float2 &both = shared.of_entries[t][j];
    both = {some && token < t ? left * both.x : 0.f, some ? left * both.y : 0.f};
  }
  {
    const int row = lane / 4;
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
      float acc[MAX / 4][4] = {}, rest[MAX / 4][4] = {};
#pragma unroll
      for (int m = 0; m < kPieces; ++m) {
        uint32_t low[P::kTerms][4], high[P::kTerms][4], token[K::kTerms][4];
        state[tile][0][m].terms(low);
        state[tile][1][m].terms(high);
#pragma unroll
        for (int i = 0; i < MAX / 4; ++i) {
          K piece;
          piece.load(shared.tokens[8 * i + row] + 8 * c + m * kPieceStep);
          piece.terms(token);
          multiply(acc[i], rest[i], low, high, token);
        }
      }
      const int first = (warp * TILES + tile) * 16 + row;
#pragma unroll
      for (int i = 0; i < MAX / 4; ++i) {
        shared.of_state[4 * i + c][first] = {acc[i][0] + rest[i][0], acc[i][1] + rest[i][1]};
        shared.of_state[4 * i + c][first + 8] = {acc[i][2] + rest[i][2], acc[i][3] + rest[i][3]};
      }
    }
  }
  __syncthreads();

  if (thread < ROWS) {
    float old[kWindow], made[MAX], sum = 0.f;
    float *const to = updates_of(p, out_slot, head) + row0 + thread;
#pragma unroll
    for (int j = 0; j < kWindow; ++j) old[j] = j < static_cast<int>(ring.length) ? shared.updates[j][thread] : 0.f;
#pragma unroll
    for (int t = 0; t < MAX; ++t) {
      if (t >= static_cast<int>(ring.count)) break;
      sum += shared.log_step[t];
      const float left = shared.state_left * expf(sum);
      float2 x = shared.of_state[t][thread];
      x.x *= left, x.y *= left;
#pragma unroll
      for (int j = 0; j < kWindow; ++j) {
        const float2 of = shared.of_entries[t][j];
        x.x = fmaf(of.x, old[j], x.x), x.y = fmaf(of.y, old[j], x.y);
      }
#pragma unroll
      for (int i = 0; i < t; ++i) {
        const float2 of = shared.of_entries[t][kWindow + i];
        x.x = fmaf(of.x, made[i], x.x), x.y = fmaf(of.y, made[i], x.y);
      }
      const Factor k_scale = shared.k_scale[t];
      const float e = k_scale.times(shared.beta[t] * (to_float(shared.v[t][thread]) - k_scale.times(x.x)));
      to[ring.row(ring.length + t) * kDim] = e;
      made[t] = e;
      const float o = shared.q_scale[t] * fmaf(shared.of_entries[t][kWindow + t].y, e, x.y);
      if constexpr (STEP) shared.of_state[t][thread].x = o;
      else tokens.template of<T>(p.o, t, head)[row0 + thread] = from_float<T>(o);
    }
  }
  if constexpr (STEP) {
    __syncthreads();
    for (uint32_t t = warp; t < ring.count; t += WARPS)
      gated_norm(p, [&](int row) { return shared.of_state[t][row].x; }, shared.z[t], tokens.template of<T>(p.o, t, head), lane);
  }
  if (blockIdx.x == 0) {
    if (thread < static_cast<int>(ring.count))
      decays_of(p, out_slot, head)[ring.row(ring.length + thread)] = shared.log_step[thread];
    if (head == key_head * p.ratio.ratio) {
      T *const to = keys_of<T>(p, out_slot, key_head);
      for (int i = thread; i < static_cast<int>(ring.count) * kRowChunks; i += kThreads) {
        const int t = i / kRowChunks, at = i % kRowChunks * kChunk;
        *reinterpret_cast<uint4 *>(to + ring.row(ring.length + t) * kDim + at) =
            *reinterpret_cast<const uint4 *>(&shared.tokens[2 * t][at]);
      }
    }
  }
  if (!ring.fold) return;

  // Asked for again before what is to be waited for.
  P again[2][kPieces];
  const auto ask = [&](int tile) {
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int m = 0; m < kPieces; ++m) again[half][m].load(in + (tile * 16 + half * 8) * kDim + m * kPieceStep);
  };
  ask(0);
  __syncthreads();
  shared.fold.fill(shared.keys[0], S::kStride, static_cast<int>(ring.length), thread, kThreads);
  __syncthreads();
  ST *out = static_cast<ST *>(p.state_out) + (static_cast<uint64_t>(out_slot) * p.out.stride + within);
  const float state_left = shared.state_left;
#pragma unroll
  for (int tile = 0; tile < TILES; ++tile) {
    if (tile > 0) ask(tile);
    const int first = (warp * TILES + tile) * 16 + lane / 4;
    const FoldUpdates<sizeof(ST) == 4 ? 3 : 2> updates(c, [&](int j, int half) {
      return j < static_cast<int>(ring.length) ? shared.entry_left[j] * shared.updates[j][first + 8 * half] : 0.f;
    });
#pragma unroll
    for (int m = 0; m < kPieces; ++m) {
      float s[2][8];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        again[half][m].floats(s[half]);
#pragma unroll
        for (int i = 0; i < 8; ++i) s[half][i] *= state_left;
      }
      fold_piece(s, updates, shared.fold, m, lane);
#pragma unroll
      for (int half = 0; half < 2; ++half) P::store(out + (tile * 16 + half * 8) * kDim + m * kPieceStep, s[half]);
    }
  }
}

}  // namespace replay
}  // namespace gdn
