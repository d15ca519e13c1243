// The products of wide_kernel for weights in e4m3.
//
// The weights are the left operand, from registers, where they become numbers of T; the rows of x are the right one, from shared memory. So which
// of a warp's 16 rows of the operand a weight's row is can be chosen: gate and up of 8 outputs, or pairs of outputs that lie side by side.
#pragma once

#include "wide_tiles.cuh"

namespace gdn {
namespace moe {

// 64 inputs of a row of weights lie with four lanes side by side, 16 bytes each. To the left operands of four products of 16 inputs: word j is
// that of inputs 16 j + 2 t, + 1 and 8 further, for lane t.
__device__ __forceinline__ void to_operands(const uint4 &w, int t, uint32_t (&words)[4]) {
  words[0] = __byte_perm(w.x, w.z, 0x5410);
  words[1] = __byte_perm(w.x, w.z, 0x7632);
  words[2] = __byte_perm(w.y, w.w, 0x5410);
  words[3] = __byte_perm(w.y, w.w, 0x7632);
  transpose_words(words, t);
}

// Up to ROWS rows of x times a warpgroup's 64 rows of weights. `at` begins at the item's first stage and ends behind its last.
template <typename T, bool GATED, int ROWS>
__device__ __forceinline__ void multiply_item(const Args &a, const WideShared<E4m3> &shared, int warpgroup, const WideItem &item,
                                              Stage<WideShared<E4m3>::kStages> &at) {
  constexpr int kHalf = WideShared<E4m3>::kHalf;
  const int lane = threadIdx.x % 32, g = lane >> 2, t = lane & 3, warp = warpgroup * 4 + threadIdx.x % 128 / 32;
  const bool shared_expert = item.expert == a.experts;
  const int turns = turns_of<GATED>(a, item), outputs = GATED ? inner_of(a, item) : a.hidden;
  // In the tile: the row of weights of the first half of the operand's rows; the second half's lies so much further.
  const int row = GATED ? warp * 8 + g : warp * 16 + 2 * g;
  constexpr int kNext = GATED ? kHalf : 1;
  const int first_output = item.part * (GATED ? kHalf : 2 * kHalf);

  // The scales of a lane's two rows, for 128 inputs, and of the next inputs. Past the last output those of the last, whose products are not stored.
  const ScaleArgs &scales = GATED ? (shared_expert ? a.shared_gate_up_scales : a.gate_up_scales) : (shared_expert ? a.shared_down_scales : a.down_scales);
  const int64_t first_row = shared_expert ? 0 : item.expert * static_cast<int64_t>(GATED ? 2 * a.inner : a.hidden);
  const int output = min(first_output + row, outputs - 1);
  const float *scale_of[2] = {scales.row(first_row + output), scales.row(first_row + (GATED ? output + outputs : min(output + 1, outputs - 1)))};
  float scale[2], next_scale[2] = {ptx::load_float(scale_of[0]), ptx::load_float(scale_of[1])};

  float acc[ROWS / 8][4] = {};
  uint32_t operand[2][4];    // of two products under way
  int before = 0;
  for (int turn = 0; turn < turns; ++turn, at.next()) {
    ptx::barrier_wait(shared.full_at(at.index), at.parity);
    const uint32_t w = shared.w_at(at.index) + row * kWideInputs + t * 16;
    const uint64_t x = wgmma::tile_of_columns(shared.x_at(at.index));
    uint32_t words[2][4];
#pragma unroll
    for (int half = 0; half < 2; ++half) to_operands(ptx::load_shared(w + half * kNext * kWideInputs), t, words[half]);
    if (turn % 2 == 0) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        scale[half] = next_scale[half];
        if (turn + 2 < turns) next_scale[half] = ptx::load_float(scale_of[half] + turn / 2 + 1);
      }
    }
#pragma unroll
    for (int k = 0; k < kWideInputs / 16; ++k) {
      wgmma::wait<1>();    // the products before the last have read their operands
      if (k == 1 && turn > 0) release(shared, before);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32_t pairs[2];
        e4m3_scaled<T>(words[half][k], scale[half], pairs);
        operand[k % 2][half] = pairs[0];
        operand[k % 2][half + 2] = pairs[1];
      }
      wgmma::hold(operand);
      wgmma::fence();
      wgmma::product<T, false>(acc, operand[k % 2], x + wgmma::bytes(32 * k), true);
      wgmma::commit();
    }
    before = at.index;
  }
  wgmma::wait<0>();
  wgmma::hold(acc);
  release(shared, before);

  // A lane has two rows of x. GATED: of one output, and after the exchange one row of two outputs; else of two outputs.
  const int64_t stride = GATED ? a.h_stride : a.hidden;
  T *to = static_cast<T *>(GATED ? a.h : a.rows) + item.first * stride + first_output;
  if constexpr (GATED) {
    to += warp * 8 + 2 * t;
#pragma unroll
    for (int i = 0; i < ROWS / 8; ++i) {
      const uint32_t y = ptx::transpose_matrix(pack2<T>(fast_silu(acc[i][0]) * acc[i][2], fast_silu(acc[i][1]) * acc[i][3]));
      const int r = 8 * i + g;
      if (r < item.rows) *reinterpret_cast<uint32_t *>(to + r * stride) = y;
    }
  } else if (first_output + warp * 16 < outputs) {
    to += row;
#pragma unroll
    for (int i = 0; i < ROWS / 8; ++i)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int r = 8 * i + 2 * t + c;
        if (r < item.rows) *reinterpret_cast<uint32_t *>(to + r * stride) = pack2<T>(acc[i][c], acc[i][2 + c]);
      }
  }
}

// One of two warpgroups, each with all rows and half of the weights.
template <typename T, bool GATED> __device__ __forceinline__ void multiply_e4m3(const Args &a, const WideShared<E4m3> &shared, int warpgroup) {
  Stage<WideShared<E4m3>::kStages> at;
  while (true) {
    ptx::barrier_wait(shared.full_at(at.index), at.parity);
    const WideItem item = item_in(shared, at.index);
    if (item.rows == 0) return;
    if (item.rows > 192)
      multiply_item<T, GATED, 256>(a, shared, warpgroup, item, at);
    else if (item.rows > 128)
      multiply_item<T, GATED, 192>(a, shared, warpgroup, item, at);
    else if (item.rows > 64)
      multiply_item<T, GATED, 128>(a, shared, warpgroup, item, at);
    else
      multiply_item<T, GATED, 64>(a, shared, warpgroup, item, at);
  }
}

}  // namespace moe
}  // namespace gdn
