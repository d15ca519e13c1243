#!/usr/bin/env python3
"""The fused decode step, gdn_step, through the C ABI against float64: all variants, 1 to 16 tokens, states in f32 and bf16."""
import ctypes as C

import harness
import reference
import torch
from abi import (AUTO, CHUNKED_SM80, CODES, OK, STEP_AUTO, STEP_HEADS, STEP_NAMES, STEP_SPLIT, STEP_WHOLE, StepParams, columns, fill)
from cases import CONSTANTS, every, rows
from check_rule import HEADS, IO
from harness import TYPES, WAYS, Launch, Output, call, expect, group, launch, one_by_one, report, rows_of, same
from rule_case import RuleCase, once

class Case(RuleCase):
    """One projection [tokens, q | k | v | z] with its gates and states. `conv` and `norm` are the types of these weights."""
    by_sequence = True

    def __init__(self, lens, hk=2, hv=4, k=128, v=128, conv=None, norm="f32", sigmoid=False, gap=0, **kw):
        super().__init__(lens, hk, hv, k, v, slot_gap=8, x_frame=(0, gap), extra=hv * v, **kw)
        self.conv, self.norm, self.sigmoid, self.channels = conv or self.io, norm, sigmoid, 2 * hk * k + hv * v
        self.conv_weight = (self.randn(self.channels, 4) * 0.5).to(TYPES[self.conv])
        self.norm_weight = (1 + 0.1 * self.randn(v)).to(TYPES[self.norm])
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
            z = self.x[self.index, self.channels:self.width].unflatten(-1, (self.hv, self.v))
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
        return fill(StepParams, x=view(self.x, 0), z=view(self.x[:, self.channels:], self.v), out=view(self.o, self.v),
                    conv_weight=self.conv_weight, norm_weight=self.norm_weight, conv_in=self.conv_in, conv_out=self.conv_out,
                    conv_in_stride=stride, conv_out_stride=stride, conv_width=4, conv_dtype=CODES[self.conv],
                    norm_dtype=CODES[self.norm], sigmoid=int(self.sigmoid), overlap=overlap, norm_eps=1e-6, **self.fields(algo))


def step(lib, algo=STEP_AUTO, **case):
    """A launch of gdn_step."""
    c = once(Case, **{**case, **({"norm": case["io"]} if case.get("norm") == "io" else {})})
    c.buffers()
    states = 2 * len(c.lens) * c.size * c.pool.element_size()
    return Launch(lib.gdn_step, c.params(lib, algo), c.outputs, after=c.after, keep=c, nbytes=states)


def by_variants(cases):
    """The cases, each by all variants: those that do not take it here choose themselves another one, and are left out."""
    return [{"seed": seed, **case, "algo": algo} for seed, case in enumerate(cases) for algo in (STEP_AUTO, STEP_WHOLE, STEP_SPLIT, STEP_HEADS)]


def check_step(lib, args):
    def taken(case):
        chosen = C.c_int32(-1)
        p = step(lib, **{name: x for name, x in case.items() if name != "ways"}).params
        assert lib.gdn_step_choice(C.byref(p), C.byref(chosen)) == OK
        return case["algo"] in (STEP_AUTO, chosen.value)

    table = by_variants(QUICK if args.quick else cases())
    group(step, lambda: filter(taken, table), filter(taken, table))(lib, args)


QUICK = [dict(lens=[1] * 3, hk=16, hv=32, slots="moved"), *every(lens=[[1]], state=["f32", "bf16"]), dict(lens=[5] * 3),
         dict(lens=[5, 0, 16], slots="shared"),
         *every(rows("lens slots", ([1] * 3, "moved"), ([5, 0, 16], "shared")), k=96, v=192, hk=3, hv=3, state=["f32", "bf16"])]


def cases():
    yield from QUICK
    types = every(io=IO, state=["f32", "bf16"])
    batches = [dict(lens=[1]), dict(lens=[1] * 2, beta_scale=2.0, sigmoid=True, gap=8), dict(lens=[1] * 5, slots="shared", norm="io"),
               dict(lens=[1] * 9, l2norm=False, conv="f32"), dict(lens=[1] * 33), *every(CONSTANTS, lens=[[1] * 3])]
    yield from every(types, rows("hk hv", *HEADS), batches)
    yield from every(types, rows("slots hk hv", ("moved", 2, 4), ("shared", 1, 8)), lens=[[n] * 3 for n in (2, 3, 4, 8, 15, 16)])
    yield from every(types, lens=[[0, 1, 16, 7, 0]], hv=6, slots="moved")
    other = dict(k=96, v=192)
    yield from every(types, rows("hk hv", (30, 30), (3, 3), (3, 6), (2, 6), (1, 4), (1, 8)), batches, **other)
    yield from every(types, rows("slots hk hv", ("moved", 3, 3), ("shared", 2, 4)), lens=[[n] * 3 for n in (2, 5, 16)] + [[0, 1, 16, 7, 0]], **other)
    yield from every(lens=[[1], [1] * 3, [1] * 32, [4] * 8], hk=30, hv=30, **other, ways=WAYS)
    yield from every(rows("io gate", ("bf16", "f32"), ("bf16", "f16"), ("f16", "bf16"), ("f32", "bf16")), lens=[[1] * 4])
    yield from every(lens=[[1], [1] * 9, [1] * 64, [4] * 8], hk=16, hv=32, ways=WAYS)


def check_copies(lib, args):
    """GDN_CHUNKED_SM80 without a token copies states. The step before it, which writes them, lets it begin while it runs."""
    for n, algo in ((64, STEP_AUTO), (2, STEP_AUTO), (64, STEP_WHOLE)):
        stepped, copied = Case([1] * n, hk=16, hv=32), RuleCase([0] * n, hk=16, hv=32, slots="apart")
        stepped.buffers()
        copied.buffers()
        copied.state_in = stepped.state_out
        first, second, differ = stepped.params(lib, algo), copied.params(lib, CHUNKED_SM80), 0
        for i in range(4 if args.quick else 40):
            stepped.state_out.copy_(stepped.pool)
            copied.state_out.fill_(float("nan"))
            status = launch(lambda: call(lib.gdn_step, first) or call(lib.gdn_rule, second), graph=i % 2 == 1)
            differ += status != OK or not same(copied.state_out, stepped.state_out)
        report(f"states of {n} sequences copied after {STEP_NAMES[algo]}", differ == 0, f"{differ} copies differ")


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


def times(args):
    return [("the step, bf16, HK/HV 16/32", step, every(lens=[[t] * n for t in (1, 4, 16) for n in (1, 2, 4, 8, 16, 32, 64, 128, 256)], hk=16, hv=32)),
            ("the step, other heads", step, every(rows("hk hv", (16, 48), (2, 8)), lens=[[1] * n for n in (1, 4, 16, 64)])),
            ("the step, K 96, V 192", step, every(state=["f32", "bf16"], lens=[[t] * n for t in (1, 4) for n in (1, 2, 4, 8, 16, 32, 64, 128)], hk=30, hv=30, k=96, v=192))]


GROUPS = {"step": check_step, "copies": check_copies, "status": check_status}

if __name__ == "__main__":
    harness.program(__doc__, GROUPS, times)
