// The backward pass of the convolution: y = silu(p), p_t = sum_j w_j x_(t - W + 1 + j).
//
//   dp = dy silu'(p)      dx_t = sum_j w_j dp_(t + W - 1 - j)      dw_j = sum over t of dp_t x_(t - W + 1 + j)
//
// Rows are those of all sequences one after the other. A block owns 128 channels and tiles of kTokens rows: it copies the tile's x
// and dy and the rows around it to shared memory at once, and a warp then walks through its share of the rows, four channels a
// lane, with the last inputs and the last dp in registers. Where a sequence begins, the rows before it are the old state; where
// one ends, dp is zero after it. A block keeps its sums for dw over all its tiles; sum_rows() adds the blocks'.
#pragma once

#include "../common/convert.cuh"
#include "../common/launch.cuh"
#include "../common/ptx.cuh"
#include "../common/sequences.cuh"
#include "../norm/rows.cuh"
#include "backward.h"

namespace gdn {
namespace conv {

constexpr int kTileWarps = 4, kTileThreads = 32 * kTileWarps, kLaneChannels = kTileChannels / 32;

template <typename T, int W> struct BackwardTile {
  static constexpr int kTokens = tile_tokens(sizeof(T)), kOwn = kTokens / kTileWarps, kBefore = W - 1;
  static constexpr int kInputs = kTokens + 2 * kBefore, kGradients = kTokens + kBefore;    // rows of x from kBefore before the tile on, and of dy
  static constexpr int kBlocks = W == 4 && std::is_same_v<T, __half> ? 3 : W <= 2 ? 5 : W <= 4 ? 4 : W <= 6 ? 3 : 2;
  union Shared {
    struct {
      alignas(16) T x[kInputs][kTileChannels];
      T dy[kGradients][kTileChannels];
    } rows;
    float sums[kTileWarps][kTileChannels * W];
  };
};

// Rows of a tensor [sequence, token, channel] by their number.
template <typename T> struct Rows {
  T *at;
  int64_t seq_stride, token_stride;
  int32_t tokens_per_seq;    // 0: all rows are token_stride apart

  __device__ __forceinline__ T *row(int64_t r) const {
    if (tokens_per_seq == 0) return at + r * token_stride;
    const uint32_t row = static_cast<uint32_t>(r), n = row / static_cast<uint32_t>(tokens_per_seq);
    return at + n * seq_stride + (row - n * static_cast<uint32_t>(tokens_per_seq)) * token_stride;
  }
  // Whether rows first .. last are token_stride apart.
  __device__ __forceinline__ bool even(int64_t first, int64_t last) const {
    return tokens_per_seq == 0 || static_cast<uint32_t>(first) / tokens_per_seq == static_cast<uint32_t>(last) / tokens_per_seq;
  }
};
template <typename T> __device__ __forceinline__ Rows<T> rows_of(const gdn_heads &x, const gdn_sequences &s) {
  const bool apart = !s.cu_seqlens && s.num_seqs > 1 && x.seq_stride != s.tokens_per_seq * x.token_stride;
  return {static_cast<T *>(const_cast<void *>(x.ptr)), x.seq_stride, x.token_stride, apart ? s.tokens_per_seq : 0};
}

// Copies rows first .. first + COUNT of 128 channels from `channel` on, those between 0 and `rows`.
template <typename T, int COUNT>
__device__ __forceinline__ void copy_rows(T (*to)[kTileChannels], const Rows<const T> &from, int64_t first, int64_t rows, int channel,
                                          int channels, bool vec) {
  constexpr int kPiece = 16 / sizeof(T), kPieces = kTileChannels / kPiece, kStep = kTileThreads / kPieces;
  const int begin = first < 0 ? static_cast<int>(-first) : 0, end = static_cast<int>(min(static_cast<int64_t>(COUNT), rows - first));
  if (vec) {
    const int piece = threadIdx.x % kPieces * kPiece;
    if (channel + piece >= channels || begin >= end) return;
    const bool even = from.even(first + begin, first + end - 1);
    const T *base = from.row(first + begin) + channel + piece;
#pragma unroll
    for (int i = threadIdx.x / kPieces; i < COUNT; i += kStep)
      if (i >= begin && i < end)
        ptx::copy_async(ptx::shared_address(&to[i][piece]),
                        even ? base + (i - begin) * from.token_stride : from.row(first + i) + channel + piece);
  } else {
    const int at = threadIdx.x;
    static_assert(kTileThreads == kTileChannels, "a thread a channel");
    if (channel + at >= channels) return;
    for (int i = begin; i < end; ++i) to[i][at] = from.row(first + i)[channel + at];
  }
}

template <typename T> __device__ __forceinline__ void load_channels(const T *from, int valid, float (&x)[kLaneChannels]) {
#pragma unroll
  for (int c = 0; c < kLaneChannels; ++c) x[c] = c < valid ? to_float(from[c]) : 0.f;
}

// The taps of a lane's channels; zero for channels that do not exist.
template <typename T, int W>
__device__ __forceinline__ void load_taps(const void *from, int channel, int valid, float (&weight)[kLaneChannels][W]) {
  const T *taps = static_cast<const T *>(from) + static_cast<int64_t>(channel) * W;
  float x[kLaneChannels * W] = {};
  if (valid == kLaneChannels) load_weights(taps, x);
  else
    for (int i = 0; i < kLaneChannels * W; ++i) x[i] = i < valid * W ? to_float(taps[i]) : 0.f;
#pragma unroll
  for (int i = 0; i < kLaneChannels * W; ++i) weight[i / W][i % W] = x[i];
}

template <int W> __device__ __forceinline__ float derivative(const float (&weight)[W], const float (&x)[W], float dy, bool silu) {
  float p = 0.f;
#pragma unroll
  for (int j = 0; j < W; ++j) p = fmaf(weight[j], x[j], p);
  const float s = row_sigmoid(p), slope = fmaf(p * s, 1.f - s, s);
  return silu ? dy * slope : dy;
}

// What a lane holds of its channels: the last W inputs and W gradients of p, oldest first, and its sums.
template <int W> struct Lane {
  float weight[kLaneChannels][W], x[kLaneChannels][W], dp[kLaneChannels][W], sum[kLaneChannels][W];

  // The next row; past the end of the sequence there is none and dp is zero.
  template <bool OWN, typename T> __device__ __forceinline__ void next(const T *inputs, const T *gradients, bool there, bool silu) {
    const Row<T, kLaneChannels> x_row = load_row<T, kLaneChannels>(inputs), dy_row = load_row<T, kLaneChannels>(gradients);
#pragma unroll
    for (int c = 0; c < kLaneChannels; ++c) {
#pragma unroll
      for (int j = 0; j < W - 1; ++j) x[c][j] = x[c][j + 1], dp[c][j] = dp[c][j + 1];
      x[c][W - 1] = x_row[c];
      const float d = derivative<W>(weight[c], x[c], dy_row[c], silu);
      dp[c][W - 1] = there ? d : 0.f;
      if (OWN)
#pragma unroll
        for (int j = 0; j < W; ++j) sum[c][j] = fmaf(dp[c][W - 1], x[c][j], sum[c][j]);
    }
  }

  // dx of the row W - 1 before the last.
  template <typename T> __device__ __forceinline__ void store(T *to, int valid, bool vec) const {
    float dx[kLaneChannels];
#pragma unroll
    for (int c = 0; c < kLaneChannels; ++c) {
      dx[c] = 0.f;
#pragma unroll
      for (int j = 0; j < W; ++j) dx[c] = fmaf(weight[c][j], dp[c][W - 1 - j], dx[c]);
    }
    if (vec) {
      store_row(to, dx);
    } else {
#pragma unroll
      for (int c = 0; c < kLaneChannels; ++c)
        if (c < valid) to[c] = from_float<T>(dx[c]);
    }
  }
};

// A part of a sequence: `own` rows, of which dx goes to `to`; `more` rows follow in the sequence.
template <typename T, int W>
__device__ __forceinline__ void walk(Lane<W> &lane, const T *x, const T *dy, T *to, int64_t stride, int own, int more, int valid, bool vec,
                                     bool silu) {
#pragma unroll 4
  for (int i = 0; i < own; ++i, x += kTileChannels, dy += kTileChannels) {
    lane.template next<true>(x, dy, true, silu);
    if (i >= W - 1 && valid > 0) lane.store(to, valid, vec);
    if (i >= W - 1) to += stride;
  }
#pragma unroll
  for (int i = 0; i < W - 1; ++i) {    // rows after the own ones only add to their dx
    const int step = i < more ? i : 0;
    lane.template next<false>(x + step * kTileChannels, dy + step * kTileChannels, i < more, silu);
    if (own + i >= W - 1 && valid > 0) lane.store(to, valid, vec);
    if (own + i >= W - 1) to += stride;
  }
}

template <typename T, int W>
__global__ void __launch_bounds__(kTileThreads, BackwardTile<T, W>::kBlocks)
    conv_backward_kernel(const __grid_constant__ gdn_conv_backward_params p, const __grid_constant__ BackwardPlan plan, float *partial) {
  using Tile = BackwardTile<T, W>;
  __shared__ typename Tile::Shared shared;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t column = blockIdx.x % plan.columns, place = blockIdx.x / plan.columns;
  const int channel0 = static_cast<int>(column) * kTileChannels, channel = channel0 + kLaneChannels * lane;
  const int valid = min(kLaneChannels, p.channels - channel);
  const Rows<const T> x = rows_of<const T>(p.x, p.seqs), dy = rows_of<const T>(p.d_y, p.seqs);
  const Rows<T> dx = rows_of<T>(p.d_x, p.seqs);

  Lane<W> own;
#pragma unroll
  for (int c = 0; c < kLaneChannels; ++c)
#pragma unroll
    for (int j = 0; j < W; ++j) own.sum[c][j] = 0.f;

  for (int64_t tile = place; tile < plan.tiles; tile += plan.places) {
    const int64_t row0 = tile * Tile::kTokens;
    // Copy the tile.
    if (tile != place) __syncthreads();
    copy_rows<T, Tile::kInputs>(shared.rows.x, x, row0 - Tile::kBefore, plan.rows, channel0, p.channels, plan.vec);
    copy_rows<T, Tile::kGradients>(shared.rows.dy, dy, row0, plan.rows, channel0, p.channels, plan.vec);
    ptx::copy_async_commit();
    if (tile == place) {
      if (p.weight_dtype == GDN_F32) load_taps<float, W>(p.weight, channel, valid, own.weight);
      else if (p.weight_dtype == GDN_BF16) load_taps<__nv_bfloat16, W>(p.weight, channel, valid, own.weight);
      else load_taps<__half, W>(p.weight, channel, valid, own.weight);
    }
    int64_t row = row0 + warp * Tile::kOwn;
    const int64_t end = min(row + Tile::kOwn, plan.rows);
    int n = row < end ? sequence_of_row(p.seqs, row) : p.seqs.num_seqs;
    ptx::copy_async_wait<0>();
    __syncthreads();
    // Walk through this warp's rows, sequence by sequence.
    for (; row < end && n < p.seqs.num_seqs; ++n) {
      const Tokens seq = tokens_of(p.seqs, n);
      const int64_t begin = p.seqs.cu_seqlens ? seq.first : static_cast<int64_t>(n) * seq.count, last = begin + seq.count;
      if (last <= row) continue;
      const int count = static_cast<int>(min(last, end) - row), more = static_cast<int>(min(last - row - count, static_cast<int64_t>(W)));
      const int at = static_cast<int>(row - row0);
#pragma unroll
      for (int j = 0; j < W - 1; ++j) {    // the window before the first row, one place to the right of where next() moves it
        float past[kLaneChannels] = {};
        const int64_t before = row - (W - 1) + j - begin;
        if (before >= 0) load_pack<T, kLaneChannels>(&shared.rows.x[at + j][kLaneChannels * lane], past);
        else if (p.state_in)
          load_channels(static_cast<const T *>(p.state_in) + (static_cast<int64_t>(n) * (W - 1) + before + W - 1) * p.channels + channel, valid, past);
#pragma unroll
        for (int c = 0; c < kLaneChannels; ++c) own.x[c][j + 1] = past[c], own.dp[c][j + 1] = 0.f;
      }
      walk<T, W>(own, &shared.rows.x[at + W - 1][kLaneChannels * lane], &shared.rows.dy[at][kLaneChannels * lane], dx.row(row) + channel,
                 dx.token_stride, count, more, valid, plan.vec, p.silu);
      row += count;
    }
  }

  // The sums of the block.
  __syncthreads();
#pragma unroll
  for (int c = 0; c < kLaneChannels; ++c)
#pragma unroll
    for (int j = 0; j < W; ++j) shared.sums[warp][(kLaneChannels * lane + c) * W + j] = own.sum[c][j];
  __syncthreads();
  const int64_t values = static_cast<int64_t>(p.channels) * W, first = static_cast<int64_t>(channel0) * W;
  for (int i = threadIdx.x; i < kTileChannels * W && first + i < values; i += kTileThreads)
    partial[place * values + first + i] = (shared.sums[0][i] + shared.sums[1][i]) + (shared.sums[2][i] + shared.sums[3][i]);
}

// The gradient of the old state, a thread a sequence and channel: p of the first W - 1 tokens alone saw it.
template <typename T, int W>
__global__ void __launch_bounds__(256) conv_state_backward_kernel(const __grid_constant__ gdn_conv_backward_params p, int64_t threads) {
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * 256 + threadIdx.x;
  if (thread >= threads) return;
  const int n = static_cast<int>(thread / p.channels), channel = static_cast<int>(thread % p.channels);
  const Tokens seq = tokens_of(p.seqs, n);
  const T *x = static_cast<const T *>(p.x.ptr) + n * p.x.seq_stride + seq.first * p.x.token_stride + channel;
  const T *dy = static_cast<const T *>(p.d_y.ptr) + n * p.d_y.seq_stride + seq.first * p.d_y.token_stride + channel;
  const int64_t state = static_cast<int64_t>(n) * (W - 1) * p.channels + channel;
  float weight[W], inputs[2 * W - 2], d[W - 1];
#pragma unroll
  for (int j = 0; j < W; ++j) weight[j] = load_any(p.weight, static_cast<int64_t>(channel) * W + j, p.weight_dtype);
#pragma unroll
  for (int j = 0; j < W - 1; ++j) {
    inputs[j] = p.state_in ? to_float(static_cast<const T *>(p.state_in)[state + static_cast<int64_t>(j) * p.channels]) : 0.f;
    inputs[W - 1 + j] = j < seq.count ? to_float(x[j * p.x.token_stride]) : 0.f;
    d[j] = 0.f;
  }
#pragma unroll
  for (int t = 0; t < W - 1; ++t) {
    if (t >= seq.count) break;
    float window[W];
#pragma unroll
    for (int j = 0; j < W; ++j) window[j] = inputs[t + j];
    const float dp = derivative<W>(weight, window, to_float(dy[t * p.d_y.token_stride]), p.silu);
#pragma unroll
    for (int j = 0; j < W - 1; ++j)
      if (t + j < W - 1) d[t + j] = fmaf(weight[j], dp, d[t + j]);
  }
#pragma unroll
  for (int j = 0; j < W - 1; ++j) static_cast<T *>(p.d_state_in)[state + static_cast<int64_t>(j) * p.channels] = from_float<T>(d[j]);
}

template <typename T, int W> int launch_backward_as(const gdn_conv_backward_params &p, const BackwardPlan &plan, cudaStream_t stream) {
  if (plan.tiles > 0) {
    const dim3 grid(static_cast<unsigned>(plan.columns * plan.places));
    if (const int status = launch(conv_backward_kernel<T, W>, {grid, dim3(kTileThreads), 0, stream}, p, plan, static_cast<float *>(p.workspace)))
      return status;
  }
  if (!p.d_state_in) return GDN_OK;
  const int64_t threads = static_cast<int64_t>(p.seqs.num_seqs) * p.channels, blocks = ceil_div(threads, 256);
  if (blocks > kMaxBlocks) return GDN_BAD_LENGTH;
  return launch(conv_state_backward_kernel<T, W>, {dim3(static_cast<unsigned>(blocks)), dim3(256), 0, stream}, p, threads);
}

template <typename T> int launch_backward(const gdn_conv_backward_params &p, const BackwardPlan &plan, cudaStream_t stream) {
  switch (p.width) {
    case 2: return launch_backward_as<T, 2>(p, plan, stream);
    case 3: return launch_backward_as<T, 3>(p, plan, stream);
    case 4: return launch_backward_as<T, 4>(p, plan, stream);
    case 5: return launch_backward_as<T, 5>(p, plan, stream);
    case 6: return launch_backward_as<T, 6>(p, plan, stream);
    case 7: return launch_backward_as<T, 7>(p, plan, stream);
    case 8: return launch_backward_as<T, 8>(p, plan, stream);
  }
  return GDN_BAD_CONV_WIDTH;
}

}  // namespace conv
}  // namespace gdn
