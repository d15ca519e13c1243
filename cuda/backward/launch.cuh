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

  int32_t v_tiles() const { return static_cast<int32_t>(ceil_div(p.common.head_v, kTileRows)); }

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
    int64_t blocks = 0;
    for (const Walk &walk : walks.walk) blocks += blocks_of(p.common, walk, tiles);
    return blocks;
  }
  template <bool WGMMA, int STAGES, int QUERIES, int TILES = 1> int walk_as(const Buffers &b, const Walks &walks) const {
    using Shared = WalkShared<STAGES, QUERIES, TILES>;
    static_assert(STAGES > 1 || sizeof(Shared) <= kLeastShared, "a shape for every card");
    LaunchConfig c;
    if (const int status = grid(walk_blocks(walks, TILES), kWalkThreads<WGMMA, TILES>, sizeof(Shared), &c)) return status;
    // A cluster is a pair of multiprocessors. A walk beside which the other of the pair computes gradients would take half as long again.
    if (walks.cut.beside) c.cluster = 2;
    return launch_allowed<walk_kernel<T, WGMMA, STAGES, QUERIES, TILES>>(c, optin, p, b, maps, walks);
  }
  // With a multiprocessor each, blocks have room for two chunks of everything: of 64 rows while there are as many multiprocessors, and for
  // segments, as cut_of() counts on it.
  int walk(const Buffers &b, const Walks &walks) const {
    if (walk_blocks(walks, 1) == 0) return GDN_OK;
    int sms = 0;
    if (const int status = sm_count(&sms)) return status;
    if (wgmma) {
      if (walks.cut.segments > 1 || walk_blocks(walks, 1) <= sms) return walk_as<true, 2, 2>(b, walks);
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
    return s.cut.segments > 1 ? in_segments(b, at) : in_sections(b, at);
  }

  // Section by section: the states before all, then all else from the last to the first.
  int in_sections(const Buffers &b, uint8_t *at) const {
    float *d_between = s.sections > 1 ? reinterpret_cast<float *>(at + (s.sections - 1) * s.carry_bytes) : nullptr;
    const auto before = [&](int i) {
      return i == 0 ? const_cast<float *>(static_cast<const float *>(p.common.state_in))
                    : reinterpret_cast<float *>(at + (i - 1) * s.carry_bytes);
    };
    for (int i = 0; i + 1 < s.sections; ++i) {
      const Span span = {i, s.sections};
      if (const int status = prepare(span, b)) return status;
      if (const int status = walk(b, {{{before(i), before(i + 1), kForward, false, 0, 1}}, span, s.cut})) return status;
    }
    for (int i = s.sections - 1; i >= 0; --i) {
      const Span span = {i, s.sections};
      if (const int status = prepare(span, b)) return status;
      // The longer walk first.
      const Walk reverse = {i == s.sections - 1 ? p.d_state_out : d_between, i == 0 ? p.d_state_in : d_between, kReverse, true, 0, 1};
      if (const int status = walk(b, {{reverse, {before(i), nullptr, kForward, true, 0, s.places > 0}}, span, s.cut})) return status;
      if (const int status = gradients(span, b)) return status;
    }
    return GDN_OK;
  }

  // Segments of long sequences side by side (combine.cuh).
  int in_segments(const Buffers &b, uint8_t *at) const {
    const int32_t last = s.cut.segments - 1;
    const Span whole = {0, 1};
    const auto place = [&](int i) { return reinterpret_cast<float *>(at + i * s.carry_bytes); };
    float *states = place(0), *gradients_of_states = place(last);    // after segment i; of the state before segment i + 1
    float *transfers = place(2 * last);                              // of segment i + 1
    if (const int status = prepare(whole, b)) return status;
    const float *state_in = static_cast<const float *>(p.common.state_in);
    const Walks first = {{{p.d_state_out, gradients_of_states + (last - 1) * state_floats(), kReverse, true, last, 1},
                          {state_in, states, kForward, true, 0, 1},
                          {nullptr, gradients_of_states, kReverse, false, 1, last - 1},
                          {nullptr, states + state_floats(), kForward, false, 1, last - 1},
                          {nullptr, transfers, kTransfer, false, 1, last - 1}}, whole, s.cut};
    if (const int status = walk(b, first)) return status;
    if (const int status = launch_combine(p.common, states, gradients_of_states, transfers, s.cut.segments, stream)) return status;
    const Walks second = {{{gradients_of_states, p.d_state_in, kReverse, true, 0, 1},
                           {states + (last - 1) * state_floats(), nullptr, kForward, true, last, 1},
                           {gradients_of_states + state_floats(), nullptr, kReverse, true, 1, last - 1},
                           {states, nullptr, kForward, true, 1, last - 1}}, whole, s.cut};
    if (const int status = walk(b, second)) return status;
    return gradients(whole, b);
  }
  int64_t state_floats() const { return s.carry_bytes / static_cast<int64_t>(sizeof(float)); }
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
