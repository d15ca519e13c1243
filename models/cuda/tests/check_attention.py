#!/usr/bin/env python3
"""Checks gdn_attention_prepare and gdn_attention, through the C ABI, against softmax attention in float64.

    python3 models/cuda/tests/check_attention.py              # builds the kernels; the exit code is 1 when a case fails
    python3 models/cuda/tests/check_attention.py --lib PATH   # of a library that is there, or is built there
    python3 models/cuda/tests/check_attention.py --quick      # a small set, for compute-sanitizer
    python3 models/cuda/tests/check_attention.py --time       # the checks, then times
    python3 models/cuda/tests/check_attention.py --only-time
    python3 models/cuda/tests/check_attention.py --prompts    # checks of prompts alone
    python3 models/cuda/tests/check_attention.py --only-prompts    # times of prompts alone: both kernels and torch
    python3 models/cuda/tests/check_attention.py --self-test  # of the reference alone, on the CPU

An error is ||x - ref|| / ||ref||. Caches hold NaN wherever no token is, slots that no sequence has are NaN throughout, and
so are outputs before a launch and the gaps of strided tensors; all that must not be written is compared bit by bit.
"""
import ctypes as C
import math
import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), *[os.pardir] * 3, "cuda", "tests"))

import abi
import harness
import torch
from abi import (BAD_ALGO, BAD_DTYPE, BAD_HEAD_DIM, BAD_HEADS, BAD_LENGTH, BAD_STRIDE, BAD_WORKSPACE, CODES, NO_SLOT,
                 NULL_POINTER, OK, AdvanceParams, AttentionParams, AttentionPrepareParams, KvCache, columns, fill,
                 sequences, workspace)
from harness import TYPES, WAYS, call, cu_seqlens, expect, launch, nan, normal, report, same, shuffled, u32
from reference import relative, rms_norm
from timing import calls_of, cold_sets, graph_us, heading, often, span_us

# Rounding of o, 2^-9 / sqrt(3) in bf16 at most; that of the weights before they multiply the values, which is as large
# for a single key and averages out over many; and what q and the cache were rounded to is the reference's input too.
O_BOUND = {"f32": 1e-5, "bf16": 4e-3, "f16": 6e-4}
PREPARE_BOUND = {"f32": 2e-6, "bf16": 2.5e-3, "f16": 3.2e-4}

# ---- the definition, in float64 ----

def prepare_reference(x, weight, inv_freq, positions, eps, zero_centred):
    """x [tokens, heads, dim], positions [tokens]: RMS norm, then rotation of values i and i + pairs."""
    x = rms_norm(x, weight.double() + (1.0 if zero_centred else 0.0), eps)
    pairs = inv_freq.numel()
    angle = positions.double()[:, None, None] * inv_freq.double()
    a, b = x[..., :pairs], x[..., pairs:2 * pairs]
    return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos(), x[..., 2 * pairs:]], -1)


def attention_reference(q, k, v, first, scale, gate=None):
    """q [tokens, heads, dim] at positions first + t, k and v [keys, kv_heads, dim]: every query sees keys up to its own
    position, or all there are."""
    q, k, v = q.double(), k.double(), v.double()
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    parts = []
    step = max(1, (1 << 27) // max(k.shape[0] * k.shape[1], 1))    # scores of so many queries fit
    for part in q.split(step):
        scores = torch.einsum("thd,jhd->htj", part, k) * scale
        seen = torch.arange(k.shape[0], device=q.device)[None] <= first + torch.arange(part.shape[0], device=q.device)[:, None]
        p = torch.softmax(scores.masked_fill(~seen, -math.inf), -1)
        parts.append(torch.einsum("htj,jhd->thd", p, v))
        first += part.shape[0]
    o = torch.cat(parts)
    return o if gate is None else o * torch.sigmoid(gate.double())


# ---- one case ----

class Case:
    """Sequences with `before[n]` tokens in the cache and `lens[n]` new ones, columns of one projection
    [tokens, heads x (q | gate) | k | v]."""

    def __init__(self, before, lens, heads=8, kv_heads=2, dim=128, rotary=None, io="bf16", capacity=None, slots=False,
                 varlen=False, gap=0, gated=True, zero_centred=True, low=True, max_len=0, splits=0, overlap=0,
                 transposed=False, sharpness=1.0, seed=0):
        randn = normal(seed)
        self.before, self.lens, self.heads, self.kv_heads, self.dim, self.io = before, lens, heads, kv_heads, dim, io
        self.rotary = dim // 4 // 2 * 2 if rotary is None else rotary
        self.varlen, self.gated, self.zero_centred, self.max_len, self.splits = varlen, gated, zero_centred, max_len, splits
        self.overlap = overlap
        dt, n = TYPES[io], len(lens)
        assert varlen or len(set(lens)) == 1
        self.total = sum(lens)
        self.capacity = capacity or max(b + t for b, t in zip(before, lens)) + 5
        self.cu = cu_seqlens(lens) if varlen else None

        rows, width = max(self.total, 1), (2 * heads + 2 * kv_heads) * dim
        self.x = nan(rows, width + gap, dtype=io)
        self.x[:, :width] = randn(rows, width)
        qg = self.x[:, :2 * heads * dim].unflatten(1, (heads, 2 * dim))
        self.q, self.gate = qg[..., :dim], qg[..., dim:]
        self.k = self.x[:, 2 * heads * dim:][:, :kv_heads * dim].unflatten(1, (kv_heads, dim))
        self.v = self.x[:, (2 * heads + kv_heads) * dim:][:, :kv_heads * dim].unflatten(1, (kv_heads, dim))
        centre = 0.0 if zero_centred else 1.0
        self.q_weight, self.k_weight = centre + 0.2 * randn(dim), centre + 0.2 * randn(dim)
        if sharpness != 1.0:
            self.q_weight = (1 + self.q_weight) * sharpness - 1 if zero_centred else self.q_weight * sharpness
        exact = 1e7 ** (-torch.arange(0, self.rotary, 2, dtype=torch.float64) / max(self.rotary, 1))
        self.high = exact.float().to(harness.device)
        self.low = (exact - exact.float().double()).float().to(harness.device) if low else None
        self.frequencies = (self.high.double() + self.low.double()) if low else self.high.double()

        self.slots, self.num_slots = list(range(n)), n
        if slots:
            self.num_slots = 2 * n + 1
            self.slots = shuffled(self.num_slots, seed)[:n]
            if n > 2:
                self.slots[n // 2] = NO_SLOT
                self.slots[-1] = self.num_slots + 3
        self.slot_map = u32(self.slots) if slots else None
        self.live = [i for i in range(n) if self.slots[i] < self.num_slots]
        shape = (self.num_slots, self.capacity, kv_heads, dim) if transposed else (self.num_slots, kv_heads, self.capacity, dim)
        view = (lambda c: c.transpose(1, 2)) if transposed else (lambda c: c)
        self.pools = [nan(*shape, dtype=io) for _ in range(2)]
        self.caches = [view(c) for c in self.pools]
        for i in self.live:
            for cache in self.caches:
                cache[self.slots[i], :, :before[i]] = randn(kv_heads, before[i], dim).to(dt)
        # 8 is where a padding row may point to.
        self.positions = u32([b if i in self.live else 8 for i, b in enumerate(before)])

    def rows(self):
        """(sequence, slice of its rows)"""
        return [(i, slice(sum(self.lens[:i]), sum(self.lens[:i + 1]))) for i in range(len(self.lens))]

    def view(self, x):
        """Of a tensor [rows, head, dim]."""
        return abi.heads(x, 0 if self.varlen else self.lens[0])

    def sequences(self):
        return sequences(self.lens, self.cu)

    def cache(self, caches=None):
        k, v = caches or self.caches
        return fill(KvCache, k=k, v=v, slots=abi.slots(self.slot_map, self.num_slots, k.stride(0)), head_stride=k.stride(1),
                    token_stride=k.stride(2), capacity=self.capacity)

    def common(self, caches):
        return dict(positions=self.positions, cache=self.cache(caches), seqs=self.sequences(), num_heads=self.heads,
                    num_kv_heads=self.kv_heads, head_dim=self.dim, io_dtype=CODES[self.io], overlap=self.overlap)

    def prepare_params(self, q_out, caches=None):
        view, rotated = self.view, self.rotary > 0
        return fill(AttentionPrepareParams, q=view(self.q), k=view(self.k), v=view(self.v), q_out=view(q_out),
                    q_weight=self.q_weight, k_weight=self.k_weight, inv_freq=self.high if rotated else None,
                    inv_freq_low=self.low if rotated else None, rotary_dim=self.rotary, zero_centred=int(self.zero_centred),
                    eps=1e-6, **self.common(caches))

    def attention_params(self, lib, q, o, caches=None):
        p = fill(AttentionParams, q=self.view(q), o=self.view(o), max_len=self.max_len, splits=self.splits,
                 scale=self.dim ** -0.5, **self.common(caches))
        if self.gated:
            p.gate = self.view(self.gate)
        workspace(lib.gdn_attention_workspace, p, device=harness.device)
        return p

    def advance_params(self):
        return fill(AdvanceParams, positions=self.positions, slots=abi.slots(self.slot_map, self.num_slots, 0),
                    seqs=self.sequences(), overlap=self.overlap)

    def empty(self):
        return nan(max(self.total, 1), self.heads, self.dim, dtype=self.io)


def run(lib, case, graph=False):
    """Both launches on copies of the caches: (status, q, caches, o, guard untouched)."""
    pools = [c.clone() for c in case.pools]
    caches = [p.as_strided(c.shape, c.stride()) for p, c in zip(pools, case.caches)]
    q, o = case.empty(), case.empty()
    first, second = case.prepare_params(q, caches), case.attention_params(lib, q, o, caches)
    status = launch(lambda: call(lib.gdn_attention_prepare, first) or call(lib.gdn_attention, second), graph)
    return status, q, caches, o, bool((second.room[second.workspace_bytes:] == 0xFF).all())


def check_case(lib, name, case, quiet=True):
    name = f"{case.io} {case.heads}/{case.kv_heads}x{case.dim} {name}"
    status, q, caches, o, guard = run(lib, case)
    if status != OK:
        return report(name, False, lib.gdn_status_string(status).decode())
    wrong = [] if guard else ["wrote past its workspace"]
    want = [c.clone() for c in case.caches]
    e_q = e_k = e_o = 0.0
    squares = [0.0, 0.0]
    for i, rows in case.rows():
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
        squares[0] += (o[rows].double() - ref).pow(2).sum().item()
        squares[1] += ref.pow(2).sum().item()
    e_o = math.sqrt(squares[0] / squares[1]) if squares[1] else math.sqrt(squares[0])
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
    case = Case(before, [tokens] * 3, 16, 2, 256, io=io, capacity=130 + steps * tokens, slots=True, seed=steps, overlap=overlap)
    case.positions = u32([b if i in case.live else 0 for i, b in enumerate(before)])
    eager = [c.clone() for c in case.pools], case.positions.clone()
    q, o = case.empty(), case.empty()
    first, second, third = case.prepare_params(q), case.attention_params(lib, q, o), case.advance_params()
    torch.cuda.synchronize()
    g = torch.cuda.CUDAGraph()
    with torch.cuda.graph(g):
        status = call(lib.gdn_attention_prepare, first) or call(lib.gdn_attention, second) or call(lib.gdn_advance, third)
    differ, worst = 0, 0.0
    pools, positions = eager
    graph_pools, graph_positions = case.pools, case.positions
    for step in range(steps):
        case.x.copy_(normal(step)(*case.x.shape))
        g.replay()
        torch.cuda.synchronize()
        got = o.clone()
        case.pools, case.positions = pools, positions
        case.caches = pools
        again, fresh = case.empty(), case.empty()
        p, a = case.prepare_params(again), case.attention_params(lib, again, fresh)
        status = status or call(lib.gdn_attention_prepare, p) or call(lib.gdn_attention, a)
        torch.cuda.synchronize()
        differ += not same(fresh, got)
        if step % 29 == 0 or step == steps - 1:
            for i, rows in case.rows():
                if i in case.live:
                    keys = before[i] + (step + 1) * tokens
                    k, v = (c[case.slots[i], :, :keys].transpose(0, 1) for c in pools)
                    ref = attention_reference(again[rows], k, v, keys - tokens, case.dim ** -0.5, case.gate[rows])
                    worst = max(worst, relative(got[rows], ref))
        for i in case.live:
            positions[i] += tokens
        case.pools, case.positions, case.caches = graph_pools, graph_positions, graph_pools
    ok = status == OK and differ == 0 and worst <= O_BOUND[io] and torch.equal(graph_positions, positions)
    report(f"{io} growth by {tokens} over {steps} replays, overlap {overlap}", ok,
           f"{differ} replays differ, o {worst:.1e}, status {status}")


def check_advance(lib):
    lens = [3, 0, 16, 1, 1]
    for varlen, slots in ((True, False), (True, True), (False, True)):
        case = Case([5, 6, 7, 8, 9], lens if varlen else [2] * 5, 4, 2, 64, varlen=varlen, slots=slots)
        want = [p + t if i in case.live else p for i, (p, t) in enumerate(zip(case.positions.tolist(), case.lens))]
        status = launch(lambda: call(lib.gdn_advance, case.advance_params()))
        report(f"advance, packed {varlen}, slots {slots}", status == OK and case.positions.tolist() == want,
               f"{case.positions.tolist()}, expected {want}, status {status}")
    expect("advance", NULL_POINTER, lib.gdn_advance, case.advance_params(), positions=None)


def check_arguments(lib):
    case = Case([5, 9], [2, 2], 4, 2, 64)
    caches, q, o = case.caches, case.empty(), case.empty()

    def refuse(which, want, **changes):
        p = case.prepare_params(q) if which == "prepare" else case.attention_params(lib, q, o)
        expect(which, want, lib.gdn_attention_prepare if which == "prepare" else lib.gdn_attention, p, **changes)

    odd = caches[0].data_ptr() + 2
    for which in ("prepare", "attention"):
        refuse(which, BAD_DTYPE, io_dtype=9)
        refuse(which, BAD_HEADS, num_kv_heads=3)
        refuse(which, BAD_HEADS, num_heads=0)
        refuse(which, BAD_HEAD_DIM, head_dim=60)
        refuse(which, BAD_HEAD_DIM, head_dim=264)
        refuse(which, BAD_LENGTH, seqs__num_seqs=-1)
        refuse(which, BAD_LENGTH, cache__capacity=-1)
        refuse(which, BAD_STRIDE, q__token_stride=-1)
        refuse(which, BAD_STRIDE, cache__head_stride=-8)
        refuse(which, BAD_ALGO, cache__k=odd)
        refuse(which, BAD_ALGO, cache__token_stride=66)
        refuse(which, NULL_POINTER, positions=None)
        refuse(which, NULL_POINTER, cache__v=None)
        refuse(which, NULL_POINTER, q__ptr=None)
        refuse(which, OK, seqs__num_seqs=0, q__ptr=None)
    refuse("prepare", BAD_HEAD_DIM, rotary_dim=66)
    refuse("prepare", BAD_HEAD_DIM, rotary_dim=15)
    refuse("prepare", NULL_POINTER, inv_freq=None)
    refuse("prepare", NULL_POINTER, k_weight=None)
    refuse("attention", BAD_ALGO, q__ptr=q.data_ptr() + 2)
    refuse("attention", BAD_LENGTH, splits=-1)
    refuse("attention", BAD_LENGTH, splits=100000)
    refuse("attention", BAD_LENGTH, max_len=-1)
    case.splits = 3
    refuse("attention", BAD_WORKSPACE, workspace=None)
    refuse("attention", BAD_WORKSPACE, workspace_bytes=8)
    size = C.c_int64(-1)
    report("workspace of nothing", lib.gdn_attention_workspace(None, C.byref(size)) == NULL_POINTER, "", quiet=True)
    torch.cuda.synchronize()


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


def check_cases(lib, every=1):
    """All of them, or of the products of head counts, tokens and splits one in `every`."""
    check = lambda name, case: check_case(lib, name, case)
    seed = 0
    for io in ("bf16", "f16", "f32"):
        for dim in (64, 128, 256):
            for heads, kv_heads in ((2, 2), (4, 2), (16, 2), (16, 4), (16, 1), (12, 4), (6, 1), (3, 3)):
                for tokens in (1, 2, 3, 4, 8, 16):
                    for splits in (0, 1, 4):
                        seed += 1
                        if seed % every:
                            continue
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


class Work:
    """One layer's cache of `length` tokens a sequence, of which the last `tokens` are new, and a projection's rows."""

    def __init__(self, batch, length, heads, kv_heads, dim, tokens=1):
        self.shape = batch, length, heads, kv_heads, dim, tokens
        bf16 = dict(device="cuda", dtype=torch.bfloat16)
        self.x = torch.randn(batch * tokens, (2 * heads + 2 * kv_heads) * dim, **bf16)
        self.k = torch.empty(batch, kv_heads, length, dim, **bf16).normal_()
        self.v = torch.empty(batch, kv_heads, length, dim, **bf16).normal_()
        self.positions = torch.full((batch,), length - tokens, dtype=torch.int32, device="cuda")
        self.q, self.o = (torch.randn(batch * tokens, heads, dim, **bf16) for _ in range(2))
        self.weight = torch.zeros(dim, device="cuda")
        self.inv_freq = torch.full((dim // 8,), 0.01, device="cuda")

    def params(self, overlap=0, splits=0):
        batch, length, heads, kv_heads, dim, tokens = self.shape
        at = lambda first, head: columns(self.x, first, head, tokens)
        dense = lambda x: columns(x.flatten(1), 0, dim, tokens)
        cache = fill(KvCache, k=self.k, v=self.v, slots=abi.slots(None, batch, self.k.stride(0)), head_stride=self.k.stride(1),
                     token_stride=dim, capacity=length)
        common = dict(positions=self.positions, cache=cache, seqs=sequences([tokens] * batch), num_heads=heads,
                      num_kv_heads=kv_heads, head_dim=dim, io_dtype=CODES["bf16"], overlap=overlap)
        prepare = fill(AttentionPrepareParams, q=at(0, 2 * dim), k=at(2 * heads * dim, dim),
                       v=at((2 * heads + kv_heads) * dim, dim), q_out=dense(self.q), q_weight=self.weight,
                       k_weight=self.weight, inv_freq=self.inv_freq, rotary_dim=dim // 4, zero_centred=1, eps=1e-6, **common)
        attention = fill(AttentionParams, q=dense(self.q), gate=at(dim, 2 * dim), o=dense(self.o), splits=splits,
                         scale=dim ** -0.5, **common)
        return prepare, attention

    def torch_call(self, causal=False):
        batch, _, heads, _, dim, tokens = self.shape
        q = self.q.view(batch, tokens, heads, dim).transpose(1, 2)
        return lambda: torch.nn.functional.scaled_dot_product_attention(q, self.k, self.v, is_causal=causal, enable_gqa=True)


def works(batch, length, heads, kv_heads, dim, tokens=1):
    """Enough of them to pass the L2 cache, and the bytes of keys and values that one reads."""
    nbytes = 4 * batch * length * kv_heads * dim
    count = 1 if nbytes > 5e8 else cold_sets(nbytes)
    return [Work(batch, length, heads, kv_heads, dim, tokens) for _ in range(count)], nbytes


def calls(lib, all_works, which, overlap=0, splits=0):
    """A call each; they share one workspace, as the layers of a model do."""
    params = [w.params(overlap, splits) for w in all_works]
    workspace(lib.gdn_attention_workspace, *(attention for _, attention in params))
    return calls_of(lib, [[(lib.gdn_attention_prepare, prepare)] * ("prepare" in which)
                          + [(lib.gdn_attention, attention)] * ("attention" in which) for prepare, attention in params])


def times(lib):
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
                try:
                    theirs = f"{span_us(often([w.torch_call() for w in every])):.2f}"
                except RuntimeError:
                    theirs = "-"
                print(f"| {batch} | {length} | {nbytes / rate * 1e6:.2f} | {us:.2f} | {nbytes / us / 1e3:.0f} | "
                      f"{nbytes / us / 1e-6 / rate * 100:.0f} % | {prepare:.2f} | {both[0]:.2f} | {both[1]:.2f} | {theirs} |",
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
    """Prompts from position 0: the kernel for few tokens (splits 1), the chooser's, and torch's."""
    print(f"\n{torch.cuda.get_device_name()}; bf16, one prompt from position 0; us (CUPTI) and TFLOP/s, four operations a value, "
          "query and key it sees")
    print("| layout | T | splits 1 | TFLOP/s | chosen | TFLOP/s | of splits 1 | torch | TFLOP/s |\n|---|---|---|---|---|---|---|---|---|")
    for heads, kv_heads, dim in ((16, 4, 256), (16, 2, 256), (32, 8, 128)):
        for tokens in (512, 2048, 8192, 32768):
            every = [Work(1, tokens, heads, kv_heads, dim, tokens) for _ in range(3 if tokens <= 8192 else 1)]
            count = {512: 24, 2048: 24, 8192: 9, 32768: 3}[tokens]
            flops = 4 * dim * heads * (tokens * (tokens + 1) // 2)
            us = [span_us((calls(lib, every, ("attention",), splits=splits) * count)[:count]) for splits in (1, 0)]
            try:
                us.append(span_us(([w.torch_call(causal=True) for w in every] * count)[:count]))
            except RuntimeError:
                us.append(float("nan"))
            rates = [flops / x / 1e6 for x in us]
            print(f"| {heads}/{kv_heads}x{dim} | {tokens} | {us[0]:.1f} | {rates[0]:.0f} | {us[1]:.1f} | {rates[1]:.0f} | "
                  f"{us[0] / us[1]:.2f} x | {us[2]:.1f} | {rates[2]:.0f} |", flush=True)
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


def self_test():
    """The reference against attention written out, and torch's own; runs anywhere."""
    harness.device = "cpu"
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 4, 8).double(), torch.randn(10, 2, 8).double(), torch.randn(10, 2, 8).double()
    o = attention_reference(q, k, v, 7, 0.3)
    for t in range(3):
        for h in range(4):
            s = torch.tensor([0.3 * (q[t, h] * k[j, h // 2]).sum() for j in range(8 + t)]).exp()
            want = sum(s[j] / s.sum() * v[j, h // 2] for j in range(8 + t))
            assert (o[t, h] - want).abs().max() < 1e-12
    full = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(0, 1), k.repeat_interleave(2, 1).transpose(0, 1), v.repeat_interleave(2, 1).transpose(0, 1), scale=0.3)
    assert (attention_reference(q, k, v, 100, 0.3).transpose(0, 1) - full).abs().max() < 1e-12
    x = torch.randn(5, 2, 16)
    at, freq = torch.arange(5) + 3, torch.tensor([1.0, 0.01])
    y = prepare_reference(x, torch.zeros(16), freq, at, 0.0, True)
    n = x.double() / x.double().pow(2).mean(-1, keepdim=True).sqrt()
    assert (y[..., 4:] - n[..., 4:]).abs().max() < 1e-12
    turned = torch.complex(n[..., :2], n[..., 2:4]) * torch.exp(1j * at[:, None, None].double() * freq.double())
    assert (torch.complex(y[..., :2], y[..., 2:4]) - turned).abs().max() < 1e-12
    # What a launch would get: rows, strides, slots and caches of a case.
    for kw in ({}, {"slots": True}, {"slots": True, "varlen": True}, {"gap": 8, "transposed": True}):
        c = Case([5, 0, 9], [2, 2, 2], 4, 2, 32, **kw)
        assert c.total == 6 and torch.equal(c.x[:, :c.dim], c.q[:, 0]) and torch.equal(c.x[:, c.dim:2 * c.dim], c.gate[:, 0])
        assert c.k.stride(0) == c.x.stride(0) and c.caches[0].shape == (c.num_slots, 2, c.capacity, 32)
        p, i = c.cache(), c.live[0]
        assert p.head_stride == c.caches[0].stride(1) and c.caches[0][c.slots[i], :, :5].isfinite().all()
        assert c.caches[0][c.slots[i], :, 5:].isnan().all()
        params = c.prepare_params(c.empty())
        assert params.seqs.num_seqs == 3 and params.rotary_dim == 8
    print("the reference holds")


def main():
    parser = harness.arguments(__doc__)
    parser.add_argument("--prompts", action="store_true", help="of the checks those of prompts alone")
    parser.add_argument("--only-prompts", action="store_true", help="times of prompts alone, and no checks")
    parser.add_argument("--self-test", action="store_true", help="check the reference, on the CPU")
    args = parser.parse_args()
    if args.self_test:
        return self_test()

    def check(lib):
        if not args.prompts:
            check_quick(lib)
        check_prompts(lib, args.quick)
        if not args.quick and not args.prompts:
            check_cases(lib)
            check_graphs(lib)
            check_advance(lib)
            check_arguments(lib)
    args.only_time = args.only_time or args.only_prompts
    harness.run(args, check, times_prompts if args.only_prompts else times, models=True)


if __name__ == "__main__":
    main()
