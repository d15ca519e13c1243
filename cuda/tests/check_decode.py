#!/usr/bin/env python3
"""The decode kernels against float64: GDN_DECODE_128 and the fused step, states in f32 and bf16, 1 to 16 tokens.

    python3 cuda/tests/check_decode.py             # builds the kernels; the exit code is 1 when a case is over its bound
    python3 cuda/tests/check_decode.py --lib PATH  # of a library that is there, or is built there
    python3 cuda/tests/check_decode.py --quick     # a small set, for compute-sanitizer
    python3 cuda/tests/check_decode.py --time      # the checks, then times of the fused step next to the kernels it replaces
    python3 cuda/tests/check_decode.py --only-time
"""
import ctypes as C

import harness
import reference
import torch
from abi import (ALGO_NAMES, AUTO, BAD_ALGO, BAD_CONV_WIDTH, BAD_DTYPE, BAD_HEADS, BAD_LENGTH, BAD_STRIDE, CODES, DECODE_128,
                 NO_SLOT, NULL_POINTER, OK, RECURRENT, RECURRENT_128, STEP_AUTO, STEP_HEADS, STEP_NAMES, STEP_SPLIT, STEP_WHOLE,
                 ConvParams, LinearParams, NormParams, StepParams, columns, fill, rule_params, sequences, slots, workspace)
from harness import O_BOUND, TYPES, WAYS, bf16, cu_seqlens, call, expect, launch, nan, place, report
from reference import relative
from timing import calls_of, cold_sets, graph_us, heading, often, span_us

# A bf16 state is the f32 result rounded once: half a unit in the last of 8 bits, uniform over a binade, is 1.7e-3 RMS.
STATE_BOUND = {"f32": 1e-5, "bf16": 2e-3}
DIM = 128


class Case:
    """One projection [tokens, q | k | v | z | b | a] with its states, for the rule alone or for the fused step."""

    def __init__(self, lens, hk, hv, io="bf16", gate=None, state="f32", conv=None, norm=None, varlen=False, slots="identity",
                 beta_scale=1.0, l2norm=True, sigmoid=False, token_states=False, gap=0, seed=0):
        g = torch.Generator(device="cuda").manual_seed(seed)
        randn = lambda *s: torch.randn(*s, generator=g, device="cuda")
        self.lens, self.hk, self.hv, self.io, self.gate, self.state = lens, hk, hv, io, gate or io, state
        self.conv, self.norm, self.varlen = conv or io, norm or "f32", varlen
        self.beta_scale, self.l2norm, self.sigmoid = beta_scale, l2norm, sigmoid
        n, self.t, self.total = len(lens), max(lens), sum(lens)
        assert varlen or len(set(lens)) == 1
        self.channels = (2 * hk + hv) * DIM
        width = self.channels + hv * DIM
        self.x = torch.zeros(max(self.total, 1), width + gap, device="cuda", dtype=TYPES[io])
        self.x[:, :width] = randn(max(self.total, 1), width)
        self.ba = randn(max(self.total, 1), 2 * hv).to(TYPES[self.gate])
        self.a_log = (torch.rand(hv, generator=g, device="cuda") * 15 + 1).log()
        self.dt_bias = randn(hv) - 4.0
        self.conv_weight = (randn(self.channels, 4) * 0.5).to(TYPES[self.conv])
        self.norm_weight = (1 + 0.1 * randn(DIM)).to(TYPES[self.norm])
        self.cu = cu_seqlens(lens) if varlen else None
        self.size, self.conv_size = hv * DIM * DIM, 3 * self.channels
        self.num_slots, self.in_slots, self.out_slots, self.slot_tensors = place(n, slots, seed)
        self.gap, self.in_place = 0 if slots == "identity" else 8, slots != "moved"
        self.pool = (randn(self.num_slots, self.size + self.gap) * 0.3).to(TYPES[state])
        self.conv_pool = randn(self.num_slots, self.conv_size + self.gap).to(TYPES[io])
        self.live = [i for i, s in enumerate(self.in_slots) if s != NO_SLOT]
        self.token_states = token_states

    def reference(self, fused):
        """o [total, HV, V], the states after each token [total, HV, V, K], final states and convolution states (live)."""
        kk = self.hk * DIM
        o = torch.zeros(self.total, self.hv, DIM, device="cuda", dtype=torch.float64)
        states = torch.zeros(self.total, self.hv, DIM, DIM, device="cuda", dtype=torch.float64) if self.token_states else None
        finals, convs, one = [], [], torch.ones(1, device="cuda")
        for i, rows in enumerate(self.rows()):
            if i not in self.live:
                continue
            x, slot = self.x[rows], self.in_slots[i]
            past = self.conv_pool[slot, :self.conv_size].view(3, self.channels)
            convolved, kept = reference.conv(past, x[:, :self.channels], self.conv_weight)
            convs.append(kept)
            qkv = convolved if fused else x[:, :self.channels].double()
            heads = lambda first, h: qkv[:, first:first + h * DIM].unflatten(1, (h, DIM))[None]
            state = self.pool[slot, :self.size].view(1, self.hv, DIM, DIM).double()
            b, a = self.ba[rows, :self.hv].double()[None], self.ba[rows, self.hv:].double()[None]
            q, k, v = heads(0, self.hk), heads(kk, self.hk), heads(2 * kk, self.hv)
            for t in range(self.lens[i]):
                at = slice(t, t + 1)
                y, state = reference.rule(q[:, at], k[:, at], v[:, at], a[:, at], b[:, at], self.a_log.double(),
                                          self.dt_bias.double(), state, one, self.l2norm, 1e-6, DIM ** -0.5, self.beta_scale)
                o[rows.start + t] = y[0, 0]
                if states is not None:
                    states[rows.start + t] = state[0]
            if fused:
                z = x[:, self.channels:self.channels + self.hv * DIM].unflatten(1, (self.hv, DIM))
                o[rows] = reference.gated_norm(o[rows], z, self.norm_weight, self.sigmoid)
            finals.append(state[0])
        return o, states, finals, convs

    def rows(self):
        """Of each sequence."""
        return [slice(sum(self.lens[:i]), sum(self.lens[:i + 1])) for i in range(len(self.lens))]

    def buffers(self):
        state_in, conv_in = self.pool.clone(), self.conv_pool.clone()
        state_out = state_in if self.in_place else torch.full_like(self.pool, 7.0)
        conv_out = conv_in if self.in_place else torch.full_like(self.conv_pool, 7.0)
        o = nan(max(self.total, 1), self.hv * DIM, dtype=self.io)
        states = nan(self.total, self.size, dtype=self.state) if self.token_states else None
        return state_in, state_out, conv_in, conv_out, o, states

    def params(self, fused, algo, buffers, overlap=0):
        """Of gdn_step, or of gdn_rule."""
        state_in, state_out, conv_in, conv_out, o, states = buffers
        view = lambda x, first, head: columns(x, first, head, 0 if self.varlen else self.t)
        in_slots, out_slots = (slots(numbers, self.num_slots, self.size + self.gap) for numbers in self.slot_tensors)
        common = dict(
            a=view(self.ba, self.hv, 1), b=view(self.ba, 0, 1), a_log=self.a_log, dt_bias=self.dt_bias, state_in=state_in,
            state_out=state_out, token_states=states, in_slots=in_slots, out_slots=out_slots,
            seqs=sequences(self.lens, self.cu), num_k_heads=self.hk, num_v_heads=self.hv, head_k=DIM, head_v=DIM,
            io_dtype=CODES[self.io], gate_dtype=CODES[self.gate], state_dtype=CODES[self.state], l2norm=int(self.l2norm),
            algo=algo, l2_eps=1e-6, scale=DIM ** -0.5, beta_scale=self.beta_scale)
        if not fused:
            kk = self.hk * DIM
            return rule_params(q=view(self.x, 0, DIM), k=view(self.x, kk, DIM), v=view(self.x, 2 * kk, DIM), o=view(o, 0, DIM),
                               **common)
        stride = self.conv_size + self.gap
        return fill(StepParams, x=view(self.x, 0, 0), z=view(self.x, self.channels, DIM), out=view(o, 0, DIM),
                    conv_weight=self.conv_weight, norm_weight=self.norm_weight, conv_in=conv_in, conv_out=conv_out,
                    conv_in_stride=stride, conv_out_stride=stride, conv_width=4, conv_dtype=CODES[self.conv],
                    norm_dtype=CODES[self.norm], sigmoid=int(self.sigmoid), overlap=overlap, norm_eps=1e-6, **common)

    def launch(self, lib, fused, algo, overlap=0, graph=False):
        """The status and the buffers."""
        buffers = self.buffers()
        p = self.params(fused, algo, buffers, overlap)
        if not fused:
            workspace(lib.gdn_rule_workspace, p)
        return launch(lambda: call(lib.gdn_step if fused else lib.gdn_rule, p), graph), *buffers

    def check(self, lib, name, fused, algos, names):
        ref_o, ref_states, finals, convs = self.reference(fused)
        for algo in algos:
            status, state_in, state_out, conv_in, conv_out, o, states = self.launch(lib, fused, algo)
            label = f"{'step' if fused else 'rule'} {name} {self.io}/{self.state} {names[algo]}"
            if status != OK:
                report(label, False, lib.gdn_status_string(status).decode())
                continue
            e_o = relative(o[:self.total].view(self.total, self.hv, DIM), ref_o) if self.total else 0.0
            got = lambda pool, size: [pool[self.out_slots[i], :size] for i in self.live]
            e_s = max([relative(s.view(self.hv, DIM, DIM), f) for s, f in zip(got(state_out, self.size), finals)], default=0.0)
            wrong = []
            for i, rows in enumerate(self.rows()):
                if i not in self.live and not (o[rows] == 0).all():
                    wrong.append("padding not zero")
                if states is not None and i not in self.live and not states[rows].isnan().all():
                    wrong.append("token states of padding")
                if states is not None and i in self.live and self.lens[i]:
                    e_s = max(e_s, relative(states[rows].view(-1, self.hv, DIM, DIM), ref_states[rows]))
                    if not torch.equal(states[rows][-1], state_out[self.out_slots[i], :self.size]):
                        wrong.append("last token state is not the final one")
            if fused and not all(torch.equal(c, r.flatten()) for c, r in zip(got(conv_out, self.conv_size), convs)):
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


def check_rule(lib, quick):
    def case(name, lens, hk, hv, **kw):
        Case(lens, hk, hv, **kw).check(lib, name, False, [DECODE_128, AUTO, RECURRENT_128, RECURRENT], ALGO_NAMES)
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
    p = case.params(True, STEP_AUTO, case.buffers())
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
    equal = lambda x, y: all(torch.equal(a, b) for a, b in zip(x[1:6], y[1:6]))
    for lens in ([1], [1] * 9, [1] * 64, [4] * 8):
        c = Case(lens, 16, 32)
        for algo in step_algos(lib, c):
            first = c.launch(lib, True, algo)
            for overlap, graph in WAYS:
                ok = equal(first, c.launch(lib, True, algo, overlap, graph))
                report(f"step {len(lens)}x{lens[0]} {STEP_NAMES[algo]} again, overlap {overlap}, graph {graph}", ok,
                       "same bits" if ok else "differs")
        ok = equal(c.launch(lib, False, AUTO), c.launch(lib, False, AUTO, graph=True))
        report(f"rule {len(lens)}x{lens[0]} again from a graph", ok, "same bits" if ok else "differs")


def check_status(lib):
    c = Case([1] * 2, 2, 4)
    step = lambda want, **changes: expect("step", want, lib.gdn_step, c.params(True, STEP_AUTO, c.buffers()), quiet=False,
                                          **changes)
    for field in ("io_dtype", "gate_dtype", "conv_dtype", "norm_dtype"):
        step(BAD_DTYPE, **{field: 9})
    step(BAD_DTYPE, state_dtype=2)
    step(BAD_HEADS, num_k_heads=3)
    step(BAD_CONV_WIDTH, conv_width=9)
    step(BAD_ALGO, conv_width=3)
    step(BAD_ALGO, head_k=64)
    step(BAD_ALGO, algo=len(STEP_NAMES) + 1)
    step(BAD_ALGO, seqs__tokens_per_seq=17, seqs__max_tokens_per_seq=17)
    step(BAD_LENGTH, seqs__num_seqs=-1)
    step(BAD_STRIDE, x__token_stride=-1)
    step(BAD_STRIDE, conv_in_stride=-1)
    step(NULL_POINTER, conv_weight=None)
    step(OK, seqs__num_seqs=0)
    torch.cuda.synchronize()


# ---- times ----

def times(lib):
    rate = heading("µs of kernel time (CUPTI), cold L2, bf16 inputs")
    print("| HK/HV | B | floor | rule | step | step / rule | conv + rule + norm | rule, bf16 state | of f32 |")
    print("|---|---|---|---|---|---|---|---|---|")
    for hk, hv in ((16, 32), (16, 48), (2, 8)):
        for batch in (1, 2, 4, 8, 16, 32, 64, 128, 256) if hv == 32 else (1, 4, 16, 64):
            nbytes = 2 * batch * hv * DIM * DIM * 4
            launches, keep = {name: [] for name in ("rule", "step", "conv", "norm", "bf16")}, []
            for i in range(cold_sets(nbytes)):
                c, h = Case([1] * batch, hk, hv, seed=i), Case([1] * batch, hk, hv, state="bf16", seed=i)
                b, hb = c.buffers(), h.buffers()
                y = torch.empty(batch, c.channels, device="cuda", dtype=torch.bfloat16)
                where, o = slots(None, batch, c.conv_size), columns(b[4], 0, DIM)
                conv = fill(ConvParams, x=columns(c.x, 0, 0, 1), y=columns(y, 0, 0, 1), weight=c.conv_weight, state_in=b[2],
                            state_out=b[2], in_slots=where, out_slots=where, seqs=sequences([1] * batch), channels=c.channels,
                            width=4, io_dtype=CODES["bf16"], weight_dtype=CODES["bf16"], silu=1)
                norm = fill(NormParams, x=o, z=columns(c.x, c.channels, DIM), out=o, weight=c.norm_weight, tokens=batch,
                            heads=hv, head_v=DIM, io_dtype=CODES["bf16"], weight_dtype=CODES["f32"], eps=1e-6)
                for name, f, p in (("rule", lib.gdn_rule, c.params(False, AUTO, b)), ("conv", lib.gdn_conv, conv),
                                   ("step", lib.gdn_step, c.params(True, STEP_AUTO, b)), ("norm", lib.gdn_norm, norm),
                                   ("bf16", lib.gdn_rule, h.params(False, AUTO, hb))):
                    launches[name].append((f, p))
                keep.append((c, b, y, h, hb))
            for name in ("rule", "bf16"):
                workspace(lib.gdn_rule_workspace, *(p for _, p in launches[name]))
            t = {name: span_us(often(calls_of(lib, some, keep), 60)) for name, some in launches.items()}
            print(f"| {hk}/{hv} | {batch} | {nbytes / rate * 1e6:.2f} | {t['rule']:.2f} | {t['step']:.2f} | "
                  f"{t['step'] / t['rule']:.2f} | {t['conv'] + t['rule'] + t['norm']:.2f} | {t['bf16']:.2f} | "
                  f"{t['bf16'] / t['rule']:.2f} |", flush=True)
    times_tokens(lib)
    times_layer(lib)


def times_tokens(lib):
    print("\nseveral tokens, HK/HV 16/32: rule by decode_128 / recurrent_128; step")
    for batch in (1, 4, 16, 64):
        row = []
        for tokens in (1, 2, 4, 8, 16):
            cases = [Case([tokens] * batch, 16, 32, seed=i) for i in range(cold_sets(2 * batch * 32 * DIM * DIM * 4, most=24))]
            buffers, us = [c.buffers() for c in cases], []
            for fused, algo in ((False, DECODE_128), (False, RECURRENT_128), (True, STEP_AUTO)):
                params = [c.params(fused, algo, b) for c, b in zip(cases, buffers)]
                if not fused:
                    workspace(lib.gdn_rule_workspace, *params)
                us.append(span_us(calls_of(lib, [(lib.gdn_step if fused else lib.gdn_rule, p) for p in params], cases) * 2))
            row.append("T={} {:.2f} / {:.2f}; {:.2f}".format(tokens, *us))
        print(f"  B={batch:3d}  " + "   ".join(row), flush=True)


def times_layer(lib, hidden=2048, hk=16, hv=32, layers=6):
    """Whole layers, one after the other with weights and states of their own, in one graph."""
    print(f"\nlayer, hidden {hidden}, HK/HV {hk}/{hv}, bf16: µs a layer in a graph of {layers}: projections by gdn_linear"
          " (or cuBLAS) and the step; launches overlapped or not")
    width, value = (2 * hk + hv) * DIM + hv * DIM + 2 * hv, hv * DIM
    w_in, w_out = ([bf16(*shape) * 0.02 for _ in range(layers)] for shape in ((width, hidden), (hidden, value)))
    for batch in (1, 2, 4, 8, 16, 32, 64, 128):
        cases = [Case([1] * batch, hk, hv, seed=i) for i in range(layers)]
        buffers = [c.buffers() for c in cases]
        x = [bf16(batch, hidden) for _ in range(layers + 1)]
        proj, out = bf16(batch, width), bf16(batch, value)

        def linear(a, w, y, ours, overlap):
            if not ours:
                return torch.matmul(a, w.t(), out=y)
            p = fill(LinearParams, x=a, w=w, y=y, x_stride=a.stride(0), w_stride=w.stride(0), y_stride=y.stride(0), rows=batch,
                     inputs=w.shape[1], outputs=w.shape[0], dtype=CODES["bf16"], overlap=overlap)
            assert call(lib.gdn_linear, p) == OK

        def layer(i, ours, overlap):
            channels = cases[i].channels
            linear(x[i], w_in[i], proj, ours[0], overlap)
            p = cases[i].params(True, STEP_AUTO, buffers[i], overlap)
            p.x, p.z = columns(proj, 0, 0, 1), columns(proj, channels, DIM, 1)
            p.b, p.a = columns(proj, channels + value, 1, 1), columns(proj, channels + value + hv, 1, 1)
            p.out = columns(out, 0, DIM, 1)
            assert call(lib.gdn_step, p) == OK
            linear(out, w_out[i], x[i + 1], ours[1], overlap)

        row = []
        for name, ours, overlap in (("cuBLAS", (False, False), 0), ("cuBLAS, overlapped", (False, False), 1), ("ours", (True, True), 0),
                                    ("ours, overlapped", (True, True), 1), ("cuBLAS in, ours out, overlapped", (False, True), 1)):
            if any(ours) and batch > 32:
                continue
            row.append(f"{name} {graph_us([lambda i=i: layer(i, ours, overlap) for i in range(layers)]):.1f}")
        print(f"  B={batch:3d}  " + "; ".join(row), flush=True)


def main():
    args = harness.arguments(__doc__).parse_args()

    def check(lib):
        check_rule(lib, args.quick)
        check_step(lib, args.quick)
    harness.run(args, check, times)


if __name__ == "__main__":
    main()
