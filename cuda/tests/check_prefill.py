#!/usr/bin/env python3
"""The chunk forms, GDN_CHUNKED_SM80 and _SM90, against the token recurrence in float64.

    python3 cuda/tests/check_prefill.py                # builds the kernels; the exit code is 1 when a case is over its bound
    python3 cuda/tests/check_prefill.py --lib PATH     # of a library that is there, or is built there
    python3 cuda/tests/check_prefill.py --quick        # a small set, for compute-sanitizer
    python3 cuda/tests/check_prefill.py --random 5000  # that many random batches instead of 1000; --seed N starts at another one
    python3 cuda/tests/check_prefill.py --beside 60    # the same launches for a minute instead of 10 s while other processes use the card
    python3 cuda/tests/check_prefill.py --time         # the checks, then times beside the peers' (--only-time: those alone)
    python3 cuda/tests/check_prefill.py --only-time --cells 16/32:1x8192,4x8192 --algo chunked_sm90 --segments 0,1,4

An error is relative RMS, ||x - ref|| / ||ref||, of a whole case and of its worst (sequence, head); for o, ||ref|| is at
least what a query of no particular direction would have read, since one that is orthogonal to the state reads rounding
alone. A case over the fixed bound may be hard for any kernel with operands of 16 bits: what they cost it is worked out then
(reference.rule_in_16_bits), bounds it, and stands in its line, after "hard". Whatever a launch must not read holds NaN,
whatever it writes held NaN before, and all else is compared bit by bit.
"""
import ctypes as C
import math
import random
import subprocess
import sys
import time
from functools import partial
from types import SimpleNamespace

import harness
import reference
import torch
from abi import (ALGO_NAMES, AUTO, BAD_ALGO, BAD_CHECKPOINTS, BAD_LENGTH, BAD_WORKSPACE, CHUNK, CHUNKED_SM80, CHUNKED_SM90,
                 CODES, DECODE_128, NO_SLOT, NULL_POINTER, OK, RECURRENT, RECURRENT_128, RuleParams, columns, ptr, rule_params,
                 sequences, slots, workspace)
from harness import (CHUNKED_BOUND, O_BOUND, STATE_BOUND, TYPES, bits, call, cu_seqlens, expect, failures, launch, nan, report,
                     rule_calls, same, shuffled, u32)
from reference import relative
from timing import cold_sets, graph_us, heading, span_us

# ---- a case: its inputs and reference, a run of it by a kernel, and what is wrong with the result ----

WORST = 4           # a (sequence, head) may have so many times the bound of its case
MARGIN, BETWEEN = 3, 2    # rows of NaN around the tokens, and without cu_seqlens between the sequences
ALGOS = [CHUNKED_SM80, CHUNKED_SM90]


def scattered(buf, written):
    """What of buf is not `written`, a view of it or several."""
    left = torch.ones(buf.numel(), dtype=torch.bool, device=buf.device)
    for x in written:
        left.as_strided(x.shape, x.stride(), x.storage_offset()).fill_(False)
    return bits(buf.view(-1))[left]


class Case:
    """One projection [rows, q | k | v | gap] and [rows, b | a | gap], a pool of states, and the reference."""

    def __init__(self, lens, hk=2, hv=4, k=128, v=128, io="bf16", gate=None, state="f32", varlen=None, slots="identity",
                 keys="random", decay="normal", beta="random", beta_scale=1.0, l2norm=True, qk_size=1.0, v_size=1.0,
                 odd_o=False, slack=0, gap=2, seed=0):
        gen = torch.Generator(device="cuda").manual_seed(seed)
        self.randn = lambda *s: torch.randn(*s, generator=gen, device="cuda")
        self.rand = lambda *s: torch.rand(*s, generator=gen, device="cuda")
        self.lens, self.hk, self.hv, self.k, self.v = lens, hk, hv, k, v
        self.io, self.gate, self.state, self.l2norm, self.beta_scale = io, gate or io, state, l2norm, beta_scale
        self.varlen = len(set(lens)) > 1 if varlen is None else varlen
        self.cu = cu_seqlens(lens) if self.varlen else None
        self.slack, self.odd_o, self.seed = slack, odd_o, seed
        self.place_states(slots, gap)

        gap = 0 if self.varlen else BETWEEN
        self.first = [MARGIN + sum(lens[:i]) + gap * i for i in range(len(lens))]
        self.rows = sum(lens) + gap * len(lens) + 2 * MARGIN + slack    # total_tokens counts rows that are there
        self.live = [i for i in range(len(lens)) if i not in self.padding]
        self.tokens = torch.tensor([t for i in self.live for t in range(self.first[i], self.first[i] + lens[i])],
                                   dtype=torch.long, device="cuda")
        self.draw_inputs(keys, decay, beta, qk_size, v_size)
        self.referenced = self.emulated = None

    def place_states(self, slots, gap):
        """identity: in place, no slots; apart: no slots, out of place; permuted: in place; shared: the same with a sequence
        of padding; moved: other slots of another pool, with padding by either slot number."""
        n, size = len(self.lens), self.hv * self.v * self.k
        self.in_place, self.padding = slots in ("identity", "permuted", "shared"), []
        self.in_slots = self.out_slots = list(range(n))
        self.num_slots, self.slot_tensors = n, (None, None)
        if slots in ("permuted", "shared", "moved"):
            self.num_slots = 2 * n + 1
            perm = shuffled(self.num_slots, self.seed)
            self.in_slots, self.out_slots = perm[:n], perm[:n] if self.in_place else perm[n:2 * n]
            if slots != "permuted" and n > 1:
                self.padding = [n // 2]
                self.in_slots[n // 2] = NO_SLOT
                if self.in_place:
                    self.out_slots[n // 2] = NO_SLOT
                if not self.in_place and n > 3:
                    self.padding.append(0)
                    self.out_slots[0] = self.num_slots
            self.slot_tensors = u32(self.in_slots), u32(self.out_slots)
        self.shape = self.hv, self.v, self.k
        # The default gap is what the header asks of the alignment of states and no more.
        gap = gap if self.num_slots > n else 0
        self.pool = nan(self.num_slots, size + gap, dtype=self.state)
        for i in range(n):
            if i not in self.padding:
                self.pool[self.in_slots[i], :size] = 0.3 * self.randn(size)

    def draw_inputs(self, keys, decay, beta, qk_size, v_size):
        hk, hv, n, randn, rand = self.hk, self.hv, len(self.tokens), self.randn, self.rand
        q, k, v = randn(n, hk, self.k), randn(n, hk, self.k), randn(n, hv, self.v) * v_size
        token = torch.arange(n, device="cuda")
        if keys == "repeated" and n:
            k[:] = k[0]
        elif keys == "alternating" and n > 1:
            k[:] = k[token % 2]
        elif keys == "parallel" and n:
            k = k[:1] + 1e-2 * k
        elif keys == "zeros":
            q[token % 3 == 0], k[token % 5 < 2] = 0, 0
        q, k = q * qk_size, k * qk_size
        if not self.l2norm:
            # Short keys, or the recurrence itself would grow without bound.
            q, k = (x / x.norm(dim=-1, keepdim=True).clamp_min(1e-6) * (0.3 + 0.7 * rand(n, hk, 1)) for x in (q, k))
        b, a = randn(n, hv), randn(n, hv)
        if beta == "one":
            b.fill_(20.0)
        self.a_log, self.dt_bias = (rand(hv) * 15 + 1).log(), randn(hv) - 4
        if decay == "none":
            self.a_log.fill_(-100.0)
        elif decay != "normal":
            self.a_log.fill_(0.0)
            self.dt_bias.fill_(0.0)
            strong = {"strong": 1.0, "mixed": 0.15, "uniform": 0.0}[decay]
            a = torch.where(rand(n, hv) < strong, 30.0, -60.0 if decay == "mixed" else 40 * rand(n, hv) - 10)
        width = 2 * hk * self.k + hv * self.v
        self.x = nan(self.rows, width + 8, dtype=self.io)
        self.ba = nan(self.rows, 2 * hv + 3, dtype=self.gate)
        self.x[self.tokens, :width] = torch.cat([q.flatten(1), k.flatten(1), v.flatten(1)], 1).to(self.x.dtype)
        self.ba[self.tokens, :2 * hv] = torch.cat([b, a], 1).to(self.ba.dtype)

    def reference(self):
        if not self.referenced:
            self.referenced = self.walk(reference.rule, typical=True)
        return self.referenced

    def walk(self, rule, typical=False):
        """Of the live sequences: o and its typical length [N, T, HV, ..], the states after every CHUNK tokens, the last."""
        n, t_max = len(self.live), max((self.lens[i] for i in self.live), default=0)
        lens = torch.tensor([self.lens[i] for i in self.live], device="cuda")
        index = torch.tensor([[self.first[i] + min(t, max(self.lens[i] - 1, 0)) for t in range(t_max)] for i in self.live],
                             dtype=torch.long, device="cuda").view(n, t_max)
        # Past the end of a sequence stands whatever there is, but no NaN: it is multiplied by nothing.
        x, ba = (y[index].double().nan_to_num(0.0) for y in (self.x, self.ba))
        keys, hk, hv = self.hk * self.k, self.hk, self.hv
        inputs = (x[..., :keys].unflatten(-1, (hk, self.k)), x[..., keys:2 * keys].unflatten(-1, (hk, self.k)),
                  x[..., 2 * keys:2 * keys + hv * self.v].unflatten(-1, (hv, self.v)), ba[..., hv:2 * hv], ba[..., :hv])
        size = math.prod(self.shape)
        state = self.pool[[self.in_slots[i] for i in self.live], :size].view(n, *self.shape).double()
        o = torch.zeros(n, t_max, hv, self.v, device="cuda", dtype=torch.float64)
        length, states = torch.zeros(n, t_max, hv, device="cuda", dtype=torch.float64), []
        for t in range(0, t_max, CHUNK):
            part = slice(t, t + CHUNK)
            o[:, part], state = rule(*(y[:, part] for y in inputs), self.a_log.double(), self.dt_bias.double(), state,
                                     lens - t, self.l2norm, 1e-6, self.k ** -0.5, self.beta_scale,
                                     *([length[:, part]] if typical else []))
            states.append(state)
        within = torch.arange(t_max, device="cuda") < lens[:, None]
        return SimpleNamespace(o=o, typical=length, states=states, final=state, index=index, within=within)

    def ends(self, states, checkpoint):
        """Those of the states after every CHUNK tokens that are checkpoints."""
        return [states[(j + 1) * checkpoint // CHUNK - 1][at] for at, i in enumerate(self.live)
                for j in range(self.lens[i] // checkpoint if checkpoint else 0)]

    def errors(self, o, state, checkpoints, checkpoint):
        """{"o", "state", "checkpoints": (error, that of the worst head)}."""
        ref = self.reference()
        square = lambda x: x.pow(2).sum((1, 3))
        norm = torch.maximum(square(ref.o), ref.typical.pow(2).sum(1))
        errors = {"o": relative_root(square(torch.where(ref.within[..., None, None], o - ref.o, 0.0)), norm),
                  "state": relative_states(state, ref.final)}
        if checkpoints:
            want = self.ends(ref.states, checkpoint)
            errors["checkpoints"] = relative_states(*(torch.stack(x).view(-1, *self.shape) for x in (checkpoints, want)))
        return errors

    def costs(self, checkpoint):
        """errors() of what has operands of 16 bits and is exact otherwise."""
        if not self.emulated:
            self.emulated = self.walk(partial(reference.rule_in_16_bits, TYPES[self.io]))
        w = self.emulated
        return self.errors(w.o, w.final, self.ends(w.states, checkpoint), checkpoint)

    def buffers(self, checkpoint=0):
        """What launches write, and a copy of it from before."""
        shift, gap = (8, 24) if self.odd_o else (0, 8)
        width = self.hv * self.v
        b = SimpleNamespace(o_buf=nan(shift + self.rows * (width + gap), dtype=self.io), checkpoints=None)
        b.o = b.o_buf[shift:].view(self.rows, width + gap)[:, :width]
        b.state_in = self.pool.clone()
        b.state_out = b.state_in if self.in_place else torch.full_like(self.pool, math.nan)
        if checkpoint:      # two rows more than there can be
            b.checkpoints = nan((sum(self.lens) // checkpoint + 2) * math.prod(self.shape), dtype=self.state)
        b.before = [x.clone() if x is not None else None for x in (b.o_buf, b.state_out, b.checkpoints)]
        return b

    def params(self, b, algo, segments=0, checkpoint=0, window=None):
        """`window`: of every sequence the tokens from .. to alone."""
        start, stop = window or (0, max(self.lens))
        lens = [stop - start] * len(self.lens) if window else self.lens
        seqs = sequences(lens, self.cu)
        seqs.max_tokens_per_seq += self.slack
        seqs.total_tokens += self.slack
        per_seq = 0 if self.varlen else max(self.lens) + BETWEEN
        view = lambda x, first, head: columns(x[MARGIN + start:], first, head, per_seq)
        where = [slots(numbers, self.num_slots, self.pool.stride(0)) for numbers in self.slot_tensors]
        keys = self.hk * self.k
        return rule_params(
            q=view(self.x, 0, self.k), k=view(self.x, keys, self.k), v=view(self.x, 2 * keys, self.v),
            a=view(self.ba, self.hv, 1), b=view(self.ba, 0, 1), a_log=self.a_log, dt_bias=self.dt_bias,
            o=view(b.o, 0, self.v), state_in=b.state_in, state_out=b.state_out, checkpoints=b.checkpoints,
            checkpoint_tokens=checkpoint, in_slots=where[0], out_slots=where[1],
            seqs=seqs, num_k_heads=self.hk, num_v_heads=self.hv, head_k=self.k, head_v=self.v, io_dtype=CODES[self.io],
            gate_dtype=CODES[self.gate], state_dtype=CODES[self.state], l2norm=int(self.l2norm), algo=algo,
            segments=segments, beta_scale=self.beta_scale)

    def launch(self, lib, b, algo, segments=0, checkpoint=0, window=None, graph=False):
        """The status, once the launch is done; b.overrun tells whether it wrote past its workspace."""
        p = self.params(b, algo, segments, checkpoint, window)
        room = workspace(lib.gdn_rule_workspace, p)
        status = launch(lambda: call(lib.gdn_rule, p), graph)
        b.overrun = not bool((room[p.workspace_bytes:] == 0xFF).all())
        return status

    def judge(self, b, checkpoint=0):
        """(errors, [what else is wrong])."""
        size, wrong, slots = math.prod(self.shape), [], [self.out_slots[i] for i in self.live]
        written = {"o": [b.o[self.first[i]:self.first[i] + n] for i, n in enumerate(self.lens)],
                   "state": [b.state_out[s, :size] for s in slots], "checkpoints": []}
        if checkpoint:
            rows = [sum(self.lens[:i]) // checkpoint + j for i in self.live for j in range(self.lens[i] // checkpoint)]
            written["checkpoints"] = [b.checkpoints[row * size:(row + 1) * size] for row in rows]
        o = b.o[self.reference().index].unflatten(-1, (self.hv, self.v)).double()
        errors = self.errors(o, b.state_out[slots, :size].view(-1, *self.shape), written["checkpoints"], checkpoint)
        if any((written["o"][i] != 0).any() for i in self.padding):     # true for NaN
            wrong.append("padding not zero")
        for (name, views), buf, before in zip(written.items(), (b.o_buf, b.state_out, b.checkpoints), b.before):
            if buf is not None and not torch.equal(scattered(buf, views), scattered(before, views)):
                wrong.append(f"wrote outside: {name}")
        if not self.in_place and not torch.equal(bits(b.state_in), bits(self.pool)):
            wrong.append("wrote its input")
        if b.overrun:
            wrong.append("wrote past its workspace")
        return errors, wrong

    def run(self, lib, algo, segments=0, checkpoint=0):
        b = self.buffers(checkpoint)
        status = self.launch(lib, b, algo, segments, checkpoint)
        if status != OK:
            return {}, [lib.gdn_status_string(status).decode()]
        return self.judge(b, checkpoint)


def relative_root(squares, norms):
    """sqrt(sum / sum) of squared errors [N, H], and the largest of one of them; an error without a norm is absolute."""
    ratio = lambda e, n: torch.where(n > 0, e / n.clamp_min(1e-300), e).sqrt()
    if squares.numel() == 0:
        return 0.0, 0.0
    return ratio(squares.sum(), norms.sum()).item(), ratio(squares, norms).max().item()


def relative_states(x, ref):
    return relative_root((x.double() - ref).pow(2).sum((2, 3)), ref.pow(2).sum((2, 3)))


def bounds_of(algo, case):
    if algo in ALGOS:
        return {name: CHUNKED_BOUND for name in ("o", "state", "checkpoints")}
    return {"o": O_BOUND[case.io], "state": STATE_BOUND, "checkpoints": STATE_BOUND}


worst_seen = {}


def fine(algo, case, errors, wrong, checkpoint=0):
    """Whether all is within bounds, and a line about it; keeps the worst. An error over the bound of the chunk forms may be
    the input's: what operands of 16 bits cost is worked out then."""
    ok, hard = bool(errors) and not wrong, []
    for name, (whole, worst) in errors.items():
        within = lambda bound: whole <= bound and worst <= WORST * bound        # false for NaN
        kind, passes = name, within(bounds_of(algo, case)[name])
        if not passes and algo in ALGOS and not wrong:
            cost, _ = case.costs(checkpoint)[name]
            passes, kind = within(reference.bound_of_hard(CHUNKED_BOUND, cost)), f"{name} of hard inputs"
            hard.append(f"hard: {name} error {whole:.1e}, emulated {cost:.1e}")
        ok = ok and passes
        seen = worst_seen.setdefault((algo, kind), [0.0, 0.0])
        seen[:] = max(seen[0], whole), max(seen[1], worst)
    text = " ".join(f"{name} {whole:.1e} ({worst:.1e})" for name, (whole, worst) in errors.items())
    return ok, ", ".join([text, *hard, *wrong] if text else wrong)


# ---- named cases ----

LENGTHS = (1, 6, 16, 63, 64, 65, 128, 130, 200, 512, 1000)
MIXED = [0, 3, 65, 0, 1, 17, 130, 64, 0]
DIMS = ((64, 64), (96, 192), (128, 64), (64, 128), (128, 256), (72, 40), (128, 128))


def case(lib, algos, name, lens, segments=(0,), checkpoint=0, **kw):
    c = Case(lens, **kw)
    for algo in algos:
        for n in segments:
            ok, text = fine(algo, c, *c.run(lib, algo, n, checkpoint), checkpoint)
            label = f"{name} {c.io}/{c.state} {ALGO_NAMES[algo]}" + (f" segments {n}" if n else "")
            report(label, ok, text)


def quick(lib, algos):
    case(lib, algos, "T=130", [130], hk=1, hv=2)
    case(lib, algos, "varlen, moved", [0, 5, 70, 64, 1], slots="moved", hk=1, hv=2, checkpoint=64)
    case(lib, algos, "K=72 V=40", [65, 3], k=72, v=40, hk=1, hv=2)
    case(lib, algos, "f16, bf16 state", [80] * 2, io="f16", state="bf16", slots="shared", hk=1, hv=1)
    case(lib, algos, "V=256", [70], v=256, hk=1, hv=1)
    case(lib, algos, "segments", [300, 20], hk=1, hv=2, segments=(2, 3), checkpoint=128, slots="apart")
    case(lib, algos[-1:], "several heads a block", [130] * 9, hk=8, hv=16, slots="moved")
    case(lib, algos[-1:], "heads cut in two", [520] * 9, hk=8, hv=16, checkpoint=64)


def named(lib, algos):
    run = lambda *args, **kw: case(lib, algos, *args, **kw)
    for io in ("bf16", "f16"):
        for length in LENGTHS:
            run(f"T={length}", [length] * 2, io=io)
        for hk, hv in ((2, 2), (2, 4), (1, 3), (2, 8), (1, 8), (16, 32)):
            run(f"heads {hk}/{hv}", [65, 33, 128], hk=hk, hv=hv, io=io)
        for k, v in DIMS:
            run(f"K={k} V={v}", MIXED, k=k, v=v, io=io, odd_o=True)
            run(f"K={k} V={v}", [200] * 2, k=k, v=v, io=io, state="bf16", slots="moved", checkpoint=64)
        for k, v in ((8, 8), (16, 248), (120, 136)):
            run(f"K={k} V={v}", MIXED, k=k, v=v, io=io)
        for how in ("identity", "apart", "permuted", "shared", "moved"):
            for state in ("f32", "bf16"):
                run(f"slots {how} varlen", MIXED, slots=how, io=io, state=state)
                run(f"slots {how} batched", [100] * 5, slots=how, io=io, state=state)
                run(f"slots {how} empty", [0] * 5, slots=how, io=io, state=state)
        for gate in ("f32", "bf16", "f16"):
            run(f"{gate} gates", [150, 20], io=io, gate=gate)
        run("varlen, equal lengths", [64] * 3, io=io, varlen=True)
        run("varlen, loose bounds of the lengths", MIXED, io=io, slack=500)
        hard(run, io)
    # Segments are cut by the longest; shorter ones have parts that are empty.
    for lens in ([1000], [1000] * 3, [1000, 130, 0, 1, 64, 999]):
        for how in ("identity", "moved"):
            run(f"{len(lens)} sequences of up to 1000, {how}", lens, segments=(1, 2, 3, 5), slots=how, checkpoint=64)
    run("1000 tokens, no decay", [1000], segments=(1, 2, 3, 5), decay="none")
    run("1000 tokens, beta 2", [1000], segments=(1, 3), beta_scale=2.0, state="bf16")
    run("segments of fewer tokens than parts", [3, 65], segments=(2, 5, 100))
    run("many sequences", [i % 3 for i in range(3000)], hk=1, hv=1, k=8, v=8)
    # More heads than multiprocessors, for some lengths in whole rounds and for some with heads cut in two.
    run("many sequences", [70] * 300, hk=1, hv=2, k=64, v=64)
    run("many empty sequences", [0] * 300, hk=1, hv=1, k=8, v=8, slots="apart")
    for how in ("identity", "moved", "permuted"):
        for tokens in (130, 600):
            run(f"16 heads of 9 sequences, {how}", [tokens] * 9, hk=8, hv=16, slots=how, checkpoint=128, segments=(0, 1))
            run(f"16 heads of 17 sequences, {how}", [tokens + 1] * 17, hk=8, hv=16, k=64, v=64, slots=how, state="bf16")
    check_checkpoints(lib, algos)
    check_resume(lib, algos)
    check_repeats(lib, algos)


def hard(run, io):
    lens = [512, 130, 64]
    for keys in ("repeated", "alternating", "parallel"):
        for beta_scale in (1.0, 2.0):
            # In bf16 the roundings alone leave nothing of o there (prefill/README.md): nothing to check.
            if io == "bf16" and keys == "alternating" and beta_scale == 2.0:
                continue
            run(f"{keys} keys, beta {beta_scale:.0f}, no decay", lens, io=io, keys=keys, beta="one", beta_scale=beta_scale,
                decay="none")
            run(f"{keys} keys, beta {beta_scale:.0f}, no decay, segments", [1000], io=io, keys=keys, beta="one",
                beta_scale=beta_scale, decay="none", segments=(3,))
        run(f"{keys} keys", lens, io=io, keys=keys)
    for decay in ("strong", "mixed", "uniform", "none"):
        run(f"{decay} decay", lens, io=io, decay=decay, segments=(0, 2))
    run("mixed decay, repeated keys, beta 2", lens, io=io, decay="mixed", keys="repeated", beta="one", beta_scale=2.0)
    run("large norms", lens, io=io, qk_size=1e3)
    run("tiny norms", lens, io=io, qk_size=1e-4)
    run("zero rows", lens, io=io, keys="zeros")
    run("large v", lens, io=io, v_size=4e3)
    run("no l2norm", lens, io=io, l2norm=False)
    run("no l2norm, beta 2, no decay", lens, io=io, l2norm=False, beta_scale=2.0, decay="none")


def check_checkpoints(lib, algos):
    everyone = [*algos, RECURRENT, RECURRENT_128]
    for every in (64, 128):
        for how in ("identity", "moved"):
            for state in ("f32", "bf16"):
                for name, lens in (("packed", [63, 64, 200, 0, 129, 1, 300]), ("batched", [200] * 5)):
                    # A bf16 state is rounded once: over the bound of the recurrent kernels, which is f32's.
                    case(lib, everyone if state == "f32" else algos, f"checkpoints of {every}, {name}, {how}", lens,
                         checkpoint=every, slots=how, state=state, gap=8)
    case(lib, algos, "checkpoints of 192 and 3 segments", [1000, 70], checkpoint=192, segments=(3,))
    case(lib, [DECODE_128], "checkpoints that one token does not reach", [1] * 70, checkpoint=64)
    c = Case([130] * 2)
    for algo in algos:
        for every in (64, 128):     # those of the whole are the ends of the prefixes
            whole = c.buffers(every)
            c.launch(lib, whole, algo, checkpoint=every)
            for n in range(len(c.lens)):
                row = n * 130 // every
                part = c.buffers()
                status = c.launch(lib, part, algo, window=(0, every))
                got = whole.checkpoints.view(-1, *c.shape)[row].double()
                error = relative(got, part.state_out[n].view(c.shape))
                report(f"checkpoint of {every} next to a prefix, {ALGO_NAMES[algo]}",
                       status == OK and error <= CHUNKED_BOUND, f"{error:.1e}")


def check_resume(lib, algos):
    """Two launches over the parts of every sequence are one over the whole."""
    for total, cuts in ((200, (1, 37, 63, 64, 65, 100, 199)), (1000, (333, 640))):
        c = Case([total] * 3, slots="permuted")
        for algo in algos:
            for cut in cuts:
                b = c.buffers()
                status = c.launch(lib, b, algo, window=(0, cut)) or c.launch(lib, b, algo, window=(cut, total))
                ok, text = fine(algo, c, *(c.judge(b) if status == OK else ({}, [lib.gdn_status_string(status).decode()])))
                report(f"{total} tokens cut at {cut} {ALGO_NAMES[algo]}", ok, text)


def check_repeats(lib, algos):
    """The same bits again, and from a graph; the parts of a workspace that a launch reads are its own."""
    for lens, hk, hv in (([1000], 4, 8), ([300, 20, 0, 65], 16, 32), ([64] * 40, 2, 4)):
        c = Case(lens, hk=hk, hv=hv, slots="moved")
        for algo in algos:
            for segments in (0, 3):
                first = c.buffers(64)
                status = c.launch(lib, first, algo, segments, 64)
                for how in ("again", "graph"):
                    b = c.buffers(64)
                    status = status or c.launch(lib, b, algo, segments, 64, graph=how == "graph")
                    ok = status == OK and unchanged(b, first)
                    report(f"{len(lens)} sequences, segments {segments}, {how}, {ALGO_NAMES[algo]}", ok,
                           "same bits" if ok else "differs")


def unchanged(b, first):
    return same([b.o_buf, b.state_out, b.checkpoints], [first.o_buf, first.state_out, first.checkpoints])


COPIES = """
import torch
x = torch.zeros(1 << 28, device="cuda")
y = torch.empty_like(x)
while True:
    for _ in range(20):
        y.copy_(x)
    torch.cuda.synchronize()
"""


def check_beside(lib, algos, seconds):
    """The same bits while other processes copy: a wait that is not for all it should be for shows where copies come late."""
    others = [subprocess.Popen([sys.executable, "-c", COPIES]) for _ in range(2)]
    try:
        cases = [Case([tokens] * n, hk=8, hv=heads) for tokens in (97, 150, 340, 600) for n, heads in ((9, 16), (3, 32))]
        first, runs, differing = {}, dict.fromkeys(algos, 0), dict.fromkeys(algos, 0)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for i, c in enumerate(cases):
                for algo in algos:
                    buffers = [c.buffers(128) for _ in range(4)]
                    good = all(c.launch(lib, b, algo, 0, 128) == OK for b in buffers)
                    for b in buffers:
                        runs[algo] += 1
                        differing[algo] += not (good and unchanged(b, first.setdefault((i, algo), b)))
    finally:
        for other in others:
            other.kill()
            other.wait()
    for algo in algos:
        report(f"beside other processes {ALGO_NAMES[algo]}", differing[algo] == 0, f"{differing[algo]} of {runs[algo]} differ")


def check_status(lib, algos):
    c = Case([1000, 0, 130], hk=2, hv=4)
    b = c.buffers(64)
    size = C.c_int64(0)

    def rule(algo, want, **changes):
        p = c.params(b, algo, 3, 64)
        workspace(lib.gdn_rule_workspace, p)
        expect(ALGO_NAMES[algo], want, lib.gdn_rule, p, quiet=False, **changes)

    add = lambda n: lambda x: x + n
    for algo in algos:
        rule(algo, OK)
        rule(algo, OK, checkpoints=None, checkpoint_tokens=-7)      # read only with checkpoints
        for every in (0, 32, 65, -64):
            rule(algo, BAD_CHECKPOINTS, checkpoint_tokens=every)
        rule(algo, BAD_ALGO, io_dtype=0)
        rule(algo, BAD_ALGO, head_k=136)
        rule(algo, BAD_ALGO, head_k=68)
        rule(algo, BAD_ALGO, head_v=68)
        for x in ("q", "k", "v"):
            rule(algo, BAD_ALGO, **{f"{x}__ptr": add(2)})
            rule(algo, BAD_ALGO, **{f"{x}__token_stride": add(1)})
            rule(algo, BAD_ALGO, **{f"{x}__head_stride": add(4)})
        rule(algo, BAD_ALGO, state_in=add(4))
        rule(algo, BAD_ALGO, state_out=add(4))
        rule(algo, BAD_ALGO, in_slots__slot_stride=add(1))
        rule(algo, BAD_ALGO, token_states=lambda _: ptr(b.checkpoints))
        rule(algo, BAD_LENGTH, seqs__total_tokens=-1)
        rule(algo, BAD_LENGTH, seqs__max_tokens_per_seq=-1)
        rule(algo, BAD_LENGTH, segments=-1)

        # From sizes alone: pointers that are not there yet change nothing.
        p = c.params(b, algo, 3, 64)
        assert lib.gdn_rule_workspace(C.byref(p), C.byref(size)) == OK
        need = size.value
        for x in ("q", "k", "v", "a", "b", "o"):
            getattr(p, x).ptr = None
        p.a_log = p.dt_bias = p.state_in = p.state_out = None
        got = lib.gdn_rule_workspace(C.byref(p), C.byref(size))
        report(f"workspace from sizes alone {ALGO_NAMES[algo]}", (got, size.value) == (OK, need), f"{need} bytes")
        if need:
            rule(algo, BAD_WORKSPACE, workspace=None)
            rule(algo, BAD_WORKSPACE, workspace=add(8))
            rule(algo, BAD_WORKSPACE, workspace_bytes=add(-1))
            rule(algo, BAD_WORKSPACE, workspace_bytes=0)
        report("workspace of null", lib.gdn_rule_workspace(None, C.byref(size)) == NULL_POINTER
               and lib.gdn_rule_workspace(C.byref(p), None) == NULL_POINTER, "")
    for algo in (RECURRENT, RECURRENT_128):
        rule(algo, OK, checkpoint_tokens=64, workspace=None, workspace_bytes=0)
        rule(algo, BAD_CHECKPOINTS, checkpoint_tokens=63)
    p = c.params(b, AUTO, checkpoint=64)
    chosen = C.c_int32(AUTO)
    status = lib.gdn_rule_choice(C.byref(p), C.byref(chosen))
    report("choice of auto", status == OK and chosen.value != AUTO, ALGO_NAMES[chosen.value])
    torch.cuda.synchronize()


# ---- random batches ----

HEADS = ((1, 1), (2, 4), (4, 8), (1, 3), (2, 8), (16, 32))
EDGES = (0, 1, 63, 64, 65, 127, 128, 129)


def random_case(seed):
    """(Case, segments, checkpoint) by its number."""
    r = random.Random(seed)
    lens = [r.choice(EDGES) if r.random() < 0.6 else r.randint(0, 400) for _ in range(r.randint(1, 8))]
    hk, hv = r.choice(HEADS)
    k, v = r.choice(DIMS) if r.random() < 0.25 else (128, 128)
    kw = dict(io=r.choice(("bf16", "f16")), gate=r.choice(("f32", "bf16", "f16")), state=r.choice(("f32", "f32", "bf16")),
              slots=r.choice(("identity", "apart", "permuted", "shared", "moved")), beta_scale=r.choice((1.0, 2.0)),
              l2norm=r.random() < 0.7, decay=r.choice(("normal", "normal", "none", "strong", "mixed", "uniform")),
              odd_o=r.random() < 0.3, slack=r.choice((0, 0, 1, 100)))
    # Now and then equal lengths without cu_seqlens, where rows of NaN stand between the sequences.
    if r.random() < 0.2:
        lens, kw["varlen"], kw["slack"] = [lens[0]] * len(lens), False, 0
    else:
        kw["varlen"] = True
    text = f"seed {seed} heads {hk}/{hv} K={k} V={v} lengths {lens} {kw}"
    return Case(lens, hk, hv, k, v, seed=seed, **kw), r.choice((0, 1, 2, 3)), r.choice((0, 0, 64, 128)), text


def check_random(lib, algos, count, seed):
    bad = {algo: 0 for algo in algos}
    for i in range(count):
        c, segments, checkpoint, text = random_case(seed + i)
        for algo in algos:
            ok, found = fine(algo, c, *c.run(lib, algo, segments, checkpoint), checkpoint)
            if not ok:
                bad[algo] += 1
                report(f"random {text} {ALGO_NAMES[algo]} segments {segments} checkpoints {checkpoint}", False, found)
        if (i + 1) % 100 == 0:
            print(f"     {i + 1} random batches, {sum(bad.values())} failed", flush=True)
    for algo in algos:
        report(f"{count} random batches {ALGO_NAMES[algo]}", bad[algo] == 0, f"{bad[algo]} failed")


# ---- times ----

CELLS = ["1x64", "1x128", "1x512", "1x2048", "1x8192", "1x32768", "4x2048", "4x8192", "8x1024"]
# µs of the fastest peer (FlashInfer 0.7.2, FlashQLA 0.1.3) on an H200: their rule alone, from normalised q and k and ready
# gates, where ours includes both.
PEERS = {
    "16/32": [8.8, 11.8, 28.6, 84.7, 227, 705, 101, 371, 110],
    "4/8": [8.0, 11.0, 23.8, 61.7, 111, 234, 82.3, 254, 51.5],
    "16/16": [8.2, 11.2, 25.1, 75.3, 151, 386, 97.3, 365, 57.6],
    "16/48": [8.3, 11.5, 28.1, 95.4, 351, 1255, 197, 723, 160],
    "16/64": [8.4, 11.6, 28.5, 96.3, 362, 1373, 197, 733, 212],
}


def select(text):
    """{heads: [cell]} of "16/32:1x8192,4x8192,4/8" or "all"."""
    chosen, heads = {}, None
    for word in (",".join(PEERS) if text == "all" else text).replace(",", " ").split():
        cell = word
        if "/" in word:
            heads, _, cell = word.partition(":")
            if heads not in PEERS:
                raise SystemExit(f"no times of peers for heads {heads}; there are {', '.join(PEERS)}")
            chosen.setdefault(heads, [])
        if cell and cell not in CELLS or heads is None:
            raise SystemExit(f"'{word}' is not one of {', '.join(CELLS)}, behind heads such as 16/32:")
        chosen[heads] += [cell] if cell else CELLS
    return chosen


def result(lib, timed, algo):
    """o and the final state of a call by another kernel or its own, elsewhere than where it writes them."""
    p = RuleParams.from_buffer_copy(timed.params)
    o, state = torch.full_like(timed.o, math.nan), torch.full_like(timed.state, math.nan)
    p.o.ptr, p.state_out, p.algo = ptr(o), ptr(state), algo
    workspace(lib.gdn_rule_workspace, p)
    status = launch(lambda: call(lib.gdn_rule, p))
    return (o, state) if status == OK else lib.gdn_status_string(status).decode()


def times(lib, algos, segments, cells):
    variants = [(a, s) for a in algos for s in segments]
    names = [ALGO_NAMES[a] + (f", {s} segments" if s else "") for a, s in variants]
    heading("µs from the first kernel's begin to the last one's end (CUPTI) / of graph replay a call; cold L2, bf16, f32 state, "
            "K = V = 128; x: the peer's time over ours")
    print(f"| HK/HV | shape | peer | {' | '.join(names)} |")
    print("|---" * (3 + len(names)) + "|")
    worst = 0.0
    for heads, shapes in select(cells).items():
        hk, hv = map(int, heads.split("/"))
        ratios = [[] for _ in variants]
        for shape in shapes:
            batch, tokens = map(int, shape.split("x"))
            peer, row = PEERS[heads][CELLS.index(shape)], []
            nbytes = batch * (tokens * 4 * (hk + hv) * 128 + hv * 128 * 128 * 4)
            want = None
            for (algo, parts), mine in zip(variants, ratios):
                torch.manual_seed(0)
                calls = rule_calls(lib, batch, tokens, hk, hv, 128, algo, cold_sets(nbytes), parts)
                want = want or result(lib, calls[0], RECURRENT_128)
                got = result(lib, calls[0], algo)
                if isinstance(got, str):
                    row.append(got)
                    continue
                error = max(map(relative, got, want))
                if not error <= CHUNKED_BOUND:
                    failures.append(f"timed {heads} {shape} {ALGO_NAMES[algo]} segments {parts}: {error:.1e}")
                    row.append(f"WRONG {error:.1e}")
                    continue
                worst = max(worst, error)
                span = span_us(calls * math.ceil((24 if batch * tokens <= 8192 else 9) / len(calls)))
                mine.append(peer / span)
                row.append(f"{span:.1f} / {graph_us(calls, 5):.1f} x{peer / span:.2f}")
                del calls
            print(f"| {heads} | {shape} | {peer:g} | {' | '.join(row)} |", flush=True)
        mean = lambda x: f"x{math.exp(sum(map(math.log, x)) / len(x)):.2f}" if x else ""
        print(f"| {heads} | geometric mean of {len(shapes)} | | {' | '.join(map(mean, ratios))} |", flush=True)
    print(f"o and states next to {ALGO_NAMES[RECURRENT_128]}: {worst:.1e} at most")


def main():
    parser = harness.arguments(__doc__)
    names = lambda text: [x.strip() for x in text.split(",") if x.strip()]
    parser.add_argument("--random", type=int, metavar="N", help="that many random batches; default 1000, with --quick none")
    parser.add_argument("--only-random", action="store_true", help="the random batches alone")
    parser.add_argument("--seed", type=int, default=0, help="of the first random batch")
    parser.add_argument("--beside", type=float, metavar="S", help="seconds of launches beside other processes; default 10, with --quick none")
    parser.add_argument("--algo", type=names, default=[ALGO_NAMES[a] for a in ALGOS], metavar="NAME,…",
                        help="chunked_sm80, chunked_sm90; for the times others too")
    parser.add_argument("--segments", type=lambda text: [int(x) for x in names(text)], default=[0], metavar="N,…",
                        help="of the times; default 0, the kernel's own choice")
    parser.add_argument("--cells", default="16/32,4/8", metavar="HK/HV[:NxT,…] …",
                        help="of the times: heads, or some lengths of them, apart by spaces or by ',' before heads; 'all'")
    args = parser.parse_args()
    for name in args.algo:
        if name not in ALGO_NAMES:
            parser.error(f"unknown algo '{name}'; there are {', '.join(ALGO_NAMES)}")
    wanted = [ALGO_NAMES.index(name) for name in args.algo]
    if CHUNKED_SM90 in wanted and torch.cuda.get_device_capability() != (9, 0):
        print("chunked_sm90 is for sm_90 alone: left out")
        wanted.remove(CHUNKED_SM90)

    def check(lib):
        algos = [a for a in wanted if a in ALGOS]
        if args.quick:
            quick(lib, algos)
        elif not args.only_random:
            named(lib, algos)
        if not args.only_random:
            check_status(lib, algos)
        count = args.random if args.random is not None else 0 if args.quick else 1000
        if count:
            check_random(lib, algos, count, args.seed)
        seconds = args.beside if args.beside is not None else 0 if args.quick or args.only_random else 10
        if seconds:
            check_beside(lib, algos, seconds)
        for (algo, name), (whole, worst) in sorted(worst_seen.items()):
            print(f"largest error of {name}, {ALGO_NAMES[algo]}: {whole:.1e} of a case, {worst:.1e} of a head")
    harness.run(args, check, lambda lib: times(lib, wanted, args.segments, args.cells))


if __name__ == "__main__":
    main()
