// The step of several tokens a sequence, above all decode's drafts. A warp has 16 or 32 rows of a head. The state, which only a
// flush changes, is multiplied with k and q of all tokens at once on tensor cores; so are the ring's keys and the new keys, once a
// block, and the ring's updates with those products. What remains of the rule is a recurrence over the new tokens in each row by
// itself, of which four lanes have every fourth token each.
#pragma once

#include "tokens_parts.cuh"

namespace gdn {
namespace ring {

// One function: the state's products, the updates and the flush share registers.
template <typename T, typename ST, int MAX, int K, int V>
__global__ void __launch_bounds__(32 * kTokensWarps<ST, MAX, V>, (kTokensBlocks<T, ST, MAX, V>))
tokens_kernel(const __grid_constant__ gdn_ring_step_params p, const __grid_constant__ Sizes sizes) {
  using S = TokensShared<T, ST, MAX, K, V>;
  constexpr int WARPS = S::kWarps, TILES = kTiles<ST, MAX, V>, kThreads = 32 * WARPS, kTokens = MAX / 4, kWarpRows = 16 * TILES;
  using F = Fragment<ST>;
  using KeyFragment = Fragment<T>;
  extern __shared__ __align__(128) unsigned char tokens_shared[];
  S &shared = *reinterpret_cast<S *>(tokens_shared);
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32, row = lane / 4, c = lane % 4;
  const uint32_t head = blockIdx.y, n = blockIdx.z, key_head = sizes.key_head(head);
  const gdn_common &common = p.common;
  // Which warps copy rows of tokens and of entries, and compute the gates and the products of decays.
  constexpr int kCopyTokens = 0, kGates = 1, kDecays = 2, kCopyEntries = 3;
  const RowCopies token_rows(shared.tokens_arrived, warp == kCopyTokens), entry_rows(shared.entries_arrived, warp == kCopyEntries);
  const typename S::State state(shared.state[warp], shared.arrived[warp]);

  // Slots, tokens and spans.
  const uint32_t in_slot = step::slot_number(common.in_slots, n), out_slot = step::slot_number(common.out_slots, n);
  const Tokens tokens(common.seqs, n);
  if (in_slot >= step::num_slots_of(common.in_slots) || out_slot >= step::num_slots_of(common.out_slots)) {    // padding
    ptx::grid_dependency_wait();
    for (uint32_t i = thread; i < tokens.count * V; i += kThreads)
      tokens.out_row<T>(p.layer.out, i / V, head)[i % V] = from_float<T>(0.f);
    return;
  }
  const uint32_t span = p.ring.spans[in_slot];
  const uint32_t warp_row0 = kWarpRows * warp, within = (head * V + warp_row0) * K;
  __syncwarp();    // later loads stay after this

  // Load the weights, then the inputs, unless these come from a kernel that may still run.
  constexpr uint32_t kKeyBytes = K * sizeof(T), kValueBytes = V * sizeof(T), kUpdateBytes = V * sizeof(float);
  float a = 0.f, b = 0.f, decay = 0.f, a_log = 0.f, dt_bias = 0.f;
  if (warp == kGates) a_log = common.a_log[head], dt_bias = static_cast<const float *>(common.dt_bias)[head];
  float weight[TILES][2];    // of the norm, for this lane's rows
  Convolution<T, MAX, kThreads, K, V> convolution(p, sizes, tokens, head, key_head);
  const auto load_inputs = [&] {
    ptx::grid_dependency_wait();
    ptx::grid_dependency_launch();
    convolution.load_inputs();
    if (!S::kLean && warp == kCopyTokens) {
      token_rows.expect(tokens.count * kValueBytes);
      if (lane < static_cast<int>(tokens.count)) token_rows.copy<kValueBytes>(shared.z[lane], tokens.row<T>(p.layer.z, lane, head));
    }
    if (warp == kGates && lane < static_cast<int>(tokens.count)) {
      a = load_any(common.a.ptr, tokens.index(common.a, lane, head), common.gate_dtype);
      b = load_any(common.b.ptr, tokens.index(common.b, lane, head), common.gate_dtype);
    }
  };
  convolution.load_weights();
#pragma unroll
  for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
    for (int half = 0; half < 2; ++half)
      weight[tile][half] = load_any(p.layer.norm_weight, warp_row0 + 16 * tile + row + 8 * half, p.layer.norm_dtype);
  if (!p.layer.overlap) load_inputs();

  const bool moved = in_slot != out_slot;
  const Entries ring(p.ring, span, tokens.count, moved);
  if (ring.count == 0 && !ring.flush) {
    ptx::grid_dependency_wait();    // dependent launches rely on all earlier kernels being complete
    if (!S::kLean && !p.layer.overlap && warp == kCopyTokens) token_rows.wait();    // before another block gets the shared memory
    return;
  }

  // Load the entries.
  const int length = static_cast<int>(ring.length), count = static_cast<int>(ring.count);
  convolution.load_window(ring, in_slot);
  const T *const keys = keys_of<T, K>(p.ring, in_slot, key_head);
  const float *const old_updates = updates_of<V>(p.ring, in_slot, head);
  if (!S::kLean && warp == kCopyEntries) {
    entry_rows.expect(ring.length * (kKeyBytes + kUpdateBytes));
    const int run = min(length, static_cast<int>(ring.capacity - ring.head));    // up to the last row
    copy_run(shared.keys[0], keys + ring.head * K, run * kKeyBytes, entry_rows.barrier);
    if (run < length) copy_run(shared.keys[run], keys, (length - run) * kKeyBytes, entry_rows.barrier);
    if (lane < length) entry_rows.copy<kUpdateBytes>(shared.updates[lane], old_updates + ring.row(lane) * V);
  }
  const auto entry_key = [&](int j) -> const T * { return S::kLean ? keys + ring.row(j) * K : shared.keys[j]; };
  if (warp == kDecays && lane < length) decay = decays_of(p.ring, in_slot, head)[ring.row(lane)];

  // Load the state, after the entries, which are waited for first.
  __syncwarp();
  state.load(step::state_at<ST>(common.state_in, common.in_slots, in_slot) + within);
  if (p.layer.overlap) load_inputs();
  __syncwarp();

  // Convolution.
  convolution.template run<true, !S::kLateValues>(shared, ring);
  convolution.append(ring, out_slot, moved);
#if __CUDA_ARCH__ < 900
  ptx::copy_async_commit();    // of z, where it came after the state
  ptx::copy_async_wait<0>();
#endif
  __syncthreads();
  if (!S::kLean) token_rows.wait();

  // Products of keys, gates, decays and norms.
  if (warp == 0) {
    if (!S::kLean) entry_rows.wait();
    float acc[kTokens][4] = {};
    // Rows past the last entry may lie outside a small ring. Their products count for nothing.
    key_products<T, MAX, K>(acc, shared, [&](int j) { return entry_key(max(min(j, length - 1), 0)); }, lane);
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
      shared.log_step[lane] = log_step, shared.token_decay[lane] = expf(sum);
      shared.beta[lane] = common.beta_scale * sigmoid(b);
    }
    if (lane < count) decays_of(p.ring, out_slot, head)[ring.row(length + lane)] = log_step;
    __syncwarp();
    products_of_tokens<T, MAX, K>(shared, count, lane);
  } else {
    if (warp == kDecays) {
      const DecayProducts products(decay, lane);
      if (lane < kEntries) shared.entry_decay[lane] = products.entry;
      if (lane == 0) shared.state_decay = products.state;
    }
    norms_of_tokens<T, MAX, K>(shared, common, warp - 2, WARPS - 2, lane);
  }

  // Append the keys, by the first value head of a key head.
  if (head == key_head * sizes.ratio) {
    constexpr int kChunk = 16 / sizeof(T), kRowChunks = K / kChunk;
    T *const new_keys = keys_of<T, K>(p.ring, out_slot, key_head);
    for (int i = thread; i < count * kRowChunks; i += kThreads) {
      const int t = i / kRowChunks, column = i % kRowChunks * kChunk;
      *reinterpret_cast<uint4 *>(new_keys + ring.row(length + t) * K + column) =
          *reinterpret_cast<const uint4 *>(&shared.tokens[2 * t][column]);
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
      const float2 products = *reinterpret_cast<const float2 *>(&shared.of_ring[8 * i + row][2 * c + 8 * s]);
      split(products.x, products.y, of_ring[i][s]);
    }
  const auto decayed_updates = [&](int tile) {
    return FlushUpdates<kTerms>([&](int e, int half) {
      const int j = entry_of(e, c), r = kWarpRows * warp + 16 * tile + row + 8 * half;
      return j < length ? shared.entry_decay[j] * (S::kLean ? old_updates[ring.row(j) * V + r] : shared.updates[j][r]) : 0.f;
    });
  };
  if (!S::kLean) entry_rows.wait();
  const float state_decay = shared.state_decay;

  // Products of the state and the ring with k and q: of this lane's rows with its tokens 4 i + c.
  float2 x[TILES][2][kTokens];
  state.wait();
#pragma unroll
  for (int tile = 0; tile < TILES; ++tile) {
    const auto rows = &shared.state[warp][16 * tile + row];
    float acc[kTokens][4] = {}, rest[kTokens][4] = {};
#pragma unroll
    for (int m = 0; m < kFragments<K>; ++m) {
      F fragment;
      uint32_t low[F::kTerms][4], high[F::kTerms][4], token[KeyFragment::kTerms][4];
      fragment.load(rows[0] + 8 * c + m * kFragmentStep), fragment.terms(low);
      fragment.load(rows[8] + 8 * c + m * kFragmentStep), fragment.terms(high);
#pragma unroll
      for (int i = 0; i < kTokens; ++i) {
        KeyFragment key;
        key.load(shared.tokens[8 * i + row] + 8 * c + m * kFragmentStep);
        key.terms(token);
        multiply(acc[i], rest[i], low, high, token);
      }
    }
    const FlushUpdates<kTerms> updates = decayed_updates(tile);
#pragma unroll
    for (int i = 0; i < kTokens; ++i) {
      float sum[4] = {};    // with an f32 state of the leading terms, which must be rounded and not truncated
#pragma unroll
      for (int y = 0; y < 4; ++y)
        acc[i][y] = state_decay * (F::kTerms * KeyFragment::kTerms > 1 ? acc[i][y] + rest[i][y] : acc[i][y]);
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
      const float token_decay = shared.token_decay[4 * i + c];
#pragma unroll
      for (int half = 0; half < 2; ++half) x[tile][half][i] = {token_decay * acc[i][2 * half], token_decay * acc[i][2 * half + 1]};
    }
  }

  // Values, where they were left in registers.
  if constexpr (S::kLateValues) {
    __syncthreads();    // the last use of tokens
    convolution.template run<false, true>(shared, ring);
    __syncthreads();
  }

  // Updates and outputs.
  solve_updates<T, MAX, TILES>(x, shared, count, kWarpRows * warp + row, c);
  float *const updates = updates_of<V>(p.ring, out_slot, head) + warp_row0 + row;
#pragma unroll
  for (int i = 0; i < kTokens; ++i) {
    const int t = 4 * i + c;
    const float q_scale = shared.q_scale[t];
    float *const entry = updates + ring.row(length + t) * V;
    float square = 0.f;
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float2 &update = x[tile][half][i];
        if (t < count) entry[16 * tile + 8 * half] = update.x;
        update.y *= q_scale;
        square = fmaf(update.y, update.y, square);
      }
#pragma unroll
    for (int d = 4; d < 32; d *= 2) square += __shfl_xor_sync(0xffffffffu, square, d);
    if (row == 0) shared.squares[warp][t] = square;
  }
  __syncthreads();

  // Norm and store.
#pragma unroll
  for (int i = 0; i < kTokens; ++i) {
    const int t = 4 * i + c;
    float sum = 0.f;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) sum += shared.squares[w][t];
    const float scale = rsqrtf(sum * (1.f / V) + p.layer.norm_eps);
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int r = kWarpRows * warp + 16 * tile + row + 8 * half;
        float o = x[tile][half][i].y;
        const float gate = to_float(!S::kLean ? shared.z[t][r] : t < count ? tokens.row<T>(p.layer.z, t, head)[r] : T{});
        o *= scale * weight[tile][half] * (p.layer.sigmoid ? fast_sigmoid(gate) : fast_silu(gate));
        shared.v(t)[r] = from_float<T>(o);
      }
  }
  __syncwarp();
  {
    constexpr int kAtOnce = 32 / kWarpRows;
    const int r = lane % kWarpRows;
    T *o = tokens.out_row<T>(p.layer.out, lane / kWarpRows, head) + warp_row0 + r;
    for (int t = lane / kWarpRows; t < count; t += kAtOnce, o += kAtOnce * p.layer.out.token_stride)
      *o = shared.v(t)[kWarpRows * warp + r];
  }

  // Flush.
  if (!ring.flush) return;
  __syncthreads();    // the last use of tokens and values
  shared.flush.fill(entry_key, length, thread, kThreads);
  __syncthreads();
  ST *out = const_cast<ST *>(step::state_at<ST>(common.state_out, common.out_slots, out_slot)) + within;
#pragma unroll
  for (int tile = 0; tile < TILES; ++tile)
    flush_rows(shared.state[warp] + 16 * tile, out + 16 * tile * K, state_decay, shared.flush, decayed_updates(tile), lane);
}

}  // namespace ring
}  // namespace gdn
