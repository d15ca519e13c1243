// The arithmetic of a block with one warpgroup for it: 64 value rows. The order of products overlaps what can be overlapped with the
// one chain that cannot: state -> S K^T -> U -> V' -> state. The output of a chunk goes to where its v was, and leaves from there
// by a bulk copy, while the next chunk's S K^T and S Q^T run.
#pragma once

#include "products.cuh"
#include "shape90.cuh"
#include "stretch.cuh"

namespace gdn {
namespace chunk {

// Whether V' of the first chunk does not wait for the attention; kSeveral has many first chunks, and no parity for them.
template <Pass PASS> __device__ __forceinline__ constexpr bool attends_apart() { return PASS == kWhole || PASS == kFirst; }

// One function: products are under way between its parts, the lambdas; ptxas must see that no other code touches their registers.
template <typename T, typename ST, int KK, Pass PASS>
__device__ __forceinline__ void narrow_scan(const gdn_rule_params &p, const Plan &plan, typename Shape90<KK, 1>::Shared &shared,
                                            const Stretch &s, MathPhases<Shape90<KK, 1>> &phases, int warp, int lane
                                            GDN_PROFILED(, profile::LeanStamps &stamps)) {
  using S = Shape90<KK, 1>;
  const uint32_t stages = ptx::shared_address(shared.stage), buffers = ptx::shared_address(shared.matrices);
  const uint32_t full = ptx::shared_address(shared.full), empty = ptx::shared_address(shared.empty);
  const uint32_t ready = ptx::shared_address(shared.ready), attended = ptx::shared_address(shared.attended);
  const uint32_t free = ptx::shared_address(shared.free);
  const int chunks = s.end - s.begin;
  const int row0 = s.row0 + 16 * warp;

  float state[KK / 8][4];
  begin_state<ST, PASS>(state, p, plan, s, 64, row0, lane);
  GDN_PROFILED(stamps.lap(profile::kLoadState); stamps.wait(profile::kWaitState, state);)

  uint32_t stage = 0;                   // of the current chunk, as the next two
  const Factors *factors = nullptr;
  uint32_t matrices = 0;
  Phase<S::kStages> at = phases.chunk.first;
  Phase<S::kBuffers> of = phases.chunk.second();
  float out[8][4], values[8][4];        // O^T and V' of the chunk
  uint32_t operand[KK / 16][4];         // the state before it

  // S K^T of chunk i. It needs no matrices, but in a chunk that is cut off makers first clear keys.
  const auto begin_chunk = [&](int i) {
    stage = stages + at.index * S::kStage;
    matrices = buffers + of.index * static_cast<uint32_t>(sizeof(Matrices));
    factors = &shared.matrices[of.index].factors;
    ptx::barrier_wait(full + 8 * at.index, at.parity);
    if (s.cut_off && i + 1 == chunks) ptx::barrier_wait(ready + 8 * of.index, of.parity);
    GDN_PROFILED(stamps.lap(profile::kWaitTiles, i);)
    to_operand<T>(operand, state);
    multiply_rows<T>(values, operand, stage, false);
    GDN_PROFILED(stamps.lap(profile::kStateKeys);)
  };
  // S Q^T.
  const auto begin_out = [&] {
    if (PASS != kTransfer) multiply_rows<T>(out, operand, stage + S::kQ, false);
  };
  // From S K^T to V'.
  const auto middle_of_chunk = [&](bool first) {
    ptx::barrier_wait(ready + 8 * of.index, of.parity);
    GDN_PROFILED(stamps.lap(profile::kWaitMatrices);)
    if (PASS != kTransfer) wgmma::wait<1>();
    else wgmma::wait<0>();
    wgmma::hold(values);
    GDN_PROFILED(stamps.lap(profile::kWaitStateKeys);)
    subtract_from_values<T>(values, stage + 2 * S::kQ, factors->read, warp, lane);
    uint32_t u[4][4];
    to_operand<T>(u, values);
    multiply_rows<T>(values, u, matrices, false);
    GDN_PROFILED(stamps.lap(profile::kCorrect);)
    if (PASS != kTransfer) {
      wgmma::wait<1>();
      wgmma::hold(out);
      if (attends_apart<PASS>() && first) ptx::barrier_wait(attended, 0);
      scale_columns(out, factors->out, lane);
    }
    scale(state, factors->decay);
    wgmma::wait<0>();
    wgmma::hold(values);
    GDN_PROFILED(stamps.lap(profile::kWaitWritten);)
  };
  // The new state and the rest of O; waits for the state.
  const auto end_chunk = [&] {
    uint32_t plain[4][4], written[4][4];
    if (PASS != kTransfer) to_operand<T>(plain, values);
    scale_columns(values, factors->write, lane);
    to_operand<T>(written, values);
    add_keys<T>(state, written, stage);
    if (PASS != kTransfer) {
      multiply_rows<T>(out, plain, matrices + kImageBytes, true);
      GDN_PROFILED(stamps.lap(profile::kPackWritten);)
      wgmma::wait<1>();
    } else {
      GDN_PROFILED(stamps.lap(profile::kPackWritten);)
      wgmma::wait<0>();
    }
    wgmma::hold(state);
    GDN_PROFILED(stamps.lap(profile::kWaitState2);)
  };
  // Frees stage and matrices; the output is in the place of v.
  const auto leave_chunk = [&](const uint32_t (&packed)[4][4], uint32_t stage, int at, int of) {
    ptx::barrier_arrive(free + 8 * of);
    if (PASS != kTransfer) {
      put_out(packed, stage + 2 * S::kQ, warp, lane);
      ptx::fence_async();
    }
    ptx::barrier_arrive(empty + 8 * at);
  };

  // Stores the state after the stretch. The last product of O may still be under way.
  const auto leave_state = [&] {
    ptx::grid_dependency_wait();
    end_state<ST, PASS>(state, p, plan, s, 64, row0, lane);
    GDN_PROFILED(stamps.lap(profile::kStoreState);)
  };

  if (chunks > 0) {
    uint32_t packed[4][4];    // O^T
    begin_chunk(0);
    begin_out();
    middle_of_chunk(true);
    // NOTES: an iteration begins and ends with no product under way, and not with a chunk: ptxas does not follow products from one
    // iteration to the next, and would wait for each of them.
    for (int i = 0; i < chunks - 1; ++i) {
      end_chunk();
      const uint32_t before = stage;
      const int before_at = at.index, before_of = of.index;
      at.next();
      of.next();
      begin_chunk(i + 1);
      if (PASS != kTransfer) {
        wgmma::wait<1>();
        wgmma::hold(out);
        pack_out<T>(packed, out);
      }
      begin_out();
      leave_chunk(packed, before, before_at, before_of);
      GDN_PROFILED(stamps.lap(profile::kSendOut);)
      middle_of_chunk(false);
    }
    end_chunk();
    leave_state();
    wgmma::wait<0>();
    if (PASS != kTransfer) {    // the last chunk may be cut off by the sequence's end
      wgmma::hold(out);
      const uint32_t tile = stage + 2 * S::kQ;
      const int token0 = (s.end - 1) * kChunk;
      put_out<T>(out, tile, warp, lane);
      take_out<T>(tile, warp, lane, out_heads_at<T>(p.o, s.n, s.seq.first + token0, s.head) + row0, p.o.token_stride,
                  s.seq.count - token0, p.common.head_v - row0);
      ptx::fence_async();    // the next v comes where this output was written
    }
    ptx::barrier_arrive(free + 8 * of.index);
    ptx::barrier_arrive(empty + 8 * at.index);
    GDN_PROFILED(stamps.lap(profile::kSendOut);)
    at.next();
    of.next();
  } else {
    leave_state();
  }
  if (PASS == kSeveral) phases.chunk = {at, of};
}

}  // namespace chunk
}  // namespace gdn
