#!/usr/bin/env python3
"""Checks gdn_rule, gdn_conv and gdn_norm, through the C ABI, against float64.

    python3 cuda/tests/check.py             # builds the kernels; the exit code is 1 when a case is over its bound
    python3 cuda/tests/check.py --lib PATH  # of a library that is there, or is built there
    python3 cuda/tests/check.py --quick     # a small set, for compute-sanitizer
    python3 cuda/tests/check.py --time      # the checks, then times
    python3 cuda/tests/check.py --only-time

An error is ||x - ref|| / ||ref|| over the whole tensor. All outputs, and the state slots to be written, hold NaN before a
launch; whatever a launch must not touch is compared bit by bit afterwards.
"""
import ctypes as C
import math
from functools import partial

import harness
import reference
import torch
from abi import (ALGO_NAMES, AUTO, BAD_ALGO, BAD_CONV_WIDTH, BAD_DTYPE, BAD_HEAD_DIM, BAD_HEADS, BAD_LENGTH, BAD_STRIDE,
                 CHUNKED_SM80, CODES, NO_SLOT, NULL_POINTER, OK, RECURRENT, RECURRENT_128, ConvParams, NormParams, columns, fill,
                 heads, rule_params, sequences, slots, stream, workspace)
from harness import (CHUNKED_BOUND, O_BOUND, STATE_BOUND, TYPES, bf16, cu_seqlens, call, expect, launch, nan, normal, only_inside,
                     place, report, rule_calls, same)
from reference import relative
from timing import calls_of, cold_sets, graph_us, heading, often, span_us

UNALIGNED = [RECURRENT, AUTO]       # what takes rows at any address


# ---- gated delta rule ----

class RuleCase:
    """Inputs, a state pool, the parameter struct and the reference of one case."""

    def __init__(self, lens, hk, hv, k_dim, v_dim, io="bf16", gate=None, layout="fused", varlen=None, decay="normal",
                 keys="random", beta="normal", beta_scale=1.0, l2norm=True, norm=1.0, slots="identity", seed=0):
        gen = torch.Generator(device="cuda").manual_seed(seed)
        randn = lambda *s: torch.randn(*s, generator=gen, device="cuda")
        self.lens, self.io, self.gate = lens, io, gate or io
        self.dims = hk, hv, k_dim, v_dim
        self.varlen = len(set(lens)) > 1 if varlen is None else varlen
        n, t_max, total = len(lens), max(lens), sum(lens)
        dt = TYPES[io]

        # q, k, v as views of one projection: side by side; in rows with a gap and at an odd offset; or apart.
        kd, vd = hk * k_dim, hv * v_dim
        row = 2 * kd + vd
        gap, offset = {"fused": (0, 0), "padded": (8, 8), "odd": (3, 1), "apart": (0, 0)}[layout]
        buf = torch.zeros(offset + max(total, 1) * (row + gap), device="cuda", dtype=dt)
        rows = buf[offset:].view(-1, row + gap)[:, :row]
        x = randn(max(total, 1), row)
        x[:, :2 * kd] *= norm
        if keys == "repeated":
            x[:, kd:2 * kd] = x[0, kd:2 * kd]
        rows.copy_(x)
        q, k, v = rows[:, :kd], rows[:, kd:2 * kd], rows[:, 2 * kd:]
        if layout == "apart":
            q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        self.q, self.k = q.unflatten(1, (hk, k_dim)), k.unflatten(1, (hk, k_dim))
        self.v = v.unflatten(1, (hv, v_dim))

        ba = randn(max(total, 1), 2 * hv)
        if beta == "one":
            ba[:, :hv] = 12.0
        self.a_log = (torch.rand(hv, generator=gen, device="cuda") * 15 + 1).log()
        self.dt_bias = randn(hv) - 4.0
        if decay == "none":
            self.a_log.fill_(-100.0)
        elif decay == "strong":         # g about -30
            self.a_log.fill_(0.0)
            self.dt_bias.fill_(30.0)
        elif decay == "mixed":          # some tokens at -60 and more, the others hardly at all
            self.a_log.fill_(0.0)
            ba[:, hv:] = torch.where(torch.rand(max(total, 1), hv, generator=gen, device="cuda") < 0.15, 64.0, -5.0)
            self.dt_bias.fill_(0.0)
        ba = ba.to(TYPES[self.gate])
        self.b, self.a = ba[:, :hv], ba[:, hv:]

        self.o_buf = nan(offset + max(total, 1) * (vd + gap), dtype=io)
        self.o = self.o_buf[offset:].view(-1, vd + gap)[:, :vd].unflatten(1, (hv, v_dim))

        # Slots as place() has them, with gaps between them: odd ones are moved too.
        self.state_shape, self.size = (hv, v_dim, k_dim), hv * v_dim * k_dim
        self.num_slots, self.in_slots, self.out_slots, self.slot_tensors = place(n, "moved" if slots == "odd" else slots, seed)
        self.in_place = slots in ("identity", "shared")
        self.slot_gap = {"identity": 0, "odd": 1}.get(slots, 4)
        self.pad = [i for i, s in enumerate(self.in_slots) if s == NO_SLOT]
        self.pool = randn(self.num_slots, self.size + self.slot_gap)
        self.cu = cu_seqlens(lens) if self.varlen else None
        self.l2norm, self.eps, self.beta_scale = l2norm, 1e-6, beta_scale
        self.scale = k_dim ** -0.5

        # Reference: unpacked to [N, T, ...].
        index = torch.zeros(n, max(t_max, 1), dtype=torch.long)
        start = 0
        for i, length in enumerate(lens):
            index[i, :length] = torch.arange(start, start + length)
            start += length
        index = index.cuda()
        f64 = lambda y: y.double()[index][:, :t_max] if t_max else y.double()[index][:, :0]
        live = torch.arange(t_max, device="cuda")[None] < torch.tensor(lens, device="cuda")[:, None]
        safe = [s if s != NO_SLOT else 0 for s in self.in_slots]
        state0 = self.pool[torch.tensor(safe).cuda(), :self.size].view(n, *self.state_shape).double()
        inputs = (f64(self.q), f64(self.k), f64(self.v), f64(self.a), f64(self.b), self.a_log.double(), self.dt_bias.double(),
                  state0, torch.tensor(lens, device="cuda"), l2norm, self.eps, self.scale, beta_scale)

        def computed(rule):
            o, s = rule(*inputs)
            o[self.pad] = 0
            return o[live], s

        self.ref_o, self.ref_s = computed(reference.rule)
        self.in_16_bits = lambda: computed(partial(reference.rule_in_16_bits, dt))

    def params(self, algo, state_in, state_out):
        hk, hv, k_dim, v_dim = self.dims
        view = lambda x: heads(x, 0 if self.varlen else max(self.lens))
        where = [slots(numbers, self.num_slots, self.size + self.slot_gap) for numbers in self.slot_tensors]
        return rule_params(
            q=view(self.q), k=view(self.k), v=view(self.v), a=view(self.a), b=view(self.b), a_log=self.a_log,
            dt_bias=self.dt_bias, o=view(self.o), state_in=state_in, state_out=state_out, in_slots=where[0],
            out_slots=where[1], seqs=sequences(self.lens, self.cu), num_k_heads=hk, num_v_heads=hv, head_k=k_dim,
            head_v=v_dim, io_dtype=CODES[self.io], gate_dtype=CODES[self.gate], l2norm=int(self.l2norm), algo=algo,
            l2_eps=self.eps, scale=self.scale, beta_scale=self.beta_scale)

    def run(self, lib, algo, graph=False):
        """Returns what the launch left: status, o buffer, state pool it wrote, that pool before, the input pool, and which
        kernel it was."""
        self.o_buf.fill_(math.nan)
        state_in = self.pool.clone()
        if self.in_place:
            state_out = state_in
        else:
            state_out = torch.randn_like(self.pool)
            state_out[[s for s in self.out_slots if s != NO_SLOT], :self.size] = math.nan
        p = self.params(algo, state_in, state_out)
        workspace(lib.gdn_rule_workspace, p)
        chosen = C.c_int32(AUTO)
        lib.gdn_rule_choice(C.byref(p), C.byref(chosen))
        before = state_out.clone()
        status = launch(lambda: call(lib.gdn_rule, p), graph)
        return status, self.o_buf.clone(), state_out, before, state_in, chosen.value

    def check(self, lib, name, algos, bounds=None):
        for algo in algos:
            status, o_buf, pool, before, state_in, chosen = self.run(lib, algo)
            label = f"rule {name} {self.io} {ALGO_NAMES[algo]}"
            if status != OK:
                report(label, False, lib.gdn_status_string(status).decode())
                continue
            o = self.o[:sum(self.lens)]
            outside = only_inside(o_buf, o)
            live = [i for i, s in enumerate(self.out_slots) if s != NO_SLOT]
            slots_of = [self.out_slots[i] for i in live]
            e_o = relative(o, self.ref_o) if o.numel() else 0.0
            e_s = relative(pool[slots_of, :self.size].view(-1, *self.state_shape), self.ref_s[live])
            left = torch.ones_like(pool, dtype=torch.bool)
            left[slots_of, :self.size] = False
            outside = outside and torch.equal(pool[left], before[left])
            if not self.in_place:
                outside = outside and torch.equal(state_in, self.pool)
            bo, bs = bounds or ((CHUNKED_BOUND,) * 2 if chosen >= CHUNKED_SM80 else (O_BOUND[self.io], STATE_BOUND))
            hard = ""
            if chosen >= CHUNKED_SM80 and not bounds and not (e_o <= bo and e_s <= bs):
                o, s = self.in_16_bits()
                costs = relative(o, self.ref_o), relative(s[live], self.ref_s[live])
                bo, bs = (reference.bound_of_hard(CHUNKED_BOUND, cost) for cost in costs)
                hard = ", hard: error o {:.1e} state {:.1e}, emulated o {:.1e} state {:.1e}".format(e_o, e_s, *costs)
            ok = e_o <= bo and e_s <= bs and outside    # false for NaN
            report(label, ok, f"o {e_o:.1e} state {e_s:.1e}" + hard + ("" if outside else ", WROTE OUTSIDE"))


def algos_of(k, v):
    return [RECURRENT, AUTO] + ([RECURRENT_128] if (k, v) == (128, 128) else [])


def check_rule(lib, quick):
    def case(name, lens, hk=2, hv=4, k=128, v=128, algos=None, bounds=None, **kw):
        RuleCase(lens, hk, hv, k, v, **kw).check(lib, name, algos or algos_of(k, v), bounds)

    mixed = [0, 3, 65, 0, 1, 17, 130, 0]
    if quick:
        for io in ("f32", "bf16"):
            case("decode", [1] * 3, io=io)
            case("varlen moved", [0, 3, 37, 1, 16], io=io, slots="moved")
        case("odd", [5, 33], k=40, v=72, layout="odd", slots="odd")
        case("256", [19, 0], k=256, v=256, hk=1, hv=1)
        return
    for io in ("f32", "bf16", "f16"):
        for length in (0, 1, 2, 3, 15, 16, 17, 31, 32, 33, 63, 64, 65, 130, 1000):
            case(f"T={length}", [length] * 2, io=io)
        for hk, hv in ((2, 2), (2, 4), (1, 3), (2, 8), (1, 8)):
            case(f"heads {hk}/{hv}", [33, 20], hk=hk, hv=hv, io=io)
        for k, v in ((96, 192), (64, 128), (128, 64), (32, 32), (256, 256), (40, 72), (1, 1), (7, 3), (129, 250)):
            case(f"K={k} V={v}", mixed, hk=1, hv=2, k=k, v=v, io=io)
        for layout in ("fused", "padded", "odd", "apart"):
            case(f"layout {layout}", [65, 7], io=io, layout=layout, algos=UNALIGNED if layout == "odd" else None)
            case(f"layout {layout} K=40 V=72", [65, 7], k=40, v=72, io=io, layout=layout)
        for how in ("moved", "odd", "shared"):
            algos = UNALIGNED if how == "odd" else None
            case(f"slots {how} varlen", mixed, io=io, slots=how, algos=algos)
            case(f"slots {how} decode", [1] * 9, io=io, slots=how, algos=algos)
            case(f"slots {how} empty", [0] * 3, io=io, slots=how, algos=algos)
            case(f"slots {how} K=96 V=192", mixed, k=96, v=192, io=io, slots=how)
        case("varlen equal lengths", [64] * 3, io=io, varlen=True)
        case("repeated keys, beta 1, no decay", [130, 64], io=io, keys="repeated", beta="one", decay="none")
        # Each token negates the read-out of the one key: a key whose norm is off adds up token by token.
        case("repeated keys, beta 2, no decay", [130, 64], io=io, keys="repeated", beta="one", decay="none",
             beta_scale=2.0)
        case("beta 2", [130, 64], io=io, beta_scale=2.0)
        case("strong decay", [130, 64], io=io, decay="strong")
        case("mixed decay", [130, 300], io=io, decay="mixed")
        case("no decay", [1000], io=io, decay="none")
        case("large norms", [130], io=io, norm=1000.0 if io != "f16" else 100.0)
        case("small norms", [130], io=io, norm=1e-3)
        # Without the norm the keys must be short, or the recurrence itself grows without bound.
        case("no l2norm", [130, 31], io=io, l2norm=False, norm=0.08)
    for gate in ("f32", "bf16", "f16"):
        for io in ("f32", "bf16"):
            case(f"gates {gate}", [33], io=io, gate=gate)
    case("many sequences", [1] * 70000, hk=1, hv=1, k=8, v=8, algos=[RECURRENT])
    case("many sequences varlen", [i % 3 for i in range(66000)], hk=1, hv=1, k=8, v=4, algos=[RECURRENT])
    case("many heads", [50] * 20, hk=4, hv=8)
    case("few heads", [50], hk=1, hv=1)
    case("decode B=300", [1] * 300, hk=4, hv=8)
    case("decode of 4", [4] * 3, io="f32", slots="shared")
    case("decode of 5", [5] * 3, io="f32", slots="shared")
    case("decode B=20", [1] * 20, hk=4, hv=8)

    for lens in ([1] * 5, [300, 20, 65]):
        c = RuleCase(lens, 2, 4, 128, 128, slots="moved")
        for algo in algos_of(128, 128):
            rows = [s for s in c.out_slots if s != NO_SLOT]
            first, again, replayed = ((o, pool[rows, :c.size]) for _, o, pool, *_ in (
                c.run(lib, algo), c.run(lib, algo), c.run(lib, algo, graph=True)))
            name = f"max length {max(lens)}, {ALGO_NAMES[algo]}"
            report(f"rule two runs, {name}", same(first, again), "bitwise equal")
            report(f"rule graph, {name}", same(first, replayed), "replay equals eager")


def check_status(lib):
    c = RuleCase([4, 4], 2, 4, 128, 128)
    pool = c.pool.clone()
    rule = lambda want, **changes: expect("rule", want, lib.gdn_rule, c.params(AUTO, pool, pool), quiet=False, **changes)
    rule(OK)
    rule(BAD_DTYPE, io_dtype=3)
    rule(BAD_DTYPE, gate_dtype=-1)
    rule(BAD_HEADS, num_k_heads=3)
    rule(BAD_HEADS, num_v_heads=0)
    rule(BAD_HEAD_DIM, head_k=257)
    rule(BAD_HEAD_DIM, head_v=0)
    rule(BAD_LENGTH, seqs__num_seqs=-1)
    rule(BAD_LENGTH, seqs__tokens_per_seq=-1)
    rule(BAD_LENGTH, seqs__num_seqs=0x7FFFFFFF)
    rule(BAD_LENGTH, in_slots__num_slots=-1)
    rule(BAD_STRIDE, out_slots__slot_stride=-1)
    rule(BAD_STRIDE, q__token_stride=-1)
    rule(BAD_ALGO, algo=len(ALGO_NAMES))
    rule(BAD_ALGO, algo=-1)
    rule(BAD_ALGO, algo=RECURRENT_128, head_k=64)
    rule(BAD_ALGO, algo=RECURRENT_128, state_in=pool.data_ptr() + 4)
    rule(NULL_POINTER, q__ptr=None)
    rule(NULL_POINTER, state_out=None)
    rule(NULL_POINTER, a_log=None)
    rule(OK, seqs__num_seqs=0, q__ptr=None)
    rule(OK, seqs__tokens_per_seq=0, q__ptr=None)
    report("status null params", lib.gdn_rule(None, stream()) == NULL_POINTER, "")
    report("status text", lib.gdn_status_string(1000 + 2).decode() != lib.gdn_status_string(12345678).decode(), "")
    torch.cuda.synchronize()


# ---- convolution ----

def check_conv_case(lib, name, lens, channels, width, io="bf16", w_dtype=None, silu=True, odd=False, moved=False, seed=0):
    randn, dt, w_dtype = normal(seed), TYPES[io], w_dtype or io
    n, total, t = len(lens), sum(lens), max(lens)
    varlen = len(set(lens)) > 1
    gap, offset = (3, 1) if odd else (16, 8)
    buf = randn(offset + max(total, 1) * (channels + gap)).to(dt)
    inside = lambda buf: buf[offset:].view(-1, channels + gap)[:, :channels]
    x, y_buf = inside(buf), torch.full_like(buf, math.nan)
    y = inside(y_buf)
    weight = randn(channels, width).to(TYPES[w_dtype])
    rows = (width - 1) * channels
    slot_gap = (5 if odd else 8) if moved else 0
    num, ins, outs, numbers = place(n, "moved" if moved else "identity", seed)
    pool = randn(num, rows + slot_gap).to(dt)
    live = [i for i in range(n) if ins[i] != NO_SLOT]
    past = pool[[ins[i] for i in live], :rows].view(len(live), width - 1, channels)

    if total == n == len(live) and not varlen:    # all at once
        ref, kept = reference.conv(past, x[:total, None], weight, silu)
        ref, kept = ref[:, 0], list(kept)
    else:
        ref, kept = torch.zeros(total, channels, dtype=torch.float64, device="cuda"), []
        for old, i in zip(past, live):
            tokens = slice(sum(lens[:i]), sum(lens[:i + 1]))
            ref[tokens], new = reference.conv(old, x[tokens], weight, silu)
            kept.append(new)

    state_in = pool.clone()
    state_out = state_in if not moved else torch.randn(num, rows + slot_gap, device="cuda").to(dt)
    written = [outs[i] for i in live]
    if moved:
        state_out[written, :rows] = math.nan
    before = state_out.clone()
    cu = cu_seqlens(lens) if varlen else None
    where = [slots(s, num, rows + slot_gap) for s in numbers]
    p = fill(ConvParams, x=columns(x, 0, 0, 0 if varlen else t), y=columns(y, 0, 0, 0 if varlen else t), weight=weight,
             state_in=state_in, state_out=state_out, in_slots=where[0], out_slots=where[1], seqs=sequences(lens, cu),
             channels=channels, width=width, io_dtype=CODES[io], weight_dtype=CODES[w_dtype], silu=int(silu))
    status = launch(lambda: call(lib.gdn_conv, p))
    label = f"conv {name} {io}"
    if status != OK:
        return report(label, False, lib.gdn_status_string(status).decode())
    left = torch.ones_like(state_out, dtype=torch.bool)
    left[written, :rows] = False
    outside = only_inside(y_buf, y[:total]) and torch.equal(state_out[left], before[left])
    equal = torch.equal(state_out[written, :rows].view(-1, width - 1, channels), torch.stack(kept))
    err = relative(y[:total], ref) if total else 0.0
    report(label, err <= O_BOUND[io] and outside and equal,
           f"y {err:.1e}, state {'equal' if equal else 'DIFFERS'}" + ("" if outside else ", WROTE OUTSIDE"))


def check_conv(lib, quick):
    mixed = [0, 3, 65, 0, 1, 17, 130, 2]
    if quick:
        check_conv_case(lib, "quick", [0, 2, 40, 1], 64, 4, moved=True)
        check_conv_case(lib, "quick in place", [1] * 3, 40, 4, io="f32")
        check_conv_case(lib, "quick odd", [1, 2, 3, 9], 21, 8, odd=True)
        return
    for io in ("f32", "bf16", "f16"):
        for width in range(2, 9):
            for moved in (False, True):
                for odd in (False, True):
                    check_conv_case(lib, f"W={width}{' moved' if moved else ''}{' odd' if odd else ''}", mixed,
                                    104 if not odd else 53, width, io=io, moved=moved, odd=odd, silu=width != 3)
            # Enough work for the kernels that take 16 bytes of channels at a time.
            check_conv_case(lib, f"W={width} wide", [300, 0, 5, 1500], 8192, width, io=io, moved=width % 2 == 0)
        for length in (0, 1, 2, 3, 8, 9, 64, 65, 1000):
            check_conv_case(lib, f"T={length}", [length] * 3, 512, 4, io=io)
        check_conv_case(lib, "decode wide", [1] * 64, 8192, 4, io=io, w_dtype="f32", moved=True)
        check_conv_case(lib, "weights f32", [70], 256, 4, io=io, w_dtype="f32")
    check_conv_case(lib, "many sequences", [1] * 70000, 8, 4)


# ---- gated norm ----

def check_norm_case(lib, name, tokens, hv, dim, io="bf16", w_dtype=None, sigmoid=False, odd=False, seed=0):
    randn, w_dtype = normal(seed), w_dtype or io
    gap, offset = (3, 1) if odd else (8, 8)
    width = hv * dim

    def strided():
        buf = (2 * randn(offset + tokens * (width + gap))).to(TYPES[io])
        return buf, buf[offset:].view(tokens, width + gap)[:, :width].unflatten(1, (hv, dim))
    (_, x), (_, z), (out_buf, out) = strided(), strided(), strided()
    out_buf.fill_(math.nan)
    weight = randn(dim).to(TYPES[w_dtype])
    p = fill(NormParams, x=heads(x), z=heads(z), out=heads(out), weight=weight, tokens=tokens, heads=hv, head_v=dim,
             io_dtype=CODES[io], weight_dtype=CODES[w_dtype], sigmoid=int(sigmoid), eps=1e-6)
    status = launch(lambda: call(lib.gdn_norm, p))
    label = f"norm {name} {io}"
    if status != OK:
        return report(label, False, lib.gdn_status_string(status).decode())
    outside = only_inside(out_buf, out)
    err = relative(out, reference.gated_norm(x, z, weight, sigmoid))
    report(label, err <= O_BOUND[io] and outside, f"out {err:.1e}" + ("" if outside else ", WROTE OUTSIDE"))


def check_norm(lib, quick):
    for io in ("bf16",) if quick else ("f32", "bf16", "f16"):
        for dim in (128, 40) if quick else (1, 7, 32, 40, 64, 96, 128, 192, 250, 256):
            for odd in (False, True):
                check_norm_case(lib, f"V={dim}{' odd' if odd else ''}", 13, 5, dim, io=io, odd=odd, sigmoid=dim == 64)
        if not quick:
            check_norm_case(lib, "long", 3000, 32, 128, io=io, w_dtype="f32")
            check_norm_case(lib, "one row", 1, 1, 128, io=io)
    if not quick:
        check_norm_case(lib, "many rows", 200000, 8, 8)
        expect("norm", OK, lib.gdn_norm, NormParams(), head_v=8)
        expect("norm", BAD_HEAD_DIM, lib.gdn_norm, NormParams(), head_v=300)
        expect("conv", BAD_CONV_WIDTH, lib.gdn_conv, ConvParams(), width=9)


# ---- times ----

def times(lib, small):
    rate = heading("µs: kernel time (CUPTI) / graph replay a call")
    print("decode, HK/HV 16/32, K = V = 128, bf16, cold L2")
    for batch in (1, 4, 8, 32, 64, 128, 256):
        nbytes = batch * 32 * 128 * 128 * 4 * 2
        calls = rule_calls(lib, batch, 1, 16, 32, 128, AUTO, cold_sets(nbytes, most=96))
        k, g = span_us(often(calls)), graph_us(calls)
        floor = nbytes / rate * 1e6
        print(f"  B={batch:4d}  {k:7.2f} / {g:7.2f}   floor {floor:6.1f}   {100 * floor / k:4.0f} % of the copy rate", flush=True)
    print("prefill, HK/HV 16/32, K = V = 128, bf16")
    shapes = [(1, 16), (1, 64), (1, 512), (1, 2048), (1, 8192), (4, 2048), (8, 1024)]
    for batch, tokens in shapes[:4] if small else shapes:
        row = []
        for algo in (RECURRENT_128, RECURRENT, AUTO):
            calls = rule_calls(lib, batch, tokens, 16, 32, 128, algo, 8 if batch * tokens <= 2048 else 2)
            row.append(f"{ALGO_NAMES[algo]} {span_us(calls * 2):8.1f} / {graph_us(calls, 5):8.1f}")
        print(f"  {batch}x{tokens:<6d} " + "   ".join(row), flush=True)
    for hk, hv, dim in ((4, 8, 128), (16, 64, 128), (16, 16, 256), (30, 30, 96)):
        row = []
        for algo in (RECURRENT, AUTO):
            calls = rule_calls(lib, 1, 2048, hk, hv, dim, algo, 3)
            row.append(f"{ALGO_NAMES[algo]} {span_us(calls * 2):8.1f}")
        print(f"  1x2048 heads {hk}/{hv} K=V={dim}: " + "   ".join(row), flush=True)
    times_conv(lib, rate)
    times_norm(lib, rate)


def times_conv(lib, rate):
    print("convolution, 8192 channels, width 4, bf16, in place")
    for batch, tokens in ((1, 1), (8, 1), (32, 1), (128, 1), (256, 1), (1, 64), (1, 512), (1, 2048), (1, 8192), (8, 1024)):
        params, keep = [], []
        for _ in range(cold_sets(batch * (tokens * 32768 + 100000), least=2)):
            x, state, w = bf16(batch * tokens, 12288), bf16(batch, 3, 8192), bf16(8192, 4)
            y = torch.empty(batch * tokens, 8192, device="cuda", dtype=torch.bfloat16)
            where = slots(None, batch, 3 * 8192)
            params.append(fill(ConvParams, x=columns(x, 0, 0, tokens), y=columns(y, 0, 0, tokens), weight=w, state_in=state,
                               state_out=state, in_slots=where, out_slots=where, seqs=sequences([tokens] * batch),
                               channels=8192, width=4, io_dtype=1, weight_dtype=1, silu=1))
            keep.append((x, y, state, w))
        calls = calls_of(lib, [(lib.gdn_conv, p) for p in params], keep)
        nbytes = batch * 8192 * 2 * (2 * tokens + 6) + 8192 * 8
        print(f"  {batch}x{tokens:<6d} {span_us(often(calls)):7.2f} / {graph_us(calls):7.2f}   floor "
              f"{nbytes / rate * 1e6:6.2f}", flush=True)


def times_norm(lib, rate):
    print("gated norm, 32 heads of 128, bf16")
    for tokens in (1, 8, 32, 128, 512, 2048, 8192):
        params, keep = [], []
        for _ in range(cold_sets(tokens * 24576, least=2)):
            x, z, out = (bf16(tokens, 4096) for _ in range(3))
            w = torch.randn(128, device="cuda")
            params.append(fill(NormParams, x=columns(x, 0, 128), z=columns(z, 0, 128), out=columns(out, 0, 128), weight=w,
                               tokens=tokens, heads=32, head_v=128, io_dtype=1, weight_dtype=0, eps=1e-6))
            keep.append((x, z, out, w))
        calls = calls_of(lib, [(lib.gdn_norm, p) for p in params], keep)
        print(f"  T={tokens:<6d} {span_us(often(calls)):7.2f} / {graph_us(calls):7.2f}   floor "
              f"{tokens * 24576 / rate * 1e6:6.2f}", flush=True)


def main():
    args = harness.arguments(__doc__).parse_args()

    def check(lib):
        check_rule(lib, args.quick)
        check_conv(lib, args.quick)
        check_norm(lib, args.quick)
        if not args.quick:
            check_status(lib)
    harness.run(args, check, lambda lib: times(lib, args.quick))


if __name__ == "__main__":
    main()
