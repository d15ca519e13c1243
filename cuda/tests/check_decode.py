#!/usr/bin/env python3
"""The decode kernels against float64: GDN_DECODE_128 and the fused step, states in f32 and bf16, 1 to 16 tokens.

The times are of the fused step next to the kernels it replaces.
"""
import ctypes as C

import harness
import reference
import torch
from abi import (ALGO_NAMES, AUTO, CODES, DECODE_128, LINEAR_ROWS, OK, RECURRENT, RECURRENT_128, STEP_AUTO, STEP_HEADS,
                 STEP_NAMES, STEP_SPLIT, STEP_WHOLE, ConvParams, LinearParams, NormParams, StepParams, columns, fill, sequences, slots,
                 workspace)
from harness import (O_BOUND, TYPES, WAYS, bf16, call, expect, launch, nan, one_by_one, refused, report, rows_of, same,
                     same_outside)
from reference import relative
from rule_case import RuleCase
from timing import calls_of, cold_sets, graph_us, heading, often, span_us

# A bf16 state is the f32 result rounded once: half a unit in the last of 8 bits, uniform over a binade, is 1.7e-3 RMS.
STATE_BOUND = {"f32": 1e-5, "bf16": 2e-3}
DIM = 128


class Case(RuleCase):
    """One projection [tokens, q | k | v | z] with its gates and states, for the rule alone or for the fused step. `conv` and
    `norm` are the types of these weights, `token_states` asks for the state after every token."""

    def __init__(self, lens, hk, hv, conv=None, norm=None, varlen=False, slots="identity", sigmoid=False, token_states=False,
                 gap=0, **kw):
        super().__init__(lens, hk, hv, DIM, DIM, varlen=varlen, slots=slots, slot_gap=8, x_frame=(0, gap),
                         extra=hv * DIM, **kw)
        self.conv, self.norm, self.sigmoid, self.token_states = conv or self.io, norm or "f32", sigmoid, token_states
        self.channels, self.packed, self.total = (2 * hk + hv) * DIM, rows_of(lens), sum(lens)
        self.conv_weight = (self.randn(self.channels, 4) * 0.5).to(TYPES[self.conv])
        self.norm_weight = (1 + 0.1 * self.randn(DIM)).to(TYPES[self.norm])
        self.conv_size = 3 * self.channels
        gap = self.pool.shape[1] - self.size
        self.conv_pool = self.randn(self.where.count, self.conv_size + gap).to(TYPES[self.io])

    def expected(self, fused):
        """o [token, HV, V] and the states after each token [token, HV, V, K] of live sequences, their final states, and their
        convolution states."""
        qkv, convs = self.qkv, []
        if fused:
            x = self.x[:, :self.channels].double()
            for i, slot in zip(self.live, self.in_slots()):
                rows, past = self.packed[i], self.conv_pool[slot, :self.conv_size].view(3, self.channels)
                x[rows], kept = reference.conv(past, self.x[rows, :self.channels], self.conv_weight)
                convs.append(kept)
            qkv = x.split([part.shape[1] for part in qkv], 1)
        ref = self.walk(reference.rule, every=1, qkv=qkv)
        o, states = ref.o[ref.within], None
        if fused:
            z = self.x[ref.index[ref.within], self.channels:self.width].unflatten(1, (self.hv, DIM))
            o = reference.gated_norm(o, z, self.norm_weight, self.sigmoid)
        if self.token_states:
            states = torch.stack(ref.states, 1)[ref.within]
        return o, states, ref.final, convs

    def buffers(self, checkpoint=0):
        b = super().buffers()
        b.conv_in = self.conv_pool.clone()
        b.conv_out = b.conv_in if self.in_place else torch.full_like(self.conv_pool, 7.0)
        b.before["conv_out"] = b.conv_out.clone()
        b.token_states = nan(self.total, self.size, dtype=self.state) if self.token_states else None
        return b

    def step_params(self, b, algo, overlap=0):
        view = lambda x, dim: columns(x, 0, dim, self.per_seq)
        stride = self.conv_pool.stride(0)
        return fill(StepParams, x=view(self.x, 0), z=view(self.x[:, self.channels:], DIM), out=view(b.o, DIM),
                    conv_weight=self.conv_weight, norm_weight=self.norm_weight, conv_in=b.conv_in, conv_out=b.conv_out,
                    conv_in_stride=stride, conv_out_stride=stride, conv_width=4, conv_dtype=CODES[self.conv],
                    norm_dtype=CODES[self.norm], sigmoid=int(self.sigmoid), overlap=overlap, norm_eps=1e-6,
                    **self.fields(b, algo))

    def run(self, lib, fused, algo, overlap=0, graph=False):
        """(status, buffers) of a launch."""
        b = self.buffers()
        if not fused:
            return self.launch(lib, b, algo, graph=graph), b
        p, b.overrun = self.step_params(b, algo, overlap), False
        return launch(lambda: call(lib.gdn_step, p), graph), b

    def check(self, lib, name, fused, algos, names):
        ref_o, ref_states, finals, convs = self.expected(fused)
        tokens = self.rows_of(self.live)
        for algo in algos:
            label = f"{'step' if fused else 'rule'} {name} {self.io}/{self.state} {names[algo]}"
            status, b = self.run(lib, fused, algo)
            if refused(lib, label, status):
                continue
            e_o = relative(b.o[tokens].view(-1, self.hv, DIM), ref_o) if len(tokens) else 0.0
            got = b.state_out[self.out_slots, :self.size]
            e_s = max((relative(state.view(self.shape), final) for state, final in zip(got, finals)), default=0.0)
            wrong = self.wrong(b)
            left = torch.ones_like(b.conv_out, dtype=torch.bool)
            if fused:
                left[self.out_slots, :self.conv_size] = False
                if not all(torch.equal(b.conv_out[slot, :self.conv_size], kept.flatten())
                           for slot, kept in zip(self.out_slots, convs)):
                    wrong.append("convolution state")
            if not same_outside(b.conv_out, b.before["conv_out"], left):
                wrong.append("wrote outside: convolution states")
            if not self.in_place and not same(b.conv_in, self.conv_pool):
                wrong.append("wrote its input: convolution states")
            if self.token_states:
                lens = [self.lens[i] for i in self.live]
                last = [self.packed[i].stop - 1 for i in self.live if self.lens[i]]
                each = b.token_states[tokens].view(-1, *self.shape).split(lens), ref_states.split(lens)
                e_s = max([e_s, *(relative(state, want) for state, want in zip(*each) if len(state))])
                if not b.token_states[self.rows_of(self.where.padding)].isnan().all():
                    wrong.append("token states of padding")
                if not torch.equal(b.token_states[last], got[torch.tensor(lens) > 0]):
                    wrong.append("last token state is not the final one")
            ok = e_o <= O_BOUND[self.io] and e_s <= STATE_BOUND[self.state] and not wrong
            report(label, ok, f"o {e_o:.1e} state {e_s:.1e} {', '.join(wrong)}")


HEADS = ((16, 16), (16, 32), (16, 48), (16, 64), (2, 8), (1, 8), (4, 8))
GATES = (("bf16", "f32"), ("bf16", "f16"), ("f16", "bf16"), ("f32", "bf16"))


def check_rule(lib, quick):
    def case(name, lens, hk, hv, **kw):
        Case(lens, hk, hv, **kw).check(lib, name, False, [DECODE_128, AUTO, RECURRENT_128, RECURRENT], ALGO_NAMES)

    case("B=40 16/32 slots", [1] * (3 if quick else 40), 16, 32, slots="moved")
    check_both(case, quick, (1, 2, 5, 9))


def step_algos(lib, case):
    p = case.step_params(case.buffers(), STEP_AUTO)
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

    case("B=3 16/32 slots", [1] * 3, 16, 32, slots="moved")
    check_both(case, quick, (1, 2, 5, 9, 33), step=True)


def check_both(case, quick, batches, step=False):
    """The cases of the rule and of the step; the step's differ in what it alone has."""
    case("B=1", [1], 2, 4)
    case("B=1", [1], 2, 4, state="bf16")
    case("B=3x5 tokens", [5] * 3, 2, 4, token_states=True)
    case("B=3 varlen", [5, 0, 16], 2, 4, varlen=True, token_states=True, slots="shared")
    if quick:
        return
    for io in ("bf16", "f16", "f32"):
        for state in ("f32", "bf16"):
            types = dict(io=io, state=state)
            for hk, hv in HEADS:
                for batch in batches:
                    more = dict(sigmoid=batch == 2, conv="f32" if batch == 9 else None, norm=io if batch == 5 else None,
                                gap=8 * (batch == 2)) if step else {}
                    case(f"{hk}/{hv} B={batch}", [1] * batch, hk, hv, slots="shared" if batch == 5 else "identity",
                         beta_scale=2.0 if batch == 2 else 1.0, l2norm=batch != 9, seed=batch, **types, **more)
            for tokens in (2, 3, 4, 8, 15, 16):
                case(f"3x{tokens}", [tokens] * 3, 2, 4, token_states=True, slots="moved", seed=tokens, **types)
                if step:
                    case(f"3x{tokens} 1/8", [tokens] * 3, 1, 8, slots="shared", seed=tokens, **types)
            case("varlen", [0, 1, 16, 7, 0], 2, 6, varlen=True, token_states=True, slots="moved", **types)
            if not step:
                case("one token states", [1] * 3, 2, 4, token_states=True, slots="shared", **types)
    for io, gate in GATES:
        case(f"{gate} gates", [1] * 4, 2, 4, io=io, gate=gate)


def check_repeats(lib):
    """The same bits again, from a graph, and with the launch overlapped."""
    written = lambda b: [b.state_in, b.state_out, b.conv_in, b.conv_out, b.o]
    for lens in ([1], [1] * 9, [1] * 64, [4] * 8):
        c = Case(lens, 16, 32)
        for algo in step_algos(lib, c):
            _, first = c.run(lib, True, algo)
            for overlap, graph in WAYS:
                ok = same(written(first), written(c.run(lib, True, algo, overlap, graph)[1]))
                report(f"step {len(lens)}x{lens[0]} {STEP_NAMES[algo]} again, overlap {overlap}, graph {graph}", ok,
                       "same bits")
        ok = same(written(c.run(lib, False, AUTO)[1]), written(c.run(lib, False, AUTO, graph=True)[1]))
        report(f"rule {len(lens)}x{lens[0]} again from a graph", ok, "same bits")


def check_status(lib):
    c = Case([1] * 2, 2, 4)
    b = c.buffers()
    expect("step", lib.gdn_step, lambda: c.step_params(b, STEP_AUTO), {
        "BAD_DTYPE": one_by_one(io_dtype=[9], gate_dtype=[9], conv_dtype=[9], norm_dtype=[9], state_dtype=[2]),
        "BAD_HEADS": [dict(num_k_heads=3)],
        "BAD_CONV_WIDTH": [dict(conv_width=9)],
        "BAD_ALGO": one_by_one(conv_width=[3], head_k=[64], algo=[len(STEP_NAMES) + 1]) + [
            dict(seqs__tokens_per_seq=17, seqs__max_tokens_per_seq=17)],
        "BAD_LENGTH": [dict(seqs__num_seqs=-1)],
        "BAD_STRIDE": one_by_one(x__token_stride=[-1], conv_in_stride=[-1]),
        "NULL_POINTER": [dict(conv_weight=None)],
        "OK": [dict(seqs__num_seqs=0)]})


# ---- times ----

def times(lib, args):
    rate = heading("µs of kernel time (CUPTI), cold L2, bf16 inputs")
    print("| HK/HV | B | floor | rule | step | step / rule | conv + rule + norm | rule, bf16 state | of f32 |")
    print("|---|---|---|---|---|---|---|---|---|")
    for hk, hv in ((16, 32), (16, 48), (2, 8)):
        for batch in (1, 2, 4, 8, 16, 32, 64, 128, 256) if hv == 32 else (1, 4, 16, 64):
            nbytes = 2 * batch * hv * DIM * DIM * 4
            launches = {name: [] for name in ("rule", "step", "conv", "norm", "bf16")}
            for i in range(cold_sets(nbytes)):
                c, h = (Case([1] * batch, hk, hv, state=state, seed=i) for state in ("f32", "bf16"))
                b = c.buffers()
                where, o = slots(None, batch, c.conv_size), columns(b.o, 0, DIM)
                conv = fill(ConvParams, x=columns(c.x, 0, 0, 1), y=columns(bf16(batch, c.channels), 0, 0, 1),
                            weight=c.conv_weight, state_in=b.conv_in, state_out=b.conv_in, in_slots=where, out_slots=where,
                            seqs=sequences([1] * batch), channels=c.channels, width=4, io_dtype=CODES["bf16"],
                            weight_dtype=CODES["bf16"], silu=1)
                norm = fill(NormParams, x=o, z=columns(c.x, c.channels, DIM), out=o, weight=c.norm_weight, tokens=batch,
                            heads=hv, head_v=DIM, io_dtype=CODES["bf16"], weight_dtype=CODES["f32"], eps=1e-6)
                launches["rule"].append((lib.gdn_rule, c.params(b, AUTO)))
                launches["step"].append((lib.gdn_step, c.step_params(b, STEP_AUTO)))
                launches["conv"].append((lib.gdn_conv, conv))
                launches["norm"].append((lib.gdn_norm, norm))
                launches["bf16"].append((lib.gdn_rule, h.params(h.buffers(), AUTO)))
            for name in ("rule", "bf16"):
                workspace(lib.gdn_rule_workspace, *(p for _, p in launches[name]))
            t = {name: span_us(often(calls_of(lib, some), 60)) for name, some in launches.items()}
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
                params = [c.step_params(b, algo) if fused else c.params(b, algo) for c, b in zip(cases, buffers)]
                if not fused:
                    workspace(lib.gdn_rule_workspace, *params)
                us.append(span_us(calls_of(lib, [(lib.gdn_step if fused else lib.gdn_rule, p) for p in params]) * 2))
            row.append("T={} {:.2f} / {:.2f}; {:.2f}".format(tokens, *us))
        print(f"  B={batch:3d}  " + "   ".join(row), flush=True)


# (name, whether the projections in and out are by gdn_linear, overlap)
LAYERS = (("cuBLAS", (False, False), 0), ("cuBLAS, overlapped", (False, False), 1), ("ours", (True, True), 0),
          ("ours, overlapped", (True, True), 1), ("cuBLAS in, ours out, overlapped", (False, True), 1))


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
            p = cases[i].step_params(buffers[i], STEP_AUTO, overlap)
            p.x, p.z = columns(proj, 0, 0, 1), columns(proj, channels, DIM, 1)
            p.b, p.a = columns(proj, channels + value, 1, 1), columns(proj, channels + value + hv, 1, 1)
            p.out = columns(out, 0, DIM, 1)
            assert call(lib.gdn_step, p) == OK
            linear(out, w_out[i], x[i + 1], ours[1], overlap)

        row = [f"{name} {graph_us([lambda i=i: layer(i, ours, overlap) for i in range(layers)]):.1f}"
               for name, ours, overlap in LAYERS if batch <= LINEAR_ROWS or not any(ours)]
        print(f"  B={batch:3d}  " + "; ".join(row), flush=True)


def check(lib, args):
    check_rule(lib, args.quick)
    check_step(lib, args.quick)
    if not args.quick:
        check_repeats(lib)
        check_status(lib)


def main():
    harness.program(__doc__, check, times)


if __name__ == "__main__":
    main()
