#!/usr/bin/env python3
"""Checks gdn_quantized, gdn_quantized_many, gdn_quantized_pack and gdn_quantized_rows, through the C ABI, against the product in float64 with the
numbers that ggml's blocks stand for.

    python3 models/cuda/tests/check_quantized.py --only-time --shapes 4b --rows 1,4,8
    python3 models/cuda/tests/check_quantized.py --self-test    # the reference, without a GPU

An error is ||y - ref|| / ||ref||. The output's rounding alone makes it at most ulp / sqrt(12), with ulp at most 2^-7 of
the value in bf16, 2^-10 in f16 and 2^-23 in f32; of few values it may be any value's own at worst, sqrt(3) times that. x in fixed
point adds what Case.ref() says, the sums in f32 1e-5 at most. Outputs hold NaN before a launch, as does everything around x.
"""
import ctypes as C
import itertools
import math
import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), *[os.pardir] * 3, "cuda", "tests"))

import harness
import torch
from abi import CODES, NULL_POINTER, OK, QuantizedPackParams, QuantizedParams, QuantizedPart, QuantizedRowsParams, fill, stream
from ggml import BYTES, INPUTS, MULTIPLE, NAMES, SCALES, Blocks
from harness import (TYPES, WAYS, bf16, call, chain_repeats, expect, failures, framed, launch, normal, one_by_one,
                     only_inside, refused, report, rounding, same, u32)
from reference import linear, relative
from timing import graph_us, heading, span_us


def room(count):
    """Bytes at a multiple of 128, with others behind them."""
    buf = torch.full((count + 256,), 0xEE, dtype=torch.uint8, device=harness.device)
    return buf[-buf.data_ptr() % 128:]


class Packed:
    """Blocks, packed by the library."""

    def __init__(self, lib, blocks, paired=0):
        self.blocks, self.type, self.outputs, self.paired = blocks, NAMES[blocks.name], blocks.outputs, paired
        p = self.pack_params()
        size = C.c_int64(-1)
        assert lib.gdn_quantized_size(C.byref(p), C.byref(size)) == OK
        self.size = size.value
        tiles = -(-blocks.outputs // 16) * 16
        assert self.size == tiles * blocks.inputs // INPUTS[blocks.name] * BYTES[blocks.name], "as many bytes as the file has"
        self.bytes = room(self.size)
        p = self.pack_params()
        status = launch(lambda: call(lib.gdn_quantized_pack, p))
        refused(lib, f"pack {blocks.name}", status)
        report(f"pack {blocks.name}", bool((self.bytes[self.size:] == 0xEE).all()), "wrote behind its end", quiet=True)

    def pack_params(self):
        b = self.blocks
        return fill(QuantizedPackParams, **{"from": b.bytes}, to=getattr(self, "bytes", None), type=self.type,
                    outputs=b.outputs, inputs=b.inputs, paired=self.paired)

    def rows_params(self, y, dtype, ids=None):
        return fill(QuantizedRowsParams, w=self.bytes, ids=ids, y=y, y_stride=y.stride(0), type=self.type,
                    outputs=self.outputs, inputs=self.blocks.inputs, rows=y.shape[0], paired=self.paired, dtype=CODES[dtype])


def params(x, parts, y, dtype, overlap=0, swiglu=False, groups=(0, 0)):
    """`parts`: (bytes, type, outputs)."""
    array = (QuantizedPart * len(parts))(*[QuantizedPart(w.data_ptr(), kind, outputs) for w, kind, outputs in parts])
    p = fill(QuantizedParams, x=x, parts=C.addressof(array), y=y, x_stride=x.stride(0), y_stride=y.stride(0),
             rows=x.shape[0], num_parts=len(parts), inputs=x.shape[1], swiglu=int(swiglu), groups=groups[0], per_group=groups[1],
             dtype=CODES[dtype], overlap=overlap)
    p.kept = array, parts
    return p


class Case:
    def __init__(self, lib, rows, inputs, parts, dtype, gaps=(0, 0), seed=0, swiglu=False, outliers=False,
                 groups=(0, 0)):
        self.dtype, self.swiglu, self.groups = dtype, swiglu, groups
        self.parts = [Packed(lib, Blocks(name, outputs, inputs, inputs ** -0.5, seed + i))
                      for i, (name, outputs) in enumerate(parts)]
        outputs = sum(part.outputs for part in self.parts) // (2 if swiglu else 1)
        self.x_buf, self.x = framed(rows, inputs, gaps[0], dtype)
        self.y_buf, self.y = framed(rows, outputs, gaps[1], dtype)
        x = normal(seed)(rows, inputs)
        if outliers:
            x[:, ::97] *= 100
        self.x.copy_(x)

    def ref(self):
        """The products, and what the fixed point of x may make of them: steps of 1 / 32512 of the largest of 32, each off by
        1 / sqrt(12) of one as a rule, beside weights that are independent of them. Half as much again for many values, four
        times for few; SwiGLU has it in both products, of numbers of about size 1."""
        w = torch.cat([part.blocks.numbers() for part in self.parts])
        x = self.x.double()
        if self.groups[0]:
            x = x.reshape(x.shape[0], *self.groups, -1).transpose(1, 2).reshape(x.shape)
        ref = linear(x, w, self.swiglu)
        steps = x.reshape(x.shape[0], -1, 32).abs().amax(-1).square().sum().mul(32 / 12).sqrt() / 32512
        error = 3 * steps / x.norm() if self.swiglu else steps * w.norm() / math.sqrt(x.shape[1]) / ref.norm()
        return ref, float(error) * (1.5 if ref.numel() >= 1000 else 4)

    def params(self, overlap=0):
        return params(self.x, [(part.bytes, part.type, part.outputs) for part in self.parts], self.y, self.dtype, overlap,
                      self.swiglu, self.groups)

    def ref_many(self):
        """The products with numbers that are rounded to the dtype first. 3e-5: sums in f32, and a number may fall to the other side of a tie."""
        w = torch.cat([part.blocks.numbers(torch.float32).to(TYPES[self.dtype]) for part in self.parts])
        return linear(self.x.double(), w.double(), self.swiglu), 3e-5

    def run(self, f, overlap=0, graph=False):
        self.y_buf.fill_(math.nan)
        p = self.params(overlap)
        return launch(lambda: call(f, p), graph, replays=2), self.y_buf.clone()


def check_case(lib, case, more="", many=False):
    parts = "+".join(f"{part.blocks.name} {part.outputs}" for part in case.parts)
    name = f"{case.dtype} rows {case.x.shape[0]} inputs {case.x.shape[1]} -> {parts}{' swiglu' if case.swiglu else ''}{more}"
    f = lib.gdn_quantized_many if many else lib.gdn_quantized
    status, first = case.run(f)
    if refused(lib, name, status):
        return
    ref, of_x = case.ref_many() if many else case.ref()
    error, limit = relative(case.y, ref), rounding(case.dtype, ref.numel()) + of_x + 1e-5
    inside = only_inside(case.y_buf, case.y)
    equal = all(same(case.run(f, overlap, graph)[1], first) for overlap, graph in WAYS)
    report(name, error <= limit and inside and equal,
           f"{error:.2e} of {limit:.2e}, the same in all ways {equal}, inside {inside}", quiet=True)


FEW = 8    # rows for which gdn_quantized reads the weights once
ROWS = (1, 2, 3, 4, 5, 7, 8, 9, 17)
SHAPES_OF_ALL = ((2560, 1100), (256, 33), (256, 1), (512, 4096), (1024, 17), (4096, 2563), (9216, 300), (17408, 48))
LARGE = ((2560, 12352), (9216, 2560))


def check_products(lib):
    seeds = itertools.count(step=8)
    for name, (inputs, outputs), dtype in itertools.product(NAMES, SHAPES_OF_ALL, TYPES):
        for rows, gaps in zip(ROWS, itertools.cycle(((0, 0), (8, 3), (72, 37)))):
            check_case(lib, Case(lib, rows, inputs, [(name, outputs)], dtype, gaps, next(seeds), outliers=rows % 2 == 0))
    for name, (inputs, outputs), rows in itertools.product(NAMES, LARGE, (1, 3, 8)):
        check_case(lib, Case(lib, rows, inputs, [(name, outputs)], "bf16", seed=next(seeds)))
    for name, (inputs, outputs), rows in itertools.product(NAMES, ((2560, 9216), (512, 16), (1024, 3584), (5120, 272), (256, 17408)),
                                                          (1, 2, 4, 6, 8, 11)):
        check_case(lib, Case(lib, rows, inputs, [(name, 2 * outputs)], "bf16" if rows % 2 else "f16", (8, 5), next(seeds), True))
    for rows, parts in itertools.product((1, 2, 5, 8), ((("q4_K", 12288), ("q8_0", 64)), (("q8_0", 20), ("q6_K", 4000), ("q4_K", 5)),
                                                        (("q4_K", 8192), ("q4_K", 512), ("q6_K", 512)),
                                                        (("q6_K", 1), ("q8_0", 1), ("q4_K", 1), ("q8_0", 100)))):
        check_case(lib, Case(lib, rows, 2560, list(parts), "f16" if rows == 2 else "bf16", (0, 9), next(seeds)))
    for name, dtype, groups, rows in itertools.product(NAMES, ("bf16", "f32"), ((16, 2), (3, 8), (2, 48)), (1, 6)):
        case = Case(lib, rows, 128 * 2 * groups[0] * groups[1] // math.gcd(2, groups[0]), [(name, 100)], dtype, seed=next(seeds), groups=groups)
        check_case(lib, case, f" groups {groups}")
    for inputs in (128, 384, 896):
        check_case(lib, Case(lib, 3, inputs, [("q8_0", 77)], "bf16", seed=next(seeds)))
    print(f"{next(seeds) // 8} products, {len(failures)} failed", flush=True)


def check_many(lib):
    seeds = itertools.count(step=8)
    shapes = (2560, 1100), (256, 33), (256, 1), (1024, 17), (9216, 300)
    for name, (inputs, outputs), dtype in itertools.product(NAMES, shapes, ("bf16", "f16")):
        for rows, gaps in zip((1, 9, 17, 32, 40, 64, 100, 130), itertools.cycle(((0, 0), (8, 3), (72, 37)))):
            check_case(lib, Case(lib, rows, inputs, [(name, outputs)], dtype, gaps, next(seeds)), " many", True)
    for name, rows in itertools.product(NAMES, (16, 31, 64, 128)):
        for inputs, outputs in LARGE:
            check_case(lib, Case(lib, rows, inputs, [(name, outputs)], "bf16", seed=next(seeds)), " many", True)
        check_case(lib, Case(lib, rows, 2560, [(name, 2 * 1008)], "f16" if rows == 31 else "bf16", (8, 5), next(seeds), True), " many", True)
    for rows in (16, 40, 128):
        parts = [("q4_K", 8192), ("q6_K", 500), ("q8_0", 20), ("q4_K", 64)]
        check_case(lib, Case(lib, rows, 2560, parts, "bf16", (0, 9), next(seeds)), " many", True)
    for inputs in (128, 384):
        check_case(lib, Case(lib, 20, inputs, [("q8_0", 77)], "bf16", seed=next(seeds)), " many", True)
    for name, at in ((name, at) for name in NAMES for at in SCALES[name]):
        case = Case(lib, 20, 1024, [(name, 70)], "bf16", seed=at)
        case.parts[0].blocks.put(35, 1, at, math.nan)
        case.parts[0] = Packed(lib, case.parts[0].blocks)
        case.x[7, 1023] = math.nan
        status, _ = case.run(lib.gdn_quantized_many)
        bad = case.y.isnan()
        report(f"many, NaN in {name} at {at} and in x", status == OK and bool(bad[:, 35].all() and bad[7].all()) and int(bad.sum()) == 20 + 69,
               str(bad.sum(0)), quiet=True)
    every = [Packed(lib, Blocks("q4_K", 1024, 1024, 1 / 32, seed)) for seed in range(6)]
    chain_repeats("chain many", lambda i, x, y, overlap: call(lib.gdn_quantized_many, params(
        x, [(every[i % 6].bytes, every[i % 6].type, 1024)], y, "bf16", overlap)), torch.randn(20, 1024, device="cuda").bfloat16())
    print(f"{next(seeds) // 8} products of many rows, {len(failures)} failed", flush=True)


def check_quick(lib):
    """Every kernel: pack and rows of each type; products of all types in a launch, of each dtype and number of rows, clusters."""
    for name, dtype in zip(NAMES, TYPES):
        packed = Packed(lib, Blocks(name, 33, 256, 1.0, 1))
        buf, y = framed(33, 256, 16, dtype)
        status = launch(lambda: call(lib.gdn_quantized_rows, packed.rows_params(y, dtype)))
        report(f"rows {name} {dtype}", status == OK and same(y, packed.blocks.numbers(torch.float32).to(TYPES[dtype])) and
               only_inside(buf, y), str(status), quiet=True)
    for dtype, rows in itertools.product(TYPES, (1, 2, 3, 5)):
        check_case(lib, Case(lib, rows, 512, [("q8_0", 20), ("q6_K", 33), ("q4_K", 50)], dtype, (8, 3)))
    for name, rows in zip(NAMES, (1, 3, 8)):
        check_case(lib, Case(lib, rows, 1024, [(name, 64)], "bf16", swiglu=True))
        check_case(lib, Case(lib, rows, 9216, [(name, 40)], "bf16", (0, 5)))
    for (name, dtype), rows in itertools.product((("q4_K", "bf16"), ("q6_K", "f16"), ("q8_0", "bf16"), ("q4_K", "f16")), (3, 20, 40, 100)):
        check_case(lib, Case(lib, rows, 1024, [(name, 64)], dtype, swiglu=rows == 40), " many", True)


def check_rows(lib):
    """Bit for bit: each number is rounded to f32, and then once."""
    for name, dtype, (outputs, inputs), gap in itertools.product(NAMES, TYPES, ((1, 256), (33, 768), (300, 2560)), (0, 16)):
        packed = Packed(lib, Blocks(name, outputs, inputs, 1.0, inputs))
        want = packed.blocks.numbers(torch.float32).to(TYPES[dtype])
        ids = [0, outputs - 1, outputs // 2, outputs, 0xFFFFFFFF, outputs // 3]
        taken = torch.cat([want, torch.zeros_like(want[:1])])[[min(i, outputs) for i in ids]]
        for numbers, expected in ((None, want), (u32(ids), taken), (None, want[:outputs // 2])):
            buf, y = framed(expected.shape[0], inputs, gap, dtype)
            status = launch(lambda: call(lib.gdn_quantized_rows, packed.rows_params(y, dtype, numbers)))
            report(f"rows {name} {dtype} {outputs}x{inputs} gap {gap} ids {numbers is not None}",
                   status == OK and same(y, expected) and only_inside(buf, y), str(status), quiet=True)


    for name, (paired, matrices) in itertools.product(NAMES, ((8, 5), (24, 2), (512, 3))):    # as before they were packed, and in the order packed
        packed = Packed(lib, Blocks(name, 2 * paired * matrices, 512, 1.0, paired), paired)
        want = packed.blocks.numbers(torch.float32).bfloat16()
        alternating = want.view(matrices, 2, paired // 8, 8, -1).transpose(1, 2).reshape(want.shape)
        for is_paired, expected in ((paired, want), (0, alternating)):
            packed.paired = is_paired
            buf, y = framed(*want.shape, 0, "bf16")
            status = launch(lambda: call(lib.gdn_quantized_rows, packed.rows_params(y, "bf16")))
            report(f"rows {name} paired {paired} {is_paired}", status == OK and same(y, expected) and only_inside(buf, y), str(status), quiet=True)


def check_nan(lib):
    """A NaN in a scale shows in its output alone, one in x or an infinity in its row alone; zeros are zeros."""
    for name, at in ((name, at) for name in NAMES for at in SCALES[name]):
        case = Case(lib, 3, 1024, [(name, 70)], "bf16", seed=at)
        case.parts[0].blocks.put(35, 1, at, math.nan)
        case.parts[0] = Packed(lib, case.parts[0].blocks)
        status, _ = case.run(lib.gdn_quantized)
        bad = case.y.isnan()
        report(f"NaN in {name} at {at}", status == OK and bool(bad[:, 35].all()) and int(bad.sum()) == 3, str(bad.sum(0)), quiet=True)
    for name, dtype, value in itertools.product(NAMES, ("bf16", "f16"), (math.nan, math.inf, -math.inf)):
        case = Case(lib, 6, 1024, [(name, 70)], dtype)
        case.x[2, 1023], case.x[4] = value, 0
        status, _ = case.run(lib.gdn_quantized)
        bad = case.y.isnan()
        report(f"{value} in x, {name} {dtype}", status == OK and bool(bad[2].all()) and int(bad.sum()) == 70 and
               bool((case.y[4] == 0).all()), str(bad.sum(1)), quiet=True)


def check_chain(lib):
    for name, dtype, rows, hidden in itertools.product(NAMES, ("bf16",), (1, 5), (1024, 4096)):
        every = [Packed(lib, Blocks(name, hidden, hidden, hidden ** -0.5, seed)) for seed in range(6)]
        start = torch.randn(rows, hidden, device="cuda").to(TYPES[dtype])
        link = lambda i, x, y, overlap: call(lib.gdn_quantized, params(
            x, [(every[i % 6].bytes, every[i % 6].type, hidden)], y, dtype, overlap))
        chain_repeats(f"chain {name} {dtype} rows {rows} hidden {hidden}", link, start)


def check_arguments(lib):
    case = Case(lib, 4, 512, [("q4_K", 64)], "bf16")
    packed, x = case.parts[0], case.x.data_ptr()
    expect("products", lib.gdn_quantized, case.params, {
        "BAD_DTYPE": one_by_one(dtype=[-1, 7]), "BAD_LENGTH": one_by_one(rows=[-1], inputs=[0], num_parts=[-1, 5], groups=[-1]),
        "NULL_POINTER": one_by_one(x=[None], y=[None], parts=[None]),
        "BAD_ALGO": one_by_one(inputs=[384], x=[x + 2], x_stride=[516], groups=[4]) + [dict(groups=3, per_group=1), dict(groups=64, per_group=2)], "BAD_STRIDE": one_by_one(x_stride=[-8], y_stride=[-1]),
        "OK": [dict(rows=0, x=None), dict(num_parts=0, y=None)]})
    expect("many", lib.gdn_quantized_many, case.params, {
        "BAD_DTYPE": one_by_one(dtype=[CODES["f32"], 7]), "BAD_LENGTH": one_by_one(rows=[-1]), "NULL_POINTER": one_by_one(x=[None], parts=[None]),
        "BAD_ALGO": [dict(groups=2, per_group=2)] + one_by_one(x=[x + 2], x_stride=[516]), "OK": [dict(rows=0, x=None), dict(num_parts=0, y=None)]})
    w = packed.bytes
    for want, parts, swiglu in (("BAD_DTYPE", [(w, 3, 64)], 0), ("BAD_LENGTH", [(w, packed.type, -1)], 0),
                                ("BAD_ALGO", [(w[16:], packed.type, 64)], 0), ("BAD_ALGO", [(w, packed.type, 48)], 1),
                                ("BAD_ALGO", [(w, packed.type, 32)] * 2, 1), ("OK", [(w, packed.type, 0), (w, packed.type, 16)], 0)):
        expect(f"parts {want}", lib.gdn_quantized, lambda: params(case.x, parts, case.y, "bf16", 0, swiglu), {want: [{}]})
    expect("pack", lib.gdn_quantized_pack, packed.pack_params, {
        "BAD_DTYPE": one_by_one(type=[-1, 3]), "BAD_LENGTH": one_by_one(outputs=[-1], inputs=[0]),
        "NULL_POINTER": [dict(to=None), {"from": None}], "BAD_ALGO": one_by_one(inputs=[128], to=[w.data_ptr() + 16], paired=[4, 24]),
        "OK": [dict(outputs=0)]})
    y = torch.empty(4, 512, device="cuda", dtype=torch.bfloat16)
    expect("rows", lib.gdn_quantized_rows, lambda: packed.rows_params(y, "bf16"), {
        "BAD_DTYPE": one_by_one(dtype=[-1], type=[3]), "BAD_LENGTH": one_by_one(rows=[65, -1]), "BAD_STRIDE": one_by_one(y_stride=[-8]),
        "NULL_POINTER": one_by_one(w=[None], y=[None]), "BAD_ALGO": one_by_one(y_stride=[516], y=[y.data_ptr() + 2], paired=[32]),
        "OK": [dict(rows=0)]})
    for f in (lib.gdn_quantized, lib.gdn_quantized_many, lib.gdn_quantized_pack, lib.gdn_quantized_rows):
        report("arguments null", f(None, stream()) == NULL_POINTER, quiet=True)


def self_test():
    """Blocks of a few known bytes."""
    for name in NAMES:
        blocks = Blocks(name, 2, 512, 1.0, 1)
        for at in SCALES[name]:
            blocks.put(slice(None), slice(None), at, 0.5)
        n, b = blocks.numbers(), blocks.bytes.int()
        if name == "q8_0":
            assert n[1, 40] == 0.5 * (b[1, 1, 2 + 8] - 256 * (b[1, 1, 2 + 8] > 127))
        elif name == "q4_K":    # input 100 is in the upper nibbles of the second 32 bytes, input 200 in the lower of the last
            s = b[1, 1, 4:16]
            assert n[1, 256 + 100] == 0.5 * (s[3] & 63) * (b[1, 1, 16 + 32 + 4] >> 4) - 0.5 * (s[7] & 63)
            scale, minimum = s[10] & 15 | s[2] >> 6 << 4, s[10] >> 4 | s[6] >> 6 << 4
            assert n[1, 256 + 200] == 0.5 * scale * (b[1, 1, 16 + 96 + 8] & 15) - 0.5 * minimum
        else:                   # input 200: the upper half's third quarter
            scale = b[1, 1, 192 + 12] - 256 * (b[1, 1, 192 + 12] > 127)
            q = (b[1, 1, 64 + 8] >> 4) | (b[1, 1, 128 + 32 + 8] >> 4 & 3) << 4
            assert n[1, 256 + 200] == 0.5 * scale * (q - 32)


# inputs, outputs, swiglu
SHAPES = {
    "4b": ((2560, 9216, 1), (2560, 18432, 0), (9216, 2560, 0), (2560, 12352, 0), (4096, 2560, 0), (2560, 10240, 0),
           (2560, 248320, 0)),
    "35b": ((2048, 12352, 0), (4096, 2048, 0), (2048, 512, 1), (512, 2048, 0)),
    "27b": ((5120, 17408, 1), (17408, 5120, 0), (5120, 16480, 0), (6144, 5120, 0)),
}


def times(lib, args):
    rate = heading("bf16, cold L2; us: kernels (CUPTI) / graph / graph with overlap; the floor is all bytes at the copy rate, "
                   "and % that rate has of the kernels' time, and of the time in a graph with overlap")
    for name, shape_set in itertools.product(args.types, args.shapes):
        for inputs, outputs, swiglu in SHAPES[shape_set]:
            weights = 2 * outputs if swiglu else outputs
            nbytes = -(-weights // 16) * 16 * inputs // INPUTS[name] * BYTES[name]
            sets = int(2.4e8 / nbytes) + 2
            every = [torch.randint(0, 256, (nbytes + 128,), device="cuda", dtype=torch.uint8) for _ in range(sets)]
            every = [buf[-buf.data_ptr() % 128:] for buf in every]
            repeat = max(1, min(64, int(2e9 / nbytes)) // sets)
            line = f"  {name} {inputs:5d} -> {outputs:6d}{' swiglu' if swiglu else '       '} {nbytes / 1e6:6.1f} MB, floor {nbytes / rate * 1e6:7.2f}:"
            for rows in args.rows:
                x, y = bf16(rows, inputs), bf16(rows, outputs)

                f = lib.gdn_quantized_many if rows > FEW else lib.gdn_quantized

                def ours(overlap):
                    calls = [params(x, [(w, NAMES[name], weights)], y, "bf16", overlap, swiglu) for w in every]
                    return [lambda p=p: call(f, p) for p in calls] * repeat

                kernels, overlapped = span_us(ours(0)), graph_us(ours(1))
                share = lambda us: 100 * nbytes / us / rate * 1e6
                line += f"  | rows {rows} {kernels:7.2f} / {graph_us(ours(0)):7.2f} / {overlapped:7.2f}  {share(kernels):3.0f} {share(overlapped):3.0f} %"
            print(line, flush=True)
            del every


def check(lib, args):
    if args.quick:
        return check_quick(lib)
    check_arguments(lib)
    check_rows(lib)
    check_nan(lib)
    check_products(lib)
    check_many(lib)
    check_chain(lib)


def main():
    words = lambda text: text.split(",")
    harness.program(__doc__, check, times, models=True, self_test=self_test, options=[
        ("--shapes", dict(type=words, default=["4b"], help="of " + ", ".join(SHAPES))),
        ("--types", dict(type=words, default=list(NAMES), help="of " + ", ".join(NAMES))),
        ("--rows", dict(type=lambda text: [int(rows) for rows in words(text)], default=[1, 2, 4, 8]))])


if __name__ == "__main__":
    main()
