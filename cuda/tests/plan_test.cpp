// The choosers of ../plan.h, ../backward/cut.h and ../chunk/segments.h as tables: plain C++, without a GPU (test_plan.py compiles and runs it).
#include "../plan.h"

#include <stdio.h>

#include "../backward/cut.h"
#include "../chunk/segments.h"

using namespace gdn;

namespace {

constexpr Device kH200 = {132, 227 * 1024, true, true}, kA100 = {108, 163 * 1024, false, false}, kB200 = {148, 227 * 1024, true, false};
constexpr Device kAda = {128, kLeastShared, false, false};    // an RTX 4090: the code of sm_80, the least shared memory
int failures = 0;

void expect(const char *what, long long row, long long got, long long wanted) {
  if (got == wanted) return;
  printf("%s, row %lld: expected %lld, got %lld\n", what, row, wanted, got);
  ++failures;
}

alignas(256) char memory[256];

gdn_heads heads(int64_t count, int64_t dim, int64_t tokens) { return {memory, tokens * count * dim, count * dim, dim}; }

gdn_common common(int k_heads, int v_heads, int k, int v, int seqs, int tokens, int io, int state) {
  gdn_common c = {};
  c.num_k_heads = k_heads, c.num_v_heads = v_heads, c.head_k = k, c.head_v = v;
  c.a = c.b = heads(v_heads, 1, tokens);
  c.a_log = reinterpret_cast<float *>(memory), c.dt_bias = memory, c.state_in = c.state_out = memory;
  c.in_slots = c.out_slots = {nullptr, seqs, static_cast<int64_t>(v_heads) * v * k};
  c.seqs = {nullptr, seqs, tokens, 0, 0};
  c.io_dtype = io, c.gate_dtype = io, c.state_dtype = state;
  return c;
}

gdn_rule_params rule(int k_heads, int v_heads, int k, int v, int seqs, int tokens, int io = GDN_BF16, int state = GDN_F32) {
  gdn_rule_params p = {};
  p.common = common(k_heads, v_heads, k, v, seqs, tokens, io, state);
  p.q = p.k = heads(k_heads, k, tokens), p.v = p.o = heads(v_heads, v, tokens);
  return p;
}

gdn_rule_backward_params rule_backward(int k_heads, int v_heads, int dim, int tokens, int io = GDN_BF16) {
  gdn_rule_backward_params p = {};
  p.common = common(k_heads, v_heads, dim, dim, 2, tokens, io, GDN_F32);
  p.q = p.k = p.d_q = p.d_k = heads(k_heads, dim, tokens), p.v = p.d_o = p.d_v = heads(v_heads, dim, tokens);
  return p;
}

gdn_layer layer(const gdn_common &c) {
  gdn_layer l = {};
  const int64_t channels = 2 * c.num_k_heads * c.head_k + c.num_v_heads * c.head_v;
  l.x = {memory, channels, channels, 0};
  l.z = l.out = heads(c.num_v_heads, c.head_v, 1);
  l.conv_weight = l.norm_weight = memory, l.conv_width = 4;
  return l;
}

void rules() {
  const struct {
    int k_heads, v_heads, k, v, seqs, tokens, io;
    const Device *device;
    int algo;
  } rows[] = {
      {16, 32, 128, 128, 1, 1, GDN_BF16, &kH200, GDN_DECODE},           {16, 32, 128, 128, 64, 1, GDN_F32, &kA100, GDN_DECODE},
      {16, 32, 128, 128, 4, 8, GDN_BF16, &kH200, GDN_RECURRENT_128},    {16, 32, 128, 128, 5, 8, GDN_BF16, &kH200, GDN_DECODE},
      {16, 32, 128, 128, 5, 9, GDN_BF16, &kH200, GDN_RECURRENT_128},    {16, 32, 128, 128, 1, 9, GDN_BF16, &kH200, GDN_RECURRENT_128},
      {16, 32, 128, 128, 1, 10, GDN_BF16, &kH200, GDN_CHUNKED_SM90},    {16, 32, 128, 128, 1, 23, GDN_BF16, &kB200, GDN_RECURRENT_128},
      {16, 32, 128, 128, 1, 24, GDN_BF16, &kB200, GDN_CHUNKED_SM80},    {16, 32, 128, 128, 1, 4096, GDN_F32, &kH200, GDN_RECURRENT_128},
      {16, 32, 64, 64, 1, 1, GDN_BF16, &kH200, GDN_DECODE},             {16, 32, 64, 64, 9, 2, GDN_BF16, &kH200, GDN_RECURRENT},
      {30, 30, 96, 192, 1, 1, GDN_BF16, &kA100, GDN_DECODE},            {30, 30, 96, 192, 3, 9, GDN_BF16, &kH200, GDN_DECODE},
      {30, 30, 96, 192, 2, 8, GDN_BF16, &kH200, GDN_RECURRENT},         {30, 30, 96, 192, 5, 10, GDN_BF16, &kH200, GDN_CHUNKED_SM90},
      {30, 30, 96, 192, 5, 16, GDN_F32, &kH200, GDN_DECODE},            {30, 30, 96, 192, 5, 17, GDN_F32, &kH200, GDN_RECURRENT},
      {4, 4, 192, 96, 1, 1, GDN_F32, &kH200, GDN_DECODE},               {4, 4, 256, 256, 1, 1, GDN_F16, &kA100, GDN_DECODE},
      {4, 4, 128, 48, 1, 1, GDN_BF16, &kH200, GDN_RECURRENT},           {4, 4, 160, 128, 1, 1, GDN_BF16, &kH200, GDN_RECURRENT},
      {16, 32, 64, 64, 1, 4096, GDN_F16, &kA100, GDN_CHUNKED_SM80},     {4, 4, 136, 136, 1, 4096, GDN_BF16, &kH200, GDN_RECURRENT},
      {4, 8, 100, 100, 1, 4096, GDN_BF16, &kH200, GDN_RECURRENT},       {16, 32, 128, 128, 1, 1, GDN_BF16, &kAda, GDN_DECODE},
      {16, 32, 128, 128, 4, 8, GDN_BF16, &kAda, GDN_RECURRENT_128},     {16, 32, 128, 128, 5, 8, GDN_BF16, &kAda, GDN_DECODE},
      {16, 32, 128, 128, 1, 23, GDN_BF16, &kAda, GDN_RECURRENT_128},    {16, 32, 128, 128, 1, 24, GDN_BF16, &kAda, GDN_CHUNKED_SM80},
      {30, 30, 96, 192, 2, 11, GDN_BF16, &kAda, GDN_RECURRENT},         {30, 30, 96, 192, 3, 11, GDN_BF16, &kAda, GDN_DECODE},
      {30, 30, 96, 192, 1, 24, GDN_BF16, &kAda, GDN_CHUNKED_SM80},
  };
  int row = 0;
  for (const auto &r : rows)
    expect("gdn_rule", row++, plan::rule_algo(rule(r.k_heads, r.v_heads, r.k, r.v, r.seqs, r.tokens, r.io), true, *r.device), r.algo);

  // Each extra leaves the recurrence alone; a request for another kernel is refused.
  const auto changed = [&](const char *what, auto &&change, bool null_states = true) {
    gdn_rule_params p = rule(16, 32, 128, 128, 1, 4096);
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
    gdn_rule_params p = rule(16, 32, 128, 128, 1, 4096);
    change(p);
    expect(what, 0, plan::rule_algo(p, true, kH200), GDN_CHUNKED_SM90);
    expect(what, 1, plan::rule_algo(p, true, kA100), GDN_CHUNKED_SM80);
    p.algo = GDN_RECURRENT_128;
    expect(what, 2, plan::rule_algo(p, true, kH200), GDN_AUTO);
    p = rule(16, 32, 128, 128, 1, 9);
    change(p);
    expect(what, 3, plan::rule_algo(p, true, kH200), GDN_RECURRENT);
  };
  in_chunks("ready gates", [](gdn_rule_params &p) { p.gates = GDN_GATES_READY; });
  in_chunks("ready gates in f32", [](gdn_rule_params &p) { p.gates = GDN_GATES_READY, p.common.gate_dtype = GDN_F32; });
  in_chunks("no state_in", [](gdn_rule_params &p) { p.common.state_in = nullptr; });
  in_chunks("ready gates and no state_in", [](gdn_rule_params &p) { p.gates = GDN_GATES_READY, p.common.state_in = nullptr; });
  gdn_rule_params p = rule(16, 32, 128, 128, 1, 4096);
  p.common.state_in = nullptr;
  expect("a workspace before the states", 0, plan::rule_algo(p, false, kH200), GDN_CHUNKED_SM90);
  p = rule(16, 32, 128, 128, 1, 4096), p.v.token_stride += 4;
  expect("rows of v aligned to 8 bytes", 0, plan::rule_algo(p, true, kH200), GDN_RECURRENT_128);
  p = rule(16, 32, 128, 128, 2, 4096), p.common.out_slots.slot_stride += 2;
  expect("states aligned to 2 elements", 0, plan::rule_algo(p, true, kH200), GDN_RECURRENT);
  p = rule(16, 32, 128, 128, 1, 4096), p.k.token_stride = 0;
  expect("a repeated k has no tensor map", 0, plan::rule_algo(p, true, kH200), GDN_CHUNKED_SM80);
  p = rule(16, 32, 128, 128, 2, 1), p.q.seq_stride = 1LL << 32;
  expect("offsets of more than 32 bits", 0, plan::rule_algo(p, true, kH200), GDN_RECURRENT_128);
  p = rule(16, 32, 128, 128, 1, 1), p.common.gate_dtype = GDN_F32;
  expect("gates in f32", 0, plan::rule_algo(p, true, kH200), GDN_DECODE);
  p.common.gate_dtype = GDN_F16;
  expect("gates of a third type", 0, plan::rule_algo(p, true, kH200), GDN_RECURRENT_128);
  p.algo = GDN_DECODE;
  expect("gates of a third type", 1, plan::rule_algo(p, true, kH200), GDN_AUTO);

  const struct {
    int heads, k, v;
    plan::Work work;
  } works[] = {{165, 128, 128, plan::Work::kFew},  {166, 128, 128, plan::Work::kSome}, {330, 128, 128, plan::Work::kSome},
               {331, 128, 128, plan::Work::kMany}, {147, 96, 192, plan::Work::kFew},   {148, 96, 192, plan::Work::kSome},
               {294, 96, 192, plan::Work::kSome},  {295, 96, 192, plan::Work::kMany}};
  for (const auto &r : works)
    expect("decode's work", r.heads, static_cast<int>(plan::decode_work(common(r.heads, r.heads, r.k, r.v, 1, 1, GDN_BF16, GDN_F32), 132)),
           static_cast<int>(r.work));
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
      {32, 128, GDN_BF16, GDN_DECODE, &kH200, GDN_AUTO},
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
  p = rule_backward(16, 32, 128, 300), p.d_state_in = reinterpret_cast<float *>(memory + 8);
  expect("d_state_in aligned to 8 bytes", 0, plan::rule_backward_algo(p, kH200), GDN_RECURRENT);
  p = rule_backward(16, 32, 128, 300), p.d_v.token_stride += 4;
  expect("rows of d_v aligned to 8 bytes", 0, plan::rule_backward_algo(p, kH200), GDN_RECURRENT);
}

void steps() {
  const struct {
    int k_heads, v_heads, k, v, seqs, tokens;
    const Device *device;
    int algo, rows, depth, blocks;
  } rows[] = {
      {16, 32, 128, 128, 1, 1, &kH200, GDN_STEP_SPLIT, 2, 4, 1},  {16, 32, 128, 128, 2, 1, &kH200, GDN_STEP_SPLIT, 2, 4, 1},
      {16, 32, 128, 128, 3, 1, &kH200, GDN_STEP_HEADS, 4, 4, 1},  {16, 32, 128, 128, 5, 1, &kH200, GDN_STEP_HEADS, 4, 4, 2},
      {16, 32, 128, 128, 6, 1, &kH200, GDN_STEP_WHOLE, 4, 4, 1},  {16, 32, 128, 128, 64, 1, &kH200, GDN_STEP_WHOLE, 4, 2, 2},
      {16, 32, 128, 128, 1, 1, &kA100, GDN_STEP_WHOLE, 2, 4, 1},  {16, 32, 128, 128, 1, 2, &kH200, GDN_STEP_HEADS, 2, 4, 1},
      {16, 16, 128, 128, 6, 1, &kH200, GDN_STEP_SPLIT, 4, 4, 1},  {16, 16, 128, 128, 7, 1, &kH200, GDN_STEP_WHOLE, 4, 4, 1},
      {16, 64, 128, 128, 12, 1, &kH200, GDN_STEP_WHOLE, 4, 2, 2}, {16, 64, 128, 128, 6, 1, &kH200, GDN_STEP_HEADS, 4, 2, 3},
      {30, 30, 96, 192, 1, 1, &kH200, GDN_STEP_SPLIT, 2, 4, 1},   {30, 30, 96, 192, 3, 1, &kH200, GDN_STEP_SPLIT, 4, 4, 1},
      {30, 30, 96, 192, 4, 1, &kH200, GDN_STEP_WHOLE, 4, 4, 1},   {30, 30, 96, 192, 64, 1, &kA100, GDN_STEP_WHOLE, 4, 2, 2},
      {15, 30, 96, 192, 1, 1, &kH200, GDN_STEP_SPLIT, 4, 4, 1},   {10, 30, 96, 192, 1, 1, &kH200, GDN_STEP_HEADS, 4, 4, 2},
      {30, 30, 64, 64, 1, 1, &kH200, GDN_STEP_AUTO, 1, 4, 0},     {30, 30, 192, 96, 1, 1, &kH200, GDN_STEP_AUTO, 1, 4, 0},
      {16, 32, 128, 128, 1, 1, &kAda, GDN_STEP_WHOLE, 2, 4, 1},   {16, 32, 128, 128, 6, 1, &kAda, GDN_STEP_WHOLE, 4, 4, 1},
      {16, 32, 128, 128, 7, 1, &kAda, GDN_STEP_WHOLE, 4, 2, 1},   {16, 32, 128, 128, 9, 1, &kAda, GDN_STEP_WHOLE, 4, 2, 2},
      {30, 30, 96, 192, 1, 16, &kAda, GDN_STEP_WHOLE, 2, 4, 1},   {16, 32, 128, 128, 1, 16, &kAda, GDN_STEP_WHOLE, 2, 4, 1},
      // Four value heads a key head: 11 tokens fit in 99 KB. For more only clusters have a variant.
      {16, 64, 128, 128, 1, 11, &kAda, GDN_STEP_WHOLE, 4, 4, 1},  {16, 64, 128, 128, 1, 12, &kAda, GDN_STEP_AUTO, 4, 4, 1},
      {16, 64, 128, 128, 1, 16, &kA100, GDN_STEP_WHOLE, 4, 4, 1}, {16, 64, 128, 128, 1, 16, &kH200, GDN_STEP_HEADS, 4, 4, 2},
  };
  int row = 0;
  for (const auto &r : rows) {
    gdn_step_params p = {};
    p.common = common(r.k_heads, r.v_heads, r.k, r.v, r.seqs, r.tokens, GDN_BF16, GDN_F32), p.layer = layer(p.common);
    p.conv_in = p.conv_out = memory;
    const plan::Step s = plan::step(p, *r.device);
    expect("gdn_step", row, s.algo, r.algo);
    expect("gdn_step's rows", row, s.rows, r.rows);
    expect("gdn_step's depth", row, s.depth, r.depth);
    expect("gdn_step's blocks", row, s.blocks, r.blocks);
    p.layer.conv_width = 3;
    expect("gdn_step of width 3", row++, plan::step(p, *r.device).algo, GDN_STEP_AUTO);
  }
}

void rings() {
  const auto algo_of = [](int k, int v, int tokens, int request, auto &&change) {
    gdn_ring_step_params p = {};
    p.common = common(16, 32, k, v, 4, tokens, GDN_BF16, GDN_F32), p.layer = layer(p.common);
    p.ring.keys = p.inputs = memory, p.ring.updates = reinterpret_cast<float *>(memory), p.algo = request;
    change(p);
    return plan::ring_algo(p);
  };
  const auto algo = [&](int tokens, int request, auto &&change) { return algo_of(128, 128, tokens, request, change); };
  const auto same = [](gdn_ring_step_params &) {};
  expect("gdn_ring_step, one token", 0, algo(1, GDN_RING_AUTO, same), GDN_RING_FMA);
  expect("gdn_ring_step, one token", 1, algo(1, GDN_RING_MMA, same), GDN_RING_MMA);
  expect("gdn_ring_step, two tokens", 0, algo(2, GDN_RING_AUTO, same), GDN_RING_MMA);
  expect("gdn_ring_step, two tokens", 1, algo(2, GDN_RING_FMA, same), GDN_RING_AUTO);
  expect("inputs apart by 2 elements", 0, algo(1, GDN_RING_AUTO, [](auto &p) { p.inputs_stride = 2; }), GDN_RING_MMA);
  expect("gdn_ring_step, K 96, V 192", 0, algo_of(96, 192, 1, GDN_RING_AUTO, same), GDN_RING_FMA);
  expect("gdn_ring_step, K 96, V 192", 1, algo_of(96, 192, 16, GDN_RING_AUTO, same), GDN_RING_MMA);
  expect("gdn_ring_step, K 192, V 96", 0, algo_of(192, 96, 1, GDN_RING_AUTO, same), GDN_RING_AUTO);
  expect("gdn_ring_step, K 96, V 96", 0, algo_of(96, 96, 1, GDN_RING_AUTO, same), GDN_RING_AUTO);
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
    const gdn_rule_params p = rule(16, r.v_heads, 128, 128, r.seqs, r.tokens);
    const chunk::Segments s = chunk::choose_segments(p, (r.tokens + 63) / 64, r.sm90, 132, r.sm90);
    expect("segments", row, s.count, r.count);
    expect("segments: wide", row, s.wide, r.wide);
    expect("segments: rounds", row++, s.rounds, r.rounds);
  }
  const struct {
    int heads, rows, cluster;
    const Device *device;
  } combinations[] = {{8, 16, 2, &kH200}, {16, 32, 2, &kH200}, {32, 32, 2, &kH200}, {48, 64, 2, &kH200}, {8, 16, 1, &kA100}, {32, 64, 1, &kA100},
                      {16, 16, 1, &kAda}, {24, 64, 1, &kAda}};
  row = 0;
  for (const auto &r : combinations) {
    const plan::Combine c = plan::combine(common(4, r.heads, 128, 128, 1, 1, GDN_BF16, GDN_F32), 1, *r.device);
    expect("combination", row, c.rows, r.rows);
    expect("combination: cluster", row++, c.cluster, r.cluster);
  }
}

}  // namespace

// How sequences are cut for the backward pass, by blocks of a walk, chunks and multiprocessors.
void cuts() {
  const struct {
    int blocks, chunks, sms, asked;
    bool wgmma;
    int segments, beside;
  } rows[] = {
      {64, 512, 132, 0, true, 1, 0}, {67, 4096, 132, 0, true, 1, 0}, {0, 0, 132, 0, true, 1, 0},                                            // 32 heads of 128
      {48, 31, 132, 0, true, 1, 0}, {48, 32, 132, 0, true, 1, 1}, {50, 128, 132, 0, true, 1, 0}, {34, 512, 132, 0, true, 1, 1},             // 24 heads, 25
      {33, 512, 132, 0, true, 2, 1}, {32, 512, 132, 0, true, 2, 1}, {32, 512, 132, 0, false, 2, 0}, {32, 20, 132, 0, true, 2, 0},           // 16 heads
      {32, 19, 132, 0, true, 1, 0}, {24, 63, 132, 0, true, 2, 0}, {24, 64, 132, 0, true, 2, 1}, {16, 512, 132, 0, true, 4, 1}, {16, 15, 132, 0, true, 4, 0},              // 8 heads
      {16, 14, 132, 0, true, 1, 0}, {16, 512, 108, 0, false, 3, 0}, {4, 512, 132, 0, true, 8, 1}, {1, 13, 132, 0, true, 1, 0},
      {32, 512, 132, 1, true, 1, 1}, {32, 512, 132, 1, false, 1, 0}, {32, 512, 132, 3, true, 3, 0}, {4, 1, 132, 64, true, 64, 0},           // asked for
  };
  for (const auto &r : rows) {
    const backward::Cut cut = backward::cut_of(r.blocks, r.chunks, r.sms, r.asked, r.wgmma);
    expect("cut_of: segments", &r - rows, cut.segments, r.segments);
    expect("cut_of: beside", &r - rows, cut.beside, r.beside);
  }
}

int main() {
  rules();
  backward_rules();
  cuts();
  steps();
  rings();
  segments();
  if (!failures) printf("plan: all rows as expected\n");
  return failures != 0;
}
