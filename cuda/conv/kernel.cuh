// Depthwise causal convolution over time with its rolling state, then SiLU.
//
// A thread owns N neighbouring channels (one where alignment or little work asks for it) and a run of tokens; its window of
// the last W - 1 inputs lives in registers, so that an input is read once per run, plus W - 1 inputs before the run.
// Inputs come a group of rows at a time, one group ahead of the one at work; long ones in short runs, of which all is on its
// way at once.
// Only the thread that owns a sequence's first run reads the old state, and that same thread writes the new one, after
// all it had to read: with state_in == state_out no other thread can see either.
#pragma once

#include "../common/convert.cuh"
#include "../common/host.cuh"
#include "../common/launch.cuh"
#include "../common/ptx.cuh"
#include "../common/sequences.cuh"
#include "../norm/rows.cuh"

namespace gdn {
namespace conv {

// Measured (README.md).
constexpr int kThreads = 128, kAcross = 128;    // of a block, and those of them side by side over channels; the rest are further runs
constexpr int kChannels = 4;      // a thread, where rows are aligned for it and it is at most 16 bytes
constexpr int kGroupRows = 4;     // a load group
constexpr int kWaves = 1;         // fillings of the card, at least, that inputs are cut into
constexpr int kMaxRun = 256, kTileTokens = 16;    // tokens a run, and of a run of long inputs
constexpr int kSpareRegisters = 32;    // of a thread, besides weights, window, rows and two a tap
constexpr int kRunsPerBlock = kThreads / kAcross;
constexpr int64_t kMaxGridYZ = 65535;

struct Plan {
  int32_t first_seq;    // of this launch
  int32_t runs;         // runs of tokens a sequence
  int32_t run;          // tokens a run
};

// What a kernel is made of.
template <typename T, int W, int N> struct Shape {
  static constexpr int kGroup = N * sizeof(T) >= 8 ? kGroupRows : 8;
  // A run is no shorter than this, nor than W - 1: only a first run may reach the old state.
  static constexpr int kMinRun = kGroup >= 8 || W - 1 > 4 ? 8 : 4;
  static constexpr int kRowWords = N * sizeof(T) >= 4 ? N * sizeof(T) / 4 : 1;
  static constexpr int kRegisters = N * (2 * W - 1) + 2 * kGroup * kRowWords + 2 * W + kSpareRegisters;
  static constexpr int kFit = 65536 / (kThreads * kRegisters);
  static constexpr int kBlocks = kFit < 1 ? 1 : kFit > 8 ? 8 : kFit;    // a multiprocessor
};

// One token: `window` holds the last W - 1 inputs, oldest first, and moves on.
template <bool SILU, typename T, int W, int N>
__device__ __forceinline__ void token(const Row<T, N> &row, const float (&weight)[N * W], float (&window)[W - 1][N], T *y) {
  float out[N];
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const float now = row[i];
    float sum = 0.f;
#pragma unroll
    for (int j = 0; j < W - 1; ++j) sum = fmaf(weight[i * W + j], window[j][i], sum);
    sum = fmaf(weight[i * W + W - 1], now, sum);
    out[i] = SILU ? sum * row_sigmoid(sum) : sum;
#pragma unroll
    for (int j = 0; j < W - 2; ++j) window[j][i] = window[j + 1][i];
    window[W - 2][i] = now;
  }
  store_row(y, out);
}

// A run's rows on their way to its thread, in groups of G. Here a group in registers, while the one before is at work.
template <typename T, int N, int G> struct Ahead {
  static constexpr int kShared = 1;    // rows in shared memory
  Row<T, N> next[G];
  const T *from;
  int64_t stride;

  __device__ __forceinline__ Ahead(Row<T, N> *, int64_t stride) : stride(stride) {}
  __device__ __forceinline__ void begin(const T *rows, int remaining) {
    from = rows;
    load_group(next, from, stride, remaining);
  }
  __device__ __forceinline__ void take(Row<T, N> (&rows)[G], int remaining) {
#pragma unroll
    for (int u = 0; u < G; ++u) rows[u] = next[u];
    load_group(next, from, stride, remaining - G);
  }
};

// Here all of a run of up to ROWS, in shared memory, each row where only its thread looks: it waits for its own copies alone.
template <typename T, int N, int G, int ROWS> struct Tile {
  static constexpr int kShared = ROWS * kThreads, kGroups = ROWS / G;
  static_assert(sizeof(Row<T, N>) == 8 && ROWS % G == 0, "whole groups of rows of 8 bytes");
  uint32_t first, at = 0;
  int64_t stride;

  __device__ __forceinline__ Tile(Row<T, N> *shared, int64_t stride) : first(ptx::shared_address(shared + threadIdx.x)), stride(stride) {}
  __device__ __forceinline__ void begin(const T *rows, int remaining) {
    at = first;
#pragma unroll
    for (int u = 0; u < ROWS; ++u, rows += stride) {
      if (u < remaining) ptx::copy_async_8(first + u * (8 * kThreads), rows);
      if (u % G == G - 1) ptx::copy_async_commit();
    }
  }
  __device__ __forceinline__ void take(Row<T, N> (&rows)[G], int) {
    ptx::copy_async_commit();    // of nothing: as many groups are younger than the one that is taken, whichever it is
    ptx::copy_async_wait<kGroups>();
#pragma unroll
    for (int u = 0; u < G; ++u, at += 8 * kThreads) {
      const uint2 row = ptx::load_shared_8(at);
      rows[u].word[0] = row.x, rows[u].word[1] = row.y;
    }
  }
};

// `remaining` tokens, which `source` has begun.
template <bool SILU, typename T, int W, int N, int G, typename Source>
__device__ __forceinline__ void walk(Source &source, T *y, int64_t y_stride, int remaining, const float (&weight)[N * W],
                                     float (&window)[W - 1][N]) {
#pragma unroll 1
  for (; remaining > 0; remaining -= G) {
    Row<T, N> rows[G];
    source.take(rows, remaining);
    if (remaining >= G) {
#pragma unroll
      for (int u = 0; u < G; ++u, y += y_stride) token<SILU, T, W, N>(rows[u], weight, window, y);
    } else {
#pragma unroll
      for (int u = 0; u < G; ++u, y += y_stride) {
        if (u >= remaining) break;
        token<SILU, T, W, N>(rows[u], weight, window, y);
      }
    }
  }
}

template <typename T, int W, int N, typename Source>
__global__ void __launch_bounds__(kThreads, Shape<T, W, N>::kBlocks)
    conv_kernel(const __grid_constant__ gdn_conv_params p, const __grid_constant__ Plan plan) {
  constexpr int G = Shape<T, W, N>::kGroup;
  const int channel = (blockIdx.x * kAcross + threadIdx.x % kAcross) * N;
  const int first_run = blockIdx.y * kRunsPerBlock + threadIdx.x / kAcross;
  const int64_t step = static_cast<int64_t>(plan.runs) * plan.run;
  const int n = plan.first_seq + blockIdx.z;
  if (channel >= p.channels) return;

  const Tokens seq = tokens_of(p.seqs, n);
  const int64_t x_stride = p.x.token_stride, y_stride = p.y.token_stride;
  const T *x = static_cast<const T *>(p.x.ptr) + n * p.x.seq_stride + seq.first * x_stride + channel;
  T *y = static_cast<T *>(const_cast<void *>(p.y.ptr)) + n * p.y.seq_stride + seq.first * y_stride + channel;

  // The first inputs are on their way before anything else is asked for.
  __shared__ Row<T, N> shared[Source::kShared];
  Source source(shared, x_stride);
  int64_t t0 = static_cast<int64_t>(first_run) * plan.run;
  const auto remaining = [&] { return static_cast<int>(min(static_cast<int64_t>(plan.run), seq.count - t0)); };
  source.begin(x + t0 * x_stride, remaining());

  const int64_t in_slot = slot_of(p.in_slots, n), out_slot = slot_of(p.out_slots, n);
  if (in_slot < 0 || out_slot < 0) {    // padding
    const float zero[N] = {};
    for (; t0 < seq.count; t0 += step)
      for (int64_t t = t0; t < t0 + remaining(); ++t) store_row(y + t * y_stride, zero);
    return;
  }
  const T *old_state = static_cast<const T *>(p.state_in) + in_slot * p.in_slots.slot_stride + channel;
  T *new_state = static_cast<T *>(p.state_out) + out_slot * p.out_slots.slot_stride + channel;

  Row<T, N> before[W - 1];    // the inputs before the run
  if (t0 < seq.count) {
    const T *at = t0 == 0 ? old_state : x + (t0 - (W - 1)) * x_stride;
    const int64_t stride = t0 == 0 ? static_cast<int64_t>(p.channels) : x_stride;
#pragma unroll
    for (int j = 0; j < W - 1; ++j, at += stride) before[j] = load_row<T, N>(at);
  }

  float weight[N * W];    // [channel][tap]
  {
    const int64_t at = static_cast<int64_t>(channel) * W;
    if (p.weight_dtype == GDN_F32) load_weights(static_cast<const float *>(p.weight) + at, weight);
    else if (p.weight_dtype == GDN_BF16) load_weights(static_cast<const __nv_bfloat16 *>(p.weight) + at, weight);
    else load_weights(static_cast<const __half *>(p.weight) + at, weight);
  }

  float window[W - 1][N];
  while (t0 < seq.count) {
#pragma unroll
    for (int j = 0; j < W - 1; ++j)
#pragma unroll
      for (int i = 0; i < N; ++i) window[j][i] = before[j][i];
    const int tokens = remaining();
    if (p.silu) walk<true, T, W, N, G>(source, y + t0 * y_stride, y_stride, tokens, weight, window);
    else walk<false, T, W, N, G>(source, y + t0 * y_stride, y_stride, tokens, weight, window);
    // More runs than the host foresaw are taken in turn.
    t0 += step;
    if (t0 >= seq.count) break;
    const T *from = x + (t0 - (W - 1)) * x_stride;
#pragma unroll
    for (int j = 0; j < W - 1; ++j, from += x_stride) before[j] = load_row<T, N>(from);
    source.begin(from, remaining());
  }

  if (first_run == 0) {
    // The last W - 1 of (old state, inputs): at hand when the sequence was one run, else read anew. All is read before
    // any is written, because a short sequence moves rows within the state. The conversions are exact both ways.
    if (seq.count <= 0 || seq.count > plan.run) {
#pragma unroll
      for (int j = 0; j < W - 1; ++j) {
        const int t = seq.count - (W - 1) + j;
        load_pack<T, N>(t < 0 ? old_state + static_cast<int64_t>(t + W - 1) * p.channels : x + t * x_stride, window[j]);
      }
    }
#pragma unroll
    for (int j = 0; j < W - 1; ++j) store_row(new_state + static_cast<int64_t>(j) * p.channels, window[j]);
  }
}

template <typename T, int W, int N> int launch(const gdn_conv_params &p, int sms, cudaStream_t stream) {
  using S = Shape<T, W, N>;
  static_assert(S::kMinRun >= W - 1 && kTileTokens >= W - 1, "a later run would need the old state");
  // One run a thread the card has room for, so that inputs are read twice as rarely as can be; of very long inputs
  // several, all full.
  const int64_t tokens = max_tokens(p.seqs) > 0 ? max_tokens(p.seqs) : 1;
  const int64_t channel_blocks = ceil_div(p.channels, kAcross * N);
  const int64_t all_columns = channel_blocks * p.seqs.num_seqs, columns = all_columns < kMaxBlocks ? all_columns : kMaxBlocks;
  const int64_t full = static_cast<int64_t>(sms) * S::kBlocks * kRunsPerBlock;
  const int64_t least = ceil_div(columns * tokens, kMaxRun * full);
  const int64_t room = (least > kWaves ? least : kWaves) * full / columns;
  int64_t run = ceil_div(ceil_div(tokens, room > 1 ? room : 1), S::kGroup) * S::kGroup;
  if (run < S::kMinRun) run = S::kMinRun;
  // Of inputs of several fillings of the card short runs, in order, so that what is on its way lies close together: 16 tokens
  // each take 9 % less at 8192 tokens of 8192 channels than one filling of 168.
  void (*kernel)(gdn_conv_params, Plan) = conv_kernel<T, W, N, Ahead<T, N, S::kGroup>>;
  if constexpr (N * sizeof(T) == 8) {
    if (run >= 2 * kTileTokens) run = kTileTokens, kernel = conv_kernel<T, W, N, Tile<T, N, S::kGroup, kTileTokens>>;
  }
  int64_t run_blocks = ceil_div(ceil_div(tokens, run), kRunsPerBlock);
  if (run_blocks > kMaxGridYZ) run_blocks = kMaxGridYZ;
  Plan plan = {0, static_cast<int32_t>(run_blocks * kRunsPerBlock), static_cast<int32_t>(run)};
  while (plan.first_seq < p.seqs.num_seqs) {
    const int32_t rest = p.seqs.num_seqs - plan.first_seq, seqs = rest < kMaxGridYZ ? rest : kMaxGridYZ;
    const dim3 grid(static_cast<unsigned>(channel_blocks), static_cast<unsigned>(run_blocks), static_cast<unsigned>(seqs));
    if (const int status = gdn::launch(kernel, {grid, dim3(kThreads), 0, stream}, p, plan)) return status;
    plan.first_seq += seqs;
  }
  return GDN_OK;
}

template <typename T, int W> int with_width(const gdn_conv_params &p, int sms, cudaStream_t stream) {
  constexpr int kMost = 16 / sizeof(T), kVec = kChannels < kMost ? kChannels : kMost;
  constexpr int kBytes = kVec * sizeof(T);
  const bool vec = p.channels % kVec == 0 && aligned_tokens(p.x, kVec, p.io_dtype) &&
                   aligned_tokens(p.y, kVec, p.io_dtype) && aligned(p.state_in, kBytes) && aligned(p.state_out, kBytes) &&
                   p.in_slots.slot_stride % kVec == 0 && p.out_slots.slot_stride % kVec == 0;
  // Wide threads, but for so little work that they would leave most of the card idle.
  const int64_t rows = static_cast<int64_t>(p.seqs.num_seqs) * max_tokens(p.seqs);
  if (vec && rows >= ceil_div(512LL * sms, p.channels)) return launch<T, W, kVec>(p, sms, stream);
  return launch<T, W, 1>(p, sms, stream);
}

template <typename T> int launch_conv(const gdn_conv_params &p, int sms, cudaStream_t stream) {
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
