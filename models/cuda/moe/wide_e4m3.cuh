// The products of wide_kernel for weights in e4m3.
//
// The weights are the left operand, from registers, where they become numbers of T; the rows of x are the right one, from shared memory. So which
// of a warp's 16 rows of the operand a weight's row is can be chosen: gate and up of 8 outputs, or pairs of outputs that lie side by side.
#pragma once

#include "wide_tiles.cuh"

namespace gdn {
namespace moe {

constexpr int kScaledRows = WideShared<E4m3>::kRows;
using ScaledSums = float[kScaledRows / 8][4];    // of 64 rows of weights and all rows of a tile

// Of a part of the weights, the first row, of gate or of down: the first output.
template <bool GATED> __device__ __forceinline__ int first_output_of(const WideItem &item) {
  return item.part * (GATED ? 1 : 2) * WideShared<E4m3>::kHalf;
}

// Of 8 rows of x after another a lane has two. GATED: of one output, and after the exchange one row of two outputs; else of two outputs.
template <typename T, bool GATED>
__device__ __forceinline__ void store_item(const Args &a, const WideItem &item, int warp, ScaledSums &acc) {
  const int lane = threadIdx.x % 32, g = lane >> 2, t = lane & 3, outputs = GATED ? inner_of(a, item) : a.hidden;
  const int first_output = first_output_of<GATED>(item);
  const int64_t stride = GATED ? a.h_stride : a.hidden;
  T *to = static_cast<T *>(GATED ? a.h : a.rows) + item.first * stride + first_output;
  if constexpr (GATED) {
    to += warp * 8 + 2 * t + g * stride;
#pragma unroll
    for (int i = 0; i < kScaledRows / 8; ++i, to += 8 * stride) {
      if (8 * i >= item.rows) break;
      const uint32_t y = ptx::transpose_matrix(pack2<T>(fast_silu(acc[i][0]) * acc[i][2], fast_silu(acc[i][1]) * acc[i][3]));
      if (8 * i + g < item.rows) *reinterpret_cast<uint32_t *>(to) = y;
    }
  } else if (first_output + warp * 16 < outputs) {
    to += warp * 16 + 2 * g + 2 * t * stride;
#pragma unroll
    for (int i = 0; i < kScaledRows / 8; ++i, to += 8 * stride) {
      if (8 * i >= item.rows) break;
#pragma unroll
      for (int c = 0; c < 2; ++c)
        if (8 * i + 2 * t + c < item.rows) *reinterpret_cast<uint32_t *>(to + c * stride) = pack2<T>(acc[i][c], acc[i][2 + c]);
    }
  }
}

// The rows of x of an item times a warpgroup's 64 rows of weights. `at` begins at the item's first stage and ends behind its last.
template <typename T, bool GATED>
__device__ __forceinline__ void multiply_item(const Args &a, const WideShared<E4m3> &shared, int warpgroup, const WideItem &item,
                                              Stage<WideShared<E4m3>::kStages> &at) {
  constexpr int kHalf = WideShared<E4m3>::kHalf;
  const int lane = threadIdx.x % 32, g = lane >> 2, t = lane & 3, warp = warpgroup * 4 + threadIdx.x % 128 / 32;
  const bool shared_expert = item.expert == a.experts;
  const int turns = turns_of<GATED>(a, item), outputs = GATED ? inner_of(a, item) : a.hidden;
  constexpr int kProducts = kWideInputs / 16, kUnderWay = 2;    // products of a stage, and products at the same time
  // In the tile: the row of weights of the first half of the operand's rows; the second half's lies so much further.
  const int row = GATED ? warp * 8 + g : warp * 16 + 2 * g;
  constexpr int kNext = GATED ? kHalf : 1;

  // The scales of a lane's two rows, for 128 inputs, and of the next inputs. Past the last output those of the last, whose products are not stored.
  const ScaleArgs &scales = GATED ? (shared_expert ? a.shared_gate_up_scales : a.gate_up_scales) : (shared_expert ? a.shared_down_scales : a.down_scales);
  const int64_t first_row = shared_expert ? 0 : item.expert * static_cast<int64_t>(GATED ? 2 * a.inner : a.hidden);
  const int output = min(first_output_of<GATED>(item) + row, outputs - 1);
  const float *scale_of[2] = {scales.row(first_row + output), scales.row(first_row + (GATED ? output + outputs : min(output + 1, outputs - 1)))};
  float scale[2], next_scale[2] = {ptx::load_float(scale_of[0]), ptx::load_float(scale_of[1])};

  // Of 16 inputs a lane multiplies 2 t, 2 t + 1, and those 8 further, of its two rows. The copy engine put the 16 bytes k of a row at
  // k ^ row / 2 % 4, which is the same for both rows.
  int place[kProducts];
#pragma unroll
  for (int k = 0; k < kProducts; ++k) place[k] = row * kWideInputs + ((k ^ row / 2 % 4) << 4) + 2 * t;

  ScaledSums acc = {};
  uint32_t operand[kUnderWay][4];
  int before = 0;
  // Multiplies by up to 8 `tiles` rows of x. All sizes share the sums and the code that stores them: with sums of its own each size
  // would reserve registers, and too few would be left.
  const auto multiply = [&](auto tiles) {
    constexpr int kTiles = decltype(tiles)::value;
    for (int turn = 0; turn < turns; ++turn, at.next()) {
      ptx::barrier_wait(shared.full_at(at.index), at.parity);
      const uint64_t x = wgmma::tile_of_columns(shared.x_at(at.index));
      uint16_t weights[kProducts][2][2];
#pragma unroll
      for (int k = 0; k < kProducts; ++k)
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
          for (int i = 0; i < 2; ++i)
            weights[k][half][i] = *reinterpret_cast<const uint16_t *>(shared.w[at.index] + place[k] + half * kNext * kWideInputs + 8 * i);
      if (turn % 2 == 0) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          scale[half] = next_scale[half];
          if (turn + 2 < turns) next_scale[half] = ptx::load_float(scale_of[half] + turn / 2 + 1);
        }
      }
#pragma unroll
      for (int k = 0; k < kProducts; ++k) {
        uint32_t(&pairs)[4] = operand[k % kUnderWay];
        wgmma::wait<kUnderWay - 1>();    // the products before those have read their operands
        if (k == kUnderWay - 1 && turn > 0) release(shared, before);
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
          for (int i = 0; i < 2; ++i) pairs[half + 2 * i] = e4m3_scaled_pair<T>(weights[k][half][i], scale[half]);
        wgmma::hold(operand);
        wgmma::fence();
        wgmma::product<T, false>(reinterpret_cast<float (&)[kTiles][4]>(acc), pairs, x + wgmma::bytes(32 * k), true);
        wgmma::commit();
      }
      before = at.index;
    }
  };
  if (item.rows > 192)
    multiply(std::integral_constant<int, 32>{});
  else if (item.rows > 128)
    multiply(std::integral_constant<int, 24>{});
  else if (item.rows > 64)
    multiply(std::integral_constant<int, 16>{});
  else
    multiply(std::integral_constant<int, 8>{});
  wgmma::wait<0>();
  wgmma::hold(acc);
  release(shared, before);

  store_item<T, GATED>(a, item, warp, acc);
}

// One of two warpgroups, each with all rows and half of the weights.
template <typename T, bool GATED> __device__ __forceinline__ void multiply_e4m3(const Args &a, const WideShared<E4m3> &shared, int warpgroup) {
  Stage<WideShared<E4m3>::kStages> at;
  while (true) {
    ptx::barrier_wait(shared.full_at(at.index), at.parity);
    const WideItem item = item_in(shared, at.index);
    if (item.rows == 0) return;
    multiply_item<T, GATED>(a, shared, warpgroup, item, at);
  }
}

}  // namespace moe
}  // namespace gdn
