// The choosers of ../plan.h and ../chunk/segments.h as tables: plain C++, without a GPU (test_plan.py compiles and runs it).
#include "../plan.h"

#include <stdio.h>

#include "../chunk/segments.h"

using namespace gdn;

namespace {

constexpr Device kH200 = {132, 227 * 1024, true, true}, kA100 = {108, 163 * 1024, false, false}, kB200 = {148, 227 * 1024, true, false};
int failures = 0;

void expect(const char *what, long long row, long long got, long long wanted) {
  if (got == wanted) return;
  printf("%s, row %lld: expected %lld, got %lld\n", what, row, wanted, got);
  ++failures;
}

alignas(256) char memory[256];

gdn_heads heads(int64_t count, int64_t dim, int64_t tokens) { return {memory, tokens * count * dim, count * dim, dim}; }

gdn_common common(int k_heads, int v_heads, int dim, int seqs, int tokens, int io, int state) {
  gdn_common c = {};
  c.num_k_heads = k_heads, c.num_v_heads = v_heads, c.head_k = c.head_v = dim;
  c.a = c.b = heads(v_heads, 1, tokens);
  c.a_log = reinterpret_cast<float *>(memory), c.dt_bias = memory, c.state_in = c.state_out = memory;
  c.in_slots = c.out_slots = {nullptr, seqs, static_cast<int64_t>(v_heads) * dim * dim};
  c.seqs = {nullptr, seqs, tokens, 0, 0};
  c.io_dtype = io, c.gate_dtype = io, c.state_dtype = state;
  return c;
}

gdn_rule_params rule(int k_heads, int v_heads, int dim, int seqs, int tokens, int io = GDN_BF16, int state = GDN_F32) {
  gdn_rule_params p = {};
  p.common = common(k_heads, v_heads, dim, seqs, tokens, io, state);
  p.q = p.k = heads(k_heads, dim, tokens), p.v = p.o = heads(v_heads, dim, tokens);
  return p;
}

gdn_rule_backward_params rule_backward(int k_heads, int v_heads, int dim, int tokens, int io = GDN_BF16) {
  gdn_rule_backward_params p = {};
  p.common = common(k_heads, v_heads, dim, 2, tokens, io, GDN_F32);
  p.q = p.k = p.d_q = p.d_k = heads(k_heads, dim, tokens), p.v = p.d_o = p.d_v = heads(v_heads, dim, tokens);
  return p;
}

gdn_layer layer(const gdn_common &c) {
  gdn_layer l = {};
  l.x = {memory, (2 * c.num_k_heads + c.num_v_heads) * 128, (2 * c.num_k_heads + c.num_v_heads) * 128, 0};
  l.z = l.out = heads(c.num_v_heads, 128, 1);
  l.conv_weight = l.norm_weight = memory, l.conv_width = 4;
  return l;
}

void rules() {
  const struct {
    int k_heads, v_heads, dim, seqs, tokens, io;
    const Device *device;
    int algo;
  } rows[] = {
      {16, 32, 128, 1, 1, GDN_BF16, &kH200, GDN_DECODE_128},      {16, 32, 128, 64, 1, GDN_F32, &kA100, GDN_DECODE_128},
      {16, 32, 128, 4, 8, GDN_BF16, &kH200, GDN_RECURRENT_128},   {16, 32, 128, 5, 8, GDN_BF16, &kH200, GDN_DECODE_128},
      {16, 32, 128, 5, 9, GDN_BF16, &kH200, GDN_RECURRENT_128},   {16, 32, 128, 1, 11, GDN_BF16, &kH200, GDN_RECURRENT_128},
      {16, 32, 128, 1, 12, GDN_BF16, &kH200, GDN_CHUNKED_SM90},   {16, 32, 128, 1, 23, GDN_BF16, &kB200, GDN_RECURRENT_128},
      {16, 32, 128, 1, 24, GDN_BF16, &kB200, GDN_CHUNKED_SM80},   {16, 32, 128, 1, 4096, GDN_F32, &kH200, GDN_RECURRENT_128},
      {16, 32, 64, 1, 1, GDN_BF16, &kH200, GDN_RECURRENT},        {16, 32, 64, 1, 4096, GDN_F16, &kA100, GDN_CHUNKED_SM80},
      {4, 4, 136, 1, 4096, GDN_BF16, &kH200, GDN_RECURRENT},      {4, 8, 100, 1, 4096, GDN_BF16, &kH200, GDN_RECURRENT},
  };
  int row = 0;
  for (const auto &r : rows)
    expect("gdn_rule", row++, plan::rule_algo(rule(r.k_heads, r.v_heads, r.dim, r.seqs, r.tokens, r.io), true, *r.device), r.algo);

  // Each extra leaves the recurrence alone; a request for another kernel is refused.
  const auto changed = [&](const char *what, auto &&change, bool null_states = true) {
    gdn_rule_params p = rule(16, 32, 128, 1, 4096);
    change(p);
    expect(what, 0, plan::rule_algo(p, null_states, kH200), GDN_RECURRENT);
    p.algo = GDN_CHUNKED_SM90;
    expect(what, 1, plan::rule_algo(p, null_states, kH200), GDN_AUTO);
  };
  changed("counts", [](gdn_rule_params &p) { p.counts = reinterpret_cast<uint32_t *>(memory); });
  changed("f16 states", [](gdn_rule_params &p) { p.common.state_dtype = GDN_F16; });
  changed("dt_bias in 16 bits", [](gdn_rule_params &p) { p.dt_bias_dtype = GDN_BF16; });
  changed("head_stride", [](gdn_rule_params &p) { p.head_stride = 2 * 128 * 128; });
  changed("no state_out", [](gdn_rule_params &p) { p.common.state_out = nullptr; });
  // Two of them the chunk forms support too, where there are enough tokens.
  const auto in_chunks = [&](const char *what, auto &&change) {
    gdn_rule_params p = rule(16, 32, 128, 1, 4096);
    change(p);
    expect(what, 0, plan::rule_algo(p, true, kH200), GDN_CHUNKED_SM90);
    expect(what, 1, plan::rule_algo(p, true, kA100), GDN_CHUNKED_SM80);
    p.algo = GDN_RECURRENT_128;
    expect(what, 2, plan::rule_algo(p, true, kH200), GDN_AUTO);
    p = rule(16, 32, 128, 1, 11);
    change(p);
    expect(what, 3, plan::rule_algo(p, true, kH200), GDN_RECURRENT);
  };
  in_chunks("ready gates", [](gdn_rule_params &p) { p.gates = GDN_GATES_READY; });
  in_chunks("ready gates in f32", [](gdn_rule_params &p) { p.gates = GDN_GATES_READY, p.common.gate_dtype = GDN_F32; });
  in_chunks("no state_in", [](gdn_rule_params &p) { p.common.state_in = nullptr; });
  in_chunks("ready gates and no state_in", [](gdn_rule_params &p) { p.gates = GDN_GATES_READY, p.common.state_in = nullptr; });
  gdn_rule_params p = rule(16, 32, 128, 1, 4096);
  p.common.state_in = nullptr;
  expect("a workspace before the states", 0, plan::rule_algo(p, false, kH200), GDN_CHUNKED_SM90);
  p = rule(16, 32, 128, 1, 4096), p.v.token_stride += 4;
  expect("rows of v aligned to 8 bytes", 0, plan::rule_algo(p, true, kH200), GDN_RECURRENT_128);
  p = rule(16, 32, 128, 1, 4096), p.k.token_stride = 0;
  expect("a repeated k has no tensor map", 0, plan::rule_algo(p, true, kH200), GDN_CHUNKED_SM80);
  p = rule(16, 32, 128, 2, 1), p.q.seq_stride = 1LL << 32;
  expect("offsets of more than 32 bits", 0, plan::rule_algo(p, true, kH200), GDN_RECURRENT_128);
  p = rule(16, 32, 128, 1, 1), p.common.gate_dtype = GDN_F32;
  expect("gates in f32", 0, plan::rule_algo(p, true, kH200), GDN_DECODE_128);
  p.common.gate_dtype = GDN_F16;
  expect("gates of a third type", 0, plan::rule_algo(p, true, kH200), GDN_RECURRENT_128);
  p.algo = GDN_DECODE_128;
  expect("gates of a third type", 1, plan::rule_algo(p, true, kH200), GDN_AUTO);

  for (const auto &r : {plan::DecodeShape{165, 1}, {166, 4}, {330, 4}, {331, 2}})
    expect("decode, f32 state", r.rows, plan::decode_shape(r.rows, GDN_F32, 132).rows, r.warps);
  expect("decode, bf16 state", 0, plan::decode_shape(1000, GDN_BF16, 132).warps, 1);
  for (const auto &r : {plan::DecodeShape{16, 1}, {17, 2}, {66, 2}, {67, 4}})
    expect("recurrent rows", r.rows, plan::recurrent_rows(r.rows, 132), r.warps);
}

void backward_rules() {
  const struct {
    int v_heads, dim, io, algo;
    const Device *device;
    int chosen;
  } rows[] = {
      {32, 128, GDN_BF16, GDN_AUTO, &kH200, GDN_CHUNKED_SM90},         {32, 128, GDN_F16, GDN_AUTO, &kB200, GDN_CHUNKED_SM80},
      {32, 72, GDN_BF16, GDN_AUTO, &kA100, GDN_CHUNKED_SM80},          {32, 128, GDN_F32, GDN_AUTO, &kH200, GDN_RECURRENT},
      {32, 136, GDN_BF16, GDN_AUTO, &kH200, GDN_RECURRENT},            {32, 100, GDN_BF16, GDN_AUTO, &kH200, GDN_RECURRENT},
      {32, 128, GDN_BF16, GDN_RECURRENT, &kH200, GDN_RECURRENT},       {32, 128, GDN_BF16, GDN_CHUNKED_SM80, &kH200, GDN_CHUNKED_SM80},
      {32, 128, GDN_BF16, GDN_CHUNKED_SM90, &kA100, GDN_AUTO},         {32, 128, GDN_F32, GDN_CHUNKED_SM80, &kH200, GDN_AUTO},
      {32, 128, GDN_BF16, GDN_DECODE_128, &kH200, GDN_AUTO},
  };
  int row = 0;
  for (const auto &r : rows) {
    gdn_rule_backward_params p = rule_backward(16, r.v_heads, r.dim, 300, r.io);
    p.algo = r.algo;
    expect("gdn_rule_backward", row++, plan::rule_backward_algo(p, *r.device), r.chosen);
  }
  const struct {
    int head_k, head_v, io;
    const Device *device;
    int chosen;
  } sizes[] = {{96, 192, GDN_BF16, &kH200, GDN_CHUNKED_SM90},  {96, 192, GDN_F16, &kA100, GDN_CHUNKED_SM80}, {128, 256, GDN_BF16, &kH200, GDN_CHUNKED_SM90},
               {192, 96, GDN_BF16, &kH200, GDN_RECURRENT},     {96, 196, GDN_BF16, &kH200, GDN_RECURRENT},   {96, 192, GDN_F32, &kH200, GDN_RECURRENT}};
  row = 0;
  for (const auto &r : sizes) {
    gdn_rule_backward_params p = rule_backward(30, 30, r.head_k, 300, r.io);
    p.common.head_v = r.head_v, p.v = p.d_o = p.d_v = heads(30, r.head_v, 300);
    expect("gdn_rule_backward, keys and values of other sizes", row++, plan::rule_backward_algo(p, *r.device), r.chosen);
  }
  gdn_rule_backward_params p = rule_backward(16, 32, 128, 300);
  p.d_o.token_stride = 0;
  expect("a repeated d_o has no tensor map", 0, plan::rule_backward_algo(p, kH200), GDN_CHUNKED_SM80);
  p = rule_backward(16, 32, 128, 300), p.d_v.token_stride += 4;
  expect("rows of d_v aligned to 8 bytes", 0, plan::rule_backward_algo(p, kH200), GDN_RECURRENT);
}

void steps() {
  const struct {
    int k_heads, v_heads, seqs, tokens;
    const Device *device;
    int algo, rows, depth, blocks;
  } rows[] = {
      {16, 32, 1, 1, &kH200, GDN_STEP_SPLIT, 2, 4, 1},  {16, 32, 2, 1, &kH200, GDN_STEP_SPLIT, 2, 4, 1},
      {16, 32, 3, 1, &kH200, GDN_STEP_HEADS, 4, 4, 1},  {16, 32, 5, 1, &kH200, GDN_STEP_HEADS, 4, 4, 2},
      {16, 32, 6, 1, &kH200, GDN_STEP_WHOLE, 4, 4, 1},  {16, 32, 64, 1, &kH200, GDN_STEP_WHOLE, 4, 2, 2},
      {16, 32, 1, 1, &kA100, GDN_STEP_WHOLE, 2, 4, 1},  {16, 32, 1, 2, &kH200, GDN_STEP_HEADS, 2, 4, 1},
      {16, 16, 6, 1, &kH200, GDN_STEP_SPLIT, 4, 4, 1},  {16, 16, 7, 1, &kH200, GDN_STEP_WHOLE, 4, 4, 1},
      {16, 64, 12, 1, &kH200, GDN_STEP_WHOLE, 4, 2, 2}, {16, 64, 6, 1, &kH200, GDN_STEP_HEADS, 4, 2, 3},
  };
  int row = 0;
  for (const auto &r : rows) {
    gdn_step_params p = {};
    p.common = common(r.k_heads, r.v_heads, 128, r.seqs, r.tokens, GDN_BF16, GDN_F32), p.layer = layer(p.common);
    p.conv_in = p.conv_out = memory;
    const plan::Step s = plan::step(p, *r.device);
    expect("gdn_step", row, s.algo, r.algo);
    expect("gdn_step's rows", row, s.rows, r.rows);
    expect("gdn_step's depth", row, s.depth, r.depth);
    expect("gdn_step's blocks", row, s.blocks, r.blocks);
    p.common.head_v = 64;
    expect("gdn_step of 64 values", row++, plan::step(p, *r.device).algo, GDN_STEP_AUTO);
  }
}

void rings() {
  const auto algo = [](int tokens, int request, auto &&change) {
    gdn_ring_step_params p = {};
    p.common = common(16, 32, 128, 4, tokens, GDN_BF16, GDN_F32), p.layer = layer(p.common);
    p.ring.keys = p.inputs = memory, p.ring.updates = reinterpret_cast<float *>(memory), p.algo = request;
    change(p);
    return plan::ring_algo(p);
  };
  const auto same = [](gdn_ring_step_params &) {};
  expect("gdn_ring_step, one token", 0, algo(1, GDN_RING_AUTO, same), GDN_RING_FMA);
  expect("gdn_ring_step, one token", 1, algo(1, GDN_RING_MMA, same), GDN_RING_MMA);
  expect("gdn_ring_step, two tokens", 0, algo(2, GDN_RING_AUTO, same), GDN_RING_MMA);
  expect("gdn_ring_step, two tokens", 1, algo(2, GDN_RING_FMA, same), GDN_RING_AUTO);
  expect("inputs apart by 2 elements", 0, algo(1, GDN_RING_AUTO, [](auto &p) { p.inputs_stride = 2; }), GDN_RING_MMA);
  expect("two states", 0, algo(1, GDN_RING_AUTO, [](auto &p) { p.common.state_out = memory + 128; }), GDN_RING_AUTO);
}

void segments() {
  const struct {
    int v_heads, seqs, tokens;
    bool sm90;
    int count;
    bool wide, rounds;
  } rows[] = {
      {32, 1, 64, true, 1, false, false},   {32, 1, 2048, true, 1, false, false},  {32, 1, 8192, true, 5, true, false},
      {16, 1, 8192, true, 5, false, false}, {32, 4, 1024, true, 1, true, false},   {32, 8, 8192, true, 1, true, true},
      {64, 64, 2048, true, 1, true, true},  {32, 1, 2048, false, 5, false, false}, {32, 4, 8192, false, 1, false, false},
  };
  int row = 0;
  for (const auto &r : rows) {
    const gdn_rule_params p = rule(16, r.v_heads, 128, r.seqs, r.tokens);
    const chunk::Segments s = chunk::choose_segments(p, (r.tokens + 63) / 64, r.sm90, 132, r.sm90);
    expect("segments", row, s.count, r.count);
    expect("segments: wide", row, s.wide, r.wide);
    expect("segments: rounds", row++, s.rounds, r.rounds);
  }
  const struct {
    int heads, rows, cluster;
    const Device *device;
  } combinations[] = {{8, 16, 2, &kH200}, {16, 32, 2, &kH200}, {32, 32, 2, &kH200}, {48, 64, 2, &kH200}, {8, 16, 1, &kA100}, {32, 64, 1, &kA100}};
  row = 0;
  for (const auto &r : combinations) {
    const plan::Combine c = plan::combine(common(4, r.heads, 128, 1, 1, GDN_BF16, GDN_F32), 1, *r.device);
    expect("combination", row, c.rows, r.rows);
    expect("combination: cluster", row++, c.cluster, r.cluster);
  }
}

}  // namespace

int main() {
  rules();
  backward_rules();
  steps();
  rings();
  segments();
  if (!failures) printf("plan: all rows as expected\n");
  return failures != 0;
}
