#!/usr/bin/env python3
"""Checks gdn_attention_prepare and gdn_attention, through the C ABI, against softmax attention in float64.

    python3 models/cuda/tests/check_attention.py --prompts         # checks of prompts alone
    python3 models/cuda/tests/check_attention.py --only-prompts    # times of prompts alone: both kernels and torch
    python3 models/cuda/tests/check_attention.py --self-test       # of the reference alone, on the CPU

An error is ||x - ref|| / ||ref||. Caches hold NaN wherever no token is, slots that no sequence has are NaN throughout, and
so are outputs before a launch and the gaps of strided tensors; all that must not be written is compared bit by bit.
"""
import ctypes as C
import math
import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), *[os.pardir] * 3, "cuda", "tests"))

import harness
import torch
from abi import NULL_POINTER, OK, workspace
from attention_case import Case, attention_reference, prepare_reference, run, self_test
from harness import WAYS, call, capture, expect, launch, normal, one_by_one, refused, report, same, u32
from reference import relative
from timing import calls_of, cold_sets, graph_us, heading, often, span_us

# Rounding of o, 2^-9 / sqrt(3) in bf16 at most; that of the weights before they multiply the values, which is as large
# for a single key and averages out over many; and what q and the cache were rounded to is the reference's input too.
O_BOUND = {"f32": 1e-5, "bf16": 4e-3, "f16": 6e-4}
PREPARE_BOUND = {"f32": 2e-6, "bf16": 2.5e-3, "f16": 3.2e-4}

def check_case(lib, name, case, quiet=True):
    name = f"{case.io} {case.heads}/{case.kv_heads}x{case.dim} {name}"
    status, q, caches, o, guard = run(lib, case)
    if refused(lib, name, status):
        return
    wrong = [] if guard else ["wrote past its workspace"]
    want = [c.clone() for c in case.caches]
    e_q = e_k = square = norm = 0.0
    for i, rows in case.rows:
        before, length = case.before[i], case.lens[i]
        if i not in case.live:
            if not (bool((q[rows] == 0).all()) and bool((o[rows] == 0).all())):
                wrong.append(f"padding {i} is not zero")
            continue
        if length == 0:
            continue
        at = torch.arange(before, before + length, device=harness.device)
        place = lambda x, w: prepare_reference(x[rows], w, case.frequencies, at, 1e-6, case.zero_centred)
        e_q = max(e_q, relative(q[rows], place(case.q, case.q_weight)))
        slot, kept = case.slots[i], min(length, max(case.capacity - before, 0))
        new_k = caches[0][slot, :, before:before + kept].transpose(0, 1)
        if kept:
            e_k = max(e_k, relative(new_k, place(case.k, case.k_weight)[:kept]))
            want[0][slot, :, before:before + kept] = new_k.transpose(0, 1)
            want[1][slot, :, before:before + kept] = case.v[rows][:kept].transpose(0, 1)
        keys = min(before + length, case.capacity)
        # From what was rounded and written, so that this error is the attention's alone.
        ref = attention_reference(q[rows], caches[0][slot, :, :keys].transpose(0, 1), caches[1][slot, :, :keys].transpose(0, 1),
                                  before, case.dim ** -0.5, case.gate[rows] if case.gated else None)
        square += (o[rows].double() - ref).pow(2).sum().item()
        norm += ref.pow(2).sum().item()
    e_o = math.sqrt(square / norm if norm else square)
    wrong += [f"cache {what}" for what, got, ref in zip("kv", caches, want) if not same(got, ref)]
    ok = e_q <= PREPARE_BOUND[case.io] and e_k <= PREPARE_BOUND[case.io] and e_o <= O_BOUND[case.io] and not wrong
    report(name, ok, f"q {e_q:.1e} k {e_k:.1e} o {e_o:.1e} {', '.join(wrong)}", quiet)


def check_repeats(lib, case, name):
    """The same bits again, from a graph, and overlapped."""
    _, q, caches, o, _ = run(lib, case)
    for overlap, graph in WAYS:
        case.overlap = overlap
        status, *again, _ = run(lib, case, graph)
        ok = status == OK and same([again[0], again[2], *again[1]], [q, o, *caches])
        report(f"{name} again, graph {graph}, overlap {overlap}", ok, "same bits" if ok else f"differs, status {status}")
    case.overlap = 0


def check_growth(lib, io="bf16", steps=150, tokens=1, overlap=0):
    """One captured graph, replayed for sequences that grow: gdn_advance is in the graph."""
    before = [0, 40, 129]
    replayed, eager = (Case(before, [tokens] * 3, 16, 2, 256, io=io, capacity=130 + steps * tokens, slots=True, seed=steps,
                            overlap=overlap) for _ in range(2))
    for case in (replayed, eager):
        case.positions = u32([b if i in case.live else 0 for i, b in enumerate(before)])
    q, o, again, fresh = (eager.empty() for _ in range(4))
    params = replayed.prepare_params(q), replayed.attention_params(lib, q, o), replayed.advance_params()
    launches = list(zip((lib.gdn_attention_prepare, lib.gdn_attention, lib.gdn_advance), params))
    graph, statuses = capture(lambda: [call(f, p) for f, p in launches])
    first, second = eager.prepare_params(again), eager.attention_params(lib, again, fresh)
    differ, worst = 0, 0.0
    for step in range(steps):
        for case in (replayed, eager):
            case.x.copy_(normal(step)(*case.x.shape))
        again.fill_(math.nan)
        fresh.fill_(math.nan)
        graph.replay()
        statuses += [call(lib.gdn_attention_prepare, first), call(lib.gdn_attention, second)]
        torch.cuda.synchronize()
        differ += not same(fresh, o)
        for i, rows in eager.rows if step % 29 == 0 or step == steps - 1 else ():
            if i in eager.live:
                keys = before[i] + (step + 1) * tokens
                k, v = (c[eager.slots[i], :, :keys].transpose(0, 1) for c in eager.pools)
                ref = attention_reference(again[rows], k, v, keys - tokens, eager.dim ** -0.5, eager.gate[rows])
                worst = max(worst, relative(o[rows], ref))
        eager.positions[eager.live] += tokens
    ok = set(statuses) == {OK} and differ == 0 and worst <= O_BOUND[io] and torch.equal(replayed.positions, eager.positions)
    report(f"{io} growth by {tokens} over {steps} replays, overlap {overlap}", ok,
           f"{differ} replays differ, o {worst:.1e}, statuses {set(statuses)}")


def check_advance(lib):
    lens = [3, 0, 16, 1, 1]
    for varlen, slots in ((True, False), (True, True), (False, True)):
        case = Case([5, 6, 7, 8, 9], lens if varlen else [2] * 5, 4, 2, 64, varlen=varlen, slots=slots)
        want = [p + t if i in case.live else p for i, (p, t) in enumerate(zip(case.positions.tolist(), case.lens))]
        status = launch(lambda: call(lib.gdn_advance, case.advance_params()))
        report(f"advance, packed {varlen}, slots {slots}", status == OK and case.positions.tolist() == want,
               f"{case.positions.tolist()}, expected {want}, status {status}")
    expect("advance", lib.gdn_advance, case.advance_params, {"NULL_POINTER": [dict(positions=None)]})


def check_arguments(lib):
    case = Case([5, 9], [2, 2], 4, 2, 64)
    q, o = case.empty(), case.empty()
    both = {"BAD_DTYPE": one_by_one(io_dtype=[9]), "BAD_HEADS": one_by_one(num_kv_heads=[3], num_heads=[0]),
            "BAD_HEAD_DIM": one_by_one(head_dim=[60, 264]),
            "BAD_LENGTH": one_by_one(seqs__num_seqs=[-1], cache__capacity=[-1]),
            "BAD_STRIDE": one_by_one(q__token_stride=[-1], cache__head_stride=[-8]),
            "BAD_ALGO": one_by_one(cache__k=[case.caches[0].data_ptr() + 2], cache__token_stride=[66]),
            "NULL_POINTER": one_by_one(positions=[None], cache__v=[None], q__ptr=[None]),
            "OK": [dict(seqs__num_seqs=0, q__ptr=None)]}
    prepare = "prepare", lib.gdn_attention_prepare, lambda: case.prepare_params(q)
    attention = "attention", lib.gdn_attention, lambda: case.attention_params(lib, q, o)
    expect(*prepare, both)
    expect(*attention, both)
    expect(*prepare, {"BAD_HEAD_DIM": one_by_one(rotary_dim=[66, 15]),
                      "NULL_POINTER": one_by_one(inv_freq=[None], k_weight=[None])})
    expect(*attention, {"BAD_ALGO": [dict(q__ptr=q.data_ptr() + 2)],
                        "BAD_LENGTH": one_by_one(splits=[-1, 100000], max_len=[-1])})
    case.splits = 3
    expect(*attention, {"BAD_WORKSPACE": one_by_one(workspace=[None], workspace_bytes=[8])})
    size = C.c_int64(-1)
    report("workspace of nothing", lib.gdn_attention_workspace(None, C.byref(size)) == NULL_POINTER, quiet=True)


def check_quick(lib):
    check = lambda name, case: check_case(lib, name, case, quiet=False)
    for io in ("bf16", "f16", "f32"):
        check("one token", Case([70], [1], 8, 1, 256, io=io))
        check("first token", Case([0], [1], 16, 2, 256, io=io))
        check("splits", Case([300, 7, 129], [1] * 3, 16, 2, 256, io=io, splits=5, slots=True))
        check("several", Case([33, 0, 64], [3, 5, 1], 4, 2, 128, io=io, varlen=True, slots=True, splits=3, seed=1))
        check("sixteen", Case([50], [16], 8, 2, 64, io=io, splits=2))


# Lengths around the kernel for prompts' tiles, of 128 rows and of 64, 80 or 128 keys, and what was before.
PROMPT_LENGTHS = (1000, 0, 1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 79, 80, 81, 127, 128, 129, 159, 160, 161, 0, 255, 256, 257,
                  511, 512, 513, 640, 641, 0)
PROMPT_BEFORE = (0, 1, 0, 63, 64, 65, 79, 80, 81, 127, 128, 129, 500, 2047)


def check_prompts(lib, quick=False):
    """With splits 0, which on sm_90a chooses the kernel for prompts where there are enough rows: at least 128 of a kv head, and
    some 60 blocks of 64."""
    check = lambda name, case: check_case(lib, "prompts, " + name, case, quiet=not quick)
    if quick:
        for io, dim in (("bf16", 256), ("f16", 256), ("bf16", 128), ("f16", 64)):
            check("few", Case([3, 0, 80, 9, 70], [130, 0, 66, 1, 300], 16, 4, dim, io=io, varlen=True, gated=io == "bf16"))
            check("padding", Case([3, 0, 80], [130] * 3, 16, 4, dim, io=io, slots=True))
        return
    around = [PROMPT_BEFORE[i % len(PROMPT_BEFORE)] for i in range(len(PROMPT_LENGTHS))]
    seed = 0
    for io in ("bf16", "f16"):
        for dim in (64, 128, 256):
            for heads, kv_heads in ((16, 4), (16, 2), (4, 4), (12, 4), (16, 1), (10, 2)):
                seed += 1
                check("packed", Case(around[seed % 7:] + around[:seed % 7], list(PROMPT_LENGTHS), heads, kv_heads, dim, io=io,
                                     varlen=True, slots=seed % 2 == 0, gated=seed % 3 != 0, seed=seed))
                check("packed at 0", Case([0] * len(PROMPT_LENGTHS), list(PROMPT_LENGTHS), heads, kv_heads, dim, io=io,
                                          varlen=True, capacity=1000 if seed % 2 else 1500, gap=8, gated=seed % 3 == 0, seed=seed))
            for tokens in (1, 8, 31, 32, 33, 63, 64, 65, 79, 80, 81, 100, 127, 128, 129, 200, 255, 256, 257, 383, 384, 400, 1023,
                           1024, 1025):
                seed += 1
                heads, kv_heads = ((16, 4), (16, 1), (8, 8), (24, 4))[seed % 4]
                before = [PROMPT_BEFORE[(seed + i) % len(PROMPT_BEFORE)] for i in range(64 if tokens < 100 else 12)]
                check(f"T={tokens}", Case(before, [tokens] * len(before), heads, kv_heads, dim, io=io, slots=seed % 2 == 0,
                                          capacity=(max(before) + tokens + 700) if seed % 3 else None, gated=seed % 5 != 0,
                                          gap=8 * (seed % 2), transposed=seed % 7 == 0, seed=seed))
        for dim in (8, 16, 40, 72, 80, 96, 136, 160, 192, 200, 248):
            check("dim", Case([61, 0, 130], [333] * 3, 16, 4, dim, io=io, seed=dim))
        for capacity in (1000, 961, 896, 80):
            check(f"past the capacity {capacity}",
                  Case([capacity - 70, 0, 60, 5], [200] * 4, 16, 4, 256, io=io, capacity=capacity))
        check("one", Case([0], [2048], 16, 4, 256, io=io))
        check("chunk after many", Case([30000], [512], 16, 2, 256, io=io))
        check("long", Case([0], [5000], 8, 2, 128, io=io, gated=False))
        check("sharp", Case([500, 20], [300, 300], 16, 2, 256, io=io, sharpness=30.0))
        check("odd gap", Case([40, 3], [400, 400], 16, 4, 64, io=io, gap=2))    # no 16-byte rows of gates
        check_repeats(lib, Case([9, 700, 0], [300] * 3, 16, 4, 256, io=io), f"{io} prompts")
        check_repeats(lib, Case(around, list(PROMPT_LENGTHS), 16, 2, 128, io=io, varlen=True, slots=True), f"{io} packed prompts")
    case = Case([0], [2048], 16, 4, 256)
    auto, case.splits = run(lib, case)[3], 1
    which = "another kernel" if not same(auto, run(lib, case)[3]) else "the same kernel"
    expected = torch.cuda.get_device_capability() != (9, 0) or which == "another kernel"
    report("prompts, choice", expected, f"splits 0 is {which} than splits 1")


def check_cases(lib):
    check = lambda name, case: check_case(lib, name, case)
    seed = 0
    for io in ("bf16", "f16", "f32"):
        for dim in (64, 128, 256):
            for heads, kv_heads in ((2, 2), (4, 2), (16, 2), (16, 4), (16, 1), (12, 4), (6, 1), (3, 3)):
                for tokens in (1, 2, 3, 4, 8, 16):
                    for splits in (0, 1, 4):
                        seed += 1
                        before = [[0, 31, 200, 513], [15, 16, 17, 64], [127, 128, 1, 90]][seed % 3]
                        check(f"T={tokens} before {before} splits {splits}",
                              Case(before, [tokens] * 4, heads, kv_heads, dim, io=io, slots=seed % 2 == 0, splits=splits,
                                   gated=seed % 5 != 0, gap=8 * (seed % 3), seed=seed))
        for dim in (8, 16, 24, 40, 72, 80, 96, 120, 136, 160, 192, 200, 248):
            check("dim", Case([61, 0, 130], [3] * 3, 6, 2, dim, io=io, splits=2, seed=dim))
            check("dim, no rotation", Case([61, 0, 130], [1] * 3, 6, 2, dim, rotary=0, io=io, seed=dim))
            check("dim, all rotated", Case([61, 0, 130], [2] * 3, 6, 2, dim, rotary=dim, io=io, low=False, seed=dim))
        for length in (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 1000, 4096):
            for splits in (0, 3, 64):
                check(f"length {length} splits {splits}",
                      Case([length - 1], [1], 16, 2, 256, io=io, capacity=length, splits=splits, seed=length))
                check(f"length {length} with room, splits {splits}",
                      Case([length - 1, 3], [1, 1], 8, 2, 128, io=io, capacity=5000, splits=splits, seed=length))
        check("varlen", Case([0, 5, 700, 1, 31, 99], [0, 1, 16, 7, 0, 3], 16, 2, 256, io=io, varlen=True, slots=True))
        check("varlen, empty", Case([0, 5], [0, 0], 16, 2, 256, io=io, varlen=True))
        check("odd gap", Case([40, 3], [2, 2], 4, 2, 64, io=io, gap=2))
        check("transposed cache", Case([40, 333], [2, 2], 16, 4, 256, io=io, transposed=True, splits=3))
        check("plain weight", Case([40, 333], [2, 2], 16, 4, 256, io=io, zero_centred=False))
        check("far", Case([200000], [2], 4, 2, 64, rotary=64, io=io))
        check("far, f32 frequencies", Case([200000], [2], 4, 2, 64, rotary=64, io=io, low=False))
        check("sharp", Case([500, 20], [1, 1], 16, 2, 256, io=io, sharpness=3.0 if io == "f32" else 30.0, splits=6))
        check("many sequences", Case([(37 * i) % 400 for i in range(150)], [1] * 150, 16, 2, 256, io=io, slots=True))
        check("long new part", Case([17, 100], [150, 150], 8, 2, 128, io=io))
        check("prompt", Case([0], [700], 16, 2, 256, io=io))
        check("past the capacity", Case([60, 3], [8, 8], 8, 2, 64, io=io, capacity=64))
        check("short bound", Case([2000], [1], 16, 2, 256, io=io, max_len=64))
    check("large", Case([32767] * 2, [1] * 2, 16, 2, 256, seed=3))
    check("odd elements", Case([40, 3], [2, 2], 4, 2, 64, io="f32", gap=2))


def check_graphs(lib):
    for lens, splits in (([1], 0), ([1] * 9, 0), ([4] * 8, 0), ([16], 7), ([1] * 40, 1)):
        check_repeats(lib, Case([100 + 31 * i for i in range(len(lens))], lens, 16, 2, 256, splits=splits),
                      f"{len(lens)}x{lens[0]} splits {splits}")
    check_repeats(lib, Case([9, 700], [3, 3], 16, 4, 256, io="f32"), "f32")
    for io in ("bf16", "f16", "f32"):
        check_growth(lib, io)
        check_growth(lib, io, steps=40, tokens=4)
        check_growth(lib, io, steps=60, overlap=1)


# ---- times ----

LAYOUTS = {"16/2x256 (Qwen3-Next, Qwen3.5-35B-A3B)": (16, 2, 256), "16/4x256 (Qwen3.5-4B)": (16, 4, 256),
           "8/2x256 (Qwen3.5-0.8B)": (8, 2, 256)}
LENGTHS = (512, 2048, 8192, 32768)


class Work(Case):
    """For the times: `length` tokens a sequence, of which the last `tokens` are new, in caches that are full of numbers."""

    def __init__(self, batch, length, heads, kv_heads, dim, tokens=1):
        super().__init__([length - tokens] * batch, [tokens] * batch, heads, kv_heads, dim, capacity=length, low=False)
        for pool in self.pools:
            pool.normal_()
        self.q_out, self.o = self.empty().normal_(), self.empty()

    def torch_call(self, causal=False):
        q = self.q_out.view(len(self.lens), self.lens[0], self.heads, self.dim).transpose(1, 2)
        return lambda: torch.nn.functional.scaled_dot_product_attention(q, *self.pools, is_causal=causal, enable_gqa=True)


def works(batch, length, heads, kv_heads, dim, tokens=1):
    """Enough of them to pass the L2 cache, and the bytes of keys and values that one reads."""
    nbytes = 4 * batch * length * kv_heads * dim
    count = 1 if nbytes > 5e8 else cold_sets(nbytes)
    return [Work(batch, length, heads, kv_heads, dim, tokens) for _ in range(count)], nbytes


def calls(lib, all_works, which, overlap=0, splits=0):
    """A call each; they share one workspace, as the layers of a model do."""
    launches, attentions = [], []
    for work in all_works:
        work.overlap, work.splits = overlap, splits
        attentions.append(work.attention_params(lib, work.q_out, work.o))
        launches.append([(lib.gdn_attention_prepare, work.prepare_params(work.q_out))] * ("prepare" in which)
                        + [(lib.gdn_attention, attentions[-1])] * ("attention" in which))
    workspace(lib.gdn_attention_workspace, *attentions)
    return calls_of(lib, launches)


def torch_us(calls):
    """The time of torch's calls, where torch has such a kernel."""
    try:
        return span_us(calls)
    except RuntimeError:
        return math.nan


def times(lib, args):
    if args.only_time == "prompts":
        return times_prompts(lib)
    rate = heading("bf16, one new token, cold L2. us: attention by CUPTI, with its combination; prepare by CUPTI; both in a "
                   "graph, and overlapped; torch's attention alone by CUPTI")
    for name, (heads, kv_heads, dim) in LAYOUTS.items():
        print(f"\n{name}\n| B | length | floor | attention | GB/s | of copy | prepare | both, graph | overlapped | torch |")
        print("|---|---|---|---|---|---|---|---|---|---|")
        for batch in (1, 4, 16, 64):
            for length in LENGTHS:
                every, nbytes = works(batch, length, heads, kv_heads, dim)
                us = span_us(often(calls(lib, every, ("attention",))))
                prepare = span_us(often(calls(lib, every, ("prepare",))))
                both = [graph_us(often(calls(lib, every, ("prepare", "attention"), overlap))) for overlap in (0, 1)]
                theirs = torch_us(often([w.torch_call() for w in every]))
                print(f"| {batch} | {length} | {nbytes / rate * 1e6:.2f} | {us:.2f} | {nbytes / us / 1e3:.0f} | "
                      f"{nbytes / us / 1e-6 / rate * 100:.0f} % | {prepare:.2f} | {both[0]:.2f} | {both[1]:.2f} | {theirs:.2f} |",
                      flush=True)
                del every
                torch.cuda.empty_cache()
    times_tokens(lib, rate)
    times_splits(lib)


def times_tokens(lib, rate):
    print("\nseveral tokens (verification of drafts), 16/2x256, us of attention and share of the copy rate")
    for batch, length in ((1, 2048), (1, 32768), (16, 8192)):
        row = []
        for tokens in (1, 2, 4, 8, 16):
            every, nbytes = works(batch, length, 16, 2, 256, tokens)
            us = span_us(often(calls(lib, every, ("attention",))))
            row.append(f"T={tokens} {us:.2f} ({nbytes / us / 1e-6 / rate * 100:.0f} %)")
        print(f"  B={batch} length {length}: " + "   ".join(row), flush=True)


def times_prompts(lib):
    """Prompts from position 0: the kernel for few tokens (splits 1), the chooser's, torch's, and gdn_attention_prepare."""
    print(f"\n{torch.cuda.get_device_name()}; bf16, one prompt from position 0; us (CUPTI) and TFLOP/s, four operations a value, "
          "query and key it sees")
    print("| layout | T | splits 1 | TFLOP/s | chosen | TFLOP/s | of splits 1 | torch | TFLOP/s | prepare |\n" + "|---" * 10 + "|")
    for heads, kv_heads, dim in ((16, 4, 256), (16, 2, 256), (32, 8, 128)):
        for tokens in (512, 2048, 8192, 32768):
            every = [Work(1, tokens, heads, kv_heads, dim, tokens) for _ in range(3 if tokens <= 8192 else 1)]
            count = {512: 24, 2048: 24, 8192: 9, 32768: 3}[tokens]
            flops = 4 * dim * heads * (tokens * (tokens + 1) // 2)
            us = [span_us((calls(lib, every, ("attention",), splits=splits) * count)[:count]) for splits in (1, 0)]
            us.append(torch_us(([w.torch_call(causal=True) for w in every] * count)[:count]))
            prepare = span_us((calls(lib, every, ("prepare",)) * count)[:count])
            rates = [flops / x / 1e6 for x in us]
            print(f"| {heads}/{kv_heads}x{dim} | {tokens} | {us[0]:.1f} | {rates[0]:.0f} | {us[1]:.1f} | {rates[1]:.0f} | "
                  f"{us[0] / us[1]:.2f} x | {us[2]:.1f} | {rates[2]:.0f} | {prepare:.1f} |", flush=True)
            del every
            torch.cuda.empty_cache()


def times_splits(lib):
    """What the chooser has to find."""
    print("\nsplits, 16/2x256, us of attention; the first is the chooser's")
    for batch, length in ((1, 512), (1, 2048), (1, 8192), (1, 32768), (4, 2048), (4, 8192), (16, 8192), (64, 2048)):
        every, _ = works(batch, length, 16, 2, 256)
        row = [f"{splits or 'auto'}: {span_us(often(calls(lib, every, ('attention',), splits=splits))):.2f}"
               for splits in (0, 1, 2, 4, 8, 16, 33, 66, 132, 256)]
        print(f"  B={batch} length {length}: " + "   ".join(row), flush=True)


def check(lib, args):
    if not args.prompts:
        check_quick(lib)
    check_prompts(lib, args.quick)
    if not args.quick and not args.prompts:
        check_cases(lib)
        check_graphs(lib)
        check_advance(lib)
        check_arguments(lib)


def main():
    harness.program(__doc__, check, times, models=True, self_test=self_test, options=[
        ("--prompts", dict(action="store_true", help="of the checks those of prompts alone")),
        ("--only-prompts", dict(dest="only_time", action="store_const", const="prompts",
                                help="times of prompts alone, and no checks"))])


if __name__ == "__main__":
    main()
