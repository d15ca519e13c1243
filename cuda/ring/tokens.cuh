// Several tokens a sequence, decode's drafts above all. A warp has 16 or 32 rows of a head. The state, which only a fold changes, is
// multiplied with k and q of all tokens at once on tensor cores; so are the ring's keys and the new keys, once a block, and the
// ring's updates with those products. What is left of the rule is a recurrence over the new tokens in each row by itself, of
// which four lanes have every fourth token each.
#pragma once

#include "flush.cuh"
#include "state.cuh"
#include "conv.cuh"

namespace gdn {
namespace ring {

// Tiles of 16 rows a warp, and warps of a block: whole heads for the step, whose norm is over them, and where what all rows need
// of a head takes as long as they do.
template <typename ST, int MAX> constexpr int kTiles = sizeof(ST) == 2 && MAX < 16 ? 2 : 1;
template <typename ST, int MAX, typename GIVEN>
constexpr int kTokensWarps = kStep<GIVEN> || MAX == 16 ? 8 / kTiles<ST, MAX> : 4;

// Blocks that a multiprocessor must have registers for.
template <typename T, int WARPS> constexpr int kTokensBlocks = (sizeof(T) == 4 ? 8 : 16) / WARPS;

// Shared memory of a block for up to MAX tokens.
template <typename T, typename ST, int WARPS, int MAX> struct TokensShared {
  using State = StateRows<ST, 16 * kTiles<ST, MAX>>;
  // With 16 tokens rows are closer and meet banks twice: a step with an f32 state then fits in 99 KB.
  static constexpr int kRows = 16 * kTiles<ST, MAX> * WARPS, kStride = MAX == 16 ? kDim + 16 / sizeof(T) : kRowStride<T>;
  alignas(128) typename State::Memory state[WARPS];
  union {
    alignas(16) T tokens[2 * MAX][kStride];    // k and q of token t in rows 2 t and 2 t + 1
    FoldKeys<T> fold;                          // when the tokens are done
  };
  alignas(16) T keys[kWindow][kDim];           // of the ring
  alignas(16) float updates[kWindow][kRows + 4];
  alignas(16) T v[MAX][kRows];                 // and then o
  // k_j . k and k_j . q of the ring's entries, in rows 2 t and 2 t + 1, so far apart that lanes meet few banks twice.
  alignas(16) float of_ring[2 * MAX][kWindow + (MAX == 16 ? 4 : 8)];
  float2 of_tokens[MAX][MAX + 1];              // the same of new tokens, with the decay between; 0 where a token is not before
  alignas(16) float entry_left[kWindow];       // before the new tokens
  float state_left;
  float token_left[MAX], log_step[MAX], beta[MAX], q_scale[MAX];
  Factor k_scale[MAX];
  uint64_t arrived[WARPS];    // the state, a warp's rows
  uint64_t tokens_arrived, entries_arrived;
};

template <typename T, typename ST, int WARPS, int MAX> struct TokensStepShared : TokensShared<T, ST, WARPS, MAX> {
  alignas(16) T z[MAX][kDim];
  float squares[WARPS][MAX];    // of a warp's rows of o, summed
};

template <typename T, typename ST, int MAX, typename GIVEN, int WARPS = kTokensWarps<ST, MAX, GIVEN>>
using TokensSharedOf =
    std::conditional_t<kStep<GIVEN>, TokensStepShared<T, ST, WARPS, MAX>, TokensShared<T, ST, WARPS, MAX>>;

// Products of 16 rows, `stride` apart from `rows` on and no further than the last, with k and q of all tokens: of this lane's
// rows lane / 4 and 8 further with token 4 i + lane % 4, k and q.
template <typename T, int MAX, typename S>
__device__ __forceinline__ void key_products(float (&acc)[MAX / 4][4], const S &shared, const T *rows, int stride, int last,
                                             int lane) {
  using P = Piece<T>;
  const int row = lane / 4, c = lane % 4;
  const T *low = rows + min(row, last) * stride + 8 * c, *high = rows + min(row + 8, last) * stride + 8 * c;
  float rest[MAX / 4][4] = {};
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
  if constexpr (P::kTerms > 1) {
#pragma unroll
    for (int i = 0; i < MAX / 4; ++i)
#pragma unroll
      for (int x = 0; x < 4; ++x) acc[i][x] += rest[i][x];
  }
}

// The rule with Params, the fused step with StepParams.
template <typename T, typename ST, int MAX, typename GIVEN>
__global__ void __launch_bounds__(32 * kTokensWarps<ST, MAX, GIVEN>, (kTokensBlocks<T, kTokensWarps<ST, MAX, GIVEN>>))
tokens_kernel(const __grid_constant__ GIVEN p) {
  constexpr bool STEP = kStep<GIVEN>;
  constexpr int WARPS = kTokensWarps<ST, MAX, GIVEN>, TILES = kTiles<ST, MAX>, kThreads = 32 * WARPS, kTokens = MAX / 4;
  using S = TokensSharedOf<T, ST, MAX, GIVEN>;
  constexpr int ROWS = S::kRows, kWarpRows = 16 * TILES;
  using P = Piece<ST>;
  using K = Piece<T>;
  extern __shared__ __align__(128) unsigned char tokens_shared[];
  S &shared = *reinterpret_cast<S *>(tokens_shared);
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32, row = lane / 4, c = lane % 4;
  const uint32_t head = blockIdx.y, n = blockIdx.z, key_head = p.ratio.of(head), row0 = blockIdx.x * ROWS;
  // Which warps copy rows of tokens and of entries, and make the gates and what decays leave.
  constexpr int kCopyTokens = 0, kGates = 1, kDecays = 2, kCopyEntries = 3;
  const RowCopies token_rows(shared.tokens_arrived, warp == kCopyTokens), entry_rows(shared.entries_arrived, warp == kCopyEntries);
  const typename S::State state(shared.state[warp], shared.arrived[warp]);
  const uint32_t in_slot = p.in.of(n), out_slot = p.out.of(n);
  const Tokens tokens(p, n);
  if (in_slot >= p.in.count || out_slot >= p.out.count) {    // padding
    if constexpr (STEP) ptx::grid_dependency_wait();
    for (uint32_t i = thread; i < tokens.count * ROWS; i += kThreads)
      tokens.template of<T>(p.o, i / ROWS, head)[row0 + i % ROWS] = from_float<T>(0.f);
    return;
  }
  const uint32_t cursor = p.cursors[in_slot];
  const uint32_t warp_row0 = row0 + kWarpRows * warp, within = (head * kDim + warp_row0) * kDim;
  __syncwarp();    // what follows is not to be moved above this

  constexpr uint32_t kRowBytes = kDim * sizeof(T), kRowsBytes = ROWS * sizeof(T), kUpdateBytes = ROWS * sizeof(float);
  float a = 0.f, b = 0.f, decay = 0.f, a_log = 0.f, dt_bias = 0.f;
  if (warp == kGates && p.tokens) a_log = p.a_log[head], dt_bias = p.dt_bias[head];
  float weight[TILES][2];    // of the norm, for this lane's rows
  std::conditional_t<STEP, Convolution<T, MAX, kThreads>, NoConvolution> convolution(p, tokens, head, key_head);
  // What the kernel before this one may have written.
  const auto load_inputs = [&] {
    if constexpr (STEP) {
      ptx::grid_dependency_wait();
      ptx::grid_dependency_launch();
      convolution.load_fresh();
      if (warp == kCopyTokens) {
        token_rows.expect(tokens.count * kRowBytes);
        if (lane < static_cast<int>(tokens.count)) token_rows.copy<kRowBytes>(shared.z[lane], tokens.template of<T>(p.z, lane, head));
      }
    } else if (warp == kCopyTokens) {
      token_rows.expect(tokens.count * (2 * kRowBytes + kRowsBytes));
      if (lane < static_cast<int>(2 * tokens.count))
        token_rows.copy<kRowBytes>(shared.tokens[lane], tokens.template of<T>(lane % 2 ? p.q : p.k, lane / 2, key_head));
      if (lane < static_cast<int>(tokens.count))
        token_rows.copy<kRowsBytes>(shared.v[lane], tokens.template of<T>(p.v, lane, head) + row0);
    }
    if (warp == kGates && lane < static_cast<int>(tokens.count)) {
      a = load_any(p.a.ptr, p.a.index(tokens.seq, tokens.first + lane, head), p.gate_dtype);
      b = load_any(p.b.ptr, p.b.index(tokens.seq, tokens.first + lane, head), p.gate_dtype);
    }
  };
  bool early = true;    // inputs before the wait for the cursor, where there is nothing else to wait for
  if constexpr (STEP) {
    convolution.load_weights();
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        weight[tile][half] = load_any(p.norm_weight, warp_row0 + 16 * tile + row + 8 * half, p.norm_dtype);
    early = !p.overlap;
  }
  if (early) load_inputs();
  const bool moved = p.apart || in_slot != out_slot;
  const Entries ring(p, n, cursor, moved);
  if (ring.count == 0 && !ring.fold) {
    if constexpr (STEP) {
      ptx::grid_dependency_wait();    // for those that wait for this launch
    }
    if (early && warp == kCopyTokens) token_rows.wait();    // before the block's shared memory is another's
    return;
  }
  const int length = static_cast<int>(ring.length), count = static_cast<int>(ring.count);
  if constexpr (STEP) convolution.load_past(ring, in_slot);
  if (warp == kCopyEntries) {
    entry_rows.expect(ring.length * (kRowBytes + kUpdateBytes));
    const T *from = keys_of<T>(p, in_slot, key_head);
    const int run = min(length, static_cast<int>(ring.capacity - ring.first));    // before the ring begins again
    copy_run(shared.keys[0], from + ring.first * kDim, run * kRowBytes, entry_rows.barrier);
    if (run < length) copy_run(shared.keys[run], from, (length - run) * kRowBytes, entry_rows.barrier);
    if (lane < length)
      entry_rows.copy<kUpdateBytes>(shared.updates[lane], updates_of(p, in_slot, head) + (ring.row(lane) * kDim + row0));
  }
  if (warp == kDecays && lane < length) decay = decays_of(p, in_slot, head)[ring.row(lane)];
  // The state behind the entries: they are waited for first.
  __syncwarp();
  state.load(static_cast<const ST *>(p.state_in) + (static_cast<uint64_t>(in_slot) * p.in.stride + within));
  if (!early) load_inputs();
  __syncwarp();
  if constexpr (STEP) {
    convolution.run(shared, ring);
    convolution.keep(ring, out_slot, moved);
  }
#if __CUDA_ARCH__ < 900
  ptx::copy_async_wait<0>();
#endif
  __syncthreads();
  token_rows.wait();

  if (warp == 0) {
    entry_rows.wait();
    float acc[kTokens][4] = {};
    key_products<T, MAX>(acc, shared, shared.keys[0], kDim, kWindow - 1, lane);
#pragma unroll
    for (int i = 0; i < kTokens; ++i)
#pragma unroll
      for (int x = 0; x < 4; ++x) {
        const int j = row + x / 2 * 8;
        shared.of_ring[8 * i + 2 * c + x % 2][j] = j < length ? acc[i][x] : 0.f;
      }
  } else if (warp == kGates) {
    const float log_step = log_decay(a, dt_bias, -expf(a_log));
    float sum = log_step;
#pragma unroll
    for (int d = 1; d < MAX; d *= 2) {
      const float before = __shfl_up_sync(0xffffffffu, sum, d);
      if (lane >= d) sum += before;
    }
    if (lane < MAX) {
      shared.log_step[lane] = log_step, shared.token_left[lane] = expf(sum);
      shared.beta[lane] = p.beta_scale * sigmoid(b);
    }
    if (blockIdx.x == 0 && lane < count) decays_of(p, out_slot, head)[ring.row(length + lane)] = log_step;
    __syncwarp();
    float acc[kTokens][4] = {};
    key_products<T, MAX>(acc, shared, shared.tokens[0], 2 * S::kStride, MAX - 1, lane);
#pragma unroll
    for (int i = 0; i < kTokens; ++i)
#pragma unroll
      for (int half = 0; half < (MAX > 8 ? 2 : 1); ++half) {
        const int t = 4 * i + c, from = row + 8 * half;
        if (from >= MAX) continue;
        float sum = 0.f;
#pragma unroll
        for (int m = 1; m < MAX; ++m)
          if (m > from && m <= t && m < count) sum += shared.log_step[m];
        const float left = expf(sum);
        const bool some = from <= t && t < count;    // a token's own is for q alone
        shared.of_tokens[t][from] = {some && from < t ? left * acc[i][2 * half] : 0.f, some ? left * acc[i][2 * half + 1] : 0.f};
      }
  } else {
    if (warp == kDecays) {
      const Left left(decay, lane);
      if (lane < kWindow) shared.entry_left[lane] = left.entry;
      if (lane == 0) shared.state_left = left.state;
    }
    // k or q of four tokens at a time, eight lanes a token.
    const int part = lane % kLanes;
    for (int job = warp - 2; job < MAX / 2; job += WARPS - 2) {
      const bool is_q = job % 2;
      const int t = job / 2 * kGroups + lane / kLanes;
      SquareSum sum;
#pragma unroll
      for (int run = 0; run < kEach / 8; ++run) {
        float y[8];
        K piece;
        piece.load(shared.tokens[2 * t + is_q] + 8 * (part + kLanes * run));
        piece.floats(y);
#pragma unroll
        for (int i = 0; i < 8; ++i) sum.add_square(y[i]);
      }
#pragma unroll
      for (int d = kLanes / 2; d > 0; d /= 2) sum.add_lane(d);
      if (part == 0 && !is_q) shared.k_scale[t] = p.l2norm ? inverse_root(sum, p.l2_eps) : Factor{1.f, 0.f};
      if (part == 0 && is_q) shared.q_scale[t] = p.l2norm ? rsqrtf(sum.hi + p.l2_eps) * p.scale : p.scale;
    }
  }
  // What the ring gets of a key head, by the first of its value heads.
  if (blockIdx.x == 0 && head == key_head * p.ratio.ratio) {
    constexpr int kChunk = 16 / sizeof(T), kRowChunks = kDim / kChunk;
    T *const to = keys_of<T>(p, out_slot, key_head);
    for (int i = thread; i < count * kRowChunks; i += kThreads) {
      const int t = i / kRowChunks, at = i % kRowChunks * kChunk;
      *reinterpret_cast<uint4 *>(to + ring.row(length + t) * kDim + at) = *reinterpret_cast<const uint4 *>(&shared.tokens[2 * t][at]);
    }
  }
  __syncthreads();

  // Products with the ring's keys, as operands of the products with its updates.
  constexpr int kTerms = sizeof(ST) == 4 ? 3 : 2;
  uint32_t of_ring[kTokens][2][kTerms];
#pragma unroll
  for (int i = 0; i < kTokens; ++i)
#pragma unroll
    for (int s = 0; s < 2; ++s) {
      const float2 of = *reinterpret_cast<const float2 *>(&shared.of_ring[8 * i + row][2 * c + 8 * s]);
      split(of.x, of.y, of_ring[i][s]);
    }
  const auto decayed = [&](int tile) {
    return FoldUpdates<kTerms>([&](int e, int half) {
      const int j = entry_of(e, c);
      return j < length ? shared.entry_left[j] * shared.updates[j][kWarpRows * warp + 16 * tile + row + 8 * half] : 0.f;
    });
  };
  entry_rows.wait();
  const float state_left = shared.state_left;
  // S k and S q of this lane's rows and its tokens 4 i + c.
  float2 x[TILES][2][kTokens];
  state.wait();
#pragma unroll
  for (int tile = 0; tile < TILES; ++tile) {
    const auto rows = &shared.state[warp][16 * tile + row];
    float acc[kTokens][4] = {}, rest[kTokens][4] = {};
#pragma unroll
    for (int m = 0; m < kPieces; ++m) {
      P piece;
      uint32_t a[P::kTerms][4], b[P::kTerms][4], token[K::kTerms][4];
      piece.load(rows[0] + 8 * c + m * kPieceStep), piece.terms(a);
      piece.load(rows[8] + 8 * c + m * kPieceStep), piece.terms(b);
#pragma unroll
      for (int i = 0; i < kTokens; ++i) {
        K piece;
        piece.load(shared.tokens[8 * i + row] + 8 * c + m * kPieceStep);
        piece.terms(token);
        multiply(acc[i], rest[i], a, b, token);
      }
    }
    const FoldUpdates<kTerms> updates = decayed(tile);
#pragma unroll
    for (int i = 0; i < kTokens; ++i) {
      float sum[4] = {};    // with an f32 state of the leading terms, which are to be rounded and not cut off
#pragma unroll
      for (int y = 0; y < 4; ++y)
        acc[i][y] = state_left * (P::kTerms * K::kTerms > 1 ? acc[i][y] + rest[i][y] : acc[i][y]);
#pragma unroll
      for (int u = 0; u < kTerms; ++u)
#pragma unroll
        for (int w = 0; u + w < kTerms; ++w)
          ptx::mma16816<__nv_bfloat16>(kTerms > 2 && u + w == 0 ? sum : acc[i], updates.low[u][0], updates.high[u][0], updates.low[u][1],
                                       updates.high[u][1], of_ring[i][0][w], of_ring[i][1][w]);
      if constexpr (kTerms > 2) {
#pragma unroll
        for (int y = 0; y < 4; ++y) acc[i][y] += sum[y];
      }
      const float left = shared.token_left[4 * i + c];
#pragma unroll
      for (int half = 0; half < 2; ++half) x[tile][half][i] = {left * acc[i][2 * half], left * acc[i][2 * half + 1]};
    }
  }

  // From S k to updates: what a token takes of those before it is taken off when it is their turn.
  {
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
          e = k_scale.times(beta * (to_float(shared.v[t][kWarpRows * warp + 16 * tile + row + 8 * half]) - k_scale.times(e)));
        }
    }
#pragma unroll
    for (int t = 0; t < MAX; ++t) {
      if (t >= count) break;
      float2 of[kTokens];
#pragma unroll
      for (int i = t / 4; i < kTokens; ++i) of[i] = shared.of_tokens[4 * i + c][t], of[i].x *= k_both[i];
#pragma unroll
      for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float e = __shfl_sync(0xffffffffu, x[tile][half][t / 4].x, t % 4, 4);
#pragma unroll
          for (int i = t / 4; i < kTokens; ++i) {
            float2 &to = x[tile][half][i];
            to.x = fmaf(-of[i].x, e, to.x), to.y = fmaf(of[i].y, e, to.y);
          }
        }
    }
  }
  float *const to = updates_of(p, out_slot, head) + warp_row0 + row;
#pragma unroll
  for (int i = 0; i < kTokens; ++i) {
    const int t = 4 * i + c;
    const float q_scale = shared.q_scale[t];
    float *const entry = to + ring.row(length + t) * kDim;
    float square = 0.f;
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float2 &both = x[tile][half][i];
        if (t < count) entry[16 * tile + 8 * half] = both.x;
        both.y *= q_scale;
        square = fmaf(both.y, both.y, square);
      }
    if constexpr (STEP) {
#pragma unroll
      for (int d = 4; d < 32; d *= 2) square += __shfl_xor_sync(0xffffffffu, square, d);
      if (row == 0) shared.squares[warp][t] = square;
    }
  }
  if constexpr (STEP) __syncthreads();
#pragma unroll
  for (int i = 0; i < kTokens; ++i) {
    const int t = 4 * i + c;
    float scale = 1.f;
    if constexpr (STEP) {
      float sum = 0.f;
#pragma unroll
      for (int w = 0; w < WARPS; ++w) sum += shared.squares[w][t];
      scale = rsqrtf(sum * (1.f / kDim) + p.norm_eps);
    }
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int r = kWarpRows * warp + 16 * tile + row + 8 * half;
        float o = x[tile][half][i].y;
        if constexpr (STEP) {
          const float gate = to_float(shared.z[t][r]);
          o *= scale * weight[tile][half] * (p.sigmoid ? fast_sigmoid(gate) : fast_silu(gate));
        }
        shared.v[t][r] = from_float<T>(o);
      }
  }
  __syncwarp();
  {
    constexpr int kAtOnce = 32 / kWarpRows;
    const int r = lane % kWarpRows;
    T *o = tokens.template of<T>(p.o, lane / kWarpRows, head) + warp_row0 + r;
    for (int t = lane / kWarpRows; t < count; t += kAtOnce, o += kAtOnce * p.o.token) *o = shared.v[t][kWarpRows * warp + r];
  }
  if (!ring.fold) return;

  __syncthreads();    // the tokens are done
  shared.fold.fill(shared.keys[0], kDim, length, thread, kThreads);
  __syncthreads();
  ST *out = static_cast<ST *>(p.state_out) + (static_cast<uint64_t>(out_slot) * p.out.stride + within);
#pragma unroll
  for (int tile = 0; tile < TILES; ++tile)
    fold_rows<ST, T>(shared.state[warp] + 16 * tile, out + 16 * tile * kDim, state_left, shared.fold, decayed(tile), lane);
}

}  // namespace ring
}  // namespace gdn
