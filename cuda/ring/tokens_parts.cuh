// What a block of tokens_kernel shares, and the parts of it that work on shared memory alone.
#pragma once

#include "../common/checks.h"
#include "conv.cuh"
#include "flush.cuh"
#include "state.cuh"

namespace gdn {
namespace ring {

// Tiles of 16 rows a warp, and warps of a block, which has a whole head: the norm is over it.
template <typename ST, int MAX, int V> constexpr int kTiles = V > 128 || (sizeof(ST) == 2 && MAX < 16) ? 2 : 1;
template <typename ST, int MAX, int V> constexpr int kTokensWarps = V / 16 / kTiles<ST, MAX, V>;

// Blocks that a multiprocessor must have registers for: one more of up to 8 tokens and 192 rows in 16 bits, which has shared memory for it.
template <typename T, typename ST, int MAX, int V>
constexpr int kTokensBlocks = (sizeof(T) == 4 ? 8 : 16) / kTokensWarps<ST, MAX, V> + (V > 128 && sizeof(T) == 2 && sizeof(ST) == 2 && MAX < 16);

// What of a block's shared memory stays elsewhere: nothing; entries and z, in global memory; and v too, in registers until it takes the
// place of the tokens.
enum class Lean { kNone, kEntries, kValues };

// Shared memory of a block for up to MAX tokens.
template <typename T, typename ST, int MAX, int K, int V, Lean LEAN> struct TokensMemory {
  static constexpr bool kLean = LEAN != Lean::kNone, kLateValues = LEAN == Lean::kValues;
  static constexpr int kWarps = kTokensWarps<ST, MAX, V>;
  using State = StateRows<ST, 16 * kTiles<ST, MAX, V>, K>;
  // With 16 tokens rows are closer and some bank is read twice: a step with an f32 state then fits in 99 KB.
  static constexpr int kStride = MAX == 16 && K % 64 == 0 ? K + 16 / sizeof(T) : kRowStride<T, K>;
  alignas(128) typename State::Memory state[kWarps];
  union {
    struct {
      alignas(16) T tokens[2 * MAX][kStride];    // k and q of token t in rows 2 t and 2 t + 1
      alignas(16) T early_values[kLateValues ? 1 : MAX][V];
    };
    alignas(16) T late_values[kLateValues ? MAX : 1][V];
    FlushKeys<T, K> flush;    // after the last use of tokens and values
  };
  alignas(16) T keys[kLean ? 1 : kEntries][K];    // of the ring
  alignas(16) float updates[kLean ? 1 : kEntries][V + 4];
  // k_j . k and k_j . q of the ring's entries, in rows 2 t and 2 t + 1, so far apart that lanes meet few banks twice.
  alignas(16) float of_ring[2 * MAX][kEntries + (MAX == 16 ? 4 : 8)];
  float2 of_tokens[MAX][MAX + 1];              // the same of new tokens, times the decay between them; 0 where a token is not before
  alignas(16) float entry_decay[kEntries];     // the decay from an entry, and from the state, up to the new tokens
  float state_decay;
  float token_decay[MAX], log_step[MAX], beta[MAX], q_scale[MAX];    // token_decay: from the ring up to a token
  Factor k_scale[MAX];
  uint64_t arrived[kWarps];    // the state, a warp's rows
  uint64_t tokens_arrived, entries_arrived;
  alignas(16) T z[kLean ? 1 : MAX][V];
  float squares[kWarps][MAX];    // of a warp's rows of o, summed

  // v of token t, and then o.
  __device__ __forceinline__ T *v(int t) { return kLateValues ? late_values[t] : early_values[t]; }
  __device__ __forceinline__ const T *v(int t) const { return kLateValues ? late_values[t] : early_values[t]; }
};

// The one that every card has room for.
template <typename T, typename ST, int MAX, int K, int V, Lean LEAN>
constexpr bool kTokensFit = sizeof(TokensMemory<T, ST, MAX, K, V, LEAN>) <= kLeastShared;
template <typename T, typename ST, int MAX, int K, int V>
using TokensShared = TokensMemory<T, ST, MAX, K, V,
                                  kTokensFit<T, ST, MAX, K, V, Lean::kNone>      ? Lean::kNone
                                  : kTokensFit<T, ST, MAX, K, V, Lean::kEntries> ? Lean::kEntries
                                                                                 : Lean::kValues>;

// Products of 16 rows, each where `row_of` says, with k and q of all tokens: this lane's are those of rows lane / 4 and lane / 4 + 8
// with k and q of token 4 i + lane % 4.
template <typename T, int MAX, int K, typename S, typename R>
__device__ __forceinline__ void key_products(float (&acc)[MAX / 4][4], const S &shared, const R &row_of, int lane) {
  using F = Fragment<T>;
  const int row = lane / 4, c = lane % 4;
  const T *low = row_of(row) + 8 * c, *high = row_of(row + 8) + 8 * c;
  float rest[MAX / 4][4] = {};
#pragma unroll
  for (int m = 0; m < kFragments<K>; ++m) {
    F fragment;
    uint32_t a[F::kTerms][4], b[F::kTerms][4], token[F::kTerms][4];
    fragment.load(low + m * kFragmentStep);
    fragment.terms(a);
    fragment.load(high + m * kFragmentStep);
    fragment.terms(b);
#pragma unroll
    for (int i = 0; i < MAX / 4; ++i) {
      fragment.load(shared.tokens[8 * i + row] + 8 * c + m * kFragmentStep);
      fragment.terms(token);
      multiply(acc[i], rest[i], a, b, token);
    }
  }
  if constexpr (F::kTerms > 1) {
#pragma unroll
    for (int i = 0; i < MAX / 4; ++i)
#pragma unroll
      for (int x = 0; x < 4; ++x) acc[i][x] += rest[i][x];
  }
}

// The factors of k and q of all tokens by `warps` warps, four rows at a time, eight lanes a row.
template <typename T, int MAX, int K, typename S>
__device__ __forceinline__ void norms_of_tokens(S &shared, const gdn_common &p, int warp, int warps, int lane) {
  constexpr int kRuns = (K / 8 + kLanes - 1) / kLanes;
  const int part = lane % kLanes;
  for (int job = warp; job < MAX / 2; job += warps) {
    const bool is_q = job % 2;
    const int t = job / 2 * kGroups + lane / kLanes;
    SquareSum sum;
#pragma unroll
    for (int run = 0; run < kRuns; ++run) {
      if (kRuns * kLanes * 8 != K && part + kLanes * run >= K / 8) break;
      float y[8];
      Fragment<T> fragment;
      fragment.load(shared.tokens[2 * t + is_q] + 8 * (part + kLanes * run));
      fragment.floats(y);
#pragma unroll
      for (int i = 0; i < 8; ++i) sum.add_square(y[i]);
    }
#pragma unroll
    for (int d = kLanes / 2; d > 0; d /= 2) sum.add_lane(d);
    if (part == 0 && !is_q) shared.k_scale[t] = p.l2norm ? inverse_root(sum, p.l2_eps) : Factor{1.f, 0.f};
    if (part == 0 && is_q) shared.q_scale[t] = p.l2norm ? rsqrtf(sum.hi + p.l2_eps) * p.scale : p.scale;
  }
}

// Products of the new keys with k and q of all tokens, times the decay from one to the other, by one warp. A token's product with
// itself is for q alone.
template <typename T, int MAX, int K, typename S> __device__ __forceinline__ void products_of_tokens(S &shared, int count, int lane) {
  const int row = lane / 4, c = lane % 4;
  float acc[MAX / 4][4] = {};
  key_products<T, MAX, K>(acc, shared, [&](int t) { return shared.tokens[2 * min(t, MAX - 1)]; }, lane);
#pragma unroll
  for (int i = 0; i < MAX / 4; ++i)
#pragma unroll
    for (int half = 0; half < (MAX > 8 ? 2 : 1); ++half) {
      const int t = 4 * i + c, key = row + 8 * half;
      if (key >= MAX) continue;
      float sum = 0.f;
#pragma unroll
      for (int m = 1; m < MAX; ++m)
        if (m > key && m <= t && m < count) sum += shared.log_step[m];
      const float decay = expf(sum);
      const bool used = key <= t && t < count;
      shared.of_tokens[t][key] = {used && key < t ? decay * acc[i][2 * half] : 0.f, used ? decay * acc[i][2 * half + 1] : 0.f};
    }
}

// From S k and S q (x and y) of a lane's rows to updates and outputs, token by token: an update is subtracted from later tokens'
// S k, and added to their S q, once it is known.
template <typename T, int MAX, int TILES, typename S>
__device__ __forceinline__ void solve_updates(float2 (&x)[TILES][2][MAX / 4], const S &shared, int count, int first_row, int c) {
  constexpr int kTokens = MAX / 4;
  float k_both[kTokens];    // beta |k|^-2
#pragma unroll
  for (int i = 0; i < kTokens; ++i) {
    const int t = 4 * i + c;
    const Factor k_scale = shared.k_scale[t];
    const float beta = shared.beta[t];
    k_both[i] = k_scale.times(k_scale.times(beta));
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float &e = x[tile][half][i].x;
        e = k_scale.times(beta * (to_float(shared.v(t)[first_row + 16 * tile + 8 * half]) - k_scale.times(e)));
      }
  }
#pragma unroll
  for (int t = 0; t < MAX; ++t) {
    if (t >= count) break;
    float2 products[kTokens];
#pragma unroll
    for (int i = t / 4; i < kTokens; ++i) products[i] = shared.of_tokens[4 * i + c][t], products[i].x *= k_both[i];
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float e = __shfl_sync(0xffffffffu, x[tile][half][t / 4].x, t % 4, 4);
#pragma unroll
        for (int i = t / 4; i < kTokens; ++i) {
          float2 &sums = x[tile][half][i];
          const float before = 4 * i + c < t ? 0.f : e;    // a draft that is not finite leaves the tokens before it as they are
          sums.x = fmaf(-products[i].x, before, sums.x), sums.y = fmaf(products[i].y, before, sums.y);
        }
      }
  }
}

}  // namespace ring
}  // namespace gdn
