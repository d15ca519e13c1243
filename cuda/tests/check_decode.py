#!/usr/bin/env python3
"""The decode kernels against float64: GDN_DECODE_128 and the fused step, states in f32 and bf16, 1 to 16 tokens.

    python3 cuda/check_decode.py             # all cases; the exit code is 1 when one is over its bound
    python3 cuda/check_decode.py --quick     # a small set, for compute-sanitizer
    python3 cuda/check_decode.py --time      # the checks, then times of the fused step next to the three kernels it replaces
    python3 cuda/check_decode.py --lib PATH  # a library built before, instead of building one
"""
import ctypes as C
import math

import checks
import torch
from abi import (AUTO, BAD_ALGO, BAD_CONV_WIDTH, BAD_DTYPE, BAD_HEADS, BAD_LENGTH, BAD_STRIDE, DECODE_128, DTYPES, NO_SLOT,
                 NULL_POINTER, OK, RECURRENT, RECURRENT_128, Heads, Slots, StepParams, load, ptr, rule_params,
                 sequences, stream, u32, workspace)
from check import O_BOUND, rule_reference
from checks import rel, report

STEP_AUTO, STEP_WHOLE, STEP_SPLIT, STEP_HEADS = range(4)
STEP_NAMES = ["auto", "whole", "split", "heads"]
# A bf16 state is the f32 result rounded once: half a unit in the last of 8 bits, uniform over a binade, is 1.7e-3 RMS.
STATE_BOUND = {"f32": 1e-5, "bf16": 2e-3}
DIM = 128


class Case:
    """One projection [tokens, q | k | v | z | b | a] with its states, for the rule alone or for the fused step."""

    def __init__(self, lens, hk, hv, io="bf16", gate=None, state="f32", conv=None, norm=None, varlen=False, slots="identity",
                 beta_scale=1.0, l2norm=True, sigmoid=False, token_states=False, gap=0, seed=0):
        g = torch.Generator(device="cuda").manual_seed(seed)
        randn = lambda *s: torch.randn(*s, generator=g, device="cuda", dtype=torch.float32)
        self.lens, self.hk, self.hv, self.io, self.gate, self.state = lens, hk, hv, io, gate or io, state
        self.conv, self.norm, self.varlen = conv or io, norm or "f32", varlen
        self.beta_scale, self.l2norm, self.sigmoid = beta_scale, l2norm, sigmoid
        n, self.t, self.total = len(lens), max(lens), sum(lens)
        assert varlen or len(set(lens)) == 1
        self.channels = (2 * hk + hv) * DIM
        width = self.channels + hv * DIM
        self.x = torch.zeros(max(self.total, 1), width + gap, device="cuda", dtype=DTYPES[io][1])
        self.x[:, :width] = randn(max(self.total, 1), width)
        self.ba = randn(max(self.total, 1), 2 * hv).to(DTYPES[self.gate][1])
        self.a_log = (torch.rand(hv, generator=g, device="cuda") * 15 + 1).log()
        self.dt_bias = randn(hv) - 4.0
        self.conv_weight = (randn(self.channels, 4) * 0.5).to(DTYPES[self.conv][1])
        self.norm_weight = (1 + 0.1 * randn(DIM)).to(DTYPES[self.norm][1])
        self.cu = u32([0] + torch.tensor(lens).cumsum(0).tolist()) if varlen else None
        self.size, self.conv_size = hv * DIM * DIM, 3 * self.channels
        self.in_slots = self.out_slots = list(range(n))
        self.num_slots, self.gap, self.in_place, self.slot_tensors = n, 0, True, (None, None)
        if slots != "identity":
            perm = torch.randperm(2 * n + 1, generator=torch.Generator().manual_seed(seed)).tolist()
            self.num_slots, self.gap = 2 * n + 1, 8
            self.in_slots, self.out_slots = perm[:n], perm[n:2 * n]
            self.in_place = slots == "shared"
            if self.in_place:
                self.out_slots = list(self.in_slots)
            if n > 1:
                self.in_slots[n // 2] = self.out_slots[n // 2] = NO_SLOT
            self.slot_tensors = u32(self.in_slots), u32(self.out_slots)
        self.pool = (randn(self.num_slots, self.size + self.gap) * 0.3).to(DTYPES[state][1])
        self.conv_pool = randn(self.num_slots, self.conv_size + self.gap).to(DTYPES[io][1])
        self.live = [i for i, s in enumerate(self.in_slots) if s != NO_SLOT]
        self.token_states = token_states

    def reference(self, fused):
        """o [total, HV, V], the states after each token [total, HV, V, K], final states and convolution states (live)."""
        kk = self.hk * DIM
        o = torch.zeros(self.total, self.hv, DIM, device="cuda", dtype=torch.float64)
        states = torch.zeros(self.total, self.hv, DIM, DIM, device="cuda", dtype=torch.float64) if self.token_states else None
        finals, convs, start = [], [], 0
        silu = torch.nn.functional.silu
        for i, length in enumerate(self.lens):
            rows = slice(start, start + length)
            if i in self.live:
                x, slot = self.x[rows].double(), self.in_slots[i]
                qkv = x[:, :self.channels]
                old = self.conv_pool[slot, :self.conv_size].view(3, self.channels)
                window = torch.cat([old.double(), qkv])
                convs.append(window[-3:])
                if fused:
                    w = self.conv_weight.double()
                    qkv = silu(sum(window[j:j + length] * w[:, j] for j in range(4)))
                heads = lambda first, h: qkv[:, first:first + h * DIM].unflatten(1, (h, DIM))[None]
                state = self.pool[slot, :self.size].view(1, self.hv, DIM, DIM).double()
                b, a = self.ba[rows, :self.hv].double()[None], self.ba[rows, self.hv:].double()[None]
                q, k, v = heads(0, self.hk), heads(kk, self.hk), heads(2 * kk, self.hv)
                for t in range(length):
                    at = slice(t, t + 1)
                    y, state = rule_reference(q[:, at], k[:, at], v[:, at], a[:, at], b[:, at], self.a_log.double(),
                                              self.dt_bias.double(), state, torch.ones(1, device="cuda"), self.l2norm, 1e-6,
                                              DIM ** -0.5, self.beta_scale)
                    o[start + t] = y[0, 0]
                    if states is not None:
                        states[start + t] = state[0]
                if fused:
                    z = x[:, self.channels:self.channels + self.hv * DIM].unflatten(1, (self.hv, DIM))
                    y = o[rows]
                    y = y * (y.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * self.norm_weight.double()
                    o[rows] = y * (torch.sigmoid(z) if self.sigmoid else silu(z))
                finals.append(state[0])
            start += length
        return o, states, finals, convs

    def buffers(self):
        state_in, conv_in = self.pool.clone(), self.conv_pool.clone()
        state_out = state_in if self.in_place else torch.full_like(self.pool, 7.0)
        conv_out = conv_in if self.in_place else torch.full_like(self.conv_pool, 7.0)
        o = torch.full((max(self.total, 1), self.hv * DIM), math.nan, device="cuda", dtype=DTYPES[self.io][1])
        states = None
        if self.token_states:
            states = torch.full((self.total, self.size), math.nan, device="cuda", dtype=DTYPES[self.state][1])
        return state_in, state_out, conv_in, conv_out, o, states

    def common(self):
        t = 0 if self.varlen else self.t
        seqs = sequences(self.lens, self.cu)
        slot = lambda s: Slots(ptr(s), self.num_slots, self.size + self.gap)
        view = lambda x, first, head: Heads(x.data_ptr() + first * x.element_size(), t * x.stride(0), x.stride(0), head)
        return seqs, slot(self.slot_tensors[0]), slot(self.slot_tensors[1]), view

    def rule_params(self, algo, state_in, state_out, o, states):
        seqs, in_slots, out_slots, view = self.common()
        kk, code = self.hk * DIM, lambda d: DTYPES[d][0]
        return rule_params(
            q=view(self.x, 0, DIM), k=view(self.x, kk, DIM), v=view(self.x, 2 * kk, DIM), a=view(self.ba, self.hv, 1),
            b=view(self.ba, 0, 1), a_log=self.a_log, dt_bias=self.dt_bias, o=view(o, 0, DIM), state_in=state_in,
            state_out=state_out, token_states=states, in_slots=in_slots, out_slots=out_slots, seqs=seqs, num_k_heads=self.hk,
            num_v_heads=self.hv, head_k=DIM, head_v=DIM, io_dtype=code(self.io), gate_dtype=code(self.gate),
            state_dtype=code(self.state), l2norm=int(self.l2norm), algo=algo, beta_scale=self.beta_scale)

    def step_params(self, algo, state_in, state_out, conv_in, conv_out, o, states, overlap=0):
        seqs, in_slots, out_slots, view = self.common()
        code = lambda d: DTYPES[d][0]
        return StepParams(
            view(self.x, 0, 0), view(self.x, self.channels, DIM), view(self.ba, self.hv, 1), view(self.ba, 0, 1),
            view(o, 0, DIM), self.conv_weight.data_ptr(), self.norm_weight.data_ptr(), self.a_log.data_ptr(),
            self.dt_bias.data_ptr(), conv_in.data_ptr(), conv_out.data_ptr(), state_in.data_ptr(), state_out.data_ptr(),
            ptr(states), in_slots, out_slots, self.conv_size + self.gap,
            self.conv_size + self.gap, seqs, self.hk, self.hv, DIM, DIM, 4, code(self.io), code(self.gate), code(self.state),
            code(self.conv), code(self.norm), int(self.l2norm), int(self.sigmoid), algo, overlap, 1e-6, DIM ** -0.5,
            self.beta_scale, 1e-6)

    def launch(self, lib, fused, algo, graph=False, overlap=0):
        state_in, state_out, conv_in, conv_out, o, states = self.buffers()
        if fused:
            p, f = self.step_params(algo, state_in, state_out, conv_in, conv_out, o, states, overlap), lib.gdn_step
        else:
            p, f = self.rule_params(algo, state_in, state_out, o, states), lib.gdn_rule
            workspace(lib, p)
        if graph:
            g = torch.cuda.CUDAGraph()
            with torch.cuda.graph(g):
                status = f(C.byref(p), stream())
            g.replay()
        else:
            status = f(C.byref(p), stream())
        torch.cuda.synchronize()
        return status, state_in, state_out, conv_in, conv_out, o, states

    def check(self, lib, name, fused, algos, names):
        ref_o, ref_states, finals, convs = self.reference(fused)
        for algo in algos:
            status, state_in, state_out, conv_in, conv_out, o, states = self.launch(lib, fused, algo)
            label = f"{'step' if fused else 'rule'} {name} {self.io}/{self.state} {names[algo]}"
            if status != OK:
                report(label, False, lib.gdn_status_string(status).decode())
                continue
            e_o = rel(o[:self.total].view(self.total, self.hv, DIM), ref_o) if self.total else 0.0
            got = lambda pool, size: [pool[self.out_slots[i], :size] for i in self.live]
            e_s = max([rel(s.view(self.hv, DIM, DIM), f) for s, f in zip(got(state_out, self.size), finals)], default=0.0)
            wrong = []
            start = 0
            for i, length in enumerate(self.lens):
                if i not in self.live and not (o[start:start + length] == 0).all():
                    wrong.append("padding not zero")
                if states is not None and i not in self.live and not states[start:start + length].isnan().all():
                    wrong.append("token states of padding")
                if states is not None and i in self.live and length:
                    e_s = max(e_s, rel(states[start:start + length].view(length, self.hv, DIM, DIM),
                                       ref_states[start:start + length]))
                    if not torch.equal(states[start + length - 1], state_out[self.out_slots[i], :self.size]):
                        wrong.append("last token state is not the final one")
                start += length
            if fused and not all(torch.equal(c.double(), r.flatten()) for c, r in zip(got(conv_out, self.conv_size), convs)):
                wrong.append("convolution state")
            for out, pool, size in ((state_out, self.pool, self.size), (conv_out, self.conv_pool, self.conv_size)):
                before = pool if self.in_place else torch.full_like(pool, 7.0)
                left = torch.ones_like(out, dtype=torch.bool)
                if fused or out is state_out:
                    left[[self.out_slots[i] for i in self.live], :size] = False
                if not torch.equal(out[left], before[left]):
                    wrong.append("wrote outside")
            if not self.in_place and not (torch.equal(state_in, self.pool) and torch.equal(conv_in, self.conv_pool)):
                wrong.append("wrote its input")
            ok = e_o <= O_BOUND[self.io] and e_s <= STATE_BOUND[self.state] and not wrong
            report(label, ok, f"o {e_o:.1e} state {e_s:.1e} {', '.join(wrong)}")


def rule_algos(case):
    return [DECODE_128, AUTO, RECURRENT_128, RECURRENT]


def check_rule(lib, quick):
    names = ["auto", "recurrent", "recurrent_128", "chunked", "decode_128"]
    def case(name, lens, hk, hv, **kw):
        c = Case(lens, hk, hv, **kw)
        c.check(lib, name, False, rule_algos(c), names)
    case("B=1", [1], 2, 4)
    case("B=1", [1], 2, 4, state="bf16")
    case("B=40 16/32 slots", [1] * (3 if quick else 40), 16, 32, slots="moved")
    case("B=3x5 tokens", [5] * 3, 2, 4, token_states=True)
    case("B=3 varlen", [5, 0, 16], 2, 4, varlen=True, token_states=True, slots="shared")
    if quick:
        return
    for io in ("bf16", "f16", "f32"):
        for state in ("f32", "bf16"):
            for hk, hv in ((16, 16), (16, 32), (16, 48), (16, 64), (2, 8), (1, 8), (4, 8)):
                for batch in (1, 2, 5, 9):
                    case(f"{hk}/{hv} B={batch}", [1] * batch, hk, hv, io=io, state=state, slots="shared" if batch == 5 else
                         "identity", beta_scale=2.0 if batch == 2 else 1.0, l2norm=batch != 9, seed=batch)
            for tokens in (2, 3, 4, 8, 15, 16):
                case(f"3x{tokens}", [tokens] * 3, 2, 4, io=io, state=state, token_states=True, slots="moved", seed=tokens)
            case("varlen", [0, 1, 16, 7, 0], 2, 6, io=io, state=state, varlen=True, token_states=True, slots="moved")
            case("one token states", [1] * 3, 2, 4, io=io, state=state, token_states=True, slots="shared")
    for io, gate in (("bf16", "f32"), ("bf16", "f16"), ("f16", "bf16"), ("f32", "bf16")):
        case(f"{gate} gates", [1] * 4, 2, 4, io=io, gate=gate)


def step_algos(lib, case):
    p = case.step_params(STEP_AUTO, *case.buffers())
    algos = [STEP_AUTO]
    for algo in (STEP_WHOLE, STEP_SPLIT, STEP_HEADS):
        p.algo = algo
        got = C.c_int32(-1)
        assert lib.gdn_step_choice(C.byref(p), C.byref(got)) == OK
        if got.value == algo:
            algos.append(algo)
    return algos


def check_step(lib, quick):
    def case(name, lens, hk, hv, **kw):
        c = Case(lens, hk, hv, **kw)
        c.check(lib, name, True, step_algos(lib, c), STEP_NAMES)
    case("B=1", [1], 2, 4)
    case("B=1", [1], 2, 4, state="bf16")
    case("B=3 16/32 slots", [1] * 3, 16, 32, slots="moved")
    case("B=3x5", [5] * 3, 2, 4, token_states=True)
    case("varlen", [5, 0, 16], 2, 4, varlen=True, token_states=True, slots="shared")
    if quick:
        return
    for io in ("bf16", "f16", "f32"):
        for state in ("f32", "bf16"):
            for hk, hv in ((16, 16), (16, 32), (16, 48), (16, 64), (2, 8), (1, 8), (4, 8)):
                for batch in (1, 2, 5, 9, 33):
                    case(f"{hk}/{hv} B={batch}", [1] * batch, hk, hv, io=io, state=state, slots="shared" if batch == 5 else
                         "identity", sigmoid=batch == 2, l2norm=batch != 9, beta_scale=2.0 if batch == 2 else 1.0,
                         conv="f32" if batch == 9 else None, norm=io if batch == 5 else None, gap=8 * (batch == 2), seed=batch)
            for tokens in (2, 3, 4, 8, 15, 16):
                case(f"3x{tokens}", [tokens] * 3, 2, 4, io=io, state=state, token_states=True, slots="moved", seed=tokens)
                case(f"3x{tokens} 1/8", [tokens] * 3, 1, 8, io=io, state=state, slots="shared", seed=tokens)
            case("varlen", [0, 1, 16, 7, 0], 2, 6, io=io, state=state, varlen=True, token_states=True, slots="moved")
    for io, gate in (("bf16", "f32"), ("bf16", "f16"), ("f16", "bf16"), ("f32", "bf16")):
        case(f"{gate} gates", [1] * 4, 2, 4, io=io, gate=gate)
    check_repeats(lib)
    check_status(lib)


def check_repeats(lib):
    """The same bits again, from a graph, and with the launch overlapped."""
    for lens in ([1], [1] * 9, [1] * 64, [4] * 8):
        c = Case(lens, 16, 32)
        for algo in step_algos(lib, c):
            first = c.launch(lib, True, algo)
            for how in ({}, {"graph": True}, {"overlap": 1}, {"overlap": 1, "graph": True}):
                again = c.launch(lib, True, algo, **how)
                same = all(torch.equal(x, y) for x, y in zip(first[1:6], again[1:6]))
                report(f"step {len(lens)}x{lens[0]} {STEP_NAMES[algo]} again {how}", same, "same bits" if same else "differs")
        first = c.launch(lib, False, AUTO)
        same = all(torch.equal(x, y) for x, y in zip(first[1:6], c.launch(lib, False, AUTO, graph=True)[1:6]))
        report(f"rule {len(lens)}x{lens[0]} again from a graph", same, "same bits" if same else "differs")


def check_status(lib):
    c = Case([1] * 2, 2, 4)
    def step(want, **changes):
        p = c.step_params(STEP_AUTO, *c.buffers())
        for key, value in changes.items():
            if isinstance(value, dict):
                for inner, x in value.items():
                    setattr(getattr(p, key), inner, x)
            else:
                setattr(p, key, value)
        got = lib.gdn_step(C.byref(p), stream())
        report(f"step refuses {changes}", got == want, lib.gdn_status_string(got).decode())
    for field in ("io_dtype", "gate_dtype", "conv_dtype", "norm_dtype"):
        step(BAD_DTYPE, **{field: 9})
    step(BAD_DTYPE, state_dtype=2)
    step(BAD_HEADS, num_k_heads=3)
    step(BAD_CONV_WIDTH, conv_width=9)
    step(BAD_ALGO, conv_width=3)
    step(BAD_ALGO, head_k=64)
    step(BAD_ALGO, algo=5)
    step(BAD_ALGO, seqs={"tokens_per_seq": 17, "max_tokens_per_seq": 17})
    step(BAD_LENGTH, seqs={"num_seqs": -1})
    step(BAD_STRIDE, x={"token_stride": -1})
    step(BAD_STRIDE, conv_in_stride=-1)
    step(NULL_POINTER, conv_weight=None)
    step(OK, seqs={"num_seqs": 0})
    torch.cuda.synchronize()


def main():
    args = checks.arguments(__doc__).parse_args()
    lib = checks.library(args, load)
    if not args.only_time:
        check_rule(lib, args.quick)
        check_step(lib, args.quick)
        checks.summary()
    if args.time or args.only_time:
        from timing_decode import times
        times(lib)
    checks.leave()


if __name__ == "__main__":
    main()
