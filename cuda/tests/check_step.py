#!/usr/bin/env python3
"""The fused decode step, gdn_step, through the C ABI against float64: all variants, 1 to 16 tokens, states in f32 and bf16.

The times are of the step beside the kernels that it replaces, and of whole layers.
"""
import ctypes as C

import harness
import reference
import torch
from abi import (AUTO, CODES, DECODE_128, LINEAR_ROWS, OK, RECURRENT_128, STEP_AUTO, STEP_HEADS, STEP_NAMES, STEP_SPLIT, STEP_WHOLE, ConvParams,
                 LinearParams, NormParams, StepParams, columns, fill, sequences, slots, workspace)
from cases import every, rows, words
from check_rule import HEADS, IO
from harness import TYPES, WAYS, Output, bf16, call, expect, one_by_one, rows_of, verify
from rule_case import RuleCase
from timing import calls_of, cold_sets, compare

DIM = 128


class Case(RuleCase):
    """One projection [tokens, q | k | v | z] with its gates and states. `conv` and `norm` are the types of these weights."""
    by_sequence = True

    def __init__(self, lens, hk=2, hv=4, conv=None, norm="f32", sigmoid=False, gap=0, **kw):
        super().__init__(lens, hk, hv, DIM, DIM, slot_gap=8, x_frame=(0, gap), extra=hv * DIM, **kw)
        self.conv, self.norm, self.sigmoid, self.channels = conv or self.io, norm, sigmoid, (2 * hk + hv) * DIM
        self.conv_weight = (self.randn(self.channels, 4) * 0.5).to(TYPES[self.conv])
        self.norm_weight = (1 + 0.1 * self.randn(DIM)).to(TYPES[self.norm])
        self.conv_size = 3 * self.channels
        gap = self.pool.shape[1] - self.size
        self.conv_pool = self.randn(self.where.count, self.conv_size + gap).to(TYPES[self.io])

    def reference(self):
        if not self.referenced:
            x, self.kept = self.x[:, :self.channels].double(), []
            for i, slot in zip(self.live, self.in_slots):
                part, past = rows_of(self.lens)[i], self.conv_pool[slot, :self.conv_size].view(3, self.channels)
                x[part], kept = reference.conv(past, self.x[part, :self.channels], self.conv_weight)
                self.kept.append(kept.flatten())
            o, typical, state = self.walk(reference.rule, qkv=x.split([part.shape[1] for part in self.qkv], 1))
            z = self.x[self.index, self.channels:self.width].unflatten(-1, (self.hv, DIM))
            self.referenced = reference.gated_norm(o, z.nan_to_num(0.0), self.norm_weight, self.sigmoid), typical, state
        return self.referenced

    def buffers(self):
        super().buffers()
        self.conv_in = self.conv_pool.clone()
        self.conv_out = self.conv_in if self.in_place else torch.full_like(self.conv_pool, 7.0)

    def outputs(self, algo=AUTO):
        found, size = super().outputs(algo), self.conv_size
        kept = torch.stack(self.kept) if self.kept else self.conv_out[:0, :size]
        return [*found, Output("convolution state", self.conv_out, (self.out_slots, slice(size)), kept),
                *([] if self.in_place else [Output("input convolution states", self.conv_in)])]

    def params(self, lib, algo, overlap=0):
        view = lambda x, dim: columns(x, 0, dim, self.per_seq)
        stride = self.conv_pool.stride(0)
        return fill(StepParams, x=view(self.x, 0), z=view(self.x[:, self.channels:], DIM), out=view(self.o, DIM),
                    conv_weight=self.conv_weight, norm_weight=self.norm_weight, conv_in=self.conv_in, conv_out=self.conv_out,
                    conv_in_stride=stride, conv_out_stride=stride, conv_width=4, conv_dtype=CODES[self.conv],
                    norm_dtype=CODES[self.norm], sigmoid=int(self.sigmoid), overlap=overlap, norm_eps=1e-6, **self.fields(algo))

    def rule_params(self, lib, algo):
        return super().params(lib, algo)

    def algos(self, lib):
        """The variants that take this case here."""
        found = [STEP_AUTO]
        for algo in (STEP_WHOLE, STEP_SPLIT, STEP_HEADS):
            chosen = C.c_int32(-1)
            assert lib.gdn_step_choice(C.byref(self.params(lib, algo)), C.byref(chosen)) == OK
            found += [algo] * (chosen.value == algo)
        return found


def cases(quick):
    yield dict(lens=[1] * 3, hk=16, hv=32, slots="moved")
    yield from every(lens=[[1]], state=["f32", "bf16"])
    yield from [dict(lens=[5] * 3), dict(lens=[5, 0, 16], slots="shared")]
    if quick:
        return
    types = every(io=IO, state=["f32", "bf16"])
    batches = [dict(lens=[1]), dict(lens=[1] * 2, beta_scale=2.0, sigmoid=True, gap=8), dict(lens=[1] * 5, slots="shared", norm="io"),
               dict(lens=[1] * 9, l2norm=False, conv="f32"), dict(lens=[1] * 33)]
    yield from every(types, rows("hk hv", *HEADS), batches)
    yield from every(types, rows("slots hk hv", ("moved", 2, 4), ("shared", 1, 8)), lens=[[n] * 3 for n in (2, 3, 4, 8, 15, 16)])
    yield from every(types, lens=[[0, 1, 16, 7, 0]], hv=6, slots="moved")
    yield from every(rows("io gate", ("bf16", "f32"), ("bf16", "f16"), ("f16", "bf16"), ("f32", "bf16")), lens=[[1] * 4])
    yield from every(lens=[[1], [1] * 9, [1] * 64, [4] * 8], hk=16, hv=32, ways=WAYS)


def check_step(lib, args):
    for i, given in enumerate(cases(args.quick)):
        case = {**given}
        ways = case.pop("ways", harness.ONCE)
        if case.get("norm") == "io":
            case["norm"] = case["io"]
        c = Case(**case, seed=i)
        c.buffers()
        for algo in c.algos(lib):
            c.buffers()
            verify(lib, f"step {words(given)} {STEP_NAMES[algo]}", lib.gdn_step, c.params(lib, algo), c.outputs(), ways, after=c.after)


def check_status(lib, args):
    c = Case([1] * 2)
    c.buffers()
    expect("step", lib.gdn_step, lambda: c.params(lib, STEP_AUTO), {
        "BAD_DTYPE": one_by_one(io_dtype=[9], gate_dtype=[9], conv_dtype=[9], norm_dtype=[9], state_dtype=[2]),
        "BAD_HEADS": [dict(num_k_heads=3)],
        "BAD_CONV_WIDTH": [dict(conv_width=9)],
        "BAD_ALGO": one_by_one(conv_width=[3], head_k=[64], algo=[len(STEP_NAMES) + 1]) + [
            dict(tokens_per_seq=17, max_tokens_per_seq=17)],
        "BAD_LENGTH": [dict(num_seqs=-1)],
        "BAD_STRIDE": one_by_one(x__token_stride=[-1], conv_in_stride=[-1]),
        "NULL_POINTER": [dict(conv_weight=None)],
        "OK": [dict(num_seqs=0)]})


# ---- times ----

def launches(lib, batch, hk, hv, tokens=1, most=64):
    """{name: calls} of the step and of the kernels that it replaces, each on sets of its own."""
    found = {name: [] for name in ("rule", "step", "conv", "norm", "recurrent_128")}
    for seed in range(cold_sets(2 * batch * hv * DIM * DIM * 4, most=most)):
        c = Case([tokens] * batch, hk, hv, seed=seed)
        c.buffers()
        where, o = slots(None, batch, c.conv_size), columns(c.o, 0, DIM)
        found["conv"].append((lib.gdn_conv, fill(
            ConvParams, x=columns(c.x, 0, 0, tokens), y=columns(bf16(batch * tokens, c.channels), 0, 0, tokens), weight=c.conv_weight,
            state_in=c.conv_in, state_out=c.conv_in, in_slots=where, out_slots=where, seqs=sequences([tokens] * batch),
            channels=c.channels, width=4, io_dtype=CODES["bf16"], weight_dtype=CODES["bf16"], silu=1)))
        found["norm"].append((lib.gdn_norm, fill(
            NormParams, x=o, z=columns(c.x[:, c.channels:], 0, DIM), out=o, weight=c.norm_weight, tokens=batch * tokens, heads=hv, head_v=DIM,
            io_dtype=CODES["bf16"], weight_dtype=CODES["f32"], eps=1e-6)))
        for name, algo in (("rule", DECODE_128), ("recurrent_128", RECURRENT_128)):
            found[name].append((lib.gdn_rule, c.rule_params(None, algo)))
        found["step"].append((lib.gdn_step, c.params(None, STEP_AUTO)))
    for name in ("rule", "recurrent_128"):
        workspace(lib.gdn_rule_workspace, *(p for _, p in found[name]))
    return {name: calls_of(lib, every) for name, every in found.items()}


def layers(lib, batch, hidden=2048, hk=16, hv=32, count=6):
    """{name: calls of whole layers}, one after the other with weights and states of their own; one set of them."""
    width, value = (2 * hk + hv) * DIM + hv * DIM + 2 * hv, hv * DIM
    w_in, w_out = ([bf16(*shape) * 0.02 for _ in range(count)] for shape in ((width, hidden), (hidden, value)))
    cases = [Case([1] * batch, hk, hv, seed=i) for i in range(count)]
    for c in cases:
        c.buffers()
    x = [bf16(batch, hidden) for _ in range(count + 1)]
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
        p = cases[i].params(None, STEP_AUTO, overlap)
        p.x, p.z = columns(proj, 0, 0, 1), columns(proj, channels, DIM, 1)
        p.b, p.a = columns(proj, channels + value, 1, 1), columns(proj, channels + value + hv, 1, 1)
        p.out = columns(out, 0, DIM, 1)
        assert call(lib.gdn_step, p) == OK
        linear(out, w_out[i], x[i + 1], ours[1], overlap)

    kinds = {"cuBLAS": (False, False), "ours": (True, True), "cuBLAS in, ours out": (False, True)}
    return {f"{name}{', overlapped' * overlap}": [lambda i=i: layer(i, ours, overlap) for i in range(count)]
            for name, ours in kinds.items() for overlap in (0, 1) if batch <= LINEAR_ROWS or not any(ours)}


def times(lib, args):
    shapes = every(rows("hk hv", (16, 32)), batch=[1, 2, 4, 8, 16, 32, 64, 128, 256]) + every(
        rows("hk hv", (16, 48), (2, 8)), batch=[1, 4, 16, 64]) + every(
            rows("hk hv", (16, 32)), batch=[1, 4, 16, 64], tokens=[2, 4, 8, 16], most=24)
    nbytes = lambda case: 2 * case["batch"] * case["hv"] * DIM * DIM * 4
    compare("the step and the kernels that it replaces, bf16, cold L2", ((words(x), nbytes(x), launches(lib, **x)) for x in shapes))
    compare("whole layers, hidden 2048, HK/HV 16/32, bf16: projections by gdn_linear or cuBLAS, and the step",
            ((f"B={batch}", nbytes(dict(batch=batch, hv=32)) + 2 * 2048 * 16448, layers(lib, batch)) for batch in (1, 2, 4, 8, 16, 32, 64, 128)))


GROUPS = {"step": check_step, "status": check_status}

if __name__ == "__main__":
    harness.program(__doc__, GROUPS, times)
