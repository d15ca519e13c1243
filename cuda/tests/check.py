#!/usr/bin/env python3
"""Builds the kernels with nvcc and checks them, through the C ABI, against the token recurrence in float64.

    python3 cuda/check.py             # all cases; the exit code is 1 when one is over its bound
    python3 cuda/check.py --quick     # a small set, for compute-sanitizer
    python3 cuda/check.py --time      # the checks, then times
    python3 cuda/check.py --only-time

Needs nvcc, torch and a GPU. An error is ||x - ref|| / ||ref|| over the whole tensor. All outputs, and the state slots
to be written, hold NaN before a launch; whatever a launch must not touch is compared bit by bit afterwards.
"""
import ctypes as C
import math
from functools import partial

import checks
import sixteen_bits
import timing
import torch
from abi import (ALGO_NAMES, AUTO, BAD_ALGO, BAD_CONV_WIDTH, BAD_DTYPE, BAD_HEAD_DIM, BAD_HEADS, BAD_LENGTH, BAD_STRIDE,
                 CHUNKED, CHUNKED_SM80, DTYPES, NO_SLOT, NULL_POINTER, OK, RECURRENT, RECURRENT_128, UNALIGNED, ConvParams,
                 Heads, NormParams, Slots, heads, load, ptr, rule_params, sequences, stream, u32, workspace)
from checks import rel, report

O_BOUND = {"f32": 1e-5, "bf16": 4e-3, "f16": 1e-3}
STATE_BOUND = 1e-5
CHUNKED_BOUND = 5e-3    # o and state of the chunk forms on tensor cores: they round inside; see sixteen_bits.py


# ---- gated delta rule ----

def rule_reference(q, k, v, a, b, a_log, dt_bias, state, lens, l2norm, eps, scale, beta_scale, typical=None):
    """[N, T, H, D] and [N, T, HV] in float64, state [N, HV, V, K]; tokens past a sequence's length change nothing.
    `typical` [N, T, HV], where given, gets ||S|| ||q|| / sqrt(K): the length of o for a q of no particular direction."""
    ratio = v.shape[2] // k.shape[2]
    if l2norm:
        q = q / (q.pow(2).sum(-1, keepdim=True) + eps).sqrt()
        k = k / (k.pow(2).sum(-1, keepdim=True) + eps).sqrt()
    q, k = (q * scale).repeat_interleave(ratio, 2), k.repeat_interleave(ratio, 2)
    g = torch.exp(-a_log.exp() * torch.nn.functional.softplus(a + dt_bias, threshold=1e9))
    beta = beta_scale * torch.sigmoid(b)
    o = torch.zeros_like(v)
    for t in range(v.shape[1]):
        live = (t < lens).view(-1, 1, 1, 1)
        s = g[:, t, :, None, None] * state
        d = beta[:, t, :, None] * (v[:, t] - torch.einsum("nhvk,nhk->nhv", s, k[:, t]))
        s = s + d[..., None] * k[:, t, :, None, :]
        o[:, t] = torch.where(live[..., 0], torch.einsum("nhvk,nhk->nhv", s, q[:, t]), 0.0)
        if typical is not None:
            length = s.flatten(2).norm(dim=-1) * q[:, t].norm(dim=-1) * k.shape[-1] ** -0.5
            typical[:, t] = torch.where(live[..., 0, 0], length, 0.0)
        state = torch.where(live, s, state)
    return o, state


class RuleCase:
    """Inputs, a state pool, the parameter struct and the reference of one case."""

    def __init__(self, lens, hk, hv, k_dim, v_dim, io="bf16", gate=None, layout="fused", varlen=None, decay="normal",
                 keys="random", beta="normal", beta_scale=1.0, l2norm=True, norm=1.0, slots="identity", seed=0):
        gen = torch.Generator(device="cuda").manual_seed(seed)
        randn = lambda *s: torch.randn(*s, generator=gen, device="cuda", dtype=torch.float32)
        self.lens, self.io, self.gate = lens, io, gate or io
        self.dims = hk, hv, k_dim, v_dim
        self.varlen = len(set(lens)) > 1 if varlen is None else varlen
        n, t_max, total = len(lens), max(lens), sum(lens)
        dt, gdt = DTYPES[io][1], DTYPES[self.gate][1]

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
        ba = ba.to(gdt)
        self.b, self.a = ba[:, :hv], ba[:, hv:]

        self.o_buf = torch.full((offset + max(total, 1) * (vd + gap),), math.nan, device="cuda", dtype=dt)
        self.o = self.o_buf[offset:].view(-1, vd + gap)[:, :vd].unflatten(1, (hv, v_dim))

        # Slots: "identity" in place; "moved": other slots of another pool, one sequence padding, gaps between slots.
        self.state_shape = (hv, v_dim, k_dim)
        size = hv * v_dim * k_dim
        self.pad = []
        if slots == "identity":
            self.num_slots, self.slot_gap = n, 0
            self.in_slots = self.out_slots = list(range(n))
            self.in_place, self.slot_tensors = True, (None, None)
        else:
            perm = torch.randperm(2 * n + 1, generator=torch.Generator().manual_seed(seed)).tolist()
            self.num_slots, self.slot_gap = 2 * n + 1, 1 if slots == "odd" else 4
            self.in_slots, self.out_slots = perm[:n], perm[n:2 * n]
            self.in_place = slots == "shared"
            if self.in_place:
                self.out_slots = list(self.in_slots)
            self.pad = [n // 2] if n > 1 else []
            for i in self.pad:
                self.in_slots[i] = self.out_slots[i] = NO_SLOT
            self.slot_tensors = u32(self.in_slots), u32(self.out_slots)
        self.pool = randn(self.num_slots, size + self.slot_gap)
        self.cu = u32([0] + torch.tensor(lens).cumsum(0).tolist()) if self.varlen else None
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
        state0 = self.pool[torch.tensor(safe).cuda(), :size].view(n, *self.state_shape).double()
        inputs = (f64(self.q), f64(self.k), f64(self.v), f64(self.a), f64(self.b), self.a_log.double(), self.dt_bias.double(),
                  state0, torch.tensor(lens, device="cuda"), l2norm, self.eps, self.scale, beta_scale)

        def computed(rule):
            o, s = rule(*inputs)
            o[self.pad] = 0
            return o[live], s

        self.ref_o, self.ref_s = computed(rule_reference)
        self.sixteen_bits = lambda: computed(partial(sixteen_bits.rule, dt))

    def params(self, algo, state_in, state_out):
        hk, hv, k_dim, v_dim = self.dims
        t = max(self.lens)
        def view(x):
            if self.varlen:
                return heads(x, True)
            s = x.stride()
            return Heads(x.data_ptr(), t * s[0], s[0], s[1])
        slot = lambda s: Slots(ptr(s), self.num_slots, math.prod(self.state_shape) + self.slot_gap)
        return rule_params(
            q=view(self.q), k=view(self.k), v=view(self.v), a=view(self.a), b=view(self.b), a_log=self.a_log,
            dt_bias=self.dt_bias, o=view(self.o), state_in=state_in, state_out=state_out,
            in_slots=slot(self.slot_tensors[0]), out_slots=slot(self.slot_tensors[1]), seqs=sequences(self.lens, self.cu),
            num_k_heads=hk, num_v_heads=hv, head_k=k_dim, head_v=v_dim, io_dtype=DTYPES[self.io][0],
            gate_dtype=DTYPES[self.gate][0], l2norm=int(self.l2norm), algo=algo, l2_eps=self.eps, scale=self.scale,
            beta_scale=self.beta_scale)

    def run(self, lib, algo, graph=False):
        """Returns what the launch left: status, o buffer, state pool it wrote, that pool before, the input pool, and which
        kernel it was."""
        self.o_buf.fill_(math.nan)
        state_in = self.pool.clone()
        if self.in_place:
            state_out = state_in
        else:
            state_out = torch.randn_like(self.pool)
            for s in self.out_slots:
                if s != NO_SLOT:
                    state_out[s, :math.prod(self.state_shape)] = math.nan
        p = self.params(algo, state_in, state_out)
        workspace(lib, p)
        chosen = C.c_int32(AUTO)
        lib.gdn_rule_choice(C.byref(p), C.byref(chosen))
        before = state_out.clone()
        if graph:
            g = torch.cuda.CUDAGraph()
            with torch.cuda.graph(g):
                status = lib.gdn_rule(C.byref(p), stream())
            g.replay()
        else:
            status = lib.gdn_rule(C.byref(p), stream())
        torch.cuda.synchronize()
        return status, self.o_buf.clone(), state_out, before, state_in, chosen.value

    def check(self, lib, name, algos, bounds=None):
        size = math.prod(self.state_shape)
        for algo in algos:
            status, o_buf, pool, before, state_in, chosen = self.run(lib, algo)
            label = f"rule {name} {self.io} {ALGO_NAMES[algo]}"
            if status != OK:
                report(label, False, lib.gdn_status_string(status).decode())
                continue
            total = sum(self.lens)
            o = self.o[:total]
            written = torch.zeros_like(self.o_buf, dtype=torch.bool)
            if total:
                written.as_strided(o.shape, o.stride(), o.storage_offset()).fill_(True)
            outside = o_buf[~written].isnan().all().item()
            live = [i for i, s in enumerate(self.out_slots) if s != NO_SLOT]
            e_o = rel(o, self.ref_o) if total else 0.0
            got = pool[[self.out_slots[i] for i in live], :size].view(-1, *self.state_shape)
            e_s = rel(got, self.ref_s[live])
            left = torch.ones_like(pool, dtype=torch.bool)
            left[[self.out_slots[i] for i in live], :size] = False
            outside = outside and torch.equal(pool[left], before[left])
            if not self.in_place:
                outside = outside and torch.equal(state_in, self.pool)
            bo, bs = bounds or ((CHUNKED_BOUND,) * 2 if chosen >= CHUNKED_SM80 else (O_BOUND[self.io], STATE_BOUND))
            hard = ""
            if chosen >= CHUNKED_SM80 and not bounds and not (e_o <= bo and e_s <= bs):
                o, s = self.sixteen_bits()
                costs = rel(o, self.ref_o), rel(s[live], self.ref_s[live])
                bo, bs = (sixteen_bits.bound(CHUNKED_BOUND, cost) for cost in costs)
                hard = ", hard: error o {:.1e} state {:.1e}, emulated o {:.1e} state {:.1e}".format(e_o, e_s, *costs)
            ok = e_o <= bo and e_s <= bs and outside    # false for NaN
            report(label, ok, f"o {e_o:.1e} state {e_s:.1e}" + hard + ("" if outside else ", WROTE OUTSIDE"))


def algos_of(k, v):
    return [RECURRENT, CHUNKED, AUTO] + ([RECURRENT_128] if (k, v) == (128, 128) else [])


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
        for slots in ("moved", "odd", "shared"):
            algos = UNALIGNED if slots == "odd" else None
            case(f"slots {slots} varlen", mixed, io=io, slots=slots, algos=algos)
            case(f"slots {slots} decode", [1] * 9, io=io, slots=slots, algos=algos)
            case(f"slots {slots} empty", [0] * 3, io=io, slots=slots, algos=algos)
            case(f"slots {slots} K=96 V=192", mixed, k=96, v=192, io=io, slots=slots)
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
    case("many sequences", [1] * 70000, hk=1, hv=1, k=8, v=8, algos=[RECURRENT, CHUNKED])
    case("many sequences varlen", [i % 3 for i in range(66000)], hk=1, hv=1, k=8, v=4, algos=[RECURRENT, CHUNKED])
    case("many heads", [50] * 20, hk=4, hv=8)
    case("few heads", [50], hk=1, hv=1)
    case("decode B=300", [1] * 300, hk=4, hv=8)
    case("decode of 4", [4] * 3, io="f32", slots="shared")
    case("decode of 5", [5] * 3, io="f32", slots="shared")
    case("decode B=20", [1] * 20, hk=4, hv=8)

    for lens in ([1] * 5, [300, 20, 65]):
        c = RuleCase(lens, 2, 4, 128, 128, slots="moved")
        for algo in algos_of(128, 128):
            a, b, g = c.run(lib, algo), c.run(lib, algo), c.run(lib, algo, graph=True)
            size = math.prod(c.state_shape)
            rows = [s for s in c.out_slots if s != NO_SLOT]
            bits = lambda r: (r[1].view(torch.int16), r[2][rows, :size].contiguous().view(torch.int32))
            same = lambda x, y: all(torch.equal(i, j) for i, j in zip(bits(x), bits(y)))
            report(f"rule two runs, max length {max(lens)}, {ALGO_NAMES[algo]}", same(a, b), "bitwise equal")
            report(f"rule graph, max length {max(lens)}, {ALGO_NAMES[algo]}", same(a, g), "replay equals eager")


def check_status(lib):
    c = RuleCase([4, 4], 2, 4, 128, 128)
    pool = c.pool.clone()

    def rule(want, **changes):
        p = c.params(AUTO, pool, pool)
        for name, value in changes.items():
            target, _, field = name.rpartition("__")
            setattr(getattr(p, target) if target else p, field, value)
        got = lib.gdn_rule(C.byref(p), stream())
        report(f"status rule {changes}", got == want, lib.gdn_status_string(got).decode())

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
    rule(BAD_ALGO, algo=7)
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

def check_conv_case(lib, name, lens, channels, width, io="bf16", w_dtype=None, silu=True, odd=False, moved=False, seed=0,
                    varlen=None):
    gen = torch.Generator(device="cuda").manual_seed(seed)
    randn = lambda *s: torch.randn(*s, generator=gen, device="cuda", dtype=torch.float32)
    dt, w_dtype = DTYPES[io][1], w_dtype or io
    n, total = len(lens), sum(lens)
    varlen = len(set(lens)) > 1 if varlen is None else varlen
    gap, offset = (3, 1) if odd else (16, 8)
    buf = randn(offset + max(total, 1) * (channels + gap)).to(dt)
    x = buf[offset:].view(-1, channels + gap)[:, :channels]
    y_buf = torch.full_like(buf, math.nan)
    y = y_buf[offset:].view(-1, channels + gap)[:, :channels]
    weight = randn(channels, width).to(DTYPES[w_dtype][1])
    rows = (width - 1) * channels
    slot_gap = (5 if odd else 8) if moved else 0
    num = 2 * n + 1 if moved else n
    pool = randn(num, rows + slot_gap).to(dt)
    if moved:
        perm = torch.randperm(num, generator=torch.Generator().manual_seed(seed)).tolist()
        ins, outs = perm[:n], perm[n:2 * n]
        if n > 1:
            ins[n // 2] = outs[n // 2] = NO_SLOT
        slots = u32(ins), u32(outs)
    else:
        ins = outs = list(range(n))
        slots = None, None

    ref, ref_state, at = torch.zeros(total, channels, dtype=torch.float64, device="cuda"), {}, 0
    if n <= 100:
        for i, length in enumerate(lens):
            if ins[i] != NO_SLOT:
                old = pool[ins[i], :rows].view(width - 1, channels)
                full = torch.cat([old, x[at:at + length]]).double()
                out = sum(full[j:j + length] * weight[:, j].double() for j in range(width))
                ref[at:at + length] = torch.nn.functional.silu(out) if silu else out
                ref_state[i] = full[length:].to(dt)
            at += length
    else:    # equal lengths of one token
        old = pool[:, :rows].view(n, width - 1, channels)
        full = torch.cat([old, x[:, None]], 1).double()
        out = (full * weight.double().T[None]).sum(1)
        ref = torch.nn.functional.silu(out) if silu else out
        ref_state = {i: s for i, s in enumerate(full[:, 1:].to(dt))}

    state_in = pool.clone()
    state_out = state_in if not moved else torch.randn(num, rows + slot_gap, device="cuda").to(dt)
    if moved:
        for s in outs:
            if s != NO_SLOT:
                state_out[s, :rows] = math.nan
    before = state_out.clone()
    cu = u32([0] + torch.tensor(lens).cumsum(0).tolist()) if varlen else None
    t = max(lens)
    view = lambda z: Heads(z.data_ptr(), 0 if varlen else t * z.stride(0), z.stride(0), 0)
    slot = lambda s: Slots(ptr(s), num, rows + slot_gap)
    p = ConvParams(view(x), view(y), weight.data_ptr(), state_in.data_ptr(), state_out.data_ptr(), slot(slots[0]),
                   slot(slots[1]), sequences(lens, cu), channels, width, DTYPES[io][0], DTYPES[w_dtype][0], int(silu))
    status = lib.gdn_conv(C.byref(p), stream())
    torch.cuda.synchronize()
    label = f"conv {name} {io}"
    if status != OK:
        return report(label, False, lib.gdn_status_string(status).decode())
    written = torch.zeros_like(y_buf, dtype=torch.bool)
    if total:
        written.as_strided((total, channels), (y.stride(0), 1), y.storage_offset()).fill_(True)
    outside = y_buf[~written].isnan().all().item()
    live = list(ref_state)
    left = torch.ones_like(state_out, dtype=torch.bool)
    left[[outs[i] for i in live], :rows] = False
    outside = outside and torch.equal(state_out[left], before[left])
    got = state_out[[outs[i] for i in live], :rows].view(-1, width - 1, channels)
    same = torch.equal(got, torch.stack([ref_state[i] for i in live]))
    err = rel(y[:total], ref) if total else 0.0
    report(label, err <= O_BOUND[io] and outside and same,
           f"y {err:.1e}, state {'equal' if same else 'DIFFERS'}" + ("" if outside else ", WROTE OUTSIDE"))


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
    gen = torch.Generator(device="cuda").manual_seed(seed)
    randn = lambda *s: torch.randn(*s, generator=gen, device="cuda", dtype=torch.float32)
    dt, w_dtype = DTYPES[io][1], w_dtype or io
    gap, offset = (3, 1) if odd else (8, 8)
    width = hv * dim
    def strided():
        buf = (2 * randn(offset + tokens * (width + gap))).to(dt)
        return buf, buf[offset:].view(tokens, width + gap)[:, :width].unflatten(1, (hv, dim))
    (_, x), (_, z), (out_buf, out) = strided(), strided(), strided()
    out_buf.fill_(math.nan)
    weight = randn(dim).to(DTYPES[w_dtype][1])
    p = NormParams(heads(x, True), heads(z, True), heads(out, True), weight.data_ptr(), tokens, hv, dim, DTYPES[io][0],
                   DTYPES[w_dtype][0], int(sigmoid), 1e-6)
    status = lib.gdn_norm(C.byref(p), stream())
    torch.cuda.synchronize()
    label = f"norm {name} {io}"
    if status != OK:
        return report(label, False, lib.gdn_status_string(status).decode())
    xd, zd = x.double(), z.double()
    act = torch.sigmoid(zd) if sigmoid else torch.nn.functional.silu(zd)
    ref = xd * (xd.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * weight.double() * act
    written = torch.zeros_like(out_buf, dtype=torch.bool)
    written.as_strided(out.shape, out.stride(), out.storage_offset()).fill_(True)
    outside = out_buf[~written].isnan().all().item()
    err = rel(out, ref)
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
        p = NormParams()
        report("status norm empty", lib.gdn_norm(C.byref(NormParams(head_v=8)), stream()) == OK, "")
        report("status norm head", lib.gdn_norm(C.byref(NormParams(head_v=300)), stream()) == BAD_HEAD_DIM, "")
        report("status conv width", lib.gdn_conv(C.byref(ConvParams(width=9)), stream()) == BAD_CONV_WIDTH, "")


def main():
    args = checks.arguments(__doc__).parse_args()
    lib = checks.library(args, load)
    if not args.only_time:
        check_rule(lib, args.quick)
        check_conv(lib, args.quick)
        check_norm(lib, args.quick)
        if not args.quick:
            check_status(lib)
        checks.summary()
    if args.time or args.only_time:
        timing.times(lib, args.quick)
    checks.leave()


if __name__ == "__main__":
    main()
