// The launches of the backward pass in chunks, for one input type.
#pragma once

#include "../common/launch.cuh"
#include "gradients80.cuh"
#include "gradients90.cuh"
#include "prepare.cuh"
#include "walk.cuh"

namespace gdn {
namespace backward {

// A launch of the backward pass: parameters, sizes and device.
template <typename T> struct Launcher {
  const gdn_rule_backward_params &p;
  const Schedule &s;
  bool wgmma;
  cudaStream_t stream;
  int optin;
  Maps maps;

  int32_t v_tiles() const { return v_tiles_of(p.common); }

  int grid(int64_t blocks, int threads, int64_t shared_bytes, LaunchConfig *c) const {
    if (blocks > kMaxBlocks) return GDN_BAD_LENGTH;
    c->grid = dim3(static_cast<unsigned>(blocks));
    c->block = dim3(threads);
    c->shared_bytes = shared_bytes;
    c->stream = stream;
    c->overlap = true;
    return GDN_OK;
  }

  template <bool WGMMA, int GROUPS> int prepare_as(const Span &span, const Buffers &b) const {
    static_assert(sizeof(PrepareShared<GROUPS>) <= kLeastShared, "a shape for every card");
    LaunchConfig c;
    if (const int status = grid(s.places * p.common.num_k_heads, 128 * GROUPS, sizeof(PrepareShared<GROUPS>), &c)) return status;
    return launch_allowed<prepare_kernel<T, WGMMA, GROUPS>>(c, optin, p, span, b.records, b.taken);
  }
  int prepare(const Span &span, const Buffers &b) const {
    if (s.places == 0) return GDN_OK;
    if (p.common.num_v_heads == p.common.num_k_heads) return wgmma ? prepare_as<true, 1>(span, b) : prepare_as<false, 1>(span, b);
    return wgmma ? prepare_as<true, 2>(span, b) : prepare_as<false, 2>(span, b);
  }

  int64_t walk_blocks(const Walks &walks, int tiles) const {
    return blocks_of(p.common, tiles) * walks.walks * walks.cut.segments;
  }
  template <bool WGMMA, int STAGES, int QUERIES, int TILES = 1, bool COUNTS = false> int walk_as(const Buffers &b, const Walks &walks) const {
    using Shared = WalkShared<STAGES, QUERIES, TILES>;
    static_assert(STAGES > 1 || sizeof(Shared) <= kLeastShared, "a shape for every card");
    LaunchConfig c;
    if (const int status = grid(walk_blocks(walks, TILES), kWalkThreads<WGMMA, TILES>, sizeof(Shared), &c)) return status;
    // A cluster is a pair of multiprocessors. A walk beside which the other of the pair computes gradients would take half as long again.
    if (COUNTS) c.cluster = 2;
    return launch_allowed<walk_kernel<T, WGMMA, STAGES, QUERIES, TILES, COUNTS>>(c, optin, p, b, maps, walks);
  }
  // With a multiprocessor each, blocks have room for two chunks of everything: of 64 rows while there are as many multiprocessors.
  int walk(const Buffers &b, const Walks &walks) const {
    if (walk_blocks(walks, 1) == 0) return GDN_OK;
    int sms = 0;
    if (const int status = sm_count(&sms)) return status;
    if (wgmma) {
      if (walks.cut.beside) return walk_as<true, 2, 2, 1, true>(b, walks);
      if (walk_blocks(walks, 1) <= sms) return walk_as<true, 2, 2>(b, walks);
      return v_tiles() > 1 ? walk_as<true, 2, 2, 2>(b, walks) : walk_as<true, 2, 1>(b, walks);
    }
    return static_cast<int64_t>(sizeof(WalkShared<2, 1, 1>)) <= optin ? walk_as<false, 2, 1>(b, walks) : walk_as<false, 1, 1>(b, walks);
  }

  template <int TILES, int PARTS> int gradients_as(const Span &span, const Buffers &b) const {
    int64_t items = s.places * p.common.num_k_heads;
    if (s.cut.beside) items = ceil_div(max_tokens(p.common.seqs), kChunk) * p.common.seqs.num_seqs * p.common.num_k_heads;
    const Work work = {static_cast<uint32_t>(items), p.common.num_v_heads / p.common.num_k_heads, static_cast<uint32_t>(2 * v_tiles())};
    LaunchConfig c;
    if (!wgmma) {
      if (const int status = grid(items, GradientShared80::kThreads, sizeof(GradientShared80), &c)) return status;
      return launch_allowed<gradients_kernel80<T, TILES, PARTS>>(c, optin, p, b, span, work);
    }
    int sms = 0;
    if (const int status = sm_count(&sms)) return status;
    if (const int status = grid(items > sms ? sms : items, GradientShared90::kThreads, sizeof(GradientShared90), &c)) return status;
    if (s.cut.beside) return launch_allowed<gradients_kernel90<T, TILES, PARTS, true>>(c, optin, p, b, maps, span, work);
    return launch_allowed<gradients_kernel90<T, TILES, PARTS, false>>(c, optin, p, b, maps, span, work);
  }
  int gradients(const Span &span, const Buffers &b) const {
    if (s.places == 0) return GDN_OK;
    if (v_tiles() == 1) return gradients_as<1, 1>(span, b);
    return v_tiles() == 2 ? gradients_as<2, 1>(span, b) : gradients_as<2, 2>(span, b);    // head_v <= 256
  }

  int all() const {
    uint8_t *at = static_cast<uint8_t *>(p.workspace);
    const auto next = [&](int64_t bytes) {
      uint8_t *here = at;
      at += bytes;
      return here;
    };
    Buffers b = {};
    b.taken = reinterpret_cast<uint32_t *>(next(kTakenBytes));
    b.records = reinterpret_cast<Record *>(next(s.record_bytes));
    b.states = next(s.state_bytes), b.gradients = next(s.state_bytes);
    b.updates = updates_in_place(p) ? nullptr : next(s.update_bytes);
    // Section by section: the states before all, then all else from the last to the first.
    float *d_between = s.sections > 1 ? reinterpret_cast<float *>(at + (s.sections - 1) * s.carry_bytes) : nullptr;
    const auto before = [&](int i) {
      return i == 0 ? const_cast<float *>(static_cast<const float *>(p.common.state_in))
                    : reinterpret_cast<float *>(at + (i - 1) * s.carry_bytes);
    };
    for (int i = 0; i + 1 < s.sections; ++i) {
      const Span span = {i, s.sections};
      if (const int status = prepare(span, b)) return status;
      if (const int status = walk(b, {{{before(i), before(i + 1), kForward, false}}, 1, span, {1, false}})) return status;
    }
    for (int i = s.sections - 1; i >= 0; --i) {
      const Span span = {i, s.sections};
      if (const int status = prepare(span, b)) return status;
      const Walk reverse = {i == s.sections - 1 ? p.d_state_out : d_between, i == 0 ? p.d_state_in : d_between, kReverse, true};
      const Walk forward = {before(i), nullptr, kForward, true};
      if (const int status = walk(b, {{reverse, forward}, s.places > 0 ? 2 : 1, span, s.cut})) return status;
      if (const int status = gradients(span, b)) return status;
    }
    return GDN_OK;
  }
};

template <typename T> int launch_chunks(const gdn_rule_backward_params &p, const Schedule &s, bool wgmma, cudaStream_t stream) {
  Launcher<T> launcher = {p, s, wgmma, stream, 0, {}};
  if (wgmma && s.places > 0)
    if (const int status = make_maps(p, &launcher.maps)) return status;
  if (const int status = shared_limit(&launcher.optin)) return status;
  return launcher.all();
}

}  // namespace backward
}  // namespace gdn
