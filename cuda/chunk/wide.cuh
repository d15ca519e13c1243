// The arithmetic of a block with two warpgroups for it: 128 value rows, 64 each. They fill each other's gaps, and registers are
// short, so that makers have enough of them: the state is an operand in registers for S K^T, which the next state waits for, and
// one in shared memory for S Q^T, which can come last; the output goes to where v was, and leaves from there by a bulk copy.
#pragma once

#include "products.cuh"
#include "shape90.cuh"

namespace gdn {
namespace chunk {

// One function: products are under way between its parts; ptxas must see that no other code touches their registers.
template <typename T, typename ST, int KK, Pass PASS>
__device__ __forceinline__ void wide_scan(const gdn_rule_params &p, const Plan &plan, typename Shape90<KK, 2>::Shared &shared,
                                          const Stretch &s, int round, MathPhases<Shape90<KK, 2>> &at_begin, int part, int warp,
                                          int lane GDN_PROFILED(, profile::LeanStamps &stamps)) {
  using S = Shape90<KK, 2>;
  const uint32_t stages = ptx::shared_address(shared.stage), buffers = ptx::shared_address(shared.matrices);
  const uint32_t full = ptx::shared_address(shared.full), empty = ptx::shared_address(shared.empty);
  const uint32_t ready = ptx::shared_address(shared.ready), attended = ptx::shared_address(shared.attended);
  const uint32_t free = ptx::shared_address(shared.free);
  const uint32_t image = ptx::shared_address(shared.state) + part * (KK / 64 * kTileBytes);
  const uint32_t valued = ptx::shared_address(shared.valued), drained = ptx::shared_address(shared.drained);
  const uint32_t values_at = ptx::shared_address(shared.values) + part * kTileBytes;
  const uint32_t stated = ptx::shared_address(shared.stated) + 8 * part;
  const int chunks = s.end - s.begin;

  float state[KK / 8][4];
  begin_state<ST, PASS>(state, p, plan, s, 128, s.row0 + 64 * part + 16 * warp, lane);
  GDN_PROFILED(stamps.lap(profile::kLoadState);)

  Phases<S::kStages, S::kBuffers> phases = at_begin.chunk;
  const int before = at_begin.chunks;
  // The tile of v of a chunk, and later of its output.
  const auto value_tile = [&](int index) { return values_at + index * (2 * kTileBytes); };
  static_assert(S::kValues == 2);
  uint32_t operand[KK / 16][4];    // the state, for S K^T
  const auto state_to_operands = [&](auto half) {    // half of the columns, and to shared memory for S Q^T
#pragma unroll
    for (int k = half.value * KK / 32; k < (half.value + 1) * KK / 32; ++k) {
      operand[k][0] = pack2_finite<T, true>(state[2 * k][0], state[2 * k][1]);
      operand[k][1] = pack2_finite<T, true>(state[2 * k][2], state[2 * k][3]);
      operand[k][2] = pack2_finite<T, true>(state[2 * k + 1][0], state[2 * k + 1][1]);
      operand[k][3] = pack2_finite<T, true>(state[2 * k + 1][2], state[2 * k + 1][3]);
      if (PASS != kTransfer) store_block(tile_at(image + 2048 * warp, lanes_by_row(lane), 0, k), operand[k], lane);
    }
  };
  using First = std::integral_constant<int, 0>;
  using Second = std::integral_constant<int, 1>;
  state_to_operands(First());
  state_to_operands(Second());
  GDN_PROFILED(stamps.lap(profile::kWaitState);)    // no register to wait in before it is packed
  const auto one_chunk = [&](int i) {
    const int value = (before + i) % 2, value_parity = (before + i) / 2 % 2;
    const Phase<S::kStages> &at = phases.first;
    const Phase<S::kBuffers> &of = phases.second();
    const uint32_t stage = stages + at.index * S::kStage, matrices = buffers + of.index * static_cast<uint32_t>(sizeof(Matrices));
    const Factors &factors = shared.matrices[of.index].factors;
    // Wait for k and the matrices; S K^T.
    float values[8][4];
    ptx::barrier_wait(full + 8 * at.index, at.parity);
    ptx::barrier_wait(ready + 8 * of.index, of.parity);
    GDN_PROFILED(stamps.lap(profile::kWaitMatrices, i);)
    multiply_rows<T>(values, operand, stage, false);
    if (PASS != kTransfer) {
      ptx::fence_async();    // of the output of the chunk before too
      if (i > 0) ptx::barrier_arrive(drained + 8 * (value ^ 1));
      ptx::barrier_arrive(stated);
    }
    // U: wait for v, subtract.
    const bool copied = PASS != kTransfer || !s.identity;
    if (copied) ptx::barrier_wait(valued + 8 * value, value_parity);
    GDN_PROFILED(stamps.lap(profile::kWaitValues);)
    const float decay = factors.decay;
    const ValuePiece first = load_values(value_tile(value), factors.read, 0, warp, lane);
    wgmma::wait<0>();
    wgmma::hold(values);
    GDN_PROFILED(stamps.lap(profile::kWaitStateKeys);)
    subtract_from_values<T>(values, first, 0);
#pragma unroll
    for (int m = 1; m < 4; ++m) subtract_from_values<T>(values, load_values(value_tile(value), factors.read, m, warp, lane), m);
    if (PASS == kTransfer && copied) ptx::barrier_arrive(drained + 8 * value);
    // V' = U inverse^T.
    {
      uint32_t u[4][4];
      to_operand<T>(u, values);
      multiply_rows<T>(values, u, matrices, false);
    }
    GDN_PROFILED(stamps.lap(profile::kCorrect);)
    scale(state, decay);
    wgmma::hold(state);
    const float4 first_write = column_factors(factors.write, 0, lane);
    // Complete by now. The wait is here and not before S Q^T, where its latency would show.
    if (PASS != kTransfer) ptx::barrier_wait(stated, value);
    wgmma::wait<0>();
    wgmma::hold(values);
    GDN_PROFILED(stamps.lap(profile::kWaitWritten);)
    // Operands of V'; S Q^T, the new state and V' attention^T are started.
    uint32_t plain[4][4], written[4][4];
    float out[8][4];
    if constexpr (PASS != kTransfer) {
      to_operands<T>(plain, written, values, first_write, factors.write, lane);
      // NOTES: the wait keeps ptxas from starting S Q^T before V' is rounded, for which there are no registers.
      GDN_PROFILED(stamps.lap(profile::kPackWritten);)
      ptx::barrier_wait(attended + 8 * of.index, of.parity);
      GDN_PROFILED(stamps.lap(profile::kWaitAttention);)
      multiply_tiles<T, KK>(out, image, stage + S::kQ);
    } else {
      scale_columns(values, factors.write, lane);
      to_operand<T>(written, values);
    }
    add_keys<T>(state, written, stage);
    if constexpr (PASS != kTransfer) {
      const float4 first_factors = column_factors(factors.out, 0, lane);
      wgmma::wait<1>();
      wgmma::hold(out);
      scale_columns(out, 0, first_factors);
#pragma unroll
      for (int m = 1; m < 4; ++m) scale_columns(out, m, column_factors(factors.out, m, lane));
      multiply_rows<T>(out, plain, matrices + kImageBytes, true);
    }
    GDN_PROFILED(stamps.lap(profile::kOut);)
    // Wait for the state, then for the output; store it where v was.
    if constexpr (PASS != kTransfer) {
      wgmma::wait<1>();
      wgmma::hold(state);
      GDN_PROFILED(stamps.lap(profile::kWaitState2);)
      ptx::barrier_arrive(empty + 8 * at.index);
      state_to_operands(First());
      wgmma::wait<0>();
      ptx::barrier_arrive(free + 8 * of.index);
      wgmma::hold(out);
      put_out<T>(out, value_tile(value), warp, lane);
      state_to_operands(Second());
    } else {
      wgmma::wait<0>();
      wgmma::hold(state);
      GDN_PROFILED(stamps.lap(profile::kWaitState2);)
      ptx::barrier_arrive(empty + 8 * at.index);
      ptx::barrier_arrive(free + 8 * of.index);
      state_to_operands(First());
      state_to_operands(Second());
    }
    phases.next();
    GDN_PROFILED(stamps.lap(profile::kSendOut);)
  };

#pragma unroll 1
  for (int i = 0; i < chunks; ++i) one_chunk(i);
  // NOTES: computed a second time, so that the loop holds no register for what only the end needs.
  const Stretch again = stretch_of<PASS>(p, plan, 128, ptx::reread_block(), round);
  const int row0 = again.row0 + 64 * part + 16 * warp, token0 = (again.end - 1) * kChunk;
  const int last = (before + chunks - 1) % 2;
  if (PASS != kTransfer && chunks > 0)    // the last chunk may be cut off by the sequence's end
    take_out<T>(value_tile(last), warp, lane, out_heads_at<T>(p.o, again.n, again.seq.first + token0, again.head) + row0, p.o.token_stride,
                again.seq.count - token0, p.common.head_v - row0);
  if constexpr (PASS == kSeveral) {
    ptx::fence_async();    // the next v comes where this output was written
    if (chunks > 0) ptx::barrier_arrive(drained + 8 * last);
    at_begin = {phases, before + chunks};
  }
  ptx::grid_dependency_wait();
  end_state<ST, PASS>(state, p, plan, again, 128, row0, lane);
  GDN_PROFILED(stamps.lap(profile::kStoreState);)
}

}  // namespace chunk
}  // namespace gdn
